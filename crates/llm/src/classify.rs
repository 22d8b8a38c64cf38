//! From what a provider answered to what kind of failure it is.
//!
//! The body wins over the status: a 429 that says `insufficient_quota` is no rate limit, a 429 that says
//! `context_length_exceeded` will never pass, and an error may come under status 200. Where the body says nothing, the
//! status decides. Bodies differ: `error` is an object or a string, `code` a string or a number, and the whole may be
//! wrapped in an array.

use crate::error::ErrorClass;
use crate::hint;
use serde_json::Value;
use std::time::Duration;

/// What an error body says, in whatever shape it came.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ErrorBody {
    /// All machine-readable words: `code`, `type`, `status`, inner codes; in lower case.
    pub words: Vec<String>,
    /// The provider's own code, the most telling one.
    pub code: Option<String>,
    /// The human-readable message.
    pub message: Option<String>,
    /// A status inside the body, where `code` is a number or a number in a string.
    pub status: Option<u16>,
    /// The wait the body asks for (Gemini's `retryDelay`, or its message).
    pub wait: Option<Duration>,
    /// A quota of zero or per day: waiting minutes is of no use.
    pub quota_is_gone: bool,
    /// OpenRouter's 402 that only says that too much is in flight.
    pub in_flight_budget: bool,
    /// OpenRouter's 403 that came from its moderation.
    pub moderated: bool,
}

impl ErrorBody {
    /// Reads an error out of a body, if there is one.
    #[must_use]
    pub fn from_json(body: &Value) -> Option<Self> {
        let body = match body {
            Value::Array(items) => items.first()?,
            other => other,
        };
        let error = match body.get("error").filter(|error| is_something(error)).map(innermost) {
            Some(error) => error,
            // vLLM of old: {"object":"error","message":…}. FastAPI: {"detail":…}. Others: {"message":…} without choices.
            _ if body.get("choices").is_some() => return None,
            _ if body.get("message").is_some()
                || body.get("detail").is_some()
                || body.get("object") == Some(&Value::from("error")) =>
            {
                body
            }
            _ => return None,
        };
        let mut found = Self::default();
        if !error.is_object() {
            found.message = Some(error.as_str().map_or_else(|| error.to_string(), str::to_owned));
            // A bare number is a status. Azure's gateway puts the code beside the string.
            found.take_code(Some(error).filter(|error| error.is_number()));
            found.take_code(body.get("code"));
            return Some(found);
        }
        for pointer in ["/code", "/details/error_code", "/type", "/status", "/innererror/code", "/metadata/error_type"]
        {
            found.take_code(error.pointer(pointer));
        }
        // {"type":"error","error":{…}} carries no word of its own; FastAPI's detail is a string or a list.
        found.message = ["message", "detail", "msg"].iter().find_map(|name| match error.get(name) {
            Some(Value::String(text)) => Some(text.clone()),
            Some(list @ (Value::Array(_) | Value::Object(_))) => Some(list.to_string()),
            _ => None,
        });
        found.in_flight_budget =
            error.pointer("/metadata/limit_source") == Some(&Value::from("openrouter_in_flight_budget"));
        found.moderated = error.pointer("/metadata/reasons").is_some();
        found.take_google_details(error);
        Some(found)
    }

    fn take_code(&mut self, value: Option<&Value>) {
        let word = match value {
            Some(Value::String(text)) => text.trim().to_owned(),
            Some(Value::Number(number)) => number.to_string(),
            _ => return,
        };
        if let Ok(status) = word.parse::<u16>() {
            if (400..600).contains(&status) {
                self.status.get_or_insert(status);
            }
        } else if !word.is_empty() && word != "error" {
            self.words.push(word.to_lowercase());
            self.code.get_or_insert(word);
        }
    }

    /// Gemini says in `details` how long to wait and which quota it was; and once more in the message.
    fn take_google_details(&mut self, error: &Value) {
        for detail in error.get("details").and_then(Value::as_array).into_iter().flatten() {
            if let Some(delay) = detail.get("retryDelay").and_then(Value::as_str) {
                self.wait = hint::go_duration(delay);
            }
            for violation in detail.get("violations").and_then(Value::as_array).into_iter().flatten() {
                let quota = violation.get("quotaId").and_then(Value::as_str).unwrap_or("");
                self.quota_is_gone |= quota.contains("PerDay");
            }
        }
        let message = self.message.as_deref().unwrap_or("");
        if let Some((_, after)) = message.split_once("Please retry in ") {
            let delay = after.split_whitespace().next().unwrap_or("").trim_end_matches('.');
            self.wait = self.wait.or_else(|| hint::go_duration(delay));
        }
        self.quota_is_gone |= message.split("limit: ").skip(1).any(|rest| {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits == "0"
        });
    }

    fn says(&self, wanted: &[&str]) -> bool {
        self.words.iter().any(|word| wanted.contains(&word.as_str()))
    }

    fn message_has(&self, wanted: &[&str]) -> bool {
        let message = self.message.as_deref().unwrap_or("").to_lowercase();
        wanted.iter().any(|phrase| message.contains(phrase))
    }
}

const OUT_OF_CREDIT: [&str; 7] = [
    "insufficient_quota",
    "billing_error",
    "billing_hard_limit_reached",
    "billing_not_active",
    "enforced_spend_limit_reached",
    "insufficient_credits",
    "credit_balance_too_low",
];
const CONTEXT: [&str; 4] = [
    "context_length_exceeded",
    "exceed_context_size_error",
    "model_context_window_exceeded",
    "contextwindowexceedederror",
];
const CONTEXT_PHRASES: [&str; 6] = [
    "maximum context length",
    "context length exceeded",
    "exceeds the context window",
    "prompt is too long",
    "exceeds the available context size",
    "input token count exceeds",
];
const FILTER: [&str; 4] =
    ["content_filter", "responsibleaipolicyviolation", "content_policy_violation", "moderation_blocked"];
const NOT_NOW: [&str; 8] = [
    "rate_limit_exceeded",
    "rate_limit_error",
    "ratelimiterror",
    "too_many_requests",
    "throttling_error",
    "ramp_limit_exceeded",
    "overloaded_error",
    "resource_exhausted",
];

/// The class and the reason code of a failure. `status` is the HTTP status, `waits` whether the headers or the body ask for a wait.
#[must_use]
pub fn classify(status: u16, body: &ErrorBody, waits: bool) -> (ErrorClass, String) {
    let own = |fallback: &str| body.code.clone().unwrap_or_else(|| fallback.to_owned());
    let status = effective_status(status, body);
    let deterministic = matches!(status, 200 | 400 | 413 | 422 | 429 | 500);
    if body.says(&CONTEXT) || (deterministic && body.message_has(&CONTEXT_PHRASES)) {
        return (ErrorClass::Terminal, "context_length_exceeded".to_owned());
    }
    if body.says(&FILTER) || (status == 403 && body.moderated) {
        return (ErrorClass::Terminal, "content_filter".to_owned());
    }
    if body.in_flight_budget && waits {
        return (ErrorClass::NotNow, "in_flight_budget".to_owned());
    }
    if body.says(&OUT_OF_CREDIT) || body.quota_is_gone || status == 402 {
        return (ErrorClass::OutOfCredit, own("out_of_credit"));
    }
    if body.says(&["invalid_api_key", "model_not_found", "string_above_max_length"]) {
        return (ErrorClass::Terminal, own("refused"));
    }
    match status {
        _ if body.says(&NOT_NOW) => (ErrorClass::NotNow, own("rate_limited")),
        429 => (ErrorClass::NotNow, own("rate_limited")),
        529 => (ErrorClass::NotNow, own("overloaded")),
        503 if waits => (ErrorClass::NotNow, own("unavailable")),
        408 | 409 | 425 | 500.. => (ErrorClass::Transient, own(&format!("http_{status}"))),
        300..400 => (ErrorClass::Terminal, "redirect".to_owned()),
        400..500 => (ErrorClass::Terminal, own(&format!("http_{status}"))),
        // An error under status 200 that does not say what it is.
        _ => (ErrorClass::Incomplete, own("error_in_answer")),
    }
}

/// The status the provider meant: the one in the body, else the HTTP one, else the one its words stand for.
fn effective_status(status: u16, body: &ErrorBody) -> u16 {
    if let Some(inner) = body.status {
        return inner;
    }
    if status >= 300 {
        return status;
    }
    let meanings: [(&[&str], u16); 9] = [
        (&["invalid_request_error", "invalid_argument", "badrequesterror"], 400),
        (&["authentication_error", "unauthenticated", "invalid_api_key"], 401),
        (&["permission_error", "permission_denied"], 403),
        (&["not_found_error", "not_found"], 404),
        (&["request_too_large"], 413),
        (&["server_error", "api_error", "internal_error", "internal", "internal_server_error"], 500),
        (&["service_unavailable", "unavailable", "engine_overloaded_error"], 503),
        (&["timeout_error", "deadline_exceeded"], 504),
        (&["overloaded"], 529),
    ];
    meanings.iter().find(|(words, _)| body.says(words)).map_or(status, |(_, meant)| *meant)
}

/// Some servers send an empty error with every answer.
fn is_something(error: &Value) -> bool {
    match error {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.trim().is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(map) => !map.is_empty(),
        _ => true,
    }
}

/// The error inside of lists and of errors: gateways wrap what they were told.
fn innermost(error: &Value) -> &Value {
    let inner = match error {
        Value::Array(items) => items.first(),
        Value::Object(map) if !map.contains_key("message") => map.get("error"),
        _ => None,
    };
    inner.filter(|inner| is_something(inner)).map_or(error, innermost)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use ErrorClass::{Incomplete, NotNow, OutOfCredit, Terminal, Transient};
    use serde_json::json;

    fn class(status: u16, body: &str) -> (ErrorClass, String) {
        let body = serde_json::from_str(body).ok().and_then(|body| ErrorBody::from_json(&body)).unwrap_or_default();
        classify(status, &body, body.wait.is_some())
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn bodies_of_many_providers() {
        let cases: &[(u16, &str, ErrorClass, &str)] = &[
            // OpenAI
            (
                401,
                r#"{"error":{"message":"Incorrect API key provided","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#,
                Terminal,
                "invalid_api_key",
            ),
            (
                404,
                r#"{"error":{"message":"The model `x` does not exist","type":"invalid_request_error","code":"model_not_found"}}"#,
                Terminal,
                "model_not_found",
            ),
            (
                429,
                r#"{"error":{"message":"Rate limit reached","type":"requests","code":"rate_limit_exceeded"}}"#,
                NotNow,
                "rate_limit_exceeded",
            ),
            (
                429,
                r#"{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}"#,
                OutOfCredit,
                "insufficient_quota",
            ),
            (
                429,
                r#"{"error":{"message":"too long","code":"context_length_exceeded"}}"#,
                Terminal,
                "context_length_exceeded",
            ),
            (
                400,
                r#"{"error":{"message":"This model's maximum context length is 8192 tokens","type":"invalid_request_error","code":null}}"#,
                Terminal,
                "context_length_exceeded",
            ),
            (
                400,
                r#"{"error":{"message":"Invalid 'x'","type":"invalid_request_error","code":"string_above_max_length"}}"#,
                Terminal,
                "string_above_max_length",
            ),
            (
                500,
                r#"{"error":{"message":"The server had an error","type":"server_error","code":null}}"#,
                Transient,
                "server_error",
            ),
            (
                503,
                r#"{"error":{"message":"Slow down","type":"service_unavailable"}}"#,
                Transient,
                "service_unavailable",
            ),
            // Anthropic
            (
                529,
                r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"r"}"#,
                NotNow,
                "overloaded_error",
            ),
            (402, r#"{"type":"error","error":{"type":"billing_error","message":"pay"}}"#, OutOfCredit, "billing_error"),
            (
                429,
                r#"{"type":"error","error":{"type":"rate_limit_error","message":"m","details":{"error_code":"enforced_spend_limit_reached"}}}"#,
                OutOfCredit,
                "enforced_spend_limit_reached",
            ),
            (409, r#"{"type":"error","error":{"type":"conflict_error","message":"m"}}"#, Transient, "conflict_error"),
            (
                200,
                r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
                NotNow,
                "overloaded_error",
            ),
            (200, r#"{"type":"error","error":{"type":"api_error","message":"m"}}"#, Transient, "api_error"),
            (
                200,
                r#"{"type":"error","error":{"type":"authentication_error","message":"m"}}"#,
                Terminal,
                "authentication_error",
            ),
            // Gemini, wrapped in an array
            (
                429,
                r#"[{"error":{"code":429,"message":"You exceeded your current quota. Please retry in 46.5s.","status":"RESOURCE_EXHAUSTED"}}]"#,
                NotNow,
                "RESOURCE_EXHAUSTED",
            ),
            (
                429,
                r#"[{"error":{"code":429,"message":"Quota exceeded, limit: 0","status":"RESOURCE_EXHAUSTED"}}]"#,
                OutOfCredit,
                "RESOURCE_EXHAUSTED",
            ),
            (
                429,
                r#"{"error":{"code":429,"message":"m","status":"RESOURCE_EXHAUSTED","details":[{"violations":[{"quotaId":"GenerateRequestsPerDayPerProject"}]}]}}"#,
                OutOfCredit,
                "RESOURCE_EXHAUSTED",
            ),
            (503, r#"{"error":{"code":503,"message":"m","status":"UNAVAILABLE"}}"#, Transient, "UNAVAILABLE"),
            // Azure
            (
                400,
                r#"{"error":{"message":"filtered","code":"content_filter","status":400,"innererror":{"code":"ResponsibleAIPolicyViolation"}}}"#,
                Terminal,
                "content_filter",
            ),
            (
                429,
                r#"{"error":{"code":"429","message":"Requests have exceeded call rate limit"}}"#,
                NotNow,
                "rate_limited",
            ),
            // OpenRouter
            (200, r#"{"error":{"code":502,"message":"model down"}}"#, Transient, "http_502"),
            (
                403,
                r#"{"error":{"code":403,"message":"flagged","metadata":{"reasons":["violence"]}}}"#,
                Terminal,
                "content_filter",
            ),
            (402, r#"{"error":{"code":402,"message":"credits"}}"#, OutOfCredit, "out_of_credit"),
            // vLLM, llama.cpp, Ollama, LiteLLM, FastAPI
            (
                400,
                r#"{"object":"error","message":"maximum context length is 10","type":"BadRequestError","code":400}"#,
                Terminal,
                "context_length_exceeded",
            ),
            (
                400,
                r#"{"error":{"code":400,"message":"m","type":"exceed_context_size_error","n_ctx":5}}"#,
                Terminal,
                "context_length_exceeded",
            ),
            (
                404,
                r#"{"error":{"message":"model not found","type":"not_found_error","param":null,"code":null}}"#,
                Terminal,
                "not_found_error",
            ),
            (429, r#"{"error":{"message":"m","type":"throttling_error","code":"429"}}"#, NotNow, "throttling_error"),
            (500, r#"{"error":{"message":"m","code":"400"}}"#, Terminal, "http_400"),
            (422, r#"{"detail":[{"msg":"field required"}]}"#, Terminal, "http_422"),
            (500, r#"{"error":"boom"}"#, Transient, "http_500"),
            // Wrapped, and in the wrong types
            (
                400,
                r#"{"error":{"error":{"message":"m","code":"insufficient_quota"}}}"#,
                OutOfCredit,
                "insufficient_quota",
            ),
            (
                429,
                r#"{"error":[{"message":"m","code":"context_length_exceeded"}]}"#,
                Terminal,
                "context_length_exceeded",
            ),
            (200, r#"{"error":503,"choices":[]}"#, Transient, "http_503"),
            (200, r#"{"error":["boom"],"choices":[]}"#, Incomplete, "error_in_answer"),
            (200, r#"{"error":true}"#, Incomplete, "error_in_answer"),
            // No body worth the name
            (400, "", Terminal, "http_400"),
            (502, "<html>", Transient, "http_502"),
            (522, "", Transient, "http_522"),
            (408, "", Transient, "http_408"),
            (425, "", Transient, "http_425"),
            (413, "", Terminal, "http_413"),
            (407, "", Terminal, "http_407"),
            (302, "", Terminal, "redirect"),
            (200, r#"{"error":"odd"}"#, Incomplete, "error_in_answer"),
        ];
        for (status, body, expected, code) in cases {
            assert_eq!(class(*status, body), (*expected, (*code).to_owned()), "{status} {body}");
        }
    }

    #[test]
    fn a_wait_turns_an_unavailable_into_not_now() {
        let body = ErrorBody::default();
        assert_eq!(classify(503, &body, true).0, NotNow);
        assert_eq!(classify(503, &body, false).0, Transient);
        let in_flight = json!({ "error": { "code": 402, "message": "m", "metadata": { "limit_source": "openrouter_in_flight_budget" } } });
        let body = ErrorBody::from_json(&in_flight).unwrap();
        assert_eq!(classify(402, &body, true).0, NotNow);
        assert_eq!(classify(402, &body, false).0, OutOfCredit);
    }

    #[test]
    fn gemini_says_how_long() {
        let body = json!([{ "error": { "code": 429, "message": "m", "details": [{ "@type": "…RetryInfo", "retryDelay": "46s" }] } }]);
        assert_eq!(ErrorBody::from_json(&body).unwrap().wait, Some(Duration::from_secs(46)));
        let body = json!({ "error": { "message": "Please retry in 10h17m5.72s.", "code": 429 } });
        assert_eq!(ErrorBody::from_json(&body).unwrap().wait, Some(hint::WAIT_MAX));
    }

    #[test]
    fn an_answer_is_no_error() {
        assert_eq!(ErrorBody::from_json(&json!({ "choices": [], "message": "x" })), None);
        assert_eq!(ErrorBody::from_json(&json!({ "choices": [], "error": null })), None);
        assert_eq!(ErrorBody::from_json(&json!([])), None);
        for nothing in [json!(""), json!({}), json!([]), json!(false)] {
            assert_eq!(ErrorBody::from_json(&json!({ "choices": [], "error": nothing })), None);
        }
    }
}
