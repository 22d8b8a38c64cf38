//! One claim after the other by hand, each timed, on a backlog that stays as large as it is: for every job that is taken a
//! like one comes in meanwhile.

use std::time::{Duration, Instant};

use posthouse::store::{Beat, ClaimedJob, Database, Registration, Settlement, Store};
use posthouse::{NewJob, Outcome, Posthouse, Worker};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::ground::Scratch;
use crate::jobs::Noop;
use crate::sizes::BATCH;

/// Claims between two heartbeats.
const BEAT: i64 = 50;
/// Batches that may be missing from the backlog at a time.
const MISSING: usize = 4;
/// Longer than anything takes here.
const LEASE: Duration = Duration::from_secs(3_600);

/// A worker that does nothing with its jobs.
pub(crate) struct Claims {
    store: Store,
    worker: Uuid,
    seq: i64,
    after_lane: i64,
    refill: mpsc::Sender<Vec<NewJob>>,
    refilled: JoinHandle<posthouse::Result<()>>,
    /// Of every claim and settle that counts, in ms.
    pub(crate) claims: Vec<f64>,
    pub(crate) settles: Vec<f64>,
}

impl Claims {
    /// Of this queue.
    pub(crate) async fn begin(scratch: &Scratch, queue: &str) -> Result<Self> {
        let store = Database::new(&scratch.url)?.store("claims");
        let worker = Uuid::new_v4();
        store
            .register_worker(&Registration {
                worker,
                lease: LEASE,
                queues: vec![queue.to_owned()],
                kinds: vec![<Noop as posthouse::Job>::KIND.to_owned()],
                slots: BATCH,
                host: String::new(),
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
            })
            .await?;
        let (refill, jobs) = mpsc::channel(MISSING);
        let refilled = tokio::spawn(enqueue(Posthouse::connect(&scratch.url).await?, jobs));
        Ok(Self { store, worker, seq: 0, after_lane: 0, refill, refilled, claims: Vec::new(), settles: Vec::new() })
    }

    /// One claim and its settle.
    pub(crate) async fn turn(&mut self) -> Result<()> {
        self.seq += 1;
        let start = Instant::now();
        let jobs = self.store.claim(self.worker, self.seq, BATCH, self.after_lane).await?;
        self.claims.push(start.elapsed().as_secs_f64() * 1e3);
        if jobs.len() < BATCH as usize {
            return Err(Error::Stuck(format!("a claim of {BATCH} jobs brought {} from a full queue", jobs.len())));
        }
        self.after_lane = jobs.last().map_or(0, |job| job.lane);
        let again = jobs.iter().map(like).collect::<posthouse::Result<Vec<_>>>()?;
        if self.refill.send(again).await.is_err() {
            return self.end().await;
        }
        let done = |job: &ClaimedJob| Settlement::new(job.id, job.fence, Outcome::done(&()));
        let settlements: Vec<_> = jobs.iter().map(done).collect();
        let start = Instant::now();
        self.store.settle(self.worker, &settlements).await?;
        self.settles.push(start.elapsed().as_secs_f64() * 1e3);
        if self.seq % BEAT == 0 {
            let beat = Beat { mark: self.seq, oldest: self.seq + 1, ..Beat::default() };
            self.store.heartbeat(self.worker, &beat).await?;
        }
        Ok(())
    }

    /// So many turns; the times of those before are forgotten.
    pub(crate) async fn turns(&mut self, turns: u32) -> Result<()> {
        self.forget();
        for _ in 0..turns {
            self.turn().await?;
        }
        Ok(())
    }

    /// The times up to now do not count.
    pub(crate) fn forget(&mut self) {
        self.claims.clear();
        self.settles.clear();
    }

    /// Why the backlog is not refilled any more.
    async fn end(&mut self) -> Result<()> {
        (&mut self.refilled)
            .await
            .map_err(|error| Error::Stuck(format!("refilling the backlog: {error}")))?
            .map_err(Into::into)
    }
}

/// A new job like this one.
fn like(job: &ClaimedJob) -> posthouse::Result<NewJob> {
    Ok(NewJob::from_json(&job.kind, job.payload.get())?.queue(&job.queue).tenant(&job.tenant))
}

async fn enqueue(queue: Posthouse, mut jobs: mpsc::Receiver<Vec<NewJob>>) -> posthouse::Result<()> {
    while let Some(jobs) = jobs.recv().await {
        queue.enqueue_many(&jobs).await?;
    }
    Ok(())
}

/// Keeps house as every worker does, until `measured` ends: a worker with nothing else to do.
pub(crate) async fn with_housekeeping<T>(scratch: &Scratch, measured: impl Future<Output = Result<T>>) -> Result<T> {
    let idle = Worker::builder(Database::new(&scratch.url)?).queue("idle").handle_kind("idle", |_, _| async {});
    tokio::select! {
        measured = measured => measured,
        ended = idle.run_until(std::future::pending()) => {
            ended?;
            Err(Error::Stuck("the worker that keeps house has ended".to_owned()))
        }
    }
}
