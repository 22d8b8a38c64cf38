//! After a silence calls start slowly: one goes ahead, then two, four, eight, until the first is answered.
//!
//! A worker that starts a hundred jobs at once against an empty account, or a provider that refuses, shall ask it a few times
//! and not a hundred times. A hundred calls are under way within a second and a half however long the first answer takes,
//! and nobody waits at all while answers come in.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

/// Without an answer for so long, nothing is known of an endpoint.
pub(super) const SILENCE: Duration = Duration::from_secs(30);
/// From one wave to the next, which is twice as large. A refusal seldom takes longer than two or three of them.
const MOMENT: Duration = Duration::from_millis(250);
/// How long a refusal may take to be read and told, while nobody else goes.
const TELLING: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(crate) struct Scout {
    state: Mutex<State>,
    news: Notify,
}

#[derive(Debug, Default)]
struct State {
    heard: Option<Instant>,
    /// Who may go while nobody has been heard.
    wave: Option<Wave>,
}

#[derive(Debug)]
struct Wave {
    size: u32,
    /// How many of them have not gone yet.
    left: u32,
    /// When the next wave may go.
    next: Instant,
}

/// Whether to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Go; somebody was answered lately.
    Go,
    /// Go ahead of others, and say what came of it.
    GoAhead,
    /// Enough have gone ahead: wait for news, until then at most.
    Wait(Instant),
}

impl Scout {
    /// Asks for leave to go. What was heard before the endpoint was `opened` counts for nothing.
    pub(crate) fn enter(&self, opened: Option<Instant>) -> Entry {
        let now = Instant::now();
        let mut state = self.lock();
        let is_news = |at: Instant| at + SILENCE > now && opened.is_none_or(|opened| at >= opened);
        if state.heard.is_some_and(is_news) {
            return Entry::Go;
        }
        match &mut state.wave {
            Some(wave) if wave.left > 0 && wave.next + SILENCE > now => wave.left -= 1,
            Some(wave) if wave.next > now => return Entry::Wait(wave.next),
            Some(wave) if wave.next + SILENCE > now => wave.grow(now),
            wave => *wave = Some(Wave { size: 1, left: 0, next: now + MOMENT }),
        }
        Entry::GoAhead
    }

    /// Waits until there is news, or a wave to go with.
    pub(crate) async fn wait(&self, opened: Option<Instant>) -> Entry {
        loop {
            let news = self.news.notified();
            match self.enter(opened) {
                // Whichever it was, news or the time: look again.
                Entry::Wait(end) => drop(timeout_at(end, news).await),
                entry => return entry,
            }
        }
    }

    /// A refusal has begun to arrive: nobody goes until it is told what it says.
    pub(crate) fn hold(&self) {
        if let Some(wave) = &mut self.lock().wave {
            (wave.left, wave.next) = (0, Instant::now() + TELLING);
        }
    }

    /// Somebody was answered, whatever the answer.
    pub(crate) fn heard(&self) {
        *self.lock() = State { heard: Some(Instant::now()), wave: None };
        self.news.notify_waiters();
    }

    /// One that went ahead has ended and was not answered: another may go in its place.
    pub(crate) fn lost(&self) {
        if let Some(wave) = &mut self.lock().wave {
            wave.left = (wave.left + 1).min(wave.size);
        }
        self.news.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wave {
    /// The next wave, of which one goes now.
    fn grow(&mut self, now: Instant) {
        let size = self.size.saturating_mul(2);
        *self = Self { size, left: size - 1, next: now + MOMENT };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    const TICK: Duration = Duration::from_millis(1);

    /// Starts a hundred calls at once and returns when each went, if it went ahead.
    fn hundred(scout: &Arc<Scout>) -> tokio::task::JoinSet<Option<Duration>> {
        let start = Instant::now();
        let mut calls = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let scout = scout.clone();
            calls.spawn(async move { (scout.wait(None).await == Entry::GoAhead).then(|| start.elapsed()) });
        }
        calls
    }

    async fn ahead(calls: tokio::task::JoinSet<Option<Duration>>) -> Vec<Duration> {
        calls.join_all().await.into_iter().flatten().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_costs_a_handful_however_slowly_it_comes() {
        for (latency, requests) in [(20, 1), (240, 1), (400, 3), (600, 7), (900, 15)] {
            let scout = Arc::new(Scout::default());
            let calls = hundred(&scout);
            tokio::time::sleep(TICK * latency).await;
            scout.hold();
            tokio::time::sleep(TICK * 1_000).await;
            scout.heard();
            assert_eq!(ahead(calls).await.len(), requests, "answered after {latency} ms");
            assert_eq!(scout.enter(None), Entry::Go);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_are_under_way_soon_where_nobody_is_answered() {
        let scout = Arc::new(Scout::default());
        let times = ahead(hundred(&scout)).await;
        let last = times.iter().max().copied();
        assert!(times.len() == 100 && last.is_some_and(|last| last <= TICK * 1_510), "{last:?}");
        tokio::time::advance(SILENCE + MOMENT).await;
        assert_eq!(scout.enter(None), Entry::GoAhead);
        assert!(matches!(scout.enter(None), Entry::Wait(_)), "after a silence it starts slowly again");
    }

    #[tokio::test(start_paused = true)]
    async fn one_goes_ahead_and_the_others_follow_its_answer() {
        let scout = Scout::default();
        let start = Instant::now();
        assert_eq!(scout.enter(None), Entry::GoAhead);
        let (entry, ()) = tokio::join!(scout.wait(None), async {
            tokio::time::sleep(TICK * 100).await;
            scout.heard();
        });
        assert_eq!((entry, start.elapsed()), (Entry::Go, TICK * 100));
        let opened = Instant::now() + TICK;
        assert_eq!(scout.enter(Some(Instant::now())), Entry::Go);
        assert_eq!(scout.enter(Some(opened)), Entry::GoAhead, "it was heard before somebody opened it");
        scout.heard();
        tokio::time::advance(SILENCE).await;
        assert_eq!((scout.enter(None), scout.enter(None)), (Entry::GoAhead, Entry::Wait(Instant::now() + MOMENT)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_one_is_followed_by_another_at_once() {
        let scout = Scout::default();
        let start = Instant::now();
        assert_eq!(scout.enter(None), Entry::GoAhead);
        let (entry, ()) = tokio::join!(scout.wait(None), async { scout.lost() });
        assert_eq!((entry, start.elapsed()), (Entry::GoAhead, Duration::ZERO));
        scout.hold();
        scout.lost();
        assert_eq!(scout.enter(None), Entry::GoAhead, "also where a refusal was lost half-way");
        assert_eq!(scout.enter(None), Entry::Wait(start + TELLING));
    }
}
