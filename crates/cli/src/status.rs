//! `posthouse status`: queues, gates, workers and failures at a glance.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use posthouse::store::{AlertRecord, GateRecord, JobFilter, JobRecord, QueueHealth, Store, WorkerRecord};
use serde::Serialize;

use crate::args::{Global, Status};
use crate::failure::Result;
use crate::output::{self, Grid, age, cell, count, short};
use crate::style::{BAD, BOLD, DIM, GOOD, clean};
use crate::{alert, connect, gate};

/// Rows of a table for people; JSON has all of them.
const ROWS_MAX: usize = 30;
/// Gates that are asked for; with a limit for each of many tenants there are thousands.
const GATES: u32 = 100;
/// Newest failures shown.
const FAILURES: u32 = 5;
/// Newest open alerts shown.
const ALERTS: u32 = 20;

/// What there is to see.
#[derive(Serialize)]
struct Overview {
    /// Why it is taken for a copy of another database that nobody has adopted.
    copy: Option<String>,
    queues: Vec<QueueHealth>,
    /// Those that are closed or full, the worst first.
    gates: Vec<GateRecord>,
    /// How many are.
    gates_total: usize,
    /// Open ones.
    alerts: Vec<AlertRecord>,
    /// Those that live, or whose jobs are about to be taken back.
    workers: Vec<WorkerRecord>,
    failures: Vec<JobRecord>,
    #[serde(skip)]
    now: SystemTime,
}

/// Shows it, once or again and again.
pub(crate) async fn run(args: Status, global: &Global) -> Result<ExitCode> {
    let store = connect::store(global).await?;
    let Some(pause) = args.watch else {
        let overview = look(&store).await?;
        if global.json {
            output::json(&overview)?
        } else {
            overview.print()?
        }
        return Ok(ExitCode::SUCCESS);
    };
    loop {
        let overview = look(&store).await?;
        if global.json {
            output::json_line(&overview)?;
        } else {
            if std::io::stdout().is_terminal() {
                // Clear the screen, and begin at its top.
                output::line("\u{1b}[2J\u{1b}[H")?;
            }
            overview.print()?;
            output::line("")?;
        }
        tokio::time::sleep(pause).await;
    }
}

async fn look(store: &Store) -> Result<Overview> {
    let newest = JobFilter { state: Some("failed".to_owned()), ..JobFilter::default() };
    let mut workers = store.workers().await?;
    workers.retain(|worker| worker.state != "over");
    let (gates, gates_total) = store.closed_or_full_gates(GATES).await?;
    Ok(Overview {
        copy: copy(store).await?,
        queues: store.queue_health().await?,
        gates,
        gates_total,
        alerts: store.alerts(false, ALERTS).await?,
        workers,
        failures: store.jobs(&newest, FAILURES).await?,
        now: store.clock().await?,
    })
}

/// Why no worker may start here. A login that may not ask is not told.
async fn copy(store: &Store) -> Result<Option<String>> {
    match store.origin().await {
        Ok(origin) => Ok(origin.reason.filter(|_| origin.is_copy)),
        Err(error) if error.sqlstate() == Some("42501") => Ok(None),
        Err(error) => Err(error.into()),
    }
}

impl Overview {
    fn print(&self) -> Result<()> {
        self.print_copy()?;
        self.print_queues()?;
        self.print_gates()?;
        alert::print_open(&self.alerts, self.now)?;
        self.print_workers()?;
        self.print_unserved()?;
        self.print_failures()
    }

    fn print_copy(&self) -> Result<()> {
        let Some(reason) = &self.copy else { return Ok(()) };
        output::line(format_args!(
            "{BAD}this database is a copy{BAD:#} of another ({}), and nobody has adopted it: no worker starts here, no schedule fires",
            clean(reason)
        ))?;
        output::line("`posthouse db adopt` shows what is queued, asks, and lets them; `--dry-run` only shows it\n")
    }

    fn print_queues(&self) -> Result<()> {
        if self.queues.is_empty() {
            return output::line("no jobs yet; `posthouse enqueue KIND PAYLOAD` puts one in");
        }
        let header = ["queue", "tenant", "due", "later", "running", "waiting", "done", "failed", "oldest due"];
        let mut grid = Grid::new(&header).right(&[2, 3, 4, 5, 6, 7, 8]);
        for q in self.queues.iter().take(ROWS_MAX) {
            let oldest = q.oldest_due_age_ms.map(|ms| short(Duration::from_millis(ms.try_into().unwrap_or(0))));
            let numbers = [q.due, q.later, q.running, q.waiting, q.done, q.failed].map(count);
            let names = [cell(&q.queue), cell(&q.tenant)];
            grid.row(names.into_iter().chain(numbers).chain([cell(oldest.unwrap_or_default())]).collect());
        }
        grid.print()?;
        self.and_more(self.queues.len())
    }

    fn print_gates(&self) -> Result<()> {
        if self.gates.is_empty() {
            return Ok(());
        }
        output::line("")?;
        for gate in self.gates.iter().take(ROWS_MAX) {
            gate::print_state(gate, self.now)?;
        }
        match self.gates_total.checked_sub(ROWS_MAX).filter(|more| *more > 0) {
            Some(more) => {
                output::line(format_args!("{DIM}… and {more} more; `posthouse gate list --json` has all{DIM:#}"))
            }
            None => Ok(()),
        }
    }

    fn and_more(&self, rows: usize) -> Result<()> {
        match rows.checked_sub(ROWS_MAX).filter(|more| *more > 0) {
            Some(more) => output::line(format_args!("{DIM}… {more} more; --json shows all{DIM:#}")),
            None => Ok(()),
        }
    }

    fn print_workers(&self) -> Result<()> {
        output::line("")?;
        if self.workers.is_empty() {
            return output::line(format_args!("{BOLD}no workers{BOLD:#}; `posthouse work` starts one"));
        }
        let mut grid = Grid::new(&["worker", "state", "running", "beat", "queues", "kinds"]).right(&[2]);
        for w in self.workers.iter().take(ROWS_MAX) {
            grid.row(vec![
                cell(format!("{} pid {}", w.host, w.pid)),
                cell(&w.state),
                cell(format!("{}/{}", w.running, w.slots)),
                cell(age(&w.beat_at, self.now)),
                cell(w.queues.join(", ")),
                cell(w.kinds.join(", ")),
            ]);
        }
        grid.print()?;
        self.and_more(self.workers.len())
    }

    fn print_unserved(&self) -> Result<()> {
        for q in self.queues.iter().filter(|q| !q.unserved_kinds.is_empty()).take(ROWS_MAX) {
            output::line(format_args!(
                "{BAD}nobody serves{BAD:#} {} on queue {} for tenant {}",
                clean(&q.unserved_kinds.join(", ")),
                clean(&q.queue),
                clean(&q.tenant)
            ))?;
        }
        Ok(())
    }

    fn print_failures(&self) -> Result<()> {
        output::line("")?;
        if self.failures.is_empty() {
            return output::line(format_args!("{GOOD}no dead letters{GOOD:#}"));
        }
        let mut grid = Grid::new(&["newest failures", "kind", "failed", "error"]);
        for job in &self.failures {
            grid.row(vec![
                cell(format!("job {}", job.id)),
                cell(&job.kind),
                cell(job.finished_at.as_deref().map(|at| age(at, self.now)).unwrap_or_default()),
                cell(job.error.as_deref().unwrap_or_default()),
            ]);
        }
        grid.print()
    }
}
