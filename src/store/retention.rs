//! What is set for queues, above all for how long they keep jobs that have ended; and how the sweep lets partitions go.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_postgres::types::Type;

use super::connection::{Store, p};
use crate::error::{Error, Result};

/// What is set for a queue, as the view `posthouse.queues` shows it. The queue `*` stands for all that have no retention of
/// their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSettings {
    /// The queue.
    pub queue: String,
    /// For how long its done jobs are kept, in milliseconds. `None`: for ever. 0: no history.
    pub retention_ms: Option<i64>,
    /// The same of its cancelled jobs; those of done jobs unless they have a time of their own.
    pub retention_cancelled_ms: Option<i64>,
    /// The same of its dead letters.
    pub retention_failed_ms: Option<i64>,
    /// By what it is fair between its tenants: `jobs`, as it comes, or `tokens`.
    pub fair_by: String,
    /// The field of the payload that jobs share which run one at a time, in order. `None`: jobs run as they come.
    pub serial_by: Option<String>,
}

/// How a job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It is done.
    Done,
    /// It was cancelled.
    Cancelled,
    /// It failed: a dead letter.
    Failed,
}

/// For how long jobs are kept that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retention {
    /// As is set for the queue `*`; for ever if nothing is. Cancelled jobs: as done ones, if those have a time of their own.
    Default,
    /// For ever.
    Forever,
    /// So long at least, and a sixteenth of it longer at most (a day, if that is less). A second or more; zero for done and
    /// cancelled jobs keeps no history.
    For(Duration),
}

/// What a step of dropping partitions did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retired {
    /// There is nothing to drop.
    Idle,
    /// Somebody holds what is to be dropped; nobody waits for him.
    Busy,
    /// Payloads of dead letters were put aside. There may be another step.
    Spared,
    /// A partition was detached, and can be dropped.
    Detached,
    /// It was dropped. There may be another one.
    Dropped,
}

/// What the database takes for ever.
const FOREVER: Duration = Duration::from_hours(1_000 * 366 * 24);

impl Store {
    /// Set for how long a queue keeps its jobs that are done, cancelled or failed. It counts for those that have ended, too.
    pub async fn set_retention(&self, queue: &str, ended: Ended, retention: Retention) -> Result<()> {
        let retention_ms = match retention {
            Retention::Default => None,
            Retention::Forever => Some(FOREVER),
            Retention::For(time) => Some(time.min(FOREVER)),
        }
        .map(|time| time.as_secs_f64() * 1e3);
        let outcome = match ended {
            Ended::Done => "done",
            Ended::Cancelled => "cancelled",
            Ended::Failed => "failed",
        };
        let parameters =
            vec![p(queue.to_owned(), Type::TEXT), p(retention_ms, Type::FLOAT8), p(outcome.to_owned(), Type::TEXT)];
        self.call_one("select posthouse.set_queue($1, $2 * interval '1 millisecond', $3)", parameters).await.map(|_| ())
    }

    /// Say whether the payload of a job of this kind goes when it is done or cancelled. A dead letter keeps it.
    pub async fn set_drop_payload(&self, kind: &str, drop: bool) -> Result<()> {
        let parameters = vec![p(kind.to_owned(), Type::TEXT), p(drop, Type::BOOL)];
        self.call_one("select posthouse.set_kind($1, drop_payload => $2)", parameters).await.map(|_| ())
    }

    /// One step of dropping the partitions in which everything has expired. Waits for a lock 50 ms at most, and nobody for it
    /// longer. Any number of processes may call it.
    pub async fn retire(&self) -> Result<Retired> {
        let step: String = self.call_one("select posthouse.retire()", Vec::new()).await?.try_get(0)?;
        match &*step {
            "idle" => Ok(Retired::Idle),
            "busy" => Ok(Retired::Busy),
            "spared" => Ok(Retired::Spared),
            "detached" => Ok(Retired::Detached),
            "dropped" => Ok(Retired::Dropped),
            _ => Err(Error::schema(format!("retire answered {step:?}, which this version does not know"))),
        }
    }

    /// Let the jobs of a queue that share a field of their payload run one at a time, in order; `None`: as they come.
    pub async fn set_serial_by(&self, queue: &str, field: Option<&str>) -> Result<()> {
        let parameters = vec![p(queue.to_owned(), Type::TEXT), p(field.map(str::to_owned), Type::TEXT)];
        self.call_one("select posthouse.set_serial_by($1, $2)", parameters).await.map(|_| ())
    }

    /// Set by what a queue is fair between its tenants: `jobs` or `tokens`.
    pub async fn set_fair_by(&self, queue: &str, fair_by: &str) -> Result<()> {
        let parameters = vec![p(queue.to_owned(), Type::TEXT), p(fair_by.to_owned(), Type::TEXT)];
        self.call_one("select posthouse.set_fair_by($1, $2)", parameters).await.map(|_| ())
    }

    /// Every queue that has had jobs or settings, with its settings.
    pub async fn queues(&self) -> Result<Vec<QueueSettings>> {
        let sql = "select queue, (extract(epoch from retention) * 1000)::bigint, (extract(epoch from retention_cancelled) * 1000)::bigint, \
                   (extract(epoch from retention_failed) * 1000)::bigint, fair_by, serial_by from posthouse.queues order by queue";
        let rows = self.call(sql, Vec::new()).await?;
        rows.iter()
            .map(|row| {
                Ok(QueueSettings {
                    queue: row.try_get(0)?,
                    retention_ms: row.try_get(1)?,
                    retention_cancelled_ms: row.try_get(2)?,
                    retention_failed_ms: row.try_get(3)?,
                    fair_by: row.try_get(4)?,
                    serial_by: row.try_get(5)?,
                })
            })
            .collect()
    }
}
