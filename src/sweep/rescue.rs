//! Finds workers that show no sign of life and gives their jobs back.
//!
//! Postgres decides, by its own clock and under its own locks; but it is only asked about workers whose beat has stood
//! still for a whole lease on *our* monotonic clock, so that no jump of the database's clock takes jobs from the living.
//! After a call that failed the watch begins anew: an outage that we shared with a worker says nothing about it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::error::Result;
use crate::event::{Emit, Event};
use crate::store::{Store, WorkerBeat};

/// Jobs moved in one statement: some milliseconds of locks.
const MAX_JOBS: u32 = 500;
/// With short leases look often, but not in a busy loop; with long ones often enough to see a beat several times.
const BOUNDS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// The watch over all workers.
#[derive(Debug, Default)]
pub(crate) struct Rescue {
    seen: HashMap<Uuid, Seen>,
}

#[derive(Debug)]
struct Seen {
    beat: WorkerBeat,
    /// When this beat was first seen: the moment *after* the look.
    since: Instant,
}

impl Rescue {
    /// A third of the shortest lease among the workers seen.
    pub(crate) fn every(&self) -> Duration {
        let shortest = self.seen.values().map(|seen| seen.beat.lease).min().unwrap_or(BOUNDS.1);
        (shortest / 3).clamp(BOUNDS.0, BOUNDS.1)
    }

    /// Looks once and rescues all there is to rescue.
    pub(super) async fn run(&mut self, store: &Store, emit: &Emit) -> Result<bool> {
        let result = self.look_and_rescue(store, emit).await;
        if result.is_err() {
            self.seen.clear();
        }
        result.map(|()| false)
    }

    async fn look_and_rescue(&mut self, store: &Store, emit: &Emit) -> Result<()> {
        let before = Instant::now();
        let beats = store.worker_beats().await?;
        let suspects = self.observe(beats, before, Instant::now());
        // Also without suspects: jobs may be left of a worker that somebody marked dead before going away himself.
        loop {
            let rescued = store.rescue(&suspects, MAX_JOBS).await?;
            if rescued.jobs > 0 {
                emit(&Event::Rescued { jobs: rescued.jobs });
            }
            if !rescued.more {
                return Ok(());
            }
        }
    }

    /// Takes note of what was seen by a look between `before` and `after`; names the workers whose beat stood still for
    /// their lease.
    fn observe(&mut self, beats: Vec<WorkerBeat>, before: Instant, after: Instant) -> Vec<WorkerBeat> {
        let mut suspects = Vec::new();
        let mut now = HashMap::with_capacity(beats.len());
        for beat in beats {
            let since = match self.seen.get(&beat.worker) {
                Some(seen) if seen.beat.beat_at == beat.beat_at => seen.since,
                _ => after,
            };
            if before.saturating_duration_since(since) >= beat.lease {
                suspects.push(beat.clone());
            }
            now.insert(beat.worker, Seen { beat, since });
        }
        self.seen = now;
        suspects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);

    fn beat(worker: Uuid, beat_at: &str) -> WorkerBeat {
        WorkerBeat { worker, beat_at: beat_at.to_owned(), lease: LEASE, expired: true }
    }

    fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn only_a_beat_that_stood_still_for_a_lease_is_suspect() {
        let (dead, alive, start) = (Uuid::new_v4(), Uuid::new_v4(), Instant::now());
        let mut rescue = Rescue::default();
        for second in (0..=60).step_by(10) {
            let now = start + secs(second);
            let beats = vec![beat(dead, "noon"), beat(alive, &second.to_string())];
            // The look takes a second: what counts is from the end of the first to the beginning of this one.
            let suspects = rescue.observe(beats, now, now + secs(1));
            let expected = if second > 30 { vec![beat(dead, "noon")] } else { vec![] };
            assert_eq!(suspects, expected, "after {second} s");
        }
    }

    #[tokio::test]
    async fn after_a_call_that_failed_the_watch_begins_anew() {
        let (dead, start) = (Uuid::new_v4(), Instant::now());
        let mut rescue = Rescue::default();
        rescue.observe(vec![beat(dead, "noon")], start, start);
        let database = crate::store::Database::new("postgres://127.0.0.1:1/nowhere").expect("a URL");
        let emit: Emit = std::sync::Arc::new(|_: &Event<'_>| {});
        assert!(rescue.run(&database.store("test"), &emit).await.is_err(), "nothing listens on port 1");
        let later = start + secs(31);
        assert!(rescue.observe(vec![beat(dead, "noon")], later, later).is_empty());
        assert_eq!(rescue.observe(vec![beat(dead, "noon")], later + LEASE, later + LEASE).len(), 1);
    }

    #[test]
    fn looks_as_often_as_the_shortest_lease_needs() {
        let now = Instant::now();
        let mut rescue = Rescue::default();
        assert_eq!(rescue.every(), secs(10) / 3);
        rescue.observe(vec![beat(Uuid::new_v4(), "noon")], now, now);
        assert_eq!(rescue.every(), secs(10));
        let short = WorkerBeat { lease: Duration::from_millis(500), ..beat(Uuid::new_v4(), "noon") };
        rescue.observe(vec![short], now, now);
        assert_eq!(rescue.every(), secs(1));
    }
}
