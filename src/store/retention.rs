//! What is set for queues, and set it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_postgres::types::Type;

use super::connection::{Store, p};
use crate::error::Result;

/// What is set for a queue, as the view `posthouse.queues` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueSettings {
    /// The queue.
    pub queue: String,
    /// For how long its done and cancelled jobs are kept, in milliseconds. `None`: for ever. 0: no history.
    pub retention_ms: Option<i64>,
    /// By what it is fair between its tenants: `jobs`, as it comes, or `tokens`.
    pub fair_by: String,
    /// The field of the payload that jobs share which run one at a time, in order. `None`: jobs run as they come.
    pub serial_by: Option<String>,
}

impl Store {
    /// Set for how long a queue keeps done and cancelled jobs: `None` for ever, zero not at all. Another time is refused.
    pub async fn set_retention(&self, queue: &str, retention: Option<Duration>) -> Result<()> {
        let retention_ms = retention.map(|time| time.as_secs_f64() * 1e3);
        let sql = "select posthouse.set_queue($1, $2 * interval '1 millisecond')";
        self.call_one(sql, vec![p(queue.to_owned(), Type::TEXT), p(retention_ms, Type::FLOAT8)]).await.map(|_| ())
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
        let sql = "select queue, (extract(epoch from retention) * 1000)::bigint, fair_by, serial_by from posthouse.queues order by queue";
        let rows = self.call(sql, Vec::new()).await?;
        rows.iter()
            .map(|row| {
                Ok(QueueSettings {
                    queue: row.try_get(0)?,
                    retention_ms: row.try_get(1)?,
                    fair_by: row.try_get(2)?,
                    serial_by: row.try_get(3)?,
                })
            })
            .collect()
    }
}
