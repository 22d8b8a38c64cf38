//! What a handler may know and do: its job, its lease, whether it should stop, and where to note progress and usage.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use uuid::Uuid;

use crate::error::Result;
use crate::lease::Lease;
use crate::signal::{Level, Signal};
use crate::store::{ClaimedJob, Store};

/// Given to every handler with its job. A cheap clone; all clones speak of the same attempt.
///
/// No connection to Postgres is held by it. When the attempt has to end (time-out, lost lease, cancel, shutdown) the
/// handler's future is dropped at its next `.await`, which closes the HTTP calls in it; tasks that the handler spawned
/// itself should watch [`cancelled`](Self::cancelled).
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    job: ClaimedJob,
    worker: Uuid,
    lease: Arc<Lease>,
    deadline: Option<Instant>,
    /// How long the handler ran.
    took: OnceLock<Duration>,
    signal: Signal,
    usage: Mutex<Option<Box<RawValue>>>,
    store: Store,
    admit_store: Store,
}

/// Why an attempt was asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CancelReason {
    /// Somebody cancelled the job. The handler has 5 seconds to return; whatever it returns, the job becomes `cancelled`.
    User,
    /// The worker shuts down. The handler may finish within the grace period; then the job is released uncharged. An
    /// error returned after the handler noticed this counts as a release too, not as a failed attempt.
    Shutdown,
    /// The attempt took longer than the job's timeout. The handler's future has been dropped.
    Timeout,
    /// The job is not this worker's any more. The handler's future has been dropped and nothing will be written.
    LostLease,
}

impl Context {
    /// `store` is for progress. Calls are admitted over a connection of its own, since they may wait for others at the gates, and
    /// progress and outcomes should not wait behind them.
    pub(crate) fn new(
        job: ClaimedJob,
        worker: Uuid,
        lease: Arc<Lease>,
        (store, admit_store): (Store, Store),
        now: Instant,
    ) -> Self {
        // A timeout too far to be represented is no timeout.
        let deadline = job.timeout.and_then(|timeout| now.checked_add(timeout));
        let (signal, usage) = (Signal::default(), Mutex::new(None));
        Self {
            inner: Arc::new(Inner {
                job,
                worker,
                lease,
                deadline,
                took: OnceLock::new(),
                signal,
                usage,
                store,
                admit_store,
            }),
        }
    }

    /// The job's id.
    pub fn job_id(&self) -> i64 {
        self.inner.job.id
    }

    /// The job's kind.
    pub fn kind(&self) -> &str {
        &self.inner.job.kind
    }

    /// The queue it came from.
    pub fn queue(&self) -> &str {
        &self.inner.job.queue
    }

    /// Whose job it is.
    pub fn tenant(&self) -> &str {
        &self.inner.job.tenant
    }

    /// Smaller runs first.
    pub fn priority(&self) -> i32 {
        self.inner.job.priority
    }

    /// Which attempt this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.inner.job.attempt
    }

    /// After how many attempts the job becomes a dead letter.
    pub fn max_attempts(&self) -> u32 {
        self.inner.job.max_attempts
    }

    /// The fence of this attempt: grows at every claim of the job and is never reset. Hand it to systems that can refuse
    /// a late writer.
    pub fn fence(&self) -> i64 {
        self.inner.job.fence
    }

    /// The worker that runs it: one process incarnation.
    pub fn worker(&self) -> Uuid {
        self.inner.worker
    }

    /// When the job was enqueued, by the database's clock.
    pub fn enqueued_at(&self) -> SystemTime {
        self.inner.job.enqueued_at
    }

    /// The W3C trace context of whoever enqueued it, as JSON, to go on with.
    pub fn trace(&self) -> Option<&RawValue> {
        self.inner.job.trace.as_deref()
    }

    /// The model to use in place of the job's own, since a budget is spent that says so. `None`: its own.
    pub fn model_instead(&self) -> Option<&str> {
        self.inner.job.model.as_deref()
    }

    /// When the attempt times out. `None`: the job has no timeout.
    pub fn deadline(&self) -> Option<Instant> {
        self.inner.deadline
    }

    /// How long the worker's right to this job lasts if no further heartbeat gets through. Normally between two thirds
    /// of the lease and the whole of it.
    pub fn lease_remaining(&self) -> Duration {
        self.inner.lease.remaining(Instant::now())
    }

    /// Waits until the attempt is asked to stop and says why. Never returns for one that is not.
    pub async fn cancelled(&self) -> CancelReason {
        let level = self.inner.signal.above(Level::Run).await;
        self.inner.signal.notice();
        reason(level).unwrap_or(CancelReason::LostLease)
    }

    /// Why the attempt was asked to stop; `None` if it was not.
    pub fn cancel_reason(&self) -> Option<CancelReason> {
        let reason = reason(self.inner.signal.level());
        if reason.is_some() {
            self.inner.signal.notice();
        }
        reason
    }

    /// True if the attempt was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel_reason().is_some()
    }

    /// Stores how far the attempt is, for people and programs that look at the job; replaces what was stored before. One
    /// statement each time, so call it every second rather than for every token. An error means that it was not stored
    /// and nothing else; if the job turns out to be lost, the handler is stopped.
    pub fn progress<'a, T: Serialize>(&'a self, progress: &T) -> impl Future<Output = Result<()>> + Send + use<'a, T> {
        // Serialized here, not in the future: the value need not be shareable between threads.
        let json = to_raw_value(progress);
        async move {
            let (inner, json) = (&self.inner, json?);
            if !inner.store.progress(inner.worker, inner.job.id, inner.job.fence, &json).await? {
                inner.signal.raise(Level::Lost);
            }
            Ok(())
        }
    }

    /// Names the outside call of this attempt, for services that do a call once however often they get it (an idempotency key): the
    /// same as that of an earlier attempt whose call may have taken effect, since its worker was lost, it was released or timed out, or it failed with
    /// an error whose detail says `"perhaps_billed": true`; another one after any other error. Unique among all jobs of all databases.
    ///
    /// Asks the database, unless this is the first attempt.
    pub async fn call_seed(&self) -> Result<String> {
        let Inner { job, worker, store, .. } = &*self.inner;
        if job.fence == 1 {
            return Ok(self.own_call_seed());
        }
        let earlier = store.call_seed(*worker, job.id, job.fence).await?;
        Ok(earlier.unwrap_or_else(|| self.own_call_seed()))
    }

    /// The name that the call has which no earlier attempt can have made.
    pub fn own_call_seed(&self) -> String {
        format!("{}/{}", self.inner.worker, self.inner.job.fence)
    }

    /// Notes what the attempt used (tokens, money, requests), stored with the outcome; replaces what was noted before.
    /// Errors if the value cannot be written as JSON.
    pub fn usage(&self, usage: &impl Serialize) -> Result<()> {
        let json = to_raw_value(usage)?;
        *self.inner.usage.lock().unwrap_or_else(PoisonError::into_inner) = Some(json);
        Ok(())
    }

    pub(crate) fn take_usage(&self) -> Option<Box<RawValue>> {
        self.inner.usage.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Notes how long the handler ran, when it has ended.
    pub(crate) fn set_took(&self, took: Duration) {
        let _ = self.inner.took.set(took);
    }

    /// How long the handler ran. `None`: it has not ended.
    pub(crate) fn took(&self) -> Option<Duration> {
        self.inner.took.get().copied()
    }

    pub(crate) fn job(&self) -> &ClaimedJob {
        &self.inner.job
    }

    pub(crate) fn signal(&self) -> &Signal {
        &self.inner.signal
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.inner.lease
    }

    pub(crate) fn admit_store(&self) -> &Store {
        &self.inner.admit_store
    }
}

fn reason(level: Level) -> Option<CancelReason> {
    match level {
        Level::Run => None,
        Level::Shutdown | Level::Release => Some(CancelReason::Shutdown),
        Level::Cancel => Some(CancelReason::User),
        Level::Timeout => Some(CancelReason::Timeout),
        Level::Lost => Some(CancelReason::LostLease),
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("job", &self.job_id())
            .field("kind", &self.kind())
            .field("attempt", &self.attempt())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}
