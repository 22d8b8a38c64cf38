//! Look at jobs, queues and workers through the public views. Lists fetch no payloads and results.

use std::time::SystemTime;

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::connection::{Store, p};
use crate::error::{Error, Result};

/// A job as the view `posthouse.jobs` shows it. Times are as Postgres writes them in JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JobRecord {
    /// The job.
    pub id: i64,
    /// `queued`, `running`, `waiting`, `done`, `failed` or `cancelled`.
    pub state: String,
    /// Its queue.
    pub queue: String,
    /// Whose it is.
    pub tenant: String,
    /// What runs it.
    pub kind: String,
    /// Smaller runs first.
    pub priority: i32,
    /// Not before; only of live jobs.
    pub run_at: Option<String>,
    /// When it was enqueued.
    pub created_at: String,
    /// When its newest attempt began.
    pub started_at: Option<String>,
    /// When it became final.
    pub finished_at: Option<String>,
    /// Attempts so far.
    pub attempt: i32,
    /// Attempts it may have.
    pub max_attempts: i32,
    /// The longest one attempt may take, in milliseconds.
    pub timeout_ms: Option<i64>,
    /// The fence of the newest attempt.
    pub fence: i64,
    /// The worker of the newest attempt.
    pub worker: Option<Uuid>,
    /// Somebody asked to cancel it, and its worker has not done so yet.
    pub cancel_asked: bool,
    /// Why it was deferred, or the class of the error it failed with.
    pub reason: Option<String>,
    /// The newest error.
    pub error: Option<String>,
    /// Every error. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub errors: Option<Value>,
    /// How far the running attempt has come. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub progress: Option<Value>,
    /// The payload, JSON text. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub payload: Option<Box<RawValue>>,
    /// The result, JSON text. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub result: Option<Box<RawValue>>,
    /// What it used up. Not in lists.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub usage: Option<Value>,
    /// What was done to make the result storable: `cleaned`, `truncated`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub flags: Option<Vec<String>>,
}

/// Which jobs: all conditions that are given must hold.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    /// In this state.
    pub state: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this tenant.
    pub tenant: Option<String>,
    /// With a smaller id than this, for the next page.
    pub before: Option<i64>,
}

/// How a queue does for a tenant, as the view `posthouse.queue_health` shows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QueueHealth {
    /// The queue.
    pub queue: String,
    /// The tenant.
    pub tenant: String,
    /// Jobs that could run now.
    pub due: i64,
    /// Jobs that wait for their time.
    pub later: i64,
    /// Jobs that run.
    pub running: i64,
    /// Jobs that wait for something else.
    pub waiting: i64,
    /// Jobs ever done.
    pub done: i64,
    /// Dead letters there are now.
    pub failed: i64,
    /// How long the oldest due job has been due, in milliseconds.
    pub oldest_due_age_ms: Option<i64>,
    /// Kinds with due jobs that no live worker serves.
    pub unserved_kinds: Vec<String>,
}

/// A worker as the view `posthouse.workers` shows it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct WorkerRecord {
    /// The worker.
    pub id: Uuid,
    /// The machine it runs on.
    pub host: String,
    /// Its process id.
    pub pid: i32,
    /// The version of its program.
    pub version: String,
    /// Its queues.
    pub queues: Vec<String>,
    /// Its kinds.
    pub kinds: Vec<String>,
    /// How many jobs it runs at once.
    pub slots: i32,
    /// `live`, `expired` (its lease is over, its jobs are about to be taken back) or `over`.
    pub state: String,
    /// When it began.
    pub started_at: String,
    /// Its newest heartbeat.
    pub beat_at: String,
    /// When its lease ends.
    pub expires_at: String,
    /// Jobs it runs.
    pub running: i64,
}

/// First the ids, from each home by its primary key, backwards, and no further than the limit; then the view for these few.
/// The view alone would be read and sorted whole, an archive of millions included. Homes where no job has this state are
/// left out by the planner.
const LIST: &str = "with picked as ( \
    (select j.id from posthouse.job j join posthouse.lane l on l.id = j.lane_id \
      where coalesce($1 in ('queued', 'running', 'waiting'), true) and ($1::text is null or j.state::text = $1) \
      and ($2::text is null or l.queue = $2) and ($3::text is null or l.kind = $3) and ($4::text is null or l.tenant = $4) \
      and ($5::bigint is null or j.id < $5) order by j.id desc limit $6) union all \
    (select a.id from posthouse.archive a join posthouse.lane l on l.id = a.lane_id \
      where coalesce($1 in ('done', 'cancelled'), true) and ($1::text is null or a.state::text = $1) \
      and ($2::text is null or l.queue = $2) and ($3::text is null or l.kind = $3) and ($4::text is null or l.tenant = $4) \
      and ($5::bigint is null or a.id < $5) order by a.id desc limit $6) union all \
    (select t.id from posthouse.tombstone t join posthouse.lane l on l.id = t.lane_id \
      where coalesce($1 in ('done', 'cancelled'), true) and ($1::text is null or t.state::text = $1) \
      and ($2::text is null or l.queue = $2) and ($3::text is null or l.kind = $3) and ($4::text is null or l.tenant = $4) \
      and ($5::bigint is null or t.id < $5) order by t.id desc limit $6) union all \
    (select d.id from posthouse.dead_letter d join posthouse.lane l on l.id = d.lane_id where coalesce($1 = 'failed', true) \
      and ($2::text is null or l.queue = $2) and ($3::text is null or l.kind = $3) and ($4::text is null or l.tenant = $4) \
      and ($5::bigint is null or d.id < $5) order by d.id desc limit $6)) \
    select jsonb_build_object('id', v.id, 'state', v.state, 'queue', v.queue, 'tenant', v.tenant, 'kind', v.kind, \
    'priority', v.priority, 'run_at', v.run_at, 'created_at', v.created_at, 'started_at', v.started_at, \
    'finished_at', v.finished_at, 'attempt', v.attempt, 'max_attempts', v.max_attempts, 'timeout_ms', v.timeout_ms, \
    'fence', v.fence, 'worker', v.worker, 'cancel_asked', v.cancel_asked, 'reason', v.reason, 'error', left(v.error, 500)) \
    from (select id from picked order by id desc limit $6) p \
    cross join lateral (select * from posthouse.jobs where jobs.id = p.id limit 1) v order by p.id desc";

fn json<T: DeserializeOwned>(row: &Row) -> Result<T> {
    Ok(row.try_get::<_, Json<T>>(0)?.0)
}

impl Store {
    /// One job, whole. `None`: there is no such job.
    pub async fn job(&self, id: i64) -> Result<Option<JobRecord>> {
        let rows =
            self.call("select to_jsonb(j.*) from posthouse.jobs j where j.id = $1", vec![p(id, Type::INT8)]).await?;
        rows.first().map(json).transpose()
    }

    /// Jobs, newest first, at most `limit`.
    pub async fn jobs(&self, filter: &JobFilter, limit: u32) -> Result<Vec<JobRecord>> {
        let rows = self
            .call(
                LIST,
                vec![
                    p(filter.state.clone(), Type::TEXT),
                    p(filter.queue.clone(), Type::TEXT),
                    p(filter.kind.clone(), Type::TEXT),
                    p(filter.tenant.clone(), Type::TEXT),
                    p(filter.before, Type::INT8),
                    p(i64::from(limit), Type::INT8),
                ],
            )
            .await?;
        rows.iter().map(json).collect()
    }

    /// Every queue and tenant with jobs, now or ever.
    pub async fn queue_health(&self) -> Result<Vec<QueueHealth>> {
        let rows = self
            .call(
                "select to_jsonb(h.*) - 'oldest_due_age' || jsonb_build_object('oldest_due_age_ms', \
                 (extract(epoch from h.oldest_due_age) * 1000)::bigint, 'unserved_kinds', to_jsonb(posthouse.unserved_kinds(h.queue, h.tenant))) \
                 from posthouse.queue_health h order by h.queue, h.tenant",
                Vec::new(),
            )
            .await?;
        rows.iter().map(json).collect()
    }

    /// The workers of the last day, live ones first.
    pub async fn workers(&self) -> Result<Vec<WorkerRecord>> {
        let rows = self
            .call(
                "select to_jsonb(w.*) from posthouse.workers w order by w.dead_at is not null, w.started_at",
                Vec::new(),
            )
            .await?;
        rows.iter().map(json).collect()
    }

    /// The time by the clock of the database, which is the one that counts.
    pub async fn clock(&self) -> Result<SystemTime> {
        Ok(self.call_one("select clock_timestamp()", Vec::new()).await?.try_get(0)?)
    }

    /// The states of these jobs; an id that does not exist is left out.
    pub async fn states(&self, ids: &[i64]) -> Result<Vec<(i64, String)>> {
        let rows = self
            .call(
                "select u.id, posthouse.state_of(u.id) from unnest($1::bigint[]) u(id) where posthouse.state_of(u.id) is not null",
                vec![p(ids.to_vec(), Type::INT8_ARRAY)],
            )
            .await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get::<_, String>(1)?))).collect()
    }
}

impl JobRecord {
    /// Whether nothing will happen to it any more by itself.
    pub fn is_final(&self) -> bool {
        matches!(self.state.as_str(), "done" | "failed" | "cancelled")
    }

    /// Its result, decoded. An error if it is not done.
    pub fn result_as<T: DeserializeOwned>(&self) -> Result<T> {
        match (&*self.state, &self.result) {
            ("done", Some(result)) => Ok(serde_json::from_str(result.get())?),
            (state, _) => Err(Error::invalid(format!("job {} is {state} and has no result", self.id))),
        }
    }
}
