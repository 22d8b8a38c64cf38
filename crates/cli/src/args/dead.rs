//! The arguments of `posthouse dead`.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::value::RawValue;

use super::choice::{DeadChoice, DeadConditions};
use super::job::JobShow;

pub(super) const LONG: &str = "Look at dead letters (failed jobs), and redrive or purge them.

A job that failed for good is kept whole, with every attempt's error, until somebody redrives or purges it.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse dead list --kind summarize --class timeout --since 2h
  posthouse dead show 42
  posthouse dead redrive --kind summarize --rate 10/s
  posthouse dead redrive 42 --model gpt-4.1-mini --set text='shorter'
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
    Redrive(Box<Redrive>),
    Purge(Purge),
}

/// List dead letters, newest failures first
///
/// All filters that are given must hold. A full page says on stderr how to see the next one. A search with --error looks into every
/// letter, but for those that --since and --before leave out.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dead list
  posthouse dead list --kind summarize --class timeout --limit 100
  posthouse dead list --tenant acme --since yesterday --before today
  posthouse dead list --error 'context length' --since 2d
  posthouse dead list --json | jq -r '.[] | [.id, .class, .error] | @tsv'")]
pub(crate) struct DeadList {
    #[command(flatten)]
    pub(crate) conditions: DeadConditions,
    /// At most so many
    #[arg(long, default_value_t = 20, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) limit: u32,
    /// Go on behind this one: FAILED_AT/ID, as the page before said
    #[arg(long, value_name = "FAILED_AT/ID", value_parser = cursor)]
    pub(crate) next: Option<(String, i64)>,
}

/// Put dead letters back into line, with changes if need be
///
/// Those that failed first go first, in small batches. Their attempts are counted anew, their errors so far are kept, and `posthouse
/// job show` tells what was changed, when and by whom. Dead letters that come in meanwhile are left alone. With --rate they get times to run
/// at, one after the other: nothing has to stay up for that, and what is cut off can be run again.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dead redrive 42 43
  posthouse dead redrive --kind summarize --rate 10/s        to spare the provider
  posthouse dead redrive --class timeout --since 2h --max-attempts 3 --model gpt-4.1-mini
  posthouse dead redrive 42 --payload @letter.json
  posthouse dead redrive --kind summarize --set language=en --set options.words=50
  posthouse dead redrive --all --dry-run")]
pub(crate) struct Redrive {
    #[command(flatten)]
    pub(crate) choice: DeadChoice,
    /// So many become due a second (10 or 10/s), a minute (600/m) or an hour (36000/h)
    #[arg(long, value_name = "N/s", value_parser = rate)]
    pub(crate) rate: Option<f64>,
    #[command(flatten, next_help_heading = "Changes")]
    pub(crate) changes: Changes,
}

#[derive(Debug, Args)]
pub(crate) struct Changes {
    /// Ask this model instead: for kinds whose payload names one, such as llm.chat
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// Attempts that each may have now
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) max_attempts: Option<u32>,
    /// The longest that one attempt may take now
    #[arg(long, value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) timeout: Option<Duration>,
    /// Put them into this queue
    #[arg(long, value_name = "QUEUE")]
    pub(crate) to_queue: Option<String>,
    /// Their priority now; smaller runs first
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub(crate) priority: Option<i32>,
    /// Another payload, for one job: JSON text, @FILE, or - for standard input
    #[arg(long, value_name = "JSON", conflicts_with = "sets")]
    pub(crate) payload: Option<String>,
    /// Set a part of each payload: text='shorter', options.words=50, messages.0.content=…; JSON, or else text; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = assignment)]
    pub(crate) sets: Vec<Assignment>,
}

/// Remove dead letters for good
///
/// Without ids it needs --yes; without that it says what it would remove, removes nothing and ends with exit code 1.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dead purge 42
  posthouse dead purge --tenant acme             says how many it would remove
  posthouse dead purge --tenant acme --yes
  posthouse dead purge --all --before 90d --yes")]
pub(crate) struct Purge {
    #[command(flatten)]
    pub(crate) choice: DeadChoice,
    /// Do it, without ids as well
    #[arg(long)]
    pub(crate) yes: bool,
}

/// Jobs a second.
fn rate(text: &str) -> Result<f64, String> {
    let (number, per) = text.split_once('/').unwrap_or((text, "s"));
    let seconds = match per.trim() {
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3_600.0,
        _ => f64::NAN,
    };
    let rate = number.trim().parse::<f64>().unwrap_or(f64::NAN) / seconds;
    if (0.0001..=100_000.0).contains(&rate) {
        return Ok(rate);
    }
    Err("jobs a second, minute or hour, such as 10/s, 600/m or 5/h; at most 100000 a second".to_owned())
}

/// Where a page ended.
fn cursor(text: &str) -> Result<(String, i64), String> {
    let parts = text.rsplit_once('/').and_then(|(at, id)| Some((at.to_owned(), id.parse().ok()?)));
    parts.ok_or_else(|| "the time of a failure and an id, as 2027-01-31T08:00:00+00:00/42".to_owned())
}

/// A place in a payload and what to put there: JSON text, which goes on as it is.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Assignment {
    path: Vec<String>,
    value: Box<RawValue>,
}

fn assignment(text: &str) -> Result<Assignment, String> {
    let (key, value) = text.split_once('=').filter(|(key, _)| !key.is_empty()).ok_or("write it as key=value")?;
    let value = RawValue::from_string(value.to_owned()).or_else(|_| serde_json::value::to_raw_value(value));
    let path = key.split('.').map(str::to_owned).collect();
    Ok(Assignment { path, value: value.map_err(|error| error.to_string())? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rates_are_of_a_second_a_minute_or_an_hour() {
        for (text, expected) in [("10", 10.0), ("2.5/s", 2.5), ("90/m", 1.5), ("36000/h", 10.0)] {
            assert_eq!(rate(text), Ok(expected), "{text}");
        }
        for text in ["0", "-1", "nan", "inf", "10/d", "ten", "", "1e9"] {
            assert!(rate(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_set_is_json_or_text() {
        for (text, path, value) in [
            ("a.0.b=5", &["a", "0", "b"][..], "5"),
            ("n=12345678901234567890123", &["n"], "12345678901234567890123"),
            ("text=it works = fine", &["text"], "\"it works = fine\""),
            ("a={\"b\": null}", &["a"], "{\"b\": null}"),
            ("a=", &["a"], "\"\""),
        ] {
            let found = assignment(text).unwrap();
            assert_eq!(
                (&*found.path, found.value.get()),
                (&*path.iter().map(ToString::to_string).collect::<Vec<_>>(), value)
            );
        }
        assert!(assignment("a").is_err() && assignment("=1").is_err());
    }

    #[test]
    fn a_page_ends_at_a_failure() {
        assert_eq!(cursor("2027-01-31T08:00:00+00:00/42").unwrap().1, 42);
        assert!(cursor("42").is_err() && cursor("x/y").is_err());
    }
}
