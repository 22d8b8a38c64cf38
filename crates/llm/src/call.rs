//! One HTTP call: send a request, read the answer, keep the clocks.
//!
//! Exactly one request leaves here per call: no retries, no redirects. It always asks for a stream, because only a
//! stream shows whether somebody is still working at the other end. Dropping the future drops the connection.

use crate::assembly::Assembly;
use crate::classify::{ErrorBody, classify};
use crate::clock::Clock;
use crate::error::{CallError, ErrorClass};
use crate::gate::Pass;
use crate::hint::{exhausted, wait_hint};
use crate::millis::millis;
use crate::redact::Redactor;
use crate::stream::{Event, EventParser};
use crate::text::{SNIPPET_BYTES_MAX, capped, label, parse_lenient, storable};
use crate::transport::{Transport, connection_error};
use crate::wire::{NoAnswer, Response};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderMap;
use serde_json::Value;
use std::borrow::Cow;
use std::time::{Duration, SystemTime};

/// The most an answer may hold: text, reasoning and tool calls together; also the largest event and JSON body.
pub const ANSWER_BYTES_MAX: usize = 16 << 20;
/// The most bytes of a stream, its wrapping included, which is about fifty times its content.
const STREAM_BYTES_MAX: usize = 512 << 20;
/// The most that is read of an error.
const ERROR_BYTES_MAX: usize = 64 << 10;
/// How long the end of the connection is waited for after the end of the answer, so that it can be used again.
const DRAIN: Duration = Duration::from_millis(50);

/// What came of a call that ended properly.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) assembly: Assembly,
    pub(crate) status: u16,
    pub(crate) request_id: Option<String>,
    pub(crate) latency: Duration,
    pub(crate) first_token: Option<Duration>,
}

/// Sends the request and reads the answer to its end.
pub(crate) fn call<'a>(
    transport: &'a Transport,
    (body, key, choices): (Bytes, Option<&str>, usize),
    clock: Clock,
    pass: &'a Pass<'a>,
    redactor: &'a Redactor,
) -> impl Future<Output = Outcome<Received>> + use<'a> {
    // Not an async function, which would hold all that it is given once more for as long as the call lasts.
    let sending = transport.send(body, key);
    let mut reading = Reading { clock, assembly: Assembly::new(choices), status: None, request_id: None, redactor };
    async move {
        match reading.run(transport, sending, pass).await {
            Ok(()) => Ok(Received {
                status: reading.status.map_or(0, |status| status.as_u16()),
                request_id: reading.request_id.or_else(|| reading.assembly.id.clone()),
                latency: reading.clock.elapsed(),
                first_token: reading.clock.first_token(),
                assembly: reading.assembly,
            }),
            Err(error) => Err(reading.complete(error)),
        }
    }
}

struct Reading<'a> {
    clock: Clock,
    assembly: Assembly,
    status: Option<StatusCode>,
    request_id: Option<String>,
    redactor: &'a Redactor,
}

type Outcome<T = ()> = Result<T, Box<CallError>>;

impl Reading<'_> {
    async fn run(
        &mut self,
        transport: &Transport,
        sending: impl Future<Output = Result<Response, NoAnswer>>,
        pass: &Pass<'_>,
    ) -> Outcome {
        let mut response = match self.clock.limit(sending).await {
            None => return Err(self.clock.timed_out()),
            Some(Err(error)) => return Err(connection_error(&error, transport.host())),
            Some(Ok(response)) => response,
        };
        self.status = Some(response.status());
        self.request_id =
            header(response.headers(), "x-request-id").or_else(|| header(response.headers(), "request-id"));
        if !response.status().is_success() {
            pass.hold();
            return Err(Box::pin(self.refusal(response)).await);
        }
        let nothing_left = exhausted(response.headers(), SystemTime::now());
        // Boxed, as most calls have nothing to say here.
        if nothing_left.is_some() || pass.is_probe() {
            Box::pin(pass.taken(nothing_left)).await;
        }
        pass.heard();
        if let Some(encoding) = encoding(response.headers()) {
            let message = format!("the answer is compressed ({encoding}), which was not asked for");
            return Err(incomplete("compressed_answer", message));
        }
        let kind = header(response.headers(), "content-type").unwrap_or_default().to_ascii_lowercase();
        let cost = header(response.headers(), "x-litellm-response-cost");
        // They hold on to the buffer that they were read into, and the answer may take minutes.
        *response.headers_mut() = HeaderMap::new();
        // Boxed, all three ways: most of the time a call waits for its status, and should hold no room for what follows.
        if kind.contains("event-stream") {
            Box::pin(self.read_stream(response, Vec::new())).await?
        } else {
            Box::pin(self.read_undeclared(response, &kind)).await?
        }
        if let (None, Some(cost)) = (&self.assembly.usage.cost_usd, cost) {
            self.assembly.usage.take_cost(&cost);
        }
        if self.assembly.is_empty() {
            return Err(incomplete("no_choices", "the answer has no choices"));
        }
        Ok(())
    }

    /// Some servers give their stream another type, or none: it is known by how it begins.
    async fn read_undeclared(&mut self, mut response: Response, kind: &str) -> Outcome {
        let mut begin = Vec::new();
        while begin.iter().all(u8::is_ascii_whitespace) && begin.len() < ERROR_BYTES_MAX {
            match self.clock.limit(response.chunk()).await {
                None => return Err(self.clock.timed_out()),
                Some(Err(error)) => return Err(cut(&error)),
                Some(Ok(None)) => break,
                Some(Ok(Some(bytes))) => begin.extend_from_slice(&bytes),
            }
        }
        if begins_stream(&begin) {
            self.read_stream(response, begin).await
        } else {
            self.clock.piece();
            self.read_body(response, begin, kind).await
        }
    }

    /// Reads events until `[DONE]`, the end of the stream, or some seconds after every choice has said why it stopped.
    async fn read_stream(&mut self, mut response: Response, begin: Vec<u8>) -> Outcome {
        let mut parser = EventParser::new(ANSWER_BYTES_MAX);
        let mut events = Vec::new();
        let mut bytes_read = begin.len();
        parser.push(&begin, &mut events).map_err(|error| too_large(error.0))?;
        if self.take_events(&mut events)? {
            drain(response).await;
            return Ok(());
        }
        loop {
            match self.clock.limit(response.chunk()).await {
                None | Some(Err(_)) if self.assembly.finished() => return Ok(()),
                None => return Err(self.clock.timed_out()),
                Some(Err(error)) => return Err(cut(&error)),
                Some(Ok(None)) => break,
                Some(Ok(Some(bytes))) => {
                    bytes_read += bytes.len();
                    if bytes_read > STREAM_BYTES_MAX {
                        return Err(too_large(STREAM_BYTES_MAX));
                    }
                    parser.push(&bytes, &mut events).map_err(|error| too_large(error.0))?;
                    if self.take_events(&mut events)? {
                        drain(response).await;
                        return Ok(());
                    }
                }
            }
        }
        events.extend(parser.finish().map_err(|error| too_large(error.0))?);
        if self.take_events(&mut events)? || self.assembly.finished() {
            return Ok(());
        }
        Err(incomplete("incomplete_stream", "the stream ended without a finish reason or an end mark"))
    }

    /// Takes events; true when the end mark was among them.
    fn take_events(&mut self, events: &mut Vec<Event>) -> Outcome<bool> {
        for event in events.drain(..) {
            let data = event.data.trim();
            let is_error = event.name == "error";
            if data == "[DONE]" {
                return Ok(true);
            }
            if data.is_empty() {
                continue;
            }
            let (chunk, cleaned) = match parse_lenient(data) {
                Ok(parsed) => parsed,
                Err(_) if is_error => {
                    let error = ErrorBody { message: Some(self.begin_of(data)), ..ErrorBody::default() };
                    return Err(self.error_in_answer(&error, data));
                }
                Err(error) => {
                    let message = format!("the stream holds something that is not JSON: {error}");
                    return Err(self.with_snippet(incomplete("bad_chunk", message), data));
                }
            };
            self.assembly.cleaned |= cleaned || data.contains(char::REPLACEMENT_CHARACTER);
            let error = ErrorBody::from_json(&chunk).or_else(|| is_error.then(ErrorBody::default));
            if let Some(error) = error {
                return Err(self.error_in_answer(&error, data));
            }
            self.take_chunk(&chunk)?;
        }
        Ok(false)
    }

    fn take_chunk(&mut self, chunk: &Value) -> Outcome {
        if self.assembly.take(chunk) {
            self.clock.content();
        }
        self.clock.finished(self.assembly.finished());
        if self.assembly.bytes > ANSWER_BYTES_MAX {
            return Err(too_large(ANSWER_BYTES_MAX));
        }
        Ok(())
    }

    /// Reads an answer that is no stream: one JSON body from a server that ignores `stream`, or no answer at all.
    async fn read_body(&mut self, response: Response, begin: Vec<u8>, kind: &str) -> Outcome {
        let (bytes, problem) = self.read_bytes(response, begin, ANSWER_BYTES_MAX).await;
        let text = text(&bytes);
        let trimmed = text.trim();
        if let Some(problem) = problem {
            return Err(self.with_snippet(problem, trimmed));
        }
        if bytes.len() > ANSWER_BYTES_MAX {
            return Err(too_large(ANSWER_BYTES_MAX));
        }
        if begins_stream(trimmed.as_bytes()) {
            return self.read_events(trimmed);
        }
        match parse_lenient(trimmed) {
            Ok((body, cleaned)) => {
                self.assembly.cleaned |= cleaned || trimmed.contains(char::REPLACEMENT_CHARACTER);
                match ErrorBody::from_json(&body) {
                    Some(error) => Err(self.error_in_answer(&error, trimmed)),
                    None => self.take_chunk(&body),
                }
            }
            Err(_) if trimmed.is_empty() => Err(incomplete("empty_answer", "the answer is empty")),
            Err(_) if kind.contains("html") || trimmed.starts_with('<') => {
                let message = format!("an HTML page came instead of an answer: {}", title(&self.clean(trimmed)));
                Err(self.with_snippet(incomplete("html_answer", message), trimmed))
            }
            Err(error) => {
                Err(self.with_snippet(incomplete("bad_answer", format!("the answer is not JSON: {error}")), trimmed))
            }
        }
    }

    fn read_events(&mut self, text: &str) -> Outcome {
        let mut parser = EventParser::new(ANSWER_BYTES_MAX);
        let mut events = Vec::new();
        parser.push(text.as_bytes(), &mut events).map_err(|error| too_large(error.0))?;
        events.extend(parser.finish().map_err(|error| too_large(error.0))?);
        if self.take_events(&mut events)? || self.assembly.finished() {
            return Ok(());
        }
        Err(incomplete("incomplete_stream", "the stream ended without a finish reason or an end mark"))
    }

    /// What a status other than 200 means.
    async fn refusal(&mut self, response: Response) -> Box<CallError> {
        self.clock.hush();
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        // However the reading of an error ends, its status stands.
        let (bytes, _) = self.read_bytes(response, Vec::new(), ERROR_BYTES_MAX).await;
        let compressed = encoding(&headers);
        let text = if compressed.is_some() { "".into() } else { text(&bytes) };
        let body = parse_lenient(&text).ok().and_then(|(body, _)| ErrorBody::from_json(&body)).unwrap_or_default();
        let wait = wait_hint(&headers, body.wait, SystemTime::now());
        let (class, code) = classify(status, &body, wait.is_some());
        let message = match &body.message {
            Some(message) => message.clone(),
            None if code == "redirect" => {
                let target = header(&headers, "location").unwrap_or_else(|| "nowhere".to_owned());
                format!("the provider redirects to {target}; put the final address into base_url")
            }
            None if compressed.is_some() => format!(
                "the reason is compressed ({}), which was not asked for, and cannot be read",
                compressed.unwrap_or_default()
            ),
            None if text.trim().is_empty() => "the provider gave no reason".to_owned(),
            None if text.trim_start().starts_with('<') => {
                format!("an HTML page from a proxy or gateway: {}", title(&self.clean(&text)))
            }
            None => capped(&self.clean(text.trim()), 200).to_owned(),
        };
        let mut error = CallError::new(class, &code, message);
        error.wait = wait;
        self.with_snippet(error, &text)
    }

    fn error_in_answer(&self, error: &ErrorBody, text: &str) -> Box<CallError> {
        let (class, code) = classify(200, error, error.wait.is_some());
        let message = error.message.clone().unwrap_or_else(|| "the answer is an error without a message".to_owned());
        let mut failure = CallError::new(class, &code, message);
        failure.wait = error.wait;
        self.with_snippet(failure, text)
    }

    /// Reads up to a little more than `bytes_max`. The problem says why there may be more than was read.
    async fn read_bytes(
        &mut self,
        mut response: Response,
        mut bytes: Vec<u8>,
        bytes_max: usize,
    ) -> (Vec<u8>, Option<Box<CallError>>) {
        while bytes.len() <= bytes_max {
            match self.clock.limit(response.chunk()).await {
                None => return (bytes, Some(self.clock.timed_out())),
                Some(Err(error)) => return (bytes, Some(cut(&error))),
                Some(Ok(None)) => break,
                Some(Ok(Some(chunk))) => {
                    // Blank lines keep a connection alive, they are no content.
                    if chunk.iter().any(|byte| !byte.is_ascii_whitespace()) {
                        self.clock.piece();
                    }
                    bytes.extend_from_slice(&chunk);
                }
            }
        }
        (bytes, None)
    }

    fn with_snippet(&self, mut error: Box<CallError>, text: &str) -> Box<CallError> {
        if !text.is_empty() {
            error.body_snippet = Some(self.begin_of(text));
        }
        error
    }

    /// The beginning of a text, to be shown.
    fn begin_of(&self, text: &str) -> String {
        capped(&self.clean(text), SNIPPET_BYTES_MAX).to_owned()
    }

    /// A text of the provider, to be cut afterwards: a secret cut before loses the half by which it is known.
    fn clean(&self, text: &str) -> String {
        storable(&self.redactor.clean(capped(text, ERROR_BYTES_MAX)))
    }

    /// Adds what is known about the call to its failure.
    fn complete(self, mut error: Box<CallError>) -> Box<CallError> {
        if error.body_snippet.is_none() {
            error = self.with_snippet(error, self.assembly.text());
        }
        error.status = self.status.map(|status| status.as_u16());
        error.provider_request_id = self.request_id.or(self.assembly.id).map(|id| label(&id, self.redactor));
        error.latency_ms = millis(self.clock.elapsed());
        error.first_token_ms = self.clock.first_token().map(millis);
        error.usage = self.assembly.usage;
        error.message = capped(&storable(&self.redactor.clean(&error.message)), SNIPPET_BYTES_MAX).to_owned();
        error.code = label(&error.code, self.redactor);
        error
    }
}

fn incomplete(code: &str, message: impl Into<String>) -> Box<CallError> {
    CallError::new(ErrorClass::Incomplete, code, message)
}

fn too_large(bytes_max: usize) -> Box<CallError> {
    incomplete("answer_too_large", format!("the answer is larger than {bytes_max} bytes"))
}

fn cut(error: &hyper::Error) -> Box<CallError> {
    incomplete(
        "stream_cut",
        format!("the connection was cut in the middle of the answer: {}", crate::transport::root_cause(error)),
    )
}

/// Lets the end of the response arrive, without which the connection could not be used again.
async fn drain(mut response: Response) {
    let to_the_end = async { while let Ok(Some(_)) = response.chunk().await {} };
    // Nothing depends on it: a connection that does not end in time is closed.
    let _ = tokio::time::timeout(DRAIN, to_the_end).await;
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers
        .get(name)
        .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
        .filter(|value| !value.is_empty())
}

/// How a body is compressed, where it is. Nothing compressed was asked for.
fn encoding(headers: &HeaderMap) -> Option<String> {
    header(headers, "content-encoding").filter(|encoding| encoding != "identity")
}

/// A body as text, without the mark that some gateways put before it.
fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes))
}

/// Whether a body begins as server-sent events do.
fn begins_stream(bytes: &[u8]) -> bool {
    let begin = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes).trim_ascii_start();
    ["data:", "event:", "id:", "retry:", ":"].iter().any(|start| begin.starts_with(start.as_bytes()))
}

/// The title of a page, or its beginning.
fn title(page: &str) -> String {
    let lower = page.to_ascii_lowercase();
    let title = lower.find("<title>").and_then(|start| {
        let end = start + lower[start..].find("</title>")?;
        Some(page[start + "<title>".len()..end].trim())
    });
    capped(title.filter(|title| !title.is_empty()).unwrap_or(page.trim()), 120).to_owned()
}
