//! How long a part of the worker waits before it tries again after an error: doubling, jittered, bounded. (The backoff of
//! jobs is another matter: see `retry`.)

use std::time::Duration;

/// A pause that grows with every failure in a row.
#[derive(Debug)]
pub(crate) struct Pause {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Pause {
    /// The pauses are between half and all of `first`, then twice that, up to `longest`.
    pub(crate) fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, failures: 0 }
    }

    /// It worked: the next pause is the first again.
    pub(crate) fn reset(&mut self) {
        self.failures = 0;
    }

    /// The next pause.
    pub(crate) fn next(&mut self) -> Duration {
        let doublings = self.failures.min(20);
        self.failures = self.failures.saturating_add(1);
        jitter(self.first.saturating_mul(1 << doublings).min(self.longest))
    }
}

/// Between half of `duration` and all of it, so that many workers do not move in step.
pub(crate) fn jitter(duration: Duration) -> Duration {
    duration.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_up_to_its_bound_and_starts_again() {
        let (first, longest) = (Duration::from_millis(50), Duration::from_secs(1));
        let mut pause = Pause::new(first, longest);
        for n in 0..100 {
            let bound = first.saturating_mul(1 << n.min(20)).min(longest);
            let next = pause.next();
            assert!(next >= bound / 2 && next <= bound, "{n}: {next:?}");
        }
        pause.reset();
        assert!(pause.next() <= first);
    }
}
