//! The circuit breaker of one endpoint: notices that it fails, where it does not say so itself.
//!
//! It only counts, in this process: five failures in a row, or half of the last twenty, and it says "broken", once. What
//! that means for the fleet is decided where gates are kept.

use tokio::time::Instant;

/// So many failures in a row mean that it is broken.
const ROW: u32 = 5;
/// So many last outcomes are looked at, of which half may fail.
const WINDOW: u32 = 20;

/// What has come of the last calls.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// A bit an outcome, the newest lowest; set: it failed.
    outcomes: u32,
    /// How many there are, up to the window.
    known: u32,
    /// When it last said "broken".
    broke: Option<Instant>,
}

impl Breaker {
    /// A call that was sent at `sent` has failed. True: that was one too many.
    pub(crate) fn failed(&mut self, sent: Instant) -> bool {
        if self.is_old(sent) {
            return false;
        }
        self.take(1);
        let row = (1 << ROW) - 1;
        let is_broken =
            self.outcomes & row == row || (self.known == WINDOW && self.outcomes.count_ones() >= WINDOW / 2);
        if is_broken {
            // What comes after the pause is judged by itself.
            *self = Self { broke: Some(Instant::now()), ..Self::default() };
        }
        is_broken
    }

    /// A call that was sent at `sent` was answered.
    pub(crate) fn answered(&mut self, sent: Instant) {
        if !self.is_old(sent) {
            self.take(0);
        }
    }

    fn take(&mut self, failed: u32) {
        self.outcomes = ((self.outcomes << 1) | failed) & ((1 << WINDOW) - 1);
        self.known = (self.known + 1).min(WINDOW);
    }

    /// Calls that were under way when it broke say nothing about afterwards.
    fn is_old(&self, sent: Instant) -> bool {
        self.broke.is_some_and(|broke| sent <= broke)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const TICK: Duration = Duration::from_millis(1);

    /// Takes outcomes, `x` for a failure, and says after which of them it was broken.
    async fn broken_after(breaker: &mut Breaker, outcomes: &str) -> Vec<usize> {
        let mut broken = Vec::new();
        for (number, outcome) in outcomes.chars().enumerate() {
            tokio::time::advance(TICK).await;
            let sent = Instant::now();
            match outcome {
                'x' if breaker.failed(sent) => broken.push(number + 1),
                'x' => {}
                _ => breaker.answered(sent),
            }
        }
        broken
    }

    #[tokio::test(start_paused = true)]
    async fn five_in_a_row_or_half_of_twenty() {
        for (outcomes, expected) in [
            ("xxxx.xxxx.", vec![]),
            ("xxxxx", vec![5]),
            ("....xxxxxxxxxx", vec![9, 14]),
            ("x.x.x.x.x.x.x.x.x.x", vec![]),
            ("x.x.x.x.x.x.x.x.x.xx", vec![20]),
            ("..x..x..x..x..x..x..x..x..x..x..x..x", vec![]),
            ("xxxx.xxxx.x..........xxxx.", vec![]),
        ] {
            assert_eq!(broken_after(&mut Breaker::default(), outcomes).await, expected, "{outcomes}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_from_before_do_not_count_after() {
        let mut breaker = Breaker::default();
        let before = Instant::now();
        assert_eq!(broken_after(&mut breaker, "xxxxx").await, [5]);
        assert!((0..100).all(|_| !breaker.failed(before)));
        assert_eq!(broken_after(&mut breaker, "xxxxx").await, [5]);
    }
}
