//! Records outcomes: while one batch is on its way to Postgres the next one gathers, so a single outcome waits for nobody
//! and many travel together.
//!
//! An outcome stays here until Postgres has answered for it. A lost connection only delays it. If Postgres refuses a
//! batch because of what is in it, the batch is cut in half until the bad row is alone; that row then becomes a dead
//! letter with a short error, and all others are recorded as they are.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use uuid::Uuid;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::outcome::{JobError, Outcome};
use crate::pause::Pause;
use crate::store::{Settled, Settlement, Verdict};
use crate::worker::shared::{Filed, MAX_ROWS, Shared, Slip};

/// How long a batch waits for outcomes that come one right behind the other: far less than it takes to record them.
const GATHER: Duration = Duration::from_millis(1);
/// Bytes of results in a batch: the statement holds them again, and the driver once more. One row may be bigger.
const MAX_BYTES: usize = 256 << 10;

/// Runs until the last call, when everything is written, or until the halt. Answers with the number of outcomes that
/// could not be written.
pub(crate) async fn settle(shared: Arc<Shared>, inbox: mpsc::UnboundedReceiver<Filed>) -> usize {
    let mut settler = Settler {
        shared,
        inbox,
        pending: VecDeque::new(),
        limit: MAX_ROWS,
        pause: Pause::new(Duration::from_millis(50), Duration::from_secs(1)),
    };
    while settler.gather().await {
        let (slips, settlements) = settler.batch();
        let Some(first) = slips.first() else { continue };
        match settler.offer(first.incarnation.worker, &settlements).await {
            Some(answer) => settler.take(answer, slips, settlements).await,
            None => return settler.unwritten() + slips.len(),
        }
    }
    settler.unwritten()
}

struct Settler {
    shared: Arc<Shared>,
    inbox: mpsc::UnboundedReceiver<Filed>,
    pending: VecDeque<Filed>,
    /// Rows of the next batch: halved when a batch fails, doubled when one is recorded.
    limit: usize,
    pause: Pause,
}

impl Settler {
    fn unwritten(&self) -> usize {
        self.pending.len() + self.inbox.len()
    }

    /// Waits for outcomes. False: the end.
    async fn gather(&mut self) -> bool {
        while self.pending.is_empty() {
            tokio::select! {
                biased;
                () = self.shared.halt.cancelled() => return false,
                filed = self.inbox.recv() => match filed {
                    Some(filed) => self.pending.push_back(filed),
                    None => return false,
                },
                () = self.shared.last_call.cancelled(), if !self.inbox.is_closed() => self.inbox.close(),
            }
        }
        let until = Instant::now() + GATHER;
        loop {
            // Lets those go first that are about to end.
            tokio::task::yield_now().await;
            let before = self.pending.len();
            while let Ok(filed) = self.inbox.try_recv() {
                self.pending.push_back(filed);
            }
            let more = self.pending.len() > before && self.pending.len() < self.limit;
            if !more || Instant::now() >= until {
                break;
            }
        }
        !self.shared.halt.is_cancelled()
    }

    /// The next batch: outcomes of one incarnation, not too many, not too big.
    fn batch(&mut self) -> (Vec<Slip>, Vec<Settlement>) {
        let rows = self.pending.len().min(self.limit);
        let mut batch = (Vec::with_capacity(rows), Vec::with_capacity(rows));
        let mut bytes = 0;
        let worker = self.pending.front().map(|filed| filed.slip.incarnation.worker);
        while let Some(next) = self.pending.front() {
            bytes += size(&next.settlement);
            let fits = batch.0.is_empty() || (bytes <= MAX_BYTES && batch.0.len() < self.limit);
            if !fits || Some(next.slip.incarnation.worker) != worker {
                break;
            }
            if let Some(Filed { slip, settlement }) = self.pending.pop_front() {
                batch.0.push(slip);
                batch.1.push(settlement);
            }
        }
        batch
    }

    /// Asks Postgres to record them. `None`: the worker was halted before the answer came.
    async fn offer(&self, worker: Uuid, settlements: &[Settlement]) -> Option<Result<Vec<Settled>>> {
        tokio::select! {
            biased;
            answer = self.shared.settle_store.settle(worker, settlements) => Some(answer),
            () = self.shared.halt.cancelled() => None,
        }
    }

    async fn take(&mut self, answer: Result<Vec<Settled>>, slips: Vec<Slip>, settlements: Vec<Settlement>) {
        let filed = slips.into_iter().zip(settlements).map(|(slip, settlement)| Filed { slip, settlement });
        match answer {
            Ok(settled) => {
                self.shared.call_answered();
                self.pause.reset();
                self.limit = (self.limit * 2).min(MAX_ROWS);
                self.recorded(settled, filed);
            }
            Err(error) => {
                self.shared.call_failed(&error);
                self.refused(&error, filed.collect()).await;
            }
        }
    }

    /// Postgres answered for each row.
    fn recorded(&mut self, mut settled: Vec<Settled>, filed: impl Iterator<Item = Filed>) {
        settled.sort_unstable_by_key(|s| (s.id, s.fence));
        let mut comes_again = false;
        for filed in filed {
            let Filed { slip, settlement } = filed;
            let (id, fence) = (settlement.id, settlement.fence);
            let found = settled.binary_search_by_key(&(id, fence), |s| (s.id, s.fence));
            match found.ok().map(|at| &settled[at]) {
                Some(Settled { verdict: Verdict::Applied | Verdict::Already, state, .. }) => {
                    let state = state.as_deref().unwrap_or_default();
                    comes_again |= state == "queued";
                    announce(&self.shared, &slip.context, &settlement, state);
                }
                Some(Settled { verdict: Verdict::Invalid, .. }) if !is_stand_in(&settlement) => {
                    let settlement = stand_in(&settlement, "Postgres does not accept it");
                    self.pending.push_back(Filed { slip, settlement });
                    continue;
                }
                other => {
                    let verdict = other.map(|settled| settled.verdict);
                    tracing::debug!(job = id, fence, ?verdict, "the outcome was refused: the job is not ours any more");
                    self.shared.emit_of(&slip.context, &Event::Lost { job: slip.context.job() });
                    slip.incarnation.ledger().let_go(id, fence);
                    continue;
                }
            }
            slip.incarnation.ledger().forget(id, fence);
            drop(slip.room);
        }
        // One that ends when all is done looks again when it may be; so does one that waits for a place behind a gate.
        self.shared.recorded.fetch_add(1, Ordering::SeqCst);
        let behind_gate = self.shared.behind_gate.load(Ordering::SeqCst);
        if comes_again || behind_gate || self.shared.settings.until_empty {
            self.shared.wake.notify_one();
        }
    }

    /// Nothing of the batch was recorded, or nobody knows. It goes to the back, so that the others are not held up.
    async fn refused(&mut self, error: &Error, batch: Vec<Filed>) {
        let about_a_row = is_about_a_row(error);
        if !error.is_server_down() {
            self.limit = (batch.len() / 2).max(1);
        }
        if about_a_row && batch.len() == 1 {
            return self.refused_alone(error, batch).await;
        }
        tracing::warn!(%error, outcomes = batch.len(), "outcomes not recorded yet; trying again");
        self.pending.extend(batch);
        if !about_a_row {
            self.rest().await;
        }
    }

    /// The one row that Postgres refuses is offered again as a dead letter. If even that is refused, it was not the row.
    async fn refused_alone(&mut self, error: &Error, batch: Vec<Filed>) {
        for Filed { slip, settlement } in batch {
            let job = settlement.id;
            tracing::warn!(job, %error, "Postgres refuses the outcome; recording that instead");
            let instead = stand_in(&settlement, &error.to_string());
            match self.offer(slip.incarnation.worker, std::slice::from_ref(&instead)).await {
                Some(Ok(settled)) => self.recorded(settled, std::iter::once(Filed { slip, settlement: instead })),
                Some(Err(error)) => {
                    tracing::error!(job, %error, "the outcome cannot be recorded at the moment; trying again");
                    self.pending.push_back(Filed { slip, settlement });
                    self.rest().await;
                }
                None => self.pending.push_back(Filed { slip, settlement }),
            }
        }
    }

    async fn rest(&mut self) {
        let pause = self.pause.next();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = self.shared.halt.cancelled() => {}
        }
    }
}

/// True if the error may come from what one row holds; false if any batch would meet it (no right, no table, no server).
fn is_about_a_row(error: &Error) -> bool {
    const OF_ROWS: [&str; 6] = ["21", "22", "23", "54", "P0", "XX"];
    error.is_invalid() || error.sqlstate().is_some_and(|code| OF_ROWS.contains(&code.get(..2).unwrap_or_default()))
}

const STAND_IN: &str = "unrecordable";

/// What is recorded in place of an outcome that cannot be: nothing of it is in there.
fn stand_in(settlement: &Settlement, why: &str) -> Settlement {
    let why: String = why.chars().filter(|c| !c.is_control()).take(500).collect();
    let error = JobError::new(STAND_IN, format!("the attempt ended, but its outcome could not be recorded: {why}"));
    Settlement::new(settlement.id, settlement.fence, Outcome::Fail(error))
}

fn is_stand_in(settlement: &Settlement) -> bool {
    matches!(&settlement.outcome, Some(Outcome::Fail(error)) if error.class == STAND_IN)
}

/// About how many bytes the row adds to a statement.
fn size(settlement: &Settlement) -> usize {
    let usage = settlement.usage.as_ref().map_or(0, |usage| usage.get().len());
    usage
        + match &settlement.outcome {
            Some(Outcome::Done(result)) => result.get().len(),
            Some(Outcome::Retry { error, .. } | Outcome::Fail(error)) => error.message.len(),
            Some(Outcome::Snooze { reason, .. }) => reason.len(),
            Some(Outcome::Cancelled) | None => 0,
        }
}

/// Says what became of the job. The state that Postgres answered with decides: a retry without attempts left has failed.
fn announce(shared: &Shared, context: &Context, settlement: &Settlement, state: &str) {
    let job = context.job();
    let error = match &settlement.outcome {
        Some(Outcome::Retry { error, .. } | Outcome::Fail(error)) => Some(error),
        _ => None,
    };
    let event = match (state, &settlement.outcome) {
        ("cancelled", _) | (_, Some(Outcome::Cancelled)) => Event::Cancelled { job },
        ("done", _) | (_, Some(Outcome::Done(_))) => Event::Done { job },
        ("failed", _) | (_, Some(Outcome::Fail(_))) => Event::Failed { job, error },
        (_, None) => Event::Released { job },
        (_, Some(Outcome::Retry { error, delay })) => Event::Retry { job, error, delay: delay.unwrap_or_default() },
        (_, Some(Outcome::Snooze { delay, reason, .. })) => Event::Snoozed { job, delay: *delay, reason },
    };
    shared.emit_of(context, &event);
}
