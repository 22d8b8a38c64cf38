//! The gates of a posthouse.toml: set by `gate apply` as they stand there, and by workers where they are not there yet.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::ExitCode;

use posthouse::store::{GateLimits, Store};
use posthouse_llm::Config;
use posthouse_llm::config::gates::Gate;
use posthouse_llm::price::Amount;
use serde_json::json;

use super::table;
use crate::args::{GateApply, Global};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output;
use crate::style::{DIM, clean};

/// The file that is read when none is named.
const CONFIG: &str = "posthouse.toml";

/// Sets every gate of the file.
pub(super) async fn run(args: &GateApply, global: &Global) -> Result<ExitCode> {
    let file = args.config.as_deref().unwrap_or(Path::new(CONFIG));
    let config = Config::load(file).map_err(|error| Failure::new(error.to_string()))?;
    if config.gates.is_empty() {
        return Err(Failure::new(format!("{} declares no gates", file.display()))
            .hint("write them as in\n  [gates.\"model:small\"]\n  max_running = 40"));
    }
    let store = connect::store(global).await?;
    let there = there(&store, &config.gates).await?;
    let mut answers = Vec::new();
    for (name, gate) in &config.gates {
        let wanted = gate.limits();
        let before = there.get(name);
        let is_same = before.is_some_and(|before| is_same(before, &wanted));
        if !is_same {
            store.set_gate(name, &wanted).await.map_err(|error| Failure::new(named(file, name, error)))?;
        }
        if global.json {
            answers.push(json!({ "name": name, "changed": !is_same, "new": before.is_none() }));
            continue;
        }
        let state = match (is_same, before) {
            (true, _) => "as it was",
            (false, None) => "new",
            (false, Some(_)) => "changed",
        };
        output::line(format_args!("gate {} {DIM}({state}){DIM:#}: {}", clean(name), table::describe(&wanted)))?;
    }
    if global.json {
        output::json(&answers)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn named(file: &Path, name: &str, error: posthouse::Error) -> String {
    format!("{}: gates.{name}: {error}", file.display())
}

/// The limits of those gates of a file that are there.
async fn there(store: &Store, gates: &BTreeMap<String, Gate>) -> posthouse::Result<HashMap<String, GateLimits>> {
    store.gate_limits(&gates.keys().cloned().collect::<Vec<_>>()).await
}

/// How the gates of a file stand to those of the database.
#[derive(Default)]
pub(crate) struct Declared {
    /// Not there at all.
    pub(crate) missing: Vec<String>,
    /// There with other limits.
    pub(crate) different: Vec<String>,
}

impl Declared {
    /// Compares them.
    pub(crate) async fn look(store: &Store, gates: &BTreeMap<String, Gate>) -> posthouse::Result<Self> {
        let mut declared = Self::default();
        if gates.is_empty() {
            return Ok(declared);
        }
        let there = there(store, gates).await?;
        for (name, gate) in gates {
            match there.get(name) {
                Some(before) if is_same(before, &gate.limits()) => {}
                Some(_) => declared.different.push(name.clone()),
                None => declared.missing.push(name.clone()),
            }
        }
        Ok(declared)
    }
}

fn is_same(one: &GateLimits, other: &GateLimits) -> bool {
    let money = |text: &Option<String>| text.as_deref().map(|text| Amount::parse(text).ok_or(text.to_owned()));
    let plain = |limits: &GateLimits| {
        let GateLimits { max_running, requests_per_minute, tokens_per_minute, .. } = *limits;
        (
            max_running,
            requests_per_minute,
            tokens_per_minute,
            limits.when_spent.clone().unwrap_or_else(|| "hold".to_owned()),
        )
    };
    plain(one) == plain(other)
        && money(&one.money_per_day) == money(&other.money_per_day)
        && money(&one.money_per_month) == money(&other.money_per_month)
        && money(&one.warn_at) == money(&other.warn_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_the_same_however_they_are_written() {
        let with = |money: &str, spent: Option<&str>| GateLimits {
            money_per_day: Some(money.to_owned()),
            when_spent: spent.map(str::to_owned),
            ..GateLimits::default()
        };
        assert!(is_same(&with("12.50", Some("hold")), &with("12.5", None)));
        assert!(!is_same(&with("12.50", Some("fail")), &with("12.5", None)));
        assert!(!is_same(&with("12.51", None), &with("12.5", None)));
        assert!(!is_same(&with("12.5", None), &GateLimits::default()));
    }
}
