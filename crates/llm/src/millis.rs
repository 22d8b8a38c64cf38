//! Times as they are stored and sent: whole milliseconds.

use std::time::Duration;

/// More than fit in 64 bits count as the most that do.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
