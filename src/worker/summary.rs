//! What a worker did in its time, counted as it happens.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::event::Event;

/// What a worker did between its start and its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// Attempts started.
    pub started: u64,
    /// Jobs done.
    pub done: u64,
    /// Attempts that failed with another one to follow.
    pub retried: u64,
    /// Attempts that said "not now".
    pub snoozed: u64,
    /// Jobs that became dead letters.
    pub failed: u64,
    /// Jobs cancelled.
    pub cancelled: u64,
    /// Jobs given back uncharged.
    pub released: u64,
    /// Attempts whose job had gone to another worker.
    pub lost: u64,
    /// Outcomes that could not be written before the end, Postgres being away. Their jobs run again.
    pub unwritten: u64,
}

/// The counters behind a [`Summary`].
#[derive(Debug, Default)]
pub(crate) struct Tally {
    started: AtomicU64,
    done: AtomicU64,
    retried: AtomicU64,
    snoozed: AtomicU64,
    failed: AtomicU64,
    cancelled: AtomicU64,
    released: AtomicU64,
    lost: AtomicU64,
}

impl Tally {
    pub(crate) fn count(&self, event: &Event<'_>) {
        let counter = match event {
            Event::Started { .. } => &self.started,
            Event::Done { .. } => &self.done,
            Event::Retry { .. } => &self.retried,
            Event::Snoozed { .. } => &self.snoozed,
            Event::Failed { .. } => &self.failed,
            Event::Cancelled { .. } => &self.cancelled,
            Event::Released { .. } => &self.released,
            Event::Lost { .. } => &self.lost,
            Event::Registered { .. }
            | Event::LeaseLost { .. }
            | Event::ConnectionLost { .. }
            | Event::ConnectionRestored
            | Event::Rescued { .. }
            | Event::SweepFailed { .. }
            | Event::Swept { .. } => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn summary(&self, unwritten: u64) -> Summary {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Summary {
            started: of(&self.started),
            done: of(&self.done),
            retried: of(&self.retried),
            snoozed: of(&self.snoozed),
            failed: of(&self.failed),
            cancelled: of(&self.cancelled),
            released: of(&self.released),
            lost: of(&self.lost),
            unwritten,
        }
    }
}
