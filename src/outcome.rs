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

    /// Try again by the backoff of the kind.
    pub fn retry(error: impl Into<JobError>) -> Self {
        Self::Retry { error: error.into(), delay: None }
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
}

impl JobError {
    /// An error of a class.
    pub fn new(class: impl Into<String>, message: impl Into<String>) -> Self {
        Self { class: class.into(), message: message.into(), detail: Value::Null }
    }

    /// The same error with details.
    pub fn with_detail(mut self, detail: Value) -> Self {
        self.detail = detail;
        self
    }
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Any error becomes one of class `error`, its causes joined into the message.
impl<E: std::error::Error> From<E> for JobError {
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            message.push_str(": ");
            message.push_str(&cause.to_string());
            source = cause.source();
        }
        Self::new("error", message)
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

/// `Ok` is done with the value as its result, `Err` is a retry.
impl<T: Serialize, E: Into<JobError>> IntoOutcome for Result<T, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(value) => Outcome::done(&value),
            Err(error) => Outcome::retry(error),
        }
    }
}

/// `Ok` is the outcome itself, `Err` is a retry: for handlers that use `?` and decide for themselves.
impl<E: Into<JobError>> IntoOutcome for Result<Outcome, E> {
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(outcome) => outcome,
            Err(error) => Outcome::retry(error),
        }
    }
}

/// Done, without a result.
impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::Done(RawValue::NULL.to_owned())
    }
}
