//! The gate of one endpoint inside this process: who was told "not now" does not ask again at once, and neither do its neighbours.
//!
//! A "not now" closes the gate until the wait is over; so does an empty account, for longer. Calls that come meanwhile are
//! turned away without a request. When the time is over one call goes through as a probe, and its answer opens the gate
//! for all. Thus a thousand jobs behind an exhausted limit cost one request, not a thousand.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The first pause after a "not now" that names no time; it doubles with every one in a row.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
/// The longest pause that is not the provider's own wish.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long those wait who find a probe under way.
const PROBE_WAIT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    closed: Option<Closed>,
    /// "Not now" answers in a row.
    strikes: u32,
    probing: bool,
}

#[derive(Debug, Clone)]
struct Closed {
    since: Instant,
    until: Instant,
    reason: Reason,
}

/// Why a gate is closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reason {
    pub(crate) code: String,
    pub(crate) message: String,
}

/// Leave to make one call. Dropping it without a word leaves the gate as it was.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
    since: Instant,
    is_probe: bool,
}

/// Turned away: come back after `wait`.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    pub(crate) wait: Duration,
    pub(crate) reason: Reason,
}

impl Gate {
    /// Asks for leave to make a call.
    pub(crate) fn enter(&self) -> Result<Pass<'_>, TurnedAway> {
        let now = Instant::now();
        let mut state = self.lock();
        let Some(closed) = state.closed.clone() else { return Ok(Pass { gate: self, since: now, is_probe: false }) };
        if closed.until > now {
            return Err(TurnedAway { wait: spread(closed.until - now), reason: closed.reason });
        }
        if state.probing {
            return Err(TurnedAway { wait: spread(PROBE_WAIT), reason: closed.reason });
        }
        state.probing = true;
        Ok(Pass { gate: self, since: now, is_probe: true })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pass<'_> {
    /// The provider took the call. A call from before the gate closed says nothing about now.
    pub(crate) fn taken(&self) {
        let mut state = self.gate.lock();
        if self.is_probe {
            state.closed = None;
        }
        if state.closed.is_none() {
            state.strikes = 0;
        }
    }

    /// The provider said "not now": closes the gate for `wait`, or for a growing pause where none was named. Returns how long.
    pub(crate) fn refused(&self, wait: Option<Duration>, reason: Reason) -> Duration {
        let now = Instant::now();
        let mut state = self.gate.lock();
        // A thousand calls that were under way when the gate closed are one strike, not a thousand.
        let is_echo = state.closed.as_ref().is_some_and(|closed| self.since < closed.since);
        if !is_echo {
            state.strikes = state.strikes.saturating_add(1);
        }
        let pause = PAUSE_FIRST.saturating_mul(1 << state.strikes.saturating_sub(1).min(10)).min(PAUSE_MAX);
        let wait = wait.unwrap_or(pause);
        let until = state.closed.as_ref().map_or(now + wait, |closed| closed.until.max(now + wait));
        let since = state.closed.as_ref().filter(|_| is_echo).map_or(now, |closed| closed.since);
        state.closed = Some(Closed { since, until, reason });
        spread(wait)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.is_probe {
            self.gate.lock().probing = false;
        }
    }
}

/// Up to a quarter more, at most five seconds, so that those who wait do not come back as one. Never less than asked.
fn spread(wait: Duration) -> Duration {
    wait + (wait / 4).min(Duration::from_secs(5)).mul_f64(fastrand::f64())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn reason() -> Reason {
        Reason { code: "rate_limited".to_owned(), message: "slow down".to_owned() }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn one_probe_opens_it() {
        let gate = Gate::default();
        let (first, echo) = (gate.enter().unwrap(), gate.enter().unwrap());
        assert!(first.refused(Some(SECOND * 10), reason()) >= SECOND * 10);
        let away = gate.enter().unwrap_err();
        assert!(away.wait >= SECOND * 10 && away.wait <= SECOND * 13 && away.reason == reason());
        echo.taken();
        assert!(gate.enter().is_err(), "an answer to an older call does not open it");

        tokio::time::advance(SECOND * 11).await;
        let probe = gate.enter().unwrap();
        assert!(gate.enter().unwrap_err().wait <= SECOND * 2, "one probe at a time");
        drop(probe);
        let probe = gate.enter().unwrap();
        probe.taken();
        assert!(gate.enter().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_with_answers_in_a_row_and_not_with_echoes() {
        let gate = Gate::default();
        let calls: Vec<Pass<'_>> = (0..100).map(|_| gate.enter().unwrap()).collect();
        for call in &calls {
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(call.refused(None, reason()) < SECOND * 2);
        }
        for expected in [2, 4, 8, 16, 32, 60, 60] {
            tokio::time::advance(SECOND * 100).await;
            let wait = gate.enter().unwrap().refused(None, reason());
            assert!(wait >= SECOND * expected && wait <= SECOND * (expected + 15), "{wait:?} {expected}");
        }
    }
}
