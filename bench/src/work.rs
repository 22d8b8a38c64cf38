//! How fast jobs are done: many that do nothing, one at a time at an idle worker.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use posthouse::store::Database;
use posthouse::worker::{Builder, Event};
use posthouse::{Context, Posthouse, Worker};
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::error::{Error, Result};
use crate::figure::{Sample, percentiles};
use crate::floor::{CLAIM_SETTLE, NOTIFY_P50, NOTIFY_P95, NOTIFY_P99};
use crate::ground::Scratch;
use crate::jobs::{Noop, fill};
use crate::sizes::{PACE, SLOTS, Sizes};

/// Enqueues before those whose latency counts: they make connections, and show that the worker listens.
const FIRST: u32 = 10;
/// A scenario that has not ended by then will not.
const TOO_LONG: Duration = Duration::from_secs(600);

pub(crate) async fn drain(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    fill(scratch, sizes.drain).await?;
    let worker = Worker::builder(Database::new(&scratch.url)?).concurrency(SLOTS);
    let seconds = until_done(worker.handle(|_: Noop, _: Context| async {}), sizes.drain).await?;
    Ok(vec![Sample::rate("done", sizes.drain, seconds).against(CLAIM_SETTLE)])
}

pub(crate) async fn latency(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let started = Arc::new(Mutex::new(Vec::new()));
    let worker = Worker::builder(Database::new(&scratch.url)?).handle({
        let started = started.clone();
        move |job: Noop, _: Context| {
            started.lock().unwrap_or_else(PoisonError::into_inner).push((job.n, Instant::now()));
            async {}
        }
    });
    let jobs = FIRST + sizes.latency;
    let (called, worked) = tokio::join!(call(scratch, jobs), until_done(worker, jobs));
    let called = called?;
    worked?;
    let started = started.lock().unwrap_or_else(PoisonError::into_inner);
    let counted = started.iter().filter(|(n, _)| *n >= FIRST);
    let times: Vec<f64> = counted.map(|(n, start)| (*start - called[*n as usize]).as_secs_f64() * 1e3).collect();
    let floors = [NOTIFY_P50, NOTIFY_P95, NOTIFY_P99];
    let samples = percentiles(["latency p50", "latency p95", "latency p99"], &times);
    Ok(samples.into_iter().zip(floors).map(|(sample, floor)| sample.against(floor)).collect())
}

/// Enqueues jobs one by one at a steady pace. Answers with the times of the calls.
async fn call(scratch: &Scratch, jobs: u32) -> Result<Vec<Instant>> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut called = Vec::new();
    for n in 0..jobs {
        pace.tick().await;
        called.push(Instant::now());
        queue.enqueue(Noop { n }).await?;
    }
    Ok(called)
}

/// Runs a worker until so many jobs are done and recorded. Answers with the seconds from its start to the last record.
pub(crate) async fn until_done(worker: Builder, jobs: u32) -> Result<f64> {
    let done = Arc::new(Countdown { left: AtomicU32::new(jobs), ended: OnceLock::new(), over: Notify::new() });
    let watched = worker.on_event({
        let done = done.clone();
        move |event| match event {
            Event::Done { .. } => done.one(),
            Event::Failed { .. } | Event::Retry { .. } | Event::Lost { .. } => done.over.notify_one(),
            _ => {}
        }
    });
    let start = Instant::now();
    let ended = timeout(TOO_LONG, watched.run_until(done.over.notified())).await;
    ended.map_err(|_| Error::Stuck(format!("the jobs are not done after {} s", TOO_LONG.as_secs())))??;
    match done.ended.get() {
        Some(ended) => Ok((*ended - start).as_secs_f64()),
        None => Err(Error::Stuck("a job was not done at its first attempt; the figure would mean nothing".to_owned())),
    }
}

/// Counts jobs down to the last one.
struct Countdown {
    left: AtomicU32,
    ended: OnceLock<Instant>,
    over: Notify,
}

impl Countdown {
    fn one(&self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.ended.get_or_init(Instant::now);
            self.over.notify_one();
        }
    }
}
