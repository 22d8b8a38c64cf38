//! Look at dead letters, and at what was done to jobs that had ended.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio_postgres::types::{Json, Type};

use super::connection::{Store, p};
use super::operate::Selection;
use crate::error::Result;

/// A dead letter as a list shows it: without its payload, its error cut to 500 characters. Times are as Postgres writes them in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetter {
    /// The job.
    pub id: i64,
    /// Its queue.
    pub queue: String,
    /// Whose it is.
    pub tenant: String,
    /// What runs it.
    pub kind: String,
    /// Smaller runs first.
    pub priority: i32,
    /// The class of its last error.
    pub class: String,
    /// The beginning of its last error.
    pub error: String,
    /// Attempts since it was put into line the last time.
    pub attempt: i32,
    /// Attempts it might have had.
    pub max_attempts: i32,
    /// When it was enqueued.
    pub created_at: String,
    /// When it failed.
    pub failed_at: String,
    /// How often it was put back into line before.
    pub redrives: i64,
}

/// A job that had ended was put back into line.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Redrive {
    /// The how manieth time of this job, from 1.
    pub number: i32,
    /// When.
    pub redriven_at: String,
    /// By whom: the login of the database, and who that said it was.
    pub redriven_by: String,
    /// The state that the job had: `failed` or `cancelled`.
    pub state: String,
    /// Attempts until then.
    pub attempt: i32,
    /// The class of its last error.
    pub class: Option<String>,
    /// Its last error.
    pub error: Option<String>,
    /// What was changed: `{"priority": {"from": 0, "to": 5}, …}`.
    pub changes: serde_json::Value,
    /// The payload that it had, JSON text, where that was changed.
    pub payload: Option<Box<RawValue>>,
}

impl Store {
    /// Dead letters, newest failures first, at most `limit` (10,000 at the most). The next page begins behind `before`: `failed_at` and `id`
    /// of the last one of this page.
    pub async fn dead_letters(
        &self,
        selection: &Selection,
        limit: u32,
        before: Option<(String, i64)>,
    ) -> Result<Vec<DeadLetter>> {
        let (at, id) = before.unzip();
        let parameters = vec![
            Selection { all: true, ..selection.clone() }.parameter()?,
            p(i32::try_from(limit).unwrap_or(i32::MAX), Type::INT4),
            p(at, Type::TEXT),
            p(id, Type::INT8),
        ];
        let sql = "select to_jsonb(d.*) from posthouse.dead_letters($1, $2, $3::text::timestamptz, $4) d";
        let rows = self.call(sql, parameters).await?;
        rows.iter().map(|row| Ok(row.try_get::<_, Json<DeadLetter>>(0)?.0)).collect()
    }

    /// When and why a job was put back into line after it had ended, oldest first.
    pub async fn redrives(&self, id: i64) -> Result<Vec<Redrive>> {
        let sql = "select to_jsonb(r.*) - 'job_id' from posthouse.redrives r where r.job_id = $1 order by r.number";
        let rows = self.call(sql, vec![p(id, Type::INT8)]).await?;
        rows.iter().map(|row| Ok(row.try_get::<_, Json<Redrive>>(0)?.0)).collect()
    }
}
