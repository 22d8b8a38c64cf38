//! Fairness: how long the jobs of one tenant wait at a worker with few slots, alone and while another tenant has a long line.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use posthouse::store::Database;
use posthouse::{Context, Job, NewJob, Posthouse, Worker};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::error::{Error, Result};
use crate::figure::{Sample, percentiles};
use crate::ground::Scratch;
use crate::sizes::{FAIR_PACE, FAIR_SLOTS, FAIR_WORK, Sizes};

const MANY: &str = "many";
const FEW: &str = "few";
/// Jobs of the waiting tenant before those that count: they make connections, and show that the worker is at work.
const FIRST: u32 = 10;
/// A run that has not ended by then will not.
const TOO_LONG: Duration = Duration::from_secs(600);

/// A job that takes a slot for a moment.
#[derive(Serialize, Deserialize)]
struct Turn {
    n: u32,
}

impl Job for Turn {
    const KIND: &'static str = "turn";
}

pub(crate) async fn measure(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let alone = waits(scratch, sizes.fair, 0).await?;
    let behind = waits(scratch, sizes.fair, sizes.fair_backlog).await?;
    let alone = percentiles(["wait alone p50", "wait alone p95", "wait alone p99"], &alone);
    let behind =
        percentiles(["wait beside a backlog p50", "wait beside a backlog p95", "wait beside a backlog p99"], &behind);
    let names = ["times as long p50", "times as long p95", "times as long p99"];
    let ratios = alone.iter().zip(&behind).map(|(alone, behind)| behind.value / alone.value);
    let ratios: Vec<_> = names.into_iter().zip(ratios).map(|(name, ratio)| Sample::new(name, "", ratio)).collect();
    Ok([alone, behind, ratios].concat())
}

/// From the call of each enqueue of one tenant to the start of its job, in ms, while another has so many jobs queued.
async fn waits(scratch: &Scratch, jobs: u32, backlog: u32) -> Result<Vec<f64>> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let line = (0..backlog).map(|n| Ok(NewJob::of(&Turn { n })?.tenant(MANY)));
    queue.enqueue_many(&line.collect::<posthouse::Result<Vec<_>>>()?).await?;
    let jobs = FIRST + jobs;
    let seen = Arc::new(Seen { few: Mutex::default(), many: Mutex::new(0), all: Notify::new() });
    let worker = Worker::builder(Database::new(&scratch.url)?).concurrency(FAIR_SLOTS).handle({
        let seen = seen.clone();
        move |turn: Turn, context: Context| {
            seen.note(&turn, context.tenant(), jobs);
            tokio::time::sleep(FAIR_WORK)
        }
    });
    let worked = async { Ok(worker.run_until(seen.all.notified()).await?) };
    let both = async { tokio::try_join!(call(&queue, jobs), worked) };
    let (called, _) = timeout(TOO_LONG, both)
        .await
        .map_err(|_| Error::Stuck(format!("fair: not every job has started after {} s", TOO_LONG.as_secs())))??;
    if backlog > 0 && *lock(&seen.many) >= backlog {
        return Err(Error::Stuck("fair: the other tenant's line ran out before the end".to_owned()));
    }
    let started = lock(&seen.few);
    let counted = started.iter().filter(|(n, _)| *n >= FIRST);
    Ok(counted.map(|(n, start)| (*start - called[*n as usize]).as_secs_f64() * 1e3).collect())
}

/// Enqueues jobs one by one at a steady pace. Answers with the times of the calls.
async fn call(queue: &Posthouse, jobs: u32) -> Result<Vec<Instant>> {
    let mut pace = interval(FAIR_PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut called = Vec::new();
    for n in 0..jobs {
        pace.tick().await;
        called.push(Instant::now());
        queue.enqueue(Turn { n }).tenant(FEW).await?;
    }
    Ok(called)
}

/// What has started.
struct Seen {
    few: Mutex<Vec<(u32, Instant)>>,
    many: Mutex<u32>,
    /// All jobs of the waiting tenant.
    all: Notify,
}

impl Seen {
    fn note(&self, turn: &Turn, tenant: &str, jobs: u32) {
        if tenant == MANY {
            *lock(&self.many) += 1;
            return;
        }
        let mut few = lock(&self.few);
        few.push((turn.n, Instant::now()));
        if few.len() == jobs as usize {
            self.all.notify_one();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
