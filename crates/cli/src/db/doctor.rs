//! `posthouse db doctor`: what is wrong with a database, why it matters, and what mends it.

use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use posthouse::store::{Diagnosis, Examination, Finding, Severity, examine};
use serde_json::json;

use crate::args::{DbDoctor, Global};
use crate::failure::Result;
use crate::style::{BAD, DIM, GOOD, HINT, clean};
use crate::{connect, output};

const WARNING: Style = AnsiColor::Yellow.on_default().bold();

/// Runs the command: exit code 1 if something is bad.
pub(super) async fn run(args: DbDoctor, global: &Global) -> Result<ExitCode> {
    let database = connect::database(global)?;
    let defaults = Examination::default();
    let examination = Examination {
        older: args.older_than.unwrap_or(defaults.older),
        xids: args.xids.unwrap_or(defaults.xids),
        dead_rows: args.dead_rows.unwrap_or(defaults.dead_rows),
        max_jobs: args.max_jobs.unwrap_or(defaults.max_jobs),
    };
    let diagnosis = examine(&database, &examination).await?;
    if global.json {
        let Diagnosis { findings, fine } = &diagnosis;
        let count = |severity| count(&diagnosis, severity);
        let (bad, warnings, notes) = (count(Severity::Bad), count(Severity::Warning), count(Severity::Note));
        output::json(&json!({ "bad": bad, "warnings": warnings, "notes": notes, "findings": findings, "fine": fine }))?;
    } else {
        show(&diagnosis)?;
    }
    Ok(ExitCode::from(u8::from(diagnosis.is_bad())))
}

fn count(diagnosis: &Diagnosis, severity: Severity) -> usize {
    diagnosis.findings.iter().filter(|finding| finding.severity == severity).count()
}

fn show(diagnosis: &Diagnosis) -> Result<()> {
    for Finding { check, severity, what, why, fix, .. } in &diagnosis.findings {
        let (style, name) = match severity {
            Severity::Bad => (BAD, "BAD"),
            Severity::Warning => (WARNING, "WARNING"),
            Severity::Note => (DIM, "NOTE"),
        };
        output::line(format_args!("{style}{name:<8}{style:#}{}: {}", clean(check), clean(what)))?;
        output::line(format_args!("  {DIM}why{DIM:#}   {}", clean(why)))?;
        output::line(format_args!("  {HINT}fix{HINT:#}   {}", clean(fix)))?;
    }
    if !diagnosis.fine.is_empty() {
        output::line(format_args!("{GOOD}fine{GOOD:#}    {}", diagnosis.fine.join(", ")))?;
    }
    let count = |severity| count(diagnosis, severity);
    output::line(format_args!(
        "{} bad, {} warnings, {} notes",
        count(Severity::Bad),
        count(Severity::Warning),
        count(Severity::Note)
    ))
}
