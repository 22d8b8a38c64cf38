//! Whether a configuration hangs together. Every mistake names its key and what to do about it.

use super::{Config, ConfigError, Endpoint, Kind, Model, Provider, Timeouts, list};
use std::collections::BTreeMap;

impl Config {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if let Some(alerts) = &self.alerts {
            alerts.check()?;
        }
        super::gates::check(&self.gates)?;
        super::schedules::check(&self.schedules)?;
        if self.asks_nobody() {
            return Ok(());
        }
        if self.providers.is_empty() {
            return Err(ConfigError::new(
                "providers",
                "no provider; add [providers.NAME] with base_url and api_key_env",
            ));
        }
        for (name, provider) in &self.providers {
            if name.is_empty() || name.len() > 80 || name.contains('/') || name.chars().any(char::is_control) {
                return Err(ConfigError::new(
                    format!("providers.{}", name.replace(char::is_control, "\u{FFFD}")),
                    "no name for a provider; use 1 to 80 bytes, no slash (gates are named PROVIDER/MODEL) and no control characters",
                ));
            }
            provider.check(&format!("providers.{name}"))?;
        }
        for (name, model) in &self.models {
            if name.is_empty() || name.len() > 100 || name.chars().any(char::is_control) {
                return Err(ConfigError::new(
                    format!("models.{}", name.replace(char::is_control, "\u{FFFD}")),
                    "no name for a model; use 1 to 100 bytes and no control characters",
                ));
            }
            model.check(name, &self.providers)?;
        }
        self.model_name(None)?;
        for (name, kind) in &self.kinds {
            let place = format!("kinds.{name}");
            self.model_name(kind.model.as_deref())
                .map_err(|error| ConfigError::new(format!("{place}.{}", error.place), error.problem))?;
            if name.is_empty() || name.len() > 200 || name.chars().any(char::is_control) {
                return Err(ConfigError::new(
                    place.replace(char::is_control, "\u{FFFD}"),
                    "no name for a kind; use 1 to 200 bytes and no control characters",
                ));
            }
            kind.check(name, &place)?;
            self.check_larger(kind, &place)?;
        }
        Ok(())
    }

    fn check_larger(&self, kind: &Kind, place: &str) -> Result<(), ConfigError> {
        let Some(larger) = kind.on_context_length.as_deref() else { return Ok(()) };
        let wrong = |problem| Err(ConfigError::new(format!("{place}.on_context_length"), problem));
        if !self.models.contains_key(larger) {
            let declared = list(self.models.keys());
            return wrong(format!("no model {larger:?}; declared: {declared}. Add [models.{larger}] or fix the name"));
        }
        if self.model_name(kind.model.as_deref())? == larger {
            return wrong("is the kind's own model; name one that takes more".to_owned());
        }
        Ok(())
    }
}

impl Provider {
    fn check(&self, place: &str) -> Result<(), ConfigError> {
        let url = reqwest::Url::parse(&self.base_url).map_err(|error| {
            ConfigError::new(
                format!("{place}.base_url"),
                format!("not a URL ({error}); write something like \"https://api.openai.com/v1\""),
            )
        })?;
        if !["http", "https"].contains(&url.scheme()) || url.host_str().is_none() {
            return Err(ConfigError::new(
                format!("{place}.base_url"),
                "must begin with http:// or https:// and name a host",
            ));
        }
        if url.path().trim_end_matches('/').ends_with("/chat/completions") {
            return Err(ConfigError::new(
                format!("{place}.base_url"),
                "must end before /chat/completions, which is added to it; write something like \"https://api.openai.com/v1\"",
            ));
        }
        if let Some(proxy) = self.proxy.as_deref().filter(|proxy| *proxy != "env") {
            let is_web = reqwest::Url::parse(proxy).is_ok_and(|url| ["http", "https"].contains(&url.scheme()));
            if !is_web {
                return Err(ConfigError::new(
                    format!("{place}.proxy"),
                    "not the URL of an HTTP proxy; write \"http://HOST:PORT\" or \"env\"",
                ));
            }
        }
        if self.api_key_env.is_some() && self.api_key_file.is_some() {
            return Err(ConfigError::new(
                format!("{place}.api_key_file"),
                "set either api_key_env or api_key_file, not both",
            ));
        }
        Ok(())
    }
}

impl Model {
    fn check(&self, name: &str, providers: &BTreeMap<String, Provider>) -> Result<(), ConfigError> {
        let place = format!("models.{name}");
        if (self.provider.is_some() || self.model.is_some()) && !self.route.is_empty() {
            return Err(ConfigError::new(place, "set either provider and model, or route, not both"));
        }
        if self.provider.is_none() && self.route.is_empty() {
            return Err(ConfigError::new(
                place,
                "nobody to ask; set provider = \"NAME\", or route = [{ provider = \"NAME\", model = \"NAME\" }]",
            ));
        }
        let endpoints = self.endpoints(name);
        for (index, endpoint) in endpoints.iter().enumerate() {
            if !providers.contains_key(&endpoint.provider) {
                let declared = list(providers.keys());
                let wanted = &endpoint.provider;
                return Err(ConfigError::new(
                    format!("{place}.{}", if self.provider.is_some() { "provider" } else { "route" }),
                    format!("no provider {wanted:?}; declared: {declared}. Add [providers.{wanted}] or fix the name"),
                ));
            }
            endpoint.check(&format!("{place}.{}", if self.provider.is_some() { "model" } else { "route" }))?;
            let same = |other: &Endpoint| (&other.provider, &other.model) == (&endpoint.provider, &endpoint.model);
            if endpoints[..index].iter().any(same) {
                return Err(ConfigError::new(
                    format!("{place}.route"),
                    format!("{}/{} stands there twice; keep one", endpoint.provider, endpoint.model),
                ));
            }
        }
        within_a_day(&format!("{place}.hedge_after_ms"), self.hedge_after_ms)?;
        let Timeouts { connect_ms, first_token_ms, between_tokens_ms, attempt_ms } = self.timeouts;
        for (key, value) in [
            ("connect_ms", connect_ms),
            ("first_token_ms", first_token_ms),
            ("between_tokens_ms", between_tokens_ms),
            ("attempt_ms", attempt_ms),
        ] {
            within_a_day(&format!("{place}.timeouts.{key}"), Some(value))?;
        }
        at_least_one(&format!("{place}.max_output_tokens"), self.max_output_tokens)
    }
}

impl Endpoint {
    fn check(&self, place: &str) -> Result<(), ConfigError> {
        if self.model.is_empty() || self.model.len() > 100 || self.model.chars().any(char::is_control) {
            return Err(ConfigError::new(
                place,
                "no name for a model at a provider; use 1 to 100 bytes and no control characters",
            ));
        }
        within_a_day(&format!("{place}.first_token_ms"), self.first_token_ms)
    }
}

impl Kind {
    fn check(&self, name: &str, place: &str) -> Result<(), ConfigError> {
        if name == crate::prompt_kind::CHAT
            && (self.system.is_some() || self.user.is_some() || self.schema.is_some() || self.response_format.is_some())
        {
            return Err(ConfigError::new(
                place,
                "llm.chat takes the request as the payload; it can only set model, temperature, max_output_tokens, max_attempts, drop_payload, on_truncated and on_context_length",
            ));
        }
        if self.user.is_none() && name != crate::prompt_kind::SUMMARIZE && name != crate::prompt_kind::CHAT {
            return Err(ConfigError::new(
                format!("{place}.user"),
                "missing; write the user message, such as user = \"{{ text }}\"",
            ));
        }
        if self.temperature.is_some_and(|value| !(0.0..=2.0).contains(&value)) {
            return Err(ConfigError::new(format!("{place}.temperature"), "must be from 0 to 2"));
        }
        if self.response_format.is_some() && self.schema.is_none() {
            return Err(ConfigError::new(
                format!("{place}.response_format"),
                "has no meaning without schema; add a schema or remove it",
            ));
        }
        at_least_one(&format!("{place}.max_output_tokens"), self.max_output_tokens)?;
        at_least_one(&format!("{place}.max_attempts"), self.max_attempts.map(u64::from))
    }
}

fn within_a_day(place: &str, ms: Option<u64>) -> Result<(), ConfigError> {
    match ms {
        Some(0 | 86_400_001..) => Err(ConfigError::new(place, "must be from 1 to 86400000 (a day, in milliseconds)")),
        _ => Ok(()),
    }
}

fn at_least_one(place: &str, value: Option<u64>) -> Result<(), ConfigError> {
    if value == Some(0) { Err(ConfigError::new(place, "must be at least 1")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::secret::Secret;
    use std::path::Path;

    const GOOD: &str = r#"
        [providers.openai]
        base_url = "https://api.openai.com/v1"
        api_key_env = "OPENAI_API_KEY"
        headers = { "X-Title" = "posthouse", "api-key" = { env = "KEY" } }
        [models.small]
        route = [{ provider = "openai", model = "gpt-4o-mini" }]
        timeouts = { first_token_ms = 1000 }
        [kinds.translate]
        system = "Translate into {{ language }}."
        user = "{{ text }}"
        schema = { type = "object", required = ["text"] }
    "#;

    fn mistake(text: &str) -> String {
        Config::parse(text, Path::new("")).unwrap_err().to_string()
    }

    #[test]
    fn a_good_file() {
        let config = Config::parse(GOOD, Path::new("")).unwrap();
        assert_eq!(config.model_name(None).unwrap(), "small");
        let timeouts = config.models["small"].timeouts;
        assert_eq!((timeouts.first_token_ms, timeouts.connect_ms), (1000, 5000));
        assert!(!format!("{config:?}").contains("posthouse"), "header values may be secrets");
    }

    #[test]
    fn mistakes_name_the_key_and_the_cure() {
        let provider = "[providers.a]\nbase_url = \"http://x/v1\"\n";
        let model = format!("{provider}[models.m]\nprovider = \"a\"\n");
        for (text, expected) in [
            ("".to_owned(), "providers: no provider; add [providers.NAME]"),
            ("[providers.a]\nbase_url = \"x\"".to_owned(), "providers.a.base_url: not a URL"),
            ("[providers.a]\nbase_url = \"ftp://x\"".to_owned(), "providers.a.base_url: must begin with http"),
            ("[providers.a]\nurl = \"x\"".to_owned(), "line 2, url: unknown field `url`, expected one of `base_url`"),
            (
                "[providers.a]\nbase_url = \"http://x/v1/chat/completions/\"".to_owned(),
                "providers.a.base_url: must end before /chat/completions",
            ),
            (format!("{provider}proxy = \"nonsense\""), "providers.a.proxy: not the URL of an HTTP proxy"),
            (format!("{provider}proxy = \"socks5://x:1\""), "providers.a.proxy: not the URL of an HTTP proxy"),
            (
                format!("{provider}headers = {{ a = 5 }}"),
                "line 3, a: a header is a text, { env = \"NAME\" } or { file = \"PATH\" }",
            ),
            (format!("{provider}headers = {{ a = {{ env = \"A\", file = \"b\" }} }}"), "line 3, a: a header is"),
            (
                format!("{model}timeouts = {{ attempt_ms = -1 }}"),
                "line 5, attempt_ms: invalid value: integer `-1`, expected a whole number from 0 up",
            ),
            (format!("{model}timeouts = 5"), "line 5, timeouts: invalid type: integer `5`, expected a table"),
            (
                format!("{model}[kinds.k]\nuser = \"u\"\nschema = 5"),
                "line 7, schema: a schema is a table, or the name of a JSON file",
            ),
            (format!("{model}[kinds.llm.chat]\nmodel = \"m\""), "line 5: unknown field `chat`, expected one of"),
            (
                format!("{provider}[models.m]\nroute = [{{ provider = \"b\", model = \"x\" }}]"),
                "models.m.route: no provider \"b\"",
            ),
            (format!("{model}[kinds.\"\"]\nuser = \"u\""), "kinds.: no name for a kind"),
            (format!("{provider}api_key_env = \"A\"\napi_key_file = \"b\""), "providers.a.api_key_file: set either"),
            (provider.to_owned(), "models: no model; add [models.NAME]"),
            (format!("{provider}[models.m]"), "models.m: nobody to ask"),
            (
                format!("{provider}[models.m]\nprovider = \"b\""),
                "models.m.provider: no provider \"b\"; declared: a. Add [providers.b]",
            ),
            (
                format!("{model}route = [{{ provider = \"a\", model = \"x\" }}]"),
                "models.m: set either provider and model, or route",
            ),
            (format!("{model}timeouts = {{ attempt_ms = 0 }}"), "models.m.timeouts.attempt_ms: must be from 1"),
            (format!("{model}max_output_tokens = 0"), "models.m.max_output_tokens: must be at least 1"),
            (
                format!("{model}[models.n]\nprovider = \"a\""),
                "default_model: several models and no default; set default_model to one of: m, n",
            ),
            (format!("default_model = \"x\"\n{model}"), "default_model: no model \"x\"; declared: m"),
            (format!("{model}[kinds.k]\nuser = \"u\"\nmodel = \"x\""), "kinds.k.model: no model \"x\""),
            (format!("{model}[kinds.k]"), "kinds.k.user: missing"),
            (format!("{model}[kinds.k]\nuser = \"u\"\ntemperature = 3.0"), "kinds.k.temperature: must be from 0 to 2"),
            (
                format!("{model}[kinds.k]\nuser = \"u\"\nresponse_format = \"json_object\""),
                "kinds.k.response_format: has no meaning",
            ),
            (
                format!("{model}[kinds.\"llm.chat\"]\nuser = \"u\""),
                "kinds.llm.chat: llm.chat takes the request as the payload",
            ),
            (format!("{model}[kinds.k]\nuser = 5"), "line 6, user: invalid type: integer `5`, expected a string"),
        ] {
            let found = mistake(&text);
            assert!(found.starts_with(expected), "{found}\n  wanted: {expected}");
        }
    }

    #[test]
    fn mistakes_in_routes_name_the_key_and_the_cure() {
        let provider = "[providers.a]\nbase_url = \"http://x/v1\"\n";
        let model = format!("{provider}[models.m]\nprovider = \"a\"\n");
        for (text, expected) in [
            (
                "[providers.\"a/b\"]\nbase_url = \"http://x/v1\"".to_owned(),
                "providers.a/b: no name for a provider; use 1 to 80 bytes, no slash",
            ),
            (format!("{provider}[models.\"\"]\nprovider = \"a\""), "models.: no name for a model"),
            (format!("{model}hedge_after_ms = 0"), "models.m.hedge_after_ms: must be from 1 to 86400000"),
            (
                format!("{provider}[models.m]\nroute = [{{ provider = \"a\", model = \"x\", first_token_ms = 0 }}]"),
                "models.m.route.first_token_ms: must be from 1",
            ),
            (
                format!(
                    "{provider}[models.m]\nroute = [{{ provider = \"a\", model = \"x\" }}, {{ provider = \"a\", model = \"x\" }}]"
                ),
                "models.m.route: a/x stands there twice; keep one",
            ),
            (format!("{provider}[models.m]\nprovider = \"a\"\nmodel = \"\""), "models.m.model: no name for a model"),
            (
                format!("{model}[kinds.k]\nuser = \"u\"\non_context_length = \"x\""),
                "kinds.k.on_context_length: no model \"x\"; declared: m. Add [models.x]",
            ),
            (
                format!("{model}[kinds.k]\nuser = \"u\"\non_context_length = \"m\""),
                "kinds.k.on_context_length: is the kind's own model",
            ),
        ] {
            let found = mistake(&text);
            assert!(found.starts_with(expected), "{found}\n  wanted: {expected}");
        }
    }

    #[test]
    fn a_mistake_does_not_show_the_line_it_is_in() {
        for line in [
            "key = \"sk-secret-value\"",
            "api_key_env = sk-secret-value==",
            "api_key_env = 7sk-secret==",
            "sk-secret-value",
        ] {
            let found = mistake(&format!("[providers.a]\nbase_url = \"http://x\"\n{line}"));
            assert!(found.starts_with("line 3") && !found.contains("secret"), "{found}");
        }
    }

    #[test]
    fn one_endpoint_without_a_file() {
        let config = Config::single("http://127.0.0.1:9/v1", "m", Some(Secret::new("k"))).unwrap();
        assert_eq!(config.model_name(None).unwrap(), "default");
        assert!(Config::single("nonsense", "m", None).is_err());
    }
}
