//! Spans where the feature `otlp` is off: nothing.

use std::time::SystemTime;

use serde_json::value::RawValue;

use crate::trace::parts::{Parent, Role, Value};

/// Does nothing without the feature `otlp`.
pub fn enable() {}

/// A span; nothing without the feature `otlp`.
#[derive(Debug, Default)]
pub struct Span(());

impl Span {
    /// Whether spans are made at all.
    pub fn are_on() -> bool {
        false
    }

    /// Begins a span. `began`: it began before now.
    pub fn start(_: Role, _: Parent<'_>, _began: Option<SystemTime>, _: impl FnOnce() -> String) -> Self {
        Self(())
    }

    /// The trace context of the span that is current, as JSON. `None`: there is none.
    pub fn current() -> Option<Box<RawValue>> {
        None
    }

    /// Whether it is a span, and not nothing.
    pub fn is_on(&self) -> bool {
        false
    }

    /// Sets a value, under a name of [`names`](crate::trace::names).
    pub fn set(&self, _: &'static str, _: impl Into<Value>) {}

    /// Says that what it stands for failed, with an error of this class.
    pub fn fail(&self, _class: &str) {}

    /// The trace context to store or send on, as JSON. `None`: it is nothing.
    pub fn context(&self) -> Option<Box<RawValue>> {
        None
    }

    /// The future, with this span as the current one of whatever is made in it.
    pub fn around<F: Future>(&self, future: F) -> F {
        future
    }
}
