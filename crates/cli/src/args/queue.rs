//! The arguments of `posthouse queue`.

use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use posthouse::store::Retention;

use super::depth::{Depth, depth};
use super::gate::Closing;
use super::time::duration;

pub(super) const LONG: &str = "Look at the settings of queues, change them, pause and resume queues.

A queue needs no settings: it is there as soon as a job is put into it.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse queue list
  posthouse queue set mail --retention 30d --retention-failed 1y
  posthouse queue set '*' --retention 90d
  posthouse queue set chats --serial-by conversation
  posthouse queue pause mail --for 1h
  posthouse queue resume mail";

#[derive(Debug, Subcommand)]
pub(crate) enum Queue {
    /// List queues with their settings, and those that are paused
    ///
    /// Every queue that has had jobs or settings, or has a gate. `posthouse status` tells how they do.
    #[command(after_long_help = "EXAMPLES:
  posthouse queue list
  posthouse queue list --json | jq -r '.[] | select(.retention_ms == 0) | .queue'")]
    List,
    Set(QueueSet),
    Pause(QueuePause),

    /// Let a paused queue's jobs run again
    ///
    /// Opens the gate queue:NAME.
    #[command(after_long_help = "EXAMPLES:
  posthouse queue resume mail")]
    Resume {
        /// The queue
        #[arg(value_name = "NAME")]
        queue: String,
    },
}

/// Change the settings of a queue
///
/// --retention says for how long jobs are kept after they are done or cancelled; those that failed are kept for ever unless
/// --retention-failed says otherwise. A time counts for jobs that have ended already, too: they are deleted within a sixteenth of it
/// after it is over, a day at most. `0` keeps no history: ten minutes after a job was done or cancelled nothing is left of it, neither
/// payload nor result, and until then no more than `posthouse job wait` needs. `forever` is as it comes; `default` is what is set for
/// the queue '*', which stands for all that have no time of their own. With --serial-by FIELD those of a tenant's jobs that share this field of their payload run one at a time, in
/// order, across retries; it counts for jobs that are put in from now on. What is left out stays as it is.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse queue set mail --retention 30d --retention-cancelled 7d --retention-failed 1y
  posthouse queue set metrics --retention 0
  posthouse queue set chats --serial-by conversation
  posthouse queue set chats --serial-by none --fair-by tokens
  posthouse queue set imports --max-depth 5000")]
#[command(override_usage = "posthouse queue set <NAME> <OPTION>…")]
pub(crate) struct QueueSet {
    /// The queue
    #[arg(value_name = "NAME")]
    pub(crate) queue: String,
    #[command(flatten)]
    pub(crate) changes: QueueChanges,
}

/// What is set, at least one of them.
#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct QueueChanges {
    /// For how long done jobs are kept, and cancelled ones without a time of their own: such as 30d, 0, forever, default
    #[arg(long, value_name = "TIME", value_parser = retention)]
    pub(crate) retention: Option<Retention>,
    /// For how long cancelled jobs are kept; default: as done ones
    #[arg(long, value_name = "TIME", value_parser = retention)]
    pub(crate) retention_cancelled: Option<Retention>,
    /// For how long failed jobs are kept, the dead letters
    #[arg(long, value_name = "TIME", value_parser = retention)]
    pub(crate) retention_failed: Option<Retention>,
    /// The field of the payload that jobs share which run one at a time; `none`: jobs run as they come
    #[arg(long, value_name = "FIELD")]
    pub(crate) serial_by: Option<String>,
    /// By what tenants get the same share
    #[arg(long, value_enum, ignore_case = true)]
    pub(crate) fair_by: Option<FairBy>,
    /// How many jobs may wait in it before new ones are refused; `none`: any number
    #[arg(long, value_name = "N", value_parser = depth)]
    pub(crate) max_depth: Option<Depth>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FairBy {
    /// Jobs, as it comes
    Jobs,
    /// What jobs used: a tenant whose jobs take twice as many tokens gets half as many of them done
    Tokens,
}

/// A time to keep jobs.
fn retention(text: &str) -> Result<Retention, String> {
    match text.to_ascii_lowercase().as_str() {
        "0" => Ok(Retention::For(Duration::ZERO)),
        "forever" => Ok(Retention::Forever),
        "default" => Ok(Retention::Default),
        _ => duration(text).map(Retention::For).map_err(|error| format!("{error}; or 0, forever, default")),
    }
}

/// Keep a queue's jobs from running
///
/// Closes the gate queue:NAME: its jobs wait and keep their place, those that run go on, other queues are not touched. Jobs can be
/// put in all the same. Without --for and --until it lasts until `posthouse queue resume`.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse queue pause mail
  posthouse queue pause mail --until '08:00' --reason 'the mail server is being moved'")]
pub(crate) struct QueuePause {
    /// The queue
    #[arg(value_name = "NAME")]
    pub(crate) queue: String,
    #[command(flatten)]
    pub(crate) closing: Closing,
}
