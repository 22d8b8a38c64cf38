//! What the simulated provider does with which request: a script, from TOML, JSON or the command line.
//!
//! ```toml
//! latency = "100ms-2s"        # before the headers, each time anew
//! first_token = "50ms"        # between headers and first token
//! tokens_per_second = 80.0    # default: all at once
//!
//! [limit]                     # 429 with Retry-After beyond it, and what is left by x-ratelimit-*
//! requests_per_minute = 60
//! tokens_per_minute = 10000
//!
//! [[step]]                    # the first step that fits a request decides
//! match = "foo"               # only inputs that contain this
//! first = 2                   # only twice
//! do = 429
//! retry_after = "1s"
//!
//! [[step]]
//! rate = 0.05                 # one request in twenty, by a dice with a seed
//! do = "ok"
//! latency = "20s"            # a latency spike
//!
//! [[step]]
//! after = "1m"               # from a minute after the start until two minutes after it
//! before = "2m"
//! do = 429                   # with what is left of that as Retry-After
//! ```

use super::delay::Delay;
use super::fault::Fault;
use super::limit::Limit;
use crate::secret::Secret;
use serde::Deserialize;
use std::str::FromStr;

/// How the simulated provider behaves. The default answers everybody properly and at once.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Script {
    /// The key that requests must carry. Default: none is asked for.
    pub api_key: Option<Secret>,
    /// The models there are. Default: any.
    pub models: Vec<String>,
    /// Time to the headers. Default 0.
    pub latency: Delay,
    /// Time from the headers to the first token. Default 0.
    pub first_token: Delay,
    /// Speed of the answer after its first token. Default: all at once.
    pub tokens_per_second: Option<f64>,
    /// The tokens of every prompt, as its usage says. Default: about four bytes each.
    pub input_tokens: Option<u64>,
    /// The tokens of every answer, as its usage says. Default: its pieces.
    pub output_tokens: Option<u64>,
    /// The rate limit. Default: none, and nothing is counted by the minute.
    pub limit: Option<Limit>,
    /// Start of the dice for `rate` and for ranges of time. The same seed and inputs give the same behaviour, whatever the order of requests.
    pub seed: u64,
    /// The rules, in order; the first that fits a request decides about it.
    #[serde(rename = "step")]
    pub steps: Vec<Step>,
}

/// A rule: when, and what. All conditions must hold.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// The input contains this text. Default: any input.
    #[serde(rename = "match")]
    pub input: Option<String>,
    /// The request is at least this one since the start, counted from 1. Default 1.
    pub from: Option<u64>,
    /// The request is at most this one. Default: no end.
    pub to: Option<u64>,
    /// The step has fitted fewer times than this. Default: no end.
    pub first: Option<u64>,
    /// It is among the first so many requests of the same input. Default: no end.
    pub tries: Option<u64>,
    /// At least so long after the start. Default: at once.
    pub after: Option<Delay>,
    /// Less long after the start than this. A 429, 503 or 529 that names no wait then asks for what is left. Default: no end.
    pub before: Option<Delay>,
    /// With this probability, from 0 to 1. Default 1.
    pub rate: Option<f64>,
    /// What to do.
    #[serde(rename = "do")]
    pub fault: Fault,
    /// The wait to ask for, as `Retry-After` in seconds. Default: none is named.
    pub retry_after: Option<Delay>,
    /// The wait to ask for, as `retry-after-ms`.
    pub retry_after_ms: Option<u64>,
    /// Time to the headers, instead of the script's.
    pub latency: Option<Delay>,
    /// Time from the headers to the first token, instead of the script's.
    pub first_token: Option<Delay>,
    /// Tokens before the fault happens, where it happens in the middle. Default 3.
    pub after_tokens: Option<usize>,
    /// The text for `say`.
    pub text: Option<String>,
}

impl Step {
    /// A rule without conditions.
    #[must_use]
    pub fn always(fault: Fault) -> Self {
        Self {
            input: None,
            from: None,
            to: None,
            first: None,
            tries: None,
            after: None,
            before: None,
            rate: None,
            fault,
            retry_after: None,
            retry_after_ms: None,
            latency: None,
            first_token: None,
            after_tokens: None,
            text: None,
        }
    }
}

impl From<Fault> for Script {
    fn from(fault: Fault) -> Self {
        Self { steps: vec![Step::always(fault)], ..Self::default() }
    }
}

impl Script {
    /// Reads a script: JSON if it begins with a brace, else TOML.
    ///
    /// # Errors
    /// A sentence about what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let script: Self = if text.trim_start().starts_with('{') {
            serde_json::from_str(text).map_err(|error| error.to_string())?
        } else {
            toml::from_str(text).map_err(|error| error.to_string())?
        };
        script.steps.iter().try_for_each(Step::check)?;
        Ok(script)
    }
}

impl Step {
    fn check(&self) -> Result<(), String> {
        if self.rate.is_some_and(|rate| !(0.0..=1.0).contains(&rate)) {
            return Err("rate must be from 0 to 1".to_owned());
        }
        if self.fault == Fault::Say && self.text.is_none() {
            return Err("do = \"say\" needs a text".to_owned());
        }
        Ok(())
    }
}

/// The short form of the command line: `match=foo,first=2,do=429,retry_after=1s`. A comma inside a value is written `\,`.
impl FromStr for Step {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut fields = serde_json::Map::new();
        for pair in text.replace("\\,", "\u{0}").split(',') {
            let (name, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("{pair:?} is not NAME=VALUE; write something like match=foo,first=2,do=429"))?;
            let value = value.trim().replace('\u{0}', ",");
            // What is text must stay text, even if it looks like a number.
            let is_text = ["match", "text", "do"].contains(&name.trim());
            let parsed = if is_text {
                serde_json::Value::from(value)
            } else {
                serde_json::from_str(&value).unwrap_or_else(|_| value.into())
            };
            fields.insert(name.trim().to_owned(), parsed);
        }
        let step: Self = serde_json::from_value(fields.into()).map_err(|error| error.to_string())?;
        step.check()?;
        Ok(step)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::time::Duration;

    #[test]
    fn three_ways_to_say_the_same() {
        let toml = Script::parse("[[step]]\nmatch = \"foo\"\nfirst = 2\ndo = 429\nretry_after = \"1s\"").unwrap();
        let json = Script::parse(r#"{"step":[{"match":"foo","first":2,"do":"429","retry_after":"1000ms"}]}"#).unwrap();
        let line: Step = "match=foo,first=2,do=429,retry_after=1s".parse().unwrap();
        for step in [&toml.steps[0], &json.steps[0], &line] {
            assert_eq!((step.input.as_deref(), step.first, step.fault), (Some("foo"), Some(2), Fault::Status(429)));
            assert_eq!(step.retry_after, Some(Delay::fixed(Duration::from_secs(1))));
        }
        assert_eq!("do=say,text=a\\,b".parse::<Step>().unwrap().text.as_deref(), Some("a,b"));
        assert_eq!("match=42,do=hang".parse::<Step>().unwrap().input.as_deref(), Some("42"));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            ("do=explode", "no fault \"explode\""),
            ("foo", "\"foo\" is not NAME=VALUE"),
            ("first=1", "missing field `do`"),
            ("do=429,retry=1", "unknown field `retry`"),
            ("do=429,rate=2", "rate must be from 0 to 1"),
            ("do=slow", "no fault \"slow\""),
            ("do=say", "needs a text"),
            ("do=ok,latency=soon", "not a time: \"soon\""),
            ("do=ok,latency=2s-1s", "ends before it begins"),
        ] {
            let error = text.parse::<Step>().unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
    }
}
