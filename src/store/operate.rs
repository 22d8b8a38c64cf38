//! What people do to jobs: cancel, retry, redrive, purge, explain; one, or all that a [`Selection`] names, in batches.

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};

use super::connection::{Parameter, Store, p};
use super::inspect::JobRecord;
use crate::error::{Error, Result};

/// A job of each of these ids, without what can be large.
const SAMPLE: &str = "select jsonb_build_object('id', v.id, 'state', v.state, 'queue', v.queue, 'tenant', v.tenant, 'kind', v.kind, \
    'priority', v.priority, 'run_at', v.run_at, 'created_at', v.created_at, 'started_at', v.started_at, \
    'finished_at', v.finished_at, 'attempt', v.attempt, 'max_attempts', v.max_attempts, 'timeout_ms', v.timeout_ms, \
    'fence', v.fence, 'worker', v.worker, 'cancel_asked', v.cancel_asked, 'reason', v.reason, 'error', left(v.error, 500)) \
    from unnest($1::bigint[]) with ordinality u(id, place) \
    cross join lateral (select * from posthouse.jobs where jobs.id = u.id limit 1) v order by u.place";

/// Which jobs: all conditions that are given must hold. Times are text in any form that Postgres reads. One without any condition is
/// refused unless `all` is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Selection {
    /// These ids, at most 10,000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<i64>>,
    /// In one of these states. Empty: those that what is to be done is meant for.
    #[serde(rename = "state", skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<String>,
    /// Of this queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Of this kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Of this tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Whose newest error is of this class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Whose newest error contains this text, in capitals or not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Enqueued then or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_since: Option<String>,
    /// Enqueued earlier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_before: Option<String>,
    /// Whose newest error came then or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_since: Option<String>,
    /// Whose newest error came earlier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_before: Option<String>,
    /// It may be without conditions.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
}

/// What to do to jobs that a [`Selection`] names.
#[derive(Debug, Clone)]
pub enum Action {
    /// Cancel those that are queued, running or waiting.
    Cancel,
    /// Run those that wait for their time now, and put failed ones back into line; cancelled ones too, where the selection names that
    /// state.
    Retry {
        /// Who asks; kept beside the login of the database. `None`: only that.
        asked_by: Option<String>,
    },
    /// Put failed jobs (dead letters) back into line, changed, those that failed first before the others.
    Redrive {
        /// What to change: JSON text as the SQL function `posthouse.redrive_many` takes it, which goes there as it is. `None`: nothing.
        changes: Option<Box<RawValue>>,
        /// So many become due a second, 0.0001 to 100,000. `None`: all at once.
        rate: Option<f64>,
        /// As for a retry.
        asked_by: Option<String>,
    },
    /// Remove final jobs and their payloads for good: failed ones, and done and cancelled ones where the selection names those states.
    Purge,
    /// Give queued jobs this priority.
    Reprioritise {
        /// Smaller runs first.
        priority: i32,
    },
}

/// What one batch did.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Batch {
    /// Jobs that were changed.
    pub changed: i64,
    /// Jobs that somebody else was busy with: begin again to have those too.
    pub busy: i64,
    /// Jobs that could not be changed, and why: `[{"id", "error"}]`.
    pub refused: Vec<Refused>,
    /// Where the next batch begins. `None`: that was the last one.
    pub next: Option<Value>,
}

/// A job that could not be changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Refused {
    /// The job.
    pub id: i64,
    /// Why.
    pub error: String,
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

impl Selection {
    /// These jobs.
    pub fn of(ids: impl Into<Vec<i64>>) -> Self {
        Self { ids: Some(ids.into()), ..Self::default() }
    }

    /// Whether it names no condition.
    pub fn is_empty(&self) -> bool {
        Self { all: false, ..self.clone() } == Self::default()
    }

    pub(super) fn parameter(&self) -> Result<Parameter> {
        let filter = serde_json::to_value(self).map_err(|error| Error::invalid(format!("filter: {error}")))?;
        Ok(p(Json(filter), Type::JSONB))
    }
}

impl Batch {
    fn of(row: &Row) -> Result<Self> {
        Ok(Self {
            changed: row.try_get(0)?,
            busy: row.try_get(1)?,
            refused: row.try_get::<_, Json<Vec<Refused>>>(2)?.0,
            next: row.try_get::<_, Option<Json<Value>>>(3)?.map(|json| json.0),
        })
    }
}

/// The statement that does it to the next jobs.
fn change(
    selection: &Selection,
    action: &Action,
    max_jobs: u32,
    after: Option<Value>,
) -> Result<(&'static str, Vec<Parameter>)> {
    let mut parameters = vec![selection.parameter()?, int(max_jobs), json(after)];
    let sql = match action {
        Action::Cancel => "select changed, busy, refused, next from posthouse.cancel_many($1, $2, $3)",
        Action::Purge => "select changed, busy, refused, next from posthouse.purge_many($1, $2, $3)",
        Action::Reprioritise { priority } => {
            parameters.push(p(*priority, Type::INT4));
            "select changed, busy, refused, next from posthouse.reprioritise_many($1, $4, $2, $3)"
        }
        Action::Retry { asked_by } => {
            parameters.push(p(asked_by.clone(), Type::TEXT));
            "select changed, busy, refused, next from posthouse.retry_many($1, $2, $3, $4)"
        }
        Action::Redrive { changes, rate, asked_by } => {
            parameters.push(p(changes.as_ref().map_or("{}", |changes| changes.get()).to_owned(), Type::TEXT));
            parameters.push(p(*rate, Type::FLOAT8));
            parameters.push(p(asked_by.clone(), Type::TEXT));
            "select changed, busy, refused, next from posthouse.redrive_many($1, $4::text::jsonb, $5, $2, $3, $6)"
        }
    };
    Ok((sql, parameters))
}

fn json(value: Option<Value>) -> Parameter {
    p(value.map(Json), Type::JSONB)
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

    /// The next jobs that a selection names, at most `max_jobs` (10,000 at the most), and where to go on with `after`; `None`: that
    /// was all. A call looks at a bounded number of jobs and may answer with few though there are more.
    pub async fn find_jobs(
        &self,
        selection: &Selection,
        max_jobs: u32,
        after: Option<Value>,
    ) -> Result<(Vec<i64>, Option<Value>)> {
        let parameters = vec![selection.parameter()?, int(max_jobs), json(after)];
        let row = self.call_one("select ids, next from posthouse.find_jobs($1, $2, $3)", parameters).await?;
        Ok((row.try_get(0)?, row.try_get::<_, Option<Json<Value>>>(1)?.map(|json| json.0)))
    }

    /// These jobs in this order, without payloads and results.
    pub async fn sample(&self, ids: &[i64]) -> Result<Vec<JobRecord>> {
        let rows = self.call(SAMPLE, vec![p(ids.to_vec(), Type::INT8_ARRAY)]).await?;
        rows.iter().map(|row| Ok(row.try_get::<_, Json<JobRecord>>(0)?.0)).collect()
    }

    /// Do something to the next jobs that a selection names, at most `max_jobs` (10,000 at the most), in one transaction. Begin with
    /// `after` being `None`, then pass what [`Batch::next`] was, until that is `None`.
    pub async fn change_jobs(
        &self,
        selection: &Selection,
        action: &Action,
        max_jobs: u32,
        after: Option<Value>,
    ) -> Result<Batch> {
        let (sql, parameters) = change(selection, action, max_jobs, after)?;
        Batch::of(&self.call_one(sql, parameters).await?)
    }

    /// What [`change_jobs`](Self::change_jobs) would answer now: it is done in a transaction that is rolled back. For that long it holds up
    /// others who are at the same jobs, and it writes as much as if it stayed, so ask for some hundred jobs and not for all.
    pub async fn rehearse_jobs(
        &self,
        selection: &Selection,
        action: &Action,
        max_jobs: u32,
        after: Option<Value>,
    ) -> Result<Batch> {
        let (sql, parameters) = change(selection, action, max_jobs, after)?;
        Batch::of(&self.call_one_undone(sql, parameters).await?)
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

fn int(number: u32) -> Parameter {
    p(i32::try_from(number).unwrap_or(i32::MAX), Type::INT4)
}
