//! The log. State changes (targets `posthouse::event…`) are what `work` says on standard output, a line each; all else goes to
//! stderr, beside the output and never into it. As text for people, or as JSON objects, a line each.
//!
//! POSTHOUSE_LOG chooses what is told. With --json the state changes of `work` are its output for programs, so they are all told whatever
//! is chosen for the log.

use std::fmt::{self, Write as _};
use std::io::{IsTerminal, Write as _};
use std::time::SystemTime;

use anstyle::Style;
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt as text};

use crate::args::{Global, LogFormat};
use crate::failure::{Failure, Result};
use crate::output::note;
use crate::style::{BAD, DIM, GOOD, HINT, clean};

/// What the targets of state changes begin with.
const EVENTS: &str = "posthouse::event";
/// All state changes that `work --json` tells.
const FOR_PROGRAMS: &str = "off,posthouse::event=info,posthouse::event::job=trace,posthouse::event::claim=off";

/// From here on what is logged is written.
pub(crate) fn init(global: &Global, is_worker: bool) -> Result<()> {
    let filter = std::env::var("POSTHOUSE_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = filter.unwrap_or_else(|| usual(global, is_worker).to_owned());
    EnvFilter::try_new(&filter).map_err(|error| {
        Failure::usage(format!("POSTHOUSE_LOG: {error}")).hint(
            "write levels (error, warn, info, debug, trace, off) and targets, as in error,posthouse::event::job=warn",
        )
    })?;
    let chosen = || EnvFilter::new(&filter);
    let said = is_worker.then(|| {
        let filter = if global.json { EnvFilter::new(FOR_PROGRAMS) } else { chosen() };
        Said { json: is_json(global) }.with_filter(filter_fn(is_event)).with_filter(filter)
    });
    let json = is_json_on(global.log_format, &std::io::stderr());
    let goes_to_stderr = filter_fn(move |metadata| !is_worker || !is_event(metadata));
    let lines = json.then(|| Lines.with_filter(goes_to_stderr.clone()).with_filter(chosen()));
    let text = (!json).then(|| {
        let text = text::layer().with_writer(std::io::stderr).with_ansi(false);
        text.with_filter(goes_to_stderr).with_filter(chosen())
    });
    tracing_subscriber::registry().with(said).with(lines).with(text).init();
    Ok(())
}

/// Whether what `work` says on standard output is JSON.
pub(crate) fn is_json(global: &Global) -> bool {
    global.json || is_json_on(global.log_format, &std::io::stdout())
}

/// Says on stderr what a worker finds when it starts, in the shape of its log, whatever filter there is.
pub(crate) fn say(global: &Global, text: impl fmt::Display) {
    if !is_json_on(global.log_format, &std::io::stderr()) {
        return note(text);
    }
    let at = humantime::format_rfc3339_millis(SystemTime::now());
    let text = Value::from(text.to_string());
    note(format_args!(r#"{{"at":"{at}","level":"warn","target":"posthouse::setup","message":{text}}}"#));
}

fn is_json_on(format: LogFormat, stream: &impl IsTerminal) -> bool {
    match format {
        LogFormat::Auto => !stream.is_terminal(),
        LogFormat::Text => false,
        LogFormat::Json => true,
    }
}

/// What is told where POSTHOUSE_LOG says nothing.
fn usual(global: &Global, is_worker: bool) -> &'static str {
    // Alerts are for whoever looks at the worker; there is at most one in some minutes about a subject. That traces are not taken is said once.
    match (is_worker, global.verbose) {
        (false, 0) => "error,posthouse::alert=warn,posthouse::traces=warn",
        (false, 1) => "info",
        (true, 0) => {
            "error,posthouse::alert=warn,posthouse::traces=warn,posthouse::event=info,posthouse::event::job=debug"
        }
        (true, 1) => "info,posthouse::event::job=trace",
        (false, _) => "debug",
        (true, _) => "debug,posthouse::event=trace",
    }
}

fn is_event(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with(EVENTS)
}

/// State changes, on standard output.
struct Said {
    json: bool,
}

impl<S: Subscriber> Layer<S> for Said {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = if self.json { fields.to_json(event.metadata()) } else { fields.to_text() };
        // When nobody reads it any more, the work goes on all the same.
        writeln!(anstream::stdout().lock(), "{line}").ok();
    }
}

/// Everything else as JSON, on stderr.
struct Lines;

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        for span in context.event_scope(event).into_iter().flatten() {
            if let Some(outer) = span.extensions().get::<Fields>() {
                fields.add(outer);
            }
        }
        let line = fields.to_json(event.metadata()) + "\n";
        std::io::stderr().lock().write_all(line.as_bytes()).ok();
    }
}

/// The fields of an event or a span, in order, as JSON; the message is apart.
#[derive(Default)]
struct Fields {
    message: String,
    values: Vec<(&'static str, Value)>,
}

impl Fields {
    /// Those of a surrounding span; the nearest of a name counts.
    fn add(&mut self, outer: &Self) {
        for (name, value) in &outer.values {
            if self.get(name).is_none() {
                self.values.push((name, value.clone()));
            }
        }
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.values.iter().find(|(own, _)| *own == name).map(|(_, value)| value)
    }

    /// One object. A state change is told by its fields alone; its text is for people.
    fn to_json(&self, metadata: &Metadata<'_>) -> String {
        let now = humantime::format_rfc3339_millis(SystemTime::now());
        let level = metadata.level().as_str().to_ascii_lowercase();
        let mut line = format!("{{\"at\":\"{now}\",\"level\":\"{level}\"");
        if !is_event(metadata) {
            let _ = write!(line, ",\"target\":\"{}\",\"message\":{}", metadata.target(), Value::from(&*self.message));
        }
        for (name, value) in &self.values {
            let _ = write!(line, ",\"{name}\":{value}");
        }
        line.push('}');
        line
    }

    /// A state change for people: the word is coloured, what it is about stays readable.
    fn to_text(&self) -> String {
        let text = clean(&self.message);
        let event = self.get("event").and_then(Value::as_str).unwrap_or_default();
        let words = match event {
            "claimed" | "started" | "registered" => text.len(),
            _ => text.match_indices(' ').nth(2).map_or(text.len(), |(at, _)| at),
        };
        let (style, (head, rest)) = (style(event), text.split_at(words));
        format!("{style}{head}{style:#}{rest}")
    }
}

fn style(event: &str) -> Style {
    match event {
        "done" | "connection_restored" | "gate_opened" => GOOD,
        "failed" | "lost" | "lease_lost" | "connection_lost" | "sweep_failed" | "gate_closed" | "schedule_missed" => {
            BAD
        }
        "retry" | "snoozed" | "cancelled" | "released" => HINT,
        _ => DIM,
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => self.values.push((name, format!("{value:?}").into())),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            name => self.values.push((name, value.into())),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.values.push((field.name(), value.into()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.values.push((field.name(), value.into()));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.values.push((field.name(), value.into()));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.values.push((field.name(), value.into()));
    }
}
