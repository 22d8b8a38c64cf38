//! The worker: claims jobs, runs their handlers, records their outcomes.
//!
//! Its parts, each a task that shares nothing with the others but `shared`: `claim` finds work and starts it, `attempt`
//! runs one job, `settle` records outcomes, `heartbeat` keeps the lease (rules in `lease` and `ledger`) on a thread of its
//! own, `listen` hears notifications, [`sweep`] does the housekeeping.
//!
//! A worker has at most five connections, whatever its concurrency: claims, outcomes and progress, heartbeat,
//! notifications, housekeeping; and a sixth once a handler asks gates for a call of its own. (One more, to look at the schema,
//! lives for a moment at each registration.)

mod attempt;
mod attempts_meter;
mod builder;
mod claim;
mod heartbeat;
mod ledger;
mod listen;
mod meter;
mod settle;
pub(crate) mod shared;
mod summary;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle};
use tokio::time::timeout;

pub use crate::event::Event;
pub use builder::Builder;
pub use meter::{Hearing, Meter, Vitals};
pub use summary::Summary;

use crate::error::{Error, Result};
use crate::interrupt::interrupt;
use crate::signal::Level;
use crate::store::Database;
use crate::sweep;
use shared::Shared;

/// After the grace period: the time handlers get to be dropped, and the last outcomes to be written. With the farewell
/// of the heartbeat thread it stays under the 5 seconds that the default grace period leaves of 30.
const DROP: Duration = Duration::from_secs(1);
const FLUSH: Duration = Duration::from_secs(2);

/// Claims jobs and runs them. Made by [`Worker::builder`].
#[derive(Debug)]
pub struct Worker(());

impl Worker {
    /// Settings for a worker on this database.
    pub fn builder(database: impl Into<Database>) -> Builder {
        Builder::new(database.into())
    }
}

impl Builder {
    /// Runs until SIGTERM or SIGINT, or, with [`until_empty`](Self::until_empty), until all work is done.
    ///
    /// The first signal stops claiming, tells the handlers, waits for the grace period, gives unfinished jobs back
    /// uncharged, and returns. The second one ends the process at once, with exit code 143 or 130 (the same signal within
    /// 250 ms of the first is no second one). The signals stay handled after this returns.
    ///
    /// Errors if the settings are unsafe, or if Postgres refuses the worker for a reason that waiting does not cure
    /// (wrong password, no schema, another schema). A Postgres that is away is waited for.
    pub async fn run(self) -> Result<Summary> {
        let checked = self.check()?;
        let interrupt = interrupt()?;
        checked.run_until(interrupt.first.cancelled()).await
    }

    /// Runs until `shutdown` is ready, or, with [`until_empty`](Self::until_empty), until all work is done; ends as
    /// [`run`](Self::run) does after the first signal. Touches no signal handler. Dropping the future stops all handlers
    /// and releases their jobs.
    pub async fn run_until(self, shutdown: impl Future<Output = ()>) -> Result<Summary> {
        let Self { database, handlers, settings, on_event, meter, .. } = self.check()?;
        let (shared, inbox) = Shared::new(settings, handlers, database, on_event);
        let shared = Arc::new(shared.metered_by(meter)?);
        let sweeper = shared.settings.sweep.then(|| {
            let telling = shared.clone();
            let sweep =
                sweep::sweep(shared.database.clone(), Arc::new(move |event: &Event<'_>| telling.emit(event)), None);
            tokio::spawn(shared.stop.clone().run_until_cancelled_owned(sweep))
        });
        let mut crew = Crew {
            heartbeat: Some(heartbeat::start(shared.clone())?),
            claimer: tokio::spawn(claim::claim(shared.clone())),
            settler: tokio::spawn(settle::settle(shared.clone(), inbox)),
            sweeper,
            shared,
        };
        let ended = tokio::select! {
            biased;
            ended = thread_ended(&mut crew.heartbeat) => ended,
            claimed = &mut crew.claimer => sound(claimed),
            settled = &mut crew.settler => sound(settled.map(|_| ())),
            () = shutdown => Ok(()),
        };
        let unwritten = crew.shut_down().await;
        ended.map(|()| crew.shared.tally.summary(unwritten as u64))
    }
}

/// The running parts. Dropped: everything stops.
struct Crew {
    shared: Arc<Shared>,
    /// `None` once it has ended.
    heartbeat: Option<oneshot::Receiver<std::thread::Result<Result<()>>>>,
    claimer: JoinHandle<()>,
    settler: JoinHandle<usize>,
    sweeper: Option<JoinHandle<Option<()>>>,
}

impl Crew {
    /// The orderly end. Answers with the number of outcomes that could not be written.
    async fn shut_down(&mut self) -> usize {
        let shared = self.shared.clone();
        shared.stop.cancel();
        if !self.claimer.is_finished() {
            let _ = (&mut self.claimer).await;
        }
        tracing::info!(jobs = shared.attempts.len(), grace = ?shared.settings.grace, "no new jobs; waiting for handlers");
        self.tell(Level::Shutdown);
        shared.attempts.close();
        if timeout(shared.settings.grace, shared.attempts.wait()).await.is_err() {
            tracing::warn!(jobs = shared.attempts.len(), "grace period over; unfinished jobs are released");
            self.tell(Level::Release);
            if timeout(DROP, shared.attempts.wait()).await.is_err() {
                tracing::error!(jobs = shared.attempts.len(), "handlers block their thread and cannot be stopped");
            }
        }
        shared.last_call.cancel();
        let flushed = if self.settler.is_finished() { Ok(Ok(0)) } else { timeout(FLUSH, &mut self.settler).await };
        let unwritten = match flushed {
            Ok(written) => written.unwrap_or(0),
            Err(_) => {
                shared.halt.cancel();
                (&mut self.settler).await.unwrap_or(0)
            }
        };
        if unwritten > 0 {
            tracing::error!(outcomes = unwritten, "outcomes not written, Postgres being away; their jobs run again");
        }
        shared.halt.cancel();
        if let Err(error) = thread_ended(&mut self.heartbeat).await {
            tracing::warn!(%error, "the heartbeat did not end well");
        }
        if let Some(sweeper) = self.sweeper.take() {
            sweeper.abort();
        }
        unwritten
    }

    fn tell(&self, level: Level) {
        if let Some(incarnation) = self.shared.present() {
            incarnation.raise_all(level);
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.stop.cancel();
        self.tell(Level::Lost);
        self.shared.last_call.cancel();
        self.shared.halt.cancel();
        if let Some(sweeper) = &self.sweeper {
            sweeper.abort();
        }
    }
}

/// A part that panicked takes the worker with it: going on without it would be worse.
fn sound(ended: Result<(), JoinError>) -> Result<()> {
    match ended {
        Ok(()) => Ok(()),
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(error) => Err(Error::config(format!("the runtime ended before the worker: {error}"))),
    }
}

/// Waits for the end of the heartbeat's thread, if it has not ended.
async fn thread_ended(heartbeat: &mut Option<oneshot::Receiver<std::thread::Result<Result<()>>>>) -> Result<()> {
    let Some(thread) = heartbeat else { return Ok(()) };
    let ended = thread.await;
    *heartbeat = None;
    match ended {
        Ok(Ok(result)) => result,
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(_) => Err(Error::config("heartbeat: its thread ended without a word")),
    }
}
