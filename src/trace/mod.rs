//! Traces: from the enqueue of a job over its claim and its attempts to the calls that its handler makes, one trace across processes.
//!
//! What ties them together is the W3C trace context that is stored with the job, as JSON: `{"traceparent": "00-…"}`. Anybody may
//! write it ([`NewJob::trace`], `posthouse.enqueue(trace => …)`) and read it ([`Context::trace`](crate::Context::trace)).
//! With the feature `otlp`, and after [`enable`], spans are made too, by the global tracer provider of the crate `opentelemetry`
//! that your program has set; without, all this does nothing and costs nothing. Payloads and results are in no span.

pub mod names;
#[cfg(not(feature = "otlp"))]
mod off;
#[cfg(feature = "otlp")]
mod otlp;
mod parts;

use std::time::{Instant, SystemTime};

use uuid::Uuid;

#[cfg(not(feature = "otlp"))]
pub use off::{Span, enable};
#[cfg(feature = "otlp")]
pub use otlp::{Span, enable};
pub use parts::{Parent, Role, Value};

use crate::error::Result;
use crate::job::NewJob;
use crate::outcome::Outcome;
use crate::store::ClaimedJob;

/// The span of an enqueue; it ends when it is dropped. [`carry`] hands its trace on to the job.
pub fn sending(queue: Option<&str>, jobs: usize, parent: Parent<'_>) -> Span {
    let queue = queue.unwrap_or("default");
    let span = Span::start(Role::Send, parent, None, || format!("send {queue}"));
    if span.is_on() {
        about(&span, "send", queue);
        if jobs > 1 {
            span.set(names::JOBS, jobs as u64);
        }
    }
    span
}

/// The job with the trace of its enqueue, unless it brings one of its own.
pub fn carry(job: NewJob, span: &Span) -> NewJob {
    match span.context() {
        Some(trace) if job.trace.is_none() => job.trace(trace),
        _ => job,
    }
}

/// The span of an enqueue of many jobs, and the jobs with its trace.
pub fn sending_many(jobs: Vec<NewJob>, parent: Parent<'_>) -> (Vec<NewJob>, Span) {
    let queue = jobs.first().and_then(|job| job.queue.clone());
    let span = sending(queue.as_deref(), jobs.len(), parent);
    let jobs = if span.is_on() { jobs.into_iter().map(|job| carry(job, &span)).collect() } else { jobs };
    (jobs, span)
}

/// The answer to an enqueue. If it is an error, the span failed.
pub fn sent<T>(answer: Result<T>, span: &Span) -> Result<T> {
    if answer.is_err() {
        span.fail("enqueue");
    }
    answer
}

/// The spans of a claim that was asked at `asked`, one for each job, below that of its enqueue.
pub(crate) fn received(jobs: &[ClaimedJob], worker: Uuid, asked: Instant) {
    if !Span::are_on() {
        return;
    }
    let began = SystemTime::now().checked_sub(asked.elapsed());
    for job in jobs {
        let parent = Parent::Stored(job.trace.as_deref());
        let span = Span::start(Role::Receive, parent, began, || format!("receive {}", job.queue));
        about(&span, "receive", &job.queue);
        span.set(names::JOB, job.id.to_string().as_str());
        span.set(names::WORKER, worker.to_string().as_str());
    }
}

/// The span of an attempt, below that of the enqueue.
pub(crate) fn processing(job: &ClaimedJob, worker: Uuid) -> Span {
    let parent = Parent::Stored(job.trace.as_deref());
    let span = Span::start(Role::Process, parent, None, || format!("process {}", job.queue));
    if span.is_on() {
        about(&span, "process", &job.queue);
        span.set(names::JOB, job.id.to_string().as_str());
        span.set(names::WORKER, worker.to_string().as_str());
        span.set(names::KIND, job.kind.as_str());
        span.set(names::TENANT, job.tenant.as_str());
        span.set(names::ATTEMPT, i64::from(job.attempt));
    }
    span
}

/// What an attempt decided; else what became of it. Ends the span.
pub(crate) fn processed(span: Span, outcome: Option<&Outcome>, otherwise: &str) {
    if !span.is_on() {
        return;
    }
    let (word, error) = match outcome {
        Some(Outcome::Done(_)) => ("done", None),
        Some(Outcome::Retry { error, .. }) => ("retry", Some(error)),
        Some(Outcome::Fail(error)) => ("fail", Some(error)),
        Some(Outcome::Snooze { .. }) => ("snooze", None),
        Some(Outcome::Cancelled) => ("cancelled", None),
        None => (otherwise, None),
    };
    span.set(names::OUTCOME, word);
    if let Some(error) = error {
        span.fail(&error.class);
    }
}

fn about(span: &Span, operation: &str, queue: &str) {
    span.set(names::SYSTEM, names::SYSTEM_POSTHOUSE);
    span.set(names::OPERATION, operation);
    span.set(names::OPERATION_TYPE, operation);
    span.set(names::QUEUE, queue);
}
