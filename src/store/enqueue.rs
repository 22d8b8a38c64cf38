//! Enqueue jobs: one, or many at once, on a connection of ours or in a transaction of the caller's.

use std::borrow::Borrow;

use bytes::BytesMut;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio_postgres::types::{Format, IsNull, Json, ToSql, Type, to_sql_checked};
use tokio_postgres::{GenericClient, Row};

use super::connection::{Parameter, Store, p};
use crate::error::{Error, Result};
use crate::job::{DedupeFor, DedupePolicy, Deduped, Enqueued, NewJob};

// Statements are short, have every parameter, and are of the types that the functions take: what there is to parse and plan counts at
// each call, also defaults that are filled in.

/// One job or many that differ by their payloads only; answers with their ids. No table of answers, so half as much to plan.
const PLAIN: &str = "select posthouse.enqueue_plain($1, $2, $3, $4, $5)";

/// One job, whatever it asks for.
const ONE: &str = "select id, state, duplicate, deduped from \
    posthouse.enqueue($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)";

/// The same, refused (55P03) where another transaction holds the key for longer than a moment: whoever asks does not keep the
/// connection from those that have other keys. The setting ends with the statement's transaction.
const ONE_SOON: &str = "select e.id, e.state, e.duplicate, e.deduped from \
    (select set_config('lock_timeout', '20ms', true) offset 0) s(at_most) cross join lateral \
    posthouse.enqueue(case when s.at_most is not null then $1 end, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16) e";

/// Any jobs. The function answers in their order.
const MANY: &str = "select id, state, duplicate from posthouse.enqueue_many($1)";

const MANY_SOON: &str = "select e.id, e.state, e.duplicate, e.deduped from \
    (select set_config('lock_timeout', '20ms', true) offset 0) s(at_most) cross join lateral \
    posthouse.enqueue_many(case when s.at_most is not null then $1::jsonb end) e";

const MANY_KEYED: &str = "select id, state, duplicate, deduped from posthouse.enqueue_many($1)";

/// The most jobs that `posthouse.enqueue_many` takes in one call.
pub(crate) const MANY_MAX: usize = 10_000;

/// Where a job stands in line: kind, queue, tenant, priority.
type Names<'a> = (&'a str, &'a str, &'a str, i32);

impl NewJob {
    fn dedupe_for_ms(&self) -> Option<f64> {
        match self.dedupe.as_ref()?.stands {
            DedupeFor::UntilFinal => None,
            DedupeFor::Window(window) => Some(window.as_secs_f64() * 1000.0),
        }
    }

    /// Where it stands in line; `None` if it asks for more than that.
    fn plain(&self) -> Option<Names<'_>> {
        let Self {
            kind,
            payload: _,
            queue,
            tenant,
            priority,
            delay,
            run_at,
            max_attempts,
            timeout,
            dedupe,
            gates,
            tokens,
            trace,
        } = self;
        let more = (delay.is_some() || run_at.is_some() || max_attempts.is_some() || timeout.is_some())
            || (dedupe.is_some() || !gates.is_empty() || tokens.is_some() || trace.is_some());
        (!more).then(|| (kind.as_str(), or_default(queue), or_default(tenant), priority.unwrap_or(0)))
    }

    /// The shortest statement that enqueues it, and its parameters.
    fn statement(&self) -> (&'static str, Vec<Parameter>) {
        match plain(&[self]) {
            Some(parameters) => (PLAIN, parameters),
            None => (ONE, self.parameters()),
        }
    }

    fn parameters(&self) -> Vec<Parameter> {
        let interval = |ms: f64| Spelled(format!("{} milliseconds", ms.min(LONGEST_MS)));
        vec![
            p(self.kind.clone(), Type::TEXT),
            p(Json(self.payload.clone()), Type::JSONB),
            p(or_default(&self.queue).to_owned(), Type::TEXT),
            p(or_default(&self.tenant).to_owned(), Type::TEXT),
            p(self.priority.unwrap_or(0), Type::INT4),
            p(self.delay.map(|d| interval(d.as_secs_f64() * 1000.0)), Type::INTERVAL),
            p(self.run_at.clone().map(Spelled), Type::TIMESTAMPTZ),
            p(self.max_attempts.map(|n| i32::try_from(n).unwrap_or(i32::MAX)), Type::INT4),
            p(self.timeout.map(|d| interval(d.as_secs_f64() * 1000.0)), Type::INTERVAL),
            p(self.dedupe.as_ref().and_then(|d| d.key.clone()), Type::TEXT),
            p(self.dedupe_for_ms().map(interval), Type::INTERVAL),
            p(self.trace.clone().map(Json), Type::JSONB),
            p(self.gates.clone(), Type::TEXT_ARRAY),
            p(self.tokens.map(|n| i32::try_from(n).unwrap_or(i32::MAX)), Type::INT4),
            p(self.dedupe.as_ref().and_then(|d| d.policy).map(DedupePolicy::as_str), Type::TEXT),
            p(self.dedupe.as_ref().and_then(|d| d.by_payload.then_some(true)), Type::BOOL),
        ]
    }
}

fn or_default(name: &Option<String>) -> &str {
    name.as_deref().unwrap_or("default")
}

/// Longer than any duration that `posthouse.enqueue` takes, and short enough for an interval.
const LONGEST_MS: f64 = 1e15;

/// A value as Postgres reads it in text: a time or an interval, for which the driver has no type.
#[derive(Debug)]
struct Spelled(String);

impl ToSql for Spelled {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> std::result::Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TIMESTAMPTZ | Type::INTERVAL)
    }

    fn encode_format(&self, _: &Type) -> Format {
        Format::Text
    }

    to_sql_checked!();
}

/// A job as `posthouse.enqueue_many` reads it.
#[derive(Serialize)]
pub(super) struct Wire<'a> {
    kind: &'a str,
    payload: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_at: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_attempts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dedupe_key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dedupe_for_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dedupe_policy: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dedupe_by_payload: Option<bool>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    gates: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<&'a RawValue>,
}

impl<'a> Wire<'a> {
    pub(super) fn new(job: &'a NewJob) -> Self {
        Self {
            kind: &job.kind,
            payload: &job.payload,
            queue: job.queue.as_deref(),
            tenant: job.tenant.as_deref(),
            priority: job.priority,
            run_at: job.run_at.as_deref(),
            delay_ms: job.delay.map(|d| d.as_secs_f64() * 1000.0),
            max_attempts: job.max_attempts,
            timeout_ms: job.timeout.map(|d| d.as_secs_f64() * 1000.0),
            dedupe_key: job.dedupe.as_ref().and_then(|d| d.key.as_deref()),
            dedupe_for_ms: job.dedupe_for_ms(),
            dedupe_policy: job.dedupe.as_ref().and_then(|d| d.policy).map(DedupePolicy::as_str),
            dedupe_by_payload: job.dedupe.as_ref().and_then(|d| d.by_payload.then_some(true)),
            gates: &job.gates,
            tokens: job.tokens,
            trace: job.trace.as_deref(),
        }
    }
}

/// The parameters of [`PLAIN`] for jobs that differ by their payloads only; `None` for others.
fn plain(jobs: &[impl Borrow<NewJob>]) -> Option<Vec<Parameter>> {
    let names = jobs.first()?.borrow().plain()?;
    let alike = jobs.iter().skip(1).all(|job| job.borrow().plain() == Some(names));
    let (kind, queue, tenant, priority) = names;
    alike.then(|| {
        let payloads: Vec<_> = jobs.iter().map(|job| Json(job.borrow().payload.clone())).collect();
        vec![
            p(kind.to_owned(), Type::TEXT),
            p(queue.to_owned(), Type::TEXT),
            p(tenant.to_owned(), Type::TEXT),
            p(priority, Type::INT4),
            p(payloads, Type::JSONB_ARRAY),
        ]
    })
}

/// What became of the jobs: a row each or, of plain ones, one row with their ids.
fn answers(rows: &[Row]) -> Result<Vec<Enqueued>> {
    match rows {
        [row] if row.len() == 1 => {
            let ids: Vec<i64> = row.try_get(0)?;
            let queued = |id| Enqueued { id, state: "queued".to_owned(), duplicate: false, deduped: None };
            Ok(ids.into_iter().map(queued).collect())
        }
        rows => rows.iter().map(enqueued).collect(),
    }
}

fn enqueued(row: &Row) -> Result<Enqueued> {
    let deduped = if row.len() > 3 { row.try_get::<_, Option<&str>>(3)?.and_then(Deduped::parse) } else { None };
    Ok(Enqueued { id: row.try_get(0)?, state: row.try_get(1)?, duplicate: row.try_get(2)?, deduped })
}

fn the_one(rows: &[Row]) -> Result<Enqueued> {
    answers(rows)?.pop().ok_or_else(|| Error::schema("posthouse.enqueue answered nothing"))
}

fn wire(jobs: &[impl Borrow<NewJob>]) -> Result<Vec<Parameter>> {
    let wire: Vec<Wire<'_>> = jobs.iter().map(|job| Wire::new(job.borrow())).collect();
    Ok(vec![p(Json(serde_json::value::to_raw_value(&wire)?), Type::JSONB)])
}

/// A call that enqueues many jobs in one commit. To put it together takes time in which Postgres can work on the one before.
pub(crate) struct EnqueueCall {
    statement: &'static str,
    parameters: Vec<Parameter>,
}

impl EnqueueCall {
    pub(crate) fn new(jobs: &[impl Borrow<NewJob>]) -> Result<Self> {
        // Of one alone, errors would not say that it was the first of several.
        let (statement, parameters) = match plain(jobs).filter(|_| jobs.len() > 1) {
            Some(parameters) => (PLAIN, parameters),
            None if jobs.iter().any(|job| job.borrow().dedupe.is_some()) => (MANY_KEYED, wire(jobs)?),
            None => (MANY, wire(jobs)?),
        };
        Ok(Self { statement, parameters })
    }
}

/// What Postgres says of a payload that `jsonb` cannot hold, in words that name the field.
fn name_the_payload(error: Error) -> Error {
    match error.sqlstate() {
        Some("22P05") => {
            Error::invalid(format!("payload: contains a character that Postgres cannot store (\\u0000): {error}"))
        }
        Some("22007" | "22008") => Error::invalid(format!("run_at: {error}")),
        Some("22P02" | "22003" | "54000" | "54001") => Error::invalid(format!("payload: {error}")),
        _ => error,
    }
}

impl Store {
    /// Enqueue one job.
    pub async fn enqueue(&self, job: &NewJob) -> Result<Enqueued> {
        let (statement, parameters) = job.statement();
        the_one(&self.call(statement, parameters).await.map_err(name_the_payload)?)
    }

    /// Enqueue up to 10,000 jobs in one commit: all of them or, if one is refused, none. Answers in the order of the jobs.
    pub async fn enqueue_many(&self, jobs: &[impl Borrow<NewJob>]) -> Result<Vec<Enqueued>> {
        self.enqueue_call(EnqueueCall::new(jobs)?).await
    }

    pub(crate) async fn enqueue_call(&self, call: EnqueueCall) -> Result<Vec<Enqueued>> {
        answers(&self.call(call.statement, call.parameters).await.map_err(name_the_payload)?)
    }

    /// Enqueue jobs with dedupe keys, at once or not at all: an error with SQLSTATE 55P03 says that another transaction holds one of the
    /// keys.
    pub(crate) async fn enqueue_soon(&self, jobs: &[impl Borrow<NewJob>]) -> Result<Vec<Enqueued>> {
        let answer = match jobs {
            [job] => self.call(ONE_SOON, job.borrow().parameters()).await,
            jobs => self.call(MANY_SOON, wire(jobs)?).await,
        };
        answers(&answer.map_err(name_the_payload)?)
    }
}

/// Enqueue one job in a transaction of the caller's: it exists when, and only if, that commits.
pub(crate) async fn enqueue_in<C: GenericClient>(client: &C, job: &NewJob) -> Result<Enqueued> {
    let (statement, parameters) = job.statement();
    let typed: Vec<(&(dyn ToSql + Sync), Type)> =
        parameters.iter().map(|(p, t)| (p.as_ref() as &(dyn ToSql + Sync), t.clone())).collect();
    the_one(&client.query_typed(statement, &typed).await.map_err(|e| name_the_payload(e.into()))?)
}
