//! How gates are shown: the table of `gate list`, and a line each where they are closed or full.

use std::time::SystemTime;

use comfy_table::{Cell, Color};
use posthouse::store::{GateLimits, GateRecord, Store};
use posthouse_llm::price::Amount;

use crate::args::Global;
use crate::failure::Result;
use crate::output::{self, Grid, age, cell};
use crate::style::{BAD, BOLD, DIM, clean};

/// Rows of a table for people; JSON has all of them.
const ROWS_MAX: usize = 200;
/// A limit a minute is shown as full from this share on, as `closed_or_full_gates` has it: at its pace it is never quite at the limit.
const NEARLY_TENTHS: i64 = 9;

/// What gates count. Of the table, only those that some gate limits.
const COUNTS: [&str; 5] = ["running", "requests/min", "tokens/min", "usd/day", "usd/month"];

/// Shows all gates.
pub(super) async fn list(store: &Store, global: &Global) -> Result<()> {
    let gates = store.gates().await?;
    if global.json {
        return output::json(&gates);
    }
    if gates.is_empty() {
        output::note("no gates yet; `posthouse gate set model:NAME --running 40` makes one");
        return Ok(());
    }
    let now = store.clock().await?;
    let shown = &gates[..gates.len().min(ROWS_MAX)];
    let counts: Vec<_> = shown.iter().map(counts).collect();
    let used: Vec<usize> = (0..COUNTS.len()).filter(|i| counts.iter().any(|row| row[*i].is_some())).collect();
    let header: Vec<&str> = std::iter::once("gate").chain(used.iter().map(|i| COUNTS[*i])).collect();
    // A part of a name is another name: `set` and `close` want all of it.
    let mut grid = Grid::new(&header).whole(&[0]).right(&(1..header.len()).collect::<Vec<_>>());
    for (gate, mut counts) in shown.iter().zip(counts) {
        let cells = used.iter().map(|i| counts[*i].take().unwrap_or_else(|| cell("")));
        grid.row(std::iter::once(cell(title(gate))).chain(cells).collect());
    }
    grid.print()?;
    if let Some(more) = gates.len().checked_sub(ROWS_MAX).filter(|more| *more > 0) {
        output::line(format_args!("{DIM}… {more} more; --json shows all{DIM:#}"))?;
    }
    for gate in shown {
        if let Some(closed) = closed(gate, now) {
            print_closed(gate, &closed, "")?;
        }
    }
    Ok(())
}

/// What of each of `COUNTS` passed; `None` where there is no limit.
fn counts(gate: &GateRecord) -> [Option<Cell>; COUNTS.len()] {
    let money = |limit: &Option<String>, spent: &str| {
        of(plain(spent), limit.as_deref().map(plain), reached(spent, limit.as_ref()))
    };
    let number = |n: i64, limit: Option<i64>| of(n, limit, limit.is_some_and(|limit| nearly(n, limit)));
    let most = gate.max_running.map(i64::from);
    let running = gate.running.unwrap_or(0);
    [
        of(running, most, most.is_some_and(|most| running >= most)),
        number(gate.requests_last_minute, gate.requests_per_minute.map(i64::from)),
        number(gate.tokens_last_minute, gate.tokens_per_minute),
        money(&gate.money_per_day, &gate.spent_today),
        money(&gate.money_per_month, &gate.spent_this_month),
    ]
}

/// What passes of what may.
fn of(number: impl ToString, limit: Option<impl ToString>, is_full: bool) -> Option<Cell> {
    let cell = cell(format!("{}/{}", number.to_string(), limit?.to_string()));
    Some(if is_full { cell.fg(Color::Yellow) } else { cell })
}

/// The name, and whom the row is about where the gate holds for each. Of one that lets the jobs of a queue run one at a time: a tenant
/// and the value that its jobs share.
fn title(gate: &GateRecord) -> String {
    match &gate.member {
        Some(member) => format!("{} ({})", gate.name, member.replace('\u{1f}', "/")),
        None => gate.name.clone(),
    }
}

/// Decimal text without zeros at its end.
fn plain(amount: &str) -> String {
    Amount::parse(amount).map_or_else(|| amount.to_owned(), |amount| amount.to_string())
}

fn nearly(number: i64, limit: i64) -> bool {
    i128::from(number) * 10 >= i128::from(limit) * i128::from(NEARLY_TENTHS)
}

/// Whether so much is spent. As exact as can be shown; what decides is in the database.
fn reached(spent: &str, limit: Option<&String>) -> bool {
    let number = |text: &str| text.parse::<f64>().unwrap_or(0.0);
    limit.is_some_and(|limit| number(spent) >= number(limit))
}

/// Until when, by whom and why it is closed. `None`: it is open.
pub(crate) fn closed(gate: &GateRecord, now: SystemTime) -> Option<String> {
    closing(gate, now, "opens")
}

/// The same in the words of tenants and queues.
pub(crate) fn paused(gate: &GateRecord, now: SystemTime) -> Option<String> {
    closing(gate, now, "resumes")
}

fn closing(gate: &GateRecord, now: SystemTime, opens: &str) -> Option<String> {
    let until = gate.closed_until.as_deref()?;
    let by = match gate.closed_by.as_deref() {
        Some("person") | None => String::new(),
        Some("quota") => " (its account is empty)".to_owned(),
        Some(by) => format!(" (by {by})"),
    };
    let reason = gate.closed_reason.as_deref().filter(|reason| !reason.is_empty());
    let why = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    Some(match (until, output::parse_time(until)) {
        ("infinity", _) => format!("until somebody {opens} it{by}{why}"),
        (_, Some(time)) if time <= now => format!("time is over, one job tries it{by}{why}"),
        _ => format!("opens {}{by}{why}", age(until, now)),
    })
}

/// What of its limits is used up.
fn full(gate: &GateRecord) -> Vec<String> {
    let mut full = Vec::new();
    if let (Some(most), Some(running)) = (gate.max_running.map(i64::from), gate.running)
        && running >= most
    {
        full.push(format!("running {running}/{most}"));
    }
    for (what, number, limit) in [
        ("requests/min", gate.requests_last_minute, gate.requests_per_minute.map(i64::from)),
        ("tokens/min", gate.tokens_last_minute, gate.tokens_per_minute),
    ] {
        if let Some(limit) = limit.filter(|limit| nearly(number, *limit)) {
            full.push(format!("{what} {number}/{limit}"));
        }
    }
    for (what, spent, limit) in [
        ("today", &gate.spent_today, &gate.money_per_day),
        ("this month", &gate.spent_this_month, &gate.money_per_month),
    ] {
        if let Some(limit) = limit.as_ref().filter(|limit| reached(spent, Some(limit))) {
            let then = match gate.when_spent.as_str() {
                "hold" => "jobs wait".to_owned(),
                "fail" => "jobs fail".to_owned(),
                model => format!("jobs use model {}", model.strip_prefix("model:").unwrap_or(model)),
            };
            full.push(format!("spent {} of {} USD {what}, {then}", plain(spent), plain(limit)));
        }
    }
    full
}

/// One line: what is closed or full about a gate, with everything it counts.
pub(crate) fn print_state(gate: &GateRecord, now: SystemTime) -> Result<()> {
    let mut parts = full(gate);
    for (what, number, limit) in [
        ("running", gate.running.unwrap_or(0), gate.max_running.map(i64::from)),
        ("requests/min", gate.requests_last_minute, gate.requests_per_minute.map(i64::from)),
        ("tokens/min", gate.tokens_last_minute, gate.tokens_per_minute),
    ] {
        if let Some(limit) = limit.filter(|_| !parts.iter().any(|part| part.starts_with(what))) {
            parts.push(format!("{what} {number}/{limit}"));
        }
    }
    let counts = clean(&parts.join(", "));
    match closed(gate, now) {
        Some(closed) if counts.is_empty() => print_closed(gate, &closed, ""),
        Some(closed) => print_closed(gate, &closed, &format!(" {DIM}({counts}){DIM:#}")),
        None => output::line(format_args!("{BOLD}full{BOLD:#} {}: {counts}", clean(&title(gate)))),
    }
}

fn print_closed(gate: &GateRecord, closed: &str, counts: &str) -> Result<()> {
    output::line(format_args!("{BAD}closed{BAD:#} {}: {}{counts}", clean(&title(gate)), clean(closed)))
}

/// Limits in a sentence.
pub(super) fn describe(limits: &GateLimits) -> String {
    let mut parts = Vec::new();
    parts.extend(limits.max_running.map(|n| format!("{n} at once")));
    parts.extend(limits.requests_per_minute.map(|n| format!("{n} requests a minute")));
    parts.extend(limits.tokens_per_minute.map(|n| format!("{n} tokens a minute")));
    parts.extend(limits.money_per_day.as_ref().map(|usd| format!("{} USD a day", plain(usd))));
    parts.extend(limits.money_per_month.as_ref().map(|usd| format!("{} USD a month", plain(usd))));
    if parts.is_empty() {
        return "no limits".to_owned();
    }
    if limits.money_per_day.is_some() || limits.money_per_month.is_some() {
        parts.push(match limits.when_spent.as_deref() {
            None | Some("hold") => "then jobs wait".to_owned(),
            Some("fail") => "then jobs fail".to_owned(),
            Some(model) => format!("then jobs use model {}", model.strip_prefix("model:").unwrap_or(model)),
        });
        parts.extend(limits.warn_at.as_ref().map(|share| format!("alert at {}", plain(share))));
    }
    clean(&parts.join(", "))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn gate(json: serde_json::Value) -> GateRecord {
        let mut whole = serde_json::json!({
            "name": "crm", "member": null, "max_running": null, "requests_per_minute": null, "tokens_per_minute": null,
            "money_per_day": null, "money_per_month": null, "when_spent": "hold", "warn_at": null, "closed_until": null,
            "closed_by": null, "closed_reason": null, "running": null, "requests_last_minute": 0, "tokens_last_minute": 0,
            "spent_today": "0", "spent_this_month": "0",
        });
        whole.as_object_mut().unwrap().extend(json.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn what_is_full_is_named() {
        for (json, expected) in [
            (serde_json::json!({ "max_running": 2, "running": 1 }), ""),
            (serde_json::json!({ "max_running": 2, "running": 2 }), "running 2/2"),
            (serde_json::json!({ "requests_per_minute": 100, "requests_last_minute": 89 }), ""),
            (serde_json::json!({ "requests_per_minute": 100, "requests_last_minute": 90 }), "requests/min 90/100"),
            (serde_json::json!({ "tokens_per_minute": 1, "tokens_last_minute": 1 }), "tokens/min 1/1"),
            (serde_json::json!({ "money_per_day": "1.50", "spent_today": "1.49" }), ""),
            (
                serde_json::json!({ "money_per_day": "1.50", "spent_today": "1.5", "when_spent": "model:tiny" }),
                "spent 1.5 of 1.5 USD today, jobs use model tiny",
            ),
            (
                serde_json::json!({ "money_per_month": "1", "spent_this_month": "2.00" }),
                "spent 2 of 1 USD this month, jobs wait",
            ),
        ] {
            assert_eq!(full(&gate(json.clone())).join(", "), expected, "{json}");
        }
    }

    #[test]
    fn a_closing_says_until_when_by_whom_and_why() {
        let now = humantime::parse_rfc3339("2026-01-31T08:00:00Z").unwrap();
        for (until, by, reason, expected) in [
            ("infinity", "person", None, "until somebody opens it"),
            (
                "infinity",
                "quota",
                Some("insufficient_quota"),
                "until somebody opens it (its account is empty): insufficient_quota",
            ),
            ("2026-01-31T08:10:00+00:00", "provider", Some("429"), "opens in 10m (by provider): 429"),
            ("2026-01-31T07:59:00+00:00", "breaker", None, "time is over, one job tries it (by breaker)"),
        ] {
            let gate = gate(serde_json::json!({ "closed_until": until, "closed_by": by, "closed_reason": reason }));
            assert_eq!(closed(&gate, now).unwrap(), expected);
        }
        assert_eq!(closed(&gate(serde_json::json!({})), now), None);
    }

    #[test]
    fn limits_are_said_in_a_sentence() {
        let limits = GateLimits {
            max_running: Some(40),
            money_per_day: Some("12.50".to_owned()),
            when_spent: Some("model:tiny".to_owned()),
            warn_at: Some("0.8".to_owned()),
            ..GateLimits::default()
        };
        assert_eq!(describe(&limits), "40 at once, 12.5 USD a day, then jobs use model tiny, alert at 0.8");
        assert_eq!(describe(&GateLimits::default()), "no limits");
    }
}
