//! How long Postgres itself takes for the calls of the queue, and how many buffers it visits for them, by
//! `pg_stat_statements`, where the server has it.

use std::collections::BTreeMap;

use tokio_postgres::{Client, Row};

use crate::error::Result;
use crate::ground::{Scratch, connect};

/// Calls with their time and buffers, by the function that is called, its short way counted with it; all other statements are under "".
const LOOK: &str = "select coalesce(substring(query from 'posthouse\\.(\\w+?)(_plain)?\\('), ''), sum(calls)::float8, \
                    sum(total_exec_time)::float8, sum(shared_blks_hit + shared_blks_read)::float8 from pg_stat_statements \
                    where dbid = (select oid from pg_database where datname = current_database()) group by 1";

/// A connection that looks.
pub(crate) struct Statements(Client);

/// What has been counted in a database so far.
pub(crate) struct Totals(BTreeMap<String, Total>);

/// Calls, and what they cost together.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Total {
    calls: f64,
    ms: f64,
    buffers: f64,
}

/// What something costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Cost {
    pub(crate) ms: f64,
    /// Pages looked at, each as often as it was.
    pub(crate) buffers: f64,
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
        let total = |row: &Row| Total { calls: row.get(1), ms: row.get(2), buffers: row.get(3) };
        Ok(Totals(rows.iter().map(|row| (row.get(0), total(row))).collect()))
    }
}

impl Totals {
    /// What a function's calls since `before` cost on average. `None`: there was none.
    pub(crate) fn mean(&self, before: &Self, function: &str) -> Option<Cost> {
        let (now, then) = (self.of(function), before.of(function));
        let calls = now.calls - then.calls;
        (calls > 0.0).then(|| Cost { ms: (now.ms - then.ms) / calls, buffers: (now.buffers - then.buffers) / calls })
    }

    /// What all statements since `before` cost, shared among so many.
    pub(crate) fn all(&self, before: &Self, shares: f64) -> Cost {
        let sum = |part: fn(&Total) -> f64| {
            (self.0.values().map(part).sum::<f64>() - before.0.values().map(part).sum::<f64>()) / shares
        };
        Cost { ms: sum(|total| total.ms), buffers: sum(|total| total.buffers) }
    }

    fn of(&self, function: &str) -> Total {
        self.0.get(function).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::{Cost, Total, Totals};

    #[test]
    fn a_mean_is_of_the_calls_between_two_looks() {
        let totals = |calls, ms, buffers, other| {
            let other = Total { calls: 1.0, ms: other, buffers: 5.0 };
            Totals([("claim".to_owned(), Total { calls, ms, buffers }), (String::new(), other)].into())
        };
        let (before, now) = (totals(10.0, 50.0, 300.0, 1.0), totals(14.0, 58.0, 340.0, 4.0));
        assert_eq!(now.mean(&before, "claim"), Some(Cost { ms: 2.0, buffers: 10.0 }));
        assert_eq!(now.mean(&now, "claim"), None);
        assert_eq!(now.mean(&before, "settle"), None);
        assert_eq!(now.all(&before, 2.0), Cost { ms: 5.5, buffers: 20.0 });
    }
}
