//! Housekeeping: idempotent sweeps in bounded batches, which any number of processes may run at the same time.
//!
//! Every second or so a process asks which parts of the sweep are due in the fleet, and runs each in transactions of its own, so
//! that one that fails or takes long keeps no other from running. Most parts are one call that Postgres does by itself;
//! those that need several transactions, or code that Postgres has not, are here. The rescue alone is also each process's own, since
//! it compares what it saw before. A part that fails is logged, counted in the database, and comes again: none is ever
//! needed at a given moment.
//!
//! Every [`Worker`](crate::Worker) sweeps beside its jobs, whatever kinds it knows, unless told otherwise; a [`Sweeper`] does nothing else.

mod rescue;
mod retention;
mod schedules;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{sleep, sleep_until, timeout};

use crate::error::{Error, Result};
use crate::event::{Emit, Event};
use crate::interrupt::interrupt;
use crate::pause::{Pause, jitter};
use crate::store::{AlertData, AlertMessage, Database, Store, schema_status};
use rescue::Rescue;
#[cfg(feature = "testing")]
pub use schedules::{Round, fire_at as fire_schedules_at};

/// Between two looks at what is due, before jitter.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Before the next look when a part left something to do.
const GO_ON: Duration = Duration::from_millis(50);
/// A worker that starts has its first jobs to claim; nothing is so untidy that it could not wait for that.
const FIRST: Duration = Duration::from_secs(1);
/// No answer about the schema is waited for longer.
const MAX_ANSWER: Duration = Duration::from_secs(10);

/// A process that does the housekeeping and nothing else: it claims no jobs and is in no list of workers. One is enough for any
/// number of workers that do not sweep themselves; more do no harm.
///
/// ```no_run
/// # async fn example() -> posthouse::Result<()> {
/// use posthouse::store::Database;
/// use posthouse::sweep::Sweeper;
///
/// Sweeper::new(Database::new("postgres://localhost/app")?).run().await
/// # }
/// ```
#[must_use = "a sweeper does nothing until `run` or `run_until`"]
pub struct Sweeper {
    database: Database,
    emit: Emit,
}

impl Sweeper {
    /// A sweeper for this database.
    pub fn new(database: impl Into<Database>) -> Self {
        Self { database: database.into(), emit: Arc::new(|event: &Event<'_>| event.log(None, None)) }
    }

    /// Calls `listener` for every [`Event`] of the sweep. It must return quickly.
    pub fn on_event(mut self, listener: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.emit = Arc::new(move |event: &Event<'_>| {
            event.log(None, None);
            if catch_unwind(AssertUnwindSafe(|| listener(event))).is_err() {
                tracing::warn!("the event listener panicked");
            }
        });
        self
    }

    /// Sweeps until SIGTERM or SIGINT. What runs then is left to Postgres, which finishes it or takes it back. The second signal
    /// ends the process at once. Errors as [`run_until`](Self::run_until) does.
    pub async fn run(self) -> Result<()> {
        let interrupt = interrupt()?;
        self.run_until(interrupt.first.cancelled()).await
    }

    /// Sweeps until `shutdown` is ready. Errors if Postgres refuses for a reason that waiting does not cure (wrong password, no schema,
    /// another schema); a Postgres that is away is waited for.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<()> {
        let Self { database, emit } = self;
        let work = async {
            wait_for_schema(&database).await?;
            sweep(database, emit).await;
            Ok(())
        };
        tokio::select! {
            ended = work => ended,
            () = shutdown => Ok(()),
        }
    }
}

/// Until Postgres is there, with a schema that we know.
async fn wait_for_schema(database: &Database) -> Result<()> {
    let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(2));
    loop {
        let status = timeout(MAX_ANSWER, schema_status(database)).await;
        let status = status.map_err(|_| Error::disconnected("no answer from Postgres about its schema", false));
        match status.flatten().and_then(|status| status.check()) {
            Err(error) if error.is_transient() => {
                tracing::debug!(%error, "Postgres is not there yet");
                sleep(pause.next()).await;
            }
            checked => return checked,
        }
    }
}

/// Sweeps for ever, on one connection.
pub(crate) async fn sweep(database: Database, emit: Emit) {
    let store = database.store("sweep");
    let first = Instant::now() + FIRST;
    let mut parts = Parts { store, emit, rescue: Rescue::default(), rescue_at: first };
    let mut look_at = first;
    loop {
        sleep_until(look_at.min(parts.rescue_at).into()).await;
        parts.rescue_if_due().await;
        if look_at <= Instant::now() {
            let more = parts.look().await;
            look_at = Instant::now() + jitter(if more { GO_ON } else { LOOK_EVERY });
        }
    }
}

/// The parts of the sweep, and what they remember from one run to the next.
struct Parts {
    store: Store,
    emit: Emit,
    rescue: Rescue,
    rescue_at: Instant,
}

impl Parts {
    /// Runs one part that was due a moment ago. Says whether it left something to do.
    async fn run(&mut self, part: &str) -> Result<bool> {
        let Self { store, emit, rescue, .. } = self;
        match part {
            // What takes several transactions, or code that Postgres has not.
            "rescue" => in_pieces(store, part, rescue.run(store, emit)).await,
            "retire" => in_pieces(store, part, retention::retire(store)).await,
            "schedules" => in_pieces(store, part, async { Ok(schedules::fire(store, None).await?.more) }).await,
            // What one transaction can do.
            _ => {
                let tidied = store.tidy(Some(part)).await?;
                tidied.alerts.iter().for_each(log);
                for failed in &tidied.failed {
                    self.failed(&failed.sweep, &failed.error);
                }
                Ok(tidied.more)
            }
        }
    }

    /// Asks what is due and runs it, the rescue in between. Says whether something is left to do at once.
    async fn look(&mut self) -> bool {
        let began = Instant::now();
        let due = match self.store.due_sweeps().await {
            Ok(due) => due,
            Err(error) => {
                self.broken("what is due", &error);
                return false;
            }
        };
        let mut more = false;
        for part in &due {
            self.rescue_if_due().await;
            let began = Instant::now();
            match self.run(part).await {
                Ok(left) => more |= left,
                Err(error) => {
                    self.broken(part, &error);
                    if self.store.end_sweep(part, began.elapsed(), Err(&error.to_string())).await.is_err() {
                        // Postgres itself is away, or refuses whatever we ask.
                        return false;
                    }
                }
            }
        }
        (self.emit)(&Event::Swept { parts: due.len(), took: began.elapsed() });
        more
    }

    async fn rescue_if_due(&mut self) {
        if self.rescue_at > Instant::now() {
            return;
        }
        if let Err(error) = self.rescue.run(&self.store, &self.emit).await {
            self.broken("rescue", &error);
        }
        self.rescue_at = Instant::now() + jitter(self.rescue.every());
    }

    /// A call failed. That Postgres is away is told by those who need it more often.
    fn broken(&self, sweep: &str, error: &Error) {
        if error.is_transient() {
            tracing::debug!(sweep, %error, "sweep not possible now; it comes again");
        } else {
            self.failed(sweep, &error.to_string());
        }
    }

    fn failed(&self, sweep: &str, error: &str) {
        (self.emit)(&Event::SweepFailed { sweep, error });
    }
}

/// Runs a part in as many transactions as it needs, if it is still due and nobody else is at it. Two may run it at once all the
/// same, if one takes longer than its interval. `run` says whether it left something to do; if it fails, the caller
/// writes that down.
async fn in_pieces(store: &Store, part: &str, run: impl Future<Output = Result<bool>>) -> Result<bool> {
    if !store.begin_sweep(part).await? {
        return Ok(false);
    }
    let began = Instant::now();
    let left = run.await?;
    store.end_sweep(part, began.elapsed(), Ok(left)).await?;
    Ok(left)
}

/// One line an alert, in the log of the one worker whose sweep told it.
fn log(alert: &AlertMessage) {
    let AlertData { subject, text, count, new, .. } = &alert.data;
    tracing::warn!(target: "posthouse::alert", kind = alert.kind, subject, count, new, "alert: {text}");
}
