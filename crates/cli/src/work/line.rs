//! The first and the last line of a worker: for people, and as a JSON object for programs. The lines between are the log's.

use std::fmt;
use std::time::{Duration, SystemTime};

use posthouse::worker::Summary;
use serde_json::{Value, json};

use crate::style::clean;

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

/// Where metrics can be read, for people.
pub(super) fn metrics_text(url: &str) -> String {
    format!("metrics at {url}")
}

/// The same for programs.
pub(super) fn metrics_json(url: &str) -> String {
    stamped("metrics_listening", json!({ "url": url }))
}

fn stamped(event: &str, fields: Value) -> String {
    let now = humantime::format_rfc3339_millis(SystemTime::now());
    // Fields in the order of all other lines; what follows is an object that is never empty.
    let fields = fields.to_string();
    let rest = fields.strip_prefix('{').unwrap_or("}");
    format!("{{\"at\":\"{now}\",\"level\":\"info\",\"event\":\"{event}\",{rest}")
}
