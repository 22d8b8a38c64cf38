//! Drops partitions in which everything has expired, step by step.
//!
//! Each step is a transaction of its own, since one of them holds a strong lock. Nobody is waited for: a step that cannot go on
//! says so, and is tried again soon, so that a partition goes within a fraction of a second after the last reader who held it
//! up. What cost something is followed by a rest a hundred times as long: a partition of any size is felt once in a while only.

use std::time::{Duration, Instant};

use crate::error::Result;
use crate::store::{Retired, Store};

/// What a step counts as that could not go on, whatever time it took to find out: most of it waits, and it locks nothing. The next one
/// comes after a hundred times as long.
const BUSY: Duration = Duration::from_micros(500);

/// Drops one partition, if it is due and nobody else is at it, or goes as far as can be now. Says whether something is left to do.
pub(super) async fn retire(store: &Store, part: &str) -> Result<bool> {
    if !store.begin_sweep(part).await? {
        return Ok(false);
    }
    let began = Instant::now();
    let mut last = store.retire().await?;
    if last == Retired::Detached {
        last = store.retire().await?;
    }
    let took = if last == Retired::Busy { BUSY } else { began.elapsed() };
    let left = last != Retired::Idle;
    store.end_sweep(part, took, Ok(left)).await?;
    Ok(left)
}
