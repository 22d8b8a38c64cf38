//! When the next attempt runs: exponential backoff with full jitter, capped. Pure; the random number is passed in.

use std::time::Duration;

/// Exponential backoff with full jitter: before attempt n+1 wait a random time up to `min(cap, base × 2^(n−1))`, but
/// never less than `floor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Upper bound of the first wait. Default: 2 seconds.
    pub base: Duration,
    /// Upper bound of every wait. Default: 10 minutes, so that a job with the default 5 attempts never sleeps for days.
    pub cap: Duration,
    /// Lower bound of every wait. Default: 100 milliseconds, so that a zero from the jitter does not retry at once.
    pub floor: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: Duration::from_secs(2), cap: Duration::from_secs(600), floor: Duration::from_millis(100) }
    }
}

impl Backoff {
    /// The wait after failed attempt number `attempt` (from 1), for a random number `r` in `[0, 1)`.
    pub fn delay(&self, attempt: u32, r: f64) -> Duration {
        let bound = self.bound(attempt);
        bound.mul_f64(r.clamp(0.0, 1.0)).max(self.floor).min(self.cap)
    }

    /// The longest wait after failed attempt number `attempt`.
    pub fn bound(&self, attempt: u32) -> Duration {
        let doublings = attempt.saturating_sub(1).min(31);
        self.base.checked_mul(1 << doublings).map_or(self.cap, |d| d.min(self.cap))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_is_capped_and_never_overflows() {
        let backoff = Backoff::default();
        assert_eq!(backoff.bound(1), Duration::from_secs(2));
        assert_eq!(backoff.bound(2), Duration::from_secs(4));
        assert_eq!(backoff.bound(20), Duration::from_secs(600));
        assert_eq!(backoff.bound(u32::MAX), Duration::from_secs(600));
        let huge = Backoff { base: Duration::MAX, cap: Duration::MAX, floor: Duration::ZERO };
        assert_eq!(huge.bound(u32::MAX), Duration::MAX);
    }

    #[test]
    fn jitter_stays_between_floor_and_bound() {
        let backoff = Backoff::default();
        for attempt in 1..40 {
            for r in [0.0, 0.3, 0.999] {
                let d = backoff.delay(attempt, r);
                assert!(d >= backoff.floor && d <= backoff.bound(attempt), "{attempt} {r} {d:?}");
            }
        }
    }
}
