//! The engine: everything of the configuration made ready once, shared by all calls of a process.

use crate::answer::Answer;
use crate::attempt::{Request, Walk};
use crate::config::{Config, ConfigError, Kind, list};
use crate::error::{CallError, ErrorClass};
use crate::gate::{DatabaseGates, EndpointGates, Gates};
use crate::meter::{CallMeter, families};
use crate::prompt_kind::{CHAT, Prompt, PromptKind, SUMMARIZE};
use crate::redact::Redactor;
use crate::route::{Model, models};
use crate::trail::Why;
use crate::transport::Environment;
use posthouse::metrics::{Family, Source};
use posthouse::store::Database;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// A gate may name a model that only some workers have, in the middle of a deployment say.
const UNKNOWN_MODEL_WAIT: Duration = Duration::from_secs(60);

/// Runs prompt kinds. Cheap to clone; all clones share connections and gates.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
    gates: Arc<Gates>,
}

#[derive(Debug)]
struct Inner {
    kinds: BTreeMap<String, PromptKind>,
    models: BTreeMap<String, Model>,
    redactor: Redactor,
}

/// What a call needs to know about the attempt it serves.
#[derive(Debug, Clone, Copy)]
pub struct Attempt<'a> {
    /// Which try of the job it is, from 1: it decides which endpoint of a route is asked first.
    pub number: u32,
    /// What is left of the job's own time. `None`: only the model's timeouts count.
    pub deadline: Option<Duration>,
    /// The job's id, for which a closed endpoint may be tried. 0: it is none of a queue.
    pub job: i64,
    /// The model to use instead of the one that the kind or the payload names, by the name of its section: a budget is spent.
    pub model: Option<&'a str>,
}

impl Default for Attempt<'_> {
    fn default() -> Self {
        Self { number: 1, deadline: None, job: 0, model: None }
    }
}

/// What the database has to know of a kind to keep its limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KindGates {
    /// The kind.
    pub kind: String,
    /// The gates that its jobs pass: `model:NAME`, of its own model. A job of `llm.chat` that names a model passes that one's instead.
    pub gates: Vec<String>,
    /// The most tokens that its answers have, where the kind or its model say so.
    pub max_output_tokens: Option<u64>,
    /// Whether the payload of a job goes when it is done or cancelled.
    pub drop_payload: bool,
}

impl Engine {
    /// Makes everything ready: reads keys, compiles templates and schemas, opens no connection.
    ///
    /// # Errors
    /// When a key is missing, or a template or schema is wrong. The error names the key.
    pub fn from_config(config: &Config) -> Result<Self, ConfigError> {
        Self::from_config_with(config, &|name| std::env::var(name).ok())
    }

    /// As `from_config`, with another source of environment variables.
    ///
    /// # Errors
    /// As `from_config`.
    pub fn from_config_with(config: &Config, environment: Environment<'_>) -> Result<Self, ConfigError> {
        let mut kinds = BTreeMap::new();
        for name in [SUMMARIZE, CHAT].into_iter().chain(config.kinds.keys().map(String::as_str)) {
            if !kinds.contains_key(name) {
                let kind = config.kinds.get(name).cloned().unwrap_or_else(Kind::default);
                kinds.insert(name.to_owned(), PromptKind::new(name, &kind, config)?);
            }
        }
        let mut secrets = Vec::new();
        let models = models(config, environment, &mut secrets)?;
        let inner = Inner { kinds, models, redactor: Redactor::new(&secrets) };
        Ok(Self { inner: Arc::new(inner), gates: Arc::default() })
    }

    /// The same engine with other gates of its endpoints: those of a database hold for the whole fleet ([`DatabaseGates`]). Without
    /// this, they hold for this engine and its clones.
    ///
    /// [`DatabaseGates`]: crate::DatabaseGates
    #[must_use]
    pub fn with_gates(self, gates: Arc<dyn EndpointGates>) -> Self {
        Self { gates: Arc::new(Gates::new(gates)), ..self }
    }

    /// The same engine as part of a fleet: says its routes and kinds to the database, so that jobs of a model whose endpoints are
    /// all closed are not claimed, and heeds what any worker was told by a provider. Of several configurations that say
    /// different things of one model or kind, the last to start counts.
    ///
    /// # Errors
    /// When the database cannot be asked, or refuses a name.
    pub async fn share(self, database: &Database) -> posthouse::Result<Self> {
        let store = database.store("setup");
        for (model, endpoints) in self.routes() {
            store.set_route(&model, &endpoints).await?;
        }
        for KindGates { kind, gates, max_output_tokens, drop_payload } in self.kind_gates() {
            let most = max_output_tokens.map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
            store.set_kind(&kind, &gates, most).await?;
            store.set_drop_payload(&kind, drop_payload).await?;
        }
        Ok(self.with_gates(Arc::new(DatabaseGates::new(database))))
    }

    /// The kinds it runs, sorted.
    #[must_use]
    pub fn kinds(&self) -> Vec<String> {
        self.inner.kinds.keys().cloned().collect()
    }

    /// The payload fields a kind takes; empty for `llm.chat`, which takes any. `None`: no such kind.
    #[must_use]
    pub fn fields(&self, kind: &str) -> Option<Vec<String>> {
        self.inner.kinds.get(kind).map(|kind| kind.takes().into_iter().collect())
    }

    /// The most attempts the configuration grants a kind, where it says so.
    #[must_use]
    pub fn max_attempts(&self, kind: &str) -> Option<u32> {
        self.inner.kinds.get(kind)?.max_attempts
    }

    /// The endpoints by which each model is asked, in order, as `PROVIDER/MODEL`: for `set_route`. Models have the names of their
    /// sections, and those that their endpoints know them under, since payloads of `llm.chat` may use either.
    #[must_use]
    pub fn routes(&self) -> Vec<(String, Vec<String>)> {
        let endpoints = |model: &Model| model.route.iter().map(|stop| stop.gate.name.clone()).collect();
        let models = &self.inner.models;
        let aliases =
            models.values().flat_map(|model| model.route.iter().map(move |stop| (&stop.endpoint.model, model)));
        let mut routes: BTreeMap<&String, &Model> = models.iter().collect();
        for (alias, model) in aliases {
            routes.entry(alias).or_insert(model);
        }
        routes.into_iter().map(|(name, model)| (name.clone(), endpoints(model))).collect()
    }

    /// The gates that jobs of each kind pass, and how long their answers can be: for `set_kind`.
    #[must_use]
    pub fn kind_gates(&self) -> Vec<KindGates> {
        let gates = |(name, kind): (&String, &PromptKind)| KindGates {
            kind: name.clone(),
            gates: vec![format!("model:{}", kind.model)],
            max_output_tokens: kind.max_output_tokens().or(self.inner.models[&kind.model].max_output_tokens),
            drop_payload: kind.drop_payload,
        };
        self.inner.kinds.iter().map(gates).collect()
    }

    /// What is counted of each endpoint, by its provider's name and the model's name there.
    pub(crate) fn meters(&self) -> impl Iterator<Item = ((&str, &str), &CallMeter)> {
        let stops = self.inner.models.values().flat_map(|model| &model.route);
        stops.map(|stop| (stop.asked(), &*stop.meter)).collect::<BTreeMap<_, _>>().into_iter()
    }

    /// What removes this engine's keys from a text.
    #[must_use]
    pub fn redactor(&self) -> &Redactor {
        &self.inner.redactor
    }

    /// Understands a payload without asking anybody: for checks at enqueue.
    ///
    /// # Errors
    /// As `run` would fail for a wrong kind, payload or model.
    pub fn check(&self, kind: &str, payload: &str) -> Result<(), Box<CallError>> {
        self.prepare(kind, payload).map(|_| ())
    }

    /// Runs one attempt: one HTTP request, but for endpoints that refuse or are too slow to begin, where the route goes on, and
    /// models that are hedged. Dropping the future drops the requests.
    ///
    /// # Errors
    /// `CallError`, whose class says what becomes of the job.
    pub async fn run(&self, kind: &str, payload: &str, attempt: Attempt<'_>) -> Result<Answer, Box<CallError>> {
        self.ask(self.request(kind, payload, attempt)?).await
    }

    /// Everything up to the moment before somebody is asked. The payload is of no more use afterwards.
    pub(crate) fn request(
        &self,
        kind: &str,
        payload: &str,
        attempt: Attempt<'_>,
    ) -> Result<Box<Request<'_>>, Box<CallError>> {
        let (kind, prompt, own) = self.prepare(kind, payload)?;
        let model = match attempt.model {
            Some(name) => self.instead(name)?,
            None => own,
        };
        let first = model.first(attempt.number);
        let why = match attempt.model {
            Some(_) => Why::Instead,
            None if first > 0 => Why::LaterAttempt,
            None => Why::First,
        };
        let stop = &model.route[first];
        let draft = kind.draft(prompt, &stop.endpoint, stop.transport.dialect, model.max_output_tokens);
        let larger = kind.larger.as_ref().map(|name| &self.inner.models[name]);
        let whole = model.timeouts.attempt();
        let time = attempt.deadline.map_or(whole, |deadline| deadline.min(whole));
        // Boxed, since it passes through several hands, each of which would hold room for it while the call lasts.
        Ok(Box::new(Request {
            kind,
            model,
            larger,
            first,
            why,
            draft,
            start: Instant::now(),
            time,
            job: attempt.job,
            seed: None,
        }))
    }

    /// Goes along the route, and makes an answer of what comes back.
    pub(crate) fn ask<'a>(
        &'a self,
        request: Box<Request<'a>>,
    ) -> impl Future<Output = Result<Answer, Box<CallError>>> + 'a {
        let mut walk = self.walk(request);
        async move { walk.run().await.map(|answer| *answer) }
    }

    pub(crate) fn walk<'a>(&'a self, request: Box<Request<'a>>) -> Walk<'a> {
        Walk::new(request, &self.gates, &self.inner.redactor)
    }

    fn prepare(&self, kind: &str, payload: &str) -> Result<(&PromptKind, Prompt, &Model), Box<CallError>> {
        let Some(kind) = self.inner.kinds.get(kind) else {
            let known = list(self.inner.kinds.keys());
            return Err(CallError::terminal(
                "unknown_kind",
                format!("unknown kind {kind:?}; this worker runs: {known}"),
            ));
        };
        let prompt = kind.prompt(payload)?;
        let model = match prompt.model.as_deref() {
            Some(name) => self.model(name)?,
            None => self.model(&kind.model)?,
        };
        Ok((kind, prompt, model))
    }

    /// The model that a gate names for when its budget is spent. A worker that does not know it leaves the job to others.
    fn instead(&self, name: &str) -> Result<&Model, Box<CallError>> {
        self.model(name).map_err(|mut error| {
            error.class = ErrorClass::NotNow;
            error.wait = Some(UNKNOWN_MODEL_WAIT);
            error.message =
                format!("a budget is spent, and the model that its gate names instead is not here: {}", error.message);
            error
        })
    }

    /// A model by its name here, or by a name that some endpoint of ours knows it under.
    fn model(&self, name: &str) -> Result<&Model, Box<CallError>> {
        let models = &self.inner.models;
        let serves = |model: &&Model| model.route.iter().any(|stop| stop.endpoint.model == name);
        models.get(name).or_else(|| models.values().find(serves)).ok_or_else(|| {
            let known = list(models.keys());
            CallError::terminal("unknown_model", format!("unknown model {name:?}; configured: {known}. Add [models.{name:?}] or leave \"model\" out for the default"))
        })
    }
}

/// Calls to providers, their tokens and cost.
impl Source for Engine {
    fn families(&self) -> Vec<Family> {
        families(self.meters())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Thousands of calls wait at the same time, most of them for the first byte of an answer.
    #[test]
    fn a_call_that_waits_is_small_and_holds_its_prompt_once() {
        let config = Config::single("http://127.0.0.1:1/v1", "m", None).unwrap();
        let engine = Engine::from_config(&config).unwrap();
        let payload = format!(r#"{{"text":"{}"}}"#, "x".repeat(10_000));
        let request = engine.request(SUMMARIZE, &payload, Attempt::default()).unwrap();
        assert!((10_000..11_000).contains(&request.draft.text.len()), "{}", request.draft.text.len());
        let call = engine.ask(request);
        assert!(size_of_val(&call) < 2_000, "{}", size_of_val(&call));
    }
}
