//! The workers of the demo: processes of their own that run `posthouse work --json`, and what they say.
//!
//! Each has a pipe from us as its standard input and ends when that does, so that none outlives a killed demo.

use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::trouble::LEASE;
use crate::args::STOP_AT_EOF;
use crate::failure::{Failure, Result};

/// Jobs at once in each worker.
const CONCURRENCY: u32 = 4;
/// How long the workers may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// A line of a worker.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct Said {
    /// What happened, as in `work --json`.
    pub(super) event: String,
    /// The job it is about.
    pub(super) job: Option<i64>,
    /// Which attempt.
    pub(super) attempt: Option<u32>,
    /// When the job comes again.
    pub(super) delay_ms: Option<u64>,
    /// What went wrong.
    pub(super) error: Option<String>,
    /// Why it was put off.
    pub(super) reason: Option<String>,
    worker: Option<String>,
}

/// What comes out of the workers.
#[derive(Debug)]
pub(super) enum News {
    /// A worker said something.
    Said(usize, Said),
    /// A worker complained on standard error.
    Complained(usize, String),
    /// A worker's output ended.
    Ended(usize),
}

/// How a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Not registered yet.
    Starting,
    Working,
    /// We killed it.
    Killed,
    /// It ended by itself, which it should not.
    Gone,
}

/// One worker.
#[derive(Debug)]
pub(super) struct Hand {
    child: Child,
    /// Held open: its end is the worker's end.
    _lifeline: Option<ChildStdin>,
    pub(super) pid: u32,
    /// Its id in the database, as soon as it is registered.
    pub(super) id: Option<String>,
    pub(super) state: State,
    /// The jobs it runs.
    pub(super) holds: BTreeSet<i64>,
    pub(super) done: u32,
}

/// How to start a worker.
#[derive(Debug)]
pub(super) struct Recipe {
    /// Where the jobs are.
    pub(super) database_url: String,
    /// Where the model is, as arguments of `work`.
    pub(super) model: Vec<String>,
}

/// All workers. Dropped: all are killed.
#[derive(Debug)]
pub(super) struct Crew {
    recipe: Recipe,
    pub(super) hands: Vec<Hand>,
    news: mpsc::UnboundedReceiver<News>,
    tell: mpsc::UnboundedSender<News>,
}

impl Crew {
    pub(super) fn new(recipe: Recipe) -> Self {
        let (tell, news) = mpsc::unbounded_channel();
        Self { recipe, hands: Vec::new(), news, tell }
    }

    /// Starts one more worker.
    pub(super) fn hire(&mut self) -> Result<()> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(program);
        command.args([
            "work",
            "--json",
            "--concurrency",
            &CONCURRENCY.to_string(),
            "--poll-ms",
            "250",
            "--grace-ms",
            "2000",
        ]);
        command.args(["--lease-ms", &LEASE.as_millis().to_string()]).args(&self.recipe.model);
        command.env("DATABASE_URL", &self.recipe.database_url).env(STOP_AT_EOF, "1");
        for name in ["POSTHOUSE_LEASE_MS", "POSTHOUSE_LISTEN_URL"] {
            command.env_remove(name);
        }
        command.env("POSTHOUSE_LOG_FORMAT", "text");
        // What becomes of jobs is on the screen already; alerts would say it again.
        if std::env::var_os("POSTHOUSE_LOG").is_none() {
            command.env("POSTHOUSE_LOG", "error");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is ours to hear; the workers end when we say so.
        let mut child = command.process_group(0).kill_on_drop(true).spawn()?;
        let number = self.hands.len();
        if let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) {
            listen(number, output, errors, self.tell.clone());
        }
        let pid = child.id().unwrap_or_default();
        let (state, holds) = (State::Starting, BTreeSet::new());
        let lifeline = child.stdin.take();
        self.hands.push(Hand { child, _lifeline: lifeline, pid, id: None, state, holds, done: 0 });
        Ok(())
    }

    /// The next thing a worker says. Waits for ever when there is none.
    pub(super) async fn news(&mut self) -> News {
        let Some(news) = self.news.recv().await else { return std::future::pending().await };
        self.note(&news);
        news
    }

    /// Keeps count of who holds what.
    fn note(&mut self, news: &News) {
        match news {
            News::Said(number, said) => {
                let hand = &mut self.hands[*number];
                if said.event == "registered" {
                    hand.id.clone_from(&said.worker);
                    hand.state = State::Working;
                }
                match (said.job, said.event.as_str()) {
                    (Some(job), "started") => _ = hand.holds.insert(job),
                    (Some(job), event) => {
                        hand.holds.remove(&job);
                        hand.done += u32::from(event == "done");
                    }
                    (None, _) => {}
                }
            }
            News::Ended(number) if self.hands[*number].state != State::Killed => {
                self.hands[*number].state = State::Gone;
            }
            News::Complained(..) | News::Ended(_) => {}
        }
    }

    /// The working one with the most jobs in hand, and how many.
    pub(super) fn busiest(&self) -> Option<(usize, usize)> {
        let working = self.hands.iter().enumerate().filter(|(_, hand)| hand.state == State::Working);
        working.map(|(number, hand)| (number, hand.holds.len())).max_by_key(|(_, holds)| *holds)
    }

    /// Stops a worker in its tracks; it can go on.
    pub(super) fn freeze(&self, number: usize) {
        self.signal(number, Signal::SIGSTOP);
    }

    /// Lets it go on.
    pub(super) fn thaw(&self, number: usize) {
        self.signal(number, Signal::SIGCONT);
    }

    /// Kills it, as `kill -9` does.
    pub(super) fn kill(&mut self, number: usize) {
        self.hands[number].state = State::Killed;
        self.signal(number, Signal::SIGKILL);
    }

    fn signal(&self, number: usize, signal: Signal) {
        // Not collected before the end, so the number cannot be another process's by now.
        if let Some(pid) = self.hands[number].child.id().and_then(|pid| i32::try_from(pid).ok()) {
            kill(Pid::from_raw(pid), signal).ok();
        }
    }

    /// Whether any is left that works.
    pub(super) fn works(&self) -> bool {
        self.hands.iter().any(|hand| matches!(hand.state, State::Starting | State::Working))
    }

    /// Ends all of them in order. An error names one that did not end well.
    pub(super) async fn dismiss(mut self) -> Result<()> {
        for number in 0..self.hands.len() {
            self.signal(number, Signal::SIGTERM);
        }
        let deadline = Instant::now() + STOP_TIMEOUT;
        for (number, hand) in self.hands.iter_mut().enumerate().filter(|(_, hand)| hand.state != State::Killed) {
            match timeout_at(deadline, hand.child.wait()).await {
                Ok(Ok(status)) if status.success() => {}
                Ok(Ok(status)) => return Err(Failure::new(format!("worker {} ended badly: {status}", number + 1))),
                Ok(Err(error)) => return Err(error.into()),
                Err(_) => return Err(Failure::new(format!("worker {} did not end when told to", number + 1))),
            }
        }
        Ok(())
    }
}

/// Passes on what a worker says, line by line.
fn listen(
    number: usize,
    output: impl AsyncRead + Send + Unpin + 'static,
    errors: impl AsyncRead + Send + Unpin + 'static,
    tell: mpsc::UnboundedSender<News>,
) {
    // Nobody listens any more when sending fails; the worker is about to be killed then.
    let complain = tell.clone();
    tokio::spawn(async move {
        let mut lines = BufReader::new(errors).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            complain.send(News::Complained(number, line)).ok();
        }
    });
    tokio::spawn(async move {
        let mut lines = BufReader::new(output).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let said = serde_json::from_str(&line);
            tell.send(said.map_or_else(|_| News::Complained(number, line), |said| News::Said(number, said))).ok();
        }
        tell.send(News::Ended(number)).ok();
    });
}
