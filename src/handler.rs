//! The code for a kind: closures over a typed [`Job`] or over raw JSON, erased to one shape that the worker can keep in
//! a table.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;

use futures_util::FutureExt;
use serde_json::value::RawValue;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::job::Job;
use crate::outcome::{IntoOutcome, JobError, Outcome};
use crate::retry::Backoff;

/// A handler at work.
pub(crate) type Running = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// Starts a handler on a payload; the error says why the payload cannot be read.
type Start = Box<dyn Fn(Box<RawValue>, Context) -> Result<Running, JobError> + Send + Sync>;

/// What a worker knows about a kind.
pub(crate) struct Handler {
    start: Start,
    backoff: Backoff,
}

impl Handler {
    /// A typed handler. A payload that does not fit the type is an error of class `payload`.
    pub(crate) fn typed<J, F, Fut>(handler: F) -> Self
    where
        J: Job,
        F: Fn(J, Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoOutcome> + Send + 'static,
    {
        let start = move |payload: Box<RawValue>, context: Context| -> Result<Running, JobError> {
            let job: J = serde_json::from_str(payload.get()).map_err(|error| {
                JobError::new("payload", format!("the payload does not fit kind `{}`: {error}", J::KIND))
            })?;
            Ok(running(handler(job, context)))
        };
        Self { start: Box::new(start), backoff: J::backoff() }
    }

    /// A handler that reads its payload itself.
    pub(crate) fn raw<F, Fut>(handler: F) -> Self
    where
        F: Fn(Box<RawValue>, Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoOutcome> + Send + 'static,
    {
        let start = move |payload: Box<RawValue>, context: Context| -> Result<Running, JobError> {
            Ok(running(handler(payload, context)))
        };
        Self { start: Box::new(start), backoff: Backoff::default() }
    }

    pub(crate) fn start(&self, payload: Box<RawValue>, context: Context) -> Result<Running, JobError> {
        (self.start)(payload, context)
    }

    pub(crate) fn backoff(&self) -> Backoff {
        self.backoff
    }
}

/// `map` and not an `async` block: that would hold the handler's future twice, once before its first step and once after.
fn running(work: impl Future<Output: IntoOutcome> + Send + 'static) -> Running {
    Box::pin(work.map(IntoOutcome::into_outcome))
}

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handler").field("backoff", &self.backoff).finish_non_exhaustive()
    }
}

/// The handlers of a worker by kind.
#[derive(Debug, Default)]
pub(crate) struct Handlers {
    by_kind: HashMap<String, Handler>,
}

impl Handlers {
    /// Adds a kind. Errors on a second handler for it.
    pub(crate) fn add(&mut self, kind: String, handler: Handler) -> Result<()> {
        if self.by_kind.contains_key(&kind) {
            return Err(Error::config(format!("handle: kind `{kind}` has two handlers; keep one")));
        }
        self.by_kind.insert(kind, handler);
        Ok(())
    }

    /// Replaces the backoff of a kind. Errors if nothing handles it.
    pub(crate) fn set_backoff(&mut self, kind: &str, backoff: Backoff) -> Result<()> {
        let handler = self.by_kind.get_mut(kind).ok_or_else(|| {
            Error::config(format!("backoff: kind `{kind}` has no handler; add one with handle or handle_kind"))
        })?;
        handler.backoff = backoff;
        Ok(())
    }

    pub(crate) fn get(&self, kind: &str) -> Option<&Handler> {
        self.by_kind.get(kind)
    }

    /// All kinds, sorted.
    pub(crate) fn kinds(&self) -> Vec<String> {
        let mut kinds: Vec<String> = self.by_kind.keys().cloned().collect();
        kinds.sort_unstable();
        kinds
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// As many as run at once are in memory.
    #[test]
    fn a_handler_at_work_is_in_memory_once() {
        let work = async {
            let held = [1_u8; 1_000];
            std::future::pending::<()>().await;
            assert_eq!(held[0], 1);
        };
        let alone = size_of_val(&work);
        let running = running(work);
        assert!(size_of_val(&*running) < alone + 100, "{} against {alone}", size_of_val(&*running));
    }
}
