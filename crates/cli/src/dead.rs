//! `posthouse dead`: look at dead letters, redrive them, purge them.

use std::process::ExitCode;
use std::time::Duration;

use posthouse::store::{Action, DeadLetter, Store};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::args::{Assignment, Changes, Dead, DeadList, Global, Purge, Redrive};
use crate::bulk::{self, Deed};
use crate::failure::{Failure, Result};
use crate::output::{self, Grid, age, cell};
use crate::{connect, job, payload};

/// How to choose some, for whoever chose none.
const OPTIONS: &str = "ID, --queue, --kind, --tenant, --class, --error, --since or --before";

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
        Dead::Redrive(args) => redrive(&store, *args, global).await,
        Dead::Purge(args) => purge(&store, &args, global).await,
    }
}

async fn list(store: &Store, args: DeadList, global: &Global) -> Result<ExitCode> {
    let now = store.clock().await?;
    let selection = bulk::conditions(&args.conditions, now);
    let letters = store.dead_letters(&selection, args.limit, args.next).await?;
    if global.json {
        output::json(&letters)?;
        return Ok(ExitCode::SUCCESS);
    }
    if letters.is_empty() {
        output::note("no dead letters");
        return Ok(ExitCode::SUCCESS);
    }
    let mut grid =
        Grid::new(&["id", "kind", "queue", "tenant", "attempt", "redrives", "failed", "class", "error"]).right(&[0, 5]);
    for letter in &letters {
        grid.row(vec![
            cell(letter.id.to_string()),
            cell(&letter.kind),
            cell(&letter.queue),
            cell(&letter.tenant),
            cell(format!("{}/{}", letter.attempt, letter.max_attempts)),
            output::count(letter.redrives),
            cell(age(&letter.failed_at, now)),
            cell(&letter.class),
            cell(&letter.error),
        ]);
    }
    grid.print()?;
    if let Some(DeadLetter { failed_at, id, .. }) = letters.last().filter(|_| letters.len() == args.limit as usize) {
        let next = format!("{failed_at}/{id}");
        // An age counts back from now: the next page has the bounds of this one.
        let times = [("--since", &selection.failed_since), ("--before", &selection.failed_before)];
        let times = times.iter().filter_map(|(option, time)| Some((*option, time.as_deref()?)));
        output::next_page(&times.chain([("--next", next.as_str())]).collect::<Vec<_>>());
    }
    Ok(ExitCode::SUCCESS)
}

async fn redrive(store: &Store, args: Redrive, global: &Global) -> Result<ExitCode> {
    let selection = bulk::dead(&args.choice, store.clock().await?);
    bulk::check(&selection, "dead letters", OPTIONS)?;
    bulk::tell_strangers(store, &selection, &["failed"], "no dead letter").await?;
    if args.changes.payload.is_some() && selection.ids.as_ref().map(Vec::len) != Some(1) {
        return Err(Failure::usage("--payload is for one dead letter, named by its ID")
            .hint("change a part of many payloads with --set KEY=VALUE"));
    }
    let changes = Some(wanted(args.changes)?);
    let action = Action::Redrive { changes, rate: args.rate, asked_by: bulk::who() };
    let code =
        bulk::run(store, selection, &args.choice.scope, Deed { action, states: &["failed"], done: "redriven" }, global)
            .await?;
    if let Some(rate) = args.rate.filter(|_| !args.choice.scope.dry_run) {
        let apart = Duration::from_secs_f64(1.0 / rate);
        output::note(format_args!("one becomes due every {}", humantime::format_duration(apart)));
    }
    Ok(code)
}

/// What is to be changed, as the queue takes it.
#[derive(Serialize)]
struct Wanted {
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_attempts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    set: Vec<Assignment>,
}

fn wanted(changes: Changes) -> Result<Box<RawValue>> {
    let payload = changes.payload.map(|text| payload::json("--payload", &text)).transpose()?;
    let wanted = Wanted {
        model: changes.model,
        max_attempts: changes.max_attempts,
        timeout_ms: changes.timeout.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        queue: changes.to_queue,
        priority: changes.priority,
        payload,
        set: changes.sets,
    };
    Ok(to_raw_value(&wanted)?)
}

async fn purge(store: &Store, args: &Purge, global: &Global) -> Result<ExitCode> {
    let selection = bulk::dead(&args.choice, store.clock().await?);
    bulk::check(&selection, "dead letters", OPTIONS)?;
    bulk::tell_strangers(store, &selection, &["failed"], "no dead letter").await?;
    let deed = Deed { action: Action::Purge, states: &["failed"], done: "purged" };
    bulk::run_if_meant(store, selection, &args.choice.scope, args.yes, "dead letters", deed, global).await
}
