//! `posthouse queue`: the settings of queues, and which are paused.

use std::process::ExitCode;
use std::time::Duration;

use comfy_table::Color;
use posthouse::store::{DepthOf, Ended, GateRecord, QueueSettings, Retention, Store};
use serde::Serialize;

use crate::args::{Depth, FairBy, Global, Queue, QueueSet};
use crate::connect;
use crate::failure::Result;
use crate::gate::{self, Whose};
use crate::output::{self, Grid, cell, short};
use crate::style::clean;

/// Runs the subcommand.
pub(crate) async fn run(command: Queue, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    match command {
        Queue::List => list(&store, global).await,
        Queue::Set(args) => set(&store, &args, global).await,
        Queue::Pause(args) => {
            gate::close(&store, Whose::Queue(&args.queue), &args.closing, global).await?;
            Ok(ExitCode::SUCCESS)
        }
        Queue::Resume { queue } => {
            gate::open(&store, Whose::Queue(&queue), global).await?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// A queue with its settings, and the state of its gate.
#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    settings: QueueSettings,
    max_depth: Option<i32>,
    closed_until: Option<String>,
    closed_reason: Option<String>,
    #[serde(skip)]
    gate: Option<GateRecord>,
}

impl Row {
    fn bare(queue: String) -> Self {
        Self { settings: bare(queue), max_depth: None, closed_until: None, closed_reason: None, gate: None }
    }
}

/// A queue of which nothing is set.
fn bare(queue: String) -> QueueSettings {
    QueueSettings {
        queue,
        retention_ms: None,
        retention_cancelled_ms: None,
        retention_failed_ms: None,
        fair_by: "jobs".to_owned(),
        serial_by: None,
    }
}

async fn rows(store: &Store) -> Result<Vec<Row>> {
    let mut settings = store.queues().await?;
    let gates = store.gates_of_each("queue:").await?;
    let name = |gate: &GateRecord| gate.name.strip_prefix("queue:").unwrap_or_default().to_owned();
    for queue in gates.iter().map(name) {
        if !settings.iter().any(|known| known.queue == queue) {
            settings.push(bare(queue));
        }
    }
    let depths = store.depths().await?;
    let depths: Vec<_> = depths.iter().filter(|limit| limit.scope == "queue").collect();
    for limit in &depths {
        if !settings.iter().any(|known| known.queue == limit.name) {
            settings.push(bare(limit.name.clone()));
        }
    }
    settings.sort_by(|one, other| one.queue.cmp(&other.queue));
    let row = |settings: QueueSettings| {
        let gate = gates.iter().find(|gate| name(gate) == settings.queue).cloned();
        let closed = gate.clone();
        Row {
            max_depth: depths.iter().find(|limit| limit.name == settings.queue).map(|limit| limit.max_depth),
            settings,
            closed_until: closed.as_ref().and_then(|gate| gate.closed_until.clone()),
            closed_reason: closed.and_then(|gate| gate.closed_reason),
            gate,
        }
    };
    Ok(settings.into_iter().map(row).collect())
}

async fn list(store: &Store, global: &Global) -> Result<ExitCode> {
    let queues = rows(store).await?;
    if global.json {
        output::json(&queues)?;
        return Ok(ExitCode::SUCCESS);
    }
    if queues.is_empty() {
        output::note("no queues yet; `posthouse enqueue KIND PAYLOAD` makes one");
        return Ok(ExitCode::SUCCESS);
    }
    let now = store.clock().await?;
    let mut grid =
        Grid::new(&["queue", "retention", "cancelled", "failed", "serial by", "fair by", "may wait", "paused"]);
    for Row { settings, gate, max_depth, .. } in &queues {
        let paused = gate.as_ref().and_then(|gate| gate::paused(gate, now)).unwrap_or_default();
        let serial_by = settings.serial_by.as_deref().unwrap_or_default();
        let kept =
            [settings.retention_ms, settings.retention_cancelled_ms, settings.retention_failed_ms].map(retention);
        let may_wait = max_depth.map(|jobs| jobs.to_string()).unwrap_or_default();
        let row = [settings.queue.clone()].into_iter().chain(kept);
        let row = row.chain([serial_by.to_owned(), settings.fair_by.clone(), may_wait]);
        grid.row(row.map(cell).chain([cell(paused).fg(Color::Red)]).collect());
    }
    grid.print()?;
    Ok(ExitCode::SUCCESS)
}

fn retention(ms: Option<i64>) -> String {
    match ms {
        None => "forever".to_owned(),
        Some(0) => "0".to_owned(),
        Some(ms) => short(Duration::from_millis(ms.try_into().unwrap_or(0))),
    }
}

/// What a retention means, in words.
fn kept(queue: &str, ended: Ended, retention: Retention) -> String {
    let jobs = match ended {
        Ended::Done => "done jobs",
        Ended::Cancelled => "cancelled jobs",
        Ended::Failed => "failed jobs",
    };
    match retention {
        Retention::For(Duration::ZERO) => format!("keeps no history of {jobs}: ten minutes later they are forgotten"),
        Retention::For(time) => format!("keeps {jobs} for {}", in_words(time)),
        Retention::Forever => format!("keeps {jobs} for ever"),
        Retention::Default if ended == Ended::Cancelled => "keeps cancelled jobs as long as done ones".to_owned(),
        Retention::Default if queue == "*" => format!("keeps {jobs} for ever, as it comes"),
        Retention::Default => format!("keeps {jobs} as the queue '*' does; for ever if nothing is set for that"),
    }
}

/// As it was typed where that were days: `90d` is not two months, 29 days and three hours.
fn in_words(time: Duration) -> String {
    const DAY: u64 = 86_400;
    const YEAR: u64 = 31_557_600;
    match time.as_secs() {
        DAY => "1 day".to_owned(),
        YEAR => "1 year".to_owned(),
        s if s > 0 && s % DAY == 0 && time.subsec_nanos() == 0 => format!("{} days", s / DAY),
        _ => humantime::format_duration(time).to_string(),
    }
}

async fn set(store: &Store, args: &QueueSet, global: &Global) -> Result<ExitCode> {
    let mut told = Vec::new();
    if let Some(field) = args.changes.serial_by.as_deref() {
        let field = (field != "none").then_some(field);
        store.set_serial_by(&args.queue, field).await?;
        told.push(match field {
            Some(field) => format!(
                "runs jobs that share the field {} one at a time, from those on that are put in now",
                clean(field)
            ),
            None => "runs jobs that are put in from now on as they come".to_owned(),
        });
    }
    for (ended, retention) in [
        (Ended::Done, args.changes.retention),
        (Ended::Cancelled, args.changes.retention_cancelled),
        (Ended::Failed, args.changes.retention_failed),
    ] {
        if let Some(retention) = retention {
            store.set_retention(&args.queue, ended, retention).await?;
            told.push(kept(&args.queue, ended, retention));
        }
    }
    if let Some(fair_by) = args.changes.fair_by {
        let by = match fair_by {
            FairBy::Jobs => "jobs",
            FairBy::Tokens => "tokens",
        };
        store.set_fair_by(&args.queue, by).await?;
        told.push(format!("is fair between its tenants by {by}"));
    }
    if let Some(Depth(max_depth)) = args.changes.max_depth {
        store.set_depth(DepthOf::Queue(&args.queue), max_depth).await?;
        told.push(match max_depth {
            Some(jobs) => format!("takes in no new jobs while {jobs} wait"),
            None => "takes in any number of jobs".to_owned(),
        });
    }
    if global.json {
        let row = rows(store).await?.into_iter().find(|row| row.settings.queue == args.queue);
        output::json(&row.unwrap_or_else(|| Row::bare(args.queue.clone())))?;
        return Ok(ExitCode::SUCCESS);
    }
    for now in told {
        output::line(format_args!("queue {} {now}", clean(&args.queue)))?;
    }
    Ok(ExitCode::SUCCESS)
}
