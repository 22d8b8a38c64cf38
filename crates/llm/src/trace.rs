//! The span of a call to a model, below that of the attempt. Prompts and answers are in no span.

use crate::answer::{Answer, Usage};
use crate::error::CallError;
use crate::route::Stop;
use posthouse::trace::{Parent, Role, Span, Value, names};

/// A call begins.
pub(crate) fn calling(stop: &Stop) -> Span {
    let (provider, model) = stop.asked();
    let span = Span::start(Role::Call, Parent::Current, None, || format!("chat {model}"));
    if span.is_on() {
        span.set(names::AI_OPERATION, "chat");
        span.set(names::AI_PROVIDER, provider);
        span.set(names::AI_REQUEST_MODEL, model);
        let host = stop.transport.host();
        let (host, port) = host.rsplit_once(':').unwrap_or((&host, ""));
        span.set(names::SERVER, host);
        if let Ok(port) = port.parse::<u64>() {
            span.set(names::PORT, port);
        }
    }
    span
}

/// It was answered.
pub(crate) fn answered(span: &Span, answer: &Answer) {
    if !span.is_on() {
        return;
    }
    span.set(names::AI_RESPONSE_MODEL, answer.model.as_str());
    span.set(names::STATUS, u64::from(answer.status));
    if let Some(reason) = &answer.finish_reason {
        span.set(names::AI_FINISH_REASONS, Value::Texts(vec![reason.clone()]));
    }
    about(span, answer.provider_request_id.as_deref(), answer.first_token_ms, &answer.usage);
}

/// It failed.
pub(crate) fn failed(span: &Span, error: &CallError) {
    if !span.is_on() {
        return;
    }
    span.fail(error.class.as_str());
    if let Some(status) = error.status {
        span.set(names::STATUS, u64::from(status));
    }
    about(span, error.provider_request_id.as_deref(), error.first_token_ms, &error.usage);
}

fn about(span: &Span, id: Option<&str>, first_token_ms: Option<u64>, usage: &Usage) {
    if let Some(id) = id {
        span.set(names::AI_RESPONSE_ID, id);
    }
    if let Some(ms) = first_token_ms {
        span.set(names::AI_FIRST_CHUNK, std::time::Duration::from_millis(ms).as_secs_f64());
    }
    let counts = [
        (names::AI_INPUT_TOKENS, usage.input_tokens),
        (names::AI_OUTPUT_TOKENS, usage.output_tokens),
        (names::AI_CACHED_TOKENS, usage.cached_tokens),
        (names::AI_REASONING_TOKENS, usage.reasoning_tokens),
    ];
    for (name, count) in counts {
        if let Some(count) = count {
            span.set(name, count);
        }
    }
}
