//! `posthouse enqueue`: one job from the command line; many from a file are in [`jsonl`].

use std::process::ExitCode;

use posthouse::NewJob;
use posthouse::job::{DedupeFor, Deduped};
use posthouse::store::Store;
use posthouse::trace::{self, Parent};
use serde_json::json;

use crate::args::{Enqueue, Global};
use crate::failure::Result;
use crate::output;
use crate::style::{DIM, clean};
use crate::{connect, jsonl, payload, traces};

/// Enqueues, and says which job stands for it.
pub(crate) async fn run(args: Enqueue, global: &Global) -> Result<ExitCode> {
    if let Some(file) = &args.jsonl {
        return jsonl::run(file, &args, global).await;
    }
    let job = job(&args)?;
    let store = connect::store(global).await?;
    let outer = traces::of_shell();
    let span = trace::sending(args.queue.as_deref(), 1, Parent::Stored(outer.as_deref()));
    let job = match outer {
        Some(outer) if !span.is_on() => job.trace(outer),
        _ => trace::carry(job, &span),
    };
    let answer = trace::sent(store.enqueue(&job).await, &span)?;
    if global.json {
        output::json(&json!({
            "id": answer.id, "state": answer.state, "duplicate": answer.duplicate, "deduped": answer.deduped.map(Deduped::as_str),
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let state = clean(&answer.state);
    output::line(match answer.deduped {
        None => format!("job {} {state}", answer.id),
        Some(Deduped::Kept) => format!("job {} duplicate {DIM}({state}){DIM:#}", answer.id),
        Some(Deduped::Replaced) => format!("job {} replaced {DIM}({state}){DIM:#}", answer.id),
        Some(Deduped::Behind) => format!("job {} {state} {DIM}(after the one that runs){DIM:#}", answer.id),
    })?;
    for gate in &args.gates {
        if is_missing(&store, gate).await.unwrap_or(false) {
            output::note(format_args!("no gate {} yet: it limits nothing until it is set", clean(gate)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether nothing is set under this name, perhaps since it is mistyped, nor for each of its sort. Who may enqueue may not be
/// allowed to look.
async fn is_missing(store: &Store, gate: &str) -> posthouse::Result<bool> {
    if store.gate(gate).await?.is_some() {
        return Ok(false);
    }
    Ok(!gate.starts_with("model:") || store.gate("model:*").await?.is_none())
}

fn job(args: &Enqueue) -> Result<NewJob> {
    let kind = args.kind.as_deref().unwrap_or_default();
    let mut job = payload::job(kind, args.payload.as_deref())?;
    if let Some(queue) = &args.queue {
        job = job.queue(queue);
    }
    if let Some(tenant) = &args.tenant {
        job = job.tenant(tenant);
    }
    if let Some(priority) = args.priority {
        job = job.priority(priority);
    }
    if let Some(delay) = args.delay {
        job = job.delay(delay);
    }
    if let Some(run_at) = &args.run_at {
        job = job.run_at_text(run_at);
    }
    if let Some(max_attempts) = args.max_attempts {
        job = job.max_attempts(max_attempts);
    }
    if let Some(timeout) = args.timeout {
        job = job.timeout(timeout);
    }
    for gate in &args.gates {
        job = job.gate(gate);
    }
    if let Some(tokens) = args.tokens {
        job = job.tokens(tokens);
    }
    if let Some(key) = &args.dedupe_key {
        job = job.dedupe_key(key);
    }
    if args.dedupe_by_payload {
        job = job.dedupe_by_payload();
    }
    if let Some(policy) = args.dedupe_policy {
        job = job.dedupe_policy(policy);
    }
    if let Some(window) = args.dedupe_for {
        job = job.dedupe_for(DedupeFor::Window(window));
    }
    Ok(job)
}
