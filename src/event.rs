//! What a worker or sweeper tells whoever watches it: one event a transition, one line of text each.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tracing::Level;
use uuid::Uuid;

use crate::error::Error;
use crate::outcome::JobError;
use crate::store::ClaimedJob;

/// Who is told of events.
pub(crate) type Emit = Arc<dyn Fn(&Event<'_>) + Send + Sync>;

/// Something happened. `Display` gives the line that the command line program prints.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// The worker is registered under a new id: at the start, and after a lost lease.
    Registered {
        /// The new id.
        worker: Uuid,
    },
    /// A job was claimed and its handler starts.
    Started {
        /// The job.
        job: &'a ClaimedJob,
    },
    /// The job is done; recorded.
    Done {
        /// The job.
        job: &'a ClaimedJob,
    },
    /// The attempt failed and another one will follow; recorded.
    Retry {
        /// The job.
        job: &'a ClaimedJob,
        /// The next attempt runs after this time.
        delay: Duration,
        /// What went wrong.
        error: &'a JobError,
    },
    /// Not now: the job runs again later, the attempt refunded; recorded.
    Snoozed {
        /// The job.
        job: &'a ClaimedJob,
        /// It runs again after this time.
        delay: Duration,
        /// Why.
        reason: &'a str,
    },
    /// The job is a dead letter; recorded.
    Failed {
        /// The job.
        job: &'a ClaimedJob,
        /// What went wrong, as the handler said it; `None` if Postgres decided it.
        error: Option<&'a JobError>,
    },
    /// The job is cancelled; recorded.
    Cancelled {
        /// The job.
        job: &'a ClaimedJob,
    },
    /// The job went back to the line uncharged, since the worker shuts down; recorded.
    Released {
        /// The job.
        job: &'a ClaimedJob,
    },
    /// The job was not this worker's any more: its handler was stopped, or its outcome refused. Nothing was recorded.
    Lost {
        /// The job.
        job: &'a ClaimedJob,
    },
    /// The lease of the whole worker is over: its handlers were stopped; it registers anew.
    LeaseLost {
        /// The id that is over.
        worker: Uuid,
        /// Why.
        reason: &'a str,
    },
    /// Postgres cannot be reached or refuses. Work goes on as far as the lease allows; nothing finished is forgotten.
    ConnectionLost {
        /// What was said.
        error: &'a Error,
    },
    /// Postgres answers again.
    ConnectionRestored,
    /// The sweep took jobs back from workers that died; recorded with each job.
    Rescued {
        /// How many.
        jobs: i32,
    },
    /// A part of the sweep failed; it comes again.
    SweepFailed {
        /// The part.
        sweep: &'a str,
        /// What was said.
        error: &'a str,
    },
    /// The sweep did what was due: every second or so, a sign that it is well.
    Swept {
        /// Parts that were due. Often none: they are due in the fleet, not in this process.
        parts: usize,
        /// What it took.
        took: Duration,
    },
}

/// The target of what is logged about jobs. All targets of state changes begin with `posthouse::event`.
const JOB: &str = "posthouse::event::job";

/// A line about a job, at a level. Fields that are `None` are left out.
macro_rules! log_job {
    ($level:expr, $line:ident, $text:expr) => {
        tracing::event!(target: JOB, $level, event = $line.event, job = $line.job.id, kind = $line.job.kind.as_str(),
            queue = $line.job.queue.as_str(), tenant = $line.job.tenant.as_str(), attempt = $line.job.attempt,
            max_attempts = $line.job.max_attempts, fence = $line.job.fence, worker = $line.worker.map(tracing::field::display),
            took_ms = $line.took_ms, delay_ms = $line.delay_ms, class = $line.class, error = $line.error,
            reason = $line.reason, "{}", $text)
    };
}

/// What is logged about a job.
struct Line<'a> {
    event: &'static str,
    job: &'a ClaimedJob,
    worker: Option<Uuid>,
    took_ms: Option<u64>,
    delay_ms: Option<u64>,
    class: Option<&'a str>,
    error: Option<&'a str>,
    reason: Option<&'a str>,
}

impl<'a> Event<'a> {
    /// Logs it: one line, with the names of the API as fields. `worker` and `took` are of the attempt, if it is about one.
    pub(crate) fn log(&self, worker: Option<Uuid>, took: Option<Duration>) {
        match self {
            Self::Registered { worker } => {
                tracing::info!(target: "posthouse::event::worker", event = "registered", %worker, "{self}");
            }
            Self::LeaseLost { worker, reason } => {
                tracing::warn!(target: "posthouse::event::worker", event = "lease_lost", %worker, reason, "{self}");
            }
            Self::ConnectionLost { error } => {
                tracing::warn!(target: "posthouse::event::worker", event = "connection_lost", %error, "{self}");
            }
            Self::ConnectionRestored => {
                tracing::info!(target: "posthouse::event::worker", event = "connection_restored", "{self}");
            }
            Self::Rescued { jobs } => {
                tracing::info!(target: "posthouse::event::sweep", event = "rescued", jobs, "{self}");
            }
            Self::SweepFailed { sweep, error } => {
                tracing::warn!(target: "posthouse::event::sweep", event = "sweep_failed", sweep, error, "{self}");
            }
            Self::Swept { parts, took } => {
                tracing::trace!(target: "posthouse::event::sweep", event = "swept", parts, took_ms = millis(*took), "{self}");
            }
            _ => self.log_job(worker, took.map(millis)),
        }
    }

    fn log_job(&self, worker: Option<Uuid>, took_ms: Option<u64>) {
        let line =
            |event, job| Line { event, job, worker, took_ms, delay_ms: None, class: None, error: None, reason: None };
        match *self {
            Self::Started { job } => {
                let line = Line { took_ms: None, ..line("started", job) };
                log_job!(Level::TRACE, line, self);
            }
            Self::Done { job } => {
                let line = line("done", job);
                log_job!(Level::DEBUG, line, self);
            }
            Self::Failed { job, error } => {
                let line = line("failed", job).with_error(error);
                log_job!(Level::WARN, line, self);
            }
            Self::Lost { job } => {
                let line = line("lost", job);
                log_job!(Level::WARN, line, self);
            }
            Self::Retry { job, delay, error } => {
                let line = Line { delay_ms: Some(millis(delay)), ..line("retry", job).with_error(Some(error)) };
                log_job!(Level::INFO, line, self);
            }
            Self::Snoozed { job, delay, reason } => {
                let line = Line { delay_ms: Some(millis(delay)), reason: Some(reason), ..line("snoozed", job) };
                log_job!(Level::INFO, line, self);
            }
            Self::Cancelled { job } => {
                let line = line("cancelled", job);
                log_job!(Level::INFO, line, self);
            }
            Self::Released { job } => {
                let line = line("released", job);
                log_job!(Level::INFO, line, self);
            }
            _ => {}
        }
    }
}

impl<'a> Line<'a> {
    fn with_error(self, error: Option<&'a JobError>) -> Self {
        Self {
            class: error.map(|error| error.class.as_str()),
            error: error.map(|error| error.message.as_str()),
            ..self
        }
    }
}

/// The jobs of a claim, a line each.
pub(crate) fn log_claimed(jobs: &[ClaimedJob], worker: Uuid) {
    if tracing::enabled!(target: "posthouse::event::claim", Level::TRACE) {
        for job in jobs {
            tracing::trace!(target: "posthouse::event::claim", event = "claimed", job = job.id, kind = job.kind.as_str(),
                queue = job.queue.as_str(), tenant = job.tenant.as_str(), attempt = job.attempt,
                max_attempts = job.max_attempts, fence = job.fence, %worker, "job {} claimed", job.id);
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl fmt::Display for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registered { worker } => write!(f, "worker {worker} registered"),
            Self::Started { job } if job.attempt > 1 => write!(f, "job {} started, attempt {}", job.id, job.attempt),
            Self::Started { job } => write!(f, "job {} started", job.id),
            Self::Done { job } => write!(f, "job {} done", job.id),
            Self::Retry { job, delay, error } => {
                write!(f, "job {} retry in {}: {}", job.id, Short(*delay), error.message)
            }
            Self::Snoozed { job, delay, reason } => {
                write!(f, "job {} snoozed for {}: {reason}", job.id, Short(*delay))
            }
            Self::Failed { job, error: Some(error) } => write!(f, "job {} failed: {}", job.id, error.message),
            Self::Failed { job, error: None } => write!(f, "job {} failed", job.id),
            Self::Cancelled { job } => write!(f, "job {} cancelled", job.id),
            Self::Released { job } => write!(f, "job {} released", job.id),
            Self::Lost { job } => write!(f, "job {} lost: another worker may have it", job.id),
            Self::LeaseLost { worker, reason } => write!(f, "worker {worker} lost its lease: {reason}"),
            Self::ConnectionLost { error } => write!(f, "connection to Postgres lost: {error}"),
            Self::ConnectionRestored => f.write_str("connection to Postgres restored"),
            Self::Rescued { jobs: 1 } => f.write_str("1 job of a dead worker rescued"),
            Self::Rescued { jobs } => write!(f, "{jobs} jobs of dead workers rescued"),
            Self::SweepFailed { sweep, error } => write!(f, "sweep of {sweep} failed and comes again: {error}"),
            Self::Swept { parts, took } => write!(f, "swept {parts} parts in {}", Short(*took)),
        }
    }
}

/// A duration for people: `350ms`, `4s`, `12m`, `3h`, rounded down.
struct Short(Duration);

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_secs() {
            0 => write!(f, "{}ms", self.0.as_millis()),
            s @ 1..120 => write!(f, "{s}s"),
            s @ 120..7_200 => write!(f, "{}m", s / 60),
            s => write!(f, "{}h", s / 3_600),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        for (ms, text) in [(0, "0ms"), (350, "350ms"), (4_200, "4s"), (720_000, "12m"), (10_800_000, "3h")] {
            assert_eq!(Short(Duration::from_millis(ms)).to_string(), text);
        }
    }
}
