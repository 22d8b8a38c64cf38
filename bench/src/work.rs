//! How fast jobs are done that do nothing.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use posthouse::store::Database;
use posthouse::worker::{Builder, Event};
use posthouse::{Context, Posthouse, Worker};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::figure::Sample;
use crate::floor::CLAIM_SETTLE;
use crate::ground::Scratch;
use crate::jobs::{Noop, QUEUE, fill};
use crate::options::Scenario;
use crate::sizes::{SLOTS, Sizes};

/// A scenario that has not ended by then will not.
const TOO_LONG: Duration = Duration::from_secs(600);

pub(crate) async fn drain(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    fill(scratch, sizes.drain).await?;
    let worker = Worker::builder(Database::new(&scratch.url)?).concurrency(SLOTS);
    let seconds = until_done(worker.handle(|_: Noop, _: Context| async {}), sizes.drain).await?;
    Ok(vec![Sample::rate("done", sizes.drain, seconds).against(CLAIM_SETTLE)])
}

/// The same where history is off, told beside it.
pub(crate) async fn drain_no_history(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    Posthouse::connect(&scratch.url).await?.set_retention(QUEUE, Some(Duration::ZERO)).await?;
    let samples = drain(scratch, sizes).await?;
    Ok(samples.into_iter().map(|sample| sample.beside(Scenario::Drain, "done")).collect())
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
