//! From a decision to the bytes of a reply: a status, headers, and a list of frames that are played one after the other.

use super::answer::{answer, prompt_tokens, tokens};
use super::delay::Delay;
use super::fault::Fault;
use super::script::{Script, Step};
use bytes::Bytes;
use serde_json::{Value, json};
use std::time::Duration;

/// One thing that happens in a reply's body.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    /// Bytes are sent.
    Data(Bytes),
    /// Time passes.
    Wait(Duration),
    /// The bytes are sent again and again, so much time between them.
    Forever(Bytes, Duration),
    /// Nothing happens any more.
    Hang,
    /// The connection breaks.
    Break,
    /// The connection is reset.
    Reset,
}

#[derive(Debug)]
pub(crate) struct Reply {
    /// Time to the headers; `None` is never.
    pub(crate) delay: Option<Duration>,
    /// Reset the connection instead of replying.
    pub(crate) reset: bool,
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) frames: Vec<Frame>,
}

/// What is known about the request.
pub(crate) struct Asked<'a> {
    pub(crate) number: u64,
    pub(crate) body: &'a Value,
    pub(crate) input: &'a str,
    /// The request line and all headers, for `echo`.
    pub(crate) raw: &'a str,
}

const JSON: &str = "application/json";
const STREAM: &str = "text/event-stream; charset=utf-8";
const HTML: &str = "text/html";

/// The whole reply of a step to a request.
pub(crate) fn reply(script: &Script, step: &Step, asked: &Asked<'_>, dice: &mut fastrand::Rng) -> Reply {
    let mut reply = Reply {
        delay: Some(step.latency.unwrap_or(script.latency).draw(dice)),
        reset: false,
        status: 200,
        headers: vec![("x-request-id", format!("req-sim-{}", asked.number))],
        frames: Vec::new(),
    };
    let text = match (&step.fault, &step.text) {
        (Fault::Say, Some(text)) => text.clone(),
        _ => answer(asked.body, asked.input),
    };
    let writer = Writer {
        script,
        step,
        asked,
        text: &text,
        first_token: step.first_token.unwrap_or(script.first_token).draw(dice),
    };
    match refusal(step, asked) {
        Some((status, kind, body)) => {
            if let Some(wait) = step.retry_after {
                reply.headers.push(("retry-after", seconds(wait, dice)));
            }
            if let Some(ms) = step.retry_after_ms {
                reply.headers.push(("retry-after-ms", ms.to_string()));
            }
            if status == 302 {
                reply.headers.push(("location", "/elsewhere".to_owned()));
            }
            reply.whole(status, kind, body);
        }
        None => writer.write(&mut reply),
    }
    reply
}

fn seconds(wait: Delay, dice: &mut fastrand::Rng) -> String {
    // The header knows whole seconds; a fraction is what some servers send all the same.
    let seconds = wait.draw(dice).as_secs_f64();
    if seconds.fract() == 0.0 { format!("{seconds:.0}") } else { format!("{seconds:.3}") }
}

impl Reply {
    fn whole(&mut self, status: u16, kind: &str, body: String) {
        self.status = status;
        self.headers.push(("content-type", kind.to_owned()));
        self.frames = vec![Frame::Data(body.into())];
    }
}

/// Status, content type and body of the faults that are no answer.
fn refusal(step: &Step, asked: &Asked<'_>) -> Option<(u16, &'static str, String)> {
    let error = |status: u16, code: &str, kind: &str, message: &str| {
        Some((
            status,
            JSON,
            json!({ "error": { "message": message, "type": kind, "param": null, "code": code } }).to_string(),
        ))
    };
    let page = |title: &str, bytes: usize| {
        format!(
            "<!DOCTYPE html><html><head><title>{title}</title></head><body>{}</body></html>",
            "<p>x</p>".repeat(bytes / 8)
        )
    };
    match step.fault {
        Fault::Status(status) => {
            let (code, kind, message) = usual_error(status);
            error(status, code, kind, message)
        }
        Fault::InsufficientQuota => error(429, "insufficient_quota", "insufficient_quota", "You exceeded your current quota, please check your plan and billing details."),
        Fault::ContextLength => error(400, "context_length_exceeded", "invalid_request_error", "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens."),
        Fault::ModelNotFound => error(404, "model_not_found", "invalid_request_error", "The model does not exist or you do not have access to it."),
        Fault::Echo => error(400, "invalid_request", "invalid_request_error", &format!("cannot handle this request: {} {}", asked.raw, asked.body)),
        Fault::Error200 => Some((200, JSON, json!({ "error": { "code": 502, "message": "Provider returned error", "metadata": { "provider_name": "sim" } } }).to_string())),
        Fault::NoChoices => Some((200, JSON, json!({ "id": "chatcmpl-sim", "object": "chat.completion", "choices": [] }).to_string())),
        Fault::Html200 => Some((200, HTML, page("Sign in", 1_000))),
        Fault::Html502 => Some((502, HTML, page("502 Bad Gateway", 2_000_000))),
        Fault::Empty => Some((200, JSON, String::new())),
        Fault::Empty400 => Some((400, JSON, String::new())),
        Fault::Redirect => Some((302, HTML, String::new())),
        _ => None,
    }
}

fn usual_error(status: u16) -> (&'static str, &'static str, &'static str) {
    match status {
        400 => ("invalid_value", "invalid_request_error", "Invalid value."),
        401 => ("invalid_api_key", "invalid_request_error", "Incorrect API key provided"),
        402 => ("insufficient_credits", "billing_error", "Insufficient credits."),
        403 => (
            "unsupported_country_region_territory",
            "request_forbidden",
            "Country, region, or territory not supported.",
        ),
        404 => ("not_found", "not_found_error", "Not found."),
        413 => ("request_too_large", "request_too_large", "Request exceeds the maximum size."),
        429 => ("rate_limit_exceeded", "requests", "Rate limit reached for requests."),
        503 => (
            "service_unavailable",
            "service_unavailable",
            "The engine is currently overloaded, please try again later.",
        ),
        529 => ("overloaded_error", "overloaded_error", "Overloaded"),
        500.. => ("server_error", "server_error", "The server had an error while processing your request."),
        _ => ("refused", "invalid_request_error", "The request was refused."),
    }
}

/// Writes answers, proper and broken ones.
struct Writer<'a> {
    script: &'a Script,
    step: &'a Step,
    asked: &'a Asked<'a>,
    text: &'a str,
    first_token: Duration,
}

impl Writer<'_> {
    fn write(&self, reply: &mut Reply) {
        let streams = self.asked.body["stream"] == true;
        match self.step.fault {
            Fault::Hang => reply.delay = None,
            Fault::Reset => reply.reset = true,
            Fault::Gzip => {
                reply.headers.push(("content-encoding", "gzip".to_owned()));
                reply.whole(200, JSON, "\u{1f}\u{8b} this is not gzip".to_owned());
            }
            Fault::ContentLength => {
                let body = self.completion(self.text, "stop");
                reply.headers.push(("content-length", (body.len() + 100).to_string()));
                reply.whole(200, JSON, body);
                reply.frames.push(Frame::Break);
            }
            Fault::Drip => {
                self.stream(reply, vec![Frame::Forever(": keep-alive\n\n".into(), Duration::from_millis(20))])
            }
            Fault::Garbage => self.stream(reply, vec![Frame::Data("data: {\"choices\":[{\n\n".into())]),
            Fault::Huge => self.stream(
                reply,
                vec![Frame::Forever(self.delta(&json!({ "content": "x".repeat(1 << 20) })), Duration::ZERO)],
            ),
            Fault::HugeLine => self.stream(
                reply,
                vec![Frame::Data("data: ".into()), Frame::Forever("x".repeat(1 << 20).into(), Duration::ZERO)],
            ),
            Fault::NoStream => reply.whole(200, JSON, self.completion(self.text, "stop")),
            Fault::Length if !streams => reply.whole(200, JSON, self.completion(&self.head().concat(), "length")),
            Fault::Filter if !streams => {
                reply.whole(200, JSON, self.completion(&self.head().concat(), "content_filter"))
            }
            Fault::Ok | Fault::Say if !streams => {
                reply.frames.push(Frame::Wait(self.first_token));
                let body = self.completion(self.text, "stop");
                let waiting = std::mem::take(&mut reply.frames);
                reply.whole(200, JSON, body);
                reply.frames.splice(0..0, waiting);
            }
            _ => self.stream(reply, self.frames()),
        }
    }

    fn stream(&self, reply: &mut Reply, frames: Vec<Frame>) {
        reply.headers.push(("content-type", STREAM.to_owned()));
        reply.frames = frames;
    }

    /// The stream of an answer, up to the fault.
    fn frames(&self) -> Vec<Frame> {
        let mut frames = vec![
            Frame::Data(self.delta(&json!({ "role": "assistant", "content": "" }))),
            Frame::Wait(self.first_token),
        ];
        let head = self.head();
        match self.step.fault {
            Fault::HangMid => self.say(&mut frames, &head, &[Frame::Hang]),
            Fault::Cut => self.say(&mut frames, &head, &[]),
            Fault::ResetMid => self.say(&mut frames, &head, &[Frame::Reset]),
            Fault::CutUtf8 => {
                // The last event ends after the first of the three bytes of "€".
                let whole = self.delta(&json!({ "content": "€" }));
                let cut = whole.iter().position(|&byte| byte == 0xE2).unwrap_or(0) + 1;
                self.say(&mut frames, &head, &[Frame::Data(whole.slice(..cut)), Frame::Break]);
            }
            Fault::StreamError => {
                let event = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n";
                self.say(&mut frames, &head, &[Frame::Data(event.into())]);
            }
            Fault::Length => self.say(&mut frames, &head, &self.ending("length")),
            Fault::Filter => self.say(&mut frames, &head, &self.ending("content_filter")),
            Fault::NoEnd => self.say(&mut frames, &tokens(self.text), &[Frame::Data(self.finish("stop")), Frame::Hang]),
            Fault::ToolCall | Fault::CutToolCall => self.call_tool(&mut frames),
            Fault::Nul => self.say(&mut frames, &["a\u{0}b ", self.text, "\u{0}"], &self.ending("stop")),
            Fault::Surrogate => {
                let raw = String::from_utf8_lossy(&self.delta(&json!({ "content": "SURROGATE" })))
                    .replace("SURROGATE", "x\\ud800y ");
                frames.push(Frame::Data(raw.into()));
                self.say(&mut frames, &tokens(self.text), &self.ending("stop"));
            }
            _ => self.say(&mut frames, &tokens(self.text), &self.ending("stop")),
        }
        if self.step.fault == Fault::Bytewise { bytewise(&frames) } else { frames }
    }

    fn head(&self) -> Vec<&str> {
        tokens(self.text).into_iter().take(self.step.after_tokens.unwrap_or(3)).collect()
    }

    fn say(&self, frames: &mut Vec<Frame>, pieces: &[&str], ending: &[Frame]) {
        for (index, piece) in pieces.iter().enumerate() {
            if let Some(speed) = self.script.tokens_per_second.filter(|speed| index > 0 && *speed > 0.0) {
                frames.push(Frame::Wait(Duration::try_from_secs_f64(1.0 / speed).unwrap_or_default()));
            }
            frames.push(Frame::Data(self.delta(&json!({ "content": piece }))));
        }
        frames.extend_from_slice(ending);
    }

    fn call_tool(&self, frames: &mut Vec<Frame>) {
        let arguments = json!({ "input": self.text }).to_string();
        let half = crate::text::capped(&arguments, arguments.len() / 2).len();
        let piece = |call: Value| Frame::Data(self.delta(&json!({ "tool_calls": [call] })));
        frames.push(piece(json!({ "index": 0, "id": format!("call-{}", self.asked.number), "type": "function", "function": { "name": "look_up", "arguments": "" } })));
        frames.push(piece(json!({ "index": 0, "function": { "arguments": &arguments[..half] } })));
        if self.step.fault == Fault::ToolCall {
            frames.push(piece(json!({ "index": 0, "function": { "arguments": &arguments[half..] } })));
            frames.extend(self.ending("tool_calls"));
        }
    }

    /// Finish reason, usage where it was asked for, end mark.
    fn ending(&self, reason: &str) -> Vec<Frame> {
        let mut frames = vec![Frame::Data(self.finish(reason))];
        if self.asked.body["stream_options"]["include_usage"] == true && self.step.fault != Fault::NoUsage {
            frames.push(Frame::Data(event(&self.object("chat.completion.chunk", &json!([]), &self.usage(self.text)))));
        }
        frames.push(Frame::Data("data: [DONE]\n\n".into()));
        frames
    }

    fn delta(&self, delta: &Value) -> Bytes {
        event(&self.object(
            "chat.completion.chunk",
            &json!([{ "index": 0, "delta": delta, "finish_reason": null }]),
            &Value::Null,
        ))
    }

    fn finish(&self, reason: &str) -> Bytes {
        event(&self.object(
            "chat.completion.chunk",
            &json!([{ "index": 0, "delta": {}, "finish_reason": reason }]),
            &Value::Null,
        ))
    }

    fn completion(&self, text: &str, reason: &str) -> String {
        let message = json!({ "role": "assistant", "content": text, "refusal": null });
        let choices = json!([{ "index": 0, "message": message, "logprobs": null, "finish_reason": reason }]);
        self.object("chat.completion", &choices, &self.usage(text)).to_string()
    }

    fn object(&self, kind: &str, choices: &Value, usage: &Value) -> Value {
        let model = self.asked.body["model"].as_str().unwrap_or("sim");
        json!({ "id": format!("chatcmpl-sim-{}", self.asked.number), "object": kind, "created": 1_700_000_000, "model": model, "choices": choices, "usage": usage })
    }

    fn usage(&self, text: &str) -> Value {
        let (prompt, completion) = usage(self.script, self.asked.body, text);
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": { "cached_tokens": 0 },
            "completion_tokens_details": { "reasoning_tokens": 0 },
        })
    }
}

/// Tokens of prompt and answer.
fn usage(script: &Script, body: &Value, text: &str) -> (u64, u64) {
    let prompt = script.input_tokens.unwrap_or_else(|| prompt_tokens(body) as u64);
    (prompt, script.output_tokens.unwrap_or_else(|| tokens(text).len() as u64))
}

/// The tokens of a request that is answered properly.
pub(crate) fn tokens_of(script: &Script, body: &Value, input: &str) -> u64 {
    let (prompt, completion) = usage(script, body, &answer(body, input));
    prompt + completion
}

fn event(value: &Value) -> Bytes {
    format!("data: {value}\n\n").into()
}

fn bytewise(frames: &[Frame]) -> Vec<Frame> {
    let mut pieces = Vec::new();
    for frame in frames {
        match frame {
            Frame::Data(bytes) => pieces.extend((0..bytes.len()).map(|at| Frame::Data(bytes.slice(at..=at)))),
            other => pieces.push(other.clone()),
        }
    }
    pieces
}
