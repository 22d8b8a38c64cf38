//! How long a provider asks us to wait, out of the many places and grammars in which providers say it.
//!
//! Order: `retry-after-ms`, `retry-after`, their `llm_provider-` copies (a gateway in between), the body (Gemini's
//! `retryDelay`), and the reset times of exhausted `x-ratelimit-*` and `anthropic-ratelimit-*` budgets. What is zero,
//! negative, past, not a number or not understood is no hint, and a hint is capped.

use hyper::header::HeaderMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The longest wait taken from a provider. Longer ones are cut to it, and the provider is asked again then.
pub const WAIT_MAX: Duration = Duration::from_secs(3600);

/// The wait a response asks for. `body` is what the body asked for (see `classify`), `now` decides about dates.
#[must_use]
pub fn wait_hint(headers: &HeaderMap, body: Option<Duration>, now: SystemTime) -> Option<Duration> {
    let get = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    for prefix in ["", "llm_provider-"] {
        if let Some(wait) = get(&format!("{prefix}retry-after-ms")).and_then(milliseconds) {
            return Some(wait);
        }
        if let Some(wait) = get(&format!("{prefix}retry-after")).and_then(|text| retry_after(text, now)) {
            return Some(wait);
        }
    }
    body.and_then(sane).or_else(|| exhausted_budget(&get, now))
}

/// How long nothing more is to be had, by the headers of a good answer: the latest reset among the budgets of which nothing
/// remains. Those that have no limit (Azure sends 0 or -1 for it) are none.
#[must_use]
pub fn exhausted(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    exhausted_budget(&|name: &str| headers.get(name).and_then(|value| value.to_str().ok()), now)
}

/// The names of what is left, of what there is, and of when there is more again.
const BUDGETS: [[&str; 3]; 6] = [
    ["x-ratelimit-remaining-requests", "x-ratelimit-limit-requests", "x-ratelimit-reset-requests"],
    ["x-ratelimit-remaining-tokens", "x-ratelimit-limit-tokens", "x-ratelimit-reset-tokens"],
    [
        "anthropic-ratelimit-requests-remaining",
        "anthropic-ratelimit-requests-limit",
        "anthropic-ratelimit-requests-reset",
    ],
    ["anthropic-ratelimit-tokens-remaining", "anthropic-ratelimit-tokens-limit", "anthropic-ratelimit-tokens-reset"],
    [
        "anthropic-ratelimit-input-tokens-remaining",
        "anthropic-ratelimit-input-tokens-limit",
        "anthropic-ratelimit-input-tokens-reset",
    ],
    [
        "anthropic-ratelimit-output-tokens-remaining",
        "anthropic-ratelimit-output-tokens-limit",
        "anthropic-ratelimit-output-tokens-reset",
    ],
];

/// The latest reset among the budgets of which nothing remains.
fn exhausted_budget<'a>(get: &impl Fn(&str) -> Option<&'a str>, now: SystemTime) -> Option<Duration> {
    let is_limited = |limit| get(limit).and_then(number).is_none_or(|limit| limit > 0.0);
    BUDGETS
        .iter()
        .filter(|[remaining, limit, _]| get(remaining).is_some_and(|text| text.trim() == "0") && is_limited(limit))
        .filter_map(|[_, _, reset]| get(reset).and_then(|text| reset_time(text, now)))
        .max()
}

/// A number of milliseconds, fractions allowed.
fn milliseconds(text: &str) -> Option<Duration> {
    seconds(number(text)? / 1000.0)
}

/// The value of `Retry-After`: seconds, fractions allowed, or an HTTP date.
#[must_use]
pub fn retry_after(text: &str, now: SystemTime) -> Option<Duration> {
    match number(text) {
        Some(value) => seconds(value),
        None => until(httpdate::parse_http_date(text.trim()).ok()?, now),
    }
}

/// The value of a reset header: a Go duration, bare seconds, epoch seconds or milliseconds, or RFC 3339.
#[must_use]
pub fn reset_time(text: &str, now: SystemTime) -> Option<Duration> {
    let text = text.trim();
    if let Some(value) = number(text) {
        // A bare number beyond a year is a date: from 1e8 seconds since 1970, from 1e11 milliseconds.
        return if value >= 1e11 {
            until(epoch(value / 1000.0)?, now)
        } else if value >= 1e8 {
            until(epoch(value)?, now)
        } else {
            seconds(value)
        };
    }
    go_duration(text).or_else(|| until(rfc3339(text)?, now))
}

/// A Go duration such as `1s`, `6m0s`, `20ms`, `1h2m3.5s`; also Gemini's `46s`.
#[must_use]
pub fn go_duration(text: &str) -> Option<Duration> {
    let mut rest = text.trim();
    let mut total = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let value = number(&rest[..digits])?;
        rest = &rest[digits..];
        let unit_end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        total += value
            * match &rest[..unit_end] {
                "h" => 3600.0,
                "m" => 60.0,
                "s" => 1.0,
                "ms" => 1e-3,
                "us" | "µs" | "μs" => 1e-6,
                "ns" => 1e-9,
                _ => return None,
            };
        rest = &rest[unit_end..];
    }
    seconds(total)
}

/// `2026-11-29T15:04:05Z`, with fractions and offsets. Written out here because it is the only date this crate reads.
fn rfc3339(text: &str) -> Option<SystemTime> {
    let field = |range: std::ops::Range<usize>| -> Option<i64> {
        let digits = text.get(range)?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let separator = |at: usize, allowed: &[u8]| text.as_bytes().get(at).is_some_and(|b| allowed.contains(b));
    if !(separator(4, b"-")
        && separator(7, b"-")
        && separator(10, b"Tt ")
        && separator(13, b":")
        && separator(16, b":"))
    {
        return None;
    }
    let (year, month, day) = (field(0..4)?, field(5..7)?, field(8..10)?);
    let (hour, minute, second) = (field(11..13)?, field(14..16)?, field(17..19)?);
    if !((1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second <= 60) {
        return None;
    }
    let mut rest = text.get(19..)?;
    if let Some(fraction) = rest.strip_prefix('.') {
        rest = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    let offset = match rest.as_bytes() {
        b"Z" | b"z" => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let minutes = rest.get(1..3)?.parse::<i64>().ok()? * 60 + rest.get(4..6)?.parse::<i64>().ok()?;
            if *sign == b'-' { -minutes } else { minutes }
        }
        _ => return None,
    };
    // Days since 1970-01-01 of a civil date: years begin in March, so that the leap day is the last of a year.
    let shifted_year = if month <= 2 { year - 1 } else { year };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = shifted_year * 365 + shifted_year.div_euclid(4) - shifted_year.div_euclid(100)
        + shifted_year.div_euclid(400)
        + day_of_year
        - 719_468;
    let unix = days * 86_400 + hour * 3600 + minute * 60 + second - offset * 60;
    UNIX_EPOCH.checked_add(Duration::from_secs(u64::try_from(unix).ok()?))
}

/// A plain decimal number. Rust's own parser also takes "inf", "nan" and "infinity"; none of them is a time.
fn number(text: &str) -> Option<f64> {
    text.trim().parse::<f64>().ok().filter(|value| value.is_finite())
}

fn epoch(seconds: f64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::try_from_secs_f64(seconds).ok()?)
}

fn until(then: SystemTime, now: SystemTime) -> Option<Duration> {
    sane(then.duration_since(now).ok()?)
}

fn seconds(value: f64) -> Option<Duration> {
    sane(Duration::try_from_secs_f64(value.min(WAIT_MAX.as_secs_f64())).ok()?)
}

fn sane(wait: Duration) -> Option<Duration> {
    (!wait.is_zero()).then(|| wait.min(WAIT_MAX))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use hyper::header::{HeaderName, HeaderValue};
    use proptest::prelude::*;

    fn now() -> SystemTime {
        // 2026-11-29T15:04:05Z
        UNIX_EPOCH + Duration::from_secs(1_795_964_645)
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse::<HeaderValue>().unwrap()))
            .collect()
    }

    fn hint(pairs: &[(&str, &str)]) -> Option<u128> {
        wait_hint(&headers(pairs), None, now()).map(|wait| wait.as_millis())
    }

    #[test]
    fn every_place_and_the_order_among_them() {
        let all = [
            ("retry-after-ms", "1500.5"),
            ("retry-after", "2"),
            ("llm_provider-retry-after-ms", "3000"),
            ("llm_provider-retry-after", "4"),
            ("x-ratelimit-remaining-tokens", "0"),
            ("x-ratelimit-reset-tokens", "6m0s"),
        ];
        let expected = [1500, 2000, 3000, 4000, 360_000];
        for (skip, expected) in [0, 1, 2, 3, 4].into_iter().zip(expected) {
            assert_eq!(hint(&all[skip..]), Some(expected));
        }
        let body = Some(Duration::from_secs(46));
        assert_eq!(wait_hint(&headers(&all[4..]), body, now()), body);
        assert_eq!(wait_hint(&headers(&all), body, now()), Some(Duration::from_micros(1_500_500)));
    }

    #[test]
    fn only_exhausted_budgets_count_and_the_latest_wins() {
        let pairs = [
            ("x-ratelimit-remaining-requests", "0"),
            ("x-ratelimit-reset-requests", "20ms"),
            ("x-ratelimit-remaining-tokens", "17"),
            ("x-ratelimit-reset-tokens", "1h"),
            ("anthropic-ratelimit-output-tokens-remaining", "0"),
            ("anthropic-ratelimit-output-tokens-reset", "2026-11-29T15:04:35Z"),
        ];
        assert_eq!(hint(&pairs[..4]), Some(20));
        assert_eq!(hint(&pairs), Some(30_000));
        assert_eq!(hint(&pairs[2..4]), None);
        assert_eq!(exhausted(&headers(&pairs), now()), Some(Duration::from_secs(30)));
        assert_eq!(exhausted(&headers(&[("retry-after", "5")]), now()), None);
        for limit in ["0", "-1"] {
            let unlimited = [("x-ratelimit-limit-requests", limit), pairs[0], pairs[1]];
            assert_eq!(exhausted(&headers(&unlimited), now()), None, "{limit}");
        }
    }

    #[test]
    fn dates() {
        for text in ["Sun, 29 Nov 2026 15:04:15 GMT", "Sunday, 29-Nov-26 15:04:15 GMT"] {
            assert_eq!(retry_after(text, now()), Some(Duration::from_secs(10)), "{text}");
        }
        for text in [
            "2026-11-29T15:04:15Z",
            "2026-11-29T15:04:15.250Z",
            "2026-11-29T16:34:15+01:30",
            "1795964655",
            "1795964655000",
            "10",
            "10s",
        ] {
            assert_eq!(reset_time(text, now()), Some(Duration::from_secs(10)), "{text}");
        }
        assert_eq!(rfc3339("2024-02-29T00:00:00Z"), Some(UNIX_EPOCH + Duration::from_secs(1_709_164_800)));
    }

    #[test]
    fn what_is_no_hint() {
        for text in ["NaN", "inf", "-1", "0", "", "soon", "Sun, 29 Nov 2020 15:04:15 GMT"] {
            assert_eq!(retry_after(text, now()), None, "{text}");
        }
        for text in [
            "1x",
            "s",
            "..s",
            "1s2",
            "2020-01-01T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "0s",
            "-5s",
            "2026-11-29T15:04:15",
        ] {
            assert_eq!(reset_time(text, now()), None, "{text}");
        }
        assert_eq!(retry_after("1e300", now()), Some(WAIT_MAX));
        assert_eq!(retry_after("86400", now()), Some(WAIT_MAX));
        assert_eq!(
            hint(&[("retry-after", "-3"), ("llm_provider-retry-after", "5")]),
            Some(5000),
            "a bad hint does not hide a good one"
        );
    }

    proptest! {
        #[test]
        fn nothing_panics_and_all_is_capped(text in ".{0,40}") {
            for wait in [retry_after(&text, now()), reset_time(&text, now()), go_duration(&text), milliseconds(&text)] {
                prop_assert!(wait.is_none_or(|wait| !wait.is_zero() && wait <= WAIT_MAX));
            }
        }

        #[test]
        fn go_durations_round_trip(h in 0u64..1, m in 0u64..59, s in 0u64..60, ms in 1u64..1000) {
            let wait = go_duration(&format!("{h}h{m}m{s}s{ms}ms")).unwrap();
            let expected = Duration::from_millis(((h * 60 + m) * 60 + s) * 1000 + ms);
            prop_assert!(wait.abs_diff(expected) < Duration::from_micros(10));
        }
    }
}
