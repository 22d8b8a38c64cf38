//! Drops partitions in which everything has expired, step by step.
//!
//! Each step is a transaction of its own, since one of them holds a strong lock. Nobody is waited for: a step that cannot go on
//! says so, and is tried again soon. So a partition goes within a second after the last reader who held it up.

use std::time::Duration;

use crate::error::Result;
use crate::store::{Retired, Store};

/// Steps in one run. More come at the next one.
const STEPS: usize = 20;
/// What a try takes at least that could not go on. The next one comes after a few times as long.
const BUSY: Duration = Duration::from_millis(50);

/// Goes as many steps as there are. Says whether something is left to do.
pub(super) async fn retire(store: &Store) -> Result<bool> {
    for _ in 0..STEPS {
        match store.retire().await? {
            Retired::Went => {}
            Retired::Idle => return Ok(false),
            Retired::Busy => {
                tokio::time::sleep(BUSY).await;
                return Ok(true);
            }
        }
    }
    Ok(true)
}
