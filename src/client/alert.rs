//! Alerts through the handle to a queue: raise them, look at them, set how they are told.

use serde_json::Value;

use super::Posthouse;
use crate::error::Result;
use crate::store::{AlertChange, AlertRecord, AlertRule, WebhookState};

impl Posthouse {
    /// Raise an alert of a kind of your own about a subject. It is told within some seconds, unless the quiet time of this kind and
    /// subject is not over; then it is counted. The message and the detail must hold neither payloads nor secrets. `false`:
    /// alerts of this kind are turned off.
    pub async fn raise_alert(&self, kind: &str, subject: &str, message: &str, detail: &Value) -> Result<bool> {
        self.store.raise_alert(kind, subject, message, detail).await
    }

    /// Say that what an alert was about is over.
    pub async fn resolve_alert(&self, kind: &str, subject: &str) -> Result<()> {
        self.store.resolve_alert(kind, subject).await
    }

    /// Alerts, newest first, at most `limit`: the open ones, or with `closed` also those of the last 30 days.
    pub async fn alerts(&self, closed: bool, limit: u32) -> Result<Vec<AlertRecord>> {
        self.store.alerts(closed, limit).await
    }

    /// What is set for alerts.
    pub async fn alert_rules(&self) -> Result<Vec<AlertRule>> {
        self.store.alert_rules().await
    }

    /// Change what is set for a kind of alerts.
    pub async fn set_alert(&self, kind: &str, change: &AlertChange) -> Result<()> {
        self.store.set_alert(kind, change).await
    }

    /// Turn the webhook on or off, and say why: whether alerts become jobs of kind `posthouse.webhook` on queue `posthouse`, for
    /// a worker that knows where they go.
    pub async fn set_webhook(&self, enabled: bool, reason: Option<&str>) -> Result<()> {
        self.store.set_webhook(enabled, reason).await
    }

    /// Whether the webhook is on.
    pub async fn webhook(&self) -> Result<WebhookState> {
        self.store.webhook().await
    }
}
