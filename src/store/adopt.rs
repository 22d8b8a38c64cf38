//! Whether a database is a copy of another, and the word that its jobs shall run here all the same.

use serde::{Deserialize, Serialize};

use super::connection::Store;
use crate::error::Result;

/// Where a database comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// It is a copy of another, as far as can be told, and nobody has adopted it: no worker registers.
    pub is_copy: bool,
    /// Why it is taken for one.
    pub reason: Option<String>,
    /// A worker has been here, or somebody adopted it. `false`: the first worker that comes takes it as it is.
    pub is_stamped: bool,
}

impl Store {
    /// Where the database comes from.
    pub async fn origin(&self) -> Result<Origin> {
        let sql = "select is_copy, reason, stamped is not null from posthouse.origin()";
        let row = self.call_one(sql, Vec::new()).await?;
        Ok(Origin { is_copy: row.try_get(0)?, reason: row.try_get(1)?, is_stamped: row.try_get(2)? })
    }

    /// Say that the jobs of this database shall run here, though it is a copy. `false`: it was none.
    pub async fn adopt(&self) -> Result<bool> {
        Ok(self.call_one("select posthouse.adopt()", Vec::new()).await?.try_get(0)?)
    }

    /// Say that this database is a copy: no worker registers until [`adopt`](Self::adopt). For copies of files, which cannot be told from
    /// a failover.
    pub async fn disown(&self) -> Result<()> {
        self.call_one("select posthouse.disown()", Vec::new()).await.map(|_| ())
    }
}
