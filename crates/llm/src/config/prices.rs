//! What `posthouse.toml` may say about prices: of a model, or where a file with prices is.

use crate::price::Amount;
use serde::Deserialize;
use std::path::PathBuf;

/// What a model costs, as `[models.NAME.price]` says it: US dollars for a million tokens, as decimal text or as numbers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelPrice {
    /// A million tokens of prompt.
    pub input: Amount,
    /// A million tokens of answer, reasoning included.
    pub output: Amount,
    /// A million tokens of prompt that came from the provider's cache. Default: as `input`.
    pub cached_input: Option<Amount>,
    /// Each request that was answered, whatever its tokens. Default: nothing.
    pub per_request: Option<Amount>,
}

/// `[prices]`: where prices come from that the models do not tell.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PriceSource {
    /// A JSON file in the shape of LiteLLM's `model_prices_and_context_window.json`, relative to the configuration.
    pub file: Option<PathBuf>,
}
