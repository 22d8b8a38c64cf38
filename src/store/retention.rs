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
}

impl Store {
    /// Set for how long a queue keeps done and cancelled jobs: `None` for ever, zero not at all. Another time is refused.
    pub async fn set_retention(&self, queue: &str, retention: Option<Duration>) -> Result<()> {
        let retention_ms = retention.map(|time| time.as_secs_f64() * 1e3);
        let sql = "select posthouse.set_queue($1, $2 * interval '1 millisecond')";
        self.call_one(sql, vec![p(queue.to_owned(), Type::TEXT), p(retention_ms, Type::FLOAT8)]).await.map(|_| ())
    }

    /// Every queue that has had jobs or settings, with its settings.
    pub async fn queues(&self) -> Result<Vec<QueueSettings>> {
        let sql = "select queue, (extract(epoch from retention) * 1000)::bigint from posthouse.queues order by queue";
        let rows = self.call(sql, Vec::new()).await?;
        rows.iter().map(|row| Ok(QueueSettings { queue: row.try_get(0)?, retention_ms: row.try_get(1)? })).collect()
    }
}
