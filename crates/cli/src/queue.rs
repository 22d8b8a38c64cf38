//! `posthouse queue`: the settings of queues.

use std::process::ExitCode;
use std::time::Duration;

use posthouse::store::{QueueSettings, Store};

use crate::args::{Global, Queue, QueueSet, Retention};
use crate::connect;
use crate::failure::Result;
use crate::output::{self, Grid, cell, short};
use crate::style::clean;

/// Runs the subcommand.
pub(crate) async fn run(command: Queue, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    match command {
        Queue::List => list(&store, global).await,
        Queue::Set(args) => set(&store, &args, global).await,
    }
}

async fn list(store: &Store, global: &Global) -> Result<ExitCode> {
    let queues = store.queues().await?;
    if global.json {
        output::json(&queues)?;
        return Ok(ExitCode::SUCCESS);
    }
    if queues.is_empty() {
        output::note("no queues yet; `posthouse enqueue KIND PAYLOAD` makes one");
        return Ok(ExitCode::SUCCESS);
    }
    let mut grid = Grid::new(&["queue", "retention"]);
    for queue in &queues {
        grid.row(vec![cell(&queue.queue), cell(retention(queue))]);
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
