//! `posthouse schedule`: cron rules that enqueue.

mod apply;
mod table;
mod words;

use std::process::ExitCode;
use std::time::SystemTime;

use posthouse::NewJob;
use posthouse::cron::Rule;
use posthouse::job::DedupeFor;
use posthouse::store::{self, Store};
use serde_json::json;

use crate::args::{Global, Schedule, ScheduleSet};
use crate::failure::{Failure, Result};
use crate::output;
use crate::style::clean;
use crate::{connect, payload};

use words::{no_schedule, rfc3339, word};

pub(crate) use apply::{Declared, gone};

/// Ticks that are shown of a schedule.
const SHOWN: u32 = 5;

/// Runs the subcommand.
pub(crate) async fn run(command: Schedule, global: &Global) -> Result<ExitCode> {
    match &command {
        Schedule::Next { cron, timezone, count, after } => {
            next(cron, timezone, *count, after.unwrap_or_else(SystemTime::now), global)?;
            return Ok(ExitCode::SUCCESS);
        }
        Schedule::Apply(args) => return apply::run(args, global).await,
        _ => {}
    }
    let store = connect::store(global).await?;
    match command {
        Schedule::List => table::list(&store, global).await?,
        Schedule::Show { name } => table::show(&store, &name, SHOWN, global).await?,
        Schedule::Set(args) => set(&store, &args, global).await?,
        Schedule::Pause { name, reason } => pause(&store, &name, reason.as_deref(), global).await?,
        Schedule::Resume { name } => resume(&store, &name, global).await?,
        Schedule::Remove { name } => remove(&store, &name, global).await?,
        Schedule::Next { .. } | Schedule::Apply(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// An unknown name is told in the words of the command line.
fn named(name: &str, error: posthouse::Error) -> Failure {
    if error.sqlstate() == Some("PH003") { no_schedule(name) } else { error.into() }
}

fn next(cron: &str, timezone: &str, count: u32, after: SystemTime, global: &Global) -> Result<()> {
    let rule = Rule::parse(cron, timezone)?;
    let ticks = std::iter::successors(rule.after(after), |tick| rule.after(*tick)).take(count as usize);
    if global.json {
        return output::json(
            &ticks.map(|tick| json!({ "at": rfc3339(tick), "local": rule.local(tick) })).collect::<Vec<_>>(),
        );
    }
    let ticks: Vec<_> = ticks.map(|tick| rule.local(tick)).collect();
    if ticks.is_empty() {
        output::note("it is not due after that any more");
    }
    ticks.iter().try_for_each(output::line)
}

/// What was typed.
fn declared(args: &ScheduleSet) -> Result<store::Schedule> {
    let mut job = payload::job(&args.kind, args.payload.as_deref())?;
    let texts = [(&args.queue, NewJob::queue as fn(NewJob, String) -> NewJob), (&args.tenant, NewJob::tenant)];
    for (text, set) in texts {
        job = match text {
            Some(text) => set(job, text.clone()),
            None => job,
        };
    }
    if let Some(priority) = args.priority {
        job = job.priority(priority);
    }
    if let Some(max_attempts) = args.max_attempts {
        job = job.max_attempts(max_attempts);
    }
    if let Some(timeout) = args.timeout {
        job = job.timeout(timeout);
    }
    if let Some(tokens) = args.tokens {
        job = job.tokens(tokens);
    }
    job = args.gates.iter().fold(job, |job, gate| job.gate(gate));
    if let Some(key) = &args.dedupe_key {
        job = job.dedupe_key(key);
    }
    if let Some(policy) = args.dedupe_policy {
        job = job.dedupe_policy(policy);
    }
    if let Some(window) = args.dedupe_for {
        job = job.dedupe_for(DedupeFor::Window(window));
    }
    Ok(store::Schedule::new(&args.name, &args.cron, job)
        .timezone(&args.timezone)
        .catch_up(args.catch_up.into())
        .catch_up_most(args.catch_up_max, args.catch_up_over)
        .jitter(args.jitter))
}

async fn set(store: &Store, args: &ScheduleSet, global: &Global) -> Result<()> {
    let schedule = declared(args)?;
    let rule = schedule.rule()?;
    let change = store.set_schedule(&schedule).await?;
    let record = store.schedule(&args.name).await?.ok_or_else(|| no_schedule(&args.name))?;
    if global.json {
        return output::json(&record);
    }
    let name = clean(&args.name);
    if record.paused_at.is_some() {
        return output::line(format_args!(
            "schedule {name} ({}) rests; `posthouse schedule resume {name}` lets it go on",
            word(change)
        ));
    }
    let next = rule.after(store.clock().await?).map_or_else(|| "never".to_owned(), |next| rule.local(next));
    output::line(format_args!("schedule {name} ({}): next at {next}", word(change)))
}

async fn pause(store: &Store, name: &str, reason: Option<&str>, global: &Global) -> Result<()> {
    let paused = store.pause_schedule(name, reason).await.map_err(|error| named(name, error))?;
    if global.json {
        return output::json(&json!({ "name": name, "paused": paused }));
    }
    let name = clean(name);
    let rests = if paused { "rests" } else { "rested already" };
    output::line(format_args!("schedule {name} {rests}; `posthouse schedule resume {name}` lets it go on"))
}

async fn resume(store: &Store, name: &str, global: &Global) -> Result<()> {
    let resumed = store.resume_schedule(name).await.map_err(|error| named(name, error))?;
    if global.json {
        return output::json(&json!({ "name": name, "resumed": resumed }));
    }
    output::line(format_args!("schedule {} {}", clean(name), if resumed { "goes on" } else { "did not rest" }))
}

async fn remove(store: &Store, name: &str, global: &Global) -> Result<()> {
    if !store.remove_schedule(name).await? {
        return Err(no_schedule(name));
    }
    if global.json {
        return output::json(&json!({ "name": name, "removed": true }));
    }
    output::line(format_args!("schedule {} is removed; its jobs stay", clean(name)))
}
