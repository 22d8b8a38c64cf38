//! Spans of time as people type them.

use std::time::Duration;

/// A duration as people write it.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write it like 30s, 5m or 1h 30m"))
}

/// Seconds, at least a tenth of one.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|s| (0.1..=86_400.0).contains(s));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "seconds, from 0.1 to 86400".to_owned())
}
