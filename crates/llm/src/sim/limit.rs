//! The rate limit of the simulated provider: requests and tokens in every rolling minute, enforced or only counted.

use super::delay::Delay;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// A rate limit. Without numbers it limits nothing and counts all the same.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limit {
    /// Requests in any rolling minute.
    pub requests_per_minute: Option<u64>,
    /// Tokens of prompts and answers in any rolling minute.
    pub tokens_per_minute: Option<u64>,
    /// Whether requests beyond it are answered with 429. Default true; else they are answered, and counted as `over_limit`.
    pub enforce: bool,
    /// Whether answers tell by `x-ratelimit-*` what is left. Default true. Reset times say when one more request has room.
    pub headers: bool,
    /// How long a minute is. Default 60 s.
    pub window: Delay,
}

impl Default for Limit {
    fn default() -> Self {
        Self {
            requests_per_minute: None,
            tokens_per_minute: None,
            enforce: true,
            headers: true,
            window: Delay::fixed(Duration::from_secs(60)),
        }
    }
}

/// What a rate limit has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Rates {
    /// The most requests that were answered in any rolling minute.
    pub worst_minute_requests: u64,
    /// The most tokens that were answered in any rolling minute.
    pub worst_minute_tokens: u64,
    /// The tokens of the largest request.
    pub largest_tokens: u64,
    /// Tokens in all.
    pub tokens: u64,
    /// Requests that came when there was no room for them.
    pub over_limit: u64,
}

/// Counts the last minute.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    last: VecDeque<(Instant, u64)>,
    tokens: u64,
    pub(crate) rates: Rates,
}

/// What becomes of a request.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    /// Refused: there is room after this time.
    pub(crate) wait: Option<Duration>,
    pub(crate) headers: Vec<(&'static str, String)>,
}

impl Meter {
    /// Lets a request of so many tokens in, or not.
    pub(crate) fn take(&mut self, limit: &Limit, tokens: u64, now: Instant) -> Verdict {
        let minute = limit.window.max;
        while let Some((at, old)) = self.last.front().copied()
            && now.duration_since(at) >= minute
        {
            self.last.pop_front();
            self.tokens -= old;
        }
        let most = |limit: Option<u64>| limit.unwrap_or(u64::MAX);
        let (requests_max, tokens_max) = (most(limit.requests_per_minute), most(limit.tokens_per_minute));
        let has_room = self.requests() < requests_max && self.tokens + tokens <= tokens_max;
        self.rates.over_limit += u64::from(!has_room);
        self.rates.largest_tokens = self.rates.largest_tokens.max(tokens);
        let mut verdict = Verdict::default();
        if has_room || !limit.enforce {
            self.last.push_back((now, tokens));
            self.tokens += tokens;
            self.rates.tokens += tokens;
            self.rates.worst_minute_requests = self.rates.worst_minute_requests.max(self.requests());
            self.rates.worst_minute_tokens = self.rates.worst_minute_tokens.max(self.tokens);
        } else {
            verdict.wait = Some(self.room_in(limit, tokens, now));
        }
        if limit.headers {
            verdict.headers = self.headers(limit, tokens, now);
        }
        verdict
    }

    fn requests(&self) -> u64 {
        self.last.len() as u64
    }

    /// When a request of so many tokens has room.
    fn room_in(&self, limit: &Limit, tokens: u64, now: Instant) -> Duration {
        let (mut requests, mut held) = (self.requests(), self.tokens);
        let fits = |requests: u64, held: u64| {
            limit.requests_per_minute.is_none_or(|most| requests < most)
                && limit.tokens_per_minute.is_none_or(|most| held + tokens <= most)
        };
        let mut room = Duration::ZERO;
        for (at, old) in &self.last {
            if fits(requests, held) {
                return room;
            }
            (requests, held) = (requests - 1, held - old);
            room = (*at + limit.window.max).saturating_duration_since(now);
        }
        room
    }

    fn headers(&self, limit: &Limit, tokens: u64, now: Instant) -> Vec<(&'static str, String)> {
        let reset = format!("{}ms", self.room_in(limit, tokens, now).as_millis());
        let mut headers = Vec::new();
        if let Some(most) = limit.requests_per_minute {
            let left = most.saturating_sub(self.requests());
            headers.push(("x-ratelimit-limit-requests", most.to_string()));
            headers.push(("x-ratelimit-remaining-requests", left.to_string()));
            headers.push(("x-ratelimit-reset-requests", reset.clone()));
        }
        if let Some(most) = limit.tokens_per_minute {
            let left = most.saturating_sub(self.tokens);
            headers.push(("x-ratelimit-limit-tokens", most.to_string()));
            headers.push(("x-ratelimit-remaining-tokens", left.to_string()));
            headers.push(("x-ratelimit-reset-tokens", reset));
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_rolling_minute_is_no_calendar_minute() {
        let limit = Limit { requests_per_minute: Some(3), ..Limit::default() };
        let (mut meter, start) = (Meter::default(), Instant::now());
        let mut take = |second: u32| meter.take(&limit, 10, start + SECOND * second).wait.map(|wait| wait.as_secs());
        assert_eq!([take(0), take(30), take(50), take(55)], [None, None, None, Some(5)]);
        assert_eq!([take(59), take(60), take(61), take(89)], [Some(1), None, Some(29), Some(1)]);
        assert_eq!(take(90), None);
        let expected =
            Rates { worst_minute_requests: 3, worst_minute_tokens: 30, largest_tokens: 10, tokens: 50, over_limit: 4 };
        assert_eq!(meter.rates, expected);
    }

    #[test]
    fn tokens_are_limited_and_what_is_left_is_told() {
        let limit = Limit { tokens_per_minute: Some(100), ..Limit::default() };
        let (mut meter, start) = (Meter::default(), Instant::now());
        assert_eq!(meter.take(&limit, 60, start).wait, None);
        let refused = meter.take(&limit, 50, start + SECOND);
        assert_eq!(refused.wait, Some(SECOND * 59));
        let last = meter.take(&limit, 40, start + SECOND);
        assert_eq!(
            last.headers[1..],
            [("x-ratelimit-remaining-tokens", "0".to_owned()), ("x-ratelimit-reset-tokens", "59000ms".to_owned())]
        );
    }

    #[test]
    fn what_is_only_counted_is_answered() {
        let limit = Limit { requests_per_minute: Some(1), enforce: false, headers: false, ..Limit::default() };
        let mut meter = Meter::default();
        let now = Instant::now();
        assert!((0..5).all(|_| meter.take(&limit, 1, now).wait.is_none()));
        assert_eq!((meter.rates.worst_minute_requests, meter.rates.over_limit), (5, 4));
    }
}
