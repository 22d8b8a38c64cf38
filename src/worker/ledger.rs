//! What this worker holds, and how far its claims are answered: the worker's half of reconciling with Postgres.
//!
//! A job is held from the answer to its claim until the answer to its settle. Claims are numbered from 1. The heartbeat
//! sends what is held together with the *mark*: the highest number at or below which every claim was answered or given
//! up. Postgres releases jobs that were claimed at or below the mark and are not held: their answer never arrived. Both
//! are taken under one lock, so a job is never missing from one and covered by the other.

use std::collections::{BTreeMap, HashMap};

/// `T` is what the worker keeps with each job; the rules do not depend on it.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    last_seq: i64,
    /// The claim that is on its way. There is one claimer, so there is at most one.
    open: Option<i64>,
    held: HashMap<i64, Held<T>>,
    /// How many held jobs came from each claim, to know the oldest.
    held_by_seq: BTreeMap<i64, usize>,
    closed: bool,
}

#[derive(Debug)]
struct Held<T> {
    fence: i64,
    seq: i64,
    value: T,
}

/// What a heartbeat says about claims and held jobs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holding {
    /// Every claim up to this one was answered or given up.
    pub(crate) mark: i64,
    /// The lowest claim that still has a held job, or `mark + 1`.
    pub(crate) oldest: i64,
    /// (job, fence)
    pub(crate) held: Vec<(i64, i64)>,
}

impl<T> Default for Ledger<T> {
    fn default() -> Self {
        Self { last_seq: 0, open: None, held: HashMap::new(), held_by_seq: BTreeMap::new(), closed: false }
    }
}

impl<T> Ledger<T> {
    /// The number of the next claim, which is now on its way. One that was still open is given up.
    pub(crate) fn begin(&mut self) -> i64 {
        self.last_seq += 1;
        self.open = Some(self.last_seq);
        self.last_seq
    }

    /// The claim was answered with these jobs. False: it was given up or everything is over, so none of them may start.
    pub(crate) fn answered(&mut self, seq: i64, jobs: impl IntoIterator<Item = (i64, i64, T)>) -> bool {
        if self.closed || self.open != Some(seq) {
            return false;
        }
        self.open = None;
        for (id, fence, value) in jobs {
            if let Some(before) = self.held.insert(id, Held { fence, seq, value }) {
                self.uncount(before.seq);
            }
            *self.held_by_seq.entry(seq).or_default() += 1;
        }
        true
    }

    /// The claim will not be asked for again, and an answer to it is not listened to.
    pub(crate) fn give_up(&mut self, seq: i64) {
        if self.open == Some(seq) {
            self.open = None;
        }
    }

    /// The job is no longer held under this fence: its settle was answered, or it was lost.
    pub(crate) fn forget(&mut self, id: i64, fence: i64) {
        if self.held.get(&id).is_some_and(|held| held.fence == fence)
            && let Some(held) = self.held.remove(&id)
        {
            self.uncount(held.seq);
        }
    }

    /// What is kept with a job, if it is held under this fence.
    pub(crate) fn get(&self, id: i64, fence: i64) -> Option<&T> {
        self.held.get(&id).filter(|held| held.fence == fence).map(|held| &held.value)
    }

    /// What is kept with all held jobs.
    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.held.values().map(|held| &held.value)
    }

    /// How many jobs are held.
    pub(crate) fn len(&self) -> usize {
        self.held.len()
    }

    /// No claim is accepted from now on.
    pub(crate) fn close(&mut self) {
        self.closed = true;
    }

    /// For a heartbeat.
    pub(crate) fn holding(&self) -> Holding {
        let mark = self.open.map_or(self.last_seq, |open| open - 1);
        let oldest = self.held_by_seq.keys().next().copied().unwrap_or(mark + 1);
        Holding { mark, oldest, held: self.held.iter().map(|(id, held)| (*id, held.fence)).collect() }
    }

    fn uncount(&mut self, seq: i64) {
        if let Some(count) = self.held_by_seq.get_mut(&seq) {
            *count -= 1;
            if *count == 0 {
                self.held_by_seq.remove(&seq);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn holding(ledger: &Ledger<()>) -> (i64, i64, usize) {
        let holding = ledger.holding();
        (holding.mark, holding.oldest, holding.held.len())
    }

    #[test]
    fn the_mark_waits_for_the_claim_that_is_on_its_way() {
        let mut ledger = Ledger::default();
        assert_eq!(holding(&ledger), (0, 1, 0));
        let first = ledger.begin();
        assert_eq!(holding(&ledger), (0, 1, 0));
        assert!(ledger.answered(first, [(7, 1, ()), (8, 1, ())]));
        assert_eq!(holding(&ledger), (1, 1, 2));
        let second = ledger.begin();
        assert_eq!(holding(&ledger), (1, 1, 2));
        assert!(ledger.answered(second, [(9, 1, ())]));
        ledger.forget(7, 1);
        assert_eq!(holding(&ledger), (2, 1, 2));
        ledger.forget(8, 1);
        assert_eq!(holding(&ledger), (2, 2, 1));
    }

    #[test]
    fn the_answer_to_a_claim_given_up_starts_nothing() {
        let mut ledger = Ledger::default();
        let seq = ledger.begin();
        ledger.give_up(seq);
        assert_eq!(holding(&ledger), (1, 2, 0));
        assert!(!ledger.answered(seq, [(7, 1, ())]));
        assert_eq!(ledger.len(), 0);
        let seq = ledger.begin();
        ledger.close();
        assert!(!ledger.answered(seq, [(7, 1, ())]), "everything is over");
    }

    #[test]
    fn a_job_claimed_again_under_a_new_fence_is_not_forgotten_with_the_old_one() {
        let mut ledger = Ledger::default();
        let seq = ledger.begin();
        ledger.answered(seq, [(7, 1, ())]);
        let seq = ledger.begin();
        ledger.answered(seq, [(7, 2, ())]);
        ledger.forget(7, 1);
        assert_eq!(holding(&ledger), (2, 2, 1));
        assert!(ledger.get(7, 1).is_none() && ledger.get(7, 2).is_some());
    }

    proptest! {
        /// Whatever happens in whatever order: a claim at or below the mark is closed, every held job is in the list, and
        /// none is older than `oldest`.
        #[test]
        fn mark_and_held_always_fit(steps in prop::collection::vec((0..4u8, 0..12i64), 0..200)) {
            let mut ledger = Ledger::default();
            let mut model: HashMap<i64, (i64, i64)> = HashMap::new();
            let (mut open, mut seq, mut fence) = (None, 0, 0);
            for (what, id) in steps {
                match (what, open) {
                    (0, None) => {
                        seq = ledger.begin();
                        open = Some(seq);
                    }
                    (1, Some(s)) => {
                        fence += 1;
                        prop_assert!(ledger.answered(s, [(id, fence, ())]));
                        model.insert(id, (fence, s));
                        open = None;
                    }
                    (2, Some(s)) => {
                        ledger.give_up(s);
                        open = None;
                    }
                    _ => {
                        if let Some((f, _)) = model.remove(&id) {
                            ledger.forget(id, f);
                        }
                    }
                }
                let holding = ledger.holding();
                prop_assert_eq!(holding.mark, open.map_or(seq, |s: i64| s - 1));
                let oldest = model.values().map(|(_, s)| *s).min().unwrap_or(holding.mark + 1);
                prop_assert_eq!(holding.oldest, oldest);
                let mut held = holding.held;
                held.sort_unstable();
                let mut expected: Vec<_> = model.iter().map(|(id, (f, _))| (*id, *f)).collect();
                expected.sort_unstable();
                prop_assert_eq!(held, expected);
            }
        }
    }
}
