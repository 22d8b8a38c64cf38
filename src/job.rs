//! What is enqueued: a [`Job`] type of your own, or a [`NewJob`] put together by hand.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::retry::Backoff;

/// A job type: its fields are the payload, its [`KIND`](Job::KIND) says which handler runs it.
///
/// ```
/// use posthouse::Job;
/// #[derive(serde::Serialize, serde::Deserialize)]
/// struct Summarize { text: String }
/// impl Job for Summarize { const KIND: &'static str = "summarize"; }
/// ```
pub trait Job: Serialize + DeserializeOwned + Send + 'static {
    /// The kind: 1 to 200 bytes, no control characters. Stored with every job, so renaming it orphans queued jobs.
    const KIND: &'static str;
    /// Attempts before the job becomes a dead letter. `None`: the default of the database, 5.
    const MAX_ATTEMPTS: Option<u32> = None;
    /// Longest time one attempt may take. `None`: no limit (the lease is renewed for as long as the worker lives).
    const TIMEOUT: Option<Duration> = None;

    /// How long to wait after a failed attempt.
    fn backoff() -> Backoff {
        Backoff::default()
    }
}

/// How long a dedupe key stands for its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DedupeFor {
    /// Until the job is done, failed or cancelled.
    UntilFinal,
    /// For this long from the enqueue, whatever becomes of the job.
    Window(Duration),
}

/// What becomes of an enqueue whose dedupe key is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DedupePolicy {
    /// The job that holds the key stands for it, as it is: the answer names that one. The default.
    Keep,
    /// It is refused: [`Error::is_duplicate`](crate::Error::is_duplicate), with the holder named.
    Reject,
    /// The job that waits in line gets its payload, queue, priority and times. One that runs already is kept, and the answer says so.
    Replace,
    /// Where the holder waits in line, as `Replace`. Where it runs, the new job waits until that is final and runs then: one more at most,
    /// with what the last enqueue brought.
    Rerun,
    /// As `Keep`, if the payload is that of the holder; else refused ([`Error::is_duplicate`](crate::Error::is_duplicate)).
    Same,
}

impl DedupePolicy {
    /// As SQL, JSON and the command line spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Reject => "reject",
            Self::Replace => "replace",
            Self::Rerun => "rerun",
            Self::Same => "same",
        }
    }
}

impl std::str::FromStr for DedupePolicy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Keep, Self::Reject, Self::Replace, Self::Rerun, Self::Same]
            .into_iter()
            .find(|policy| policy.as_str() == text)
            .ok_or_else(|| {
                Error::invalid(format!("dedupe_policy: {text:?} is not keep, reject, replace, rerun or same"))
            })
    }
}

/// What is said about the key of a job.
#[derive(Debug, Clone)]
pub(crate) struct Dedupe {
    pub(crate) key: Option<String>,
    pub(crate) by_payload: bool,
    pub(crate) stands: DedupeFor,
    pub(crate) policy: Option<DedupePolicy>,
}

/// A job to be enqueued.
#[derive(Debug, Clone)]
pub struct NewJob {
    pub(crate) kind: String,
    pub(crate) payload: Box<RawValue>,
    pub(crate) queue: Option<String>,
    pub(crate) tenant: Option<String>,
    pub(crate) priority: Option<i32>,
    pub(crate) delay: Option<Duration>,
    pub(crate) run_at: Option<String>,
    pub(crate) max_attempts: Option<u32>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) dedupe: Option<Dedupe>,
    pub(crate) gates: Vec<String>,
    pub(crate) tokens: Option<u32>,
    pub(crate) trace: Option<Box<RawValue>>,
}

impl NewJob {
    /// A job of `kind` with a payload of raw JSON text, stored as it is. Errors if it is not JSON.
    pub fn from_json(kind: impl Into<String>, payload: impl Into<String>) -> Result<Self> {
        let payload = RawValue::from_string(payload.into())
            .map_err(|e| Error::invalid(format!("payload: not valid JSON: {e}")))?;
        Ok(Self {
            kind: kind.into(),
            payload,
            queue: None,
            tenant: None,
            priority: None,
            delay: None,
            run_at: None,
            max_attempts: None,
            timeout: None,
            dedupe: None,
            gates: Vec::new(),
            tokens: None,
            trace: None,
        })
    }

    /// A job of `kind` with anything serializable as its payload.
    pub fn new(kind: impl Into<String>, payload: &impl Serialize) -> Result<Self> {
        let json = serde_json::to_string(payload).map_err(|e| Error::invalid(format!("payload: {e}")))?;
        Self::from_json(kind, json)
    }

    /// A job of a typed kind, with the limits that the type declares.
    pub fn of<J: Job>(job: &J) -> Result<Self> {
        let mut new = Self::new(J::KIND, job)?;
        new.max_attempts = J::MAX_ATTEMPTS;
        new.timeout = J::TIMEOUT;
        Ok(new)
    }

    /// The queue. Default: `default`.
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = Some(queue.into());
        self
    }

    /// Whose job it is. Default: `default`.
    pub fn tenant(mut self, tenant: impl Into<String>) -> Self {
        self.tenant = Some(tenant.into());
        self
    }

    /// Smaller runs first. Default: 0.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Due this long after the enqueue, by the database's clock. Default: at once.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = Some(delay);
        self
    }

    /// Due at this time. A time in the past means at once.
    pub fn run_at(self, run_at: SystemTime) -> Self {
        let mut text = String::new();
        // Times after the year 9999 have no RFC 3339 form; the database refuses infinity by name.
        if write!(text, "{}", humantime::format_rfc3339_micros(run_at.max(SystemTime::UNIX_EPOCH))).is_err() {
            text = "infinity".to_owned();
        }
        self.run_at_text(text)
    }

    /// Due at this time, in any form that Postgres reads, such as `2027-01-31 08:00 Europe/Rome`.
    pub fn run_at_text(mut self, run_at: impl Into<String>) -> Self {
        self.run_at = Some(run_at.into());
        self
    }

    /// Attempts before the job becomes a dead letter, at least 1. Default: 5.
    pub fn max_attempts(mut self, max_attempts: u32) -> Self {
        self.max_attempts = Some(max_attempts);
        self
    }

    /// Longest time one attempt may take. Default: no limit.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// A gate that the job passes besides those of its queue, tenant and kind: `model:NAME`, or a name without a colon. Can be
    /// given several times, up to 16.
    pub fn gate(mut self, gate: impl Into<String>) -> Self {
        self.gates.push(gate.into());
        self
    }

    /// How many tokens it is expected to use, prompt and answer together. Default: estimated, where a gate counts them.
    pub fn tokens(mut self, tokens: u32) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// The W3C trace context that it goes on with, as JSON: `{"traceparent": "00-…"}`, up to 16 KiB. Default: that of its enqueue, where
    /// [traces](crate::trace) are on.
    pub fn trace(mut self, trace: Box<RawValue>) -> Self {
        self.trace = Some(trace);
        self
    }

    /// While a job of this tenant holds this key, enqueueing again answers with that job instead of making a new one.
    pub fn dedupe_key(mut self, key: impl Into<String>) -> Self {
        self.dedupe().key = Some(key.into());
        self
    }

    /// The dedupe key is a hash of the payload: jobs of this tenant and kind with equal JSON are the same job. Order and spaces in it do
    /// not matter, nor does `1.0` in place of `1`.
    pub fn dedupe_by_payload(mut self) -> Self {
        self.dedupe().by_payload = true;
        self
    }

    /// What becomes of it if the key is held. Default: [`DedupePolicy::Keep`]. Needs a key.
    pub fn dedupe_policy(mut self, policy: DedupePolicy) -> Self {
        self.dedupe().policy = Some(policy);
        self
    }

    fn dedupe(&mut self) -> &mut Dedupe {
        self.dedupe.get_or_insert(Dedupe { key: None, by_payload: false, stands: DedupeFor::UntilFinal, policy: None })
    }

    /// How long the dedupe key stands for its job. Default: until the job is final. Needs a key.
    pub fn dedupe_for(mut self, stands: DedupeFor) -> Self {
        self.dedupe().stands = stands;
        self
    }
}

/// The answer to an enqueue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enqueued {
    /// The job that stands for this enqueue: the new one, or the one that already held the dedupe key.
    pub id: i64,
    /// Its state: `queued` for a new one.
    pub state: String,
    /// True if the dedupe key was held, so that nothing was enqueued.
    pub duplicate: bool,
    /// What the dedupe key led to; `None`: it was free, or there was none.
    pub deduped: Option<Deduped>,
}

/// What a held dedupe key led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deduped {
    /// The job that holds the key is as it was.
    Kept,
    /// The job that waits has what this enqueue brought.
    Replaced,
    /// A new job waits until the one that runs is final.
    Behind,
}

impl Deduped {
    /// As SQL, JSON and the command line spell it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Replaced => "replaced",
            Self::Behind => "behind",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        [Self::Kept, Self::Replaced, Self::Behind].into_iter().find(|deduped| deduped.as_str() == text)
    }
}
