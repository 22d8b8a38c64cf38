//! `posthouse queue`: the settings of queues, and which are paused.

use std::process::ExitCode;
use std::time::Duration;

use comfy_table::Color;
use posthouse::store::{GateRecord, QueueSettings, Store};
use serde::Serialize;

use crate::args::{FairBy, Global, Queue, QueueSet, Retention};
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
    closed_until: Option<String>,
    closed_reason: Option<String>,
    #[serde(skip)]
    gate: Option<GateRecord>,
}

/// A queue of which nothing is set.
fn bare(queue: String) -> QueueSettings {
    QueueSettings { queue, retention_ms: None, fair_by: "jobs".to_owned(), serial_by: None }
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
    settings.sort_by(|one, other| one.queue.cmp(&other.queue));
    let row = |settings: QueueSettings| {
        let gate = gates.iter().find(|gate| name(gate) == settings.queue).cloned();
        let closed = gate.clone();
        Row {
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
    let mut grid = Grid::new(&["queue", "retention", "serial by", "fair by", "paused"]);
    for Row { settings, gate, .. } in &queues {
        let paused = gate.as_ref().and_then(|gate| gate::paused(gate, now)).unwrap_or_default();
        let serial_by = settings.serial_by.as_deref().unwrap_or_default();
        let row = vec![cell(&settings.queue), cell(retention(settings)), cell(serial_by), cell(&settings.fair_by)];
        grid.row(row.into_iter().chain([cell(paused).fg(Color::Red)]).collect());
    }
    grid.print()?;
    Ok(ExitCode::SUCCESS)
}

fn retention(queue: &QueueSettings) -> String {
    match queue.retention_ms {
        None => "forever".to_owned(),
        Some(0) => "0".to_owned(),
        Some(ms) => short(Duration::from_millis(ms.try_into().unwrap_or(0))),
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
    if let Some(retention) = args.changes.retention {
        let time = (retention == Retention::Zero).then_some(Duration::ZERO);
        store.set_retention(&args.queue, time).await?;
        told.push(match retention {
            Retention::Zero => {
                "keeps no history: ten minutes after a job is done or cancelled it is forgotten".to_owned()
            }
            Retention::Forever => "keeps done and cancelled jobs for ever".to_owned(),
        });
    }
    if let Some(fair_by) = args.changes.fair_by {
        let by = match fair_by {
            FairBy::Jobs => "jobs",
            FairBy::Tokens => "tokens",
        };
        store.set_fair_by(&args.queue, by).await?;
        told.push(format!("is fair between its tenants by {by}"));
    }
    if global.json {
        let settings = store.queues().await?.into_iter().find(|known| known.queue == args.queue);
        output::json(&settings.unwrap_or_else(|| bare(args.queue.clone())))?;
        return Ok(ExitCode::SUCCESS);
    }
    for now in told {
        output::line(format_args!("queue {} {now}", clean(&args.queue)))?;
    }
    Ok(ExitCode::SUCCESS)
}
