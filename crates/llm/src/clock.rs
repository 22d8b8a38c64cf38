//! The clocks of a call: first token, between tokens, whole attempt.
//!
//! Only content moves them on. Keep-alive bytes do not, or a dead generation behind a lively proxy would hold a slot for ever.

use crate::config::Timeouts;
use crate::error::{ATTEMPT_TIMEOUT, CallError, ErrorClass, FIRST_TOKEN_TIMEOUT};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// After all choices have finished, usage and the end mark are waited for this long, and then done without.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Clock {
    timeouts: Timeouts,
    start: Instant,
    /// When the attempt began, and how long it may take: a call may be its second.
    attempt_start: Instant,
    attempt: Duration,
    first_token: Option<Instant>,
    last_piece: Option<Instant>,
    finished: Option<Instant>,
    /// Told when the answer begins, where somebody waits for that.
    begun: Option<Arc<Notify>>,
}

impl Clock {
    /// Starts the clocks of a call in an attempt that began at `attempt_start` and may take `attempt`.
    pub(crate) fn start(timeouts: Timeouts, (attempt_start, attempt): (Instant, Duration)) -> Self {
        Self {
            timeouts,
            start: Instant::now(),
            attempt_start,
            attempt,
            first_token: None,
            last_piece: None,
            finished: None,
            begun: None,
        }
    }

    /// Tells when the answer begins.
    pub(crate) fn tell(mut self, begun: Option<Arc<Notify>>) -> Self {
        self.begun = begun;
        self
    }

    /// What comes is no answer: nobody is told that one begins.
    pub(crate) fn hush(&mut self) {
        self.begun = None;
    }

    /// Waits for a step, as long as the clocks allow. `None`: time is up.
    pub(crate) async fn limit<T>(&self, step: impl Future<Output = T>) -> Option<T> {
        timeout_at(self.next().0, step).await.ok()
    }

    /// A token came.
    pub(crate) fn content(&mut self) {
        self.first_token.get_or_insert_with(Instant::now);
        self.piece();
    }

    /// A piece of a body came that is no stream of tokens.
    pub(crate) fn piece(&mut self) {
        self.last_piece = Some(Instant::now());
        if let Some(begun) = self.begun.take() {
            begun.notify_one();
        }
    }

    /// Whether all choices so far have said why they stopped. Another one may still begin.
    pub(crate) fn finished(&mut self, finished: bool) {
        self.finished = finished.then(|| self.finished.unwrap_or_else(Instant::now));
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn first_token(&self) -> Option<Duration> {
        self.first_token.map(|at| at - self.start)
    }

    /// The failure that a clock which ran out stands for.
    pub(crate) fn timed_out(&self) -> Box<CallError> {
        let (_, code) = self.next();
        let message = match code {
            ATTEMPT_TIMEOUT => format!("the answer was not complete within {:?}", self.attempt),
            "between_tokens_timeout" => {
                format!("the answer stopped: no content for {:?}", self.timeouts.between_tokens())
            }
            _ => format!("no content within {:?}", self.timeouts.first_token()),
        };
        CallError::new(ErrorClass::Transient, code, message)
    }

    /// When the next clock runs out, and what that would be called.
    fn next(&self) -> (Instant, &'static str) {
        let token = match (self.finished, self.last_piece) {
            (Some(finished), _) => (finished + GRACE.min(self.timeouts.between_tokens()), "between_tokens_timeout"),
            (None, Some(last)) => (last + self.timeouts.between_tokens(), "between_tokens_timeout"),
            (None, None) => (self.start + self.timeouts.first_token(), FIRST_TOKEN_TIMEOUT),
        };
        let whole = (self.attempt_start + self.attempt, ATTEMPT_TIMEOUT);
        if whole.0 < token.0 { whole } else { token }
    }
}
