//! `posthouse job`: look at jobs and manage them.

mod show;
mod wait;

use std::process::ExitCode;

use posthouse::store::{Action, JobFilter, JobRecord, Reason, Selection, Store};
use serde_json::json;

use crate::args::{Filter, Global, Job, JobChoice, JobList, JobPurge, Page};
use crate::bulk::{self, Deed};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output::{self, Grid, age, cell, when};
use crate::style::clean;
pub(crate) use show::{find, show};

/// Runs the subcommand.
pub(crate) async fn run(command: Job, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    match command {
        Job::List(args) => list(&store, args, global).await,
        Job::Show(args) => show(&store, args.id, args.full, global).await,
        Job::Wait(args) => wait::wait(&store, &args, global).await,
        Job::Cancel(args) => many(&store, &args.choice, Verb::Cancel, global).await,
        Job::Retry(args) => many(&store, &args.choice, Verb::Retry, global).await,
        Job::Reprioritise(args) => reprioritise(&store, &args.choice, args.to, global).await,
        Job::Purge(args) => purge(&store, &args, global).await,
        Job::Explain { id } => explain(&store, id, global).await,
    }
}

async fn list(store: &Store, args: JobList, global: &Global) -> Result<ExitCode> {
    let jobs = page(store, args.state, args.filter, &args.page).await?;
    if global.json {
        output::json(&jobs)?;
        return Ok(ExitCode::SUCCESS);
    }
    if jobs.is_empty() {
        output::note("no jobs");
        return Ok(ExitCode::SUCCESS);
    }
    let now = store.clock().await?;
    let mut grid = Grid::new(&["id", "state", "kind", "queue", "tenant", "attempt", "age", "note"]).right(&[0]);
    for job in &jobs {
        let note = match (&job.error, &job.reason) {
            (Some(error), _) => error,
            (None, Some(reason)) => reason,
            (None, None) => "",
        };
        let due = job.run_at.as_deref().filter(|_| job.state == "queued").map(|at| age(at, now));
        let due = due.filter(|due| due.starts_with("in ")).map(|due| format!("due {due}"));
        grid.row(vec![
            cell(job.id.to_string()),
            output::state(&job.state),
            cell(&job.kind),
            cell(&job.queue),
            cell(&job.tenant),
            cell(format!("{}/{}", job.attempt, job.max_attempts)),
            cell(age(&job.created_at, now)),
            cell(
                [due.as_deref().unwrap_or_default(), note]
                    .into_iter()
                    .filter(|text| !text.is_empty())
                    .collect::<Vec<_>>()
                    .join("; "),
            ),
        ]);
    }
    grid.print()?;
    if let Some(last) = jobs.last().filter(|_| jobs.len() == args.page.limit as usize) {
        output::next_page(&[("--before", &last.id.to_string())]);
    }
    Ok(ExitCode::SUCCESS)
}

/// One page of the jobs in a state that a filter lets through.
pub(crate) async fn page(store: &Store, state: Option<String>, filter: Filter, page: &Page) -> Result<Vec<JobRecord>> {
    let Filter { queue, kind, tenant } = filter;
    Ok(store.jobs(&JobFilter { state, queue, kind, tenant, before: page.before }, page.limit).await?)
}

/// How to choose some, for whoever chose none.
const OPTIONS: &str = "ID, --queue, --kind, --tenant, --state, --class, --error, --failed-since or --created-before";

/// Does it to ids one by one, telling of each; to whatever else was chosen in batches.
async fn many(store: &Store, choice: &JobChoice, verb: Verb, global: &Global) -> Result<ExitCode> {
    let selection = bulk::jobs(choice, store.clock().await?);
    if selection == Selection::of(choice.ids.clone()) && !choice.scope.dry_run {
        return each(store, &choice.ids, verb, global).await;
    }
    bulk::check(&selection, "jobs", OPTIONS)?;
    let deed = match verb {
        Verb::Cancel => Deed { action: Action::Cancel, states: &["queued", "running", "waiting"], done: "cancelled" },
        Verb::Retry => {
            let action = Action::Retry { asked_by: bulk::who() };
            Deed { action, states: &["queued", "failed"], done: "retried" }
        }
    };
    bulk::run(store, selection, &choice.scope, deed, global).await
}

async fn reprioritise(store: &Store, choice: &JobChoice, priority: i32, global: &Global) -> Result<ExitCode> {
    let selection = bulk::jobs(choice, store.clock().await?);
    bulk::check(&selection, "jobs", OPTIONS)?;
    bulk::tell_strangers(store, &selection, &["queued"], "waits in no line").await?;
    let deed = Deed { action: Action::Reprioritise { priority }, states: &["queued"], done: "reprioritised" };
    bulk::run(store, selection, &choice.scope, deed, global).await
}

async fn purge(store: &Store, args: &JobPurge, global: &Global) -> Result<ExitCode> {
    let selection = bulk::jobs(&args.choice, store.clock().await?);
    bulk::check(&selection, "jobs", OPTIONS)?;
    let states = &["done", "failed", "cancelled"];
    bulk::tell_strangers(store, &selection, states, "must be cancelled first").await?;
    let deed = Deed { action: Action::Purge, states, done: "purged" };
    bulk::run_if_meant(store, selection, &args.choice.scope, args.yes, "jobs", deed, global).await
}

/// What is done to each of the ids.
#[derive(Clone, Copy)]
enum Verb {
    Cancel,
    Retry,
}

impl Verb {
    async fn apply(self, store: &Store, id: i64) -> posthouse::Result<String> {
        match self {
            Self::Cancel => store.cancel(id).await,
            Self::Retry => store.retry(id).await,
        }
    }

    /// What a state means for somebody who asked for this; `Err` if it is not what was asked for.
    fn meaning(self, state: &str) -> Result<&'static str, &'static str> {
        match (self, state) {
            (Self::Cancel, "running") => Ok(", its worker has been told to stop"),
            (Self::Cancel, "done" | "failed") => Err(" already, nothing is left to cancel"),
            _ => Ok(""),
        }
    }
}

/// Does it to each job; one that cannot be done holds up no other.
async fn each(store: &Store, ids: &[i64], verb: Verb, global: &Global) -> Result<ExitCode> {
    let mut answers = Vec::new();
    let mut failed = false;
    for &id in ids {
        let state = match verb.apply(store, id).await {
            Ok(state) => state,
            Err(error) if matches!(error.sqlstate(), Some("PH003" | "PH004")) => {
                failed = true;
                answers.push(json!({ "id": id, "error": error.to_string() }));
                if !global.json {
                    Failure::from(error).report();
                }
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let meaning = verb.meaning(&state);
        failed |= meaning.is_err();
        answers.push(json!({ "id": id, "state": state }));
        if !global.json {
            output::line(format_args!("job {id} {}{}", clean(&state), meaning.unwrap_or_else(|why| why)))?;
        }
    }
    if global.json {
        output::json(&answers)?;
    }
    Ok(ExitCode::from(u8::from(failed)))
}

async fn explain(store: &Store, id: i64, global: &Global) -> Result<ExitCode> {
    let reasons = store.explain(id).await?;
    if global.json {
        output::json(&reasons)?;
        return Ok(ExitCode::SUCCESS);
    }
    let now = store.clock().await?;
    for Reason { state, reason, until } in &reasons {
        let until = match until {
            Some(until) => format!(", until {} ({})", clean(until), when(&age(until, now))),
            None => String::new(),
        };
        output::line(format_args!("job {id} {}: {}{until}", clean(state), clean(reason)))?;
    }
    Ok(ExitCode::SUCCESS)
}
