//! A part of the benchmark that runs in a process of its own: a worker, or the simulated provider. So its memory is its own,
//! and it competes for the processors as it would in earnest.
//!
//! The benchmark starts the program it runs in again, with [`ARGUMENT`]. The first line of the new process's input says what to
//! be; it gets ready, says so, and begins at the next line; at the end of its input it ends, so none outlives the benchmark.
//! What it says is a JSON line each. `crew` is the other side.

use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use posthouse::store::Database;
use posthouse::worker::{Builder, Event};
use posthouse::{Context, Worker};
use posthouse_llm::sim::{Delay, Script, Sim};
use posthouse_llm::{Attempt, CHAT, Config, Engine};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc};

use crate::error::{Error, Result};
use crate::jobs::Noop;
use crate::machine::{peak_kib, resident_kib};

/// The first argument of a program that is to be a part: it calls [`run`] and does nothing else.
pub const ARGUMENT: &str = "bench-part";

/// How often a worker tells how many jobs it has done.
const TELL: Duration = Duration::from_millis(10);
/// When the benchmark has gone away, nobody needs the jobs any more.
const GRACE: Duration = Duration::from_millis(100);
/// Open files of a worker beside those of its calls: Postgres, libraries.
const OTHER_FILES: u64 = 200;
/// Open files of the simulated provider: more than it is ever called at once.
const SIM_FILES: u64 = 20_000;
/// The model that the simulated provider is asked for; it takes any.
pub(crate) const MODEL: &str = "sim";

/// What a part is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Task {
    Work(Work),
    /// The simulated provider.
    Sim {
        /// Of every answer.
        latency: Duration,
    },
}

/// A worker that works until its input ends.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Work {
    pub(crate) database_url: String,
    /// Jobs at once.
    pub(crate) slots: u32,
    pub(crate) jobs: Jobs,
}

/// What the jobs do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Jobs {
    Nothing,
    /// Wait so long.
    Wait(Duration),
    /// Ask the provider with this base URL. `warm_up`: once before the work begins.
    Ask {
        base_url: String,
        warm_up: bool,
    },
}

/// A line of a part.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Said {
    Ready(Ready),
    /// So many jobs are done and recorded by now.
    Done(u32),
    /// The last line of a worker.
    Ended(Ended),
}

/// A part before it begins.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ready {
    /// Of the simulated provider.
    pub(crate) base_url: Option<String>,
    /// Memory in use.
    pub(crate) resident_kib: Option<f64>,
}

/// What a worker did. Times are in seconds since 1970.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) done: u32,
    /// When it was told to begin.
    pub(crate) began_at: f64,
    /// When it heard that the last of its jobs was recorded; 0 if there was none.
    pub(crate) last_at: f64,
    /// The most memory that was ever in use.
    pub(crate) peak_kib: Option<f64>,
}

/// Whether this process was started as a part.
#[must_use]
pub fn is_wanted() -> bool {
    std::env::args_os().nth(1).is_some_and(|argument| argument == ARGUMENT)
}

/// Is a part to its end. What goes wrong is said on standard error.
pub async fn run() -> ExitCode {
    match play().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{ARGUMENT}: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn play() -> Result<()> {
    let mut input = input()?;
    let Some(task) = input.recv().await else { return Ok(()) };
    let task = serde_json::from_str(&task)
        .map_err(|error| Error::Stuck(format!("its input: {error}; `posthouse bench` starts this by itself")))?;
    match task {
        Task::Work(task) => work(&task, input).await,
        Task::Sim { latency } => provide(latency, input).await,
    }
}

/// The lines of the input. They are read on a thread, which does not keep a process that has failed from ending.
fn input() -> Result<mpsc::UnboundedReceiver<String>> {
    let (tell, lines) = mpsc::unbounded_channel();
    let read =
        move || std::io::stdin().lines().map_while(std::io::Result::ok).try_for_each(|line| tell.send(line)).ok();
    let reader = std::thread::Builder::new().name("bench-input".to_owned()).spawn(read);
    reader.map_err(|error| Error::Stuck(format!("a thread for the input: {error}")))?;
    Ok(lines)
}

fn say(said: &Said) {
    if let Ok(line) = serde_json::to_string(said) {
        // When nobody listens any more, the input is about to end too.
        let _ = writeln!(std::io::stdout().lock(), "{line}");
    }
}

async fn provide(latency: Duration, mut input: mpsc::UnboundedReceiver<String>) -> Result<()> {
    allow_files(SIM_FILES);
    let script = Script { latency: Delay::fixed(latency), ..Script::default() };
    let sim = Sim::start(script).await.map_err(|error| Error::Stuck(format!("the simulated provider: {error}")))?;
    say(&Said::Ready(Ready { base_url: Some(sim.base_url()), resident_kib: resident_kib() }));
    while input.recv().await.is_some() {}
    Ok(())
}

async fn work(task: &Work, mut input: mpsc::UnboundedReceiver<String>) -> Result<()> {
    let seen = Arc::new(Seen::default());
    let worker = builder(task).await?.on_event({
        let seen = seen.clone();
        move |event| seen.note(event)
    });
    say(&Said::Ready(Ready { base_url: None, resident_kib: resident_kib() }));
    if input.recv().await.is_none() {
        return Ok(());
    }
    let began_at = Duration::from_micros(now()).as_secs_f64();
    let telling = tokio::spawn(tell(seen.clone()));
    let end = async { while input.recv().await.is_some() {} };
    let over = async {
        tokio::select! {
            () = end => {}
            () = seen.wrong_now.notified() => {}
        }
    };
    worker.run_until(over).await?;
    telling.abort();
    if let Some(event) = seen.wrong.get() {
        return Err(Error::Stuck(format!("not done at its first attempt, so the figure would mean nothing: {event}")));
    }
    say(&Said::Ended(Ended {
        done: seen.done.load(Ordering::Relaxed),
        began_at,
        last_at: Duration::from_micros(seen.last_at.load(Ordering::Relaxed)).as_secs_f64(),
        peak_kib: peak_kib(),
    }));
    Ok(())
}

async fn builder(task: &Work) -> Result<Builder> {
    let worker = Worker::builder(Database::new(&task.database_url)?).concurrency(task.slots).grace(GRACE);
    Ok(match &task.jobs {
        Jobs::Nothing => worker.handle(|_: Noop, _: Context| async {}),
        &Jobs::Wait(time) => worker.handle(move |_: Noop, _: Context| tokio::time::sleep(time)),
        Jobs::Ask { base_url, warm_up } => {
            allow_files(u64::from(task.slots) + OTHER_FILES);
            let config = Config::single(base_url, MODEL, None);
            let engine = config.and_then(|config| Engine::from_config(&config));
            let engine = engine.map_err(|error| Error::Stuck(format!("the provider: {error}")))?;
            if *warm_up {
                ask_once(&engine).await?;
            }
            engine.register(worker)
        }
    })
}

/// Asks once. Of an endpoint that was silent nothing is known, so calls to it start slowly; and what the first call needs of memory
/// (code, certificates) is not that of the calls.
async fn ask_once(engine: &Engine) -> Result<()> {
    let payload = r#"{"messages":[{"role":"user","content":"Are you there?"}]}"#;
    let answer = engine.run(CHAT, payload, Attempt::default()).await;
    answer.map(drop).map_err(|error| Error::Stuck(format!("the provider: {error}")))
}

/// Asks for so many open files. Where they are not to be had, a call that finds none left fails, and the scenario with it.
fn allow_files(number: u64) {
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, soft.max(number.min(hard)), hard);
    }
}

/// What has happened in a worker.
#[derive(Default)]
struct Seen {
    done: AtomicU32,
    /// In microseconds since 1970.
    last_at: AtomicU64,
    /// The first event that should not have been.
    wrong: OnceLock<String>,
    wrong_now: Notify,
}

impl Seen {
    fn note(&self, event: &Event<'_>) {
        match event {
            Event::Done { .. } => {
                self.last_at.fetch_max(now(), Ordering::Relaxed);
                self.done.fetch_add(1, Ordering::Relaxed);
            }
            Event::Failed { .. } | Event::Retry { .. } | Event::Snoozed { .. } | Event::Lost { .. } => {
                self.wrong.get_or_init(|| event.to_string());
                self.wrong_now.notify_one();
            }
            _ => {}
        }
    }
}

/// Microseconds since 1970.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

async fn tell(seen: Arc<Seen>) {
    let mut told = 0;
    loop {
        tokio::time::sleep(TELL).await;
        let done = seen.done.load(Ordering::Relaxed);
        if done != told {
            told = done;
            say(&Said::Done(done));
        }
    }
}
