//! The configuration of LLM work: who is asked (providers), for what (models), and how (prompt kinds).
//!
//! It is read from `posthouse.toml`, or made for one endpoint without a file. This file holds the shape and its checks;
//! nothing here reads keys (that happens once, in `Engine::from_config`). Every mistake names the key and what to do.
//!
//! ```toml
//! [providers.openai]
//! base_url = "https://api.openai.com/v1"
//! api_key_env = "OPENAI_API_KEY"
//!
//! [models.small]
//! provider = "openai"
//! model = "gpt-4o-mini"
//!
//! [kinds.translate]
//! model = "small"
//! system = "Translate into {{ language }}. Answer with the translation only."
//! user = "{{ text }}"
//! ```

pub mod alerts;
mod check;
mod error;
pub mod gates;
mod mistakes;
pub mod prices;
pub mod schedules;

use crate::secret::Secret;
pub use error::ConfigError;
use prices::{ModelPrice, PriceSource};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The whole configuration.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The model of kinds that name none. Default: the only model, or the one called `default`.
    pub default_model: Option<String>,
    /// Endpoints, by name.
    #[serde(default)]
    pub providers: BTreeMap<String, Provider>,
    /// Models, by the name that kinds use.
    #[serde(default)]
    pub models: BTreeMap<String, Model>,
    /// Prompt kinds, by the name that jobs use. `summarize` and `llm.chat` exist without being declared.
    #[serde(default)]
    pub kinds: BTreeMap<String, Kind>,
    /// Prices that the models themselves do not tell. Default: none.
    #[serde(default)]
    pub prices: PriceSource,
    /// Limits that jobs pass, by the names of gates. Workers set those that the database does not know yet. A file with nothing else
    /// is one too.
    #[serde(default)]
    pub gates: BTreeMap<String, gates::Gate>,
    /// Cron rules that enqueue, by name. Workers set those that the database does not know yet. A file with nothing else is one too.
    #[serde(default)]
    pub schedules: BTreeMap<String, schedules::Schedule>,
    /// The webhook that alerts go to, and when they are raised. A file with nothing else is one too.
    pub alerts: Option<alerts::Alerts>,
    /// The folder against which file names are resolved.
    #[serde(skip)]
    pub folder: PathBuf,
}

/// An OpenAI-compatible endpoint.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Provider {
    /// The address up to and including the version, such as `https://api.openai.com/v1`. A query string is kept.
    pub base_url: String,
    /// The environment variable that holds the key. Sent as `Authorization: Bearer …`.
    pub api_key_env: Option<String>,
    /// The file that holds the key, for secrets mounted as files. Not together with `api_key_env`.
    pub api_key_file: Option<PathBuf>,
    /// Further headers: a text, or `{ env = "NAME" }`, or `{ file = "PATH" }`.
    #[serde(default)]
    pub headers: BTreeMap<String, HeaderSource>,
    /// The name of the token limit in requests. Default: `max_completion_tokens` for OpenAI and Azure, else `max_tokens`.
    pub max_tokens_field: Option<MaxTokensField>,
    /// Whether to ask for usage in streams. Default true; turn it off for servers that reject `stream_options`.
    #[serde(default = "yes")]
    pub stream_usage: bool,
    /// The header by which the provider knows a call again that may have been billed without an answer. Default: `Idempotency-Key` for
    /// OpenAI and for what runs on this machine, else none; `none` for none.
    pub idempotency_header: Option<String>,
    /// How long nobody asks for a model here after the account was found empty, in milliseconds. Default 300,000. Only without a
    /// database; with one, the endpoint stays closed until somebody opens it.
    #[serde(default = "five_minutes")]
    pub credit_pause_ms: u64,
    /// A proxy: its URL, or `env` for `HTTPS_PROXY` and its relatives. Default: none, whatever the environment says.
    pub proxy: Option<String>,
    /// Whether the key is part of the names of this provider's gates. Default false: what the provider says to one worker holds for
    /// all that have a provider of this name. Turn it on where workers have different keys (accounts) under the same name.
    #[serde(default)]
    pub gate_by_key: bool,
    /// The key itself, for programs that have it already. Not readable from a file.
    #[serde(skip)]
    pub api_key: Option<Secret>,
}

/// Where a header's value comes from.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, deny_unknown_fields, expecting = "a header is a text, { env = \"NAME\" } or { file = \"PATH\" }")]
pub enum HeaderSource {
    /// The value itself.
    Value(Secret),
    /// An environment variable.
    Env {
        /// Its name.
        env: String,
    },
    /// A file.
    File {
        /// Its path.
        file: PathBuf,
    },
}

/// The two names that servers know for the token limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaxTokensField {
    /// Understood by nearly all compatible servers, refused by OpenAI's reasoning models.
    MaxTokens,
    /// OpenAI's newer name.
    MaxCompletionTokens,
}

impl MaxTokensField {
    /// The name as it stands in the request.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::MaxTokens => "max_tokens",
            Self::MaxCompletionTokens => "max_completion_tokens",
        }
    }
}

/// A model: where to ask for it and how long to wait.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Short for a route of one endpoint: the provider.
    pub provider: Option<String>,
    /// Short for a route of one endpoint: the model's name there. Default: the name of this section.
    pub model: Option<String>,
    /// Endpoints in order of preference. Attempt 1 begins with the first, each further attempt one later, and around. Within an
    /// attempt the next one is asked when one is closed, says "not now", has no credit left, or is too slow to begin.
    #[serde(default)]
    pub route: Vec<Endpoint>,
    /// Ask a second time when no first token came for so long, in milliseconds: at the next open endpoint, else at the same. The
    /// first to begin an answer is heard out, the other is cut off, and paid for where the provider does so. Default: never.
    pub hedge_after_ms: Option<u64>,
    /// The token limit of an answer, for kinds that set none. Default: none is sent.
    pub max_output_tokens: Option<u64>,
    /// How long to wait for what.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// What it costs, at each of its endpoints. Default: what the price file says. The provider's own word wins over both.
    pub price: Option<ModelPrice>,
}

/// One place where a model is served.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// The provider's name.
    pub provider: String,
    /// The model's name there.
    pub model: String,
    /// How long to wait for the first token here before the next open endpoint is asked instead, in milliseconds. Where none is
    /// open, the model's own `first_token_ms` counts. Default: as long as that.
    pub first_token_ms: Option<u64>,
}

/// The four clocks of a call, in milliseconds. What a provider needs in bad times, not in good ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// To connect, TLS included. Default 5,000, as in the official clients.
    pub connect_ms: u64,
    /// From the start to the first content; keep-alive bytes are none. Default 180,000: reasoning models think silently for minutes.
    pub first_token_ms: u64,
    /// Between two pieces of content. Default 60,000.
    pub between_tokens_ms: u64,
    /// For the whole attempt. Default 600,000, as in the official clients. The job's own timeout can only shorten it.
    pub attempt_ms: u64,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { connect_ms: 5_000, first_token_ms: 180_000, between_tokens_ms: 60_000, attempt_ms: 600_000 }
    }
}

impl Timeouts {
    pub(crate) fn connect(&self) -> Duration {
        Duration::from_millis(self.connect_ms)
    }
    pub(crate) fn first_token(&self) -> Duration {
        Duration::from_millis(self.first_token_ms)
    }
    pub(crate) fn between_tokens(&self) -> Duration {
        Duration::from_millis(self.between_tokens_ms)
    }
    pub(crate) fn attempt(&self) -> Duration {
        Duration::from_millis(self.attempt_ms)
    }
}

/// A prompt kind: templates over the payload's fields.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Kind {
    /// The model, by the name of its section. Default: the default model.
    pub model: Option<String>,
    /// Template of the system message. Default: no system message.
    pub system: Option<String>,
    /// Template of the user message.
    pub user: Option<String>,
    /// JSON schema of the answer: an inline table, or the name of a JSON file beside this one (which keeps the order of
    /// properties, in which some providers generate).
    pub schema: Option<SchemaSource>,
    /// How the provider is told about the schema. Default `json_schema`.
    pub response_format: Option<ResponseFormat>,
    /// Sampling temperature. Default: none is sent, since some models refuse any.
    pub temperature: Option<f64>,
    /// The token limit of the answer. Default: the model's.
    pub max_output_tokens: Option<u64>,
    /// The most attempts a job of this kind gets, where that is less than the job's own number.
    pub max_attempts: Option<u32>,
    /// Whether the payload of a job goes when it is done or cancelled, where nobody needs it any more. A dead letter keeps it, so
    /// that it can be redriven. Default `false`.
    #[serde(default)]
    pub drop_payload: bool,
    /// What to do with a text cut by the token limit. Default `accept`: it is stored, marked `truncated`.
    /// JSON answers and empty ones always fail.
    #[serde(default)]
    pub on_truncated: OnTruncated,
    /// The model to ask instead, at once and in the same attempt, when the context is too long for the kind's own: by the name of its
    /// section. Default: the job fails.
    pub on_context_length: Option<String>,
}

/// Where a schema comes from.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "a schema is a table, or the name of a JSON file")]
pub enum SchemaSource {
    /// A file.
    File(PathBuf),
    /// An inline table.
    Inline(toml::Table),
}

/// How a provider is told that JSON is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseFormat {
    /// `response_format` with the schema itself.
    #[default]
    JsonSchema,
    /// `response_format` asking for any JSON object.
    JsonObject,
    /// Nothing is sent: the templates ask for it.
    None,
}

/// What to do with an answer cut by the token limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTruncated {
    /// Store it, marked `truncated`.
    #[default]
    Accept,
    /// Fail the job, with class `truncated`.
    Fail,
}

fn yes() -> bool {
    true
}

fn five_minutes() -> u64 {
    300_000
}

/// The section name used by `Config::single`.
const SINGLE: &str = "default";

impl Config {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// When the file cannot be read, is no TOML, has an unknown or wrong key, or does not hang together.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let place = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| {
            let cure = match error.kind() {
                std::io::ErrorKind::InvalidData => "Save it as UTF-8",
                _ => "Check the path given with --config",
            };
            ConfigError::new(&place, format!("cannot be read: {error}. {cure}"))
        })?;
        let folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        Self::parse(&text, &folder)
            .map_err(|error| ConfigError::new(format!("{place}: {}", error.place), error.problem))
    }

    /// Reads and checks a text. File names in it are relative to `folder`.
    ///
    /// # Errors
    /// As `load`.
    pub fn parse(text: &str, folder: &Path) -> Result<Self, ConfigError> {
        // A TOML error shows the line it is about; a line that sets a key or header may hold a secret, so only its message is used.
        let mut config: Self = toml::from_str(text)
            .map_err(|error| ConfigError::new(mistakes::place(&error, text), mistakes::problem(&error)))?;
        config.folder = folder.to_path_buf();
        config.check()?;
        Ok(config)
    }

    /// One endpoint and one model, no file: what `--provider-url URL --model M` means.
    ///
    /// # Errors
    /// When the URL is none.
    pub fn single(base_url: &str, model: &str, api_key: Option<Secret>) -> Result<Self, ConfigError> {
        let provider = Provider {
            base_url: base_url.to_owned(),
            api_key_env: None,
            api_key_file: None,
            headers: BTreeMap::new(),
            max_tokens_field: None,
            stream_usage: true,
            idempotency_header: None,
            credit_pause_ms: five_minutes(),
            proxy: None,
            gate_by_key: false,
            api_key,
        };
        let endpoint = Endpoint { provider: SINGLE.to_owned(), model: model.to_owned(), first_token_ms: None };
        let model = Model { route: vec![endpoint], ..Model::default() };
        let config = Self {
            providers: BTreeMap::from([(SINGLE.to_owned(), provider)]),
            models: BTreeMap::from([(SINGLE.to_owned(), model)]),
            ..Self::default()
        };
        config.check()?;
        Ok(config)
    }

    /// Whether it is about alerts, gates or schedules and about no model: a worker of it runs no prompts.
    #[must_use]
    pub fn asks_nobody(&self) -> bool {
        let says_something = self.alerts.is_some() || !self.gates.is_empty() || !self.schedules.is_empty();
        says_something && self.providers.is_empty() && self.models.is_empty() && self.kinds.is_empty()
    }

    /// The key for `single` from `POSTHOUSE_API_KEY`, else `OPENAI_API_KEY`; local servers need none.
    #[must_use]
    pub fn key_from_environment() -> Option<Secret> {
        ["POSTHOUSE_API_KEY", "OPENAI_API_KEY"]
            .iter()
            .find_map(|name| std::env::var(name).ok().filter(|key| !key.trim().is_empty()))
            .map(|key| Secret::new(&key))
    }

    /// The name of the model that a kind uses, or of the default.
    ///
    /// # Errors
    /// When there is no such model, or none is named and there is no default.
    pub fn model_name(&self, wanted: Option<&str>) -> Result<&str, ConfigError> {
        let declared = || list(self.models.keys());
        if let Some(name) = wanted.or(self.default_model.as_deref()) {
            let place = if wanted.is_some() { "model" } else { "default_model" };
            return self.models.get_key_value(name).map(|(name, _)| name.as_str()).ok_or_else(|| {
                ConfigError::new(
                    place,
                    format!("no model {name:?}; declared: {}. Add [models.{name}] or fix the name", declared()),
                )
            });
        }
        match self.models.keys().next() {
            Some(only) if self.models.len() == 1 => Ok(only),
            Some(_) if self.models.contains_key(SINGLE) => Ok(SINGLE),
            Some(_) => Err(ConfigError::new(
                "default_model",
                format!("several models and no default; set default_model to one of: {}", declared()),
            )),
            None => Err(ConfigError::new("models", "no model; add [models.NAME] with provider and model")),
        }
    }
}

impl Model {
    /// The endpoints to ask, in order.
    #[must_use]
    pub fn endpoints(&self, name: &str) -> Vec<Endpoint> {
        match &self.provider {
            Some(provider) => {
                vec![Endpoint {
                    provider: provider.clone(),
                    model: self.model.clone().unwrap_or_else(|| name.to_owned()),
                    first_token_ms: None,
                }]
            }
            None => self.route.clone(),
        }
    }
}

/// Names for a message, or "none".
pub(crate) fn list<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let names: Vec<&str> = names.map(String::as_str).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
