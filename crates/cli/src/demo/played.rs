//! All that is known when the demo has been played: its jobs, what became of them, and what was seen on the way.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use posthouse::store::JobRecord;
use posthouse_llm::sim::Stats;

use super::trouble::Trouble;

/// The worker that was killed.
#[derive(Debug, Clone)]
pub(super) struct Killed {
    /// Its number on the screen, from 1.
    pub(super) worker: usize,
    pub(super) pid: u32,
    /// What it held at that moment, by the database.
    pub(super) jobs: Vec<i64>,
}

/// All that is known at the end.
pub(super) struct Played {
    pub(super) texts: Vec<String>,
    pub(super) trouble: Trouble,
    /// The job of each text.
    pub(super) ids: Vec<i64>,
    /// Each job's record; `None`: it has none, which must not be.
    pub(super) records: Vec<Option<JobRecord>>,
    /// Jobs of this database by id, and in how many places each is.
    pub(super) places: BTreeMap<i64, usize>,
    pub(super) killed: Option<Killed>,
    /// Jobs that were told "not now" by the provider, with its words.
    pub(super) refused: BTreeMap<i64, String>,
    /// Jobs that were put off, with or without asking.
    pub(super) put_off: BTreeSet<i64>,
    /// What the simulated provider was asked; `None`: the provider is a real one.
    pub(super) stats: Option<Stats>,
    pub(super) elapsed: Duration,
}

impl Played {
    /// The records there are, with their texts.
    pub(super) fn jobs(&self) -> impl Iterator<Item = (&JobRecord, &str)> {
        let texts = self.texts.iter().map(String::as_str);
        self.records.iter().zip(texts).filter_map(|(record, text)| Some((record.as_ref()?, text)))
    }

    pub(super) fn in_state(&self, state: &str) -> Vec<i64> {
        self.jobs().filter(|(job, _)| job.state == state).map(|(job, _)| job.id).collect()
    }

    /// Records beyond one for each job.
    pub(super) fn duplicates(&self) -> usize {
        let surplus: usize = self.places.values().map(|places| places.saturating_sub(1)).sum();
        surplus + self.places.keys().filter(|id| !self.ids.contains(id)).count()
    }

    /// The failures that were meant to be.
    pub(super) fn expected_failures(&self) -> Vec<i64> {
        self.trouble.refused.map(|place| self.ids[place]).into_iter().collect()
    }
}

/// `job 3`, `jobs 3 and 4`, `jobs 3, 4 and 5`, `jobs 3, 4, 5, 6, 7, 8 and 9 more`.
pub(super) fn named(ids: &[i64]) -> String {
    const NAMED: usize = 6;
    match ids {
        [first @ .., _] if first.len() >= NAMED => {
            let some: Vec<String> = ids[..NAMED].iter().map(i64::to_string).collect();
            format!("jobs {} and {} more", some.join(", "), ids.len() - NAMED)
        }
        [] => "no job".to_owned(),
        [one] => format!("job {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().map(i64::to_string).collect();
            format!("jobs {} and {last}", first.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_named_in_a_sentence() {
        assert_eq!(named(&[]), "no job");
        assert_eq!(named(&[3]), "job 3");
        assert_eq!(named(&[3, 4, 5]), "jobs 3, 4 and 5");
        assert_eq!(named(&(1..=7).collect::<Vec<_>>()), "jobs 1, 2, 3, 4, 5, 6 and 1 more");
    }
}
