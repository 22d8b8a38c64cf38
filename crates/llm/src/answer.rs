//! What a call brought home: the answer and its usage, in Rust and in the JSON that is stored with the job.

use crate::trail::Trail;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Tokens of one call, as the provider counted them. `None`: it did not say.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub input_tokens: Option<u64>,
    /// Tokens of the answer, reasoning included.
    pub output_tokens: Option<u64>,
    /// The part of `input_tokens` that came from the provider's cache.
    pub cached_tokens: Option<u64>,
    /// The part of `output_tokens` that was reasoning.
    pub reasoning_tokens: Option<u64>,
    /// What the provider or gateway says it cost, in US dollars, digit by digit as it was sent.
    pub cost_usd: Option<String>,
}

impl Usage {
    /// Takes what a `usage` object says, in the names of chat completions or of responses; later statements win.
    pub(crate) fn take(&mut self, usage: &Value) {
        // Most chunks of a stream have none, or null.
        if !usage.is_object() {
            return;
        }
        let count = |names: [&str; 2]| names.iter().find_map(|name| usage.get(name).and_then(tokens));
        let detail =
            |names: [&str; 2], detail| names.iter().find_map(|name| usage.get(name)?.get(detail).and_then(tokens));
        let (input, output) = (["prompt_tokens", "input_tokens"], ["completion_tokens", "output_tokens"]);
        let input_details = ["prompt_tokens_details", "input_tokens_details"];
        let output_details = ["completion_tokens_details", "output_tokens_details"];
        self.input_tokens = count(input).or(self.input_tokens);
        self.output_tokens = count(output).or(self.output_tokens);
        self.cached_tokens = detail(input_details, "cached_tokens").or(self.cached_tokens);
        self.reasoning_tokens = detail(output_details, "reasoning_tokens").or(self.reasoning_tokens);
        match usage.get("cost") {
            Some(Value::Number(cost)) => self.take_cost(&cost.to_string()),
            Some(Value::String(cost)) => self.take_cost(cost),
            _ => {}
        }
    }

    /// Takes a cost, if it is one: a plain number of dollars, not below zero. Gateways also send "None".
    pub(crate) fn take_cost(&mut self, cost: &str) {
        let cost = cost.trim();
        if cost.len() <= 40 && cost.parse::<f64>().is_ok_and(|dollars| dollars.is_finite() && dollars >= 0.0) {
            self.cost_usd = Some(cost.to_owned());
        }
    }
}

/// A number of tokens. Some servers count in floats.
fn tokens(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let float = value.as_f64().filter(|float| float.fract() == 0.0 && (0.0..1e15).contains(float))?;
        format!("{float:.0}").parse().ok()
    })
}

/// A finished answer.
#[derive(Debug, Clone, Serialize)]
pub struct Answer {
    /// The text of the first choice; empty when it only calls tools.
    pub text: String,
    /// The whole assistant message of the first choice: role, content, tool calls, reasoning, refusal.
    pub message: Value,
    /// All messages with their finish reasons, when more than one choice was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<Value>,
    /// The answer as JSON, when the kind has a schema; numbers digit by digit as the model wrote them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<Box<RawValue>>,
    /// Why the model stopped. `None`: the stream ended properly but gave no reason.
    pub finish_reason: Option<String>,
    /// The token limit cut the answer.
    pub truncated: bool,
    /// Characters that cannot be stored (NUL, lone surrogates) were replaced by U+FFFD.
    pub cleaned: bool,
    /// The model that answered, in the provider's words.
    pub model: String,
    /// The provider's name in the configuration.
    pub endpoint: String,
    /// The provider's id of the request (`x-request-id` or `request-id`), else the id of the completion.
    pub provider_request_id: Option<String>,
    /// The HTTP status.
    #[serde(skip)]
    pub status: u16,
    /// Milliseconds from the start of the call to the end of the answer.
    #[serde(skip)]
    pub latency_ms: u64,
    /// Milliseconds to the first piece of content. `None` for an answer that came in one piece.
    #[serde(skip)]
    pub first_token_ms: Option<u64>,
    /// Tokens, as the provider counted them.
    #[serde(skip)]
    pub usage: Usage,
    /// Where the attempt went, and why.
    #[serde(skip)]
    pub trail: Trail,
}

impl Answer {
    /// The result that is stored with the job: text, message, model, finish reason, truncated, …
    ///
    /// # Panics
    /// Never: all fields are plain values.
    #[must_use]
    pub fn result_json(&self) -> Box<RawValue> {
        serde_json::value::to_raw_value(self).expect("an answer is plain values")
    }

    /// The usage that is stored with the job: tokens, latency, time to first token, endpoint, model, status, requests, route.
    #[must_use]
    pub fn usage_json(&self) -> Value {
        let mut usage = usage_json(
            &self.usage,
            self.latency_ms,
            self.first_token_ms,
            Some(&self.endpoint),
            Some(&self.model),
            Some(self.status),
        );
        self.trail.add_to(&mut usage);
        usage
    }
}

/// One shape for the usage of answers and of failures.
pub(crate) fn usage_json(
    usage: &Usage,
    latency_ms: u64,
    first_token_ms: Option<u64>,
    endpoint: Option<&str>,
    model: Option<&str>,
    status: Option<u16>,
) -> Value {
    json!({
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
        "reasoning_tokens": usage.reasoning_tokens,
        "cost_usd": usage.cost_usd,
        "latency_ms": latency_ms,
        "first_token_ms": first_token_ms,
        "endpoint": endpoint,
        "model": model,
        "status": status,
    })
}
