//! Housekeeping: idempotent sweeps in bounded batches, which any number of workers may run at the same time.
//!
//! `rescue` gives the jobs of dead workers back; tidying (partitions ahead of need, stragglers, folds) is one call that
//! Postgres does by itself. A sweep that fails is logged and comes again: none is ever needed at a given moment.

mod rescue;

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::error::Result;
use crate::pause::jitter;
use crate::store::{AlertData, AlertMessage, Database, Store};
use rescue::Rescue;

/// Between two tidyings, before jitter.
const TIDY_EVERY: Duration = Duration::from_secs(1);

/// What is swept.
enum Sweep {
    Rescue(Rescue),
    Tidy,
}

impl Sweep {
    fn name(&self) -> &'static str {
        match self {
            Self::Rescue(_) => "rescue",
            Self::Tidy => "tidy",
        }
    }

    fn every(&self) -> Duration {
        match self {
            Self::Rescue(rescue) => rescue.every(),
            Self::Tidy => TIDY_EVERY,
        }
    }

    async fn run(&mut self, store: &Store) -> Result<()> {
        match self {
            Self::Rescue(rescue) => rescue.run(store).await,
            Self::Tidy => {
                store.tidy().await?.iter().for_each(log);
                Ok(())
            }
        }
    }
}

/// One line an alert, in the log of the one worker whose sweep told it.
fn log(alert: &AlertMessage) {
    let AlertData { subject, text, count, new, .. } = &alert.data;
    tracing::warn!(target: "posthouse::alert", kind = alert.kind, subject, count, new, "alert: {text}");
}

/// A worker that starts has its first jobs to claim; nothing is so untidy that it could not wait for that.
const FIRST: Duration = Duration::from_secs(1);

/// Sweeps until it is stopped, on one connection.
pub(crate) async fn sweep(database: Database, stop: CancellationToken) {
    let store = database.store("sweep");
    let first = Instant::now() + FIRST;
    let mut due = [(first, Sweep::Rescue(Rescue::default())), (first, Sweep::Tidy)];
    let _ = stop
        .run_until_cancelled(async {
            loop {
                for (at, sweep) in &mut due {
                    if *at > Instant::now() {
                        continue;
                    }
                    if let Err(error) = sweep.run(&store).await {
                        if error.is_transient() {
                            tracing::debug!(sweep = sweep.name(), %error, "sweep failed; it comes again");
                        } else {
                            tracing::warn!(sweep = sweep.name(), %error, "sweep refused; it comes again");
                        }
                    }
                    *at = Instant::now() + jitter(sweep.every());
                }
                let next = due.iter().map(|(at, _)| *at).min().unwrap_or_else(Instant::now);
                tokio::time::sleep_until(next.into()).await;
            }
        })
        .await;
}
