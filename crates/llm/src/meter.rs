//! Counts of the calls to one endpoint, for metrics: how they ended, how long they took, what they used. Who is told apart comes from
//! the configuration, so there are only so many.

use crate::answer::{Answer, Usage};
use crate::error::{CallError, ErrorClass};
use crate::trail::OK;
use posthouse::metrics::{Family, Histogram, SampleValue};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Every class of errors, in the order of the counters.
const CLASSES: [ErrorClass; 8] = [
    ErrorClass::NotNow,
    ErrorClass::OutOfCredit,
    ErrorClass::Terminal,
    ErrorClass::Transient,
    ErrorClass::Ambiguous,
    ErrorClass::Incomplete,
    ErrorClass::Truncated,
    ErrorClass::Schema,
];
const TOO_MANY_REQUESTS: u16 = 429;

/// What came of the calls to one endpoint for one model. A call that was cut off, since its job was cancelled or another call
/// was faster, is not counted.
#[derive(Debug, Default)]
pub(crate) struct CallMeter {
    answered: AtomicU64,
    failed: [AtomicU64; CLASSES.len()],
    rate_limited: AtomicU64,
    latency: Histogram,
    first_token: Histogram,
    input_tokens: AtomicU64,
    output_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    /// In billionths of a dollar.
    cost: AtomicU64,
}

impl CallMeter {
    pub(crate) fn answered(&self, answer: &Answer) {
        add(&self.answered, 1);
        self.took(answer.latency_ms, answer.first_token_ms);
        self.used(&answer.usage);
    }

    pub(crate) fn failed(&self, error: &CallError) {
        if let Some(at) = CLASSES.iter().position(|class| *class == error.class) {
            add(&self.failed[at], 1);
        }
        add(&self.rate_limited, u64::from(error.status == Some(TOO_MANY_REQUESTS)));
        self.took(error.latency_ms, error.first_token_ms);
        self.used(&error.usage);
    }

    fn took(&self, latency_ms: u64, first_token_ms: Option<u64>) {
        self.latency.count(Duration::from_millis(latency_ms));
        if let Some(ms) = first_token_ms {
            self.first_token.count(Duration::from_millis(ms));
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn used(&self, usage: &Usage) {
        add(&self.input_tokens, usage.input_tokens.unwrap_or(0));
        add(&self.output_tokens, usage.output_tokens.unwrap_or(0));
        add(&self.cached_tokens, usage.cached_tokens.unwrap_or(0));
        let dollars = usage.cost_usd.as_deref().and_then(|cost| cost.parse::<f64>().ok()).unwrap_or(0.0);
        add(&self.cost, (dollars * 1e9).round() as u64);
    }
}

fn add(counter: &AtomicU64, n: u64) {
    if n > 0 {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}

#[allow(clippy::cast_precision_loss)]
fn number(counter: &AtomicU64) -> f64 {
    counter.load(Ordering::Relaxed) as f64
}

/// All of it, by endpoint and by the model's name there.
pub(crate) fn families<'a>(meters: impl Iterator<Item = ((&'a str, &'a str), &'a CallMeter)>) -> Vec<Family> {
    let mut calls = Family::counter(
        "posthouse_llm_calls_total",
        "Calls to a provider that ended, by what came of them: ok, or the class of the error.",
    );
    let mut limited =
        Family::counter("posthouse_llm_rate_limited_total", "Calls that a provider answered with status 429.");
    let mut latency = Family::histogram("posthouse_llm_call_seconds", "From the start of a call to its end.");
    let mut first =
        Family::histogram("posthouse_llm_first_token_seconds", "From the start of a call to its first token.");
    let mut tokens = Family::counter(
        "posthouse_llm_tokens_total",
        "Tokens as providers counted them; those of type cached are among those of type input.",
    );
    let mut cost =
        Family::counter("posthouse_llm_cost_dollars_total", "US dollars that calls have cost, as far as it is known.");
    for ((endpoint, model), meter) in meters {
        let names = [("endpoint", endpoint), ("model", model)];
        let mut ended = |class, counter| {
            calls.push(&[names[0], names[1], ("class", class)], SampleValue::Number(number(counter)));
        };
        ended(OK, &meter.answered);
        CLASSES.iter().zip(&meter.failed).for_each(|(class, counter)| ended(class.as_str(), counter));
        limited.push(&names, SampleValue::Number(number(&meter.rate_limited)));
        latency.push(&names, meter.latency.value());
        first.push(&names, meter.first_token.value());
        for (kind, counter) in
            [("input", &meter.input_tokens), ("output", &meter.output_tokens), ("cached", &meter.cached_tokens)]
        {
            tokens.push(&[names[0], names[1], ("type", kind)], SampleValue::Number(number(counter)));
        }
        cost.push(&names, SampleValue::Number(number(&meter.cost) / 1e9));
    }
    vec![calls, limited, latency, first, tokens, cost]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::config::Config;
    use crate::engine::Engine;
    use posthouse::metrics::Metrics;

    #[test]
    fn calls_are_counted_by_what_came_of_them() {
        let config = Config::single("http://127.0.0.1:1/v1", "m", None).unwrap();
        let engine = Engine::from_config(&config).unwrap();
        let ((endpoint, _), meter) = engine.meters().next().unwrap();
        let mut error = CallError::new(ErrorClass::NotNow, "rate_limited", "no");
        error.status = Some(429);
        error.latency_ms = 40;
        error.usage = Usage { input_tokens: Some(7), cost_usd: Some("0.0000025".to_owned()), ..Usage::default() };
        meter.failed(&error);
        meter.failed(&CallError::new(ErrorClass::Transient, "connect", "no"));
        let metrics = Metrics::default();
        metrics.add(engine.clone());
        let text = metrics.to_string();
        let names = format!("endpoint=\"{endpoint}\",model=\"m\"");
        for line in [
            format!("posthouse_llm_calls_total{{{names},class=\"not_now\"}} 1\n"),
            format!("posthouse_llm_calls_total{{{names},class=\"transient\"}} 1\n"),
            format!("posthouse_llm_calls_total{{{names},class=\"ok\"}} 0\n"),
            format!("posthouse_llm_rate_limited_total{{{names}}} 1\n"),
            format!("posthouse_llm_call_seconds_bucket{{{names},le=\"0.05\"}} 2\n"),
            format!("posthouse_llm_first_token_seconds_count{{{names}}} 0\n"),
            format!("posthouse_llm_tokens_total{{{names},type=\"input\"}} 7\n"),
            format!("posthouse_llm_cost_dollars_total{{{names}}} 0.0000025\n"),
        ] {
            assert!(text.contains(&line), "no {line} in {text}");
        }
    }
}
