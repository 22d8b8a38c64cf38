//! The arguments of `posthouse job`.

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

use super::choice::{Filter, JobChoice, STATES};

pub(super) const LONG: &str = "Look at jobs and manage them.

A job is queued, running, waiting, done, failed or cancelled. Ids are what `posthouse enqueue` answered.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse job list --state failed --kind summarize
  posthouse job show 42
  posthouse job wait 42 43 --timeout 5m
  posthouse job explain 42
  posthouse job cancel --queue mail --created-before 2d --dry-run";

#[derive(Debug, Subcommand)]
pub(crate) enum Job {
    List(JobList),
    Show(JobShow),
    Wait(JobWait),

    Cancel(JobCancel),
    Retry(JobRetry),
    Reprioritise(JobReprioritise),
    Purge(JobPurge),

    /// Say why a job is where it is, and what would move it
    ///
    /// Answers "why does it not run?": not due until then, nobody serves its kind, others are before it, …
    #[command(after_long_help = "EXAMPLES:
  posthouse job explain 42")]
    Explain {
        /// The job
        id: i64,
    },
}

/// Cancel jobs, by id or by what they have in common
///
/// A job in line is cancelled at once. Of a running one the worker is told; it stops the work. All conditions that are given must
/// hold; without ids or conditions it takes --all. With ids the exit code is 1 if one of the jobs was final already.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job cancel 42
  posthouse job cancel --queue mail --created-before 2d --dry-run      says which it would be
  posthouse job cancel --queue mail --created-before 2d
  posthouse job cancel --tenant acme --state queued")]
pub(crate) struct JobCancel {
    #[command(flatten)]
    pub(crate) choice: JobChoice,
}

/// Run jobs again, or sooner, by id or by what they have in common
///
/// A job that waits for its time is due now; one that failed or was cancelled goes back into line, with its history. Cancelled
/// ones must be named by id, or asked for with `--state cancelled`. With ids the exit code is 1 if one of the jobs is running or
/// done. `posthouse dead redrive` can make changes to failed jobs, and keep a rate.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job retry 42
  posthouse job retry --queue mail --class timeout
  posthouse job retry --kind report --state cancelled --dry-run")]
pub(crate) struct JobRetry {
    #[command(flatten)]
    pub(crate) choice: JobChoice,
}

/// Give queued jobs another priority
///
/// They stand in line as if they had been put in with it. Jobs that run keep theirs.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job reprioritise --to 10 --tenant acme --kind report
  posthouse job reprioritise --to -5 42 43")]
pub(crate) struct JobReprioritise {
    #[command(flatten)]
    pub(crate) choice: JobChoice,
    /// The new priority; smaller runs first
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) to: i32,
}

/// Remove jobs that are done, failed or cancelled for good
///
/// Payloads, results and errors go with them. Without ids it needs --yes; without that it says what it would remove, removes
/// nothing and ends with exit code 1. Jobs that are not final must be cancelled first.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job purge 42
  posthouse job purge --queue mail --state done --created-before 30d       says how many it would remove
  posthouse job purge --queue mail --state done --created-before 30d --yes")]
pub(crate) struct JobPurge {
    #[command(flatten)]
    pub(crate) choice: JobChoice,
    /// Do it, without ids as well
    #[arg(long)]
    pub(crate) yes: bool,
}

/// List jobs, newest first
///
/// All filters that are given must hold. The next page begins with `--before` and the smallest id of this one.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job list
  posthouse job list --state running --queue default
  posthouse job list --tenant acme --limit 200 --before 4711
  posthouse job list --state failed --json | jq -r '.[] | [.id, .error] | @tsv'")]
pub(crate) struct JobList {
    /// Only in this state
    #[arg(long, value_parser = PossibleValuesParser::new(STATES))]
    pub(crate) state: Option<String>,
    #[command(flatten)]
    pub(crate) filter: Filter,
    #[command(flatten)]
    pub(crate) page: Page,
}

// What is written on this would become the help of the commands that have it.
#[derive(Debug, Args)]
pub(crate) struct Page {
    /// At most so many
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
    /// Only with a smaller id than this
    #[arg(long, value_name = "ID")]
    pub(crate) before: Option<i64>,
}

/// Show all of a job: payload, result, every error
///
/// Long texts are cut unless --full is given. With --json nothing is cut.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job show 42
  posthouse job show 42 --full
  posthouse job show 42 --json | jq .result")]
pub(crate) struct JobShow {
    /// The job
    pub(crate) id: i64,
    /// Cut nothing
    #[arg(long)]
    pub(crate) full: bool,
}

/// Wait until jobs are final, and print their results
///
/// Exit code 0 if all are done; 1 if one failed, was cancelled, does not exist, or the timeout is over. A job of a queue that
/// keeps no history can be waited for until ten minutes after its end. When one is in line after five seconds, it is said on
/// stderr, once, what it waits for; not with --json.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse job wait 42
  posthouse job wait 42 43 --timeout 5m --json | jq '.[].result'
  posthouse job wait $(posthouse enqueue summarize @letter.json --json | jq .id)")]
pub(crate) struct JobWait {
    /// The jobs
    #[arg(required = true, value_name = "ID")]
    pub(crate) ids: Vec<i64>,
    /// Give up after this time, such as 30s or 5m; with 0s look once. Default: never
    #[arg(long, value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) timeout: Option<Duration>,
}
