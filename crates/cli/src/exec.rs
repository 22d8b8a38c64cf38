//! `--exec KIND='command'`: any program as the handler of a kind. One attempt runs `sh -c command` once.
//!
//! The payload comes on standard input; `POSTHOUSE_JOB_ID`, `POSTHOUSE_ATTEMPT`, `POSTHOUSE_MAX_ATTEMPTS`,
//! `POSTHOUSE_KIND`, `POSTHOUSE_QUEUE`, `POSTHOUSE_TENANT` and `POSTHOUSE_FENCE` are in the environment, and `POSTHOUSE_MODEL` where a
//! budget is spent and its gate names a model to use instead. How it ends decides:
//!
//! ```text
//! exit 0            done; the last JSON on standard output is the result, else the text of it
//! exit 64 or 65     failed for good (EX_USAGE, EX_DATAERR)
//! exit 75           not now (EX_TEMPFAIL): again after 30 s, or after {"delay_ms": …} on a line of its own; uncharged
//! any other exit    retry, with the last lines of standard error
//! a signal          retry, with the name of the signal
//! ```
//!
//! The program and whatever it started end with the attempt: at its timeout, when the job is cancelled or lost, when the
//! worker shuts down or is killed, and also when the program itself has ended.

mod group;
mod output;

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use nix::sys::signal::Signal;
use posthouse::context::{CancelReason, Context};
use posthouse::outcome::{JobError, Outcome};
use posthouse_llm::redact::Redactor;
use serde_json::json;
use serde_json::value::RawValue;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::{Instant, sleep_until, timeout};

pub(crate) use group::wait_for_endings;

use crate::args::STOP_AT_EOF;
use crate::traces;
use group::{GRACE, Group};
use output::{NotNow, Tail, last_lines, result};

/// Of the standard output this much is kept, from its end: what a result may have.
const OUTPUT_KEPT: usize = 8 << 20;
/// Of the standard error this much is kept.
const ERRORS_KEPT: usize = 64 << 10;
/// Of the standard error so many lines and bytes become the error of the attempt.
const ERROR_LINES: usize = 10;
const ERROR_BYTES: usize = 4 << 10;
/// After the program has ended: how long to wait for the end of its output, which a process it left behind may hold open.
const DRAIN: Duration = Duration::from_secs(1);
/// The wait after exit 75 without a `delay_ms`.
const NOT_NOW_DELAY: Duration = Duration::from_secs(30);

/// The command starts when it reads a line, which is written when the watchdog knows of it: there is no moment in which it
/// runs and would outlive a killed worker. A shell reads a line from a pipe byte by byte, so the input behind it is untouched.
const GATE: &str = r#"read -r go && exec sh -c "$1""#;
const GO: &[u8] = b"go\n";

/// EX_USAGE and EX_DATAERR of sysexits.h: the input is wrong and stays wrong.
const EXIT_NEVER: [i32; 2] = [64, 65];
/// EX_TEMPFAIL of sysexits.h.
const EXIT_NOT_NOW: i32 = 75;

/// Runs the command for one attempt.
pub(crate) async fn attempt(command: Arc<str>, payload: Box<RawValue>, context: Context) -> Outcome {
    let mut environment = vec![
        ("POSTHOUSE_JOB_ID", context.job_id().to_string()),
        ("POSTHOUSE_ATTEMPT", context.attempt().to_string()),
        ("POSTHOUSE_MAX_ATTEMPTS", context.max_attempts().to_string()),
        ("POSTHOUSE_KIND", context.kind().to_owned()),
        ("POSTHOUSE_QUEUE", context.queue().to_owned()),
        ("POSTHOUSE_TENANT", context.tenant().to_owned()),
        ("POSTHOUSE_FENCE", context.fence().to_string()),
    ];
    environment.extend(traces::for_program(&context));
    environment.extend(context.model_instead().map(|model| ("POSTHOUSE_MODEL", model.to_owned())));
    // A shutdown leaves the program its time; when that is over this future is dropped.
    let cancelled = async {
        if context.cancelled().await != CancelReason::User {
            std::future::pending::<()>().await;
        }
    };
    run(&command, payload.get(), &environment, cancelled).await
}

/// Runs a command to its end, or ends it when `cancelled` is ready.
async fn run(
    command: &str,
    input: &str,
    environment: &[(&str, String)],
    cancelled: impl Future<Output = ()>,
) -> Outcome {
    let mut shell = Command::new("sh");
    shell.args(["-c", GATE, "sh", command]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    shell.env_remove(STOP_AT_EOF).env_remove("POSTHOUSE_MODEL");
    // The trace that this worker was started in is none of the job.
    shell.env_remove("TRACEPARENT").env_remove("TRACESTATE");
    for (name, value) in environment {
        // A NUL cannot be in an environment; it would fail the start.
        shell.env(name, value.replace('\0', "\u{fffd}"));
    }
    let ran = async {
        let mut group = Group::spawn(&mut shell)?;
        let (mut output, mut errors) = (Tail::new(OUTPUT_KEPT), Tail::new(ERRORS_KEPT));
        let status = watch(&mut group, input, &mut output, &mut errors, cancelled).await?;
        Ok(match status {
            Some(status) => judge(status, &mut output, &mut errors),
            None => Outcome::Cancelled,
        })
    };
    ran.await.unwrap_or_else(|error: std::io::Error| {
        Outcome::retry(JobError::new("exec", format!("the command could not be run with sh: {error}")))
    })
}

/// Feeds and reads the program until it ends. `None`: it was cancelled, and has been told to end.
async fn watch(
    group: &mut Group,
    input: &str,
    output: &mut Tail,
    errors: &mut Tail,
    cancelled: impl Future<Output = ()>,
) -> std::io::Result<Option<ExitStatus>> {
    let id = group.id();
    let child = group.child()?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = async {
        if let Some(mut stdin) = stdin {
            // A program that does not read its input has its reasons; dropping our end is the end of the input.
            let input = [GO, input.as_bytes()];
            for part in input {
                stdin.write_all(part).await.ok();
            }
        }
    };
    let read_output = async {
        if let Some(stdout) = stdout {
            output.fill(stdout).await;
        }
    };
    let read_errors = async {
        if let Some(stderr) = stderr {
            errors.fill(stderr).await;
        }
    };
    let talk = async {
        tokio::join!(feed, read_output, read_errors);
    };
    tokio::pin!(talk, cancelled);
    let (mut talking, mut told_to_end) = (true, None);
    loop {
        tokio::select! {
            biased;
            status = child.wait() => {
                let status = status?;
                if told_to_end.is_some() {
                    return Ok(None);
                }
                if talking && timeout(DRAIN, &mut talk).await.is_err() {
                    tracing::debug!("the program left something behind that holds its output open");
                }
                return Ok(Some(status));
            }
            () = &mut cancelled, if told_to_end.is_none() => {
                group::terminate(id);
                told_to_end = Some(Instant::now() + GRACE);
            }
            () = past(told_to_end) => return Ok(None),
            () = &mut talk, if talking => talking = false,
        }
    }
}

/// Waits for a time; for ever if there is none.
async fn past(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// From the end of the program to the outcome of the attempt.
fn judge(status: ExitStatus, output: &mut Tail, errors: &mut Tail) -> Outcome {
    if status.success() {
        return match result(output) {
            Ok(result) => Outcome::Done(result),
            Err(error) => {
                Outcome::fail(JobError::new("result", format!("the output cannot be written as JSON: {error}")))
            }
        };
    }
    let (printed, said) = (output.text(), errors.text());
    if status.code() == Some(EXIT_NOT_NOW) {
        return not_now(&printed, &said);
    }
    // Some programs complain on standard output.
    let complaint = match last_lines(&said, ERROR_LINES, ERROR_BYTES) {
        "" => last_lines(&printed, ERROR_LINES, ERROR_BYTES),
        complaint => complaint,
    };
    let ended = describe(status);
    let message = clean(&if complaint.is_empty() { ended } else { format!("{ended}: {complaint}") });
    let detail = json!({ "exit_code": status.code(), "signal": status.signal().map(signal_name) });
    let class = if status.signal().is_some() { "signal" } else { "exit" };
    let error = JobError::new(class, message).with_detail(detail);
    match status.code() {
        Some(code) if EXIT_NEVER.contains(&code) => Outcome::fail(error),
        _ => Outcome::retry(error),
    }
}

fn not_now(printed: &str, said: &str) -> Outcome {
    let told = NotNow::find(said).or_else(|| NotNow::find(printed));
    let delay = told.as_ref().map_or(NOT_NOW_DELAY, NotNow::delay);
    let text = said.lines().rev().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('{'));
    let reason = told.and_then(NotNow::reason).or_else(|| text.map(str::to_owned));
    let reason = reason.unwrap_or_else(|| format!("exit status {EXIT_NOT_NOW}: not now"));
    Outcome::snooze(delay, clean(last_lines(&reason, 1, ERROR_BYTES)))
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code @ 129..=159), _) => {
            format!("exit status {code} (the last command was killed by {})", signal_name(code - 128))
        }
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by {}", signal_name(signal)),
        (None, None) => format!("ended without a status ({status})"),
    }
}

fn signal_name(number: i32) -> String {
    Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |signal| signal.as_str().to_owned())
}

/// Programs print keys more often than one would think; errors are stored and shown.
fn clean(text: &str) -> String {
    static REDACTOR: LazyLock<Redactor> = LazyLock::new(Redactor::default);
    REDACTOR.clean(text)
}

#[cfg(test)]
mod tests;
