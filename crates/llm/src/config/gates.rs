//! Gates: limits that jobs pass, declared beside the models they are for.
//!
//! ```toml
//! [gates."model:small"]
//! max_running = 40
//! tokens_per_minute = 90_000
//! money_per_day = "12.50"
//! ```

use super::error::ConfigError;
use crate::price::Amount;
use posthouse::store::GateLimits;
use serde::Deserialize;
use std::collections::BTreeMap;

/// The limits of one gate; those that are left out are none.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gate {
    /// Jobs that run at once.
    pub max_running: Option<u32>,
    /// Requests in any rolling minute.
    pub requests_per_minute: Option<u32>,
    /// Tokens in any rolling minute, prompts and answers together.
    pub tokens_per_minute: Option<u64>,
    /// US dollars a day (UTC), as decimal text or as a number.
    pub money_per_day: Option<Amount>,
    /// US dollars a month (UTC).
    pub money_per_month: Option<Amount>,
    /// What happens when a budget is spent: `hold` (default), `fail`, or `model:NAME`, which is used instead.
    pub when_spent: Option<String>,
    /// The share of a budget, above 0 and up to 1, at which an alert is raised. Default: at the whole only.
    pub warn_at: Option<Amount>,
}

impl Gate {
    /// As the database takes them.
    #[must_use]
    pub fn limits(&self) -> GateLimits {
        GateLimits {
            max_running: self.max_running,
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            money_per_day: self.money_per_day.map(|amount| amount.to_string()),
            money_per_month: self.money_per_month.map(|amount| amount.to_string()),
            when_spent: self.when_spent.clone(),
            warn_at: self.warn_at.map(|share| share.to_string()),
        }
    }
}

/// Names that cannot be. Whether limits make sense, the database says when they are set.
pub(super) fn check(gates: &BTreeMap<String, Gate>) -> Result<(), ConfigError> {
    for name in gates.keys() {
        let scope = name.split_once(':');
        let is_scope = scope.is_none_or(|(scope, whom)| {
            ["queue", "tenant", "model", "endpoint"].contains(&scope) && !whom.is_empty() && name != "endpoint:*"
        });
        if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) || !is_scope {
            return Err(ConfigError::new(
                format!("gates.{}", name.replace(char::is_control, "\u{FFFD}")),
                "no name for a gate; write queue:Q, tenant:T, model:M or endpoint:PROVIDER/MODEL, with * for each (tenant:*), or a name without a colon",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::config::Config;
    use std::path::Path;

    #[test]
    fn limits_are_read_as_they_are_written() {
        let text = "[gates.\"model:small\"]\nmax_running = 40\ntokens_per_minute = 90_000\nmoney_per_day = 0.10\n\
                    money_per_month = \"12345678901234567890.10\"\nwarn_at = 0.8\nwhen_spent = \"model:tiny\"\n[gates.crm]\n";
        let config = Config::parse(text, Path::new("")).unwrap();
        assert!(config.asks_nobody());
        let limits = config.gates["model:small"].limits();
        assert_eq!((limits.max_running, limits.tokens_per_minute), (Some(40), Some(90_000)));
        assert_eq!(limits.requests_per_minute, None);
        assert_eq!(limits.money_per_day.as_deref(), Some("0.1"));
        assert_eq!(limits.money_per_month.as_deref(), Some("12345678901234567890.1"));
        assert_eq!((limits.warn_at.as_deref(), limits.when_spent.as_deref()), (Some("0.8"), Some("model:tiny")));
        assert_eq!(config.gates["crm"].limits(), posthouse::store::GateLimits::default());
    }

    #[test]
    fn mistakes_name_the_key_and_the_cure() {
        for (text, expected) in [
            ("[gates.\"user:x\"]", "gates.user:x: no name for a gate; write queue:Q, tenant:T"),
            ("[gates.\"tenant:\"]", "gates.tenant:: no name for a gate"),
            ("[gates.\"\"]", "gates.: no name for a gate"),
            ("[gates.crm]\nrunning = 4", "line 2, running: unknown field `running`, expected one of `max_running`"),
            (
                "[gates.crm]\nmax_running = -4",
                "line 2, max_running: invalid value: integer `-4`, expected a whole number from 0 up",
            ),
            (
                "[gates.crm]\nmoney_per_day = \"a lot\"",
                "line 2, money_per_day: invalid value: text, expected an amount",
            ),
        ] {
            let found = Config::parse(text, Path::new("")).unwrap_err().to_string();
            assert!(found.starts_with(expected), "{found}\n  wanted: {expected}");
        }
    }
}
