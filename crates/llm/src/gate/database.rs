//! Gates of endpoints in the database: what one worker is told, all workers of the fleet heed.

use super::keeper::{Closure, EndpointGates, Finding, Report, Told};
use posthouse::store::{Database, EndpointVerdict, Store};
use std::fmt;
use std::time::Duration;

/// Gates that everybody with this database knows of. An empty account stays closed until somebody opens its gate.
pub struct DatabaseGates {
    store: Store,
}

impl DatabaseGates {
    /// The gates in a database, over a connection of their own, which is made when it is needed.
    #[must_use]
    pub fn new(database: &Database) -> Self {
        Self { store: database.store("gates") }
    }
}

/// An address may hold a password, so nothing is shown.
impl fmt::Debug for DatabaseGates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseGates").finish_non_exhaustive()
    }
}

impl EndpointGates for DatabaseGates {
    fn closures(&self) -> Told<'_, Vec<Closure>> {
        Box::pin(async {
            let closed = self.store.closures().await?;
            let closure = |closed: posthouse::store::Closure| Closure {
                endpoint: closed.endpoint,
                closed_for: closed.closed_for,
                reason: closed.reason.unwrap_or_else(|| "no reason given".to_owned()),
                closed_by: closed.closed_by,
            };
            Ok(closed.into_iter().map(closure).collect())
        })
    }

    fn report<'a>(&'a self, report: Report<'a>) -> Told<'a, Option<Duration>> {
        let (verdict, wait) = match report.finding {
            Finding::Ok => (EndpointVerdict::Ok, None),
            Finding::Refused => (EndpointVerdict::Refused, report.wait),
            // How long these last is for the database to say, which knows what others found.
            Finding::Quota => (EndpointVerdict::Quota, None),
            Finding::Broken => (EndpointVerdict::Broken, None),
        };
        let reason = Some(report.reason).filter(|reason| !reason.is_empty());
        Box::pin(
            async move { Ok(self.store.report_endpoint(report.endpoint, verdict, wait, reason, report.age).await?) },
        )
    }

    fn begin_probe<'a>(&'a self, endpoint: &'a str, job: i64) -> Told<'a, bool> {
        Box::pin(async move { Ok(self.store.begin_probe(endpoint, job).await?) })
    }
}
