//! What calls cost: prices from `posthouse.toml` and from an imported price file, and the exact cost of a call by them.
//!
//! The provider's own word on the cost of a call wins. Else `[models.NAME.price]` counts for all endpoints of that model, else
//! the price file, looked up as `PROVIDER/MODEL`, then `MODEL`, then the same with the model that answered. Where nothing is
//! known, or a count of tokens is missing, the cost is not known: never zero, never a guess.

mod amount;
mod file;
mod rate;

pub use amount::Amount;

use crate::answer::Usage;
use crate::config::{Config, ConfigError, Endpoint};
use rate::Price;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// The prices of a configuration.
#[derive(Debug, Clone, Default)]
pub(crate) struct Prices {
    of_models: HashMap<String, Price>,
    listed: Arc<HashMap<String, Price>>,
}

/// What is known about the price of one endpoint.
#[derive(Debug, Clone, Default)]
pub(crate) struct Quote {
    price: Option<Price>,
    listed: Arc<HashMap<String, Price>>,
    provider: String,
}

impl Prices {
    /// Reads the price file, if there is one.
    ///
    /// # Errors
    /// When it cannot be read or understood, or a price has too many digits.
    pub(crate) fn from_config(config: &Config) -> Result<Self, ConfigError> {
        let mut of_models = HashMap::new();
        for (name, model) in &config.models {
            let Some(price) = &model.price else { continue };
            let price = Price::of_model(price).ok_or_else(|| {
                ConfigError::new(format!("models.{name}.price"), "has more than 34 digits behind the point; shorten it")
            })?;
            of_models.insert(name.clone(), price);
        }
        let listed = match &config.prices.file {
            Some(file) => read(&config.folder, file)?,
            None => HashMap::new(),
        };
        Ok(Self { of_models, listed: Arc::new(listed) })
    }

    /// What is known of an endpoint of this model.
    pub(crate) fn quote(&self, model: &str, endpoint: &Endpoint) -> Quote {
        let Endpoint { provider, model: asked, .. } = endpoint;
        let listed = || listed(&self.listed, provider, asked);
        let price = self.of_models.get(model).or_else(listed).cloned();
        Quote { price, listed: self.listed.clone(), provider: provider.clone() }
    }
}

impl Quote {
    /// Fills in the cost, where the provider did not tell it and it is known. `answered` is the model that did.
    pub(crate) fn fill(&self, usage: &mut Usage, answered: Option<&str>) {
        if usage.cost_usd.is_none() {
            let price = self.price.as_ref().or_else(|| listed(&self.listed, &self.provider, answered?));
            usage.cost_usd = price.and_then(|price| price.cost(usage)).map(|cost| cost.to_string());
        }
    }
}

fn listed<'a>(listed: &'a HashMap<String, Price>, provider: &str, model: &str) -> Option<&'a Price> {
    listed.get(&format!("{provider}/{model}")).or_else(|| listed.get(model))
}

fn read(folder: &Path, file: &Path) -> Result<HashMap<String, Price>, ConfigError> {
    let path = folder.join(file);
    let wrong = |problem: String| ConfigError::new("prices.file", format!("{}: {problem}", path.display()));
    let text = std::fs::read_to_string(&path).map_err(|error| {
        wrong(format!("cannot be read: {error}. Check the path; it is relative to the configuration"))
    })?;
    file::parse(&text).map_err(|problem| {
        wrong(format!("{problem}. It must have the shape of LiteLLM's model_prices_and_context_window.json"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::rate::Rates;
    use super::*;
    use crate::config::prices::ModelPrice;
    use proptest::prelude::*;

    fn usage(input: u64, output: u64, cached: u64) -> Usage {
        Usage {
            input_tokens: Some(input),
            output_tokens: Some(output),
            cached_tokens: Some(cached),
            ..Usage::default()
        }
    }

    fn amount(text: &str) -> Amount {
        Amount::parse(text).unwrap()
    }

    fn filled(quote: &Quote, mut usage: Usage, answered: Option<&str>) -> Option<String> {
        quote.fill(&mut usage, answered);
        usage.cost_usd
    }

    /// `toml` and a price file beside it.
    fn prices(toml: &str, file: &str) -> Result<Prices, ConfigError> {
        let folder =
            std::env::temp_dir().join(format!("posthouse-prices-{}-{}", std::process::id(), fastrand::u64(..)));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("prices.json"), file).unwrap();
        let made = Config::parse(toml, &folder).and_then(|config| Prices::from_config(&config));
        std::fs::remove_dir_all(&folder).unwrap();
        made
    }

    fn endpoint(provider: &str, model: &str) -> Endpoint {
        Endpoint { provider: provider.to_owned(), model: model.to_owned(), first_token_ms: None }
    }

    const TOML: &str = r#"
        [prices]
        file = "prices.json"
        [providers.openai]
        base_url = "http://127.0.0.1:1/v1"
        [models.own]
        provider = "openai"
        model = "gpt-x"
        price = { input = 0.15, output = "0.60", cached_input = "0.075", per_request = 0.001 }
        [models.listed]
        provider = "openai"
        [kinds.summarize]
        model = "own"
        [kinds."llm.chat"]
        model = "own"
    "#;
    const FILE: &str = r#"{
        "gpt-x": {"input_cost_per_token": 1, "output_cost_per_token": 1},
        "openai/gpt-y": {"input_cost_per_token": 1.5e-07, "output_cost_per_token": 6e-07},
        "gpt-y": {"input_cost_per_token": 9, "output_cost_per_token": 9},
        "gpt-z": {"input_cost_per_token": 2e-6, "output_cost_per_token": 3e-6, "input_cost_per_token_above_200k_tokens": 4e-6}
    }"#;

    #[test]
    fn who_wins() {
        let toml = format!("default_model = \"own\"\n{TOML}");
        let prices = prices(&toml, FILE).unwrap();
        let own = prices.quote("own", &endpoint("openai", "gpt-x"));
        // The toml wins over the file, the provider over both.
        assert_eq!(filled(&own, usage(1_000_000, 1_000_000, 0), None).as_deref(), Some("0.751"));
        assert_eq!(filled(&own, usage(1_000_000, 0, 400_000), None).as_deref(), Some("0.121"));
        let told = Usage { cost_usd: Some("0.5".to_owned()), ..usage(1, 1, 0) };
        assert_eq!(filled(&own, told, None).as_deref(), Some("0.5"));
        // With the provider's name before without, then the model that answered.
        let listed = prices.quote("listed", &endpoint("openai", "gpt-y"));
        assert_eq!(filled(&listed, usage(10, 10, 0), Some("gpt-z")).as_deref(), Some("0.0000075"));
        let plain = prices.quote("listed", &endpoint("else", "gpt-y"));
        assert_eq!(filled(&plain, usage(1, 1, 0), None).as_deref(), Some("18"));
        let by_answer = prices.quote("listed", &endpoint("openai", "auto"));
        assert_eq!(filled(&by_answer, usage(1, 1, 0), Some("gpt-z")).as_deref(), Some("0.000005"));
        // Larger prompts have a price of their own.
        assert_eq!(filled(&by_answer, usage(200_000, 0, 0), Some("gpt-z")).as_deref(), Some("0.4"));
        assert_eq!(filled(&by_answer, usage(200_001, 0, 0), Some("gpt-z")).as_deref(), Some("0.800004"));
    }

    #[test]
    fn what_is_not_known_has_no_cost() {
        let toml = format!("default_model = \"own\"\n{TOML}");
        let prices = prices(&toml, FILE).unwrap();
        let unknown = prices.quote("listed", &endpoint("openai", "new"));
        assert_eq!(filled(&unknown, usage(1, 1, 0), Some("newer")), None);
        let own = prices.quote("own", &endpoint("openai", "gpt-x"));
        assert_eq!(filled(&own, Usage::default(), None), None);
        assert_eq!(filled(&own, Usage { output_tokens: None, ..usage(5, 0, 0) }, None), None);
        // More from the cache than there was: as many as there were.
        assert_eq!(filled(&own, usage(2, 0, 5), None).as_deref(), Some("0.00100015"));
        // More digits than fit.
        let absurd = Price {
            base: Rates { input: amount("1e30"), output: amount("1e30"), cached_input: None },
            above: Vec::new(),
            per_request: Amount::ZERO,
        };
        assert_eq!(absurd.cost(&usage(u64::MAX, 1, 0)), None);
    }

    #[test]
    fn mistakes_name_the_key_and_the_cure() {
        let with = |price: &str| {
            let toml = TOML
                .replace("{ input = 0.15, output = \"0.60\", cached_input = \"0.075\", per_request = 0.001 }", price);
            prices(&format!("default_model = \"own\"\n{toml}"), FILE).unwrap_err().to_string()
        };
        for (price, expected) in [
            ("{ input = 1 }", "missing field `output`"),
            ("{ input = -1, output = 1 }", "an amount of dollars from zero up"),
            ("{ input = 1, output = 1, cache = 1 }", "unknown field `cache`"),
            ("{ input = \"1e-38\", output = 1 }", "models.own.price: has more than 34 digits"),
            ("{ input = 0.12345678901234567, output = 1 }", "write it as text"),
        ] {
            let found = with(price);
            assert!(found.contains(expected), "{found}");
        }
        let toml = format!("default_model = \"own\"\n{TOML}");
        let found = prices(&toml, "[]").unwrap_err().to_string();
        assert!(found.starts_with("prices.file: ") && found.contains("LiteLLM"), "{found}");
        let found = prices(&toml.replace("prices.json", "missing.json"), FILE).unwrap_err().to_string();
        assert!(found.contains("missing.json: cannot be read"), "{found}");
    }

    proptest! {
        /// Dollars for a million tokens with up to nine digits behind the point, against whole numbers of 10^-15 dollars.
        #[test]
        fn the_cost_is_exact_to_the_last_digit(
            input_price in 0..10_u64.pow(12), output_price in 0..10_u64.pow(12), cached_price in 0..10_u64.pow(12), request_price in 0..10_u64.pow(9),
            input in 0..10_u64.pow(10), output in 0..10_u64.pow(10), cached in 0..10_u64.pow(10),
        ) {
            let dollars = |price: u64| amount(&format!("{price}e-9"));
            let price = ModelPrice {
                input: dollars(input_price), output: dollars(output_price), cached_input: Some(dollars(cached_price)),
                per_request: Some(dollars(request_price)),
            };
            let cost = Price::of_model(&price).unwrap().cost(&usage(input, output, cached)).unwrap();
            let cached = u128::from(cached.min(input));
            let expected = u128::from(input_price) * (u128::from(input) - cached) + u128::from(cached_price) * cached
                + u128::from(output_price) * u128::from(output) + u128::from(request_price) * 1_000_000;
            let (whole, part) = (expected / 10_u128.pow(15), expected % 10_u128.pow(15));
            let text = format!("{whole}.{part:015}");
            prop_assert_eq!(cost.to_string(), text.trim_end_matches('0').trim_end_matches('.'));
        }
    }
}
