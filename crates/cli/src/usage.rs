//! `posthouse usage`: tokens and money, added up, as a table, JSON or CSV.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use comfy_table::{Attribute, Cell};
use posthouse::store::{Store, UsageBy, UsageFilter, UsageReport, UsageRow};
use serde_json::{Map, Value, json};

use crate::args::{By, Day, Global, Usage};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output::{self, Grid, cell};
use crate::style::{DIM, clean_lines};

/// Rows of a table for people; JSON and CSV have all of them.
const ROWS_MAX: usize = 100;
/// Digits behind the point that a table shows.
const DECIMALS: usize = 6;

/// Shows it.
pub(crate) async fn run(args: Usage, global: &Global) -> Result<ExitCode> {
    if args.csv && global.json {
        return Err(Failure::usage("--csv and --json: choose one"));
    }
    let store = connect::store(global).await?;
    let filter = filter(&args, &store).await?;
    let report = store.usage(&filter).await?;
    if global.json {
        output::json(&as_json(&report, &filter.by))?;
    } else if args.csv {
        let text = csv(&report, &filter.by);
        let text = if std::io::stdout().is_terminal() { clean_lines(&text) } else { text };
        output::line(text.trim_end_matches('\n'))?;
    } else {
        print(&report, &filter.by)?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn filter(args: &Usage, store: &Store) -> Result<UsageFilter> {
    let mut by: Vec<UsageBy> = Vec::new();
    for name in &args.by {
        let name = match name {
            By::Tenant => UsageBy::Tenant,
            By::Model => UsageBy::Model,
            By::Kind => UsageBy::Kind,
            By::Day => UsageBy::Day,
            By::Queue => UsageBy::Queue,
        };
        if !by.contains(&name) {
            by.push(name);
        }
    }
    let now = store.clock().await?;
    Ok(UsageFilter {
        by,
        tenant: args.filter.tenant.clone(),
        queue: args.filter.queue.clone(),
        kind: args.filter.kind.clone(),
        model: args.model.clone(),
        since: args.since.as_ref().map(|day| date(day, now)),
        until: args.until.as_ref().map(|day| date(day, now)),
    })
}

fn date(day: &Day, now: SystemTime) -> String {
    match day {
        Day::Date(date) => date.clone(),
        Day::Ago(days) => {
            let then = now.checked_sub(Duration::from_hours(24) * *days).unwrap_or(SystemTime::UNIX_EPOCH);
            humantime::format_rfc3339_seconds(then).to_string().chars().take(10).collect()
        }
    }
}

fn name(row: &UsageRow, by: UsageBy) -> Option<&str> {
    match by {
        UsageBy::Day => row.day.as_deref(),
        UsageBy::Tenant => row.tenant.as_deref(),
        UsageBy::Queue => row.queue.as_deref(),
        UsageBy::Kind => row.kind.as_deref(),
        UsageBy::Model => row.model.as_deref(),
    }
}

/// Numbers in their order, with the names that JSON and CSV have for them.
fn numbers(row: &UsageRow) -> [(&'static str, i64); 6] {
    [
        ("attempts", row.attempts),
        ("requests", row.requests),
        ("input_tokens", row.input_tokens),
        ("output_tokens", row.output_tokens),
        ("cached_tokens", row.cached_tokens),
        ("unpriced", row.unpriced),
    ]
}

fn as_json(report: &UsageReport, by: &[UsageBy]) -> Value {
    let object = |row: &UsageRow, by: &[UsageBy]| {
        let mut object: Map<_, _> = by.iter().map(|by| (by.as_str().to_owned(), json!(name(row, *by)))).collect();
        object.extend(numbers(row).map(|(name, number)| (name.to_owned(), json!(number))));
        object.insert("cost_usd".to_owned(), json!(row.cost_usd));
        Value::Object(object)
    };
    let rows: Vec<Value> = report.rows.iter().map(|row| object(row, by)).collect();
    json!({ "rows": rows, "total": object(&report.total, &[]) })
}

fn csv(report: &UsageReport, by: &[UsageBy]) -> String {
    let mut header: Vec<String> = by.iter().map(|by| by.as_str().to_owned()).collect();
    header.extend(numbers(&report.total).map(|(name, _)| name.to_owned()));
    header.push("cost_usd".to_owned());
    let mut text = header.join(",");
    for row in &report.rows {
        let mut fields: Vec<String> = by.iter().map(|by| quoted(name(row, *by).unwrap_or_default())).collect();
        fields.extend(numbers(row).map(|(_, number)| number.to_string()));
        fields.push(row.cost_usd.clone().unwrap_or_default());
        text.push('\n');
        text.push_str(&fields.join(","));
    }
    text.push('\n');
    text
}

/// A field of CSV, in quotes where it must be.
fn quoted(field: &str) -> String {
    if field.contains(['"', ',', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}

fn print(report: &UsageReport, by: &[UsageBy]) -> Result<()> {
    if report.rows.is_empty() {
        output::note("no usage; attempts tell it when they settle, as kinds of posthouse.toml do by themselves");
        return Ok(());
    }
    let shown = report.rows.len().min(ROWS_MAX);
    // Columns that would say the same everywhere are left out.
    let total = &report.total;
    let rows = || report.rows.iter().take(shown).chain([total]);
    let columns = Columns {
        requests: rows().any(|row| row.requests != row.attempts),
        cached: total.cached_tokens > 0,
        unpriced: total.unpriced > 0,
        decimals: rows().filter_map(|row| row.cost_usd.as_deref()).map(decimals).max().unwrap_or(0).min(DECIMALS),
    };
    let mut header: Vec<&str> = by.iter().map(|by| by.as_str()).collect();
    header.extend(columns.header());
    let first_number = by.len();
    let numbers: Vec<usize> = (first_number..header.len()).collect();
    let mut grid = Grid::new(&header).right(&numbers);
    for row in report.rows.iter().take(shown) {
        let mut cells: Vec<Cell> = by.iter().map(|by| cell(name(row, *by).unwrap_or("(not named)"))).collect();
        cells.extend(columns.cells(row));
        grid.row(cells);
    }
    let mut cells: Vec<Cell> = by.iter().enumerate().map(|(n, _)| cell(if n == 0 { "total" } else { "" })).collect();
    cells.extend(columns.cells(total));
    grid.row(cells.into_iter().map(|cell| cell.add_attribute(Attribute::Bold)).collect());
    grid.print()?;
    match report.rows.len() - shown {
        0 => Ok(()),
        more => output::line(format_args!("{DIM}… {more} more rows in the total; --json and --csv show all{DIM:#}")),
    }
}

/// Which columns of numbers there are.
struct Columns {
    requests: bool,
    cached: bool,
    unpriced: bool,
    /// Digits behind the point, the same in each row, so that the points stand below each other.
    decimals: usize,
}

impl Columns {
    fn pick<T>(&self, [attempts, requests, input, cached, output, cost, unpriced]: [T; 7]) -> Vec<T> {
        let picked = [
            Some(attempts),
            self.requests.then_some(requests),
            Some(input),
            self.cached.then_some(cached),
            Some(output),
            Some(cost),
            self.unpriced.then_some(unpriced),
        ];
        picked.into_iter().flatten().collect()
    }

    fn header(&self) -> Vec<&'static str> {
        self.pick(["attempts", "requests", "input", "cached", "output", "cost usd", "unpriced"])
    }

    fn cells(&self, row: &UsageRow) -> Vec<Cell> {
        let cost = row.cost_usd.as_deref().map_or_else(|| "unknown".to_owned(), |cost| rounded(cost, self.decimals));
        self.pick([
            output::count(row.attempts),
            output::count(row.requests),
            output::count(row.input_tokens),
            output::count(row.cached_tokens),
            output::count(row.output_tokens),
            cell(cost),
            output::count(row.unpriced),
        ])
    }
}

fn decimals(amount: &str) -> usize {
    amount.split_once('.').map_or(0, |(_, part)| part.len())
}

/// Decimal text with so many digits behind the point, rounded half up; what would look like nothing says that it is not.
fn rounded(amount: &str, decimals: usize) -> String {
    let (whole, part) = amount.split_once('.').unwrap_or((amount, ""));
    let kept: String = part.chars().chain(std::iter::repeat('0')).take(decimals).collect();
    let up = part.as_bytes().get(decimals).is_some_and(|digit| *digit >= b'5');
    let mut digits = format!("{whole}{kept}").into_bytes();
    if up {
        let nines = digits.iter().rev().take_while(|digit| **digit == b'9').count();
        let first = digits.len() - nines;
        digits[first..].fill(b'0');
        match first.checked_sub(1) {
            Some(last) => digits[last] += 1,
            None => digits.insert(0, b'1'),
        }
    }
    if digits.iter().all(|digit| *digit == b'0') && amount.contains(|c: char| ('1'..='9').contains(&c)) {
        let least = format!("{:0>width$}", "1", width = decimals + 1);
        return format!("<{}", with_point(&least, decimals));
    }
    with_point(&String::from_utf8_lossy(&digits), decimals)
}

fn with_point(digits: &str, decimals: usize) -> String {
    match digits.split_at(digits.len() - decimals) {
        (whole, "") => whole.to_owned(),
        (whole, part) => format!("{whole}.{part}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_rounded_for_people() {
        for (amount, decimals, expected) in [
            ("1.5", 6, "1.500000"),
            ("0", 2, "0.00"),
            ("12", 0, "12"),
            ("0.00000049", 6, "<0.000001"),
            ("0.0000005", 6, "0.000001"),
            ("0.1234565", 6, "0.123457"),
            ("9.9999999", 6, "10.000000"),
            ("99.5", 0, "100"),
            ("0.4", 0, "<1"),
            ("123456789012345678901234567890.12", 1, "123456789012345678901234567890.1"),
        ] {
            assert_eq!(rounded(amount, decimals), expected, "{amount}");
        }
    }

    #[test]
    fn fields_of_csv_are_quoted_where_they_must_be() {
        assert_eq!(quoted("plain name"), "plain name");
        assert_eq!(quoted("a,\"b\"\n"), "\"a,\"\"b\"\"\n\"");
    }
}
