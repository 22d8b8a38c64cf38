//! Which jobs a command is for: ids, or conditions that all must hold.

use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

pub(super) const STATES: [&str; 6] = ["queued", "running", "waiting", "done", "failed", "cancelled"];

/// A point in time as people type it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Moment {
    /// So long ago.
    Ago(Duration),
    /// Whatever Postgres makes of it.
    At(String),
}

/// An age such as `2h`, else text for Postgres.
fn moment(text: &str) -> Result<Moment, String> {
    match humantime::parse_duration(text) {
        Ok(age) => Ok(Moment::Ago(age)),
        Err(_) if text.trim().is_empty() => {
            Err("write an age, such as 2h, or a time, such as '2027-01-31 08:00'".to_owned())
        }
        Err(_) => Ok(Moment::At(text.to_owned())),
    }
}

// What is written on these would become the help of the commands that have them.
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
pub(crate) struct JobChoice {
    /// These jobs
    #[arg(value_name = "ID", conflicts_with_all = ["all"])]
    pub(crate) ids: Vec<i64>,
    #[command(flatten)]
    pub(crate) filter: Filter,
    /// Only in this state; may be repeated
    #[arg(long = "state", value_name = "STATE", value_parser = PossibleValuesParser::new(STATES))]
    pub(crate) states: Vec<String>,
    #[command(flatten)]
    pub(crate) error: ErrorChoice,
    /// Only those whose newest error came then or later: an age, such as 2h, or a time, such as '2027-01-31 08:00'
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) failed_since: Option<Moment>,
    /// Only those whose newest error came earlier
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) failed_before: Option<Moment>,
    #[command(flatten)]
    pub(crate) created: CreatedChoice,
    #[command(flatten)]
    pub(crate) scope: Scope,
}

#[derive(Debug, Args)]
pub(crate) struct DeadChoice {
    /// These ones
    #[arg(value_name = "ID", conflicts_with_all = ["all"])]
    pub(crate) ids: Vec<i64>,
    #[command(flatten)]
    pub(crate) conditions: DeadConditions,
    #[command(flatten)]
    pub(crate) scope: Scope,
}

#[derive(Debug, Args)]
pub(crate) struct DeadConditions {
    #[command(flatten)]
    pub(crate) filter: Filter,
    #[command(flatten)]
    pub(crate) error: ErrorChoice,
    /// Only those that failed then or later: an age, such as 2h, or a time, such as '2027-01-31 08:00'
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) since: Option<Moment>,
    /// Only those that failed earlier
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) before: Option<Moment>,
}

#[derive(Debug, Args)]
pub(crate) struct ErrorChoice {
    /// Only those whose newest error is of this class
    #[arg(long)]
    pub(crate) class: Option<String>,
    /// Only those whose newest error contains this text, in capitals or not
    #[arg(long, value_name = "TEXT")]
    pub(crate) error: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct CreatedChoice {
    /// Only those that were enqueued then or later
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) created_since: Option<Moment>,
    /// Only those that were enqueued earlier
    #[arg(long, value_name = "TIME", value_parser = moment)]
    pub(crate) created_before: Option<Moment>,
}

#[derive(Debug, Args)]
pub(crate) struct Scope {
    /// Every one there is, but for what else is said
    #[arg(long)]
    pub(crate) all: bool,
    /// Change nothing: count them, show some, and say which would be refused
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_and_times_are_told_apart() {
        assert_eq!(moment("1h 30m"), Ok(Moment::Ago(Duration::from_secs(5_400))));
        assert_eq!(moment("yesterday"), Ok(Moment::At("yesterday".to_owned())));
        assert_eq!(moment("2027-01-31 08:00"), Ok(Moment::At("2027-01-31 08:00".to_owned())));
        assert!(moment(" ").is_err());
    }
}
