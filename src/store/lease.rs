//! Heartbeats, and the end of a worker's life.

use std::time::Duration;

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::connection::{Store, p};
use crate::error::{Error, Result};

/// What a heartbeat tells the database.
#[derive(Debug, Clone, Default)]
pub struct Beat {
    /// The highest claim seq at or below which every claim was answered or given up.
    pub mark: i64,
    /// The lowest claim seq with a job still held; `mark + 1` if none.
    pub oldest: i64,
    /// The held jobs of claims up to the mark, as (id, fence): from the claim's answer until the settle's.
    pub held: Vec<(i64, i64)>,
    /// Send the list, not just number and sums: after an answer that said mismatch.
    pub with_list: bool,
}

/// What a heartbeat hears back.
#[derive(Debug, Clone)]
pub struct Pulse {
    /// The lease's length, from before the heartbeat was sent.
    pub expires_in: Duration,
    /// The held jobs are not what the database has: beat again with the list.
    pub mismatch: bool,
    /// Jobs that somebody asked to cancel.
    pub cancel: Vec<i64>,
    /// Held jobs that are no longer this worker's (only after a beat with the list).
    pub lost: Vec<i64>,
    /// Jobs that went back uncharged, since this worker does not hold them.
    pub released: i32,
}

impl Store {
    /// Renew the lease. `None`: this incarnation is over.
    pub async fn heartbeat(&self, worker: Uuid, beat: &Beat) -> Result<Option<Pulse>> {
        let ids: Vec<i64> = beat.held.iter().map(|h| h.0).collect();
        let fences: Vec<i64> = beat.held.iter().map(|h| h.1).collect();
        let rows = self
            .call(
                "select * from posthouse.heartbeat($1, $2, $3, $4, $5::text::numeric, $6::text::numeric, $7, $8)",
                vec![
                    p(worker, Type::UUID),
                    p(beat.mark, Type::INT8),
                    p(beat.oldest, Type::INT8),
                    p(i64::try_from(ids.len()).unwrap_or(i64::MAX), Type::INT8),
                    p(sum(&ids), Type::TEXT),
                    p(sum(&fences), Type::TEXT),
                    p(beat.with_list.then_some(ids), Type::INT8_ARRAY),
                    p(beat.with_list.then_some(fences), Type::INT8_ARRAY),
                ],
            )
            .await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let expires_in = u64::try_from(row.try_get::<_, i64>(0)?)
            .map_err(|_| Error::schema("heartbeat answered with a negative lease"))?;
        Ok(Some(Pulse {
            expires_in: Duration::from_millis(expires_in),
            mismatch: row.try_get(1)?,
            cancel: row.try_get(2)?,
            lost: row.try_get(3)?,
            released: row.try_get(4)?,
        }))
    }

    /// End a worker's life in good order: what it still holds goes back uncharged.
    pub async fn retire_worker(&self, worker: Uuid) -> Result<()> {
        self.call_one("select posthouse.retire_worker($1)", vec![p(worker, Type::UUID)]).await.map(|_| ())
    }
}

/// A sum of ids can exceed 64 bits, so it travels as text.
fn sum(numbers: &[i64]) -> String {
    numbers.iter().copied().map(i128::from).sum::<i128>().to_string()
}
