//! The sweep: what any worker process may do for the whole fleet.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::alert::AlertMessage;
use super::connection::{Store, p};
use crate::error::Result;

/// A worker that is not dead, and its newest heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerBeat {
    /// The worker.
    pub worker: Uuid,
    /// Its newest heartbeat, as Postgres writes it: only good for telling whether there was another one.
    pub beat_at: String,
    /// The length of its lease.
    pub lease: Duration,
    /// Whether its lease is over by the database's clock.
    pub expired: bool,
}

/// What a rescue did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rescued {
    /// Jobs taken back from dead workers.
    pub jobs: i32,
    /// There are more: call again.
    pub more: bool,
}

/// What a call of [`Store::tidy`] did.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub struct Tidied {
    /// The alerts that were told now.
    pub alerts: Vec<AlertMessage>,
    /// The parts that failed. They come again.
    pub failed: Vec<FailedSweep>,
    /// Something is left to do.
    pub more: bool,
    /// In how many milliseconds a part is due again: a second at most.
    pub wait_ms: u32,
}

/// A part of the sweep that failed. It is counted and comes again.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct FailedSweep {
    /// The part.
    pub sweep: String,
    /// What it said.
    pub error: String,
}

/// A part of the sweep as the view `posthouse.sweeps` shows it, for the whole fleet. Times are as Postgres writes them in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweepRecord {
    /// The part.
    pub name: String,
    /// When its last run ended. `None`: it has not run yet.
    pub ran_at: Option<String>,
    /// What its last run took, in milliseconds; of one in several transactions, all of them.
    pub took_ms: f64,
    /// How often it is to run, in milliseconds. Less often if it takes long.
    pub every_ms: f64,
    /// How often it ran.
    pub runs: i64,
    /// How often it failed.
    pub failures: i64,
    /// Its last run failed.
    pub failing: bool,
    /// The first failure since a run that did not fail.
    pub failing_since: Option<String>,
    /// The last failure, also if it is over.
    pub failed_at: Option<String>,
    /// What the last failure said, also if it is over.
    pub error: Option<String>,
    /// It should have run more than a minute ago: nobody sweeps, or it does not get its turn.
    pub late: bool,
}

impl Store {
    /// The workers that are not dead.
    pub async fn worker_beats(&self) -> Result<Vec<WorkerBeat>> {
        let rows = self
            .call(
                "select worker, to_jsonb(beat_at) #>> '{}', lease_ms, expired from posthouse.worker_beats()",
                Vec::new(),
            )
            .await?;
        rows.iter()
            .map(|row| {
                Ok(WorkerBeat {
                    worker: row.try_get(0)?,
                    beat_at: row.try_get(1)?,
                    lease: Duration::from_millis(row.try_get::<_, i64>(2)?.max(0).unsigned_abs()),
                    expired: row.try_get(3)?,
                })
            })
            .collect()
    }

    /// Declare the suspects dead whose lease is over, and take back the jobs of dead workers, about `max_jobs` at most. Suspects
    /// are workers whose beat the caller saw stand still for a whole lease on its own clock.
    pub async fn rescue(&self, suspects: &[WorkerBeat], max_jobs: u32) -> Result<Rescued> {
        let suspects: Vec<_> = suspects.iter().map(|s| json!({"worker": s.worker, "beat_at": s.beat_at})).collect();
        let row = self
            .call_one(
                "select jobs, more from posthouse.rescue($1, $2)",
                vec![p(Json(suspects), Type::JSONB), p(i32::try_from(max_jobs).unwrap_or(i32::MAX), Type::INT4)],
            )
            .await?;
        Ok(Rescued { jobs: row.try_get(0)?, more: row.try_get(1)? })
    }

    /// The parts of the sweep that are due, those that waited longest first.
    pub async fn due_sweeps(&self) -> Result<Vec<String>> {
        let rows = self.call("select posthouse.due_sweeps()", Vec::new()).await?;
        rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    /// How long until the first part is due that left something to do; `None`: none did. For whoever goes on with it.
    pub async fn more_due_in(&self) -> Result<Option<Duration>> {
        let row = self.call_one("select posthouse.more_due_in()", Vec::new()).await?;
        let in_ms: Option<i32> = row.try_get(0)?;
        Ok(in_ms.map(|in_ms| Duration::from_millis(in_ms.max(0).unsigned_abs().into())))
    }

    /// Do what is due of the housekeeping that Postgres does by itself, or only one part of it. Cheap when nothing is.
    pub async fn tidy(&self, part: Option<&str>) -> Result<Tidied> {
        let row = self.call_one("select posthouse.tidy($1)", vec![p(part.map(str::to_owned), Type::TEXT)]).await?;
        Ok(row.try_get::<_, Json<_>>(0)?.0)
    }

    /// Take a part of the sweep that needs several transactions. `false`: it is not due, or somebody else took it.
    pub async fn begin_sweep(&self, part: &str) -> Result<bool> {
        let parameters = vec![p(part.to_owned(), Type::TEXT)];
        Ok(self.call_one("select posthouse.begin_sweep($1)", parameters).await?.try_get(0)?)
    }

    /// Write down how a run of a part went: what it took, and whether it left something to do or why it failed.
    pub async fn end_sweep(&self, part: &str, took: Duration, ran: std::result::Result<bool, &str>) -> Result<()> {
        let parameters = vec![
            p(part.to_owned(), Type::TEXT),
            p(took.as_secs_f64() * 1e3, Type::FLOAT8),
            p(ran.unwrap_or(false), Type::BOOL),
            p(ran.err().map(str::to_owned), Type::TEXT),
        ];
        self.call_one("select posthouse.end_sweep($1, $2, $3, $4)", parameters).await.map(|_| ())
    }

    /// The parts of the sweep, for the whole fleet.
    pub async fn sweeps(&self) -> Result<Vec<SweepRecord>> {
        let sql = "select to_jsonb(s.*) - 'every' || jsonb_build_object('every_ms', extract(epoch from s.every) * 1000)
                   from posthouse.sweeps s order by s.name";
        self.call(sql, Vec::new()).await?.iter().map(|row| Ok(row.try_get::<_, Json<_>>(0)?.0)).collect()
    }
}
