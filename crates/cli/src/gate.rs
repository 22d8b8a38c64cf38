//! `posthouse gate`: limits that jobs pass; and what `tenant` and `queue` do through the gates of these.

mod apply;
mod table;

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use posthouse::store::{GateLimits, GateRecord, Store};
use serde_json::json;

use crate::args::{Closing, Exact, Gate, GateSet, Global, Limit};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output::{self, age, when};
use crate::style::clean;

pub(crate) use apply::Declared;
pub(crate) use table::{paused, print_state};

/// Longer is a mistake; who means for ever leaves the time out.
const SPAN_MAX: Duration = Duration::from_hours(24 * 366 * 100);

/// Runs the subcommand.
pub(crate) async fn run(command: Gate, global: &Global) -> Result<ExitCode> {
    match command {
        Gate::Apply(args) => return apply::run(&args, global).await,
        Gate::Set(args) if args.name.trim().is_empty() => return Err(Failure::usage("name: must not be empty")),
        _ => {}
    }
    let store = connect::store(global).await?;
    match command {
        Gate::List => table::list(&store, global).await?,
        Gate::Set(args) => set(&store, &args, global).await?,
        Gate::Close(args) => close(&store, Whose::Gate(&args.name), &args.closing, global).await?,
        Gate::Open { name } => open(&store, Whose::Gate(&name), global).await?,
        Gate::Remove { name } => remove(&store, &name, global).await?,
        Gate::Apply(_) => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// What was typed, put over what is set.
fn change(args: &GateSet, limits: &mut GateLimits) {
    fn put<T: Clone>(typed: Option<&Limit<T>>, limit: &mut Option<T>) {
        if let Some(Limit(value)) = typed {
            limit.clone_from(value);
        }
    }
    fn put_exact(typed: Option<&Limit<Exact>>, limit: &mut Option<String>) {
        if let Some(Limit(value)) = typed {
            *limit = value.as_ref().map(|exact| exact.0.clone());
        }
    }
    put(args.running.as_ref(), &mut limits.max_running);
    put(args.requests_per_minute.as_ref(), &mut limits.requests_per_minute);
    put(args.tokens_per_minute.as_ref(), &mut limits.tokens_per_minute);
    put_exact(args.money_per_day.as_ref(), &mut limits.money_per_day);
    put_exact(args.money_per_month.as_ref(), &mut limits.money_per_month);
    put_exact(args.warn_at.as_ref(), &mut limits.warn_at);
    if args.when_spent.is_some() {
        limits.when_spent.clone_from(&args.when_spent);
    }
    if args.warn_at.is_none() && limits.money_per_day.is_none() && limits.money_per_month.is_none() {
        // Went with the last budget.
        limits.warn_at = None;
    }
}

async fn set(store: &Store, args: &GateSet, global: &Global) -> Result<()> {
    let before = store.gate(&args.name).await?;
    let mut wanted = before.as_ref().map(GateRecord::limits).unwrap_or_default();
    change(args, &mut wanted);
    store.set_gate(&args.name, &wanted).await?;
    tell(store, &args.name, global, |gate| {
        let new = if before.is_none() { " (new)" } else { "" };
        format!("gate {}{new}: {}", clean(&args.name), table::describe(&gate.limits()))
    })
    .await
}

/// Tells how a gate is now.
async fn tell(store: &Store, name: &str, global: &Global, text: impl FnOnce(&GateRecord) -> String) -> Result<()> {
    match store.gate(name).await? {
        Some(gate) if global.json => output::json(&gate),
        Some(gate) => output::line(text(&gate)),
        // Somebody removed it just now.
        None => Err(no_gate(name)),
    }
}

fn no_gate(name: &str) -> Failure {
    Failure::new(format!("gate {name}: there is no such gate")).hint("`posthouse gate list` shows those that there are")
}

/// Whose gate it is: who pauses a tenant need not know how its gate is called.
#[derive(Clone, Copy)]
pub(crate) enum Whose<'a> {
    Gate(&'a str),
    Tenant(&'a str),
    Queue(&'a str),
}

impl Whose<'_> {
    fn gate(self) -> String {
        match self {
            Self::Gate(name) => name.to_owned(),
            Self::Tenant(name) => format!("tenant:{name}"),
            Self::Queue(name) => format!("queue:{name}"),
        }
    }

    fn words(self) -> Words {
        let paused = |what, name, open| Words { whom: format!("{what} {}", clean(name)), open, ..Words::PAUSED };
        match self {
            Self::Gate(name) => Words { whom: format!("gate {}", clean(name)), ..Words::CLOSED },
            Self::Tenant(name) => paused("tenant", name, "tenant resume"),
            Self::Queue(name) => paused("queue", name, "queue resume"),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Gate(name) | Self::Tenant(name) | Self::Queue(name) => name,
        }
    }
}

/// How closing and opening somebody's gate is called.
struct Words {
    whom: String,
    /// The command that opens it.
    open: &'static str,
    /// What it is now, or was already.
    closed: &'static str,
    for_ever: &'static str,
    opened: &'static str,
    was_open: &'static str,
}

impl Words {
    const CLOSED: Self = Self {
        whom: String::new(),
        open: "gate open",
        closed: "closed",
        for_ever: "until somebody opens it",
        opened: "is open",
        was_open: "was open already",
    };
    const PAUSED: Self = Self {
        whom: String::new(),
        open: "",
        closed: "paused",
        for_ever: "until somebody resumes it",
        opened: "goes on",
        was_open: "was not paused",
    };
}

/// Closes the gate of somebody.
pub(crate) async fn close(store: &Store, whose: Whose<'_>, closing: &Closing, global: &Global) -> Result<()> {
    if whose.name().is_empty() {
        return Err(Failure::usage("name: must not be empty"));
    }
    let name = whose.gate();
    let now = store.clock().await?;
    let until = until(closing, now)?;
    let is_new = store.gate(&name).await?.is_none();
    store.close_gate(&name, &until, closing.reason.as_deref()).await?;
    let Words { whom, open, closed, for_ever, .. } = whose.words();
    tell(store, &name, global, |gate| {
        let until = match gate.closed_until.as_deref() {
            Some("infinity") | None => for_ever.to_owned(),
            Some(until) => format!("until {} ({})", clean(until), when(&age(until, now))),
        };
        format!("{whom} is {closed} {until}; what runs goes on\n`posthouse {open} {}` ends that", clean(whose.name()))
    })
    .await?;
    if is_new && matches!(whose, Whose::Gate(_)) {
        output::note("this gate is new; look at `posthouse gate list` if you meant another one");
    }
    Ok(())
}

/// In a form that Postgres reads.
fn until(closing: &Closing, now: SystemTime) -> Result<String> {
    match (closing.span, &closing.until) {
        (None, None) => Ok("infinity".to_owned()),
        (None, Some(until)) => Ok(until.clone()),
        (Some(span), _) if span.is_zero() || span > SPAN_MAX => {
            Err(Failure::usage("--for: must be more than nothing and at most a hundred years")
                .hint("leave it out to close it until somebody opens it"))
        }
        (Some(span), _) => Ok(humantime::format_rfc3339_micros(now + span).to_string()),
    }
}

/// Opens the gate of somebody.
pub(crate) async fn open(store: &Store, whose: Whose<'_>, global: &Global) -> Result<()> {
    let name = whose.gate();
    let opened = store.open_gate(&name).await?;
    let words = whose.words();
    if !opened && matches!(whose, Whose::Gate(_)) && store.gate(&name).await?.is_none() {
        return Err(no_gate(&name));
    }
    if global.json {
        return output::json(&json!({ "name": name, "opened": opened }));
    }
    output::line(format_args!("{} {}", words.whom, if opened { words.opened } else { words.was_open }))
}

async fn remove(store: &Store, name: &str, global: &Global) -> Result<()> {
    if !store.remove_gate(name).await? {
        return Err(no_gate(name));
    }
    if global.json {
        return output::json(&json!({ "name": name, "removed": true }));
    }
    output::line(format_args!("gate {} is removed", clean(name)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::Parser;

    fn changed(line: &str, limits: GateLimits) -> GateLimits {
        let command = crate::args::Cli::parse_from(line.split(' ')).command;
        let crate::args::Command::Gate { command: Gate::Set(args) } = command else { panic!("{command:?}") };
        let mut limits = limits;
        change(&args, &mut limits);
        limits
    }

    #[test]
    fn what_is_not_named_stays() {
        let before = GateLimits {
            max_running: Some(4),
            money_per_day: Some("5".to_owned()),
            warn_at: Some("0.5".to_owned()),
            when_spent: Some("fail".to_owned()),
            ..GateLimits::default()
        };
        let after = changed("posthouse gate set crm --running 5 --requests-per-minute 60", before.clone());
        assert_eq!(after, GateLimits { max_running: Some(5), requests_per_minute: Some(60), ..before.clone() });
        let after = changed("posthouse gate set crm --running none", before.clone());
        assert_eq!(after, GateLimits { max_running: None, ..before.clone() });
        // The share of a budget goes with the last one.
        let after = changed("posthouse gate set crm --money-per-day none", before.clone());
        assert_eq!(after, GateLimits { money_per_day: None, warn_at: None, ..before.clone() });
        let after = changed("posthouse gate set crm --money-per-day none --money-per-month 0.10", before.clone());
        assert_eq!(after, GateLimits { money_per_day: None, money_per_month: Some("0.1".to_owned()), ..before });
    }

    #[test]
    fn a_closing_without_a_time_is_for_ever() {
        let closing = |span, until: Option<&str>| Closing { span, until: until.map(str::to_owned), reason: None };
        let now = SystemTime::UNIX_EPOCH;
        assert_eq!(until(&closing(None, None), now).unwrap(), "infinity");
        assert_eq!(until(&closing(None, Some("tomorrow")), now).unwrap(), "tomorrow");
        let hour = until(&closing(Some(Duration::from_hours(1)), None), now).unwrap();
        assert_eq!(hour, "1970-01-01T01:00:00.000000Z");
        assert!(until(&closing(Some(Duration::ZERO), None), now).is_err());
        assert!(until(&closing(Some(Duration::MAX), None), now).is_err());
    }
}
