//! What the simulated provider was asked, counted. Never a header, never a key.

use super::answer::checksum;
use super::limit::Rates;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};

/// Requests kept one by one.
const LAST_MAX: usize = 100;
/// Inputs counted one by one; further ones are counted in the totals only.
const INPUTS_MAX: usize = 100_000;
/// Characters of an input that are shown.
const BEGINNING_CHARS: usize = 60;

/// Counters since the start.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Stats {
    /// Requests for completions.
    pub requests: u64,
    /// Of these, the ones whose reply was sent to its end, faults included.
    pub finished: u64,
    /// Of these, the ones that the client gave up, or that a fault tore.
    pub abandoned: u64,
    /// Of these, the ones under way now.
    pub in_flight: u64,
    /// The most that were under way at once.
    pub in_flight_max: u64,
    /// Requests by what was done with them: `ok`, `429`, `hang`, …
    pub outcomes: BTreeMap<String, u64>,
    /// Requests by the checksum of their input (see `sim::checksum`).
    pub inputs: BTreeMap<String, InputStats>,
    /// By the minute, where the script has a `limit`.
    pub rates: Option<Rates>,
    /// The last requests, the newest at the end.
    pub last: VecDeque<Seen>,
}

/// Counters of one input.
#[derive(Debug, Clone, Default, Serialize)]
pub struct InputStats {
    /// How the input begins.
    pub beginning: String,
    /// Requests with it.
    pub requests: u64,
    /// Proper answers that were sent to their end.
    pub answered: u64,
}

/// One request.
#[derive(Debug, Clone, Serialize)]
pub struct Seen {
    /// Its number, from 1.
    pub number: u64,
    /// The model it asked for.
    pub model: String,
    /// How its input begins.
    pub input: String,
    /// Whether it asked for a stream.
    pub stream: bool,
    /// What was done with it.
    pub outcome: String,
}

impl Stats {
    /// Counts a request in; returns its number and how often its input has been asked, this time included.
    pub(crate) fn begin(&mut self, input: &str) -> (u64, u64) {
        self.requests += 1;
        self.in_flight += 1;
        self.in_flight_max = self.in_flight_max.max(self.in_flight);
        let key = checksum(input);
        if self.inputs.len() >= INPUTS_MAX && !self.inputs.contains_key(&key) {
            return (self.requests, 1);
        }
        let entry = self
            .inputs
            .entry(key)
            .or_insert_with(|| InputStats { beginning: beginning(input), ..InputStats::default() });
        entry.requests += 1;
        (self.requests, entry.requests)
    }

    /// Notes what is being done with a request.
    pub(crate) fn decide(&mut self, number: u64, model: &str, input: &str, stream: bool, outcome: &str) {
        *self.outcomes.entry(outcome.to_owned()).or_default() += 1;
        if self.last.len() == LAST_MAX {
            self.last.pop_front();
        }
        let model: String = model.chars().take(BEGINNING_CHARS).collect();
        self.last.push_back(Seen { number, model, input: beginning(input), stream, outcome: outcome.to_owned() });
    }

    /// Counts a request out.
    pub(crate) fn end(&mut self, input_key: &str, finished: bool, proper: bool) {
        self.in_flight -= 1;
        *(if finished { &mut self.finished } else { &mut self.abandoned }) += 1;
        if finished
            && proper
            && let Some(entry) = self.inputs.get_mut(input_key)
        {
            entry.answered += 1;
        }
    }
}

fn beginning(input: &str) -> String {
    input.chars().take(BEGINNING_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
