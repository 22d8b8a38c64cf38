//! `posthouse job show`: all of a job.

use std::process::ExitCode;
use std::time::SystemTime;

use posthouse::store::{JobRecord, Redrive, Store};
use serde::Serialize;
use serde_json::Value;

use crate::args::Global;
use crate::failure::{Failure, Result};
use crate::output::{self, age, when};
use crate::pretty;
use crate::style::{BAD, BOLD, DIM, clean, clean_lines};

/// A long text is cut to this many lines, and each line to this many characters.
const LINES_MAX: usize = 40;
const CHARACTERS_MAX: usize = 1_000;

/// A job that was asked for by its id.
pub(crate) async fn find(store: &Store, id: i64) -> Result<JobRecord> {
    let gone =
        || Failure::new(format!("job {id}: there is no such job")).hint("`posthouse job list` shows the newest ones");
    store.job(id).await?.ok_or_else(gone)
}

/// A job with what was done to it, as JSON.
#[derive(Serialize)]
struct Whole {
    #[serde(flatten)]
    job: JobRecord,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    redrives: Vec<Redrive>,
}

/// Shows a job.
pub(crate) async fn show(store: &Store, id: i64, full: bool, global: &Global) -> Result<ExitCode> {
    let job = find(store, id).await?;
    let redrives = store.redrives(id).await?;
    if global.json {
        output::json(&Whole { job, redrives })?;
        return Ok(ExitCode::SUCCESS);
    }
    let now = store.clock().await?;
    facts(&job, now)?;
    let mut texts = Texts { full, is_cut: false };
    errors(&job, now, &mut texts)?;
    lineage(&redrives, now, &mut texts)?;
    let indented = |value: &Value| pretty::indent(&value.to_string());
    texts.section("progress", job.progress.as_ref().map(indented))?;
    texts.section("usage", job.usage.as_ref().map(indented))?;
    texts.section("payload", job.payload.as_ref().map(|json| pretty::indent(json.get())))?;
    texts.section("result", job.result.as_ref().map(|json| pretty::indent(json.get())))?;
    if texts.is_cut {
        output::note(format_args!("long texts were cut; `posthouse job show {id} --full` shows all of them"));
    }
    Ok(ExitCode::SUCCESS)
}

fn facts(job: &JobRecord, now: SystemTime) -> Result<()> {
    let cancel = if job.cancel_asked { ", asked to cancel" } else { "" };
    output::line(format_args!("{BOLD}job {}{BOLD:#} {}{cancel}", job.id, clean(&job.state)))?;
    let moment =
        |time: &Option<String>| time.as_ref().map(|time| format!("{} ({})", clean(time), when(&age(time, now))));
    let facts = [
        ("kind", Some(clean(&job.kind))),
        ("queue", Some(clean(&job.queue))),
        ("tenant", Some(clean(&job.tenant))),
        ("priority", Some(job.priority.to_string())),
        ("attempt", Some(format!("{} of {}", job.attempt, job.max_attempts))),
        (
            "timeout",
            job.timeout_ms.map(|ms| output::short(std::time::Duration::from_millis(ms.try_into().unwrap_or(0)))),
        ),
        ("created", moment(&Some(job.created_at.clone()))),
        ("due", moment(&job.run_at)),
        ("started", moment(&job.started_at)),
        ("finished", moment(&job.finished_at)),
        ("worker", job.worker.map(|worker| worker.to_string())),
        ("reason", job.reason.as_deref().map(clean)),
        ("flags", job.flags.as_ref().map(|flags| clean(&flags.join(", ")))),
    ];
    for (name, value) in facts {
        if let Some(value) = value {
            output::line(format_args!("  {DIM}{name:<9}{DIM:#} {value}"))?;
        }
    }
    Ok(())
}

/// One paragraph an attempt that did not end well.
fn errors(job: &JobRecord, now: SystemTime, texts: &mut Texts) -> Result<()> {
    let errors = job.errors.as_ref().and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if errors.is_empty() {
        return texts.section("error", job.error.clone());
    }
    for error in errors {
        let text = |field: &str| error.get(field).and_then(Value::as_str).map(clean);
        let attempt = error.get("attempt").and_then(Value::as_i64).unwrap_or_default();
        let ended = text("ended_at").map(|time| format!(", {}", when(&age(&time, now)))).unwrap_or_default();
        let host = text("host").map(|host| format!(" on {host}")).unwrap_or_default();
        let class = text("class").unwrap_or_default();
        output::line(format_args!("{BAD}attempt {attempt}{BAD:#} {class}{DIM}{host}{ended}{DIM:#}"))?;
        texts.body(error.get("error").and_then(Value::as_str).unwrap_or_default())?;
        if let Some(detail) = error.get("detail").filter(|detail| !detail.is_null()) {
            texts.body(&pretty::indent(&detail.to_string()))?;
        }
    }
    Ok(())
}

/// One paragraph each time that it was put back into line after it had ended.
fn lineage(redrives: &[Redrive], now: SystemTime, texts: &mut Texts) -> Result<()> {
    for redrive in redrives {
        let what = if redrive.state == "failed" { "redriven" } else { "retried" };
        let class = redrive.class.as_deref().map(|class| format!(": {}", clean(class))).unwrap_or_default();
        let after = format!(" after attempt {}{class}", redrive.attempt);
        let when = when(&age(&redrive.redriven_at, now));
        output::line(format_args!(
            "{BOLD}{what}{BOLD:#} {when} by {}{DIM}{after}{DIM:#}",
            clean(&redrive.redriven_by)
        ))?;
        for (field, change) in redrive.changes.as_object().into_iter().flatten() {
            let line = match (change.get("from"), change.get("to")) {
                (Some(from), Some(to)) => format!("{field}: {from} to {to}"),
                _ => format!("{field}: {change}"),
            };
            texts.body(&line)?;
        }
        if let Some(payload) = &redrive.payload {
            texts.body(&format!("payload before: {}", pretty::indent(payload.get())))?;
        }
    }
    Ok(())
}

/// Prints texts of any length, and knows whether one was cut.
struct Texts {
    full: bool,
    is_cut: bool,
}

impl Texts {
    fn section(&mut self, name: &str, text: Option<String>) -> Result<()> {
        let Some(text) = text else { return Ok(()) };
        output::line(format_args!("{BOLD}{name}{BOLD:#}"))?;
        self.body(&text)
    }

    fn body(&mut self, text: &str) -> Result<()> {
        let shorter = if self.full { None } else { pretty::cut(text, LINES_MAX, CHARACTERS_MAX) };
        self.is_cut |= shorter.is_some();
        for line in clean_lines(shorter.as_deref().unwrap_or(text)).lines() {
            output::line(format_args!("  {line}"))?;
        }
        Ok(())
    }
}
