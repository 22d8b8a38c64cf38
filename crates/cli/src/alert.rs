//! `posthouse alert`: what there is to be told, and what is set for that; and the webhook of workers.

mod setup;
mod sign;
mod webhook;

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use posthouse::store::{AlertChange, AlertRecord, AlertRule, Store, WebhookState};
use serde::Serialize;
use serde_json::json;

use crate::args::{Alert, AlertList, AlertSet, Global, Switch};
use crate::connect;
use crate::failure::Result;
use crate::output::{self, Grid, age, cell, count, short};
use crate::style::{BAD, GOOD, clean};

pub(crate) use setup::Setup;

/// Alerts listed at most.
const LIST_MAX: u32 = 1_000;

/// Runs the subcommand.
pub(crate) async fn run(command: Alert, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    match command {
        Alert::List(args) => list(&store, &args, global).await?,
        Alert::Set(args) => set(&store, args, global).await?,
        Alert::Test => test(&store, global).await?,
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Serialize)]
struct Listed {
    alerts: Vec<AlertRecord>,
    rules: Vec<AlertRule>,
    webhook: WebhookState,
}

async fn list(store: &Store, args: &AlertList, global: &Global) -> Result<()> {
    let alerts = store.alerts(args.all, LIST_MAX).await?;
    let listed = Listed { alerts, rules: store.alert_rules().await?, webhook: store.webhook().await? };
    if global.json {
        return output::json(&listed);
    }
    print_alerts(&listed.alerts, store.clock().await?)?;
    output::line("")?;
    print_rules(&listed.rules)?;
    print_webhook(&listed.webhook)
}

fn print_alerts(alerts: &[AlertRecord], now: SystemTime) -> Result<()> {
    if alerts.is_empty() {
        return output::line(format_args!("{GOOD}no open alerts{GOOD:#}"));
    }
    let mut grid = Grid::new(&["alert", "times", "last", "state", "what"]).right(&[1]);
    for alert in alerts {
        grid.row(vec![
            cell(&alert.kind),
            count(alert.count),
            cell(age(&alert.last_at, now)),
            cell(if alert.resolved_at.is_some() { "over" } else { "open" }),
            cell(&alert.text),
        ]);
    }
    grid.print()
}

fn print_rules(rules: &[AlertRule]) -> Result<()> {
    let time =
        |ms: Option<i64>| ms.map(|ms| short(Duration::from_millis(ms.try_into().unwrap_or(0)))).unwrap_or_default();
    let mut grid = Grid::new(&["kind", "queue", "enabled", "quiet", "after"]);
    for rule in rules {
        grid.row(vec![
            cell(&rule.kind),
            cell(rule.queue.as_deref().unwrap_or_default()),
            cell(if rule.enabled { "yes" } else { "no" }),
            cell(time(rule.quiet_ms)),
            cell(time(rule.after_ms)),
        ]);
    }
    grid.print()
}

fn print_webhook(webhook: &WebhookState) -> Result<()> {
    match (&webhook.reason, webhook.enabled) {
        (_, true) => output::line("webhook: on"),
        (Some(reason), false) => output::line(format_args!("webhook: off: {}", clean(reason))),
        (None, false) => output::line("webhook: off; [alerts] in the posthouse.toml of a worker turns it on"),
    }
}

/// One line an open alert, for `posthouse status`.
pub(crate) fn print_open(alerts: &[AlertRecord], now: SystemTime) -> Result<()> {
    for alert in alerts {
        let times = if alert.count == 1 { String::new() } else { format!("{} times, ", alert.count) };
        let ago = output::when(&age(&alert.last_at, now));
        output::line(format_args!("{BAD}alert{BAD:#} {}: {} ({times}{ago})", clean(&alert.kind), clean(&alert.text)))?;
    }
    Ok(())
}

async fn set(store: &Store, args: AlertSet, global: &Global) -> Result<()> {
    if let Some(webhook) = args.webhook {
        store.set_webhook(webhook == Switch::On, None).await?;
        let state = store.webhook().await?;
        return if global.json { output::json(&state) } else { print_webhook(&state) };
    }
    let kind = args.kind.unwrap_or_default();
    let enabled = (args.on || args.off).then_some(args.on);
    let change = AlertChange { queue: args.queue, enabled, quiet: args.quiet, after: args.after };
    store.set_alert(&kind, &change).await?;
    let rules = store.alert_rules().await?;
    let rules: Vec<AlertRule> = rules.into_iter().filter(|rule| rule.kind == kind).collect();
    if global.json { output::json(&rules) } else { print_rules(&rules) }
}

async fn test(store: &Store, global: &Global) -> Result<()> {
    let job = store.test_alert().await?;
    if global.json {
        return output::json(&json!({ "webhook_job": job }));
    }
    output::line("notified on channel posthouse_alert")?;
    match job {
        Some(job) => {
            output::line(format_args!("webhook: job {job}; `posthouse job wait {job}` tells whether it got there"))
        }
        None => print_webhook(&store.webhook().await?),
    }
}
