//! What a span is made of.

use serde_json::value::RawValue;

/// What a span stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Somebody enqueues a job.
    Send,
    /// A worker claims it.
    Receive,
    /// An attempt at it.
    Process,
    /// A call that is made in it.
    Call,
}

/// Where a span belongs.
#[derive(Debug, Clone, Copy)]
pub enum Parent<'a> {
    /// Below the span that is current where it begins, if there is one.
    Current,
    /// Below the one whose trace context was stored with a job. `None`: it begins a trace.
    Stored(Option<&'a RawValue>),
}

/// A value of a span.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Text.
    Text(String),
    /// A whole number.
    Number(i64),
    /// Any other number.
    Float(f64),
    /// Several texts.
    Texts(Vec<String>),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}
