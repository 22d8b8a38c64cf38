//! The `posthouse` binary: from arguments to a command, one module each.
//!
//! [`args`] says what can be typed, the module of a command does it; [`connect`] finds the database, [`output`] writes to
//! people and programs, [`style`] is how that looks, [`failure`] ends a command with a text that says what to do next, [`log`] is what is told meanwhile.

mod again;
mod alert;
mod args;
mod bench;
mod bulk;
mod completions;
mod connect;
mod db;
mod dead;
mod demo;
mod dev;
mod dev_record;
mod enqueue;
mod exec;
mod failure;
mod gate;
mod job;
mod jsonl;
mod log;
mod metrics;
#[cfg(feature = "otlp")]
mod otlp;
mod output;
mod payload;
mod pretty;
mod queue;
mod schedule;
mod sim;
mod status;
mod style;
mod tenant;
mod traces;
mod usage;
mod work;

use std::process::ExitCode;

use args::{Cli, Command, Global};
use failure::Result;

#[tokio::main]
async fn main() -> ExitCode {
    // Not for people to type, so it is in no help.
    if posthouse_bench::part::is_wanted() {
        return posthouse_bench::part::run().await;
    }
    let Cli { global, command } = Cli::read();
    if let Err(failure) = log::init(&global, matches!(command, Command::Work(_))) {
        return failure.report();
    }
    let ended = match command {
        Command::Work(_) | Command::Enqueue(_) => traced(command, &global).await,
        command => run(command, &global).await,
    };
    match ended {
        Ok(code) => code,
        Err(failure) => failure.report(),
    }
}

/// A command that jobs pass through.
#[cfg(feature = "otlp")]
async fn traced(command: Command, global: &Global) -> Result<ExitCode> {
    let traces = otlp::start()?;
    let ended = run(command, global).await;
    if let Some(traces) = traces {
        traces.end().await;
    }
    ended
}

/// The same without traces.
#[cfg(not(feature = "otlp"))]
async fn traced(command: Command, global: &Global) -> Result<ExitCode> {
    run(command, global).await
}

async fn run(command: Command, global: &Global) -> Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(args, global).await,
        Command::Dev(args) => dev::run(args, global).await,
        Command::Db { command } => db::run(command, global).await,
        Command::Enqueue(args) => enqueue::run(*args, global).await,
        Command::Work(args) => work::run(*args, global).await,
        Command::Status(args) => status::run(args, global).await,
        Command::Usage(args) => usage::run(args, global).await,
        Command::Job { command } => job::run(command, global).await,
        Command::Dead { command } => dead::run(command, global).await,
        Command::Queue { command } => queue::run(command, global).await,
        Command::Tenant { command } => tenant::run(command, global).await,
        Command::Gate { command } => gate::run(command, global).await,
        Command::Schedule { command } => schedule::run(command, global).await,
        Command::Alert { command } => alert::run(command, global).await,
        Command::Sim(args) => sim::run(args, global).await,
        Command::Bench(args) => bench::run(args, global).await,
        Command::Completions(args) => completions::run(&args),
    }
}
