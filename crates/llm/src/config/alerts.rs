//! Alerts: the webhook they go to, and how soon and how often they are told.
//!
//! ```toml
//! [alerts]
//! webhook_url = "https://example.com/hooks/posthouse"
//! secret_env = "POSTHOUSE_WEBHOOK_SECRET"
//! oldest_due_ms = 3_600_000
//! ```

use super::error::ConfigError;
use crate::secret::Secret;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kinds of alerts that the queue raises by itself.
pub const ALERT_KINDS: [&str; 7] =
    ["dead_letter", "gate_quota", "budget", "no_worker", "oldest_due", "sweep", "schedule"];

const DAY_MS: u64 = 86_400_000;

/// The section `[alerts]`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alerts {
    /// Where alerts are posted. Default: nowhere.
    pub webhook_url: Option<Secret>,
    /// The environment variable that holds the address, where that is a secret itself.
    pub webhook_url_env: Option<String>,
    /// The file that holds the address.
    pub webhook_url_file: Option<PathBuf>,
    /// The environment variable that holds the secret with which alerts are signed: `whsec_` and base64. Several, separated by white
    /// space, all sign, so that receivers can change from one to the next.
    pub secret_env: Option<String>,
    /// The file that holds the secrets.
    pub secret_file: Option<PathBuf>,
    /// For one delivery, in milliseconds, 100 to 60,000. Default 15,000, the least that receivers are told to count on.
    pub timeout_ms: Option<u64>,
    /// A proxy: its URL, or `env` for `HTTPS_PROXY` and its relatives. Default: none, whatever the environment says.
    pub proxy: Option<String>,
    /// The kinds of alerts that are raised; of the others in [`ALERT_KINDS`] none is. Default: what the database says, at first all.
    pub kinds: Option<Vec<String>>,
    /// How long a due job may wait for a free slot, in milliseconds. Default: what the database says, at first 15 minutes.
    pub oldest_due_ms: Option<u64>,
    /// How long a due job may wait for a worker of its kind to come, in milliseconds. Default: what the database says, at first a minute.
    pub no_worker_ms: Option<u64>,
    /// The least time between two messages about one subject, in milliseconds. Default: what the database says, at first 5 minutes.
    pub quiet_ms: Option<u64>,
}

/// Where alerts are posted, and how.
#[derive(Debug, Clone)]
pub struct WebhookTarget {
    /// The address, which may hold a secret.
    pub url: Secret,
    /// The secrets, at least one, in the order of the file.
    pub secrets: Vec<Secret>,
    /// The key that names their place, for messages about them.
    pub secrets_place: &'static str,
    /// For one delivery.
    pub timeout: Duration,
    /// As in [`Alerts::proxy`].
    pub proxy: Option<String>,
}

impl Alerts {
    /// Whether a webhook is named.
    #[must_use]
    pub fn has_webhook(&self) -> bool {
        self.webhook_url.is_some() || self.webhook_url_env.is_some() || self.webhook_url_file.is_some()
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let wrong = |key: &str, problem: &str| Err(ConfigError::new(format!("alerts.{key}"), problem));
        let urls = [self.webhook_url.is_some(), self.webhook_url_env.is_some(), self.webhook_url_file.is_some()];
        let secrets = [self.secret_env.is_some(), self.secret_file.is_some()];
        let given = |places: &[bool]| places.iter().filter(|given| **given).count();
        if given(&urls) > 1 {
            return wrong(
                "webhook_url",
                "given in several ways; keep one of webhook_url, webhook_url_env, webhook_url_file",
            );
        }
        if given(&secrets) > 1 {
            return wrong("secret_env", "given together with secret_file; keep one, it may hold several secrets");
        }
        if given(&urls) != given(&secrets) {
            return if self.has_webhook() {
                wrong(
                    "secret_env",
                    "missing: alerts are signed; make a secret with `echo whsec_$(openssl rand -base64 32)`",
                )
            } else {
                wrong("webhook_url", "missing, though there is a secret; say where alerts go")
            };
        }
        for kind in self.kinds.iter().flatten() {
            if !ALERT_KINDS.contains(&kind.as_str()) {
                return wrong("kinds", &format!("no alerts of kind {kind:?}; there are: {}", ALERT_KINDS.join(", ")));
            }
        }
        for (key, value, least, most) in [
            ("timeout_ms", self.timeout_ms, 100, 60_000),
            ("oldest_due_ms", self.oldest_due_ms, 1_000, 365 * DAY_MS),
            ("no_worker_ms", self.no_worker_ms, 1_000, 365 * DAY_MS),
            ("quiet_ms", self.quiet_ms, 0, 30 * DAY_MS),
        ] {
            if value.is_some_and(|value| value < least || value > most) {
                return wrong(key, &format!("must be from {least} to {most} (milliseconds)"));
            }
        }
        Ok(())
    }

    /// Reads the address and the secrets. `None`: no webhook is named.
    ///
    /// # Errors
    /// When a variable or file is not there or empty. The error never shows what they hold.
    pub fn webhook(&self, folder: &Path) -> Result<Option<WebhookTarget>, ConfigError> {
        let place = |key| format!("alerts.{key}");
        let read = |key, env: Option<&str>, file: Option<&Path>| -> Result<Option<Secret>, ConfigError> {
            let text = match (env, file) {
                (Some(name), _) => from_environment(name),
                (None, Some(file)) => from_file(&folder.join(file)),
                (None, None) => return Ok(None),
            };
            text.map(Some).map_err(|problem| ConfigError::new(place(key), problem))
        };
        let url_key = if self.webhook_url_env.is_some() { "webhook_url_env" } else { "webhook_url_file" };
        let from_elsewhere = read(url_key, self.webhook_url_env.as_deref(), self.webhook_url_file.as_deref())?;
        let Some(url) = from_elsewhere.or_else(|| self.webhook_url.clone()) else { return Ok(None) };
        let secrets_place = if self.secret_env.is_some() { "alerts.secret_env" } else { "alerts.secret_file" };
        let text = read(&secrets_place[7..], self.secret_env.as_deref(), self.secret_file.as_deref())?;
        let secrets = text.iter().flat_map(|text| text.expose().split_whitespace()).map(Secret::new).collect();
        let timeout = Duration::from_millis(self.timeout_ms.unwrap_or(15_000));
        Ok(Some(WebhookTarget { url, secrets, secrets_place, timeout, proxy: self.proxy.clone() }))
    }
}

fn from_environment(name: &str) -> Result<Secret, String> {
    let is_usual = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    match std::env::var(name).ok().filter(|value| !value.trim().is_empty()) {
        Some(value) => Ok(Secret::new(&value)),
        None if is_usual => {
            Err(format!("the environment variable {name} is not set; export {name}=… before the start"))
        }
        // It may be the secret itself, put into the wrong place.
        None => Err("no environment variable of this name is set; write the NAME of a variable here".to_owned()),
    }
}

fn from_file(path: &Path) -> Result<Secret, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let secret = Secret::new(&text);
    if secret.expose().is_empty() { Err(format!("{} is empty", path.display())) } else { Ok(secret) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parsed(text: &str) -> Result<Alerts, String> {
        let alerts: Alerts = toml::from_str(text).map_err(|error| error.to_string())?;
        alerts.check().map(|()| alerts).map_err(|error| error.to_string())
    }

    #[test]
    fn mistakes_name_the_key_and_what_to_do() {
        for (text, problem) in [
            ("webhook_url = 'https://h/'", "alerts.secret_env: missing: alerts are signed; make a secret with"),
            ("secret_env = 'S'", "alerts.webhook_url: missing, though there is a secret"),
            (
                "webhook_url = 'https://h/'\nwebhook_url_env = 'U'\nsecret_env = 'S'",
                "alerts.webhook_url: given in several ways",
            ),
            (
                "webhook_url = 'https://h/'\nsecret_env = 'S'\nsecret_file = 'f'",
                "alerts.secret_env: given together with secret_file",
            ),
            (
                "kinds = ['dead_leter']",
                "alerts.kinds: no alerts of kind \"dead_leter\"; there are: dead_letter, gate_quota",
            ),
            ("oldest_due_ms = 0", "alerts.oldest_due_ms: must be from 1000 to"),
            ("timeout_ms = 99", "alerts.timeout_ms: must be from 100 to 60000"),
            ("quiet_ms = 2592000001", "alerts.quiet_ms: must be from 0 to 2592000000"),
            ("url = 'https://h/'", "unknown field `url`"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
        assert!(parsed("kinds = ['dead_letter', 'sweep', 'schedule']\nquiet_ms = 0").is_ok());
    }

    #[test]
    fn secrets_come_from_files_and_variables_and_are_shown_nowhere() {
        let folder = std::env::temp_dir().join(format!("posthouse-alerts-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("secrets"), "whsec_b25l\n  whsec_dHdv\n").unwrap();
        let alerts = parsed("webhook_url = 'https://u:pw@h/hook'\nsecret_file = 'secrets'").unwrap();
        let target = alerts.webhook(&folder).unwrap().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(target.secrets.iter().map(Secret::expose).collect::<Vec<_>>(), ["whsec_b25l", "whsec_dHdv"]);
        assert_eq!(target.timeout, Duration::from_secs(15));
        let shown = format!("{target:?} {alerts:?}");
        assert!(!shown.contains("b25l") && !shown.contains("pw"), "{shown}");
        let missing = parsed("webhook_url = 'https://h/'\nsecret_file = 'nowhere'").unwrap();
        let error = missing.webhook(&folder).unwrap_err().to_string();
        assert!(error.starts_with("alerts.secret_file: cannot read"), "{error}");
        // What is no name may be the secret itself.
        let wrong = parsed("webhook_url = 'https://h/'\nsecret_env = 'whsec_b25l'").unwrap();
        let error = wrong.webhook(&folder).unwrap_err().to_string();
        assert!(error.starts_with("alerts.secret_env:") && !error.contains("b25l"), "{error}");
        assert!(parsed("").unwrap().webhook(&folder).unwrap().is_none());
    }
}
