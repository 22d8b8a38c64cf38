//! What was used: attempts, requests, tokens and money, from the view `posthouse.usage_by_day`.

use serde::{Deserialize, Serialize};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::connection::{Store, p};
use crate::error::{Error, Result};

/// What rows of usage are told apart by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageBy {
    /// The day, in UTC, on which the attempt was settled.
    Day,
    /// Whose job it was.
    Tenant,
    /// The job's queue.
    Queue,
    /// What ran it.
    Kind,
    /// The model, as the attempt named it.
    Model,
}

impl UsageBy {
    /// Its name in SQL and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Tenant => "tenant",
            Self::Queue => "queue",
            Self::Kind => "kind",
            Self::Model => "model",
        }
    }
}

/// Which usage, and how it is added up: all conditions that are given must hold.
#[derive(Debug, Clone, Default)]
pub struct UsageFilter {
    /// A row for each of these. Empty: all in one row.
    pub by: Vec<UsageBy>,
    /// Of this tenant.
    pub tenant: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this model.
    pub model: Option<String>,
    /// From this day on, such as `2026-01-31`, in UTC.
    pub since: Option<String>,
    /// Up to this day, which is included.
    pub until: Option<String>,
}

/// Usage added up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    /// The day, as `2026-01-31`. This and the other names are `None` where rows are not told apart by them.
    pub day: Option<String>,
    /// The tenant.
    pub tenant: Option<String>,
    /// The queue.
    pub queue: Option<String>,
    /// The kind.
    pub kind: Option<String>,
    /// The model. `None` also for attempts that named none.
    pub model: Option<String>,
    /// Attempts that asked somebody and told what they used, whatever became of them.
    pub attempts: i64,
    /// Requests that they made.
    pub requests: i64,
    /// Tokens of prompts, as far as they were told; cached ones included.
    pub input_tokens: i64,
    /// Tokens of answers, as far as they were told.
    pub output_tokens: i64,
    /// The part of `input_tokens` that came from a provider's cache.
    pub cached_tokens: i64,
    /// What the attempts with a known cost have cost, in US dollars, exact decimal text. `None`: no cost is known.
    pub cost_usd: Option<String>,
    /// Attempts whose cost is not known, and which `cost_usd` leaves out. Those that a provider refused cost nothing and are
    /// not among them.
    pub unpriced: i64,
}

/// Usage in rows, and all of it together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    /// By day, oldest first, where days are told apart; the dearest first.
    pub rows: Vec<UsageRow>,
    /// All rows together.
    pub total: UsageRow,
}

const REPORT: &str = "with picked as ( \
    select case when 'day' = any($1::text[]) then u.day::text end as day, case when 'tenant' = any($1) then u.tenant end as tenant, \
      case when 'queue' = any($1) then u.queue end as queue, case when 'kind' = any($1) then u.kind end as kind, \
      case when 'model' = any($1) then u.model end as model, sum(u.attempts) as attempts, sum(u.requests) as requests, \
      sum(u.input_tokens) as input, sum(u.output_tokens) as output, sum(u.cached_tokens) as cached, sum(u.cost_usd) as cost, \
      sum(u.unpriced) as unpriced \
    from posthouse.usage_by_day u \
    where ($2::text is null or u.tenant = $2) and ($3::text is null or u.queue = $3) and ($4::text is null or u.kind = $4) \
      and ($5::text is null or u.model = $5) and ($6::text is null or u.day >= $6::date) and ($7::text is null or u.day <= $7::date) \
    group by 1, 2, 3, 4, 5), \
    told as ( \
      select false as total, p.* from picked p union all \
      select true, null, null, null, null, null, coalesce(sum(p.attempts), 0), coalesce(sum(p.requests), 0), coalesce(sum(p.input), 0), \
        coalesce(sum(p.output), 0), coalesce(sum(p.cached), 0), sum(p.cost), coalesce(sum(p.unpriced), 0) from picked p) \
    select t.day, t.tenant, t.queue, t.kind, t.model, least(t.attempts, 9e18)::bigint, least(t.requests, 9e18)::bigint, \
      least(t.input, 9e18)::bigint, least(t.output, 9e18)::bigint, least(t.cached, 9e18)::bigint, trim_scale(t.cost)::text, \
      least(t.unpriced, 9e18)::bigint \
    from told t order by t.total, t.day, t.cost desc nulls last, t.input + t.output desc, t.tenant, t.queue, t.kind, t.model";

fn usage(row: &Row) -> Result<UsageRow> {
    Ok(UsageRow {
        day: row.try_get(0)?,
        tenant: row.try_get(1)?,
        queue: row.try_get(2)?,
        kind: row.try_get(3)?,
        model: row.try_get(4)?,
        attempts: row.try_get(5)?,
        requests: row.try_get(6)?,
        input_tokens: row.try_get(7)?,
        output_tokens: row.try_get(8)?,
        cached_tokens: row.try_get(9)?,
        cost_usd: row.try_get(10)?,
        unpriced: row.try_get(11)?,
    })
}

impl Store {
    /// What was used, added up.
    ///
    /// # Errors
    /// When a day is none (SQLSTATE 22007 or 22008), or the database cannot answer.
    pub async fn usage(&self, filter: &UsageFilter) -> Result<UsageReport> {
        let by: Vec<&'static str> = filter.by.iter().map(|by| by.as_str()).collect();
        let texts = [&filter.tenant, &filter.queue, &filter.kind, &filter.model, &filter.since, &filter.until];
        let mut parameters = vec![p(by, Type::TEXT_ARRAY)];
        parameters.extend(texts.map(|text| p(text.clone(), Type::TEXT)));
        let rows = self.call(REPORT, parameters).await?;
        let mut rows = rows.iter().map(usage).collect::<Result<Vec<_>>>()?;
        let total = rows.pop().ok_or_else(|| Error::schema("the usage has no total"))?;
        Ok(UsageReport { rows, total })
    }
}
