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
/// Before the next look when a part left something to do, at least.
const GO_ON: Duration = Duration::from_millis(20);
/// Before the first look, before jitter. A worker that starts has its first jobs to claim, and nothing but the jobs of dead workers is
/// so untidy that it could not wait for that; and where many start together, all of them would look at the same moment.
const FIRST: Duration = Duration::from_secs(4);
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
            let mut presence = Presence { emit: emit.clone(), away: false };
            wait_for_schema(&database, &mut presence).await?;
            sweep(database, emit, Some(presence)).await;
            Ok(())
        };
        tokio::select! {
            ended = work => ended,
            () = shutdown => Ok(()),
        }
    }
}

/// Until Postgres is there, with a schema that we know.
async fn wait_for_schema(database: &Database, presence: &mut Presence) -> Result<()> {
    let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(2));
    loop {
        let status = timeout(MAX_ANSWER, schema_status(database)).await;
        let status = status.map_err(|_| Error::disconnected("no answer from Postgres about its schema", false));
        match status.flatten().and_then(|status| status.check()) {
            Err(error) if error.is_transient() => {
                tracing::debug!(%error, "Postgres is not there yet");
                presence.failed(&error);
                sleep(pause.next()).await;
            }
            checked => return checked,
        }
    }
}

/// Tells once that Postgres is away, and once that it is back, for a process that only sweeps: beside a worker, the worker does.
pub(crate) struct Presence {
    emit: Emit,
    away: bool,
}

impl Presence {
    fn failed(&mut self, error: &Error) {
        if error.is_away() && !std::mem::replace(&mut self.away, true) {
            (self.emit)(&Event::ConnectionLost { error });
        }
    }

    fn answered(&mut self) {
        if std::mem::take(&mut self.away) {
            (self.emit)(&Event::ConnectionRestored);
        }
    }
}

/// Sweeps for ever, on one connection.
pub(crate) async fn sweep(database: Database, emit: Emit, presence: Option<Presence>) {
    let store = database.store("sweep");
    let mut look_at = Instant::now() + jitter(FIRST);
    let rescue_at = Instant::now() + jitter(LOOK_EVERY);
    let mut parts = Parts { store, emit, presence, rescue: Rescue::default(), rescue_at, goes_on: false };
    loop {
        sleep_until(look_at.min(parts.rescue_at).into()).await;
        parts.rescue_if_due().await;
        if look_at <= Instant::now() {
            let more_in = parts.look().await;
            look_at = Instant::now()
                + more_in.map_or(LOOK_EVERY, |more_in| more_in.clamp(GO_ON, LOOK_EVERY)).min(jitter(LOOK_EVERY));
        }
    }
}

/// The parts of the sweep, and what they remember from one run to the next.
struct Parts {
    store: Store,
    emit: Emit,
    presence: Option<Presence>,
    rescue: Rescue,
    rescue_at: Instant,
    /// Some part was left with something to do by a run of ours: we go on with it, others need not hurry.
    goes_on: bool,
}

impl Parts {
    /// Runs one part that was due a moment ago. Says whether it left something to do.
    async fn run(&mut self, part: &str) -> Result<bool> {
        let Self { store, emit, rescue, .. } = self;
        match part {
            // What takes several transactions, or code that Postgres has not.
            "rescue" => in_pieces(store, part, rescue.run(store, emit)).await,
            "retire" => retention::retire(store, part).await,
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

    /// Asks what is due and runs it, the rescue in between. If something is left to do, says in how long.
    async fn look(&mut self) -> Option<Duration> {
        let began = Instant::now();
        let due = match self.store.due_sweeps().await {
            Ok(due) => {
                self.presence.iter_mut().for_each(Presence::answered);
                due
            }
            Err(error) => {
                self.broken("what is due", &error);
                return None;
            }
        };
        for part in &due {
            self.rescue_if_due().await;
            let began = Instant::now();
            match self.run(part).await {
                Ok(left) => self.goes_on |= left,
                Err(error) => {
                    self.broken(part, &error);
                    if self.store.end_sweep(part, began.elapsed(), Err(&error.to_string())).await.is_err() {
                        // Postgres itself is away, or refuses whatever we ask.
                        return None;
                    }
                }
            }
        }
        (self.emit)(&Event::Swept { parts: due.len(), took: began.elapsed() });
        self.more_in().await
    }

    /// In how long there is something to go on with.
    async fn more_in(&mut self) -> Option<Duration> {
        let more_in = if self.goes_on { self.store.more_due_in().await.ok().flatten() } else { None };
        self.goes_on = more_in.is_some();
        more_in
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

    /// A call failed. That Postgres is away is told once.
    fn broken(&mut self, sweep: &str, error: &Error) {
        self.presence.iter_mut().for_each(|presence| presence.failed(error));
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Mutex;

    use super::*;

    #[tokio::test]
    async fn a_process_that_only_sweeps_says_once_that_postgres_is_away_and_once_that_it_is_back() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let (first, notes) = (Arc::new(tokio::sync::Notify::new()), told.clone());
        let heard = first.clone();
        let listener = move |event: &Event<'_>| {
            notes.lock().unwrap().push(event.to_string());
            heard.notify_one();
        };
        // Nothing listens on port 1, and it goes on asking.
        let sweeper = Sweeper::new(Database::new("postgres://u@127.0.0.1:1/d").unwrap()).on_event(listener.clone());
        let until = timeout(Duration::from_secs(60), first.notified());
        sweeper.run_until(async { until.await.unwrap() }).await.unwrap();
        assert!(told.lock().unwrap()[0].starts_with("connection to Postgres lost: "), "{told:?}");

        told.lock().unwrap().clear();
        let mut presence = Presence { emit: Arc::new(listener), away: false };
        presence.answered();
        presence.failed(&Error::invalid("not a matter of connections"));
        assert_eq!(told.lock().unwrap().len(), 0);
        for _ in 0..2 {
            presence.failed(&Error::disconnected("gone", true));
        }
        for _ in 0..2 {
            presence.answered();
        }
        assert_eq!(told.lock().unwrap().len(), 2, "{told:?}");
        assert_eq!(told.lock().unwrap()[1], "connection to Postgres restored");
    }
}
