//! The arguments of `posthouse gate`, and how a limit and a time of closing are typed.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use posthouse_llm::price::Amount;

pub(super) const LONG: &str = "Set limits that jobs pass before they run, and close and open them.

A gate is named queue:Q, tenant:T, model:M or endpoint:PROVIDER/MODEL, with * for each that has no limits of its own (tenant:*), or \
by a name without a colon that jobs ask for. A job runs when all its gates let it through, and holds none while it waits. Changes \
count from the next claim on.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse gate set model:gpt-4o --running 40 --tokens-per-minute 90000
  posthouse gate set 'tenant:*' --running 5 --money-per-day 10
  posthouse gate list
  posthouse gate close model:gpt-4o --for 10m --reason 'see the status page'
  posthouse gate open model:gpt-4o";

#[derive(Debug, Subcommand)]
pub(crate) enum Gate {
    /// List gates: their limits, what passes, what is closed
    ///
    /// A gate for each tenant, queue or model, such as tenant:*, has a line for each that passed it lately. Of the numbers, the first is
    /// what passes now: jobs that run, requests and tokens of the last minute (reserved ones included), dollars of this day and
    /// this month (UTC).
    #[command(after_long_help = "EXAMPLES:
  posthouse gate list
  posthouse gate list --json | jq -r '.[] | select(.closed_until) | [.name, .closed_by, .closed_reason] | @tsv'")]
    List,
    Set(Box<GateSet>),
    Close(GateClose),

    /// Open a gate, whoever closed it
    ///
    /// Also one that a provider closed, or an empty account (`quota`): jobs go to it at once.
    #[command(after_long_help = "EXAMPLES:
  posthouse gate open endpoint:openai/gpt-4o")]
    Open {
        /// The gate
        name: String,
    },

    /// Remove a gate, and what it has counted
    ///
    /// Jobs pass as if it had never been there. What was spent of its budget is forgotten; `posthouse usage` keeps it.
    #[command(after_long_help = "EXAMPLES:
  posthouse gate remove model:gpt-4o")]
    Remove {
        /// The gate
        name: String,
    },
    Apply(GateApply),
}

/// Set limits of a gate, or clear them
///
/// Limits that are not named stay as they are; `none` clears one. The gate is made if it is not there. Nonsense is refused by name; to
/// stop everything, close the gate. A budget counts what attempts say they cost (`posthouse usage`), and is looked at before a
/// job is claimed: what runs when it is spent is paid for all the same.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["running", "requests_per_minute", "tokens_per_minute",
  "money_per_day", "money_per_month", "when_spent", "warn_at"]))]
#[command(after_long_help = "EXAMPLES:
  posthouse gate set model:gpt-4o --running 40 --requests-per-minute 500 --tokens-per-minute 90000
  posthouse gate set model:gpt-4o --requests-per-minute none
  posthouse gate set 'tenant:*' --running 5
  posthouse gate set tenant:acme --money-per-day 12.50 --warn-at 0.8 --when-spent model:small
  posthouse gate set crm --running 2                  for jobs of `posthouse enqueue --gate crm`")]
#[command(override_usage = "posthouse gate set <NAME> <OPTION>…")]
pub(crate) struct GateSet {
    /// The gate: queue:Q, tenant:T, model:M, endpoint:PROVIDER/MODEL, with * for each, or a name that jobs ask for
    pub(crate) name: String,
    /// Jobs that run at once
    #[arg(long, value_name = "N|none", allow_hyphen_values = true)]
    pub(crate) running: Option<Limit<u32>>,
    /// Requests in any rolling minute
    #[arg(long, value_name = "N|none", allow_hyphen_values = true)]
    pub(crate) requests_per_minute: Option<Limit<u32>>,
    /// Tokens in any rolling minute, prompts and answers together
    #[arg(long, value_name = "N|none", allow_hyphen_values = true)]
    pub(crate) tokens_per_minute: Option<Limit<u64>>,
    /// US dollars a day (UTC), such as 12.50
    #[arg(long, value_name = "USD|none", allow_hyphen_values = true)]
    pub(crate) money_per_day: Option<Limit<Exact>>,
    /// US dollars a month (UTC)
    #[arg(long, value_name = "USD|none", allow_hyphen_values = true)]
    pub(crate) money_per_month: Option<Limit<Exact>>,
    /// When a budget is spent: hold (jobs wait for the next day or month), fail (they fail), or model:NAME (they use that one)
    #[arg(long, value_name = "WHAT")]
    pub(crate) when_spent: Option<String>,
    /// Raise an alert at this share of a budget, such as 0.8; one is raised at the whole in any case
    #[arg(long, value_name = "SHARE|none", allow_hyphen_values = true)]
    pub(crate) warn_at: Option<Limit<Exact>>,
}

/// A limit as it is typed: a value, or `none`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

impl<T: FromTyped> FromStr for Limit<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "none" => Ok(Self(None)),
            text => T::from_typed(text).map(|value| Self(Some(value))),
        }
    }
}

/// What a limit can be. Whether it makes sense, Postgres says.
pub(crate) trait FromTyped: Sized {
    fn from_typed(text: &str) -> Result<Self, String>;
}

fn whole<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse().map_err(|_| "write a whole number such as 40, or none".to_owned())
}

impl FromTyped for u32 {
    fn from_typed(text: &str) -> Result<Self, String> {
        whole(text)
    }
}

impl FromTyped for u64 {
    fn from_typed(text: &str) -> Result<Self, String> {
        whole(text)
    }
}

/// A decimal number, as exact as it was typed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Exact(pub(crate) String);

impl FromTyped for Exact {
    fn from_typed(text: &str) -> Result<Self, String> {
        match Amount::parse(text) {
            Some(amount) => Ok(Self(amount.to_string())),
            None => Err("write a number such as 12.50, without a sign, or none".to_owned()),
        }
    }
}

/// Close a gate: nothing passes until it opens
///
/// Jobs that would pass it wait and keep their place; those that run go on. Without --for and --until it stays closed until
/// `posthouse gate open`. The gate is made if it is not there. Closing tenant:T is what `posthouse tenant pause` does, queue:Q what
/// `posthouse queue pause` does.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse gate close model:gpt-4o --for 10m --reason 'see the status page'
  posthouse gate close endpoint:openai/gpt-4o --until '2027-01-31 08:00 Europe/Rome'
  posthouse gate close crm")]
pub(crate) struct GateClose {
    /// The gate
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) closing: Closing,
}

// What is written on this would become the help of the commands that have it.
#[derive(Debug, Args)]
pub(crate) struct Closing {
    /// For so long, such as 10m or 2h
    #[arg(long = "for", value_name = "DURATION", value_parser = super::time::duration, conflicts_with = "until")]
    pub(crate) span: Option<Duration>,
    /// Until this time, in any form that Postgres reads, such as '2027-01-31 08:00 Europe/Rome' or 'tomorrow'
    #[arg(long, value_name = "TIME", allow_hyphen_values = true)]
    pub(crate) until: Option<String>,
    /// Why, for those who ask (`posthouse job explain`)
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
}

/// Set the gates that a posthouse.toml declares
///
/// Each gate of its section [gates] gets exactly the limits that stand there: one that stands there without a limit loses it. Gates
/// that do not stand there, and what is closed, stay as they are. `posthouse work` sets only those that are not there at all.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse gate apply
  posthouse gate apply --config posthouse.toml --json

IN THE FILE:
  [gates.\"model:small\"]
  max_running = 40
  requests_per_minute = 500
  tokens_per_minute = 90_000
  money_per_day = \"12.50\"
  money_per_month = 200
  when_spent = \"model:tiny\"
  warn_at = 0.8")]
pub(crate) struct GateApply {
    /// The file. Default: ./posthouse.toml
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
}
