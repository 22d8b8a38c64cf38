//! What went wrong and how it was healed, read from the recorded attempts.

use std::collections::BTreeMap;
use std::time::Duration;

use posthouse::store::JobRecord;
use serde_json::{Value, json};

use super::played::{Played, named};
use super::trouble::LEASE;

/// One kind of trouble.
pub(super) struct Healing {
    /// Its name.
    pub(super) what: &'static str,
    /// What happened.
    pub(super) trouble: String,
    /// What was done about it.
    pub(super) cure: String,
}

impl Healing {
    pub(super) fn to_json(&self) -> Value {
        json!({ "what": self.what, "trouble": self.trouble, "cure": self.cure })
    }
}

/// All of it, the milder first.
pub(super) fn all(played: &Played) -> Vec<Healing> {
    let mut found = Vec::new();
    found.extend(rate_limit(played));
    found.extend(spike(played));
    found.extend(lost_worker(played));
    found.extend(retried(played));
    found.extend(given_up(played));
    found
}

/// Attempts that failed and were made up for, those with the same words together.
fn retried(played: &Played) -> Vec<Healing> {
    let mut jobs: BTreeMap<(&'static str, &str), Vec<i64>> = BTreeMap::new();
    for (job, _) in played.jobs().filter(|(job, _)| job.state == "done") {
        for error in errors(job).iter().filter(|error| error["class"] != "worker_lost") {
            jobs.entry((name(error), text(error))).or_default().push(job.id);
        }
    }
    let healing = |((what, words), ids): ((&'static str, &str), Vec<i64>)| Healing {
        what,
        trouble: format!("{}: {words}", named(&ids)),
        cure: "the call was given up and made again; that attempt counts, and the next one had the answer".to_owned(),
    };
    jobs.into_iter().map(healing).collect()
}

/// Jobs that failed for good, those with the same words together.
fn given_up(played: &Played) -> Vec<Healing> {
    let mut jobs: BTreeMap<(&str, bool), Vec<i64>> = BTreeMap::new();
    for (job, _) in played.jobs().filter(|(job, _)| job.state == "failed") {
        let words = job.error.as_deref().unwrap_or("no error is recorded");
        jobs.entry((words, errors(job).len() <= 1)).or_default().push(job.id);
    }
    let healing = |((words, at_once), ids): ((&str, bool), Vec<i64>)| Healing {
        what: "dead letter",
        trouble: format!("{}: {words}", named(&ids)),
        cure: if at_once {
            "asking again could not help, so nobody did; kept with its error as a dead letter".to_owned()
        } else {
            "tried as often as it may be, then kept with all its errors as a dead letter".to_owned()
        },
    };
    jobs.into_iter().map(healing).collect()
}

/// The attempts of a job that did not end well.
fn errors(job: &JobRecord) -> &[Value] {
    job.errors.as_ref().and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn name(error: &Value) -> &'static str {
    match (error["detail"]["code"].as_str(), error["class"].as_str()) {
        (Some("first_token_timeout" | "between_tokens_timeout" | "attempt_timeout"), _) => "hang",
        (_, Some("incomplete")) => "cut answer",
        (_, Some("transient" | "ambiguous")) => "provider error",
        _ => "error",
    }
}

fn text(error: &Value) -> &str {
    error["error"].as_str().unwrap_or("no error is recorded")
}

fn rate_limit(played: &Played) -> Option<Healing> {
    let (_, words) = played.refused.first_key_value()?;
    let ids: Vec<i64> = played.refused.keys().copied().collect();
    let waited = played.put_off.len();
    Some(Healing {
        what: "rate limit",
        trouble: format!("{}: {words}", named(&ids)),
        cure: format!(
            "asked again when the provider had said; {waited} jobs waited for that, none was charged an attempt"
        ),
    })
}

/// The scripted spike; with a real provider the slowest answer, if it stands out.
fn spike(played: &Played) -> Option<Healing> {
    let latency = |job: &JobRecord| Some(Duration::from_millis(job.usage.as_ref()?["latency_ms"].as_u64()?));
    let mut times: Vec<(Duration, i64)> = played.jobs().filter_map(|(job, _)| Some((latency(job)?, job.id))).collect();
    times.sort_unstable();
    let (median, _) = *times.get(times.len() / 2)?;
    let scripted = played.trouble.spike.map(|place| played.ids[place]);
    let (slowest, id) = match scripted {
        Some(scripted) => *times.iter().find(|(_, id)| *id == scripted)?,
        None => *times.last().filter(|(slowest, _)| *slowest >= LEASE.max(median * 2))?,
    };
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    Some(Healing {
        what: "latency spike",
        trouble: format!("job {id}: the answer took {}, usual are {}", seconds(slowest), seconds(median)),
        cure: format!("waited for; heartbeats renewed the lease of {} s, so nobody else took the job", LEASE.as_secs()),
    })
}

fn lost_worker(played: &Played) -> Option<Healing> {
    let killed = played.killed.as_ref()?;
    Some(Healing {
        what: "lost worker",
        trouble: format!(
            "worker {} (pid {}) was killed with -9 while it held {}",
            killed.worker,
            killed.pid,
            named(&killed.jobs)
        ),
        cure: format!("its lease of {} s ran out, and other workers took over what it had held", LEASE.as_secs()),
    })
}
