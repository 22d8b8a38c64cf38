//! `posthouse tenant`: weights, and who is paused.

use std::collections::BTreeMap;
use std::process::ExitCode;

use comfy_table::Color;
use posthouse::store::{DepthOf, GateRecord, Store};
use serde::Serialize;
use serde_json::json;

use crate::args::{Depth, Global, Tenant, TenantSet};
use crate::connect;
use crate::failure::Result;
use crate::gate::{self, Whose};
use crate::output::{self, Grid, cell, count};
use crate::style::{DIM, clean};

/// Rows of a table for people; JSON has all of them.
const ROWS_MAX: usize = 200;

/// Runs the subcommand.
pub(crate) async fn run(command: Tenant, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    match command {
        Tenant::List => list(&store, global).await?,
        Tenant::Set(args) => set(&store, &args, global).await?,
        Tenant::Pause(args) => gate::close(&store, Whose::Tenant(&args.tenant), &args.closing, global).await?,
        Tenant::Resume { tenant } => gate::open(&store, Whose::Tenant(&tenant), global).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// A tenant, whatever is known of it.
#[derive(Serialize)]
struct Row {
    tenant: String,
    weight: f32,
    due: i64,
    later: i64,
    running: i64,
    max_depth: Option<i32>,
    closed_until: Option<String>,
    closed_reason: Option<String>,
    #[serde(skip)]
    gate: Option<GateRecord>,
}

impl Row {
    fn new(tenant: &str) -> Self {
        Self {
            tenant: tenant.to_owned(),
            weight: 1.0,
            due: 0,
            later: 0,
            running: 0,
            max_depth: None,
            closed_until: None,
            closed_reason: None,
            gate: None,
        }
    }
}

async fn rows(store: &Store) -> Result<Vec<Row>> {
    let mut rows: BTreeMap<String, Row> = BTreeMap::new();
    fn row<'a>(rows: &'a mut BTreeMap<String, Row>, tenant: &str) -> &'a mut Row {
        rows.entry(tenant.to_owned()).or_insert_with(|| Row::new(tenant))
    }
    for health in store.queue_health().await? {
        let row = row(&mut rows, &health.tenant);
        row.due += health.due;
        row.later += health.later;
        row.running += health.running;
    }
    for set in store.tenants().await? {
        row(&mut rows, &set.tenant).weight = set.weight;
    }
    for limit in store.depths().await?.into_iter().filter(|limit| limit.scope == "tenant") {
        row(&mut rows, &limit.name).max_depth = Some(limit.max_depth);
    }
    for gate in store.gates_of_each("tenant:").await? {
        let row = row(&mut rows, gate.name.strip_prefix("tenant:").unwrap_or(&gate.name));
        row.closed_until.clone_from(&gate.closed_until);
        row.closed_reason.clone_from(&gate.closed_reason);
        row.gate = Some(gate);
    }
    Ok(rows.into_values().collect())
}

async fn list(store: &Store, global: &Global) -> Result<()> {
    let rows = rows(store).await?;
    if global.json {
        return output::json(&rows);
    }
    if rows.is_empty() {
        output::note("no tenants yet; `posthouse enqueue KIND PAYLOAD --tenant NAME` makes one");
        return Ok(());
    }
    let now = store.clock().await?;
    let mut grid =
        Grid::new(&["tenant", "weight", "due", "later", "running", "may wait", "paused"]).right(&[1, 2, 3, 4, 5]);
    for row in rows.iter().take(ROWS_MAX) {
        let paused = row.gate.as_ref().and_then(|gate| gate::paused(gate, now)).unwrap_or_default();
        grid.row(vec![
            cell(&row.tenant),
            cell(row.weight.to_string()),
            count(row.due),
            count(row.later),
            count(row.running),
            cell(row.max_depth.map(|jobs| jobs.to_string()).unwrap_or_default()),
            cell(paused).fg(Color::Red),
        ]);
    }
    grid.print()?;
    match rows.len().checked_sub(ROWS_MAX).filter(|more| *more > 0) {
        Some(more) => output::line(format_args!("{DIM}… {more} more; --json shows all{DIM:#}")),
        None => Ok(()),
    }
}

async fn set(store: &Store, args: &TenantSet, global: &Global) -> Result<()> {
    let mut answer = json!({ "tenant": args.tenant });
    let mut told = Vec::new();
    if let Some(weight) = args.changes.weight {
        store.set_tenant(&args.tenant, weight).await?;
        answer["weight"] = json!(weight);
        told.push(format!("has weight {weight}"));
    }
    if let Some(Depth(max_depth)) = args.changes.max_depth {
        store.set_depth(DepthOf::Tenant(&args.tenant), max_depth).await?;
        answer["max_depth"] = json!(max_depth);
        told.push(match max_depth {
            Some(jobs) => format!("gets no new jobs while {jobs} of its own wait"),
            None => "may have any number of jobs waiting".to_owned(),
        });
    }
    if global.json {
        return output::json(&answer);
    }
    told.iter().try_for_each(|now| output::line(format_args!("tenant {} {now}", clean(&args.tenant))))
}
