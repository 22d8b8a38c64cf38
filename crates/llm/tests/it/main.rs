//! The whole crate over real HTTP, against the simulated provider: one request per attempt, every class, every clock.
#![allow(clippy::unwrap_used)]

mod answers;
mod failures;
mod fleet;
mod gates;
mod idempotency;
mod prices;
mod queue;
mod routes;
mod simulator;
mod timeouts;
mod wire;

use posthouse_llm::sim::{Fault, Script, Sim, Step};
use posthouse_llm::{Answer, Attempt, CallError, Config, Engine, ErrorClass};
use std::path::Path;
use std::time::Duration;

/// A key that must never be seen anywhere but in the Authorization header.
pub(crate) const KEY: &str = "sk-test-0123456789abcdef";

/// A simulated provider and an engine that asks it.
pub(crate) struct Pair {
    pub(crate) sim: Sim,
    pub(crate) engine: Engine,
}

impl Pair {
    pub(crate) async fn new(script: impl Into<Script>) -> Self {
        Self::with(script, "", "").await
    }

    /// With further keys for the model section, and further sections.
    pub(crate) async fn with(script: impl Into<Script>, model_keys: &str, sections: &str) -> Self {
        let sim = Sim::start(script.into()).await.unwrap();
        let engine = engine(&sim.base_url(), model_keys, sections);
        Self { sim, engine }
    }

    pub(crate) async fn summarize(&self, text: &str) -> Result<Answer, Box<CallError>> {
        self.run("summarize", &serde_json::json!({ "text": text }).to_string()).await
    }

    pub(crate) async fn run(&self, kind: &str, payload: &str) -> Result<Answer, Box<CallError>> {
        within(self.engine.run(kind, payload, Attempt::default())).await
    }

    /// Runs one that must fail, and checks that it cost exactly one request.
    pub(crate) async fn fails(&self) -> Box<CallError> {
        let before = self.sim.stats().requests;
        let error = self.summarize("One. Two.").await.unwrap_err();
        assert_eq!(self.sim.stats().requests, before + 1, "one attempt is one request");
        error
    }
}

pub(crate) fn engine(base_url: &str, model_keys: &str, sections: &str) -> Engine {
    let text = format!(
        "[providers.sim]\nbase_url = \"{base_url}\"\napi_key_env = \"KEY\"\ncredit_pause_ms = 60000\n\
         [models.m]\nprovider = \"sim\"\nmodel = \"up\"\n{model_keys}\n{sections}"
    );
    let config = Config::parse(&text, Path::new("")).unwrap();
    Engine::from_config_with(&config, &|name| (name == "KEY").then(|| KEY.to_owned())).unwrap()
}

/// No test waits longer than this for anything.
pub(crate) async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), work).await.expect("it took more than 20 seconds")
}

/// Waits until a condition holds.
pub(crate) async fn until(what: &str, condition: impl Fn() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(tokio::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn step(text: &str) -> Script {
    Script { steps: vec![text.parse::<Step>().unwrap()], ..Script::default() }
}

#[track_caller]
#[allow(clippy::borrowed_box)] // callers have a box and no wish to see it
pub(crate) fn assert_error(error: &Box<CallError>, class: ErrorClass, code: &str, status: Option<u16>) {
    assert_eq!((error.class, error.code.as_str(), error.status), (class, code, status), "{error:?}");
    let shown = format!("{error} {error:?} {}", error.to_json());
    assert!(!shown.contains(KEY) && !shown.contains('\0'), "{shown}");
    assert!(error.body_snippet.as_ref().is_none_or(|snippet| snippet.len() <= 2048));
}

pub(crate) fn fault(fault: Fault) -> Script {
    fault.into()
}
