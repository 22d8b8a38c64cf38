//! The right of this worker to go on with its jobs, judged by its own monotonic clock and never longer than Postgres
//! would judge it.
//!
//! - A heartbeat that was answered renews the right, counted from *before* it was sent: Postgres counts from later.
//! - "The server is down" (refused, starting up, read-only) extends the right by one lease from before that attempt was
//!   made, as long as it still stood when the answer came: until then nobody could take the work, while the server was
//!   down nobody could, and after a start Postgres rescues nobody for one full lease.
//! - Silence (a time-out, a partition) extends nothing: others may be talking to Postgres.
//! - Once over, it is over for good. [`Instant`] goes on while the process is stopped, so a process that wakes up late
//!   finds its right gone before it does anything else.
//!
//! The second rule trusts that the server which refuses is the one that everybody uses. Where an address can stay behind
//! (a failover without a change of address, a stale name), fencing still keeps the record right, but an attempt may run twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Written by the heartbeat alone, read by every attempt at every step; hence an atomic and not a lock.
#[derive(Debug)]
pub(crate) struct Lease {
    length: Duration,
    /// Where counting starts: an `Instant` does not fit into an atomic.
    epoch: Instant,
    /// Nanoseconds after `epoch` at which the right ends.
    until: AtomicU64,
}

impl Lease {
    /// A right of one `length`, from before the registration was sent.
    pub(crate) fn new(length: Duration, sent: Instant) -> Self {
        let lease = Self { length, epoch: sent, until: AtomicU64::new(0) };
        lease.raise_to(sent + length);
        lease
    }

    /// A heartbeat sent at `sent` was answered with what is left of the lease by Postgres' clock. False: too late, it is over.
    pub(crate) fn renew(&self, sent: Instant, expires_in: Duration, now: Instant) -> bool {
        self.extend(sent + expires_in.min(self.length), now)
    }

    /// The server said at an attempt made at `tried` that it is down. False: too late, it is over.
    pub(crate) fn nobody_could_take_it(&self, tried: Instant, now: Instant) -> bool {
        self.extend(tried + self.length, now)
    }

    /// True if the right has ended: handlers must not go on.
    pub(crate) fn is_over(&self, now: Instant) -> bool {
        now >= self.valid_until()
    }

    /// When the right ends, as far as is known now.
    pub(crate) fn valid_until(&self) -> Instant {
        self.epoch + Duration::from_nanos(self.until.load(Ordering::Acquire))
    }

    /// How long the right lasts from `now`.
    pub(crate) fn remaining(&self, now: Instant) -> Duration {
        self.valid_until().saturating_duration_since(now)
    }

    /// Gives the right up before its time.
    pub(crate) fn end(&self, now: Instant) {
        let now = u64::try_from(now.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX);
        self.until.fetch_min(now, Ordering::AcqRel);
    }

    fn extend(&self, until: Instant, now: Instant) -> bool {
        if self.is_over(now) {
            return false;
        }
        self.raise_to(until);
        true
    }

    /// Never backwards: an answer that comes out of order takes nothing away.
    fn raise_to(&self, until: Instant) {
        let after = u64::try_from(until.saturating_duration_since(self.epoch).as_nanos()).unwrap_or(u64::MAX);
        self.until.fetch_max(after, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEASE_MS: u64 = 1_000;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn counts_from_before_the_heartbeat_was_sent() {
        let t = Instant::now();
        let lease = Lease::new(ms(LEASE_MS), t);
        assert!(lease.renew(t + ms(300), ms(LEASE_MS), t + ms(900)));
        assert_eq!(lease.valid_until(), t + ms(1_300));
        assert_eq!(lease.remaining(t + ms(1_200)), ms(100));
        assert!(!lease.is_over(t + ms(1_299)) && lease.is_over(t + ms(1_300)));
    }

    #[test]
    fn a_shorter_word_of_postgres_counts_and_an_older_answer_takes_nothing_away() {
        let t = Instant::now();
        let lease = Lease::new(ms(LEASE_MS), t);
        assert!(lease.renew(t + ms(500), ms(700), t + ms(500)));
        assert_eq!(lease.valid_until(), t + ms(1_200));
        assert!(lease.renew(t + ms(100), ms(LEASE_MS), t + ms(600)));
        assert_eq!(lease.valid_until(), t + ms(1_200));
    }

    #[test]
    fn once_over_nothing_brings_it_back() {
        let t = Instant::now();
        let lease = Lease::new(ms(LEASE_MS), t);
        assert!(!lease.renew(t + ms(900), ms(LEASE_MS), t + ms(1_000)), "the answer came too late");
        assert!(!lease.nobody_could_take_it(t + ms(900), t + ms(1_500)));
        assert!(lease.is_over(t + ms(1_000)));
        let lease = Lease::new(ms(LEASE_MS), t);
        lease.end(t + ms(10));
        assert!(lease.is_over(t + ms(10)));
    }

    /// What happens to one heartbeat that reaches the server `there` ms after it was sent.
    #[derive(Debug, Clone)]
    struct Attempt {
        gap: u64,
        there: u64,
        back: u64,
        answer_lost: bool,
        request_lost: bool,
    }

    fn attempts() -> impl Strategy<Value = Vec<Attempt>> {
        let one = (1..900u64, 0..700u64, 0..700u64, prop::bool::weighted(0.15), prop::bool::weighted(0.15)).prop_map(
            |(gap, there, back, answer_lost, request_lost)| Attempt { gap, there, back, answer_lost, request_lost },
        );
        prop::collection::vec(one, 1..40)
    }

    /// The server as the worker's right has to fear it: it rescues at the first moment it may.
    struct Server {
        outages: Vec<(u64, u64)>,
        expires_at: u64,
        rescued_at: Option<u64>,
    }

    impl Server {
        fn is_down(&self, at: u64) -> bool {
            self.outages.iter().any(|(from, to)| (*from..*to).contains(&at))
        }

        /// True if the server started, or started again, less than a lease ago.
        fn in_grace(&self, at: u64) -> bool {
            self.outages.iter().any(|(_, to)| (*to..*to + LEASE_MS).contains(&at))
        }

        fn tick(&mut self, at: u64) {
            let may = !self.is_down(at) && !self.in_grace(at) && at >= self.expires_at;
            if may && self.rescued_at.is_none() {
                self.rescued_at = Some(at);
            }
        }

        /// `Some(renewed)`, or `None` if it is down.
        fn heartbeat(&mut self, at: u64) -> Option<bool> {
            if self.is_down(at) {
                return None;
            }
            let alive = self.rescued_at.is_none() && (at < self.expires_at || self.in_grace(at));
            if alive {
                self.expires_at = at + LEASE_MS;
            }
            Some(alive)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// While the worker believes in its right, nobody has taken its jobs, whatever is lost, slow or down.
        #[test]
        fn never_believed_in_for_longer_than_it_stands(
            attempts in attempts(),
            outages in prop::collection::vec((1..1_500u64, 0..1_500u64), 0..8),
        ) {
            let start = Instant::now();
            let mut server = Server { outages: Vec::new(), expires_at: LEASE_MS, rescued_at: None };
            let mut from = 0;
            for (gap, length) in outages {
                server.outages.push((from + gap, from + gap + length));
                from += gap + length;
            }
            let lease = Lease::new(ms(LEASE_MS), start);
            let mut now = 0u64;
            for beat in attempts {
                let sent = now + beat.gap;
                let arrives = sent + beat.there;
                let answered = arrives + beat.back;
                let mut answer = None;
                for at in now..=answered {
                    // The heartbeat is at the server before its rescuer looks: the tie goes to the worker.
                    if at == arrives && !beat.request_lost {
                        answer = Some(server.heartbeat(at));
                    }
                    server.tick(at);
                    if !lease.is_over(start + ms(at)) {
                        prop_assert!(server.rescued_at.is_none(), "rescued at {:?}, believed in at {at}", server.rescued_at);
                    }
                }
                now = answered;
                let (sent, now) = (start + ms(sent), start + ms(now));
                let goes_on = match answer.filter(|_| !beat.answer_lost) {
                    Some(Some(true)) => lease.renew(sent, ms(LEASE_MS), now),
                    Some(Some(false)) => false,
                    Some(None) => lease.nobody_could_take_it(sent, now),
                    None => !lease.is_over(now),
                };
                if !goes_on {
                    break;
                }
            }
        }

        /// An outage of any length in which the server says that it is down costs nothing.
        #[test]
        fn an_outage_that_is_announced_costs_no_right(seconds in 1..3_600u64, step in 1..900u64) {
            let start = Instant::now();
            let lease = Lease::new(ms(LEASE_MS), start);
            let mut at = 0;
            while at < seconds * 1_000 {
                at += step;
                prop_assert!(lease.nobody_could_take_it(start + ms(at), start + ms(at)));
            }
        }
    }
}
