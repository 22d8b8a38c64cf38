//! What an attempt decides: a handler returns an [`Outcome`], or anything that turns into one.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, value::RawValue};

/// What an attempt decided.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// The job is done, with a JSON result.
    Done(Box<RawValue>),
    /// The attempt failed; try again while attempts are left, else it becomes a dead letter.
    Retry {
        /// What went wrong.
        error: JobError,
        /// Wait this long. `None`: by the backoff of the kind.
        delay: Option<Duration>,
    },
    /// Not now (rate limited, not ready): run again after `delay`. The attempt is refunded.
    Snooze {
        /// Wait this long.
        delay: Duration,
        /// Why, shown by `explain`.
        reason: String,
        /// The gate that turned it away, if one did, such as `endpoint:openai/gpt-4o-mini`. While that gate is closed the
        /// job keeps its place at the front instead of waiting for `delay`.
        gate: Option<String>,
    },
    /// Trying again cannot help: a dead letter at once.
    Fail(JobError),
    /// The job is cancelled.
    Cancelled,
}

impl Outcome {
    /// Done, with anything serializable as the result.
    pub fn done(result: &impl Serialize) -> Self {
        match serde_json::value::to_raw_value(result) {
            Ok(raw) => Self::Done(raw),
            Err(error) => Self::Fail(JobError::new("result", format!("the result cannot be written as JSON: {error}"))),
        }
    }

    /// Try again by the backoff of the kind; or what the error itself asks for, as
    /// [`NotAdmitted`](crate::admission::NotAdmitted) does.
    pub fn retry(error: impl Into<JobError>) -> Self {
        let mut error = error.into();
        match error.instead.take().map(|instead| *instead) {
            None => Self::Retry { error, delay: None },
            Some(Instead::Snooze { delay, reason, gate }) => Self::snooze_at(gate, delay, reason),
            Some(Instead::Fail) => Self::Fail(error),
        }
    }

    /// A dead letter at once.
    pub fn fail(error: impl Into<JobError>) -> Self {
        Self::Fail(error.into())
    }

    /// Not now: run again after `delay`, the attempt refunded.
    pub fn snooze(delay: Duration, reason: impl Into<String>) -> Self {
        Self::Snooze { delay, reason: reason.into(), gate: None }
    }

    /// Not now, because a gate turned it away: the job goes back to its place and runs when the gate opens. `delay` counts
    /// only if the gate is open by then.
    pub fn snooze_at(gate: impl Into<String>, delay: Duration, reason: impl Into<String>) -> Self {
        Self::Snooze { delay, reason: reason.into(), gate: Some(gate.into()) }
    }
}

/// Why an attempt failed: a class for machines, a message for people, details as JSON.
#[derive(Debug, Clone, PartialEq)]
pub struct JobError {
    /// A short machine-readable class, such as `error`, `timeout`, `panic`, `payload`, `terminal`.
    pub class: String,
    /// What happened, for people. Stored up to 16 KiB.
    pub message: String,
    /// More for machines (status, endpoint, latency). `Null`: nothing.
    pub detail: Value,
    /// What an attempt that ends with this error comes to, if not to a retry.
    instead: Option<Box<Instead>>,
}

#[derive(Debug, Clone, PartialEq)]
enum Instead {
    Snooze { delay: Duration, reason: String, gate: String },
    Fail,
}

impl JobError {
    /// An error of a class.
    pub fn new(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self { class: class.into(), message: message.into(), detail: Value::Null, instead: None }
    }

    /// The same error with details.
    pub fn with_detail(mut self, detail: Value) -> Self {
        self.detail = detail;
        self
    }

    /// The same error; an attempt that ends with it is a snooze.
    pub(crate) fn or_snooze(mut self, delay: Duration, reason: String, gate: String) -> Self {
        self.instead = Some(Box::new(Instead::Snooze { delay, reason, gate }));
        self
    }

    /// The same error; an attempt that ends with it is a dead letter.
    pub(crate) fn or_fail(mut self) -> Self {
        self.instead = Some(Box::new(Instead::Fail));
        self
    }

    /// An error and its causes, which are joined into the message. If one of them stands for a job error, that decides about the
    /// rest.
    fn of_chain(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut whole = Self::new("error", error.to_string());
        let mut next = Some(error);
        while let Some(cause) = next {
            if let Some(Stands(inner)) = cause.downcast_ref() {
                whole = Self { message: whole.message, ..inner.clone() };
            }
            next = cause.source();
            if let Some(cause) = next {
                whole.message.push_str(": ");
                whole.message.push_str(&cause.to_string());
            }
        }
        whole
    }
}

/// A job error as a link in a chain of errors. ([`JobError`] is no `std::error::Error` itself, since any of those turns into one.)
#[derive(Debug)]
pub(crate) struct Stands(pub(crate) JobError);

impl fmt::Display for Stands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Stands {}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Any error becomes one of class `error`, its causes joined into the message.
impl<E: std::error::Error + 'static> From<E> for JobError {
    fn from(error: E) -> Self {
        Self::of_chain(&error)
    }
}

/// For handlers whose error is a box: the class and the details are kept.
impl From<JobError> for Box<dyn std::error::Error + Send + Sync> {
    fn from(error: JobError) -> Self {
        Box::new(Stands(error))
    }
}

/// What a handler may return.
pub trait IntoOutcome {
    /// The outcome it stands for.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

/// `Ok` is done with the value as its result, `Err` is a retry, or what the error asks for: see [`Outcome::retry`].
///
/// The error may be a [`JobError`], any error that can be sent to other threads, a `Box<dyn Error + Send + Sync>`, an
/// `anyhow::Error` and its like, or text.
impl<T: Serialize, E: Into<Box<dyn std::error::Error + Send + Sync>>> IntoOutcome for Result<T, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(value) => Outcome::done(&value),
            Err(error) => failed(error.into()),
        }
    }
}

/// `Ok` is the outcome itself, `Err` is a retry, or what the error asks for: for handlers that use `?` and decide for themselves.
impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> IntoOutcome for Result<Outcome, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(outcome) => outcome,
            Err(error) => failed(error.into()),
        }
    }
}

fn failed(error: Box<dyn std::error::Error + Send + Sync>) -> Outcome {
    Outcome::retry(JobError::of_chain(&*error))
}

/// Done, without a result.
impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::Done(RawValue::NULL.to_owned())
    }
}
