//! The arguments of `posthouse dead`.

use clap::{Args, Subcommand};

use super::job::{Filter, JobShow, Page};

pub(super) const LONG: &str = "Look at dead letters (failed jobs), and redrive or purge them.

A job that failed for good is kept whole, with every attempt's error, until somebody redrives or purges it.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse dead list --kind summarize
  posthouse dead show 42
  posthouse dead redrive --kind summarize --rate 10
  posthouse dead purge --tenant acme --yes";

#[derive(Debug, Subcommand)]
pub(crate) enum Dead {
    List(DeadList),

    /// Show a dead letter with every attempt's error
    ///
    /// Long texts are cut unless --full is given. With --json nothing is cut.
    #[command(after_long_help = "EXAMPLES:
  posthouse dead show 42
  posthouse dead show 42 --json | jq .errors")]
    Show(JobShow),
    Redrive(Redrive),
    Purge(Purge),
}

/// List dead letters, newest jobs first
///
/// All filters that are given must hold. The next page begins with `--before` and the smallest id of this one.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dead list
  posthouse dead list --kind summarize --limit 100
  posthouse dead list --json | jq -r '.[] | [.id, .reason, .error] | @tsv'")]
pub(crate) struct DeadList {
    #[command(flatten)]
    pub(crate) filter: Filter,
    #[command(flatten)]
    pub(crate) page: Page,
}

/// Which dead letters: by id, by filter, or all.
#[derive(Debug, Args)]
pub(crate) struct DeadChoice {
    /// These ones
    #[arg(value_name = "ID", conflicts_with_all = ["queue", "kind", "tenant", "all"])]
    pub(crate) ids: Vec<i64>,
    #[command(flatten)]
    pub(crate) filter: Filter,
    /// Every one there is
    #[arg(long, conflicts_with_all = ["queue", "kind", "tenant"])]
    pub(crate) all: bool,
}

impl DeadChoice {
    /// Nothing was chosen. Told by the command: clap would ask for ids and not name the other ways.
    pub(crate) fn is_empty(&self) -> bool {
        let Filter { queue, kind, tenant } = &self.filter;
        self.ids.is_empty() && !self.all && queue.is_none() && kind.is_none() && tenant.is_none()
    }
}

/// Put dead letters back into line
///
/// Oldest first, in small batches. Their attempts are counted anew, their errors so far are kept. Dead letters that come in
/// meanwhile are left alone.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dead redrive 42 43
  posthouse dead redrive --kind summarize --rate 10      ten a second, to spare the provider
  posthouse dead redrive --all")]
pub(crate) struct Redrive {
    #[command(flatten)]
    pub(crate) choice: DeadChoice,
    /// At most so many a second
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: Option<u32>,
}

/// Remove dead letters for good
///
/// Without ids it needs --yes; without that it says what it would remove, removes nothing and ends with exit code 1.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dead purge 42
  posthouse dead purge --tenant acme             says how many it would remove
  posthouse dead purge --tenant acme --yes")]
pub(crate) struct Purge {
    #[command(flatten)]
    pub(crate) choice: DeadChoice,
    /// Do it, without ids as well
    #[arg(long)]
    pub(crate) yes: bool,
}
