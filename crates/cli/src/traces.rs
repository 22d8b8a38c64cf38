//! Trace contexts in environments, where shells and programs hand them on: `TRACEPARENT` and `TRACESTATE`.

use posthouse::Context;
use posthouse::trace::Span;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

const PARENT: &str = "TRACEPARENT";
const STATE: &str = "TRACESTATE";

/// A trace context as it is stored with a job.
#[derive(Serialize, Deserialize)]
struct Stored {
    traceparent: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tracestate: Option<String>,
}

/// The trace that this process was started in, if somebody said so.
pub(crate) fn of_shell() -> Option<Box<RawValue>> {
    let traceparent = std::env::var(PARENT).ok().filter(|parent| is_parent(parent))?;
    to_raw_value(&Stored { traceparent, tracestate: std::env::var(STATE).ok() }).ok()
}

/// What a program that runs an attempt finds in its environment: the span of the attempt, else the trace that the job brought.
pub(crate) fn for_program(context: &Context) -> Vec<(&'static str, String)> {
    let current = Span::current();
    let trace = current.as_deref().or(context.trace());
    let stored = trace.and_then(|trace| serde_json::from_str::<Stored>(trace.get()).ok());
    match stored.filter(|stored| is_parent(&stored.traceparent)) {
        Some(Stored { traceparent, tracestate }) => [(PARENT, Some(traceparent)), (STATE, tracestate)]
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .collect(),
        None => Vec::new(),
    }
}

/// It looks like one; whoever goes on with it looks closer.
fn is_parent(text: &str) -> bool {
    (55..=512).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}
