//! What people do to jobs: cancel, retry, redrive, purge, explain.

use serde::Serialize;
use tokio_postgres::types::Type;

use super::connection::{Parameter, Store, p};
use crate::error::Result;

/// Which dead letters: all conditions that are given must hold.
#[derive(Debug, Clone, Default)]
pub struct DeadFilter {
    /// These ids.
    pub ids: Option<Vec<i64>>,
    /// Of this queue.
    pub queue: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this tenant.
    pub tenant: Option<String>,
}

/// One reason why a job is where it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reason {
    /// The state of the job.
    pub state: String,
    /// What holds it, or what became of it.
    pub reason: String,
    /// Until when, where that is known: a time as Postgres writes it in JSON.
    pub until: Option<String>,
}

impl DeadFilter {
    fn parameters(&self, max_jobs: u32) -> Vec<Parameter> {
        vec![
            p(self.ids.clone(), Type::INT8_ARRAY),
            p(self.queue.clone(), Type::TEXT),
            p(self.kind.clone(), Type::TEXT),
            p(self.tenant.clone(), Type::TEXT),
            p(i32::try_from(max_jobs).unwrap_or(i32::MAX), Type::INT4),
        ]
    }
}

impl Store {
    /// Cancel a job. Answers with its state now: `cancelled`, `running` (its worker has been told), or the final state it had
    /// reached before.
    pub async fn cancel(&self, id: i64) -> Result<String> {
        Ok(self.call_one("select posthouse.cancel($1)", vec![p(id, Type::INT8)]).await?.try_get(0)?)
    }

    /// Run a job again, or sooner: one that waits for its time, one that failed, one that was cancelled.
    pub async fn retry(&self, id: i64) -> Result<String> {
        Ok(self.call_one("select posthouse.retry($1)", vec![p(id, Type::INT8)]).await?.try_get(0)?)
    }

    /// How many dead letters there are.
    pub async fn count_dead(&self, filter: &DeadFilter) -> Result<i64> {
        let mut parameters = filter.parameters(0);
        parameters.truncate(4);
        let sql = "select count(*) from posthouse.dead_letter d join posthouse.lane l on l.id = d.lane_id \
            where ($1::bigint[] is null or d.id = any($1)) and ($2::text is null or l.queue = $2) \
            and ($3::text is null or l.kind = $3) and ($4::text is null or l.tenant = $4)";
        Ok(self.call_one(sql, parameters).await?.try_get(0)?)
    }

    /// Put up to `max_jobs` dead letters back into line, oldest first. Answers how many.
    pub async fn redrive(&self, filter: &DeadFilter, max_jobs: u32) -> Result<i64> {
        let row = self.call_one("select posthouse.redrive($1, $2, $3, $4, $5)", filter.parameters(max_jobs)).await?;
        Ok(row.try_get(0)?)
    }

    /// Remove up to `max_jobs` dead letters for good, oldest first. Answers how many.
    pub async fn purge(&self, filter: &DeadFilter, max_jobs: u32) -> Result<i64> {
        let row = self.call_one("select posthouse.purge($1, $2, $3, $4, $5)", filter.parameters(max_jobs)).await?;
        Ok(row.try_get(0)?)
    }

    /// Why a job is where it is, and what would move it.
    pub async fn explain(&self, id: i64) -> Result<Vec<Reason>> {
        let rows = self
            .call("select state, reason, to_jsonb(until) #>> '{}' from posthouse.explain($1)", vec![p(id, Type::INT8)])
            .await?;
        rows.iter()
            .map(|row| Ok(Reason { state: row.try_get(0)?, reason: row.try_get(1)?, until: row.try_get(2)? }))
            .collect()
    }
}
