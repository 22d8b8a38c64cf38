//! A driver for a harness that measures several queues side by side, one driver each: it says what to do in arguments and
//! environment, and reads JSON lines. docs/benchmarks.md tells the protocol.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use posthouse::store::Database;
use posthouse::worker::Event;
use posthouse::{Context, Error, Job, NewJob, Posthouse, Result, Worker};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

const USAGE: &str = "usage: DATABASE_URL=… peers-driver setup | enqueue_single N | enqueue_bulk N | paced RATE TOTAL BATCH \
                     | work best|nohistory|default|inflight";
/// How often the count of finished jobs is told.
const TELL: Duration = Duration::from_millis(20);
/// How long jobs may go on after SIGTERM: the harness waits 15 seconds for the files.
const GRACE: Duration = Duration::from_secs(1);

#[derive(Serialize, Deserialize)]
struct Noop {
    task: String,
    /// Its number, by which runs are counted.
    n: u64,
    /// When its enqueue was called, in ms since 1970; 0 where nobody asks.
    #[serde(default)]
    t: f64,
}

impl Job for Noop {
    const KIND: &'static str = "noop";
}

fn noop(n: u64, t: f64) -> Noop {
    Noop { task: "noop".into(), n, t }
}

#[tokio::main]
async fn main() -> Result<()> {
    // In a task, as the code of a service runs: the first thread would hand over to another one at each await.
    tokio::spawn(run()).await.map_err(|error| Error::config(error.to_string()))?
}

async fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let url = variable("DATABASE_URL").ok_or_else(|| Error::config(USAGE))?;
    match arguments[..] {
        ["setup"] => Posthouse::migrate(&url).await,
        ["enqueue_single", jobs] => enqueue_single(&url, number(jobs)?).await,
        ["enqueue_bulk", jobs] => enqueue_bulk(&url, number(jobs)?).await,
        ["paced", rate, total, batch] => paced(&url, number(rate)?, number(total)?, number(batch)?).await,
        ["work", config] => work(&url, config).await,
        _ => Err(Error::config(USAGE)),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn number(text: &str) -> Result<u64> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| Error::config(format!("{text:?} is no number above 0\n{USAGE}")))
}

fn now_ms() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() * 1e3
}

fn tell_time(jobs: u64, start: Instant) {
    println!("{}", json!({ "n": jobs, "secs": start.elapsed().as_secs_f64() }));
}

async fn enqueue_single(url: &str, jobs: u64) -> Result<()> {
    let queue = Posthouse::connect(url).await?;
    let start = Instant::now();
    for n in 0..jobs {
        queue.enqueue(noop(n, 0.0)).await?;
    }
    tell_time(jobs, start);
    Ok(())
}

async fn enqueue_bulk(url: &str, jobs: u64) -> Result<()> {
    let queue = Posthouse::connect(url).await?;
    let start = Instant::now();
    let new = (0..jobs).map(|n| NewJob::of(&noop(n, 0.0))).collect::<Result<Vec<_>>>()?;
    queue.enqueue_many(&new).await?;
    tell_time(jobs, start);
    Ok(())
}

/// Calls of `batch` jobs on a fixed schedule, never more than one at a time; cut 3 seconds after the schedule's end.
async fn paced(url: &str, rate: u64, total: u64, batch: u64) -> Result<()> {
    let queue = Posthouse::connect(url).await?;
    let start = Instant::now();
    let due = |jobs: u64| Duration::from_micros(jobs * 1_000_000 / rate);
    let limit = due(total) + Duration::from_secs(3);
    let mut jobs = 0;
    while jobs < total && start.elapsed() < limit {
        tokio::time::sleep(due(jobs).saturating_sub(start.elapsed())).await;
        let t = now_ms();
        if batch == 1 {
            queue.enqueue(noop(jobs, t)).await?;
        } else {
            let new = (jobs..jobs + batch).map(|n| NewJob::of(&noop(n, t))).collect::<Result<Vec<_>>>()?;
            queue.enqueue_many(&new).await?;
        }
        jobs += batch;
    }
    tell_time(jobs, start);
    Ok(())
}

/// What the jobs do, by the variable HANDLER.
#[derive(Clone, Copy)]
enum Task {
    /// Nothing.
    Noop,
    /// Note when it starts, and how long after its enqueue.
    Stamp,
    /// Wait.
    Sleep(Duration),
}

impl Task {
    fn of_environment() -> Result<Self> {
        let text = variable("HANDLER").unwrap_or_else(|| "noop".to_owned());
        match text.split_once(':') {
            None if text == "noop" => Ok(Self::Noop),
            None if text == "stamp" => Ok(Self::Stamp),
            Some(("sleep", ms)) => Ok(Self::Sleep(Duration::from_millis(number(ms)?))),
            _ => Err(Error::config(format!("HANDLER: {text:?} is none of noop, stamp, sleep:MS"))),
        }
    }
}

/// What has happened in this process.
struct Seen {
    runs: Vec<AtomicU8>,
    done: AtomicU64,
    stamps: Mutex<Vec<(f64, f64)>>,
}

impl Seen {
    fn stamp(&self, job: &Noop) {
        let now = now_ms();
        self.stamps.lock().unwrap_or_else(PoisonError::into_inner).push((now, now - job.t));
    }

    fn ran(&self, job: &Noop) {
        if let Some(runs) = usize::try_from(job.n).ok().and_then(|n| self.runs.get(n)) {
            runs.fetch_add(1, Ordering::Relaxed);
        }
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the runs of each job, a byte each, and the stamps, a line each, beside the path of the variable OUT.
    fn write(&self) -> std::io::Result<()> {
        let Some(out) = variable("OUT") else { return Ok(()) };
        let runs: Vec<u8> = self.runs.iter().map(|runs| runs.load(Ordering::Relaxed)).collect();
        std::fs::write(format!("{out}.counts"), runs)?;
        let stamps = self.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        let lines: String = stamps.iter().map(|(at, after)| format!("{at:.3} {after:.3}\n")).collect();
        if lines.is_empty() { Ok(()) } else { std::fs::write(format!("{out}.lat"), lines) }
    }
}

/// Works until SIGTERM, then writes what it has seen.
async fn work(url: &str, config: &str) -> Result<()> {
    let builder = Worker::builder(Database::new(url)?).grace(GRACE);
    if config == "nohistory" {
        Posthouse::connect(url).await?.set_retention("default", Some(Duration::ZERO)).await?;
    }
    let builder = match config {
        "best" | "nohistory" => builder.concurrency(1_000),
        "inflight" => builder.concurrency(2_000),
        "default" => builder,
        _ => return Err(Error::config(USAGE)),
    };
    let task = Task::of_environment()?;
    let jobs = variable("MAXN").map_or(Ok(300_000), |text| number(&text))?;
    let seen = Arc::new(Seen {
        runs: (0..jobs).map(|_| AtomicU8::new(0)).collect(),
        done: AtomicU64::new(0),
        stamps: Mutex::default(),
    });
    let handling = seen.clone();
    let builder = builder.handle(move |job: Noop, _: Context| {
        let seen = handling.clone();
        async move {
            match task {
                Task::Noop => {}
                Task::Stamp => seen.stamp(&job),
                Task::Sleep(time) => tokio::time::sleep(time).await,
            }
            seen.ran(&job);
        }
    });
    println!("{}", json!({ "ev": "start", "t": now_ms() / 1e3 }));
    tokio::spawn(tell_counts(seen.clone()));
    let mut terminated = signal(SignalKind::terminate()).map_err(|e| Error::config(format!("SIGTERM: {e}")))?;
    let failed = Arc::new(OnceLock::new());
    let watching = failed.clone();
    let builder = builder.on_event(move |event| {
        if let Event::Failed { .. } | Event::Retry { .. } | Event::Lost { .. } = event {
            watching.get_or_init(|| event.to_string());
        }
    });
    builder
        .run_until(async {
            terminated.recv().await;
        })
        .await?;
    seen.write().map_err(|error| Error::config(format!("OUT: {error}")))?;
    failed.get().map_or(Ok(()), |event| Err(Error::invalid(format!("not every job went well: {event}"))))
}

async fn tell_counts(seen: Arc<Seen>) {
    let mut told = 0;
    loop {
        tokio::time::sleep(TELL).await;
        let done = seen.done.load(Ordering::Relaxed);
        if done != told {
            told = done;
            println!("{}", json!({ "c": done }));
        }
    }
}
