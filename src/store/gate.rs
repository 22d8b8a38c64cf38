//! Gates: what is set for them, who closes and opens them, and what endpoints answered.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::connection::{Store, p};
use crate::error::{Error, Result};

/// The limits of a gate. `None`: no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GateLimits {
    /// Jobs that run at once, 1 to 100,000.
    pub max_running: Option<u32>,
    /// Requests in any rolling minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens in any rolling minute; one request may exceed it.
    pub tokens_per_minute: Option<u64>,
    /// US dollars a day (UTC), as decimal text such as `12.50`.
    pub money_per_day: Option<String>,
    /// US dollars a month (UTC), as decimal text.
    pub money_per_month: Option<String>,
    /// What happens when a budget is spent: `hold` (the default: wait for the next day or month), `fail`, or `model:NAME`, which is
    /// used instead.
    pub when_spent: Option<String>,
    /// The share of a budget at which an alert is raised, as decimal text above 0 and up to 1. Default: at the whole only.
    pub warn_at: Option<String>,
}

/// A gate as the view `posthouse.gates` shows it; one that holds for each tenant, queue or model has a row for each that passed it
/// lately.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct GateRecord {
    /// Its name.
    pub name: String,
    /// The tenant, queue or model that the row is about, where the gate holds for each.
    pub member: Option<String>,
    /// Jobs that may run at once.
    pub max_running: Option<i32>,
    /// Requests that pass in a rolling minute.
    pub requests_per_minute: Option<i32>,
    /// Tokens that pass in a rolling minute.
    pub tokens_per_minute: Option<i64>,
    /// Dollars a day, decimal text.
    pub money_per_day: Option<String>,
    /// Dollars a month, decimal text.
    pub money_per_month: Option<String>,
    /// `hold`, `fail` or `model:NAME`.
    pub when_spent: String,
    /// The share at which an alert is raised, decimal text.
    pub warn_at: Option<String>,
    /// Closed until then, as Postgres writes times in JSON; `infinity`: until somebody opens it. `None`: open.
    pub closed_until: Option<String>,
    /// Who closed it: `person`, `provider`, `quota` or `breaker`.
    pub closed_by: Option<String>,
    /// Why.
    pub closed_reason: Option<String>,
    /// Jobs that run now, where the gate counts them.
    pub running: Option<i64>,
    /// Requests of the last minute.
    pub requests_last_minute: i64,
    /// Tokens of the last minute, reserved ones included.
    pub tokens_last_minute: i64,
    /// Dollars spent today, decimal text.
    pub spent_today: String,
    /// Dollars spent this month, decimal text.
    pub spent_this_month: String,
}

/// What an endpoint answered to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointVerdict {
    /// It takes calls.
    Ok,
    /// Not now: rate limited or overloaded.
    Refused,
    /// The account is empty: closed until somebody opens it.
    Quota,
    /// It failed too often.
    Broken,
}

/// An endpoint that is closed for every worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closure {
    /// PROVIDER/MODEL.
    pub endpoint: String,
    /// For how long yet. Zero: its time is over, and one job may try it.
    pub closed_for: Duration,
    /// Why.
    pub reason: Option<String>,
    /// `person`, `provider`, `quota` or `breaker`.
    pub closed_by: String,
}

/// A tenant whose weight was set.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TenantRecord {
    /// The tenant.
    pub tenant: String,
    /// Its share of claims in comparison with others; 1 is what tenants have that are not set.
    pub weight: f32,
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

fn duration(ms: i64) -> Duration {
    Duration::from_millis(ms.max(0).unsigned_abs())
}

fn number(n: Option<i32>) -> Option<u32> {
    n.and_then(|n| u32::try_from(n).ok())
}

fn whole(n: Option<i64>) -> Option<u64> {
    n.and_then(|n| u64::try_from(n).ok())
}

impl GateRecord {
    /// What is set for it.
    #[must_use]
    pub fn limits(&self) -> GateLimits {
        GateLimits {
            max_running: number(self.max_running),
            requests_per_minute: number(self.requests_per_minute),
            tokens_per_minute: whole(self.tokens_per_minute),
            money_per_day: self.money_per_day.clone(),
            money_per_month: self.money_per_month.clone(),
            when_spent: Some(self.when_spent.clone()),
            warn_at: self.warn_at.clone(),
        }
    }
}

/// A statement that answers with rows of the view as JSON, amounts as the text that they are, and more columns behind.
macro_rules! record {
    ($from:literal) => {
        record!("", $from)
    };
    ($more:literal, $from:literal) => {
        concat!(
            "(select to_jsonb(g) || jsonb_build_object('money_per_day', g.money_per_day::text, 'money_per_month', g.money_per_month::text,
               'warn_at', g.warn_at::text, 'spent_today', g.spent_today::text, 'spent_this_month', g.spent_this_month::text)",
            $more,
            " ",
            $from,
            ")"
        )
    };
}

fn records(rows: &[Row]) -> Result<Vec<GateRecord>> {
    rows.iter().map(|row| Ok(row.try_get::<_, Json<GateRecord>>(0)?.0)).collect()
}

impl Store {
    /// Set all limits of a gate.
    pub async fn set_gate(&self, name: &str, limits: &GateLimits) -> Result<()> {
        let whole = |n: Option<u64>| n.map(|n| i64::try_from(n).unwrap_or(i64::MAX));
        let number = |n: Option<u32>| n.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        let parameters = vec![
            p(name.to_owned(), Type::TEXT),
            p(number(limits.max_running), Type::INT4),
            p(number(limits.requests_per_minute), Type::INT4),
            p(whole(limits.tokens_per_minute), Type::INT8),
            p(limits.money_per_day.clone(), Type::TEXT),
            p(limits.money_per_month.clone(), Type::TEXT),
            p(limits.when_spent.clone().unwrap_or_else(|| "hold".to_owned()), Type::TEXT),
            p(limits.warn_at.clone(), Type::TEXT),
        ];
        self.call("select posthouse.set_gate($1, $2, $3, $4, $5::numeric, $6::numeric, $7, $8::numeric)", parameters)
            .await
            .map_err(|error| match error.sqlstate() {
                Some("22P02" | "22003") => Error::invalid(format!("money_per_day, money_per_month, warn_at: {error}")),
                _ => error,
            })?;
        Ok(())
    }

    /// Remove a gate. False: there was none.
    pub async fn remove_gate(&self, name: &str) -> Result<bool> {
        let row = self.call_one("select posthouse.remove_gate($1)", vec![p(name.to_owned(), Type::TEXT)]).await?;
        Ok(row.try_get(0)?)
    }

    /// Close a gate until a time in any form that Postgres reads; `infinity`: until somebody opens it.
    pub async fn close_gate(&self, name: &str, until: &str, reason: Option<&str>) -> Result<()> {
        let parameters = vec![
            p(name.to_owned(), Type::TEXT),
            p(until.to_owned(), Type::TEXT),
            p(reason.map(str::to_owned), Type::TEXT),
        ];
        self.call("select posthouse.close_gate($1, $2::timestamptz, $3)", parameters).await.map_err(
            |error| match error.sqlstate() {
                Some("22007" | "22008") => Error::invalid(format!("until: {error}")),
                _ => error,
            },
        )?;
        Ok(())
    }

    /// Open a gate, whoever closed it. False: it was open, or there is none.
    pub async fn open_gate(&self, name: &str) -> Result<bool> {
        let row = self.call_one("select posthouse.open_gate($1)", vec![p(name.to_owned(), Type::TEXT)]).await?;
        Ok(row.try_get(0)?)
    }

    /// Every gate, by name, with every member of those that hold for each. For one or few there are cheaper calls.
    pub async fn gates(&self) -> Result<Vec<GateRecord>> {
        records(&self.call(record!("from posthouse.gates g order by g.name, g.member"), vec![]).await?)
    }

    /// A gate by its name. Of one that holds for each, any member: they have the same limits. `None`: there is none.
    pub async fn gate(&self, name: &str) -> Result<Option<GateRecord>> {
        let sql = record!("from posthouse.gates g where g.name = $1 limit 1");
        Ok(records(&self.call(sql, vec![p(name.to_owned(), Type::TEXT)]).await?)?.pop())
    }

    /// The limits of those of these gates that there are.
    pub async fn gate_limits(&self, names: &[String]) -> Result<HashMap<String, GateLimits>> {
        let rows = self
            .call(
                "select distinct on (g.name) g.name, g.max_running, g.requests_per_minute, g.tokens_per_minute, g.money_per_day::text,
                   g.money_per_month::text, g.when_spent, g.warn_at::text
                 from posthouse.gates g where g.name = any($1) order by g.name",
                vec![p(names.to_vec(), Type::TEXT_ARRAY)],
            )
            .await?;
        let limits = |row: &Row| -> Result<_> {
            let limits = GateLimits {
                max_running: number(row.try_get(1)?),
                requests_per_minute: number(row.try_get(2)?),
                tokens_per_minute: whole(row.try_get(3)?),
                money_per_day: row.try_get(4)?,
                money_per_month: row.try_get(5)?,
                when_spent: row.try_get(6)?,
                warn_at: row.try_get(7)?,
            };
            Ok((row.try_get(0)?, limits))
        };
        rows.iter().map(limits).collect()
    }

    /// The gates of single tenants (`tenant:`) or queues (`queue:`): those whose names begin so, without the one for each.
    pub async fn gates_of_each(&self, prefix: &str) -> Result<Vec<GateRecord>> {
        let sql =
            record!("from posthouse.gates g where starts_with(g.name, $1) and g.name <> $1 || '*' order by g.name");
        records(&self.call(sql, vec![p(prefix.to_owned(), Type::TEXT)]).await?)
    }

    /// The gates that are closed, or at their limit (a limit a minute counts from nine tenths on, since at its pace it is never quite
    /// used up), and how many there are in all. At most `most`, the worst first: those that hold everybody before those of one tenant
    /// or member, closed ones before full ones, the fullest first. Gates that let jobs run one at a time are meant to be full.
    pub async fn closed_or_full_gates(&self, most: u32) -> Result<(Vec<GateRecord>, usize)> {
        let rows = self
            .call(
                // Materialised, so that jobs that run are counted once.
                record!(
                    ", g.total",
                    "from (
                       with every as materialized (select * from posthouse.gates)
                       select e.*, count(*) over () as total, e.closed_until is null as is_open, u.used,
                         e.member is not null or starts_with(e.name, 'tenant:') as is_of_one
                       from every e
                       cross join lateral (
                         select greatest(e.running / e.max_running::numeric, e.requests_last_minute / (0.9 * e.requests_per_minute),
                           e.tokens_last_minute / (0.9 * e.tokens_per_minute), e.spent_today / e.money_per_day,
                           e.spent_this_month / e.money_per_month) as used) u
                       where e.closed_until is not null or (u.used >= 1 and not starts_with(e.name, 'serial:'))
                       order by is_of_one, is_open, u.used desc nulls last, e.name, e.member limit $1) g
                     order by g.is_of_one, g.is_open, g.used desc nulls last, g.name, g.member"
                ),
                vec![p(i64::from(most), Type::INT8)],
            )
            .await?;
        let total = rows.first().map(|row| row.try_get::<_, i64>(1)).transpose()?.unwrap_or(0);
        Ok((records(&rows)?, usize::try_from(total).unwrap_or(usize::MAX)))
    }

    /// Say which gates the jobs of a kind pass, and how long its answers can be.
    pub async fn set_kind(&self, kind: &str, gates: &[String], max_output_tokens: Option<u32>) -> Result<()> {
        let most = max_output_tokens.map(|n| i32::try_from(n).unwrap_or(i32::MAX));
        let parameters = vec![p(kind.to_owned(), Type::TEXT), p(gates.to_vec(), Type::TEXT_ARRAY), p(most, Type::INT4)];
        self.call("select posthouse.set_kind($1, $2, $3)", parameters).await?;
        Ok(())
    }

    /// Say where a model is asked, in order of preference, as PROVIDER/MODEL.
    pub async fn set_route(&self, model: &str, endpoints: &[String]) -> Result<()> {
        let parameters = vec![p(model.to_owned(), Type::TEXT), p(endpoints.to_vec(), Type::TEXT_ARRAY)];
        self.call("select posthouse.set_route($1, $2)", parameters).await?;
        Ok(())
    }

    /// Tell every worker what an endpoint answered. Answers for how long it is closed now; `None`: it is open. `age`: since the
    /// request was sent.
    pub async fn report_endpoint(
        &self,
        endpoint: &str,
        verdict: EndpointVerdict,
        wait: Option<Duration>,
        reason: Option<&str>,
        age: Duration,
    ) -> Result<Option<Duration>> {
        let verdict = match verdict {
            EndpointVerdict::Ok => "ok",
            EndpointVerdict::Refused => "refused",
            EndpointVerdict::Quota => "quota",
            EndpointVerdict::Broken => "broken",
        };
        let parameters = vec![
            p(endpoint.to_owned(), Type::TEXT),
            p(verdict.to_owned(), Type::TEXT),
            p(wait.map(millis), Type::INT8),
            p(reason.map(str::to_owned), Type::TEXT),
            p(millis(age), Type::INT8),
        ];
        let row = self.call_one("select posthouse.report_endpoint($1, $2, $3, $4, $5)", parameters).await?;
        Ok(row.try_get::<_, Option<i64>>(0)?.map(duration))
    }

    /// The endpoints that are closed, or whose time is over and that nobody has tried since.
    pub async fn closures(&self) -> Result<Vec<Closure>> {
        let rows = self.call("select name, closed_for_ms, reason, closed_by from posthouse.closures()", vec![]).await?;
        rows.iter()
            .map(|row| {
                Ok(Closure {
                    endpoint: row.try_get(0)?,
                    closed_for: duration(row.try_get(1)?),
                    reason: row.try_get(2)?,
                    closed_by: row.try_get(3)?,
                })
            })
            .collect()
    }

    /// Ask to be the one that tries an endpoint whose time is over. True: go on.
    pub async fn begin_probe(&self, endpoint: &str, job_id: i64) -> Result<bool> {
        let parameters = vec![p(endpoint.to_owned(), Type::TEXT), p(job_id, Type::INT8)];
        let row = self.call_one("select posthouse.begin_probe($1, $2)", parameters).await?;
        Ok(row.try_get::<_, Option<bool>>(0)?.unwrap_or(true))
    }

    /// Let a call of a running attempt through gates. `Some(zero)`: go on; else come back after that time. `None`: the attempt is
    /// no longer the right one.
    pub async fn admit(
        &self,
        worker: Uuid,
        id: i64,
        fence: i64,
        gates: &[String],
        tokens: u64,
    ) -> Result<Option<Duration>> {
        let parameters = vec![
            p(worker, Type::UUID),
            p(id, Type::INT8),
            p(fence, Type::INT8),
            p(gates.to_vec(), Type::TEXT_ARRAY),
            p(i64::try_from(tokens).unwrap_or(i64::MAX), Type::INT8),
        ];
        let row = self.call_one("select posthouse.admit($1, $2, $3, $4, $5)", parameters).await?;
        Ok(row.try_get::<_, Option<i64>>(0)?.map(duration))
    }

    /// Say what an admitted call used in place of what it reserved.
    pub async fn admitted(
        &self,
        id: i64,
        fence: i64,
        gates: &[String],
        reserved: u64,
        used: u64,
        age: Duration,
    ) -> Result<()> {
        let whole = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let parameters = vec![
            p(id, Type::INT8),
            p(fence, Type::INT8),
            p(gates.to_vec(), Type::TEXT_ARRAY),
            p(whole(reserved), Type::INT8),
            p(whole(used), Type::INT8),
            p(millis(age), Type::INT8),
        ];
        self.call("select posthouse.admitted($1, $2, $3, $4, $5, $6)", parameters).await?;
        Ok(())
    }

    /// Set the weight of a tenant, 0.01 to 100; 1 is what tenants have that are not set.
    pub async fn set_tenant(&self, tenant: &str, weight: f32) -> Result<()> {
        let parameters = vec![p(tenant.to_owned(), Type::TEXT), p(weight, Type::FLOAT4)];
        self.call("select posthouse.set_tenant($1, $2)", parameters).await?;
        Ok(())
    }

    /// The tenants whose weight was set.
    pub async fn tenants(&self) -> Result<Vec<TenantRecord>> {
        let rows = self.call("select tenant, weight from posthouse.tenants order by tenant", vec![]).await?;
        rows.iter().map(|row| Ok(TenantRecord { tenant: row.try_get(0)?, weight: row.try_get(1)? })).collect()
    }
}
