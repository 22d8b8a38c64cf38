//! How long Postgres itself takes for the calls of the queue, by `pg_stat_statements`, where the server has it.

use std::collections::BTreeMap;

use tokio_postgres::Client;

use crate::error::Result;
use crate::ground::{Scratch, connect};

/// Calls and their time, by the function that is called; all other statements are under "".
const LOOK: &str = "select coalesce(substring(query from 'posthouse\\.(\\w+)\\('), ''), sum(calls)::float8, \
                    sum(total_exec_time)::float8 from pg_stat_statements \
                    where dbid = (select oid from pg_database where datname = current_database()) group by 1";

/// A connection that looks.
pub(crate) struct Statements(Client);

/// What has been counted in a database so far.
pub(crate) struct Totals(BTreeMap<String, Total>);

#[derive(Default, Clone, Copy)]
struct Total {
    calls: f64,
    ms: f64,
}

impl Statements {
    /// From now on the statements of new connections to this database are counted. `None`: the server cannot.
    pub(crate) async fn count(scratch: &Scratch) -> Result<Option<Self>> {
        let client = connect(&scratch.url).await?;
        if client.batch_execute("create extension if not exists pg_stat_statements").await.is_err() {
            return Ok(None);
        }
        // Off in a private server, so that nothing else pays for it. Where that may not be set, it is on by default.
        let _ = client
            .batch_execute(&format!("alter database {} set pg_stat_statements.track = 'top'", scratch.name))
            .await;
        Ok(client.query(LOOK, &[]).await.is_ok().then_some(Self(client)))
    }

    pub(crate) async fn look(&self) -> Result<Totals> {
        let rows = self.0.query(LOOK, &[]).await?;
        Ok(Totals(rows.iter().map(|row| (row.get(0), Total { calls: row.get(1), ms: row.get(2) })).collect()))
    }
}

impl Totals {
    /// The mean time of a function's calls since `before`, in ms. `None`: there was none.
    pub(crate) fn mean_ms(&self, before: &Self, function: &str) -> Option<f64> {
        let (now, then) = (self.of(function), before.of(function));
        let calls = now.calls - then.calls;
        (calls > 0.0).then(|| (now.ms - then.ms) / calls)
    }

    /// The time of all statements since `before`, in ms.
    pub(crate) fn ms(&self, before: &Self) -> f64 {
        let sum = |totals: &Self| totals.0.values().map(|total| total.ms).sum::<f64>();
        sum(self) - sum(before)
    }

    fn of(&self, function: &str) -> Total {
        self.0.get(function).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::{Total, Totals};

    #[test]
    fn a_mean_is_of_the_calls_between_two_looks() {
        let totals = |calls, ms, other| {
            Totals([("claim".to_owned(), Total { calls, ms }), (String::new(), Total { calls: 1.0, ms: other })].into())
        };
        let (before, now) = (totals(10.0, 50.0, 1.0), totals(14.0, 58.0, 4.0));
        assert_eq!(now.mean_ms(&before, "claim"), Some(2.0));
        assert_eq!(now.mean_ms(&now, "claim"), None);
        assert_eq!(now.mean_ms(&before, "settle"), None);
        assert_eq!(now.ms(&before), 11.0);
    }
}
