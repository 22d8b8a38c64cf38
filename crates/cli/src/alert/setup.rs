//! The section `[alerts]` of a worker: what it sets in the database, and the handler of the webhook's jobs.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use posthouse::Posthouse;
use posthouse::store::{AlertChange, Database, WEBHOOK_KIND};
use posthouse::worker::Builder;
use posthouse_llm::Config;
use posthouse_llm::config::alerts::{ALERT_KINDS, Alerts};

use super::webhook::Webhook;
use crate::failure::{Failure, Result};

/// Between two tries to tell a database that is away.
const AGAIN: Duration = Duration::from_secs(2);
/// The SQLSTATE of a login that lacks a right.
const FORBIDDEN: &str = "42501";

/// What `[alerts]` says, made ready.
pub(crate) struct Setup {
    changes: Vec<(&'static str, AlertChange)>,
    webhook: Option<Arc<Webhook>>,
    queue: Posthouse,
}

impl Setup {
    /// Reads the section of this file. `None`: there is none.
    pub(crate) fn load(file: Option<&Path>, database: &Database) -> Result<Option<Self>> {
        let Some(file) = file else { return Ok(None) };
        let config = Config::load(file).map_err(|error| Failure::new(error.to_string()))?;
        let Some(alerts) = &config.alerts else { return Ok(None) };
        let failure = |error| Failure::new(format!("{}: {error}", file.display()));
        let queue = Posthouse::new(database.clone());
        let target = alerts.webhook(&config.folder).map_err(failure)?;
        let webhook = target.map(|target| Webhook::new(&target, queue.clone())).transpose().map_err(failure)?;
        Ok(Some(Self { changes: changes(alerts), webhook: webhook.map(Arc::new), queue }))
    }

    /// Whether this worker delivers alerts.
    pub(crate) fn has_webhook(&self) -> bool {
        self.webhook.is_some()
    }

    /// Adds the handler to a worker, if there is a webhook.
    pub(crate) fn register(&self, builder: Builder) -> Builder {
        let Some(webhook) = self.webhook.clone() else { return builder };
        builder.handle_kind(WEBHOOK_KIND, move |payload, context| {
            let webhook = webhook.clone();
            async move { webhook.deliver(payload, context).await }
        })
    }

    /// Tells the database, beside the worker that starts meanwhile, for as long as it takes.
    pub(crate) fn tell(self) {
        tokio::spawn(async move {
            while let Err(error) = self.tell_now().await {
                if !error.is_transient() {
                    tracing::error!(%error, "the settings of [alerts] are refused");
                    return;
                }
                tokio::time::sleep(AGAIN).await;
            }
        });
    }

    async fn tell_now(&self) -> posthouse::Result<()> {
        if self.has_webhook() {
            self.queue.set_webhook(true, None).await?;
        }
        for (kind, change) in &self.changes {
            match self.queue.set_alert(kind, change).await {
                // Under isolation that is for operators; what they set holds then.
                Err(error) if error.sqlstate() == Some(FORBIDDEN) => {
                    tracing::warn!(%error, "kinds and times of [alerts] are left as they are; an operator sets them with `posthouse alert set`");
                    return Ok(());
                }
                told => told?,
            }
        }
        Ok(())
    }
}

fn changes(alerts: &Alerts) -> Vec<(&'static str, AlertChange)> {
    let ms = |ms: Option<u64>| ms.map(Duration::from_millis);
    let change = |kind| AlertChange {
        queue: None,
        enabled: alerts.kinds.as_ref().map(|kinds| kinds.iter().any(|named| named == kind)),
        quiet: ms(alerts.quiet_ms),
        after: match kind {
            "oldest_due" => ms(alerts.oldest_due_ms),
            "no_worker" => ms(alerts.no_worker_ms),
            _ => None,
        },
    };
    let changes = ALERT_KINDS.into_iter().map(|kind| (kind, change(kind)));
    changes.filter(|(_, change)| *change != AlertChange::default()).collect()
}
