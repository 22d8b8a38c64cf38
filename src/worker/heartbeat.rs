//! Keeps the worker's lease, on a thread, a runtime and a connection of its own: handlers that block every thread of the
//! main runtime, or use up every connection of some pool, do not keep a heartbeat from being sent.
//!
//! It registers the worker under a new id, sends one heartbeat at a time for all its jobs, and watches the end of the
//! lease. When Postgres says that this incarnation is over, or the lease ends without a word from Postgres, it stops all
//! handlers and registers anew. At the end it retires the worker. The listener lives on the same thread, so that a cancel
//! is heard, and the socket drained, whatever the handlers do.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tokio::time::{sleep, sleep_until, timeout};
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::pause::{Pause, jitter};
use crate::signal::Level;
use crate::store::{Beat, Pulse, Registration, Store, schema_status};
use crate::worker::ledger::Holding;
use crate::worker::listen::listen;
use crate::worker::meter::Meter;
use crate::worker::shared::{Incarnation, Shared};

/// How long the farewell to Postgres may take. Without it the jobs left behind wait for their rescue.
const RETIRE: Duration = Duration::from_secs(2);
/// No heartbeat is waited for longer, however long the lease: its connection is taken for dead and replaced.
const MAX_ANSWER: Duration = Duration::from_secs(10);

/// Starts the thread. The receiver gets the reason why it ended; an error means that the worker cannot go on.
pub(crate) fn start(shared: Arc<Shared>) -> Result<oneshot::Receiver<thread::Result<Result<()>>>> {
    let (ended, end) = oneshot::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::config(format!("heartbeat: no runtime for its thread: {error}")))?;
    let work = move || {
        let keep = std::panic::AssertUnwindSafe(|| runtime.block_on(keep(&shared)));
        let result = std::panic::catch_unwind(keep);
        // Nobody may be left to hear it, when the future of the worker was dropped.
        let _ = ended.send(result);
    };
    thread::Builder::new()
        .name("posthouse-heartbeat".to_owned())
        .spawn(work)
        .map_err(|error| Error::config(format!("heartbeat: its thread cannot be started: {error}")))?;
    Ok(end)
}

async fn keep(shared: &Arc<Shared>) -> Result<()> {
    let listener = tokio::spawn(listen(shared.clone()));
    let result = loop {
        match register(shared).await {
            Ok(Some((incarnation, store))) => {
                let mut heart = Heart { shared, incarnation, store, with_list: false, pause: Heart::pause(shared) };
                if !heart.beat_until_over().await {
                    break Ok(());
                }
            }
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    listener.abort();
    result
}

/// Registers under a new id, for as long as it takes. `None`: the worker stops. Errors if trying again cannot help.
async fn register(shared: &Shared) -> Result<Option<(Arc<Incarnation>, Store)>> {
    let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(2));
    // Two in a row may go unanswered before the lease is over.
    let limit = (shared.settings.lease / 3).min(MAX_ANSWER);
    let store = shared.database.store("heartbeat").with_timeout(limit);
    while !shared.stop.is_cancelled() {
        let Some(answer) = shared.stop.run_until_cancelled(register_once(shared, &store)).await else { break };
        match answer {
            Ok(incarnation) => {
                shared.call_answered();
                let (worker, incarnation) = (incarnation.worker, Arc::new(incarnation));
                shared.metered(Meter::beaten);
                shared.emit(&Event::Registered { worker });
                shared.incarnation.send_replace(Some(incarnation.clone()));
                return Ok(Some((incarnation, store)));
            }
            Err(error) if error.is_transient() => {
                shared.call_failed(&error);
                tracing::debug!(%error, "worker not registered yet; trying again");
            }
            Err(error) => return Err(error),
        }
        let _ = shared.stop.run_until_cancelled(sleep(pause.next())).await;
    }
    Ok(None)
}

async fn register_once(shared: &Shared, store: &Store) -> Result<Incarnation> {
    let status = timeout(MAX_ANSWER, schema_status(&shared.database)).await;
    status.map_err(|_| Error::disconnected("no answer from Postgres about its schema", false))??.check()?;
    // An id whose registration was not answered may be registered all the same, so it is not used again.
    let worker = Uuid::new_v4();
    let sent = Instant::now();
    store.register_worker(&registration(shared, worker)).await?;
    Ok(Incarnation::new(worker, shared.settings.lease, sent))
}

fn registration(shared: &Shared, worker: Uuid) -> Registration {
    Registration {
        worker,
        lease: shared.settings.lease,
        queues: shared.settings.queues.clone(),
        kinds: shared.handlers.kinds(),
        slots: shared.settings.concurrency,
        host: host_name(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// For people who look at the list of workers; nothing depends on it.
fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .map(|name| name.trim().to_owned())
        .filter(|name| !name.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

/// The heartbeat of one incarnation.
struct Heart<'a> {
    shared: &'a Shared,
    incarnation: Arc<Incarnation>,
    store: Store,
    /// Postgres saw another sum of held jobs: the next heartbeat carries the list.
    with_list: bool,
    pause: Pause,
}

/// What a heartbeat came to.
enum Beaten {
    /// The right stands; the next heartbeat is due then.
    Next(Instant),
    /// The incarnation is over.
    Over(&'static str),
}

impl<'a> Heart<'a> {
    /// After an error: soon, since the lease is short of breath, but not in a busy loop.
    fn pause(shared: &Shared) -> Pause {
        Pause::new(Duration::from_millis(50), (shared.settings.lease / 10).min(Duration::from_secs(1)))
    }

    /// True: over, register anew. False: the worker ended.
    async fn beat_until_over(&mut self) -> bool {
        let (shared, incarnation) = (self.shared, self.incarnation.clone());
        let mut next = Instant::now() + shared.settings.heartbeat();
        let reason = loop {
            let valid_until = incarnation.lease.valid_until();
            tokio::select! {
                biased;
                () = shared.halt.cancelled() => {
                    self.retire().await;
                    return false;
                }
                () = sleep_until(valid_until.into()) => break "no heartbeat was answered in time",
                () = sleep_until(next.into()) => {}
                () = shared.beat_now.notified() => {}
            }
            let beaten = tokio::select! {
                biased;
                () = shared.halt.cancelled() => continue,
                () = sleep_until(valid_until.into()) => break "no heartbeat was answered in time",
                beaten = self.beat() => beaten,
            };
            match beaten {
                Beaten::Next(at) => next = at,
                Beaten::Over(reason) => break reason,
            }
        };
        incarnation.end();
        shared.incarnation.send_replace(None);
        shared.emit(&Event::LeaseLost { worker: incarnation.worker, reason });
        true
    }

    /// Sends one heartbeat and acts on the answer.
    async fn beat(&mut self) -> Beaten {
        let settings = &self.shared.settings;
        let Holding { mark, oldest, doubts, held } = self.incarnation.ledger().holding();
        let beat = Beat { mark, oldest, held, with_list: self.with_list };
        let sent = Instant::now();
        // It waits for the claim that Postgres works on, and must not wait for the one behind that.
        self.shared.beating.store(true, Ordering::Relaxed);
        let answer = self.store.heartbeat(self.incarnation.worker, &beat).await;
        self.shared.beating.store(false, Ordering::Relaxed);
        let (lease, now) = (&self.incarnation.lease, Instant::now());
        let stands = match answer {
            Ok(Some(pulse)) => {
                self.shared.call_answered();
                self.shared.metered(Meter::beaten);
                self.pause.reset();
                if !lease.renew(sent, pulse.expires_in, now) {
                    return Beaten::Over("the answer to the heartbeat came too late");
                }
                self.act_on(&pulse, &beat);
                if !pulse.mismatch {
                    self.incarnation.ledger().looked_into(&doubts);
                }
                // The sum was another: say at once what is held, but never list after list without a pause.
                let repeat = pulse.mismatch && !self.with_list;
                self.with_list = repeat;
                return Beaten::Next(if repeat { now } else { sent + jitter(settings.heartbeat()) });
            }
            Ok(None) => return Beaten::Over("Postgres says that it is over"),
            Err(error) if error.sqlstate() == Some("PH005") => return Beaten::Over("Postgres says that it is over"),
            Err(error) => {
                self.shared.call_failed(&error);
                tracing::debug!(%error, "heartbeat not answered; trying again");
                if error.is_server_down() { lease.nobody_could_take_it(sent, now) } else { !lease.is_over(now) }
            }
        };
        if stands { Beaten::Next(now + self.pause.next()) } else { Beaten::Over("no heartbeat was answered in time") }
    }

    /// Passes on what Postgres said about held jobs, to those that are still held under the fence that was sent.
    fn act_on(&self, pulse: &Pulse, beat: &Beat) {
        if pulse.released > 0 {
            tracing::info!(jobs = pulse.released, "jobs released whose claim was never answered");
        }
        let ledger = self.incarnation.ledger();
        for (ids, level) in [(&pulse.cancel, Level::Cancel), (&pulse.lost, Level::Lost)] {
            if ids.is_empty() {
                continue;
            }
            let named: std::collections::HashSet<i64> = ids.iter().copied().collect();
            for (id, fence) in beat.held.iter().filter(|(id, _)| named.contains(id)) {
                if let Some(context) = ledger.get(*id, *fence) {
                    context.signal().raise(level);
                }
            }
        }
    }

    /// The worker ended: whatever it still holds goes back to the line, uncharged.
    async fn retire(&self) {
        match timeout(RETIRE, self.store.retire_worker(self.incarnation.worker)).await {
            Ok(Ok(())) => tracing::info!(worker = %self.incarnation.worker, "worker retired"),
            Ok(Err(error)) => tracing::warn!(%error, "worker not retired; its lease runs out by itself"),
            Err(_) => tracing::warn!("no answer to the retirement; the worker's lease runs out by itself"),
        }
    }
}
