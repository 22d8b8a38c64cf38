//! The sweep: what any worker process may do for the whole fleet.

use std::time::Duration;

use serde_json::json;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::alert::{AlertMessage, messages};
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

    /// Do whatever other housekeeping is due. Cheap when nothing is. Answers with the alerts that were told now, for the log.
    pub async fn tidy(&self) -> Result<Vec<AlertMessage>> {
        messages(&self.call_one("select posthouse.tidy()", Vec::new()).await?)
    }
}
