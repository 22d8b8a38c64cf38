//! Finds work: claims as many jobs as there are free slots and starts them at once, or waits until there may be some.
//!
//! The wait ends by a notification, when the next job is due, or after the poll interval. A notification that comes after
//! the look but before the wait is kept, so none falls into the gap. While claims bring something, they follow each other
//! without a wait; outcomes are recorded meanwhile by a task of their own.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use tokio::sync::OwnedSemaphorePermit;

use crate::context::Context;
use crate::pause::{Pause, jitter};
use crate::store::{ClaimedJob, NextDue, Settlement, Store};
use crate::worker::attempt::{Claimed, attempt};
use crate::worker::shared::{Filed, Incarnation, Shared, Slip};

/// Jobs in one claim: enough to make a round trip cheap, few enough that other workers get their share of a burst.
const MAX_JOBS: usize = 500;
/// After a claim that found nothing although a job is said to be due (another worker is just claiming it, say) the next one
/// comes no sooner, and later each time.
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
        after_lane: 0,
        in_vain: Pause::new(MIN_WAIT, shared.settings.poll.max(MIN_WAIT)),
        shared,
        pause: Pause::new(Duration::from_millis(50), Duration::from_secs(1)),
    };
    while let Some((incarnation, permits)) = claimer.ready().await {
        match claimer.claim(&incarnation, permits).await {
            Catch::Some => claimer.in_vain.reset(),
            Catch::Nothing if claimer.is_all_done(&incarnation).await => return,
            Catch::Nothing => claimer.wait(&incarnation).await,
            Catch::Failed => claimer.rest().await,
        }
    }
}

struct Claimer {
    shared: Arc<Shared>,
    store: Store,
    /// Where the round robin over lanes goes on.
    after_lane: i64,
    /// The wait after a claim that found nothing although a job was said to be due.
    in_vain: Pause,
    pause: Pause,
}

impl Claimer {
    /// Waits until the worker is registered and has at least one free slot. `None`: it stops.
    async fn ready(&self) -> Option<(Arc<Incarnation>, Permits)> {
        let shared = &self.shared;
        let permits = async {
            let mut slots = some(shared.slots.clone()).await?;
            let mut room = some(shared.room.clone()).await?;
            let jobs = slots.num_permits().min(room.num_permits());
            Some(Permits { slots: slots.split(jobs)?, room: room.split(jobs)? })
        };
        let permits = tokio::select! {
            biased;
            () = shared.stop.cancelled() => None,
            permits = permits => permits,
        }?;
        Some((shared.registered().await?, permits))
    }

    /// One claim, asked for under the same number until it is answered or cannot be any more.
    async fn claim(&mut self, incarnation: &Arc<Incarnation>, permits: Permits) -> Catch {
        let jobs = u32::try_from(permits.slots.num_permits()).unwrap_or(u32::MAX);
        let seq = incarnation.ledger().begin();
        loop {
            let answer = tokio::select! {
                biased;
                () = incarnation.over.cancelled() => None,
                () = self.shared.stop.cancelled() => None,
                answer = self.store.claim(incarnation.worker, seq, jobs, self.after_lane) => Some(answer),
            };
            match answer {
                Some(Ok(jobs)) => {
                    self.shared.call_answered();
                    self.pause.reset();
                    return self.start(incarnation, seq, jobs, permits);
                }
                Some(Err(error)) if error.is_transient() => {
                    self.shared.call_failed(&error);
                    tracing::debug!(%error, seq, "claim not answered; asking again");
                    self.rest().await;
                }
                Some(Err(error)) => {
                    // The heartbeat knows best whether this incarnation is over.
                    tracing::warn!(%error, seq, "claim refused");
                    incarnation.ledger().give_up(seq);
                    self.shared.beat_now.notify_one();
                    return Catch::Failed;
                }
                None => {
                    // Whatever was claimed by it is released by the next heartbeat.
                    incarnation.ledger().give_up(seq);
                    self.shared.beat_now.notify_one();
                    return Catch::Failed;
                }
            }
        }
    }

    /// Starts the jobs of an answer, unless it came too late for that.
    fn start(
        &mut self,
        incarnation: &Arc<Incarnation>,
        seq: i64,
        jobs: Vec<ClaimedJob>,
        mut permits: Permits,
    ) -> Catch {
        self.after_lane = jobs.last().map_or(0, |job| job.lane);
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
        let settlement = Settlement::release(job.context.job_id(), job.context.fence());
        let slip = Slip { incarnation: job.incarnation, context: job.context, room: job.room };
        if self.shared.filed.send(Filed { slip, settlement }).is_err() {
            tracing::debug!("claimed after the end; the worker's retirement releases it");
        }
    }

    /// Waits for a notification, the next due job or the next poll.
    async fn wait(&mut self, incarnation: &Incarnation) {
        let due = match self.shared.stop.run_until_cancelled(self.store.next_due(incarnation.worker)).await {
            Some(Ok(due)) => {
                self.shared.behind_gate.store(due == NextDue::WhenOneEnds, Ordering::Relaxed);
                match due {
                    NextDue::In(due) => Some(due),
                    NextDue::WhenOneEnds | NextDue::Unknown => None,
                }
            }
            Some(Err(error)) => {
                self.shared.call_failed(&error);
                tracing::debug!(%error, "next due time not known; polling");
                None
            }
            None => return,
        };
        let poll = jitter(self.shared.settings.poll);
        let wait = match due {
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

    /// After an error.
    async fn rest(&mut self) {
        let pause = self.pause.next();
        let _ = self.shared.stop.run_until_cancelled(tokio::time::sleep(pause)).await;
    }

    /// True if the worker shall end now because nothing is left to do, here or elsewhere.
    async fn is_all_done(&self, incarnation: &Incarnation) -> bool {
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

/// Waits for one permit and takes as many more as there are, up to a claim's worth.
async fn some(semaphore: Arc<tokio::sync::Semaphore>) -> Option<OwnedSemaphorePermit> {
    let mut permits = semaphore.clone().acquire_owned().await.ok()?;
    let more = semaphore.available_permits().min(MAX_JOBS - 1);
    if let Ok(more) = semaphore.try_acquire_many_owned(u32::try_from(more).unwrap_or(0)) {
        permits.merge(more);
    }
    Some(permits)
}
