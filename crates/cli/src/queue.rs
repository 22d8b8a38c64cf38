//! `posthouse queue`: the settings of queues, and which are paused.

use std::process::ExitCode;
use std::time::Duration;

use comfy_table::Color;
use posthouse::store::{GateRecord, QueueSettings, Store};
use serde::Serialize;

use crate::args::{Global, Queue, QueueSet, Retention};
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

async fn rows(store: &Store) -> Result<Vec<Row>> {
    let mut settings = store.queues().await?;
    let mut gates = store.gates().await?;
    gates.retain(|gate| gate.name.starts_with("queue:") && gate.name != "queue:*");
    let name = |gate: &GateRecord| gate.name.strip_prefix("queue:").unwrap_or_default().to_owned();
    for queue in gates.iter().map(name) {
        if !settings.iter().any(|known| known.queue == queue) {
            settings.push(QueueSettings { queue, retention_ms: None });
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
    let mut grid = Grid::new(&["queue", "retention", "paused"]);
    for Row { settings, gate, .. } in &queues {
        let paused = gate.as_ref().and_then(|gate| gate::closed(gate, now)).unwrap_or_default();
        grid.row(vec![cell(&settings.queue), cell(retention(settings)), cell(paused).fg(Color::Red)]);
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
    let time = match args.retention {
        Retention::Zero => Some(Duration::ZERO),
        Retention::Forever => None,
    };
    store.set_retention(&args.queue, time).await?;
    if global.json {
        let retention_ms = time.map(|_| 0);
        output::json(&QueueSettings { queue: args.queue.clone(), retention_ms })?;
        return Ok(ExitCode::SUCCESS);
    }
    let now = match args.retention {
        Retention::Zero => "keeps no history: ten minutes after a job is done or cancelled it is forgotten",
        Retention::Forever => "keeps done and cancelled jobs for ever",
    };
    output::line(format_args!("queue {} {now}", clean(&args.queue)))?;
    Ok(ExitCode::SUCCESS)
}
