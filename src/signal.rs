//! How an attempt is told to stop: one level that only rises, so that a later, gentler word never takes back an earlier
//! one. Raised by the heartbeat, the shutdown and the attempt itself, from any thread.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use tokio::sync::Notify;

/// What an attempt was told, from the gentlest to the strongest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Level {
    /// Go on.
    Run,
    /// The worker shuts down: finish if you can within the grace period.
    Shutdown,
    /// Somebody cancelled the job: return soon.
    Cancel,
    /// The grace period is over: the handler is dropped, the job goes back to the line.
    Release,
    /// The attempt took too long: the handler is dropped.
    Timeout,
    /// The job is not ours any more: the handler is dropped, nothing is written.
    Lost,
}

impl Level {
    fn of(level: u8) -> Self {
        match level {
            0 => Self::Run,
            1 => Self::Shutdown,
            2 => Self::Cancel,
            3 => Self::Release,
            4 => Self::Timeout,
            _ => Self::Lost,
        }
    }
}

/// The level of one attempt.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    level: AtomicU8,
    changed: Notify,
    /// The handler looked and saw a level above `Run`: what it returns from then on may be an answer to that.
    noticed: AtomicBool,
}

impl Signal {
    /// Raises the level. A lower or equal one changes nothing.
    pub(crate) fn raise(&self, level: Level) {
        if self.level.fetch_max(level as u8, Ordering::AcqRel) < level as u8 {
            self.changed.notify_waiters();
        }
    }

    /// The level now.
    pub(crate) fn level(&self) -> Level {
        Level::of(self.level.load(Ordering::Acquire))
    }

    /// Waits until the level is above `level`.
    pub(crate) async fn above(&self, level: Level) -> Level {
        loop {
            // Made before the look: a raise between the look and the wait wakes it.
            let changed = self.changed.notified();
            let now = self.level();
            if now > level {
                return now;
            }
            changed.await;
        }
    }

    /// The handler saw the level.
    pub(crate) fn notice(&self) {
        self.noticed.store(true, Ordering::Release);
    }

    /// True if the handler saw a level above `Run`.
    pub(crate) fn was_noticed(&self) -> bool {
        self.noticed.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_rises_and_wakes_those_who_wait() {
        let signal = Signal::default();
        let waits = signal.above(Level::Shutdown);
        tokio::pin!(waits);
        assert!(futures_util::poll!(&mut waits).is_pending());
        signal.raise(Level::Shutdown);
        assert!(futures_util::poll!(&mut waits).is_pending());
        signal.raise(Level::Lost);
        signal.raise(Level::Cancel);
        assert_eq!(waits.await, Level::Lost);
        for level in [Level::Run, Level::Shutdown, Level::Cancel, Level::Release, Level::Timeout, Level::Lost] {
            assert_eq!(Level::of(level as u8), level);
        }
    }
}
