//! Schedules: cron rules that enqueue, declared beside the kinds they are for.
//!
//! ```toml
//! [schedules.morning-digest]
//! cron = "30 7 * * MON-FRI"
//! timezone = "Europe/Rome"
//! kind = "digest"
//! payload = { of = "yesterday" }
//! ```

use super::error::ConfigError;
use posthouse::NewJob;
use posthouse::job::{DedupeFor, DedupePolicy};
use posthouse::store;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// One schedule: when, and the job that is enqueued then.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Minute, hour, day of the month, month and day of the week, or a nickname such as `@daily`.
    pub cron: String,
    /// By whose clocks. Default: `UTC`.
    pub timezone: Option<String>,
    /// What becomes of ticks that no process saw within a minute: `skip`, `one` (default: one job makes up for all) or `all`.
    #[serde(default)]
    pub catch_up: store::CatchUp,
    /// With `all`: make up for so many at most, the newest. Default 10.
    pub catch_up_max: Option<u32>,
    /// With `all`: spread over so long, in milliseconds. Default 600,000.
    pub catch_up_over_ms: Option<u64>,
    /// Let jobs be due so much later at most, in milliseconds, each as its tick decides. Default 0.
    pub jitter_ms: Option<u64>,
    /// The kind of the job.
    pub kind: String,
    /// Its payload. Default: an empty table.
    pub payload: Option<toml::Value>,
    /// Its queue. Default: `default`.
    pub queue: Option<String>,
    /// Whose it is. Default: `default`.
    pub tenant: Option<String>,
    /// Smaller runs first. Default 0.
    pub priority: Option<i32>,
    /// Attempts before it becomes a dead letter. Default 5.
    pub max_attempts: Option<u32>,
    /// The longest that one attempt may take, in milliseconds. Default: no limit.
    pub timeout_ms: Option<u64>,
    /// Gates that it passes besides those of its queue, tenant and kind.
    #[serde(default)]
    pub gates: Vec<String>,
    /// The tokens that it is expected to use. Default: estimated, where a gate counts them.
    pub tokens: Option<u32>,
    /// While a job of this tenant and kind holds this key, a tick enqueues no other: so one run does not overtake the one before.
    pub dedupe_key: Option<String>,
    /// What becomes of it if a job holds the key, as in `posthouse enqueue --dedupe-policy`. Default: `keep`.
    pub dedupe_policy: Option<String>,
    /// How long the key stands, in milliseconds. Default: until the job is final.
    pub dedupe_for_ms: Option<u64>,
}

impl Schedule {
    /// As the database takes it. `source`: the name of the file.
    ///
    /// # Errors
    /// When a rule or policy cannot be read, or the payload is no JSON. The error's place is the key.
    pub fn declared(&self, name: &str, source: Option<&str>) -> Result<store::Schedule, ConfigError> {
        let wrong = |key: &str, problem: String| ConfigError::new(format!("schedules.{name}.{key}"), problem);
        let payload = self.payload.clone().map_or_else(|| serde_json::json!({}), json);
        let mut job = NewJob::new(&self.kind, &payload).map_err(|error| wrong("payload", error.to_string()))?;
        for (text, set) in
            [(&self.queue, NewJob::queue as fn(NewJob, String) -> NewJob), (&self.tenant, NewJob::tenant)]
        {
            if let Some(text) = text {
                job = set(job, text.clone());
            }
        }
        if let Some(priority) = self.priority {
            job = job.priority(priority);
        }
        if let Some(max_attempts) = self.max_attempts {
            job = job.max_attempts(max_attempts);
        }
        if let Some(ms) = self.timeout_ms {
            job = job.timeout(Duration::from_millis(ms));
        }
        if let Some(tokens) = self.tokens {
            job = job.tokens(tokens);
        }
        job = self.gates.iter().fold(job, |job, gate| job.gate(gate));
        if let Some(key) = &self.dedupe_key {
            job = job.dedupe_key(key);
        }
        if let Some(policy) = &self.dedupe_policy {
            let policy: DedupePolicy =
                policy.parse().map_err(|e: posthouse::Error| wrong("dedupe_policy", e.to_string()))?;
            job = job.dedupe_policy(policy);
        }
        if let Some(ms) = self.dedupe_for_ms {
            job = job.dedupe_for(DedupeFor::Window(Duration::from_millis(ms)));
        }
        let mut schedule = store::Schedule::new(name, &self.cron, job).catch_up(self.catch_up);
        if let Some(timezone) = &self.timezone {
            schedule = schedule.timezone(timezone);
        }
        let over = Duration::from_millis(self.catch_up_over_ms.unwrap_or(600_000));
        schedule = schedule.catch_up_most(self.catch_up_max.unwrap_or(10), over);
        schedule = schedule.jitter(Duration::from_millis(self.jitter_ms.unwrap_or(0)));
        if let Some(source) = source {
            schedule = schedule.source(source);
        }
        schedule.rule().map_err(|error| {
            let error = error.to_string();
            // It begins with the key.
            let (key, problem) = error.split_once(": ").unwrap_or(("cron", &error));
            wrong(key, problem.to_owned())
        })?;
        Ok(schedule)
    }
}

/// What TOML and JSON have in common; a date becomes text.
fn json(value: toml::Value) -> serde_json::Value {
    match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => number.into(),
        toml::Value::Boolean(is) => is.into(),
        toml::Value::Datetime(date) => date.to_string().into(),
        toml::Value::Array(items) => items.into_iter().map(json).collect(),
        toml::Value::Table(fields) => {
            serde_json::Value::Object(fields.into_iter().map(|(key, value)| (key, json(value))).collect())
        }
    }
}

/// Rules and names that cannot be. The rest the database says when they are set.
pub(super) fn check(schedules: &BTreeMap<String, Schedule>) -> Result<(), ConfigError> {
    for (name, schedule) in schedules {
        if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) {
            return Err(ConfigError::new(
                format!("schedules.{name}"),
                "no name for a schedule; use 1 to 200 bytes without control characters",
            ));
        }
        schedule.declared(name, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::Config;
    use std::path::Path;

    #[test]
    fn a_file_with_schedules_only_asks_nobody() {
        let text = "[schedules.digest]\ncron = '@daily'\nkind = 'digest'\npayload = { of = 2027-01-31, n = [1, 2.5, true] }\ncatch_up = 'all'";
        let config = Config::parse(text, Path::new("")).unwrap();
        assert!(config.asks_nobody());
        let schedule = config.schedules["digest"].declared("digest", Some("posthouse.toml")).unwrap();
        assert_eq!(schedule.name(), "digest");
        let shown = format!("{schedule:?}");
        assert!(shown.contains(r#"{"n":[1,2.5,true],"of":"2027-01-31"}"#), "{shown}");
    }

    #[test]
    fn mistakes_name_the_key_and_the_cure() {
        for (text, expected) in [
            ("kind = 'k'", "line 1: missing field `cron`"),
            ("cron = '* * * *'\nkind = 'k'", "schedules.s.cron: '* * * *' has 4 fields; write five"),
            (
                "cron = '0 25 * * *'\nkind = 'k'",
                "schedules.s.cron: hour: '25': number out of bounds; allowed are 0 to 23",
            ),
            ("cron = '0 0 30 2 *'\nkind = 'k'", "schedules.s.cron: '0 0 30 2 *' is never due"),
            ("cron = '@daily'\nkind = 'k'\ntimezone = 'Mars'", "schedules.s.timezone: there is no time zone 'Mars'"),
            (
                "cron = '@daily'\nkind = 'k'\ncatch_up = 'two'",
                "line 4, catch_up: unknown variant `two`, expected one of `skip`, `one`, `all`",
            ),
            ("cron = '@daily'\nkind = 'k'\ndedupe_policy = 'x'", "schedules.s.dedupe_policy: "),
            ("cron = '@daily'\nkind = 'k'\nrun_at = 'x'", "line 4, run_at: unknown field `run_at`"),
        ] {
            let found = Config::parse(&format!("[schedules.s]\n{text}"), Path::new("")).unwrap_err().to_string();
            assert!(found.starts_with(expected), "{found}\n  wanted: {expected}");
        }
    }
}
