//! An imported price file: JSON in the shape of LiteLLM's `model_prices_and_context_window.json`, read digit by digit.
//!
//! Of an entry only what is paid by the token is understood; one without both an input and an output price is passed over, and
//! so is whatever else such a file may hold.

use super::amount::Amount;
use super::rate::{Price, Rates};
use serde_json::value::RawValue;
use std::collections::{BTreeMap, HashMap};

type Entry<'a> = HashMap<String, &'a RawValue>;

/// The prices in a file, by the model's name there.
///
/// # Errors
/// What is wrong with it, when it is no JSON object or holds no price.
pub(super) fn parse(text: &str) -> Result<HashMap<String, Price>, String> {
    let entries: BTreeMap<String, &RawValue> =
        serde_json::from_str(text).map_err(|error| format!("not a JSON object of models ({error})"))?;
    let priced = |(name, entry): (String, &RawValue)| {
        let entry: Entry<'_> = serde_json::from_str(entry.get()).ok()?;
        Some((name, price(&entry)?))
    };
    let prices: HashMap<String, Price> = entries.into_iter().filter_map(priced).collect();
    if prices.is_empty() {
        return Err("no entry has both input_cost_per_token and output_cost_per_token".to_owned());
    }
    Ok(prices)
}

fn price(entry: &Entry<'_>) -> Option<Price> {
    let base = Rates {
        input: amount(entry, "input_cost_per_token")?,
        output: amount(entry, "output_cost_per_token")?,
        cached_input: amount(entry, "cache_read_input_token_cost"),
    };
    let mut above: Vec<(u64, Rates)> =
        entry.keys().filter_map(|key| threshold(key)).map(|thousands| (thousands, base)).collect();
    above.sort_by_key(|(thousands, _)| *thousands);
    above.dedup_by_key(|(thousands, _)| *thousands);
    for (thousands, rates) in &mut above {
        let of = |name: &str| amount(entry, &format!("{name}_above_{thousands}k_tokens"));
        rates.input = of("input_cost_per_token").unwrap_or(base.input);
        rates.output = of("output_cost_per_token").unwrap_or(base.output);
        rates.cached_input = of("cache_read_input_token_cost").or(base.cached_input);
        *thousands = thousands.saturating_mul(1_000);
    }
    Some(Price { base, above, per_request: Amount::ZERO })
}

/// Of `input_cost_per_token_above_200k_tokens` and its like the thousands.
fn threshold(key: &str) -> Option<u64> {
    let (name, rest) = key.split_once("_above_")?;
    ["input_cost_per_token", "output_cost_per_token", "cache_read_input_token_cost"].contains(&name).then_some(())?;
    rest.strip_suffix("k_tokens")?.parse().ok()
}

/// A price for one token: a JSON number, or decimal text.
fn amount(entry: &Entry<'_>, key: &str) -> Option<Amount> {
    let text = entry.get(key)?.get();
    Amount::parse(text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_shape_of_the_file_is_understood() {
        let text = r#"{
            "sample_spec": {"max_tokens": "set to max output tokens", "input_cost_per_token": 0.0000, "litellm_provider": "one of …"},
            "gpt-4o-mini": {"input_cost_per_token": 1.5e-07, "output_cost_per_token": 6e-07, "cache_read_input_token_cost": 7.5e-08,
                "litellm_provider": "openai", "mode": "chat", "supports_vision": true},
            "gemini/gemini-x": {"input_cost_per_token": 0.00000125, "output_cost_per_token": "0.00001", "litellm_provider": "gemini",
                "input_cost_per_token_above_200k_tokens": 2.5e-06, "output_cost_per_token_above_200k_tokens": 1.5e-05,
                "input_cost_per_token_above_200k_tokens_priority": 9, "tiered_pricing": [{"range": [0, 5]}]},
            "dall-e": {"input_cost_per_image": 0.04, "litellm_provider": "openai"},
            "broken": {"input_cost_per_token": -1, "output_cost_per_token": 1},
            "half": {"input_cost_per_token": 1, "output_cost_per_token": null},
            "odd": "text", "odder": [1]
        }"#;
        let prices = parse(text).unwrap();
        let mut names: Vec<_> = prices.keys().map(String::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["gemini/gemini-x", "gpt-4o-mini"]);
        let mini = &prices["gpt-4o-mini"];
        assert_eq!((mini.base.input.to_string(), mini.above.len()), ("0.00000015".to_owned(), 0));
        assert_eq!(mini.base.cached_input.unwrap().to_string(), "0.000000075");
        let gemini = &prices["gemini/gemini-x"];
        assert_eq!((gemini.above.len(), gemini.above[0].0), (1, 200_000));
        assert_eq!(gemini.above[0].1.output.to_string(), "0.000015");
    }

    #[test]
    fn what_holds_no_price_is_refused() {
        for (text, expected) in [
            ("", "not a JSON object"),
            ("[]", "not a JSON object"),
            ("{}", "no entry has both"),
            (r#"{"a": {}}"#, "no entry has both"),
        ] {
            assert!(parse(text).unwrap_err().contains(expected), "{text}");
        }
    }
}
