//! Delivers alerts: jobs of kind `posthouse.webhook`, posted and signed as the Standard Webhooks specification has it.
//!
//! The queue retries, so the id of a message is that of its job's payload and the same at each attempt; time and signature are
//! those of the attempt. Any 2xx is success. Nothing of an answer but its status is kept.

use std::error::Error as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use posthouse::store::WEBHOOK_QUEUE;
use posthouse::{Context, JobError, Outcome, Posthouse};
use posthouse_llm::config::alerts::WebhookTarget;
use posthouse_llm::{ConfigError, http_client};
use reqwest::header::{CONTENT_TYPE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode, Url};
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::sign::Signer;

/// The waits after the attempts, in seconds: 16 hours in all, so that what broke in the evening may be mended in the morning.
const WAITS: [u64; 9] = [5, 30, 120, 600, 1_800, 3_600, 7_200, 14_400, 28_800];
/// Whatever the receiver asks for: by then the alert is old.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3_600);

/// Where alerts go.
pub(super) struct Webhook {
    client: Client,
    url: Url,
    signer: Signer,
    timeout: Duration,
    queue: Posthouse,
}

#[derive(Deserialize)]
struct Payload {
    webhook_id: String,
    body: Box<RawValue>,
}

impl Webhook {
    pub(super) fn new(target: &WebhookTarget, queue: Posthouse) -> Result<Self, ConfigError> {
        let wrong = |place: &str, problem: &str| ConfigError { place: place.to_owned(), problem: problem.to_owned() };
        // The address may hold a secret, so it is not shown.
        let url = Url::parse(target.url.expose())
            .ok()
            .filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host())
            .ok_or_else(|| wrong("alerts.webhook_url", "not an address; write https://HOST/PATH"))?;
        let signer = Signer::new(&target.secrets).map_err(|problem| wrong(target.secrets_place, &problem))?;
        let client = http_client(target.timeout, target.proxy.as_deref())
            .map_err(|error| wrong(&format!("alerts.{}", error.place), &error.problem))?;
        Ok(Self { client, url, signer, timeout: target.timeout, queue })
    }

    /// One attempt.
    pub(super) async fn deliver(&self, payload: Box<RawValue>, context: Context) -> Outcome {
        // Whoever may enqueue jobs for a tenant must not have them signed as alerts.
        if context.tenant() != WEBHOOK_QUEUE || context.queue() != WEBHOOK_QUEUE {
            let message = format!("only alerts are delivered: jobs of queue and tenant {WEBHOOK_QUEUE}");
            return Outcome::fail(JobError::new("payload", message));
        }
        let payload: Payload = match serde_json::from_str(payload.get()) {
            Ok(payload) => payload,
            Err(error) => return Outcome::fail(JobError::new("payload", format!("not an alert: {error}"))),
        };
        match self.post(payload).await {
            Ok(answer) => self.outcome(&answer, &context).await,
            Err(error) if error.is_builder() => {
                Outcome::fail(JobError::new("payload", "its id cannot be a header".to_owned()))
            }
            Err(error) => Outcome::Retry { error: self.no_answer(&error), delay: Some(wait(&context)) },
        }
    }

    async fn post(&self, payload: Payload) -> reqwest::Result<Response> {
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let body = payload.body.get();
        let request = self
            .client
            .post(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header("webhook-id", &payload.webhook_id)
            .header("webhook-timestamp", timestamp)
            .header("webhook-signature", self.signer.sign(&payload.webhook_id, timestamp, body));
        request.body(body.to_owned()).send().await
    }

    async fn outcome(&self, answer: &Response, context: &Context) -> Outcome {
        let status = answer.status();
        if status.is_success() {
            return Outcome::done(&json!({ "status": status.as_u16() }));
        }
        let mut message = format!("{} answered {status}", self.host());
        if status.is_redirection() {
            message.push_str("; redirects are not followed: set alerts.webhook_url to the new address");
        }
        if status == StatusCode::GONE {
            message.push_str(
                "; the webhook is off until a worker with [alerts] starts, or `posthouse alert set --webhook on`",
            );
            if let Err(error) = self.queue.set_webhook(false, Some(&message)).await {
                tracing::warn!(%error, "the webhook is gone and cannot be turned off");
            }
            return Outcome::fail(failed("webhook_gone", message, status));
        }
        let asked = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let asked = asked.map(Duration::from_secs).unwrap_or_default().min(RETRY_AFTER_MAX);
        Outcome::Retry { error: failed("webhook", message, status), delay: Some(wait(context).max(asked)) }
    }

    fn no_answer(&self, error: &reqwest::Error) -> JobError {
        let host = self.host();
        let message = if error.is_timeout() {
            format!("{host} did not answer within {}", humantime::format_duration(self.timeout))
        } else {
            // The innermost cause never shows the address.
            let mut cause = error.source();
            while let Some(inner) = cause.and_then(std::error::Error::source) {
                cause = Some(inner);
            }
            format!("{host} could not be asked: {}", cause.map_or_else(|| "no answer".to_owned(), ToString::to_string))
        };
        JobError::new("webhook", message)
    }

    /// The part of the address that holds no secret.
    fn host(&self) -> String {
        let host = self.url.host_str().unwrap_or("?");
        self.url.port_or_known_default().map_or(host.to_owned(), |port| format!("{host}:{port}"))
    }
}

fn failed(class: &str, message: String, status: StatusCode) -> JobError {
    JobError::new(class, message).with_detail(json!({ "status": status.as_u16() }))
}

/// The wait after this attempt, up to a tenth more or less, so that the alerts of one outage do not all come back at once.
fn wait(context: &Context) -> Duration {
    let attempt = usize::try_from(context.attempt()).unwrap_or(usize::MAX).clamp(1, WAITS.len());
    let share = 0.9 + f64::from(u8::try_from(context.job_id().unsigned_abs() % 21).unwrap_or_default()) / 100.0;
    Duration::from_secs(WAITS[attempt - 1]).mul_f64(share)
}
