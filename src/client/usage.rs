//! What was used, for whom, and what it cost.

use super::Posthouse;
use crate::error::Result;
use crate::store::{UsageFilter, UsageReport};

impl Posthouse {
    /// What attempts used, added up: attempts, requests, tokens and money, of every attempt that told, whatever became of it.
    ///
    /// ```no_run
    /// # async fn f(queue: posthouse::Posthouse) -> posthouse::Result<()> {
    /// use posthouse::store::{UsageBy, UsageFilter};
    /// let filter = UsageFilter { by: vec![UsageBy::Model], tenant: Some("acme".into()), ..UsageFilter::default() };
    /// for row in queue.usage(&filter).await?.rows {
    ///     println!("{:?}: {:?} dollars", row.model, row.cost_usd);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn usage(&self, filter: &UsageFilter) -> Result<UsageReport> {
        self.store.usage(filter).await
    }
}
