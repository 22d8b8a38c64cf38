//! What the parts of a worker share: its settings and handlers, its present incarnation, its slots, and the few words
//! they say to each other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::event::{Emit, Event};
use crate::handler::Handlers;
use crate::lease::Lease;
use crate::signal::Level;
use crate::store::{Database, Settlement, Store};
use crate::worker::builder::Settings;
use crate::worker::ledger::Ledger;
use crate::worker::meter::Meter;
use crate::worker::summary::Tally;

/// One registration of this process: an id that is never used again, its lease, and what it holds.
pub(crate) struct Incarnation {
    pub(crate) worker: Uuid,
    pub(crate) lease: Arc<Lease>,
    /// Cancelled when it is over.
    pub(crate) over: CancellationToken,
    ledger: Mutex<Ledger<Context>>,
}

impl Incarnation {
    /// Registered by a call that was sent at `sent`.
    pub(crate) fn new(worker: Uuid, lease: Duration, sent: Instant) -> Self {
        Self {
            worker,
            lease: Arc::new(Lease::new(lease, sent)),
            over: CancellationToken::new(),
            ledger: Mutex::new(Ledger::default()),
        }
    }

    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger<Context>> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is over: no claim is accepted any more, and every handler is stopped.
    pub(crate) fn end(&self) {
        self.lease.end(Instant::now());
        let mut ledger = self.ledger();
        ledger.close();
        ledger.values().for_each(|context| context.signal().raise(Level::Lost));
        drop(ledger);
        self.over.cancel();
    }

    /// Tells all attempts to stop, more or less gently.
    pub(crate) fn raise_all(&self, level: Level) {
        self.ledger().values().for_each(|context| context.signal().raise(level));
    }
}

/// An outcome on its way to Postgres.
pub(crate) struct Filed {
    pub(crate) slip: Slip,
    pub(crate) settlement: Settlement,
}

/// Whose outcome it is.
pub(crate) struct Slip {
    pub(crate) incarnation: Arc<Incarnation>,
    pub(crate) context: Context,
    /// Given back when Postgres has answered.
    pub(crate) room: OwnedSemaphorePermit,
}

/// Shared by all parts of one worker.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) handlers: Handlers,
    pub(crate) database: Database,
    /// Outcomes and progress go over this connection.
    pub(crate) settle_store: Store,
    /// Calls of handlers are admitted over this one, which is made when a handler first asks.
    pub(crate) admit_store: Store,
    /// The present incarnation; `None` while the worker is not registered. Changed by the heartbeat alone.
    pub(crate) incarnation: watch::Sender<Option<Arc<Incarnation>>>,
    /// One permit for each handler that may run.
    pub(crate) slots: Arc<Semaphore>,
    /// One permit for each job that may be held, unsettled ones included: bounds what waits while Postgres is away.
    pub(crate) room: Arc<Semaphore>,
    /// There may be work: look again.
    pub(crate) wake: Notify,
    /// Send a heartbeat now.
    pub(crate) beat_now: Notify,
    /// Finished outcomes on their way to the settler.
    pub(crate) filed: mpsc::UnboundedSender<Filed>,
    pub(crate) attempts: TaskTracker,
    /// Stop claiming.
    pub(crate) stop: CancellationToken,
    /// Nothing more will be filed: write what there is and end.
    pub(crate) last_call: CancellationToken,
    /// End at once.
    pub(crate) halt: CancellationToken,
    pub(crate) tally: Tally,
    /// A heartbeat is under way: no claim is asked ahead.
    pub(crate) beating: AtomicBool,
    /// The last look found that due work waits behind a gate until a job ends.
    pub(crate) behind_gate: AtomicBool,
    /// Batches of outcomes that were recorded so far.
    pub(crate) recorded: AtomicU64,
    disconnected: AtomicBool,
    on_event: Option<Emit>,
    /// Counts for metrics, where somebody wants them.
    pub(crate) meter: Option<Meter>,
}

/// Rows in a batch of the settler: beyond this a batch takes longer without making each row cheaper.
pub(crate) const MAX_ROWS: usize = 1_000;
/// Outcomes that may wait to be written, beyond one for every running job: one full batch.
const UNSETTLED: usize = MAX_ROWS;

impl Shared {
    pub(crate) fn new(
        settings: Settings,
        handlers: Handlers,
        database: Database,
        on_event: Option<Emit>,
    ) -> (Self, mpsc::UnboundedReceiver<Filed>) {
        let (filed, inbox) = mpsc::unbounded_channel();
        let slots = settings.concurrency as usize;
        let shared = Self {
            settle_store: database.store("settle"),
            admit_store: database.store("admit"),
            incarnation: watch::Sender::new(None),
            slots: Arc::new(Semaphore::new(slots)),
            room: Arc::new(Semaphore::new(slots + slots.max(UNSETTLED))),
            wake: Notify::new(),
            beat_now: Notify::new(),
            filed,
            attempts: TaskTracker::new(),
            stop: CancellationToken::new(),
            last_call: CancellationToken::new(),
            halt: CancellationToken::new(),
            tally: Tally::default(),
            beating: AtomicBool::new(false),
            behind_gate: AtomicBool::new(false),
            recorded: AtomicU64::new(0),
            disconnected: AtomicBool::new(false),
            settings,
            handlers,
            database,
            on_event,
            meter: None,
        };
        (shared, inbox)
    }

    /// Counts for metrics, where somebody wants them.
    pub(crate) fn metered(&self, count: impl FnOnce(&Meter)) {
        if let Some(meter) = &self.meter {
            count(meter);
        }
    }

    /// The same from the start, by the queues and kinds that the worker serves. Errors if the meter is another worker's.
    pub(crate) fn metered_by(mut self, meter: Option<Meter>) -> Result<Self> {
        if let Some(meter) = &meter {
            let served = (self.settings.queues.clone(), self.handlers.kinds());
            let size = (self.settings.concurrency, self.settings.heartbeat());
            let incarnation = self.incarnation.subscribe();
            let present = move || {
                let incarnation =
                    incarnation.borrow().clone().filter(|incarnation| !incarnation.over.is_cancelled())?;
                Some((incarnation.worker, incarnation.lease.remaining(Instant::now())))
            };
            meter.begin(served, size, Box::new(present), self.stop.clone())?;
        }
        self.meter = meter;
        Ok(self)
    }

    /// The present incarnation, if there is one.
    pub(crate) fn present(&self) -> Option<Arc<Incarnation>> {
        self.incarnation.borrow().clone()
    }

    /// Waits for an incarnation that is not over. `None`: the worker stops.
    pub(crate) async fn registered(&self) -> Option<Arc<Incarnation>> {
        let mut watching = self.incarnation.subscribe();
        let live = watching.wait_for(|i| i.as_ref().is_some_and(|i| !i.over.is_cancelled()));
        tokio::select! {
            biased;
            () = self.stop.cancelled() => None,
            found = live => found.ok().and_then(|found| found.clone()),
        }
    }

    /// Logs the event, counts it, and tells whoever listens.
    pub(crate) fn emit(&self, event: &Event<'_>) {
        event.log(None, None);
        self.heard(event);
    }

    /// The same of an event about an attempt.
    pub(crate) fn emit_of(&self, attempt: &Context, event: &Event<'_>) {
        event.log(Some(attempt.worker()), attempt.took());
        self.heard(event);
    }

    /// A listener that panics harms nobody.
    fn heard(&self, event: &Event<'_>) {
        self.tally.count(event);
        self.metered(|meter| meter.count(event));
        if let Some(on_event) = &self.on_event
            && catch_unwind(AssertUnwindSafe(|| on_event(event))).is_err()
        {
            tracing::warn!("the event listener panicked");
        }
    }

    /// A call failed because Postgres was not there, or had no connection to give: says so once.
    pub(crate) fn call_failed(&self, error: &Error) {
        if error.is_away() && !self.disconnected.swap(true, Ordering::AcqRel) {
            self.emit(&Event::ConnectionLost { error });
        }
    }

    /// A call was answered: Postgres is there.
    pub(crate) fn call_answered(&self) {
        if self.disconnected.load(Ordering::Acquire) && self.disconnected.swap(false, Ordering::AcqRel) {
            self.emit(&Event::ConnectionRestored);
        }
    }
}
