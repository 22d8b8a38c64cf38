//! `posthouse dead`: look at dead letters, redrive them, purge them.

use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use posthouse::store::{DeadFilter, JobFilter, Store};
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
    let DeadList { filter, limit, before } = args;
    let state = Some("failed".to_owned());
    let filter = JobFilter { state, queue: filter.queue, kind: filter.kind, tenant: filter.tenant, before };
    let jobs = store.jobs(&filter, limit).await?;
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
    job::more(&jobs, limit, "dead");
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

fn bar(total: i64, verb: &'static str) -> ProgressBar {
    let bar = ProgressBar::new(u64::try_from(total).unwrap_or(0));
    // The template is constant and sound.
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())).with_message(verb)
}

/// As many as there are now, oldest first: those that fail again meanwhile are newer, and are left alone.
async fn redrive(store: &Store, args: &Redrive, global: &Global) -> Result<ExitCode> {
    let total = count(store, &args.choice).await?;
    let filter = filter(&args.choice);
    let bar = bar(total, "redriven");
    let batch = args.rate.map_or(BATCH, |rate| (rate / BATCHES_PER_SECOND).clamp(1, BATCH));
    let mut ticks = args.rate.map(|rate| interval(Duration::from_secs_f64(f64::from(batch) / f64::from(rate))));
    if let Some(ticks) = &mut ticks {
        // A slow batch is not made good for by a rush.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    }
    let mut redriven = 0;
    while redriven < total {
        if let Some(ticks) = &mut ticks {
            ticks.tick().await;
        }
        let left = u32::try_from(total - redriven).unwrap_or(u32::MAX);
        let now = store.redrive(&filter, batch.min(left)).await?;
        redriven += now;
        bar.inc(u64::try_from(now).unwrap_or(0));
        if now == 0 {
            break;
        }
    }
    bar.finish_and_clear();
    if global.json {
        output::json(&json!({ "redriven": redriven }))?;
    } else {
        output::line(format_args!("{redriven} redriven"))?;
    }
    Ok(code(&args.choice, redriven))
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
    let filter = filter(&args.choice);
    let bar = bar(total, "purged");
    let mut purged = 0;
    while purged < total {
        let left = u32::try_from(total - purged).unwrap_or(u32::MAX);
        let now = store.purge(&filter, BATCH.min(left)).await?;
        purged += now;
        bar.inc(u64::try_from(now).unwrap_or(0));
        if now == 0 {
            break;
        }
    }
    bar.finish_and_clear();
    if global.json {
        output::json(&json!({ "purged": purged }))?;
    } else {
        output::line(format_args!("{purged} purged"))?;
    }
    Ok(code(&args.choice, purged))
}
