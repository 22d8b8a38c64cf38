//! Routes: the endpoints of each model, ready to be asked, in order of preference.

use crate::config::{Config, ConfigError, Endpoint, Timeouts};
use crate::gate::EndpointGate;
use crate::meter::CallMeter;
use crate::price::{Prices, Quote};
use crate::secret::Secret;
use crate::transport::{Environment, Transport, tls_config};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A model, ready to be asked.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) route: Vec<Stop>,
    pub(crate) timeouts: Timeouts,
    pub(crate) hedge_after: Option<Duration>,
    pub(crate) max_output_tokens: Option<u64>,
}

/// One endpoint of a route.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) endpoint: Endpoint,
    pub(crate) transport: Arc<Transport>,
    pub(crate) gate: Arc<EndpointGate>,
    pub(crate) credit_pause: Duration,
    pub(crate) price: Quote,
    pub(crate) meter: Arc<CallMeter>,
}

impl Model {
    /// The endpoints from one on, and around.
    pub(crate) fn stops_from(&self, first: usize) -> impl Iterator<Item = &Stop> {
        self.route[first..].iter().chain(&self.route[..first])
    }

    /// The endpoint that an attempt begins with: each attempt begins one further along.
    pub(crate) fn first(&self, attempt: u32) -> usize {
        attempt.saturating_sub(1) as usize % self.route.len()
    }
}

impl Stop {
    /// Who is asked, and for what.
    pub(crate) fn asked(&self) -> (&str, &str) {
        (&self.endpoint.provider, &self.endpoint.model)
    }

    /// The gate's name among all gates.
    pub(crate) fn gate_name(&self) -> String {
        format!("endpoint:{}", self.gate.name)
    }

    /// How long to wait for a first token before the next endpoint is asked.
    pub(crate) fn first_token(&self) -> Option<Duration> {
        self.endpoint.first_token_ms.map(Duration::from_millis)
    }
}

/// Makes the models ready. The secrets found go to `secrets`, for redaction.
pub(crate) fn models(
    config: &Config,
    environment: Environment<'_>,
    secrets: &mut Vec<Secret>,
) -> Result<BTreeMap<String, Model>, ConfigError> {
    let tls = tls_config()?;
    let prices = Prices::from_config(config)?;
    let mut transports: BTreeMap<(String, u64), Arc<Transport>> = BTreeMap::new();
    let mut gates: BTreeMap<(String, String), Arc<EndpointGate>> = BTreeMap::new();
    let mut meters: BTreeMap<(String, String), Arc<CallMeter>> = BTreeMap::new();
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
            let names = (endpoint.provider.clone(), endpoint.model.clone());
            let meter = meters.entry(names.clone()).or_default().clone();
            let gate = gates.entry(names).or_insert_with(|| {
                let key = transport.key_mark.as_deref().filter(|_| provider.gate_by_key);
                Arc::new(EndpointGate::new(gate_name(&endpoint, key)))
            });
            route.push(Stop {
                price: prices.quote(name, &endpoint),
                gate: gate.clone(),
                meter,
                endpoint,
                transport,
                credit_pause: Duration::from_millis(provider.credit_pause_ms),
            });
        }
        let hedge_after = model.hedge_after_ms.map(Duration::from_millis);
        let (timeouts, max_output_tokens) = (model.timeouts, model.max_output_tokens);
        models.insert(name.clone(), Model { route, timeouts, hedge_after, max_output_tokens });
    }
    Ok(models)
}

/// `PROVIDER/MODEL`, or `PROVIDER@KEY/MODEL` where workers have different keys.
fn gate_name(endpoint: &Endpoint, key: Option<&str>) -> String {
    match key {
        Some(key) => format!("{}@{key}/{}", endpoint.provider, endpoint.model),
        None => format!("{}/{}", endpoint.provider, endpoint.model),
    }
}
