//! Whether what came back is an answer: the last word on a call that ended properly.

use crate::answer::Answer;
use crate::call::Received;
use crate::config::OnTruncated;
use crate::error::{CallError, ErrorClass};
use crate::millis::millis;
use crate::prompt_kind::{Expected, PromptKind};
use crate::redact::Redactor;
use crate::text::{SNIPPET_BYTES_MAX, capped, label, storable};
use crate::trail::Trail;
use serde_json::value::RawValue;

/// Finish reasons that mean "the token limit cut it", in the words of several servers.
const CUT: [&str; 5] = ["length", "max_tokens", "MAX_TOKENS", "max_output_tokens", "model_length"];

/// Makes the answer, or says why it is none. `endpoint` and `model` are who was asked.
pub(crate) fn judge(
    mut received: Received,
    expected: Expected,
    kind: &PromptKind,
    (endpoint, model): (&str, &str),
    redactor: &Redactor,
) -> Result<Answer, Box<CallError>> {
    let assembly = &mut received.assembly;
    let finish_reason = assembly.finish_reason().map(|reason| label(reason, redactor));
    let truncated = finish_reason.as_deref().is_some_and(|reason| CUT.contains(&reason));
    let checked = check(&received, expected, kind, finish_reason.as_deref(), truncated);
    let clean = |text: &str| redactor.clean_known(text).replace('\0', "\u{FFFD}");
    let text = clean(received.assembly.text());
    match checked {
        Ok(json) => {
            let (message, choices) = received.assembly.messages(&clean);
            Ok(Answer {
                text,
                message,
                choices,
                // The digits of its numbers are kept; a key of ours is not.
                json: json.map(|json| without_secrets(json, redactor)),
                finish_reason,
                truncated,
                cleaned: received.assembly.cleaned,
                model: received
                    .assembly
                    .model
                    .as_deref()
                    .map_or_else(|| model.to_owned(), |name| label(name, redactor)),
                endpoint: endpoint.to_owned(),
                provider_request_id: received.request_id.as_deref().map(|id| label(id, redactor)),
                status: received.status,
                latency_ms: millis(received.latency),
                first_token_ms: received.first_token.map(millis),
                usage: received.assembly.usage,
                trail: Trail::default(),
            })
        }
        Err(mut error) => {
            error.status = Some(received.status);
            error.message = capped(&redactor.clean(&storable(&error.message)), SNIPPET_BYTES_MAX).to_owned();
            error.body_snippet = Some(capped(&redactor.clean(&storable(&text)), SNIPPET_BYTES_MAX).to_owned());
            error.provider_request_id = received.request_id.as_deref().map(|id| label(id, redactor));
            error.latency_ms = millis(received.latency);
            error.first_token_ms = received.first_token.map(millis);
            error.usage = received.assembly.usage;
            Err(error)
        }
    }
}

/// The checks in their order: a filtered answer is not "too short", a cut one is not "bad JSON".
fn check(
    received: &Received,
    expected: Expected,
    kind: &PromptKind,
    finish_reason: Option<&str>,
    truncated: bool,
) -> Result<Option<Box<RawValue>>, Box<CallError>> {
    let assembly = &received.assembly;
    let nothing_visible = assembly.text().trim().is_empty() && !assembly.calls_tools();
    match finish_reason {
        Some("content_filter" | "SAFETY") => {
            return Err(CallError::terminal("content_filter", "the provider's content filter stopped the answer"));
        }
        Some("error") => {
            return Err(CallError::new(
                ErrorClass::Incomplete,
                "finish_error",
                "the provider ended the answer with an error",
            ));
        }
        _ => {}
    }
    let worthless = nothing_visible
        || expected.wants_json
        || assembly.has_broken_tool_call()
        || kind.on_truncated == OnTruncated::Fail;
    if truncated && worthless {
        let what = if nothing_visible { "before anything was visible" } else { "in the middle" };
        return Err(CallError::new(
            ErrorClass::Truncated,
            "truncated",
            format!("the token limit cut the answer {what}; raise max_output_tokens or shorten the input"),
        ));
    }
    if assembly.has_broken_tool_call() {
        return Err(CallError::new(
            ErrorClass::Incomplete,
            "broken_tool_call",
            "the arguments of a tool call are not JSON",
        ));
    }
    if nothing_visible && !expected.may_be_empty {
        return Err(match assembly.refusal() {
            Some(refusal) => CallError::terminal("refusal", format!("the model refused: {refusal}")),
            None => CallError::new(ErrorClass::Incomplete, "empty_answer", "the answer is empty"),
        });
    }
    let Some(schema) = &kind.schema else { return Ok(None) };
    schema.check(assembly.text()).map(Some).map_err(|problem| CallError::new(ErrorClass::Schema, "schema", problem))
}

/// The answer as JSON without this process's secrets, should the model have repeated one.
fn without_secrets(json: Box<RawValue>, redactor: &Redactor) -> Box<RawValue> {
    if !redactor.finds(json.get()) {
        return json;
    }
    // A number that happens to be a secret leaves no JSON; the text beside it has it all, redacted.
    RawValue::from_string(redactor.clean_known(json.get())).unwrap_or_else(|_| RawValue::NULL.to_owned())
}
