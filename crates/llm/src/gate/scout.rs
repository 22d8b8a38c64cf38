//! After a silence one call goes ahead, and the others wait a moment to hear how it is received.
//!
//! A worker that starts a hundred jobs at once against an empty account, or a provider that refuses, shall ask it once
//! and not a hundred times. Nobody waits longer than a moment, and nobody at all while answers come in.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Without an answer for so long, nothing is known of an endpoint.
const SILENCE: Duration = Duration::from_secs(30);
/// How long others wait for the one that went ahead. Refusals come fast; answers may take their time.
const MOMENT: Duration = Duration::from_millis(250);

#[derive(Debug, Default)]
pub(crate) struct Scout {
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug, Default)]
struct State {
    heard: Option<Instant>,
    /// When somebody went ahead who has not come back.
    ahead: Option<Instant>,
}

/// Whether to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Go; somebody was answered lately.
    Go,
    /// Go ahead of the others, and say what came of it.
    GoAhead,
    /// Somebody has gone ahead: wait for news, until then at most.
    Wait(Instant),
}

impl Scout {
    pub(crate) fn enter(&self) -> Entry {
        let mut state = self.lock();
        if state.heard.is_some_and(|at| at.elapsed() < SILENCE) {
            return Entry::Go;
        }
        let now = Instant::now();
        match state.ahead.map(|ahead| ahead + MOMENT) {
            None => {
                state.ahead = Some(now);
                Entry::GoAhead
            }
            Some(end) if end > now => Entry::Wait(end),
            Some(_) => Entry::Go,
        }
    }

    /// Waits until there is news, for a moment at most, and enters then.
    pub(crate) async fn wait(&self) -> Entry {
        let longest = Instant::now() + MOMENT;
        loop {
            let news = self.news.notified();
            match self.enter() {
                Entry::Wait(end) if timeout_at(end.min(longest), news).await.is_err() => return Entry::Go,
                Entry::Wait(_) => {}
                entry => return entry,
            }
        }
    }

    /// Somebody was answered, whatever the answer.
    pub(crate) fn heard(&self) {
        *self.lock() = State { heard: Some(Instant::now()), ahead: None };
        self.news.notify_waiters();
    }

    /// The one that went ahead has ended and was not answered: another may go.
    pub(crate) fn lost(&self) {
        self.lock().ahead = None;
        self.news.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_goes_ahead_and_the_others_follow_its_answer() {
        let scout = Scout::default();
        let start = Instant::now();
        assert_eq!(scout.enter(), Entry::GoAhead);
        let (entry, ()) = tokio::join!(scout.wait(), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            scout.heard();
        });
        assert_eq!((entry, start.elapsed()), (Entry::Go, Duration::from_millis(100)));
        assert_eq!(scout.enter(), Entry::Go);
        tokio::time::advance(SILENCE).await;
        assert_eq!((scout.enter(), scout.enter()), (Entry::GoAhead, Entry::Wait(Instant::now() + MOMENT)));
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_long_and_a_lost_one_is_followed_by_another() {
        let scout = Scout::default();
        let start = Instant::now();
        assert_eq!(scout.enter(), Entry::GoAhead);
        let entries = tokio::join!(scout.wait(), scout.wait(), async { scout.lost() });
        assert_eq!((entries.0, entries.1), (Entry::Go, Entry::GoAhead));
        assert_eq!(start.elapsed(), MOMENT);
        assert_eq!(scout.enter(), Entry::Go, "where answers take long, later calls do not wait as well");
    }
}
