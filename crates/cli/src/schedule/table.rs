//! How schedules are shown: when they are due next, by their own clocks, and what came of their last ticks.

use std::collections::HashMap;
use std::time::SystemTime;

use comfy_table::Color;
use posthouse::cron::Rule;
use posthouse::store::{CatchUp, ScheduleRecord, ScheduleRun, Store};
use serde::Serialize;
use serde_json::{Value, json};

use super::words::{no_schedule, rfc3339};
use crate::args::Global;
use crate::failure::Result;
use crate::output::{self, Grid, age, cell, count, parse_time, short, state, when};
use crate::style::clean;

/// A schedule, and what its database does not work out.
#[derive(Serialize)]
struct Row<'a> {
    #[serde(flatten)]
    record: &'a ScheduleRecord,
    /// The next ticks, as RFC 3339.
    upcoming: Vec<String>,
    last_job_state: Option<&'a str>,
}

/// Its next ticks: the one that the database has, and those after it.
fn upcoming(record: &ScheduleRecord, now: SystemTime, n: usize) -> Vec<(SystemTime, String)> {
    if record.paused_at.is_some() {
        return Vec::new();
    }
    let Ok(rule) = Rule::parse(&record.cron, &record.timezone) else { return Vec::new() };
    let first = record.next_at.as_deref().and_then(parse_time).or_else(|| rule.after(now));
    std::iter::successors(first, |tick| rule.after(*tick)).take(n).map(|tick| (tick, rule.local(tick))).collect()
}

async fn states(store: &Store, ids: &[i64]) -> Result<HashMap<i64, String>> {
    Ok(store.states(ids).await?.into_iter().collect())
}

pub(super) async fn list(store: &Store, global: &Global) -> Result<()> {
    let schedules = store.schedules().await?;
    let now = store.clock().await?;
    let jobs: Vec<i64> = schedules.iter().filter_map(|record| record.last_job_id).collect();
    let states = states(store, &jobs).await?;
    let state_of = |record: &ScheduleRecord| record.last_job_id.and_then(|job| states.get(&job)).map(String::as_str);
    if global.json {
        let row = |record| Row {
            record,
            upcoming: upcoming(record, now, 5).into_iter().map(|(tick, _)| rfc3339(tick)).collect(),
            last_job_state: state_of(record),
        };
        return output::json(&schedules.iter().map(row).collect::<Vec<_>>());
    }
    if schedules.is_empty() {
        output::note("no schedules yet; `posthouse schedule set NAME CRON KIND` makes one");
        return Ok(());
    }
    let header = ["schedule", "cron", "timezone", "kind", "next", "in", "last", "job", "state", "missed"];
    let mut grid = Grid::new(&header).right(&[7, 9]).whole(&[0, 1, 4]);
    for record in &schedules {
        let next = upcoming(record, now, 1).pop();
        let (local, left) = match &next {
            Some((tick, local)) => (local.clone(), tick.duration_since(now).map_or_else(|_| "now".to_owned(), short)),
            None if record.paused_at.is_some() => ("rests".to_owned(), String::new()),
            None => ("never".to_owned(), String::new()),
        };
        let last = record.last_fired_at.as_deref().map(|last| age(last, now)).unwrap_or_default();
        let job = record.last_job_id.map(|job| job.to_string()).unwrap_or_default();
        let texts = [&record.name, &record.cron, &record.timezone, &record.kind].map(cell);
        let next = cell(local);
        let next = if record.paused_at.is_some() { next.fg(Color::Yellow) } else { next };
        let rest = [
            next,
            cell(left),
            cell(last),
            cell(job),
            state(state_of(record).unwrap_or_default()),
            count(record.missed),
        ];
        grid.row(texts.into_iter().chain(rest).collect());
    }
    grid.print()?;
    for record in &schedules {
        if let Some(error) = &record.error {
            output::line(format_args!("schedule {} enqueues nothing: {}", clean(&record.name), clean(error)))?;
        }
    }
    Ok(())
}

pub(super) async fn show(store: &Store, name: &str, shown: u32, global: &Global) -> Result<()> {
    let record = store.schedule(name).await?.ok_or_else(|| no_schedule(name))?;
    let now = store.clock().await?;
    let runs = store.schedule_runs(name, shown).await?;
    let jobs: Vec<i64> = runs.iter().map(|run| run.job_id).collect();
    let states = states(store, &jobs).await?;
    let state_of = |run: &ScheduleRun| states.get(&run.job_id).map(String::as_str);
    let upcoming = upcoming(&record, now, shown as usize);
    if global.json {
        let row = Row {
            record: &record,
            upcoming: upcoming.iter().map(|(tick, _)| rfc3339(*tick)).collect(),
            last_job_state: runs.first().and_then(state_of),
        };
        let mut whole = serde_json::to_value(row)?;
        let with_state = |run: &ScheduleRun| json!({ "tick": run.tick, "job_id": run.job_id, "duplicate": run.duplicate, "fired_at": run.fired_at, "state": state_of(run) });
        whole["runs"] = runs.iter().map(with_state).collect();
        return output::json(&whole);
    }
    for (what, text) in facts(&record, now) {
        output::line(format_args!("{what:<10} {}", clean(&text)))?;
    }
    for (n, (tick, local)) in upcoming.iter().enumerate() {
        let left = tick.duration_since(now).map_or_else(|_| "now".to_owned(), |left| format!("in {}", short(left)));
        output::line(format_args!("{:<10} {local} ({left})", if n == 0 { "next" } else { "" }))?;
    }
    if runs.is_empty() {
        return Ok(());
    }
    let rule = Rule::parse(&record.cron, &record.timezone).ok();
    let mut grid = Grid::new(&["tick", "fired", "job", "state"]).right(&[2]);
    for run in &runs {
        let local = parse_time(&run.tick).zip(rule.as_ref()).map(|(tick, rule)| rule.local(tick));
        let state_now = if run.duplicate { "was there already" } else { state_of(run).unwrap_or("purged") };
        let cells = [
            cell(local.as_ref().unwrap_or(&run.tick)),
            cell(when(&age(&run.fired_at, now))),
            cell(run.job_id.to_string()),
        ];
        grid.row(cells.into_iter().chain([state(state_now)]).collect());
    }
    grid.print()
}

/// What is set, and how it stands.
fn facts(record: &ScheduleRecord, now: SystemTime) -> Vec<(&'static str, String)> {
    let span = |ms: f64| short(std::time::Duration::from_secs_f64(ms.max(0.0) / 1e3));
    let mut facts = vec![
        ("schedule", record.name.clone()),
        ("cron", format!("{} ({})", record.cron, record.timezone)),
        ("job", summary(&record.job)),
    ];
    facts.push((
        "catch up",
        match record.catch_up {
            CatchUp::Skip => "skip what was missed".to_owned(),
            CatchUp::One => "one job for what was missed".to_owned(),
            CatchUp::All => format!("up to {} jobs over {}", record.catch_up_max, span(record.catch_up_over_ms)),
        },
    ));
    if record.jitter_ms > 0.0 {
        facts.push(("jitter", format!("up to {}", span(record.jitter_ms))));
    }
    facts.extend(record.source.clone().map(|source| ("declared", format!("in {source}"))));
    facts.push(("fired", format!("{}, missed {}", record.fired, record.missed)));
    if let Some(paused_at) = &record.paused_at {
        let why = record.paused_reason.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
        facts.push(("rests", format!("since {}{why}", age(paused_at, now))));
    }
    facts.extend(record.error.clone().map(|error| ("error", error)));
    facts
}

/// The job on one line; a long payload is cut.
fn summary(job: &Value) -> String {
    let text = job.to_string();
    if text.chars().count() <= 300 { text } else { text.chars().take(300).chain("…".chars()).collect() }
}
