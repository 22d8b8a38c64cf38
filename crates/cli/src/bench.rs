//! `posthouse bench`: the benchmark of `posthouse-bench`, and how its report looks.

use std::fs::File;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use posthouse_bench::error::Error;
use posthouse_bench::options::Options;
use posthouse_bench::report::Report;

use crate::args::{Bench, Global};
use crate::dev::Interrupts;
use crate::failure::{Failure, Result};
use crate::output::{Grid, json, line, note};
use crate::style::{BOLD, DIM};

pub(crate) async fn run(args: Bench, global: &Global) -> Result<ExitCode> {
    let unwritable = |error: std::io::Error| Failure::new(format!("--markdown: {error}"));
    // Before minutes are spent on what cannot be written.
    let file = args.markdown.as_deref().map(File::create).transpose().map_err(unwritable)?;
    let mut interrupts = Interrupts::new()?;
    let mut code = 0;
    let options = Options {
        database_url: global.database_url.clone().filter(|_| is_typed()),
        only: args.only,
        all: args.all,
        repeats: args.repeats,
        quick: args.quick,
        pinned_time: args.minutes.map(|minutes| Duration::from_secs(minutes * 60)),
    };
    let interrupted = async { code = interrupts.next().await };
    let report = posthouse_bench::run(options, interrupted, |what| note(format!("{DIM}{what}{DIM:#}"))).await;
    let Some(report) = report.map_err(failure)? else { return Ok(ExitCode::from(code)) };
    if let Some(mut file) = file {
        file.write_all(report.markdown().as_bytes()).map_err(unwritable)?;
    }
    if global.json {
        json(&report)?
    } else {
        tell(&report)?
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the database was named on the command line, and not by DATABASE_URL, which other commands may need: a benchmark
/// puts a server under full load.
fn is_typed() -> bool {
    std::env::args_os().any(|argument| argument.to_string_lossy().starts_with("--database-url"))
}

fn failure(error: Error) -> Failure {
    match error {
        Error::Queue(error) => error.into(),
        Error::Server(error) => {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
            Failure::new(format!("{error}{source}"))
        }
        other => Failure::new(other.to_string()),
    }
}

fn tell(report: &Report) -> Result<()> {
    line(format!(
        "{BOLD}Posthouse {} on PostgreSQL {}{BOLD:#}, {}",
        report.posthouse, report.postgres, report.machine
    ))?;
    for caveat in report.caveats() {
        line(format!("{DIM}Mind: {caveat}{DIM:#}"))?;
    }
    line("")?;
    let mut grid = Grid::new(&["scenario", "figure", "median", "lowest to highest", "ratios"]).right(&[2, 3]);
    for scenario in &report.scenarios {
        for figure in &scenario.figures {
            let [median, spread, ratio] = figure.texts();
            let cells = [scenario.name.to_owned(), figure.name.to_string(), median, spread, ratio];
            grid.row(cells.into_iter().map(Into::into).collect());
        }
    }
    grid.print()
}
