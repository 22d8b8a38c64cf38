//! Spans by the crate `opentelemetry`: its global tracer provider makes and exports them, whoever set it.

use std::pin::Pin;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context as Task, Poll};
use std::time::SystemTime;

use opentelemetry::global::{self, BoxedTracer};
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
};
use opentelemetry::{Array, Context, InstrumentationScope, KeyValue, StringValue};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use crate::trace::names;
use crate::trace::parts::{Parent, Role, Value};

static ON: AtomicBool = AtomicBool::new(false);
static TRACER: OnceLock<BoxedTracer> = OnceLock::new();

/// Makes spans from now on. Call it after you have set the global tracer provider.
pub fn enable() {
    ON.store(true, Ordering::Relaxed);
}

fn tracer() -> &'static BoxedTracer {
    TRACER.get_or_init(|| {
        let scope = InstrumentationScope::builder("posthouse").with_version(env!("CARGO_PKG_VERSION")).build();
        global::tracer_with_scope(scope)
    })
}

/// A span. It ends when it is dropped.
#[derive(Debug, Default)]
pub struct Span {
    context: Option<Context>,
}

impl Span {
    /// Whether spans are made at all.
    pub fn are_on() -> bool {
        ON.load(Ordering::Relaxed)
    }

    /// Begins a span. `began`: it began before now.
    pub fn start(role: Role, parent: Parent<'_>, began: Option<SystemTime>, name: impl FnOnce() -> String) -> Self {
        if !Self::are_on() {
            return Self::default();
        }
        let parent = match parent {
            Parent::Current => Context::current(),
            Parent::Stored(trace) => match trace.and_then(remote) {
                Some(remote) => Context::new().with_remote_span_context(remote),
                None => Context::new(),
            },
        };
        let kind = match role {
            Role::Send => SpanKind::Producer,
            Role::Process => SpanKind::Consumer,
            Role::Receive | Role::Call => SpanKind::Client,
        };
        let mut builder = tracer().span_builder(name()).with_kind(kind);
        builder.start_time = began;
        let span = tracer().build_with_context(builder, &parent);
        Self { context: Some(parent.with_span(span)) }
    }

    /// The trace context of the span that is current, as JSON. `None`: there is none.
    pub fn current() -> Option<Box<RawValue>> {
        if Self::are_on() { stored(&Context::current()) } else { None }
    }

    /// Whether it is a span, and not nothing.
    pub fn is_on(&self) -> bool {
        self.context.is_some()
    }

    /// Sets a value, under a name of [`names`].
    pub fn set(&self, name: &'static str, value: impl Into<Value>) {
        let Some(context) = &self.context else { return };
        let value: opentelemetry::Value = match value.into() {
            Value::Text(text) => text.into(),
            Value::Number(number) => number.into(),
            Value::Float(number) => number.into(),
            Value::Texts(texts) => {
                opentelemetry::Value::Array(Array::String(texts.into_iter().map(StringValue::from).collect()))
            }
        };
        context.span().set_attribute(KeyValue::new(name, value));
    }

    /// Says that what it stands for failed, with an error of this class.
    pub fn fail(&self, class: &str) {
        let Some(context) = &self.context else { return };
        context.span().set_attribute(KeyValue::new(names::ERROR, class.to_owned()));
        context.span().set_status(Status::error(""));
    }

    /// The trace context to store or send on, as JSON. `None`: it is nothing.
    pub fn context(&self) -> Option<Box<RawValue>> {
        stored(self.context.as_ref()?)
    }

    /// The future, with this span as the current one of whatever is made in it.
    pub fn around<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        Around { context: self.context.clone(), future: Box::pin(future) }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(context) = &self.context {
            context.span().end();
        }
    }
}

/// A future in a context.
struct Around<F> {
    context: Option<Context>,
    future: Pin<Box<F>>,
}

impl<F: Future> Future for Around<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<F::Output> {
        let _inside = self.context.clone().map(Context::attach);
        self.future.as_mut().poll(task)
    }
}

#[derive(Deserialize)]
struct Stored {
    traceparent: String,
    tracestate: Option<String>,
}

/// The trace context of a span, as it is stored.
fn stored(context: &Context) -> Option<Box<RawValue>> {
    let span = context.span().span_context().clone();
    if !span.is_valid() {
        return None;
    }
    let parent = format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags().to_u8());
    let mut trace = json!({ "traceparent": parent });
    let state = span.trace_state().header();
    if !state.is_empty() {
        trace["tracestate"] = state.into();
    }
    to_raw_value(&trace).ok()
}

/// The span that a stored trace context names. `None`: it is none.
fn remote(trace: &RawValue) -> Option<SpanContext> {
    let stored: Stored = serde_json::from_str(trace.get()).ok()?;
    let mut parts = stored.traceparent.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |part: &str, length| {
        part.len() == length && part.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    // Later versions may have more parts; version ff is none.
    if !is_hex(version, 2) || version == "ff" || (version == "00" && parts.next().is_some()) {
        return None;
    }
    if !is_hex(trace, 32) || !is_hex(span, 16) || !is_hex(flags, 2) {
        return None;
    }
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()? & 1);
    let state = stored.tracestate.and_then(|state| TraceState::from_str(&state).ok()).unwrap_or_default();
    let context = SpanContext::new(TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?, flags, true, state);
    context.is_valid().then_some(context)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(parent: &str) -> Option<SpanContext> {
        remote(&to_raw_value(&json!({ "traceparent": parent })).unwrap())
    }

    #[test]
    fn a_trace_context_is_read_as_w3c_has_it() {
        let (trace, span) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
        let context = read(&format!("00-{trace}-{span}-01")).unwrap();
        assert_eq!((context.trace_id().to_string(), context.span_id().to_string()), (trace.into(), span.into()));
        assert!(context.is_sampled() && context.is_remote());
        assert!(!read(&format!("00-{trace}-{span}-00")).unwrap().is_sampled());
        assert!(read(&format!("42-{trace}-{span}-01-more")).is_some(), "a later version");
        for bad in [
            format!("00-{trace}-{span}-01-more"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-+0f067aa0ba902b7-01"),
            String::new(),
        ] {
            assert!(read(&bad).is_none(), "{bad}");
        }
        for odd in ["null", "17", "[]", "{}", "{\"traceparent\": 4}", "{\"traceparent\": \"é-é-é-é\"}"] {
            assert!(remote(&RawValue::from_string(odd.to_owned()).unwrap()).is_none(), "{odd}");
        }
    }

    #[test]
    fn nothing_is_made_before_it_is_asked_for() {
        let span = Span::start(Role::Call, Parent::Current, None, || unreachable!("no name is needed"));
        assert!(!span.is_on() && span.context().is_none());
    }
}
