//! What a worker or sweeper tells whoever watches it: one event a transition, one line of text each.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

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
