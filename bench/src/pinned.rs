//! Whether the queue slows down while somebody else holds a snapshot: a steady load for minutes, its first and its last
//! minute compared, and what the held rows leave behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use posthouse::store::Database;
use posthouse::worker::{Builder, Event};
use posthouse::{Context, Worker};
use tokio::sync::Notify;

use crate::error::{Error, Result};
use crate::figure::{Sample, percentiles};
use crate::ground::{Ground, Scratch, connect};
use crate::jobs::Noop;
use crate::machine::Cpu;
use crate::pin::Pin;
use crate::sizes::Sizes;
use crate::statements::{Cost, Statements, Totals};
use crate::steady::{Waits, enqueue};
use crate::tables::{dead_rows, size_mib, vacuum};

/// What is compared is a minute, unless the run is too short.
const WINDOW: Duration = Duration::from_secs(60);
/// Connections are made and code is loaded before anything counts.
const LEAD: Duration = Duration::from_secs(5);
/// After the load has ended, the jobs must be done by then.
const REST: Duration = Duration::from_secs(60);
/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// One of the runs.
struct Run {
    name: &'static str,
    tenants: u32,
    pin: Pin,
    time: Duration,
}

impl Run {
    fn lead(&self) -> Duration {
        LEAD.min(self.time / 5)
    }

    fn window(&self) -> Duration {
        WINDOW.min(self.time / 3)
    }

    fn sample(&self, name: &str, unit: &'static str, value: f64) -> Sample {
        Sample::new(format!("{}: {name}", self.name), unit, value)
    }

    /// Three figures: of the first minute, of the last one, and their ratio.
    fn first_and_last(&self, name: &str, unit: &'static str, first: f64, last: f64) -> [Sample; 3] {
        [
            self.sample(&format!("{name} at first"), unit, first),
            self.sample(&format!("{name} at last"), unit, last),
            self.sample(&format!("{name}, last to first"), "", last / first),
        ]
    }

    /// The same for what statements cost: time and buffers.
    fn costs(&self, ms: &str, buffers: &str, first: Cost, last: Cost) -> Vec<Sample> {
        let ms = self.first_and_last(ms, "ms", first.ms, last.ms);
        ms.into_iter().chain(self.first_and_last(buffers, "", first.buffers, last.buffers)).collect()
    }
}

/// All of it. Each run has a database of its own.
pub(crate) async fn measure(ground: &Ground, sizes: &Sizes) -> Result<Vec<Sample>> {
    let time = sizes.pinned_time;
    let step = WINDOW.min(time / 5);
    let run = |name, tenants, pin| Run { name, tenants, pin, time };
    let mut samples = Vec::new();
    for run in [
        run("1 tenant", 1, Pin::Still),
        run("1,000 tenants", 1_000, Pin::Still),
        run("moving", 1_000, Pin::Moving(step)),
    ] {
        let scratch = ground.scratch().await?;
        samples.extend(one(&scratch, &run).await?);
        ground.drop_database(&scratch.name).await?;
    }
    Ok(samples)
}

async fn one(scratch: &Scratch, run: &Run) -> Result<Vec<Sample>> {
    let statements = Statements::count(scratch).await?;
    let held = run.pin.hold(scratch).await?;
    let (waits, done, stop) = (Waits::default(), Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let worker = worker(scratch, &waits, &done)?.run_until({
        let stop = stop.clone();
        async move { stop.notified().await }
    });
    let load = async {
        let (looks, enqueued) =
            tokio::join!(looks(run, statements.as_ref()), enqueue(scratch, &waits, run.tenants, run.lead() + run.time));
        let enqueued = enqueued?;
        let deadline = Instant::now() + REST;
        while done.load(Ordering::Relaxed) < enqueued {
            if Instant::now() > deadline {
                return Err(Error::Stuck(format!("pinned-snapshot, {}: jobs are not done a minute later", run.name)));
            }
            tokio::time::sleep(LOOK).await;
        }
        looks
    };
    let load = async {
        let looks = load.await;
        stop.notify_one();
        looks
    };
    let (looks, worked) = tokio::join!(load, worker);
    worked?;
    let looks = looks?;
    let client = connect(&scratch.url).await?;
    let mut samples = over_time(run, &waits, &looks)?;
    samples.push(run.sample("dead rows at the end", "", dead_rows(&client).await?));
    samples.push(run.sample("size at the end", "MiB", size_mib(&client).await?));
    held.release().await?;
    let seconds = vacuum(&client).await?;
    samples.push(run.sample("vacuum after the snapshot", "s", seconds));
    samples.push(run.sample("dead rows after the vacuum", "", dead_rows(&client).await?));
    Ok(samples)
}

fn worker(scratch: &Scratch, waits: &Waits, done: &Arc<AtomicUsize>) -> Result<Builder> {
    let (waits, done) = (waits.clone(), done.clone());
    let worker = Worker::builder(Database::new(&scratch.url)?).on_event(move |event| {
        if matches!(event, Event::Done { .. }) {
            done.fetch_add(1, Ordering::Relaxed);
        }
    });
    Ok(worker.handle(move |job: Noop, _: Context| {
        waits.start(&job);
        async {}
    }))
}

/// What was seen at the start and the end of the first and of the last minute.
struct Looks {
    start: Instant,
    /// Four, or none where the server does not count statements.
    totals: Vec<Totals>,
    cpu_percent: Option<f64>,
}

async fn looks(run: &Run, statements: Option<&Statements>) -> Result<Looks> {
    tokio::time::sleep(run.lead()).await;
    let (start, cpu) = (Instant::now(), Cpu::look());
    let mut totals = Vec::new();
    for at in [Duration::ZERO, run.window(), run.time - run.window(), run.time] {
        tokio::time::sleep_until((start + at).into()).await;
        if let Some(statements) = statements {
            totals.push(statements.look().await?);
        }
    }
    Ok(Looks { start, totals, cpu_percent: cpu.and_then(Cpu::percent_since) })
}

/// Everything that could grow.
fn over_time(run: &Run, waits: &Waits, looks: &Looks) -> Result<Vec<Sample>> {
    let (start, window, last) = (looks.start, run.window(), looks.start + (run.time - run.window()));
    let started = |from, time| u32::try_from(waits.started(from, time)).map_or(f64::INFINITY, f64::from);
    let throughput = run.sample("throughput", "1/s", started(start, run.time) / run.time.as_secs_f64());
    let mut samples = vec![throughput.with_course(waits.throughput(start, run.time, run.name))];
    let of = |from| {
        let times = waits.milliseconds(from, window);
        if times.is_empty() {
            return Err(Error::Stuck(format!("pinned-snapshot, {}: for {window:?} nothing was enqueued", run.name)));
        }
        Ok(percentiles(["p50", "p95", "p99"], &times))
    };
    for (first, last) in of(start)?.into_iter().zip(of(last)?).filter(|(first, _)| first.name != "p95") {
        samples.extend(run.first_and_last(&format!("latency {}", first.name), "ms", first.value, last.value));
    }
    let all = percentiles(["p50", "p95", "p99"], &waits.milliseconds(start, run.time));
    let p99 = run.sample("latency p99 over all", "ms", all[2].value);
    samples.push(p99.with_course(waits.p99(start, run.time, run.name)));
    if let [a, b, c, d] = &looks.totals[..] {
        for function in ["claim", "settle"] {
            if let (Some(first), Some(last)) = (b.mean(a, function), d.mean(c, function)) {
                samples.extend(run.costs(&format!("mean {function}"), &format!("buffers a {function}"), first, last));
            }
        }
        let (first, last) = (b.all(a, started(start, window)), d.all(c, started(last, window)));
        samples.extend(run.costs("all statements, per job", "buffers of all statements, per job", first, last));
    }
    samples.extend(looks.cpu_percent.map(|percent| run.sample("processors in use", "%", percent)));
    Ok(samples)
}
