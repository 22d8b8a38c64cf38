//! `posthouse bench`: the benchmark of `posthouse-bench`, and how its report looks.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use posthouse_bench::error::Error;
use posthouse_bench::options::{Options, Scenario};
use posthouse_bench::plot::svg;
use posthouse_bench::report::Report;

use crate::args::{Bench, Global};
use crate::dev::Interrupts;
use crate::failure::{Failure, Result};
use crate::output::{Grid, json, line, note};
use crate::style::{BOLD, DIM};

pub(crate) async fn run(args: Bench, global: &Global) -> Result<ExitCode> {
    let options = Options {
        database_url: global.database_url.clone().filter(|_| is_typed()),
        only: args.only,
        all: args.all,
        repeats: args.repeats,
        quick: args.quick,
        pinned_time: args.minutes.map(|minutes| Duration::from_secs(minutes * 60)),
    };
    if args.plot.is_some() && !options.scenarios().into_iter().any(Scenario::has_courses) {
        let named = Scenario::ALL.into_iter().filter(|s| s.has_courses()).map(Scenario::name).collect::<Vec<_>>();
        return Err(Failure::usage("--plot: none of the scenarios is measured over time")
            .hint(format!("Name one with --only: {}.", named.join(", "))));
    }
    // Before minutes are spent on what cannot be written.
    let markdown = Target::open("--markdown", args.markdown.as_deref())?;
    let plot = Target::open("--plot", args.plot.as_deref())?;
    let link = args.plot.as_deref().map(|plot| link(plot, args.markdown.as_deref()));
    let mut interrupts = Interrupts::new()?;
    let mut code = 0;
    let interrupted = async { code = interrupts.next().await };
    let report = posthouse_bench::run(options, interrupted, |what| note(format!("{DIM}{what}{DIM:#}"))).await;
    let Some(report) = report.map_err(failure)? else { return Ok(ExitCode::from(code)) };
    if let Some(plot) = plot {
        plot.write(&svg(&report).unwrap_or_default())?;
    }
    if let Some(markdown) = markdown {
        markdown.write(&report.markdown(link.as_deref()))?;
    }
    if global.json {
        json(&report)?
    } else {
        tell(&report)?
    }
    Ok(ExitCode::SUCCESS)
}

/// A file that is written at the end.
struct Target {
    option: &'static str,
    file: File,
}

impl Target {
    fn open(option: &'static str, path: Option<&Path>) -> Result<Option<Self>> {
        let file = path.map(File::create).transpose().map_err(|error| Failure::new(format!("{option}: {error}")))?;
        Ok(file.map(|file| Self { option, file }))
    }

    fn write(mut self, text: &str) -> Result<()> {
        self.file.write_all(text.as_bytes()).map_err(|error| Failure::new(format!("{}: {error}", self.option)))
    }
}

/// The address of the chart in the report: seen from the report's folder if the chart is in it or below.
fn link(plot: &Path, markdown: Option<&Path>) -> String {
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let plot = whole(plot);
    let folder = markdown.map(whole).and_then(|markdown| Some(markdown.parent()?.to_owned()));
    folder.and_then(|folder| plot.strip_prefix(folder).ok()).unwrap_or(&plot).display().to_string()
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
