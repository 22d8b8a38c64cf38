//! The joint between queue and model: registers every kind on a worker and turns what a call decided into an outcome.

use crate::answer::Answer;
use crate::attempt::Request;
use crate::engine::{Attempt, Engine};
use crate::error::{CallError, Verdict};
use crate::idempotency::seed;
use posthouse::worker::Builder;
use posthouse::{Context, JobError, Outcome};
use serde_json::value::RawValue;
use std::time::{Duration, Instant};

/// Given up so long before the job's own timeout, a call still has the time to say what it waited for.
const DEADLINE_MARGIN: Duration = Duration::from_millis(100);
/// The wait of a "not now" that names none. The gate always names one; this is for the day it does not.
const SNOOZE_DEFAULT: Duration = Duration::from_secs(1);

impl Engine {
    /// Adds every kind of this engine to a worker.
    pub fn register(&self, worker: Builder) -> Builder {
        self.kinds().into_iter().fold(worker, |worker, kind| {
            let engine = self.clone();
            worker.handle_kind(kind, move |payload, context| engine.clone().attempt(payload, context))
        })
    }

    /// One attempt of a job that this process runs.
    async fn attempt(self, payload: Box<RawValue>, context: Context) -> Outcome {
        let request = self.request_for(&payload, &context);
        // The request holds all that is needed of it; a second copy for minutes would be a waste.
        drop(payload);
        self.decide(request, &context).await
    }

    /// Runs one attempt of a job and decides what becomes of it. Its usage is noted, whatever the outcome.
    pub async fn handle(&self, payload: &RawValue, context: &Context) -> Outcome {
        self.decide(self.request_for(payload, context), context).await
    }

    fn request_for(&self, payload: &RawValue, context: &Context) -> Result<Box<Request<'_>>, Box<CallError>> {
        let left = context.deadline().map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let deadline = left.map(|left| left.saturating_sub(DEADLINE_MARGIN));
        self.request(
            context.kind(),
            payload.get(),
            Attempt { number: context.attempt(), deadline, job: context.job_id(), model: context.model_instead() },
        )
    }

    async fn decide(&self, request: Result<Box<Request<'_>>, Box<CallError>>, context: &Context) -> Outcome {
        let called = match request {
            Ok(mut request) => {
                if request.takes_key() {
                    // Boxed: a question to the database takes more room than the call itself, and is over before that begins.
                    request.seed = Some(Box::pin(seed(context)).await);
                }
                self.ask(request).await
            }
            Err(error) => Err(error),
        };
        let usage = called.as_ref().map_or_else(|error| error.usage_json(), Answer::usage_json);
        if let Err(error) = context.usage(&usage) {
            tracing::warn!(job = context.job_id(), "the usage cannot be noted: {error}");
        }
        let max_attempts = self.max_attempts(context.kind()).unwrap_or(u32::MAX);
        outcome(called, context.attempt() >= max_attempts)
    }
}

/// The outcome of a call. `is_last`: the kind grants no further attempt.
fn outcome(called: Result<Answer, Box<CallError>>, is_last: bool) -> Outcome {
    let error = match called {
        Ok(answer) => return Outcome::Done(answer.result_json()),
        Err(error) => error,
    };
    let job_error = || JobError::new(error.class.as_str(), error.to_string()).with_detail(error.to_json());
    match error.verdict() {
        Verdict::Snooze => {
            let (delay, reason) = (error.wait.unwrap_or(SNOOZE_DEFAULT), error.to_string());
            Outcome::Snooze { delay, reason, gate: error.gate }
        }
        Verdict::Retry if !is_last => Outcome::Retry { error: job_error(), delay: error.wait },
        Verdict::Retry | Verdict::Fail => Outcome::fail(job_error()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::config::Config;
    use crate::error::ErrorClass;

    /// The size of what a function would return.
    fn size_of_output<A, B, F>(_: impl Fn(A, B) -> F) -> usize {
        size_of::<F>()
    }

    /// Thousands of them wait at the same time.
    #[test]
    fn an_attempt_that_waits_is_small() {
        let engine = Engine::from_config(&Config::single("http://127.0.0.1:1/v1", "m", None).unwrap()).unwrap();
        let size = size_of_output(|payload, context| engine.clone().attempt(payload, context));
        assert!(size < 2_500, "{size}");
    }

    fn decided(class: ErrorClass, is_last: bool) -> Outcome {
        let mut error = CallError::new(class, "code", "what happened");
        error.wait = Some(Duration::from_secs(7));
        outcome(Err(error), is_last)
    }

    #[test]
    fn the_class_decides() {
        let seven = Duration::from_secs(7);
        for class in [ErrorClass::NotNow, ErrorClass::OutOfCredit] {
            assert!(matches!(decided(class, true), Outcome::Snooze { delay, .. } if delay == seven));
        }
        for class in [ErrorClass::Transient, ErrorClass::Ambiguous, ErrorClass::Incomplete, ErrorClass::Schema] {
            assert!(matches!(decided(class, false), Outcome::Retry { delay: Some(delay), .. } if delay == seven));
            assert!(matches!(decided(class, true), Outcome::Fail(error) if error.class == class.as_str()));
        }
        for class in [ErrorClass::Terminal, ErrorClass::Truncated] {
            assert!(matches!(decided(class, false), Outcome::Fail(error) if error.detail["code"] == "code"));
        }
    }
}
