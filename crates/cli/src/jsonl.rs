//! `posthouse enqueue --jsonl`: a job a line, in bulk. Lines are sent in batches, each all or nothing; if the database refuses a
//! batch, it is halved until the line is found, so that the lines before it are in and the answer names it. A signal ends it
//! between two batches, and it says how to go on.

mod interrupt;
mod lines;
mod read;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use posthouse::NewJob;
use posthouse::store::Store;
use posthouse::trace::{self, Parent};
use serde_json::json;

use crate::args::{Enqueue, Global};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output;
use crate::style::clean;
use crate::traces;
use interrupt::Interrupt;
use lines::Lines;

/// Jobs in one batch.
const BATCH_JOBS: usize = 1_000;
/// Bytes of lines in one batch: large payloads go in smaller ones.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// How often a batch is tried that Postgres could not do just now, and did not do.
const TRIES: u32 = 5;

/// Enqueues the lines of a file.
pub(crate) async fn run(file: &Path, args: &Enqueue, global: &Global) -> Result<ExitCode> {
    let mut lines = Lines::open(file)?;
    let store = connect::store(global).await?;
    let bar = bar(lines.size());
    let mut bulk = Bulk {
        store,
        bar,
        interrupt: Interrupt::listen()?,
        keep_going: args.keep_going,
        batch: Batch::default(),
        through: args.skip,
        sent: 0,
        duplicates: 0,
        refused: 0,
    };
    let outcome = bulk.all(&mut lines, args).await;
    bulk.bar.finish_and_clear();
    let line = lines.number();
    if global.json {
        output::json(
            &json!({ "enqueued": bulk.sent, "duplicates": bulk.duplicates, "refused": bulk.refused, "lines": line }),
        )?;
    } else {
        let duplicates = match bulk.duplicates {
            0 => String::new(),
            1 => ", 1 duplicate".to_owned(),
            n => format!(", {n} duplicates"),
        };
        let jobs = if bulk.sent == 1 { "job" } else { "jobs" };
        output::line(format_args!("{} {jobs} enqueued{duplicates}", bulk.sent))?;
    }
    outcome?;
    if bulk.refused > 0 {
        let jobs = if bulk.refused == 1 { "1 line was" } else { &format!("{} lines were", bulk.refused) };
        return Err(Failure::new(format!("{jobs} refused, and not enqueued")));
    }
    Ok(ExitCode::SUCCESS)
}

/// It is one of the lines that is to blame: it cannot be taken, or its dedupe key is held.
fn is_refused(error: &posthouse::Error) -> bool {
    error.is_invalid() || error.is_duplicate()
}

/// A bar by bytes where the size is known, else a count.
fn bar(size: Option<u64>) -> ProgressBar {
    let (bar, template) = match size {
        Some(size) => (ProgressBar::new(size), "{bar:30} {percent}% {msg} ({eta} left)"),
        None => (ProgressBar::no_length(), "{spinner} {msg}"),
    };
    // The templates are constant and sound.
    bar.with_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Jobs that are sent together, and the numbers of their lines.
#[derive(Default)]
struct Batch {
    jobs: Vec<NewJob>,
    lines: Vec<u64>,
    bytes: usize,
}

struct Bulk {
    store: Store,
    bar: ProgressBar,
    interrupt: Interrupt,
    keep_going: bool,
    batch: Batch,
    /// All lines up to here are enqueued or refused.
    through: u64,
    sent: u64,
    duplicates: u64,
    refused: u64,
}

impl Bulk {
    async fn all(&mut self, lines: &mut Lines, args: &Enqueue) -> Result<()> {
        while let Some((number, line)) = lines.next()? {
            if number <= args.skip {
                continue;
            }
            self.interrupt.check(self.through)?;
            match line.and_then(|line| read::job(line, args).map(|job| (job, line.len()))) {
                Ok((job, bytes)) => {
                    self.batch.jobs.push(job);
                    self.batch.lines.push(number);
                    self.batch.bytes += bytes;
                }
                Err(why) => {
                    // What came before it goes first, so that "nothing after it" is all there is to know.
                    self.flush().await?;
                    self.refuse(number, &why)?;
                }
            }
            if self.batch.jobs.len() >= BATCH_JOBS || self.batch.bytes >= BATCH_BYTES {
                self.flush().await?;
                self.bar.set_position(lines.bytes());
            }
        }
        // The end of a pipe may be its writer's answer to the same Ctrl-C.
        if !self.batch.jobs.is_empty() {
            self.interrupt.check(self.through)?;
        }
        self.flush().await
    }

    /// Sends the batch.
    async fn flush(&mut self) -> Result<()> {
        let Batch { jobs, lines, .. } = std::mem::take(&mut self.batch);
        let outer = traces::of_shell();
        let (jobs, _span) = trace::sending_many(jobs, Parent::Stored(outer.as_deref()));
        let mut parts = vec![(jobs.as_slice(), lines.as_slice())];
        while let Some((jobs, lines)) = parts.pop() {
            let (Some(first), Some(last)) = (lines.first(), lines.last()) else { continue };
            match self.send(jobs).await {
                Ok(()) => self.through = *last,
                Err(error) if is_refused(&error) && jobs.len() > 1 => {
                    let middle = jobs.len() / 2;
                    let (jobs, lines) = (jobs.split_at(middle), lines.split_at(middle));
                    // The last one in is the first one out.
                    parts.extend([(jobs.1, lines.1), (jobs.0, lines.0)]);
                }
                Err(error) if is_refused(&error) => {
                    let why = error.to_string();
                    let why = why.strip_prefix("job 1 of the array: ").unwrap_or(&why);
                    self.refuse(*first, why)?;
                }
                Err(error) => return Err(Self::broken(error, *first, *last)),
            }
        }
        Ok(())
    }

    async fn send(&mut self, jobs: &[NewJob]) -> posthouse::Result<()> {
        let mut tries = 1;
        let answers = loop {
            match self.store.enqueue_many(jobs).await {
                // A deadlock or a lock timeout: certainly not done.
                Err(error) if error.is_transient() && !error.is_disconnected() && tries < TRIES => {
                    tokio::time::sleep(Duration::from_millis(100) * tries).await;
                    tries += 1;
                }
                answer => break answer?,
            }
        };
        let duplicates = answers.iter().filter(|answer| answer.duplicate).count() as u64;
        self.duplicates += duplicates;
        self.sent += answers.len() as u64 - duplicates;
        self.bar.set_message(format!("{} jobs", self.sent));
        self.bar.tick();
        Ok(())
    }

    /// A line that cannot be enqueued: the end, or just a remark.
    fn refuse(&mut self, number: u64, why: &str) -> Result<()> {
        if self.keep_going {
            self.refused += 1;
            self.through = number;
            self.bar.suspend(|| output::note(format_args!("line {number}: {}", clean(why))));
            return Ok(());
        }
        Err(Failure::new(format!("line {number}: {why}; it and everything after it was not enqueued")).hint(format!(
            "correct it and go on with `--skip {}`, or go on without it with `--skip {number}`\n\
             or let --keep-going report all bad lines and enqueue the others",
            number - 1
        )))
    }

    /// No word from the database: these lines may be in or not, the ones before are.
    fn broken(error: posthouse::Error, first: u64, last: u64) -> Failure {
        if !error.is_disconnected() {
            return Failure::new(format!(
                "lines {first} to {last}: {error}; they and everything after was not enqueued"
            ))
            .hint(format!("go on with `--skip {}`", first - 1));
        }
        Failure::new(format!("lines {first} to {last} may be enqueued or not, everything after is not: {error}")).hint(format!(
            "see with `posthouse job list` whether they are there; go on with `--skip {}`, or `--skip {last}` if they are\n\
             with a dedupe_key in each line, sending lines again does no harm",
            first - 1
        ))
    }
}
