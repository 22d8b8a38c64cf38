//! `posthouse sim`: the simulated provider as a server of its own.

use std::process::ExitCode;

use posthouse_llm::sim::{Fault, Script, Sim, Step};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{Global, Sim as Arguments};
use crate::failure::{Failure, Result};
use crate::output;

/// Serves until it is asked to end.
pub(crate) async fn run(args: Arguments, global: &Global) -> Result<ExitCode> {
    let script = script(&args)?;
    let (mut interrupted, mut terminated) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let sim = Sim::start_at(args.listen, script).await.map_err(|error| {
        Failure::new(format!("cannot listen at {}: {error}", args.listen))
            .hint("choose another address with --listen, or leave it out for a free port")
    })?;
    if global.json {
        output::json_line(&json!({ "base_url": sim.base_url() }))?;
    } else {
        output::line(format_args!("{}", sim.base_url()))?;
        output::note(format_args!(
            "counters at http://{}/sim/stats; Ctrl-C ends it; use it with: posthouse work --provider-url {} --model sim",
            sim.address(),
            sim.base_url()
        ));
    }
    tokio::select! {
        _ = interrupted.recv() => {}
        _ = terminated.recv() => {}
    }
    sim.shutdown().await;
    Ok(ExitCode::SUCCESS)
}

/// The script of the file, with what the command line adds. Faults of the command line come first, shares by chance last.
fn script(args: &Arguments) -> Result<Script> {
    let mut script = match &args.script {
        None => Script::default(),
        Some(file) => {
            let named = |error: &dyn std::fmt::Display| Failure::new(format!("--script {}: {error}", file.display()));
            let text = std::fs::read_to_string(file).map_err(|e| named(&e))?;
            Script::parse(&text).map_err(|e| named(&e).hint("`posthouse sim --help` shows a script"))?
        }
    };
    let scripted = std::mem::take(&mut script.steps);
    let by_chance =
        [(args.rate_429, Fault::Status(429)), (args.rate_500, Fault::Status(500)), (args.rate_hang, Fault::Hang)];
    let by_chance =
        by_chance.into_iter().filter_map(|(rate, fault)| Some(Step { rate: Some(rate?), ..Step::always(fault) }));
    script.steps = args.faults.iter().cloned().chain(scripted).chain(by_chance).collect();
    script.seed = args.seed.unwrap_or(script.seed);
    script.latency = args.latency.unwrap_or(script.latency);
    script.first_token = args.first_token.unwrap_or(script.first_token);
    script.tokens_per_second = args.tokens_per_second.or(script.tokens_per_second);
    Ok(script)
}
