//! Where an attempt went, and why: noted as it goes, stored with the job's usage.

use serde::Serialize;
use serde_json::{Value, json};

/// Where an attempt went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trail {
    /// Requests that were sent. 0: nobody was asked.
    pub requests: u32,
    /// Whether a second request was sent because the first was slow to begin (`hedge_after_ms`).
    pub hedged: bool,
    /// The endpoints that were thought of, in order.
    pub route: Vec<Visit>,
}

/// One endpoint that was thought of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Visit {
    /// The provider's name in the configuration.
    pub endpoint: String,
    /// The model's name there.
    pub model: String,
    /// Why it was thought of.
    pub why: Why,
    /// What came of it.
    pub class: &'static str,
}

/// Why an endpoint was thought of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// It is the first of its route.
    First,
    /// An earlier attempt failed, so this one begins further along.
    LaterAttempt,
    /// The one before was closed, refused, or was too slow to begin.
    Next,
    /// The one before was slow to begin, and is waited for all the same.
    Hedge,
    /// The context was too long for the model before.
    ContextLength,
    /// A gate's budget is spent, and it names this model to use instead.
    Instead,
}

/// What comes of an endpoint beside the classes of errors.
pub(crate) const OK: &str = "ok";
/// It was not asked, since its gate is closed.
pub(crate) const CLOSED: &str = "closed";
/// It was given up, since no token came in the time its endpoint has.
pub(crate) const SLOW: &str = "slow";
/// It was cut off, since another request began to answer first.
pub(crate) const DROPPED: &str = "dropped";

impl Trail {
    pub(crate) fn note(&mut self, (endpoint, model): (&str, &str), why: Why, class: &'static str) {
        self.route.push(Visit { endpoint: endpoint.to_owned(), model: model.to_owned(), why, class });
    }

    /// Adds `requests`, `hedged` and `route` to the usage of an attempt.
    pub(crate) fn add_to(&self, usage: &mut Value) {
        usage["requests"] = self.requests.into();
        usage["hedged"] = self.hedged.into();
        usage["route"] = json!(self.route);
    }
}
