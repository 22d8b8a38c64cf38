//! The arguments of `posthouse job`.

use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Subcommand};

pub(super) const LONG: &str = "Look at jobs and manage them.

A job is queued, running, waiting, done, failed or cancelled. Ids are what `posthouse enqueue` answered.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse job list --state failed --kind summarize
  posthouse job show 42
  posthouse job wait 42 43 --timeout 5m
  posthouse job explain 42";

const STATES: [&str; 6] = ["queued", "running", "waiting", "done", "failed", "cancelled"];

#[derive(Debug, Subcommand)]
pub(crate) enum Job {
    List(JobList),
    Show(JobShow),
    Wait(JobWait),

    /// Cancel jobs
    ///
    /// A job in line is cancelled at once. Of a running one the worker is told; it stops the work. Exit code 1 if one of the
    /// jobs was final already.
    #[command(after_long_help = "EXAMPLES:
  posthouse job cancel 42
  posthouse job list --state queued --kind report --json | jq '.[].id' | xargs posthouse job cancel")]
    Cancel {
        /// The jobs
        #[arg(required = true, value_name = "ID")]
        ids: Vec<i64>,
    },

    /// Run jobs again, or sooner
    ///
    /// A job that waits for its time is due now; one that failed or was cancelled goes back into line, with its history. Exit
    /// code 1 if one of the jobs is running or done.
    #[command(after_long_help = "EXAMPLES:
  posthouse job retry 42")]
    Retry {
        /// The jobs
        #[arg(required = true, value_name = "ID")]
        ids: Vec<i64>,
    },

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

// What is written on these two would become the help of the commands that have them.
#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// Only of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,
    /// Only of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,
    /// Only of this tenant
    #[arg(long)]
    pub(crate) tenant: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Page {
    /// At most so many
    #[arg(long, default_value_t = 20, value_name = "N")]
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
    /// Give up after this time, such as 30s or 5m. Default: never
    #[arg(long, value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) timeout: Option<Duration>,
}
