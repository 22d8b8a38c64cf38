//! How many jobs may wait in a queue, or of a tenant, before new ones are refused.

use serde::{Deserialize, Serialize};
use tokio_postgres::types::Type;

use super::connection::{Store, p};
use crate::error::Result;

/// What a limit of waiting jobs is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DepthOf<'a> {
    /// The jobs of a queue.
    Queue(&'a str),
    /// The jobs of a tenant, over all queues.
    Tenant(&'a str),
}

/// A limit of waiting jobs, as the view `posthouse.depths` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DepthLimit {
    /// `queue` or `tenant`.
    pub scope: String,
    /// Its name.
    pub name: String,
    /// So many may wait.
    pub max_depth: i32,
}

impl Store {
    /// Set how many jobs may wait in a queue or of a tenant, 1 to 100 million; `None`, as it comes: any number. New ones are refused
    /// beyond it ([`Error::is_full`](crate::Error::is_full)); retries, rescued and redriven jobs are not.
    pub async fn set_depth(&self, of: DepthOf<'_>, max_depth: Option<u32>) -> Result<()> {
        let (queue, tenant) = match of {
            DepthOf::Queue(name) => (Some(name.to_owned()), None),
            DepthOf::Tenant(name) => (None, Some(name.to_owned())),
        };
        let max_depth = max_depth.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        let parameters = vec![p(queue, Type::TEXT), p(tenant, Type::TEXT), p(max_depth, Type::INT4)];
        self.call_one("select posthouse.set_depth($1, $2, $3)", parameters).await.map(|_| ())
    }

    /// The limits that are set.
    pub async fn depths(&self) -> Result<Vec<DepthLimit>> {
        let rows =
            self.call("select scope, name, max_depth from posthouse.depths order by scope, name", Vec::new()).await?;
        rows.iter()
            .map(|row| Ok(DepthLimit { scope: row.try_get(0)?, name: row.try_get(1)?, max_depth: row.try_get(2)? }))
            .collect()
    }
}
