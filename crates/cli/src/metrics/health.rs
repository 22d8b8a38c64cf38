//! Whether a process does its work: Postgres answers, it is registered, its heartbeats are answered, notifications heard, and somebody
//! sweeps.

use std::time::Duration;

use posthouse::worker::{Hearing, Meter, Vitals};
use serde_json::{Value, json};

use super::book::Book;

/// Postgres is asked for a sign of life every second if nothing else is: within five seconds an outage is told.
const SILENT: Duration = Duration::from_secs(4);
/// A sweep does something every second; nobody is told that none does before a minute without.
const UNSWEPT: Duration = Duration::from_secs(60);
/// Heartbeats that may go unanswered in a row before something is wrong, and what an answer may take.
const MISSED_BEATS: u32 = 2;
const SLACK: Duration = Duration::from_secs(2);

/// Whether it is ready, and why not: `{"ready", "reason", "checks"}`.
pub(super) fn readiness(book: &Book) -> (bool, Value) {
    let Book { meter, works, .. } = book;
    // First: whatever else is wrong while Postgres is away comes from that.
    let mut checks = vec![database(book.database.answer_age())];
    if *works {
        match meter.vitals() {
            Some(vitals) => checks.extend(of_worker(&vitals)),
            None => {
                checks.push(Check::new("registration", Some("the worker has not started yet".to_owned()), Value::Null))
            }
        }
    }
    checks.push(sweep(meter, *works, book.fleet.swept()));
    let reason =
        checks.iter().find_map(|check| check.problem.as_ref().map(|problem| format!("{}: {problem}", check.name)));
    let details: serde_json::Map<String, Value> =
        checks.into_iter().map(|check| (check.name.to_owned(), check.to_json())).collect();
    (reason.is_none(), json!({ "ready": reason.is_none(), "reason": reason, "checks": details }))
}

struct Check {
    name: &'static str,
    problem: Option<String>,
    detail: Value,
}

impl Check {
    fn new(name: &'static str, problem: Option<String>, detail: Value) -> Self {
        Self { name, problem, detail }
    }

    fn to_json(&self) -> Value {
        json!({ "ok": self.problem.is_none(), "problem": self.problem, "detail": self.detail })
    }
}

fn database(answer_age: Option<Duration>) -> Check {
    let problem = match answer_age {
        None => Some("no answer from Postgres yet".to_owned()),
        Some(age) => (age > SILENT).then(|| format!("no answer from Postgres for {}", short(age))),
    };
    Check::new("database", problem, json!({ "answer_age_ms": answer_age.map(millis) }))
}

fn of_worker(vitals: &Vitals) -> [Check; 3] {
    let registration = if vitals.stopping {
        Some("the worker shuts down and claims nothing more".to_owned())
    } else if vitals.worker.is_none() {
        Some("the worker is not registered; it tries again".to_owned())
    } else {
        vitals.lease_remaining.is_zero().then(|| "its lease is over; it registers anew".to_owned())
    };
    let late = vitals.heartbeat_every * (MISSED_BEATS + 1) + SLACK;
    let heartbeat = match vitals.heartbeat_age {
        None => Some("no answer from Postgres yet".to_owned()),
        Some(age) => (age > late).then(|| format!("no answer from Postgres for {}", short(age))),
    };
    let (hears, state) = match vitals.hearing {
        Hearing::Connecting => {
            (Some("no connection to hear notifications on; the worker polls meanwhile".to_owned()), "connecting")
        }
        Hearing::Polling => (None, "polling"),
        _ => (None, "listening"),
    };
    [
        Check::new(
            "registration",
            registration,
            json!({ "worker": vitals.worker, "lease_remaining_ms": millis(vitals.lease_remaining) }),
        ),
        Check::new("heartbeat", heartbeat, json!({ "age_ms": vitals.heartbeat_age.map(millis) })),
        Check::new("listener", hears, json!({ "state": state })),
    ]
}

/// A process that only sweeps must do so itself; beside workers any process may.
fn sweep(meter: &Meter, works: bool, fleet_swept: Option<Duration>) -> Check {
    let own = meter.sweep_age();
    let newest = if works { own.into_iter().chain(fleet_swept).min() } else { own };
    let problem = match newest {
        None => Some("nobody has swept yet".to_owned()),
        Some(age) => (age > UNSWEPT).then(|| format!("nobody has swept for {}", short(age))),
    };
    Check::new("sweep", problem, json!({ "own_age_ms": own.map(millis), "fleet_age_ms": fleet_swept.map(millis) }))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn short(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(Duration::from_secs(duration.as_secs()))
}
