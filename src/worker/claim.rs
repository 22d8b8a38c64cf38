//! Finds work: claims as many jobs as there are free slots and starts them at once, or waits until there may be some.
//!
//! The wait ends by a notification, when the next job is due, or after the poll interval. A notification that comes after
//! the look but before the wait is kept, so none falls into the gap. While claims bring all that they ask for, they follow each
//! other without a wait; outcomes are recorded meanwhile by a task of their own. One that brought less has most likely taken all
//! there is: it is cheaper to ask when the next job is due than to claim again in vain.
//!
//! While a queue is so full that claims bring all that they ask for, the next one is asked ahead, before the answer has come,
//! on the same connection: Postgres goes from one to the other without waiting for this process. Answers are taken in the
//! order of the claims. No claim asks for more than the slots that are free beside those of the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesOrdered;
use futures_util::{FutureExt, StreamExt};
use serde_json::value::RawValue;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::context::Context;
use crate::event::log_claimed;
use crate::pause::{Pause, jitter};
use crate::store::{ClaimedJob, NextDue, Settlement, Store};
use crate::trace;
use crate::worker::attempt::{Claimed, attempt};
use crate::worker::shared::{Filed, Incarnation, Shared, Slip};

/// Jobs in one claim: enough to make a round trip cheap, few enough that other workers get their share of a burst.
const MAX_JOBS: usize = 500;
/// Claims on their way at a time: one that Postgres works on, and one for when it has done so.
const MAX_FLIGHTS: usize = 2;
/// After a claim that found nothing although a job is said to be due (another worker is just claiming it, say), or where one is due in
/// less than that, the next one comes no sooner, and later each time.
const MIN_WAIT: Duration = Duration::from_millis(20);

/// Permits for jobs that are about to be claimed.
struct Permits {
    slots: OwnedSemaphorePermit,
    room: OwnedSemaphorePermit,
}

/// What a claim brought.
enum Catch {
    /// Jobs, which are started.
    Some,
    /// Nothing is there.
    Nothing,
    /// It could not be asked, or the answer came too late.
    Failed,
}

/// Runs until the worker stops claiming, or, if it shall end when all is done, until it is.
pub(crate) async fn claim(shared: Arc<Shared>) {
    let mut claimer = Claimer {
        store: shared.database.store("claim"),
        flights: FuturesOrdered::new(),
        busy: false,
        more: false,
        after_lane: 0,
        in_vain: Pause::new(MIN_WAIT, shared.settings.poll.max(MIN_WAIT)),
        shared,
        pause: error_pause(),
    };
    while let Some((incarnation, catch)) = claimer.next().await {
        match catch {
            Catch::Some => {
                claimer.in_vain.reset();
                if claimer.took_all() {
                    claimer.wait(&incarnation, true).await;
                }
            }
            // The claim behind it says whether there is more.
            _ if !claimer.flights.is_empty() => {}
            Catch::Nothing if claimer.is_all_done(&incarnation).await => return,
            Catch::Nothing => claimer.wait(&incarnation, false).await,
            Catch::Failed => rest(&claimer.shared, &mut claimer.pause).await,
        }
    }
}

struct Claimer {
    shared: Arc<Shared>,
    store: Store,
    /// Claims on their way, in the order of their numbers.
    flights: FuturesOrdered<BoxFuture<'static, (Flight, Option<Vec<ClaimedJob>>)>>,
    /// The last claim brought all that it asked for.
    busy: bool,
    /// When asked after a claim that brought something, Postgres said that there is more. What comes in all the time is claimed rather than
    /// asked for: the next claim that brings something is followed by another one at once.
    more: bool,
    /// Where the round robin over lanes goes on. For a claim that is asked ahead it is where the claim before the last one ended,
    /// so that tenants take turns every two claims.
    after_lane: i64,
    /// The wait after a claim that found nothing although a job was said to be due, or for one that is due in a moment.
    in_vain: Pause,
    pause: Pause,
}

impl Claimer {
    /// Asks for jobs, ahead too if that makes sense, and starts those of the first answer. `None`: the worker stops.
    async fn next(&mut self) -> Option<(Arc<Incarnation>, Catch)> {
        if self.flights.is_empty() {
            let (incarnation, permits) = ready(&self.shared).await?;
            self.ask(incarnation, permits);
        }
        loop {
            let beating = self.shared.beating.load(Ordering::Relaxed);
            let ahead = self.busy && self.flights.len() < MAX_FLIGHTS && !beating;
            let permits = permits(&self.shared, MAX_JOBS);
            tokio::select! {
                biased;
                landed = self.flights.next() => {
                    let (flight, answer) = landed?;
                    return Some(self.land(flight, answer));
                }
                permits = permits, if ahead => match (permits, self.shared.present()) {
                    (Some(permits), Some(incarnation)) => self.ask(incarnation, permits),
                    // Not registered any more: what is on its way ends by that.
                    _ => self.busy = false,
                },
            }
        }
    }

    /// Puts a claim on its way.
    fn ask(&mut self, incarnation: Arc<Incarnation>, permits: Permits) {
        let seq = incarnation.ledger().begin();
        let flight = Flight { incarnation, seq, after_lane: self.after_lane, permits };
        let (shared, store) = (self.shared.clone(), self.store.clone());
        self.flights.push_back(Box::pin(async move {
            let answer = flight.answer(&shared, &store).await;
            (flight, answer)
        }));
    }

    /// A claim has ended.
    fn land(&mut self, flight: Flight, answer: Option<Vec<ClaimedJob>>) -> (Arc<Incarnation>, Catch) {
        let Flight { incarnation, seq, permits, .. } = flight;
        let catch = match answer {
            Some(jobs) => {
                self.shared.metered(|meter| meter.claimed(jobs.len()));
                log_claimed(&jobs, incarnation.worker);
                self.pause.reset();
                self.busy = jobs.len() >= permits.slots.num_permits();
                self.start(&incarnation, seq, jobs, permits)
            }
            None => {
                // Whatever was claimed by it is released by the next heartbeat.
                self.busy = false;
                incarnation.ledger().give_up(seq);
                self.shared.beat_now.notify_one();
                Catch::Failed
            }
        };
        (incarnation, catch)
    }

    /// Starts the jobs of an answer, unless it came too late for that.
    fn start(
        &mut self,
        incarnation: &Arc<Incarnation>,
        seq: i64,
        jobs: Vec<ClaimedJob>,
        mut permits: Permits,
    ) -> Catch {
        // An empty claim, behind a gate say, takes no turn.
        if let Some(job) = jobs.last() {
            self.after_lane = job.lane;
        }
        let (found, brought) = (!jobs.is_empty(), jobs.len());
        let mut held = Vec::with_capacity(jobs.len());
        let mut claimed = Vec::with_capacity(jobs.len());
        for mut job in jobs {
            // A claim never brings more than was asked for; if it did, the surplus is released as not held.
            let (Some(slot), Some(room)) = (permits.slots.split(1), permits.room.split(1)) else { break };
            let payload = std::mem::replace(&mut job.payload, RawValue::NULL.to_owned());
            let lease = incarnation.lease.clone();
            let stores = (self.shared.settle_store.clone(), self.shared.admit_store.clone());
            let now = tokio::time::Instant::now().into_std();
            let context = Context::new(job, incarnation.worker, lease, stores, now);
            held.push((context.job_id(), context.fence(), context.clone()));
            claimed.push(Claimed { context, payload, incarnation: incarnation.clone(), slot, room });
        }
        if !incarnation.ledger().answered(seq, held) || incarnation.lease.is_over(Instant::now()) {
            tracing::warn!(seq, jobs = claimed.len(), "the answer to a claim came too late; nothing is started");
            return Catch::Failed;
        }
        if claimed.len() < brought {
            incarnation.ledger().doubt(seq);
        }
        for job in claimed {
            if self.shared.stop.is_cancelled() {
                self.give_back(job);
            } else {
                self.shared.attempts.spawn(attempt(self.shared.clone(), job));
            }
        }
        if found { Catch::Some } else { Catch::Nothing }
    }

    /// Claimed while the shutdown began: back to the line, uncharged.
    fn give_back(&self, job: Claimed) {
        let settlement = Settlement::release_unstarted(job.context.job_id(), job.context.fence());
        let slip = Slip { incarnation: job.incarnation, context: job.context, room: job.room };
        if self.shared.filed.send(Filed { slip, settlement }).is_err() {
            tracing::debug!("claimed after the end; the worker's retirement releases it");
        }
    }

    /// Whether the last claim, which brought something, has left nothing, as far as one knows without asking. A worker that is to end
    /// when all is done claims until there is nothing.
    fn took_all(&mut self) -> bool {
        let more =
            std::mem::take(&mut self.more) || self.busy || !self.flights.is_empty() || self.shared.settings.until_empty;
        !more && self.shared.wake.notified().now_or_never().is_none()
    }

    /// Waits for a notification, the next due job or the next poll; after a claim that `found` something, not at all if there is more.
    async fn wait(&mut self, incarnation: &Incarnation, found: bool) {
        let recorded = self.shared.recorded.load(Ordering::SeqCst);
        let due = match self.shared.stop.run_until_cancelled(self.store.next_due(incarnation.worker)).await {
            Some(Ok(due)) => {
                self.shared.behind_gate.store(due == NextDue::WhenOneEnds, Ordering::SeqCst);
                match due {
                    NextDue::In(due) => Some(due),
                    // One ended while we asked, and its settler did not know that somebody waits for that.
                    NextDue::WhenOneEnds if self.shared.recorded.load(Ordering::SeqCst) != recorded => return,
                    NextDue::WhenOneEnds | NextDue::Unknown => None,
                }
            }
            Some(Err(error)) => {
                self.shared.call_failed(&error);
                tracing::debug!(%error, "next due time not known; polling");
                if found {
                    return;
                }
                None
            }
            None => return,
        };
        let poll = jitter(self.shared.settings.poll);
        let wait = match due {
            Some(due) if found && due.is_zero() => {
                self.more = true;
                return;
            }
            Some(due) if due < MIN_WAIT => self.in_vain.next().min(poll),
            due => {
                self.in_vain.reset();
                due.map_or(poll, |due| due.min(poll))
            }
        };
        tokio::select! {
            biased;
            () = self.shared.stop.cancelled() => {}
            () = incarnation.over.cancelled() => {}
            () = self.shared.wake.notified() => self.in_vain.reset(),
            () = tokio::time::sleep(wait) => {}
        }
    }

    /// True if the worker shall end now because nothing is left to do, here or elsewhere.
    async fn is_all_done(&mut self, incarnation: &Incarnation) -> bool {
        if !self.shared.settings.until_empty || incarnation.ledger().len() > 0 {
            return false;
        }
        match self.shared.stop.run_until_cancelled(self.store.is_empty(incarnation.worker)).await {
            Some(Ok(empty)) => empty,
            Some(Err(error)) => {
                self.shared.call_failed(&error);
                false
            }
            None => false,
        }
    }
}

/// A claim on its way.
struct Flight {
    incarnation: Arc<Incarnation>,
    seq: i64,
    after_lane: i64,
    permits: Permits,
}

impl Flight {
    /// Asks under the same number until there is an answer. `None`: there cannot be one any more.
    async fn answer(&self, shared: &Shared, store: &Store) -> Option<Vec<ClaimedJob>> {
        let (worker, seq) = (self.incarnation.worker, self.seq);
        let jobs = u32::try_from(self.permits.slots.num_permits()).unwrap_or(u32::MAX);
        let mut pause = error_pause();
        loop {
            let asked = Instant::now();
            let answer = tokio::select! {
                biased;
                () = self.incarnation.over.cancelled() => return None,
                () = shared.stop.cancelled() => return None,
                answer = store.claim(worker, seq, jobs, self.after_lane) => answer,
            };
            match answer {
                Ok(jobs) => {
                    shared.call_answered();
                    trace::received(&jobs, worker, asked);
                    return Some(jobs);
                }
                Err(error) if error.is_transient() => {
                    shared.call_failed(&error);
                    tracing::debug!(%error, seq, "claim not answered; asking again");
                    rest(shared, &mut pause).await;
                }
                Err(error) => {
                    // The heartbeat knows best whether this incarnation is over.
                    tracing::warn!(%error, seq, "claim refused");
                    return None;
                }
            }
        }
    }
}

/// Between tries after errors.
fn error_pause() -> Pause {
    Pause::new(Duration::from_millis(50), Duration::from_secs(1))
}

/// After an error.
async fn rest(shared: &Shared, pause: &mut Pause) {
    let _ = shared.stop.run_until_cancelled(tokio::time::sleep(pause.next())).await;
}

/// Waits until the worker is registered and has at least one free slot. `None`: it stops.
async fn ready(shared: &Shared) -> Option<(Arc<Incarnation>, Permits)> {
    let permits = tokio::select! {
        biased;
        () = shared.stop.cancelled() => None,
        permits = permits(shared, 1) => permits,
    }?;
    Some((shared.registered().await?, permits))
}

/// Waits for permits for at least so many jobs, and takes as many more as there are, up to a claim's worth.
async fn permits(shared: &Shared, least: usize) -> Option<Permits> {
    let mut slots = some(shared.slots.clone(), least).await?;
    let mut room = some(shared.room.clone(), least).await?;
    let jobs = slots.num_permits().min(room.num_permits());
    Some(Permits { slots: slots.split(jobs)?, room: room.split(jobs)? })
}

async fn some(semaphore: Arc<Semaphore>, least: usize) -> Option<OwnedSemaphorePermit> {
    let mut permits = semaphore.clone().acquire_many_owned(u32::try_from(least).ok()?).await.ok()?;
    let more = semaphore.available_permits().min(MAX_JOBS - least);
    if let Ok(more) = semaphore.try_acquire_many_owned(u32::try_from(more).unwrap_or(0)) {
        permits.merge(more);
    }
    Some(permits)
}
