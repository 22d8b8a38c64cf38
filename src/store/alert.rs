//! Alerts: what people are told of, what is set for that, and whether the webhook is on.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};

use super::connection::{LONGEST_MS, Store, p};
use crate::error::Result;

/// The kind of the jobs that carry alerts to the webhook. Their queue and their tenant are [`WEBHOOK_QUEUE`].
pub const WEBHOOK_KIND: &str = "posthouse.webhook";
/// The queue, and the tenant, of the jobs that carry alerts to the webhook.
pub const WEBHOOK_QUEUE: &str = "posthouse";

/// An alert as the view `posthouse.alerts` shows it. Times are as Postgres writes them in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AlertRecord {
    /// Its number.
    pub id: i64,
    /// `dead_letter`, `gate_quota`, `budget`, `no_worker`, `oldest_due`, `sweep`, or what somebody else raised.
    pub kind: String,
    /// What it is about: a gate, a queue, `queue/kind`, `queue/kind/class`; `*`: more than can be told apart.
    pub subject: String,
    /// What happened, for people: the newest text.
    pub text: String,
    /// The same for machines.
    pub detail: Value,
    /// How often it was raised; of dead letters, how many.
    pub count: i64,
    /// When it was raised first.
    pub raised_at: String,
    /// When it was raised last.
    pub last_at: String,
    /// When it was told last. `None`: not yet.
    pub told_at: Option<String>,
    /// When it was over. `None`: it is open.
    pub resolved_at: Option<String>,
}

/// An alert as it is told: by notification, by webhook, in the log of the worker whose sweep told it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AlertMessage {
    /// The kind of the alert.
    #[serde(rename = "type")]
    pub kind: String,
    /// When it was told, RFC 3339 in UTC.
    pub timestamp: String,
    /// What it is about.
    pub data: AlertData,
}

/// What an [`AlertMessage`] is about.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AlertData {
    /// The number of the alert.
    pub alert: i64,
    /// As in [`AlertRecord::subject`].
    pub subject: String,
    /// As in [`AlertRecord::text`].
    pub text: String,
    /// As in [`AlertRecord::detail`].
    pub detail: Value,
    /// How often it was raised since it is open.
    pub count: i64,
    /// How often it was raised since it was told last.
    pub new: i64,
    /// When it was raised first, RFC 3339 in UTC.
    pub raised_at: String,
    /// When it was raised last, RFC 3339 in UTC.
    pub last_at: String,
}

/// What is set for a kind of alerts, as the view `posthouse.alert_rules` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlertRule {
    /// The kind of alerts.
    pub kind: String,
    /// The queue it holds for. `None`: for all that have no rule of their own.
    pub queue: Option<String>,
    /// Whether it is raised at all.
    pub enabled: bool,
    /// The least time between two messages about one subject, in milliseconds. `None`: five minutes.
    pub quiet_ms: Option<i64>,
    /// How old a due job must be, in milliseconds, for `no_worker` and `oldest_due`. `None`: as for the others.
    pub after_ms: Option<i64>,
}

/// A change of a rule: what is `None` stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AlertChange {
    /// The queue it holds for, with `oldest_due` only. `None`: for all that have no rule of their own.
    pub queue: Option<String>,
    /// Whether it is raised at all.
    pub enabled: Option<bool>,
    /// The least time between two messages about one subject, up to 30 days.
    pub quiet: Option<Duration>,
    /// How old a due job must be, from a second to 365 days, with `no_worker` and `oldest_due` only. For one queue, zero: as for the
    /// others.
    pub after: Option<Duration>,
}

/// Whether alerts go to the webhook. Where it is and its secret are known to the workers only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WebhookState {
    /// Whether alerts become jobs of kind [`WEBHOOK_KIND`].
    pub enabled: bool,
    /// Why it was turned off, if it was not by a person.
    pub reason: Option<String>,
}

fn json<T: for<'a> Deserialize<'a>>(row: &Row) -> Result<T> {
    Ok(row.try_get::<_, Json<T>>(0)?.0)
}

impl Store {
    /// Raise an alert. It is told within some seconds, unless the quiet time of its kind and subject is not over. The message and
    /// the detail must hold neither payloads nor secrets. `false`: alerts of this kind are turned off.
    pub async fn raise_alert(&self, kind: &str, subject: &str, message: &str, detail: &Value) -> Result<bool> {
        let texts = [kind, subject, message].map(|text| p(text.to_owned(), Type::TEXT));
        let parameters = texts.into_iter().chain([p(Json(detail.clone()), Type::JSONB)]).collect();
        Ok(self.call_one("select posthouse.raise_alert($1, $2, $3, $4)", parameters).await?.try_get(0)?)
    }

    /// Say that what an alert was about is over.
    pub async fn resolve_alert(&self, kind: &str, subject: &str) -> Result<()> {
        let parameters = [kind, subject].map(|text| p(text.to_owned(), Type::TEXT)).into();
        self.call_one("select posthouse.resolve_alert($1, $2)", parameters).await.map(|_| ())
    }

    /// Alerts, newest first, at most `limit`: the open ones, or with `closed` also those of the last 30 days.
    pub async fn alerts(&self, closed: bool, limit: u32) -> Result<Vec<AlertRecord>> {
        let sql = "select to_jsonb(a.*) from posthouse.alerts a where a.resolved_at is null or $1 order by a.last_at desc, a.id desc limit $2";
        let rows = self.call(sql, vec![p(closed, Type::BOOL), p(i64::from(limit), Type::INT8)]).await?;
        rows.iter().map(json).collect()
    }

    /// What is set for alerts.
    pub async fn alert_rules(&self) -> Result<Vec<AlertRule>> {
        let sql = "select to_jsonb(r.*) - 'quiet' - 'after' || jsonb_build_object('quiet_ms', (extract(epoch from r.quiet) * 1000)::bigint, \
                   'after_ms', (extract(epoch from r.after) * 1000)::bigint) from posthouse.alert_rules r order by r.kind, r.queue nulls first";
        self.call(sql, Vec::new()).await?.iter().map(json).collect()
    }

    /// Change what is set for a kind of alerts.
    pub async fn set_alert(&self, kind: &str, change: &AlertChange) -> Result<()> {
        let sql =
            "select posthouse.set_alert($1, $2, $3 * interval '1 millisecond', $4 * interval '1 millisecond', $5)";
        let ms = |time: Option<Duration>| p(time.map(|time| (time.as_secs_f64() * 1e3).min(LONGEST_MS)), Type::FLOAT8);
        let parameters = vec![
            p(kind.to_owned(), Type::TEXT),
            p(change.enabled, Type::BOOL),
            ms(change.quiet),
            ms(change.after),
            p(change.queue.clone(), Type::TEXT),
        ];
        self.call_one(sql, parameters).await.map(|_| ())
    }

    /// Turn the webhook on or off, and say why.
    pub async fn set_webhook(&self, enabled: bool, reason: Option<&str>) -> Result<()> {
        let parameters = vec![p(enabled, Type::BOOL), p(reason.map(str::to_owned), Type::TEXT)];
        self.call_one("select posthouse.set_webhook($1, $2)", parameters).await.map(|_| ())
    }

    /// Whether the webhook is on.
    pub async fn webhook(&self) -> Result<WebhookState> {
        let row = self.call_one("select enabled, reason from posthouse.webhook()", Vec::new()).await?;
        Ok(WebhookState { enabled: row.try_get(0)?, reason: row.try_get(1)? })
    }

    /// Tell an alert of kind `test` at once. Answers with the webhook's job; `None` where the webhook is off.
    pub async fn test_alert(&self) -> Result<Option<i64>> {
        Ok(self.call_one("select posthouse.test_alert()", Vec::new()).await?.try_get(0)?)
    }
}
