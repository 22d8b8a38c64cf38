//! `posthouse db adopt`: the word that the jobs of a copied database shall run here, after a look at what that would be.

use std::io::{IsTerminal, stderr, stdin};
use std::process::ExitCode;

use posthouse::store::{Origin, QueueHealth, Store};
use serde_json::json;

use crate::args::{DbAdopt, Global};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output::{self, Grid, cell, count};
use crate::style::clean;

/// Runs the subcommand.
pub(crate) async fn run(args: &DbAdopt, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    if args.undo {
        store.disown().await?;
        return tell_undone(global);
    }
    let origin = store.origin().await?;
    if !origin.is_copy {
        return tell_at_home(&origin, global);
    }
    let queues = queues(&store).await?;
    if !global.json {
        show(&origin, &queues)?;
    }
    let adopted = !args.dry_run && (args.yes || ask(global)?) && store.adopt().await?;
    if global.json {
        output::json(
            &json!({ "is_copy": true, "reason": origin.reason, "queues": queues.iter().map(Row::json).collect::<Vec<_>>(), "adopted": adopted }),
        )?;
    } else if adopted {
        output::line("adopted: workers run the jobs of this database from now on")?;
    } else if !args.dry_run {
        output::line("nothing was changed: no worker runs jobs here")?;
    }
    Ok(if adopted || args.dry_run { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn tell_undone(global: &Global) -> Result<ExitCode> {
    if global.json {
        output::json(&json!({ "is_copy": true, "adopted": false }))?;
    } else {
        output::line(
            "no worker that starts from now on runs jobs here, until `posthouse db adopt`; those that run go on",
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

fn tell_at_home(origin: &Origin, global: &Global) -> Result<ExitCode> {
    if global.json {
        output::json(&json!({ "is_copy": false, "reason": null, "queues": [], "adopted": false }))?;
    } else if origin.is_stamped {
        output::line("this database is no copy, as far as can be told: there is nothing to adopt")?;
    } else {
        output::line("no worker has been here yet: the first one that comes takes it as it is")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// What of a queue would run, over all tenants.
struct Row {
    queue: String,
    due: i64,
    later: i64,
    running: i64,
    failed: i64,
}

impl Row {
    fn json(&self) -> serde_json::Value {
        json!({ "queue": self.queue, "due": self.due, "later": self.later, "running": self.running, "failed": self.failed })
    }
}

async fn queues(store: &Store) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for QueueHealth { queue, due, later, running, failed, .. } in store.queue_health().await? {
        if due + later + running + failed == 0 {
            continue;
        }
        match rows.iter_mut().find(|row| row.queue == queue) {
            Some(row) => {
                row.due += due;
                row.later += later;
                row.running += running;
                row.failed += failed;
            }
            None => rows.push(Row { queue, due, later, running, failed }),
        }
    }
    rows.sort_by(|one, other| one.queue.cmp(&other.queue));
    Ok(rows)
}

fn show(origin: &Origin, queues: &[Row]) -> Result<()> {
    output::line(format_args!(
        "this database is a copy of another: {}",
        clean(origin.reason.as_deref().unwrap_or("nobody knows why"))
    ))?;
    if queues.is_empty() {
        return output::line("nothing is queued in it");
    }
    output::line("what is in it, and may run at the other one too:")?;
    let mut grid = Grid::new(&["queue", "due", "later", "running", "dead letters"]).right(&[1, 2, 3, 4]);
    for row in queues {
        grid.row(vec![cell(&row.queue), count(row.due), count(row.later), count(row.running), count(row.failed)]);
    }
    grid.print()?;
    if queues.iter().any(|row| row.running > 0) {
        output::note("what was running when the copy was made runs again, once the lease of its worker is over");
    }
    output::note("to have jobs not run here, cancel them first, as with `posthouse job cancel --queue NAME`");
    Ok(())
}

/// Whether somebody at the terminal says yes.
fn ask(global: &Global) -> Result<bool> {
    if global.json || !stdin().is_terminal() || !stderr().is_terminal() {
        return Err(
            Failure::usage("to adopt it without being asked, say --yes").hint("--dry-run only shows what is in it")
        );
    }
    eprint!("Shall these jobs run here? [y/N] ");
    let mut answer = String::new();
    stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
