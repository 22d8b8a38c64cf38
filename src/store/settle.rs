//! Settle: record what attempts decided.

use std::borrow::Borrow;
use std::time::Duration;

use serde::Serialize;
use serde_json::value::RawValue;
use tokio_postgres::types::{Json, Type};
use uuid::Uuid;

use super::connection::{Parameter, Store, p};
use crate::error::{Error, Result};
use crate::outcome::{JobError, Outcome};

/// One outcome to record.
#[derive(Debug, Clone)]
pub struct Settlement {
    /// The job.
    pub id: i64,
    /// The fence of the attempt.
    pub fence: i64,
    /// What the attempt decided; `None` gives the job back unfinished and uncharged, to the front of its line.
    pub outcome: Option<Outcome>,
    /// What the attempt used up (tokens, money, time), JSON.
    pub usage: Option<Box<RawValue>>,
    /// A snooze after this long since the job first started makes it a dead letter. `None`: 24 hours.
    pub max_deferral: Option<Duration>,
}

impl Settlement {
    /// Record an outcome.
    pub fn new(id: i64, fence: i64, outcome: Outcome) -> Self {
        Self { id, fence, outcome: Some(outcome), usage: None, max_deferral: None }
    }

    /// Give the job back unfinished.
    pub fn release(id: i64, fence: i64) -> Self {
        Self { id, fence, outcome: None, usage: None, max_deferral: None }
    }

    /// Give the job back before its handler was started: what it reserved behind gates is given back too.
    pub fn release_unstarted(id: i64, fence: i64) -> Self {
        let usage = RawValue::from_string(r#"{"requests":0}"#.to_owned()).ok();
        Self { usage, ..Self::release(id, fence) }
    }
}

/// What became of one outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    /// The job.
    pub id: i64,
    /// The fence of the attempt.
    pub fence: i64,
    /// Whether it was written.
    pub verdict: Verdict,
    /// The state of the job now. `None`: there is no such job.
    pub state: Option<String>,
}

/// Whether an outcome was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It was written now.
    Applied,
    /// It had been written before; that answer got lost.
    Already,
    /// The attempt is no longer the right one: write nothing else for it.
    Lost,
    /// It does not say whose outcome it is.
    Invalid,
}

#[derive(Serialize, Default)]
struct Wire<'a> {
    id: i64,
    fence: i64,
    outcome: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<WireError<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gate: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_deferral_ms: Option<u64>,
}

#[derive(Serialize)]
struct WireError<'a> {
    class: &'a str,
    message: String,
    detail: &'a serde_json::Value,
}

/// Longer error texts are cut here already, so that they do not travel; the database cuts at 16 KiB.
const ERROR_BYTES: usize = 64 * 1024;

impl<'a> Wire<'a> {
    fn new(s: &'a Settlement) -> Self {
        let mut wire =
            Self { id: s.id, fence: s.fence, outcome: "release", usage: s.usage.as_deref(), ..Self::default() };
        wire.max_deferral_ms = s.max_deferral.map(millis);
        match &s.outcome {
            None => {}
            Some(Outcome::Done(result)) => {
                wire.outcome = "done";
                wire.result = Some(result);
            }
            Some(Outcome::Retry { error, delay }) => {
                wire.outcome = "retry";
                wire.error = Some(wire_error(error));
                wire.delay_ms = delay.map(millis);
            }
            Some(Outcome::Snooze { delay, reason, gate }) => {
                wire.outcome = "snooze";
                wire.delay_ms = Some(millis(*delay));
                wire.reason = Some(reason);
                wire.gate = gate.as_deref();
            }
            Some(Outcome::Fail(error)) => {
                wire.outcome = "fail";
                wire.error = Some(wire_error(error));
            }
            Some(Outcome::Cancelled) => wire.outcome = "cancelled",
        }
        wire
    }
}

fn wire_error(error: &JobError) -> WireError<'_> {
    let message = &error.message;
    let message = if message.len() <= ERROR_BYTES {
        message.clone()
    } else {
        let cut = message.floor_char_boundary(ERROR_BYTES);
        format!("{} … [cut: {} bytes in all]", &message[..cut], message.len())
    };
    WireError { class: &error.class, message, detail: &error.detail }
}

fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

/// JSON as `posthouse.settle_plain` takes it: null is none, and none at all is no array.
#[derive(Default)]
struct Values(Vec<Option<Json<Box<RawValue>>>>);

impl Values {
    fn push(&mut self, value: Option<&RawValue>) {
        self.0.push(value.filter(|value| value.get() != "null").map(|value| Json(value.to_owned())));
    }

    fn parameter(self) -> Parameter {
        p(self.0.iter().any(Option::is_some).then_some(self.0), Type::JSONB_ARRAY)
    }
}

/// The parameters of `posthouse.settle_plain` for jobs that are all done, each named once; `None` for others.
fn plain(worker: Uuid, outcomes: &[Settlement]) -> Option<Vec<Parameter>> {
    let mut sorted: Vec<&Settlement> = outcomes.iter().collect();
    sorted.sort_unstable_by_key(|settlement| settlement.id);
    if sorted.is_empty() || sorted.windows(2).any(|pair| pair[0].id == pair[1].id) {
        return None;
    }
    let (mut ids, mut fences) = (Vec::with_capacity(sorted.len()), Vec::with_capacity(sorted.len()));
    let (mut results, mut usages) = (Values::default(), Values::default());
    for Settlement { id, fence, outcome, usage, max_deferral: _ } in sorted {
        let Some(Outcome::Done(result)) = outcome else { return None };
        ids.push(*id);
        fences.push(i32::try_from(*fence).ok()?);
        results.push(Some(result));
        usages.push(usage.as_deref());
    }
    Some(vec![
        p(worker, Type::UUID),
        p(ids, Type::INT8_ARRAY),
        p(fences, Type::INT4_ARRAY),
        results.parameter(),
        usages.parameter(),
    ])
}

impl Store {
    /// Record outcomes, all in one commit. Answers in any order, one per outcome.
    pub async fn settle(&self, worker: Uuid, outcomes: &[Settlement]) -> Result<Vec<Settled>> {
        let Some(parameters) = plain(worker, outcomes) else { return self.settle_any(worker, outcomes).await };
        let mut missed: Vec<i64> =
            match self.call_one("select posthouse.settle_plain($1, $2, $3, $4, $5)", parameters).await {
                Ok(row) => row.try_get(0)?,
                // A value that Postgres cannot store as it is: the other way cleans it.
                Err(error) if error.sqlstate().is_some_and(|code| code.starts_with("22") || code.starts_with("54")) => {
                    return self.settle_any(worker, outcomes).await;
                }
                Err(error) => return Err(error),
            };
        missed.sort_unstable();
        let (applied, rest): (Vec<_>, Vec<_>) =
            outcomes.iter().partition(|outcome| missed.binary_search(&outcome.id).is_err());
        let done = |outcome: &Settlement| Settled {
            id: outcome.id,
            fence: outcome.fence,
            verdict: Verdict::Applied,
            state: Some("done".to_owned()),
        };
        let mut settled: Vec<Settled> = applied.into_iter().map(done).collect();
        if !rest.is_empty() {
            settled.extend(self.settle_any(worker, &rest).await?);
        }
        Ok(settled)
    }

    async fn settle_any(&self, worker: Uuid, outcomes: &[impl Borrow<Settlement>]) -> Result<Vec<Settled>> {
        let wire: Vec<Wire<'_>> = outcomes.iter().map(|outcome| Wire::new(outcome.borrow())).collect();
        let json = serde_json::value::to_raw_value(&wire)?;
        let rows = self
            .call(
                "select id, fence, verdict, state from posthouse.settle($1, $2)",
                vec![p(worker, Type::UUID), p(Json(json), Type::JSON)],
            )
            .await?;
        rows.iter()
            .map(|row| {
                let verdict = match row.try_get::<_, &str>(2)? {
                    "applied" => Verdict::Applied,
                    "already" => Verdict::Already,
                    "lost" => Verdict::Lost,
                    "invalid" => Verdict::Invalid,
                    other => return Err(Error::schema(format!("settle answered {other:?}"))),
                };
                Ok(Settled {
                    id: row.try_get::<_, Option<i64>>(0)?.unwrap_or_default(),
                    fence: row.try_get::<_, Option<i64>>(1)?.unwrap_or_default(),
                    verdict,
                    state: row.try_get(3)?,
                })
            })
            .collect()
    }

    /// What names the outside call of an earlier attempt that may have taken effect. `None`: there is none.
    pub async fn call_seed(&self, worker: Uuid, id: i64, fence: i64) -> Result<Option<String>> {
        let parameters = vec![p(worker, Type::UUID), p(id, Type::INT8), p(fence, Type::INT8)];
        Ok(self.call_one("select posthouse.call_seed($1, $2, $3)", parameters).await?.try_get(0)?)
    }

    /// Store how far an attempt has come. False: the attempt is no longer the right one.
    pub async fn progress(&self, worker: Uuid, id: i64, fence: i64, progress: &RawValue) -> Result<bool> {
        let row = self
            .call_one(
                "select posthouse.progress($1, $2, $3, $4)",
                vec![
                    p(worker, Type::UUID),
                    p(id, Type::INT8),
                    p(fence, Type::INT8),
                    p(Json(progress.to_owned()), Type::JSONB),
                ],
            )
            .await?;
        Ok(row.try_get(0)?)
    }
}
