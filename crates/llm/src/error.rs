//! What a failed call is: its class decides what becomes of the job, its text says what happened.

use crate::answer::{Usage, usage_json};
use crate::millis::millis;
use crate::trail::Trail;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// The code of a call that did not begin to answer in time.
pub(crate) const FIRST_TOKEN_TIMEOUT: &str = "first_token_timeout";
/// The code of an attempt that took too long, though its call was answered.
pub(crate) const ATTEMPT_TIMEOUT: &str = "attempt_timeout";

/// What kind of failure it was. The class, not the status, decides what to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorClass {
    /// Not now: a rate limit or an overload. Ask again after the wait; this was no attempt.
    NotNow,
    /// The account has no money or has reached a spend limit. Waiting does not help, paying does; then somebody opens the gate.
    OutOfCredit,
    /// The same request will never work: bad key, unknown model, context too long, content filter, wrong payload.
    Terminal,
    /// A failure that usually passes: 5xx, connection refused, name server trouble, a timeout.
    Transient,
    /// The connection was lost after the request was sent and before an answer: it may have been billed.
    Ambiguous,
    /// An answer that is none: a stream without an end, an error or HTML under status 200, no choices.
    Incomplete,
    /// The token limit cut the answer where a cut answer is worthless (JSON, tool calls, nothing visible).
    Truncated,
    /// The answer does not match the kind's JSON schema.
    Schema,
}

/// What a worker should do with the job after a failed call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Put it back until the wait is over, without charging the attempt.
    Snooze,
    /// Charge the attempt and try again later.
    Retry,
    /// Give up at once: another attempt would cost the same and fail the same.
    Fail,
}

impl ErrorClass {
    /// The name used in JSON, logs and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotNow => "not_now",
            Self::OutOfCredit => "out_of_credit",
            Self::Terminal => "terminal",
            Self::Transient => "transient",
            Self::Ambiguous => "ambiguous",
            Self::Incomplete => "incomplete",
            Self::Truncated => "truncated",
            Self::Schema => "schema",
        }
    }

    /// What becomes of the job. Where the account is empty it keeps its place until there is money. `Truncated` fails: the same request meets the same limit and is paid again.
    #[must_use]
    pub fn verdict(self) -> Verdict {
        match self {
            Self::NotNow | Self::OutOfCredit => Verdict::Snooze,
            Self::Terminal | Self::Truncated => Verdict::Fail,
            Self::Transient | Self::Ambiguous | Self::Incomplete | Self::Schema => Verdict::Retry,
        }
    }
}

impl fmt::Display for ErrorClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One failed call. Every text in it is redacted and capped before it gets here.
#[derive(Debug, Clone, Serialize)]
pub struct CallError {
    /// Decides what becomes of the job.
    pub class: ErrorClass,
    /// The HTTP status, where there was an answer.
    pub status: Option<u16>,
    /// A stable reason: the provider's own code where it gave one (`context_length_exceeded`), else ours (`first_token_timeout`).
    pub code: String,
    /// What happened, in a sentence.
    pub message: String,
    /// How long the provider asked us to wait; at most an hour. `None`: it did not say.
    #[serde(rename = "wait_ms", serialize_with = "as_ms")]
    pub wait: Option<Duration>,
    /// The beginning of what the provider sent (2 KiB), or of the partial answer, for diagnosis.
    pub body_snippet: Option<String>,
    /// The provider's id of the request (`x-request-id` or `request-id`), to quote to its support.
    pub provider_request_id: Option<String>,
    /// The provider's name in the configuration. `None`: nobody was asked.
    pub endpoint: Option<String>,
    /// The model that was asked.
    pub model: Option<String>,
    /// Milliseconds from the start of the call to its failure.
    pub latency_ms: u64,
    /// Milliseconds to the first piece of content, where one came.
    pub first_token_ms: Option<u64>,
    /// Tokens that were used all the same, where the provider said so.
    pub usage: Usage,
    /// The gate that turned the job away, such as `endpoint:openai/gpt-4o-mini`, where one did.
    pub gate: Option<String>,
    /// Where the attempt went, and why.
    #[serde(skip)]
    pub trail: Trail,
    /// Whether the request can have reached anybody.
    #[serde(skip)]
    pub(crate) was_sent: bool,
}

impl CallError {
    /// A failure with nothing but a class, a code and a message.
    #[must_use]
    pub fn new(class: ErrorClass, code: &str, message: impl Into<String>) -> Box<Self> {
        Box::new(Self {
            class,
            status: None,
            code: code.to_owned(),
            message: message.into(),
            wait: None,
            body_snippet: None,
            provider_request_id: None,
            endpoint: None,
            model: None,
            latency_ms: 0,
            first_token_ms: None,
            usage: Usage::default(),
            gate: None,
            trail: Trail::default(),
            was_sent: true,
        })
    }

    /// A failure of the job itself, found before anybody was asked.
    #[must_use]
    pub fn terminal(code: &str, message: impl Into<String>) -> Box<Self> {
        Self::new(ErrorClass::Terminal, code, message)
    }

    /// What becomes of the job.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.class.verdict()
    }

    /// Whether another endpoint may be asked in the same attempt: nothing was answered, and nothing is to be paid.
    pub(crate) fn passes_on(&self) -> bool {
        match self.class {
            // Without a status it is this process that cannot ask anybody.
            ErrorClass::NotNow => self.status.is_some(),
            class => class == ErrorClass::OutOfCredit,
        }
    }

    /// Whether it counts against the endpoint, as against the request or the time that the job had.
    pub(crate) fn blames_endpoint(&self) -> bool {
        const REQUESTS: [&str; 4] = ["empty_answer", "broken_tool_call", "answer_too_large", "no_choices"];
        match self.class {
            ErrorClass::Transient => self.code != ATTEMPT_TIMEOUT,
            ErrorClass::Ambiguous => true,
            ErrorClass::Incomplete => !REQUESTS.contains(&self.code.as_str()),
            _ => false,
        }
    }

    /// The usage that is stored with the job, in the same shape as that of an answer.
    #[must_use]
    pub fn usage_json(&self) -> serde_json::Value {
        let (endpoint, model) = (self.endpoint.as_deref(), self.model.as_deref());
        let mut usage = usage_json(&self.usage, self.latency_ms, self.first_token_ms, endpoint, model, self.status);
        self.trail.add_to(&mut usage);
        usage
    }

    /// Whether the provider may have done the work, and billed it, though there is no answer.
    #[must_use]
    pub fn perhaps_billed(&self) -> bool {
        const CUT: [&str; 5] =
            [FIRST_TOKEN_TIMEOUT, ATTEMPT_TIMEOUT, "between_tokens_timeout", "stream_cut", "incomplete_stream"];
        self.was_sent && (self.class == ErrorClass::Ambiguous || CUT.contains(&self.code.as_str()))
    }

    /// Everything but what the model answered, as the JSON that is stored with the attempt.
    ///
    /// # Panics
    /// Never: all fields are plain values.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let mut json = serde_json::to_value(self).expect("a call error is plain values");
        if self.perhaps_billed() {
            json["perhaps_billed"] = true.into();
        }
        json
    }
}

/// `401 Unauthorized: Incorrect API key provided`, or the message alone where there was no HTTP answer.
impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) if status != 200 => match reason(status) {
                Some(reason) => write!(f, "{status} {reason}: {}", self.message),
                None => write!(f, "{status}: {}", self.message),
            },
            _ => f.write_str(&self.message),
        }
    }
}

impl std::error::Error for CallError {}

/// The words for a status, also for those that only model providers use.
fn reason(status: u16) -> Option<&'static str> {
    match status {
        529 => Some("Overloaded"),
        _ => hyper::StatusCode::from_u16(status).ok()?.canonical_reason(),
    }
}

fn as_ms<S: serde::Serializer>(wait: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    wait.map(millis).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_like_the_tutorial() {
        let mut error = CallError::terminal("invalid_api_key", "Incorrect API key provided");
        error.status = Some(401);
        assert_eq!(error.to_string(), "401 Unauthorized: Incorrect API key provided");
        error.status = Some(529);
        assert_eq!(error.to_string(), "529 Overloaded: Incorrect API key provided");
        error.status = None;
        assert_eq!(error.to_string(), "Incorrect API key provided");
        assert_eq!(error.to_json()["class"], "terminal");
    }
}
