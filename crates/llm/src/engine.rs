//! The engine: everything of the configuration made ready once, shared by all calls of a process.

use crate::answer::Answer;
use crate::call::{call, millis};
use crate::clock::Clock;
use crate::config::{Config, ConfigError, Endpoint, Kind, Timeouts, list};
use crate::error::{CallError, ErrorClass};
use crate::gate::{Gate, Pass, Reason, TurnedAway};
use crate::judge::judge;
use crate::price::{Prices, Quote};
use crate::prompt_kind::{CHAT, Expected, Prompt, PromptKind, SUMMARIZE};
use crate::redact::Redactor;
use crate::secret::Secret;
use crate::transport::{Environment, Transport, tls_config};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Runs prompt kinds. Cheap to clone; all clones share connections and gates.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    kinds: BTreeMap<String, PromptKind>,
    models: BTreeMap<String, Model>,
    redactor: Redactor,
}

#[derive(Debug)]
struct Model {
    route: Vec<Stop>,
    timeouts: Timeouts,
    max_output_tokens: Option<u64>,
}

/// One endpoint of a route, ready to be asked.
#[derive(Debug)]
struct Stop {
    endpoint: Endpoint,
    transport: Arc<Transport>,
    gate: Arc<Gate>,
    credit_pause: Duration,
    price: Quote,
}

/// What a call needs to know about the attempt it serves.
#[derive(Debug, Clone, Copy)]
pub struct Attempt {
    /// Which try of the job it is, from 1: it decides which endpoint of a route is asked.
    pub number: u32,
    /// What is left of the job's own time. `None`: only the model's timeouts count.
    pub deadline: Option<Duration>,
}

impl Default for Attempt {
    fn default() -> Self {
        Self { number: 1, deadline: None }
    }
}

/// A request that is ready to be sent, with leave to send it.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    kind: &'a PromptKind,
    stop: &'a Stop,
    pass: Pass<'a>,
    body: String,
    expected: Expected,
    clock: Clock,
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
        Ok(Self { inner: Arc::new(Inner { kinds, models, redactor: Redactor::new(&secrets) }) })
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

    /// Runs one attempt: at most one HTTP request. Dropping the future drops the request.
    ///
    /// # Errors
    /// `CallError`, whose class says what becomes of the job.
    pub async fn run(&self, kind: &str, payload: &str, attempt: Attempt) -> Result<Answer, Box<CallError>> {
        self.ask(self.request(kind, payload, attempt)?).await
    }

    /// Everything up to the moment before the request is sent. The payload is of no more use afterwards.
    pub(crate) fn request(&self, kind: &str, payload: &str, attempt: Attempt) -> Result<Request<'_>, Box<CallError>> {
        let (kind, prompt, model) = self.prepare(kind, payload)?;
        let (stop, pass) = model.choose(attempt.number)?;
        let (body, expected) = kind.request(prompt, &stop.endpoint, stop.transport.dialect, model.max_output_tokens);
        let clock = Clock::start(model.timeouts, attempt.deadline);
        Ok(Request { kind, stop, pass, body, expected, clock })
    }

    /// Sends the request and makes an answer of what comes back.
    pub(crate) async fn ask(&self, request: Request<'_>) -> Result<Answer, Box<CallError>> {
        let Request { kind, stop, pass, body, expected, clock } = request;
        let received = call(&stop.transport, (body, expected.choices), clock, &pass, &self.inner.redactor).await;
        let asked = (stop.endpoint.provider.as_str(), stop.endpoint.model.as_str());
        let outcome = received.and_then(|received| judge(received, expected, kind, asked, &self.inner.redactor));
        let priced = outcome.map(|mut answer| {
            stop.price.fill(&mut answer.usage, Some(&answer.model));
            answer
        });
        priced.inspect(log_answer).map_err(|mut error| {
            stop.price.fill(&mut error.usage, None);
            error.endpoint = Some(asked.0.to_owned());
            error.model = Some(asked.1.to_owned());
            stop.heed(&pass, &mut error);
            tracing::info!(endpoint = asked.0, model = asked.1, class = %error.class, code = error.code, status = error.status, latency_ms = error.latency_ms, "call failed: {error}");
            error
        })
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

fn log_answer(answer: &Answer) {
    tracing::debug!(
        endpoint = answer.endpoint,
        model = answer.model,
        latency_ms = answer.latency_ms,
        first_token_ms = answer.first_token_ms,
        input_tokens = answer.usage.input_tokens,
        output_tokens = answer.usage.output_tokens,
        "call answered"
    );
}

impl Model {
    /// The endpoint for this attempt: each attempt starts one further along the route, and closed gates are passed by.
    fn choose(&self, attempt: u32) -> Result<(&Stop, Pass<'_>), Box<CallError>> {
        let first = attempt.saturating_sub(1) as usize % self.route.len();
        let mut soonest: Option<(&Stop, TurnedAway)> = None;
        for stop in self.route[first..].iter().chain(&self.route[..first]) {
            match stop.gate.enter() {
                Ok(pass) => return Ok((stop, pass)),
                Err(away) => {
                    if soonest.as_ref().is_none_or(|(_, other)| away.wait < other.wait) {
                        soonest = Some((stop, away));
                    }
                }
            }
        }
        let (stop, away) = soonest.expect("a route has at least one endpoint, checked with the configuration");
        let Endpoint { provider, model } = &stop.endpoint;
        let message = format!("not asked: {provider} said for {model} a moment ago: {}", away.reason.message);
        let mut error = CallError::new(ErrorClass::NotNow, &away.reason.code, message);
        error.wait = Some(away.wait);
        error.endpoint = Some(provider.clone());
        error.model = Some(model.clone());
        Err(error)
    }
}

impl Stop {
    /// Lets the gate know what the provider said, and the job how long to wait.
    fn heed(&self, pass: &Pass<'_>, error: &mut CallError) {
        let reason = || Reason { code: error.code.clone(), message: error.to_string() };
        match error.class {
            ErrorClass::NotNow => error.wait = Some(pass.refused(error.wait, reason())),
            ErrorClass::OutOfCredit => {
                pass.refused(Some(self.credit_pause), reason());
                tracing::warn!(
                    endpoint = self.endpoint.provider,
                    pause_ms = millis(self.credit_pause),
                    "out of credit, endpoint paused: {error}"
                );
            }
            // Any other answer shows that the provider takes calls; no answer shows nothing.
            _ if error.status.is_some() => pass.taken(),
            _ => {}
        }
    }
}

fn models(
    config: &Config,
    environment: Environment<'_>,
    secrets: &mut Vec<Secret>,
) -> Result<BTreeMap<String, Model>, ConfigError> {
    let tls = tls_config()?;
    let prices = Prices::from_config(config)?;
    let mut transports: BTreeMap<(String, u64), Arc<Transport>> = BTreeMap::new();
    let mut gates: BTreeMap<(String, String), Arc<Gate>> = BTreeMap::new();
    let mut models = BTreeMap::new();
    for (name, model) in &config.models {
        let mut route = Vec::new();
        for endpoint in model.endpoints(name) {
            let provider = &config.providers[&endpoint.provider];
            let key = (endpoint.provider.clone(), model.timeouts.connect_ms);
            let transport = match transports.get(&key) {
                Some(transport) => transport.clone(),
                None => {
                    let sources = (environment, config.folder.as_path());
                    let made =
                        Transport::new(&endpoint.provider, provider, model.timeouts.connect(), &tls, sources, secrets)?;
                    transports.entry(key).or_insert(Arc::new(made)).clone()
                }
            };
            let gate = gates.entry((endpoint.provider.clone(), endpoint.model.clone())).or_default().clone();
            route.push(Stop {
                price: prices.quote(name, &endpoint),
                endpoint,
                transport,
                gate,
                credit_pause: Duration::from_millis(provider.credit_pause_ms),
            });
        }
        models.insert(
            name.clone(),
            Model { route, timeouts: model.timeouts, max_output_tokens: model.max_output_tokens },
        );
    }
    Ok(models)
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
        assert!((10_000..11_000).contains(&request.body.capacity()), "{}", request.body.capacity());
        let call = engine.ask(request);
        assert!(size_of_val(&call) < 1_500, "{}", size_of_val(&call));
    }
}
