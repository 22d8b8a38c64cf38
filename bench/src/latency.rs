//! How soon an idle worker starts a job, and where that time goes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use posthouse::store::Database;
use posthouse::{Context, Posthouse, Worker};
use tokio::time::{MissedTickBehavior, interval};

use crate::error::Result;
use crate::figure::{Sample, percentiles};
use crate::floor::{NOTIFY_P50, NOTIFY_P95, NOTIFY_P99, listen};
use crate::ground::Scratch;
use crate::jobs::Noop;
use crate::sizes::{PACE, Sizes};
use crate::work::until_done;

/// Enqueues before those whose latency counts: they make connections, and show that the worker listens.
const FIRST: u32 = 10;

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
    let (_listener, mut notified) = listen(scratch, "posthouse_wake").await?;
    let (called, worked) = tokio::join!(call(scratch, jobs), until_done(worker, jobs));
    let called = called?;
    worked?;
    let mut heard = Vec::new();
    while let Ok(at) = notified.try_recv() {
        heard.push(at);
    }
    let mut starts = vec![None; jobs as usize];
    for (n, at) in started.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        starts[*n as usize] = Some(*at);
    }
    Ok(samples(&called, &heard, &starts))
}

/// What each part took. The notifications are those of the enqueues, in their order, if there are as many.
fn samples(called: &[Called], heard: &[Instant], starts: &[Option<Instant>]) -> Vec<Sample> {
    let counted = |times: Vec<f64>| times.into_iter().skip(FIRST as usize).collect::<Vec<_>>();
    let ms = |from: Instant, to: Instant| to.saturating_duration_since(from).as_secs_f64() * 1e3;
    let whole: Vec<f64> = called.iter().zip(starts).filter_map(|(c, start)| Some(ms(c.at, (*start)?))).collect();
    let floors = [NOTIFY_P50, NOTIFY_P95, NOTIFY_P99];
    let latencies = percentiles(["latency p50", "latency p95", "latency p99"], &counted(whole));
    let mut samples: Vec<_> = latencies.into_iter().zip(floors).map(|(s, floor)| s.against(floor)).collect();
    let mut part = |name: &'static str, times: Vec<f64>| {
        samples.extend(percentiles([name, "", ""], &counted(times)).into_iter().take(1));
    };
    part("p50 until the enqueue was answered", called.iter().map(|c| ms(c.at, c.answered)).collect());
    if heard.len() == called.len() {
        part("p50 until the notification was heard", called.iter().zip(heard).map(|(c, at)| ms(c.at, *at)).collect());
        let claims = heard.iter().zip(starts).filter_map(|(at, start)| Some(ms(*at, (*start)?)));
        part("p50 from there to the handler: claim, start", claims.collect());
    }
    samples
}

/// One enqueue.
struct Called {
    at: Instant,
    answered: Instant,
}

/// Enqueues jobs one by one at a steady pace.
async fn call(scratch: &Scratch, jobs: u32) -> Result<Vec<Called>> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let mut pace = interval(PACE);
    pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut called = Vec::new();
    for n in 0..jobs {
        pace.tick().await;
        let at = Instant::now();
        queue.enqueue(Noop { n }).await?;
        called.push(Called { at, answered: Instant::now() });
    }
    Ok(called)
}
