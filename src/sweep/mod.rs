//! Housekeeping: idempotent sweeps in bounded batches, which any number of processes may run at the same time.
//!
//! Every second or so a process asks which parts of the sweep are due in the fleet, and runs each in transactions of its own, so
//! that one that fails or takes long keeps no other from running. Most parts are one call that Postgres does by itself;
//! those that need several transactions, or code that Postgres has not, are here. `rescue` alone is each process's own: it
//! compares what it saw before. A part that fails is logged, counted in the database, and comes again: none is ever needed
//! at a given moment.

mod rescue;

use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::error::{Error, Result};
use crate::pause::jitter;
use crate::store::{AlertData, AlertMessage, Database, Store};
use rescue::Rescue;

/// Between two looks at what is due, before jitter.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Before the next look when a part left something to do.
const GO_ON: Duration = Duration::from_millis(50);
/// A worker that starts has its first jobs to claim; nothing is so untidy that it could not wait for that.
const FIRST: Duration = Duration::from_secs(1);
/// The name of the rescue among the parts.
const RESCUE: &str = "rescue";

/// Sweeps until it is stopped, on one connection.
pub(crate) async fn sweep(database: Database, stop: CancellationToken) {
    let mut sweeper = Sweeper::new(database.store("sweep"));
    let _ = stop.run_until_cancelled(sweeper.sweep()).await;
}

/// The parts of the sweep, and what they remember from one run to the next.
struct Sweeper {
    store: Store,
    rescue: Rescue,
    rescue_at: Instant,
    /// What the last rescue took, and why it failed.
    rescued: (Duration, Result<(), String>),
}

impl Sweeper {
    fn new(store: Store) -> Self {
        Self { store, rescue: Rescue::default(), rescue_at: Instant::now() + FIRST, rescued: (Duration::ZERO, Ok(())) }
    }

    async fn sweep(&mut self) {
        let mut look_at = Instant::now() + FIRST;
        loop {
            tokio::time::sleep_until(look_at.min(self.rescue_at).into()).await;
            self.rescue_if_due().await;
            if look_at <= Instant::now() {
                let more = self.look().await;
                look_at = Instant::now() + jitter(if more { GO_ON } else { LOOK_EVERY });
            }
        }
    }

    /// Runs what is due, the rescue in between. Says whether something is left to do at once.
    async fn look(&mut self) -> bool {
        let due = match self.store.due_sweeps().await {
            Ok(due) => due,
            Err(error) => {
                tracing::debug!(%error, "what is to be swept is not known");
                return false;
            }
        };
        let mut more = false;
        for part in due {
            self.rescue_if_due().await;
            let began = Instant::now();
            match self.run(&part).await {
                Ok(left) => more |= left,
                Err(error) => {
                    broken(&part, &error);
                    if self.store.end_sweep(&part, began.elapsed(), Err(&error.to_string())).await.is_err() {
                        // Postgres itself is away, or refuses whatever we ask.
                        return false;
                    }
                }
            }
        }
        more
    }

    /// Runs one part, if it is still due. Says whether it left something to do.
    async fn run(&mut self, part: &str) -> Result<bool> {
        match part {
            RESCUE => self.note_rescue().await.map(|()| false),
            // What one transaction can do.
            _ => {
                let tidied = self.store.tidy(Some(part)).await?;
                tidied.alerts.iter().for_each(log);
                tidied.failed.iter().for_each(|part| failed(&part.sweep, &part.error));
                Ok(tidied.more)
            }
        }
    }

    async fn rescue_if_due(&mut self) {
        if self.rescue_at > Instant::now() {
            return;
        }
        let began = Instant::now();
        let ran = self.rescue.run(&self.store).await;
        if let Err(error) = &ran {
            broken(RESCUE, error);
        }
        self.rescued = (began.elapsed(), ran.map_err(|error| error.to_string()));
        self.rescue_at = Instant::now() + jitter(self.rescue.every());
    }

    /// Writes down how the last rescue of this process went, for the whole fleet.
    async fn note_rescue(&self) -> Result<()> {
        if !self.store.begin_sweep(RESCUE).await? {
            return Ok(());
        }
        let (took, ran) = &self.rescued;
        self.store.end_sweep(RESCUE, *took, ran.as_ref().map(|()| false).map_err(String::as_str)).await
    }
}

/// A call failed. That Postgres is away is told by those who need it more often.
fn broken(sweep: &str, error: &Error) {
    if error.is_transient() {
        tracing::debug!(sweep, %error, "sweep not possible now; it comes again");
    } else {
        failed(sweep, &error.to_string());
    }
}

/// One line a failure.
fn failed(sweep: &str, error: &str) {
    tracing::warn!(sweep, error, "sweep failed; it comes again");
}

/// One line an alert, in the log of the one worker whose sweep told it.
fn log(alert: &AlertMessage) {
    let AlertData { subject, text, count, new, .. } = &alert.data;
    tracing::warn!(target: "posthouse::alert", kind = alert.kind, subject, count, new, "alert: {text}");
}
