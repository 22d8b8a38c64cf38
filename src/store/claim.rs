//! Register a worker and claim jobs.

use std::time::{Duration, SystemTime};

use serde_json::json;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::connection::{Store, p};
use crate::error::Result;

/// A worker's entry in the register.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The id of this incarnation: a new random one each time.
    pub worker: Uuid,
    /// How long the right to its jobs lasts without a heartbeat. 500 ms to 1 hour.
    pub lease: Duration,
    /// The queues it subscribes to, at least one.
    pub queues: Vec<String>,
    /// The kinds it has handlers for: it is given no others.
    pub kinds: Vec<String>,
    /// How many jobs it runs at once, for people to see.
    pub slots: u32,
    /// The machine it runs on, for people.
    pub host: String,
    /// Its process id, for people.
    pub pid: u32,
    /// The version of its program, for people.
    pub version: String,
}

/// When a claim may find something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextDue {
    /// After this time; zero: at once.
    In(Duration),
    /// When a job ends that runs behind the same gate, here or elsewhere.
    WhenOneEnds,
    /// Nothing is known.
    Unknown,
}

/// A job under this worker's lease.
#[derive(Debug, Clone)]
pub struct ClaimedJob {
    /// The job.
    pub id: i64,
    /// Grows with every claim of the job; every write of this attempt carries it.
    pub fence: i64,
    /// The number of this attempt, from 1.
    pub attempt: u32,
    /// The last attempt there will be.
    pub max_attempts: u32,
    /// What runs it.
    pub kind: String,
    /// The queue it came from.
    pub queue: String,
    /// Whose it is.
    pub tenant: String,
    /// Smaller runs first.
    pub priority: i32,
    /// The payload, JSON text.
    pub payload: Box<RawValue>,
    /// The longest time this attempt may take. `None`: no limit.
    pub timeout: Option<Duration>,
    /// Where it stood in line; the next claim passes the last one on, so that lanes take turns.
    pub lane: i64,
    /// When it was enqueued, by the database's clock.
    pub enqueued_at: SystemTime,
    /// W3C trace context of whoever enqueued it.
    pub trace: Option<Box<RawValue>>,
    /// The model to use in place of its own, whose budget is spent. `None`: its own.
    pub model: Option<String>,
}

impl Store {
    /// Begin a worker's life.
    pub async fn register_worker(&self, r: &Registration) -> Result<()> {
        let info = json!({"host": r.host, "pid": r.pid, "version": r.version});
        self.call_one(
            "select posthouse.register_worker($1, $2, $3, $4, $5, $6)",
            vec![
                p(r.worker, Type::UUID),
                p(r.queues.clone(), Type::TEXT_ARRAY),
                p(r.kinds.clone(), Type::TEXT_ARRAY),
                p(i32::try_from(r.slots).unwrap_or(i32::MAX), Type::INT4),
                p(i64::try_from(r.lease.as_millis()).unwrap_or(i64::MAX), Type::INT8),
                p(info, Type::JSONB),
            ],
        )
        .await
        .map(|_| ())
    }

    /// Claim up to `max_jobs` due jobs. `seq` numbers this worker's claims from 1; the same number again answers with the
    /// same jobs. `after_lane` is the [`lane`](ClaimedJob::lane) of the last job claimed before, 0 at first.
    pub async fn claim(&self, worker: Uuid, seq: i64, max_jobs: u32, after_lane: i64) -> Result<Vec<ClaimedJob>> {
        let rows = self
            .call(
                "select * from posthouse.claim($1, $2, $3, $4)",
                vec![
                    p(worker, Type::UUID),
                    p(seq, Type::INT8),
                    p(i32::try_from(max_jobs).unwrap_or(i32::MAX), Type::INT4),
                    p(after_lane, Type::INT8),
                ],
            )
            .await?;
        rows.iter().map(claimed).collect()
    }

    /// When a claim of this worker may find something.
    pub async fn next_due(&self, worker: Uuid) -> Result<NextDue> {
        let row = self.call_one("select posthouse.next_due($1)", vec![p(worker, Type::UUID)]).await?;
        Ok(match row.try_get::<_, Option<i64>>(0)? {
            None => NextDue::Unknown,
            Some(ms) if ms < 0 => NextDue::WhenOneEnds,
            Some(ms) => NextDue::In(Duration::from_millis(ms.unsigned_abs())),
        })
    }

    /// Whether nothing is due, later or running in this worker's queues and kinds.
    pub async fn is_empty(&self, worker: Uuid) -> Result<bool> {
        let row = self.call_one("select posthouse.is_empty($1)", vec![p(worker, Type::UUID)]).await?;
        Ok(row.try_get(0)?)
    }
}

fn claimed(row: &Row) -> Result<ClaimedJob> {
    Ok(ClaimedJob {
        id: row.try_get(0)?,
        fence: row.try_get(1)?,
        attempt: row.try_get::<_, i32>(2)?.unsigned_abs(),
        max_attempts: row.try_get::<_, i32>(3)?.unsigned_abs(),
        kind: row.try_get(4)?,
        queue: row.try_get(5)?,
        tenant: row.try_get(6)?,
        priority: row.try_get(7)?,
        payload: row.try_get::<_, Json<Box<RawValue>>>(8)?.0,
        timeout: row.try_get::<_, Option<i64>>(9)?.map(|ms| Duration::from_millis(ms.max(0).unsigned_abs())),
        lane: row.try_get(10)?,
        enqueued_at: row.try_get(11)?,
        trace: row.try_get::<_, Option<Json<Box<RawValue>>>>(12)?.map(|j| j.0),
        model: row.try_get(13)?,
    })
}
