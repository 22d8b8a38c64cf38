//! The arguments of `posthouse queue`.

use clap::{Args, Subcommand, ValueEnum};

use super::gate::Closing;

pub(super) const LONG: &str = "Look at the settings of queues, change them, pause and resume queues.

A queue needs no settings: it is there as soon as a job is put into it.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse queue list
  posthouse queue set mail --retention 0
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
/// With --retention 0 it keeps no history: ten minutes after a job was done or cancelled nothing is left of it, neither payload
/// nor result, and until then no more than `posthouse job wait` needs. Failed jobs are kept all the same. It counts for jobs
/// that end from now on. With --serial-by FIELD those of a tenant's jobs that share this field of their payload run one at a time, in
/// order, across retries; it counts for jobs that are put in from now on. What is left out stays as it is.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse queue set mail --retention 0
  posthouse queue set chats --serial-by conversation
  posthouse queue set chats --serial-by none --fair-by tokens")]
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
    /// For how long done and cancelled jobs are kept
    #[arg(long, value_enum, ignore_case = true)]
    pub(crate) retention: Option<Retention>,
    /// The field of the payload that jobs share which run one at a time; `none`: jobs run as they come
    #[arg(long, value_name = "FIELD")]
    pub(crate) serial_by: Option<String>,
    /// By what tenants get the same share
    #[arg(long, value_enum, ignore_case = true)]
    pub(crate) fair_by: Option<FairBy>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FairBy {
    /// Jobs, as it comes
    Jobs,
    /// What jobs used: a tenant whose jobs take twice as many tokens gets half as many of them done
    Tokens,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Retention {
    /// Not at all, but for ten minutes
    #[value(name = "0")]
    Zero,
    /// Until somebody deletes them, as it comes
    Forever,
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
