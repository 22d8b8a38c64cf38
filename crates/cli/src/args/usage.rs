//! The arguments of `posthouse usage`.

use clap::{Args, ValueEnum};

use super::choice::Filter;

/// Show tokens and money, added up by model, tenant, kind, queue or day
///
/// Every attempt counts that told what it used, whatever became of it: retried, failed and cancelled ones too. Days are those of
/// the database's clock in UTC, on which attempts were settled. The cost is what the provider said, else what it is by the
/// prices in posthouse.toml or its price file; attempts without a known cost are counted as unpriced, not as free, unless
/// the provider refused them.
///
/// On a terminal amounts are rounded to a millionth of a dollar; --json and --csv have every digit.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse usage                                  by model, from the beginning
  posthouse usage --by tenant --since 30d
  posthouse usage --by day,model --tenant acme --since 2026-01-01 --until 2026-01-31
  posthouse usage --by tenant --csv > usage.csv
  posthouse usage --since today --json | jq -r .total.cost_usd")]
pub(crate) struct Usage {
    /// A row for each of these; several go together, as in day,model
    #[arg(long, value_enum, value_name = "NAMES", value_delimiter = ',', default_value = "model")]
    pub(crate) by: Vec<By>,
    #[command(flatten)]
    pub(crate) filter: Filter,
    /// Only of this model
    #[arg(long)]
    pub(crate) model: Option<String>,
    /// From this day on: YYYY-MM-DD, today, yesterday, or so many days ago, such as 7d
    #[arg(long, value_name = "DAY", value_parser = day)]
    pub(crate) since: Option<Day>,
    /// Up to this day, which is included
    #[arg(long, value_name = "DAY", value_parser = day)]
    pub(crate) until: Option<Day>,
    /// Print comma-separated values, without the total
    #[arg(long)]
    pub(crate) csv: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum By {
    Tenant,
    Model,
    Kind,
    Day,
    Queue,
}

/// A day in UTC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Day {
    /// As `2026-01-31`.
    Date(String),
    /// So many days before today by the database's clock.
    Ago(u32),
}

fn day(text: &str) -> Result<Day, String> {
    let days = |text: &str| text.strip_suffix('d').and_then(|days| days.parse().ok()).filter(|days| *days <= 36_500);
    match text {
        "today" => Ok(Day::Ago(0)),
        "yesterday" => Ok(Day::Ago(1)),
        _ if days(text).is_some() => Ok(Day::Ago(days(text).unwrap_or_default())),
        // What looks like a date is one: not every month has 31 days.
        _ if text.len() == 10 && humantime::parse_rfc3339(&format!("{text}T00:00:00Z")).is_ok() => {
            Ok(Day::Date(text.to_owned()))
        }
        _ => Err("no day; write YYYY-MM-DD, today, yesterday, or a number of days ago such as 7d".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_as_people_type_them() {
        assert_eq!(day("2028-02-29"), Ok(Day::Date("2028-02-29".to_owned())));
        assert_eq!(day("today"), Ok(Day::Ago(0)));
        assert_eq!(day("yesterday"), Ok(Day::Ago(1)));
        assert_eq!(day("30d"), Ok(Day::Ago(30)));
        for wrong in ["", "d", "-1d", "99999999d", "2026-02-31", "2026-13-01", "26-01-01", "2026-1-1", "7", "tomorrow"]
        {
            assert!(day(wrong).is_err(), "{wrong}");
        }
    }
}
