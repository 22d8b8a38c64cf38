//! `posthouse dead`: look at dead letters, redrive them, purge them.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use posthouse::store::{DeadFilter, Store};
use serde_json::json;
use tokio::time::{MissedTickBehavior, interval};

use crate::args::{Dead, DeadChoice, DeadList, Global, Purge, Redrive};
use crate::failure::{Failure, Result};
use crate::output::{self, Grid, age, cell};
use crate::style::clean;
use crate::{connect, job};

/// Dead letters in one transaction: a few at a time hold up nobody.
const BATCH: u32 = 500;
/// Batches a second where a rate is asked for, so that jobs come in a stream and not in a rush.
const BATCHES_PER_SECOND: u32 = 10;

/// Runs the subcommand.
pub(crate) async fn run(command: Dead, global: &Global) -> Result<ExitCode> {
    if let Dead::Redrive(Redrive { choice, .. }) | Dead::Purge(Purge { choice, .. }) = &command
        && choice.is_empty()
    {
        return Err(Failure::usage("which dead letters is not said")
            .hint("name them by ID, by --queue, --kind and --tenant, or take --all"));
    }
    let store = connect::store(global).await?;
    match command {
        Dead::List(args) => list(&store, args, global).await,
        Dead::Show(args) => {
            let found = job::find(&store, args.id).await?;
            if found.state != "failed" {
                return Err(Failure::new(format!("job {} is {} and no dead letter", args.id, found.state))
                    .hint(format!("`posthouse job show {}` shows it", args.id)));
            }
            job::show(&store, args.id, args.full, global).await
        }
        Dead::Redrive(args) => redrive(&store, &args, global).await,
        Dead::Purge(args) => purge(&store, &args, global).await,
    }
}

async fn list(store: &Store, args: DeadList, global: &Global) -> Result<ExitCode> {
    let jobs = job::page(store, Some("failed".to_owned()), args.filter, &args.page).await?;
    if global.json {
        output::json(&jobs)?;
        return Ok(ExitCode::SUCCESS);
    }
    if jobs.is_empty() {
        output::note("no dead letters");
        return Ok(ExitCode::SUCCESS);
    }
    let now = store.clock().await?;
    let mut grid = Grid::new(&["id", "kind", "queue", "tenant", "attempt", "failed", "class", "error"]).right(&[0]);
    for job in &jobs {
        grid.row(vec![
            cell(job.id.to_string()),
            cell(&job.kind),
            cell(&job.queue),
            cell(&job.tenant),
            cell(format!("{}/{}", job.attempt, job.max_attempts)),
            cell(job.finished_at.as_deref().map(|at| age(at, now)).unwrap_or_default()),
            cell(job.reason.as_deref().unwrap_or_default()),
            cell(job.error.as_deref().unwrap_or_default()),
        ]);
    }
    grid.print()?;
    job::more(&jobs, &args.page, "dead");
    Ok(ExitCode::SUCCESS)
}

fn filter(choice: &DeadChoice) -> DeadFilter {
    DeadFilter {
        ids: Some(choice.ids.clone()).filter(|ids| !ids.is_empty()),
        queue: choice.filter.queue.clone(),
        kind: choice.filter.kind.clone(),
        tenant: choice.filter.tenant.clone(),
    }
}

/// How many dead letters there are of this choice. Who names ids is told which are none.
async fn count(store: &Store, choice: &DeadChoice) -> Result<i64> {
    let there = store.count_dead(&filter(choice)).await?;
    if choice.ids.is_empty() {
        return Ok(there);
    }
    let states = store.states(&choice.ids).await?;
    for id in &choice.ids {
        match states.iter().find(|(found, _)| found == id) {
            Some((_, state)) if state == "failed" => {}
            Some((_, state)) => output::note(format_args!("job {id} is {} and no dead letter", clean(state))),
            None => output::note(format_args!("job {id}: there is no such job")),
        }
    }
    Ok(there)
}

/// Exit code 1 if an id that was named was none of a dead letter, so that a script notices.
fn code(choice: &DeadChoice, changed: i64) -> ExitCode {
    let mut ids = choice.ids.clone();
    ids.sort_unstable();
    ids.dedup();
    ExitCode::from(u8::from(changed < i64::try_from(ids.len()).unwrap_or(i64::MAX)))
}

/// Does it to so many dead letters, a batch at a time, showing how far it is.
async fn in_batches(
    choice: &DeadChoice,
    total: i64,
    batch: u32,
    verb: &'static str,
    global: &Global,
    mut change: impl AsyncFnMut(&DeadFilter, u32) -> posthouse::Result<i64>,
) -> Result<ExitCode> {
    // The template is constant and sound.
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)");
    let bar = ProgressBar::new(u64::try_from(total).unwrap_or(0));
    let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())).with_message(verb);
    let filter = filter(choice);
    let mut changed = 0;
    while changed < total {
        let left = u32::try_from(total - changed).unwrap_or(u32::MAX);
        let now = change(&filter, batch.min(left)).await?;
        changed += now;
        bar.inc(u64::try_from(now).unwrap_or(0));
        if now == 0 {
            break;
        }
    }
    bar.finish_and_clear();
    if global.json {
        output::json(&json!({ verb: changed }))?;
    } else {
        output::line(format_args!("{changed} {verb}"))?;
    }
    Ok(code(choice, changed))
}

/// As many as there are now, oldest first: those that fail again meanwhile are newer, and are left alone.
async fn redrive(store: &Store, args: &Redrive, global: &Global) -> Result<ExitCode> {
    let total = count(store, &args.choice).await?;
    let batch = args.rate.map_or(BATCH, |rate| (rate / BATCHES_PER_SECOND).clamp(1, BATCH));
    let mut ticks = args.rate.map(|rate| interval(Duration::from_secs_f64(f64::from(batch) / f64::from(rate))));
    if let Some(ticks) = &mut ticks {
        // A slow batch is not made good for by a rush.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    let redrive = async |filter: &DeadFilter, most| {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        store.redrive(filter, most).await
    };
    in_batches(&args.choice, total, batch, "redriven", global, redrive).await
}

async fn purge(store: &Store, args: &Purge, global: &Global) -> Result<ExitCode> {
    let total = count(store, &args.choice).await?;
    if args.choice.ids.is_empty() && !args.yes {
        if global.json {
            output::json(&json!({ "purged": 0, "would_purge": total }))?;
        }
        return Err(Failure::new(format!("nothing purged: this would remove {total} dead letters for good"))
            .hint("look at them with `posthouse dead list`; add --yes to remove them"));
    }
    let purge = async |filter: &DeadFilter, most| store.purge(filter, most).await;
    in_batches(&args.choice, total, BATCH, "purged", global, purge).await
}
