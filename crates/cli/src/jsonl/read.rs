//! From a line to a job: the fields are those of `posthouse.enqueue_many`; what a line does not say, the command line does.

use std::time::Duration;

use posthouse::NewJob;
use posthouse::job::DedupeFor;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::args::Enqueue;

/// A line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    kind: String,
    /// Raw, so that it is stored as it was written.
    #[serde(default = "empty")]
    payload: Box<RawValue>,
    queue: Option<String>,
    tenant: Option<String>,
    priority: Option<i32>,
    delay_ms: Option<f64>,
    run_at: Option<String>,
    max_attempts: Option<u32>,
    timeout_ms: Option<f64>,
    gates: Option<Vec<String>>,
    tokens: Option<u32>,
    dedupe_key: Option<String>,
    dedupe_by_payload: Option<bool>,
    dedupe_policy: Option<String>,
    dedupe_for_ms: Option<f64>,
}

fn empty() -> Box<RawValue> {
    // Two braces are JSON.
    RawValue::from_string("{}".to_owned()).unwrap_or_else(|_| RawValue::NULL.to_owned())
}

fn milliseconds(name: &str, ms: Option<f64>) -> Result<Option<Duration>, String> {
    let Some(ms) = ms else { return Ok(None) };
    let duration = Duration::try_from_secs_f64(ms / 1000.0);
    duration.map(Some).map_err(|_| format!("{name}: {ms} is not a number of milliseconds from 0 up"))
}

/// The job of a line, or what is wrong with it.
pub(super) fn job(line: &[u8], args: &Enqueue) -> Result<NewJob, String> {
    let line: Line = serde_json::from_slice(line).map_err(|error| complaint(line, &error))?;
    let mut job = NewJob::from_json(line.kind, line.payload.get()).map_err(|error| error.to_string())?;
    if let Some(queue) = line.queue.or_else(|| args.queue.clone()) {
        job = job.queue(queue);
    }
    if let Some(tenant) = line.tenant.or_else(|| args.tenant.clone()) {
        job = job.tenant(tenant);
    }
    if let Some(priority) = line.priority.or(args.priority) {
        job = job.priority(priority);
    }
    if let Some(max_attempts) = line.max_attempts.or(args.max_attempts) {
        job = job.max_attempts(max_attempts);
    }
    if let Some(timeout) = milliseconds("timeout_ms", line.timeout_ms)?.or(args.timeout) {
        job = job.timeout(timeout);
    }
    for gate in line.gates.as_ref().unwrap_or(&args.gates) {
        job = job.gate(gate);
    }
    if let Some(tokens) = line.tokens.or(args.tokens) {
        job = job.tokens(tokens);
    }
    let delay = milliseconds("delay_ms", line.delay_ms)?;
    // A line that says when is not given the other way of the command line on top.
    let says_when = delay.is_some() || line.run_at.is_some();
    if let Some(delay) = delay.or(args.delay.filter(|_| !says_when)) {
        job = job.delay(delay);
    }
    if let Some(run_at) = line.run_at.or_else(|| args.run_at.clone().filter(|_| !says_when)) {
        job = job.run_at_text(run_at);
    }
    let by_payload = line.dedupe_by_payload.unwrap_or(args.dedupe_by_payload && line.dedupe_key.is_none());
    let is_keyed = by_payload || line.dedupe_key.is_some();
    let window = milliseconds("dedupe_for_ms", line.dedupe_for_ms)?.or(args.dedupe_for.filter(|_| is_keyed));
    let policy = match &line.dedupe_policy {
        Some(policy) => Some(policy.parse().map_err(|error: posthouse::Error| error.to_string())?),
        None => args.dedupe_policy.filter(|_| is_keyed),
    };
    for (field, is_given) in [("dedupe_for_ms", window.is_some()), ("dedupe_policy", policy.is_some())] {
        if is_given && !is_keyed {
            return Err(format!("{field}: needs a dedupe_key or dedupe_by_payload"));
        }
    }
    if let Some(key) = line.dedupe_key {
        job = job.dedupe_key(key);
    }
    if by_payload {
        job = job.dedupe_by_payload();
    }
    if let Some(policy) = policy {
        job = job.dedupe_policy(policy);
    }
    if let Some(window) = window {
        job = job.dedupe_for(DedupeFor::Window(window));
    }
    Ok(job)
}

/// What is wrong with a line, where in the line, and what one looks like.
fn complaint(line: &[u8], error: &serde_json::Error) -> String {
    let message = error.to_string().replace(" at line 1 column ", " at column ");
    match line.first() {
        Some(b'[') => format!("{message}; a JSON object a line is needed, which `jq -c '.[]'` makes from an array"),
        Some(b'{') if error.is_eof() => format!("{message}; each object must be on one line, which `jq -c .` does"),
        Some(b'{') => message,
        _ => format!("{message}; a line looks like {{\"kind\":\"summarize\",\"payload\":{{\"text\":\"…\"}}}}"),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    fn args(line: &str) -> Enqueue {
        match crate::args::Cli::parse_from(line.split(' ')).command {
            crate::args::Command::Enqueue(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn mistakes_are_named() {
        let args = args("posthouse enqueue --jsonl f");
        for (line, expected) in [
            ("{\"payload\":{}}", "missing field `kind`"),
            ("{\"kind\":\"a\",\"delay\":3}", "unknown field `delay`"),
            ("{\"kind\":\"a\",\"kind\":\"b\"}", "duplicate field `kind`"),
            ("{\"kind\":\"a\",\"delay_ms\":-1}", "delay_ms: -1"),
            ("{\"kind\":\"a\",\"dedupe_for_ms\":1}", "needs a dedupe_key"),
            ("[{\"kind\":\"a\"}]", "jq -c '.[]'"),
            ("{\"kind\":", "jq -c ."),
            ("summarize", "a line looks like"),
            ("{\"kind\":\"a\"} {}", "trailing characters at column 14"),
        ] {
            let error = job(line.as_bytes(), &args).map(|_| ()).unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
        assert!(job(b"{\"kind\":\"\xff\"}", &args).is_err());
    }

    #[test]
    fn the_command_line_says_what_a_line_does_not() {
        let args =
            args("posthouse enqueue --jsonl f --queue slow --delay 1m --priority 3 --gate crm --gate cms --tokens 77");
        let plain = format!("{:?}", job(b"{\"kind\":\"a\"}", &args).unwrap());
        assert!(plain.contains("slow") && plain.contains("60s") && plain.contains("Some(3)"), "{plain}");
        assert!(plain.contains("[\"crm\", \"cms\"]") && plain.contains("Some(77)"), "{plain}");
        let own = format!("{:?}", job(b"{\"kind\":\"a\",\"gates\":[],\"tokens\":5}", &args).unwrap());
        assert!(!own.contains("crm") && own.contains("Some(5)"), "{own}");
        let line = b"{\"kind\":\"a\",\"queue\":\"fast\",\"run_at\":\"tomorrow\",\"payload\":12345678901234567890123}";
        let own = format!("{:?}", job(line, &args).unwrap());
        assert!(own.contains("fast") && !own.contains("60s") && own.contains("12345678901234567890123"), "{own}");
    }
}
