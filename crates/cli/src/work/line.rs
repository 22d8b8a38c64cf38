//! What a worker says, a line each: for people as in `job 3 retry in 4s: …`, for programs one JSON object.

use std::fmt;
use std::time::{Duration, SystemTime};

use posthouse::store::ClaimedJob;
use posthouse::worker::{Event, Summary};
use serde_json::{Value, json};

use crate::style::{BAD, DIM, GOOD, HINT, clean};

/// The first line: who this is and what it serves.
pub(super) struct Opening {
    pub(super) queues: Vec<String>,
    pub(super) kinds: Vec<String>,
    pub(super) concurrency: u32,
    pub(super) lease_ms: u64,
}

impl Opening {
    pub(super) fn to_json(&self) -> String {
        stamped(
            "starting",
            json!({
                "pid": std::process::id(), "version": env!("CARGO_PKG_VERSION"), "queues": self.queues,
                "kinds": self.kinds, "concurrency": self.concurrency, "lease_ms": self.lease_ms,
            }),
        )
    }
}

impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |names: &[String]| clean(&names.join(", "));
        let plural = |names: &[String]| if names.len() == 1 { "" } else { "s" };
        write!(
            f,
            "posthouse {} (pid {}) serves queue{} {}; kind{} {}; up to {} at once; lease {}",
            env!("CARGO_PKG_VERSION"),
            std::process::id(),
            plural(&self.queues),
            list(&self.queues),
            plural(&self.kinds),
            list(&self.kinds),
            self.concurrency,
            humantime::format_duration(Duration::from_millis(self.lease_ms)),
        )
    }
}

/// The first line of a process that only sweeps, for people.
pub(super) fn sweeping_text() -> String {
    format!("posthouse {} (pid {}) does housekeeping only", env!("CARGO_PKG_VERSION"), std::process::id())
}

/// The same, for programs.
pub(super) fn sweeping_json() -> String {
    stamped("sweeping", json!({ "pid": std::process::id(), "version": env!("CARGO_PKG_VERSION") }))
}

/// A transition, for people.
pub(super) fn event_text(event: &Event<'_>) -> String {
    let text = clean(&event.to_string());
    let style = match event {
        Event::Done { .. } | Event::ConnectionRestored => GOOD,
        Event::Failed { .. }
        | Event::Lost { .. }
        | Event::LeaseLost { .. }
        | Event::ConnectionLost { .. }
        | Event::SweepFailed { .. } => BAD,
        Event::Retry { .. } | Event::Snoozed { .. } | Event::Cancelled { .. } | Event::Released { .. } => HINT,
        _ => DIM,
    };
    // The word is coloured, what it is about stays readable.
    let words = match event {
        Event::Started { .. } | Event::Registered { .. } => text.len(),
        _ => text.match_indices(' ').nth(2).map_or(text.len(), |(at, _)| at),
    };
    let (head, rest) = text.split_at(words);
    format!("{style}{head}{style:#}{rest}")
}

/// A transition, for programs.
pub(super) fn event_json(event: &Event<'_>) -> String {
    let job = |job: &ClaimedJob, more: Value| {
        let mut fields = json!({
            "job": job.id, "kind": job.kind, "queue": job.queue, "tenant": job.tenant, "attempt": job.attempt,
            "max_attempts": job.max_attempts,
        });
        merge(&mut fields, more);
        fields
    };
    let (name, fields) = match event {
        Event::Registered { worker } => ("registered", json!({ "worker": worker })),
        Event::Started { job: j } => ("started", job(j, Value::Null)),
        Event::Done { job: j } => ("done", job(j, Value::Null)),
        Event::Retry { job: j, delay, error } => {
            ("retry", job(j, json!({ "delay_ms": millis(*delay), "class": error.class, "error": error.message })))
        }
        Event::Snoozed { job: j, delay, reason } => {
            ("snoozed", job(j, json!({ "delay_ms": millis(*delay), "reason": reason })))
        }
        Event::Failed { job: j, error } => {
            let (class, message) = error.map(|error| (&error.class, &error.message)).unzip();
            ("failed", job(j, json!({ "class": class, "error": message })))
        }
        Event::Cancelled { job: j } => ("cancelled", job(j, Value::Null)),
        Event::Released { job: j } => ("released", job(j, Value::Null)),
        Event::Lost { job: j } => ("lost", job(j, Value::Null)),
        Event::LeaseLost { worker, reason } => ("lease_lost", json!({ "worker": worker, "reason": reason })),
        Event::ConnectionLost { error } => ("connection_lost", json!({ "error": error.to_string() })),
        Event::ConnectionRestored => ("connection_restored", Value::Null),
        Event::Rescued { jobs } => ("rescued", json!({ "jobs": jobs })),
        Event::SweepFailed { sweep, error } => ("sweep_failed", json!({ "sweep": sweep, "error": error })),
        other => ("other", json!({ "text": other.to_string() })),
    };
    stamped(name, fields)
}

/// The last line, for people.
pub(super) fn end_text(summary: &Summary) -> String {
    let counts = [
        (summary.done, "done"),
        (summary.failed, "failed"),
        (summary.retried, "retried"),
        (summary.snoozed, "snoozed"),
        (summary.cancelled, "cancelled"),
        (summary.released, "released"),
        (summary.lost, "lost"),
        (summary.unwritten, "not recorded since Postgres is away (they run again)"),
    ];
    let told: Vec<String> = counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
    if told.is_empty() { "ended: no job was run".to_owned() } else { format!("ended: {}", told.join(", ")) }
}

/// The last line, for programs.
pub(super) fn end_json(summary: &Summary) -> String {
    stamped(
        "ended",
        json!({
            "started": summary.started, "done": summary.done, "failed": summary.failed, "retried": summary.retried,
            "snoozed": summary.snoozed, "cancelled": summary.cancelled, "released": summary.released,
            "lost": summary.lost, "unwritten": summary.unwritten,
        }),
    )
}

fn stamped(event: &str, fields: Value) -> String {
    let now = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
    let mut line = json!({ "event": event, "at": now });
    merge(&mut line, fields);
    line.to_string()
}

fn merge(into: &mut Value, more: Value) {
    if let (Value::Object(into), Value::Object(more)) = (into, more) {
        into.extend(more);
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
