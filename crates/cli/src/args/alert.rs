//! The arguments of `posthouse alert`.

use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand, ValueEnum};

use super::time;

pub(super) const LONG: &str = "Look at alerts, set when they are raised, and try them.

Alerts are told by notification (LISTEN posthouse_alert), in the log of a worker, and by webhook where [alerts] of a worker's \
posthouse.toml names one.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse alert list
  posthouse alert set oldest_due --after 1h
  posthouse alert test";

#[derive(Debug, Subcommand)]
pub(crate) enum Alert {
    List(AlertList),
    Set(AlertSet),
    /// Tell a test alert at once
    ///
    /// By notification, and by webhook if that is on; nothing is counted, and no quiet time matters.
    #[command(after_long_help = "EXAMPLES:
  posthouse alert test
  posthouse job wait $(posthouse alert test --json | jq .webhook_job)       until the webhook has it")]
    Test,
}

/// List open alerts, and what is set
#[derive(Debug, Args)]
#[command(long_about = "List open alerts, newest first, and what is set for each kind of them.

Kinds that the queue raises by itself: dead_letter, gate_quota, budget, no_worker, oldest_due,
sweep, schedule.")]
#[command(after_long_help = "EXAMPLES:
  posthouse alert list
  posthouse alert list --all                         those of the last 30 days
  posthouse alert list --json | jq '.alerts[].text'")]
pub(crate) struct AlertList {
    /// Also those that are over, of the last 30 days
    #[arg(long)]
    pub(crate) all: bool,
}

/// Set when alerts are raised, and how often they are told
///
/// What is not named stays as it is. Workers whose posthouse.toml has a section [alerts] set what it says when they start.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["on", "off", "quiet", "after", "webhook"]))]
#[command(after_long_help = "EXAMPLES:
  posthouse alert set dead_letter --off
  posthouse alert set budget --quiet 1h
  posthouse alert set oldest_due --queue nightly --after 8h
  posthouse alert set --webhook off")]
#[command(override_usage = "posthouse alert set <KIND> <OPTION>…\n       posthouse alert set --webhook <ON|OFF>")]
pub(crate) struct AlertSet {
    /// The kind of alerts, such as dead_letter
    #[arg(required_unless_present = "webhook", conflicts_with = "webhook")]
    pub(crate) kind: Option<String>,
    /// Raise them
    #[arg(long, conflicts_with_all = ["off", "webhook"])]
    pub(crate) on: bool,
    /// Raise none
    #[arg(long, conflicts_with = "webhook")]
    pub(crate) off: bool,
    /// The least time between two messages about one subject, such as 5m
    #[arg(long, value_name = "DURATION", value_parser = time::duration, conflicts_with = "webhook")]
    pub(crate) quiet: Option<Duration>,
    /// How old a due job must be, for no_worker and oldest_due
    #[arg(long, value_name = "DURATION", value_parser = time::duration, conflicts_with = "webhook")]
    pub(crate) after: Option<Duration>,
    /// Only for this queue, for oldest_due; with --after 0s as for the others again
    #[arg(long, requires = "kind")]
    pub(crate) queue: Option<String>,
    /// Whether alerts go to the webhook
    #[arg(long, value_enum, ignore_case = true, value_name = "ON|OFF")]
    pub(crate) webhook: Option<Switch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// They do
    On,
    /// They do not
    Off,
}
