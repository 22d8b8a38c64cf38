//! What this worker holds, and how far its claims are answered: the worker's half of reconciling with Postgres.
//!
//! A job is held from the answer to its claim until the answer to its settle. Claims are numbered from 1; several may be on
//! their way at a time. The heartbeat sends the *mark*, the highest number at or below which every claim was answered or
//! given up, and what is held of the claims up to it. Postgres releases jobs that were claimed at or below the mark and are
//! not held: their answer never arrived. Both are taken under one lock, so a job is never missing from one and covered by
//! the other. Of claims above the mark, answered though they may be, a heartbeat says nothing.
//!
//! Claims below *oldest* are over for good, so that Postgres need not look at them: all their jobs are settled. A claim
//! that was given up, or a job that was let go of without Postgres' word that it is settled, is in *doubt*: `oldest` does
//! not pass it before a heartbeat that covers it was answered.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// `T` is what the worker keeps with each job; the rules do not depend on it.
#[derive(Debug)]
pub(crate) struct Ledger<T> {
    last_seq: i64,
    /// The claims that are on their way.
    open: BTreeSet<i64>,
    held: HashMap<i64, Held<T>>,
    /// How many held jobs came from each claim, to know the oldest.
    held_by_seq: BTreeMap<i64, usize>,
    /// How often each claim came into doubt since it was last out of it.
    doubts: BTreeMap<i64, u32>,
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
    /// The lowest claim up to it that still has a held job or is in doubt, or `mark + 1`.
    pub(crate) oldest: i64,
    /// The claims up to it that are in doubt, for [`Ledger::looked_into`].
    pub(crate) doubts: Vec<(i64, u32)>,
    /// (job, fence) of the claims up to it.
    pub(crate) held: Vec<(i64, i64)>,
}

impl<T> Default for Ledger<T> {
    fn default() -> Self {
        let (open, held, held_by_seq, doubts) = (BTreeSet::new(), HashMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { last_seq: 0, open, held, held_by_seq, doubts, closed: false }
    }
}

impl<T> Ledger<T> {
    /// The number of the next claim, which is now on its way: until it is answered or given up, no mark passes it.
    pub(crate) fn begin(&mut self) -> i64 {
        self.last_seq += 1;
        self.open.insert(self.last_seq);
        self.last_seq
    }

    /// The claim was answered with these jobs. False: it was given up or everything is over, so none of them may start.
    pub(crate) fn answered(&mut self, seq: i64, jobs: impl IntoIterator<Item = (i64, i64, T)>) -> bool {
        if self.closed || !self.open.remove(&seq) {
            return false;
        }
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
        if self.open.remove(&seq) {
            self.doubt(seq);
        }
    }

    /// The job is no longer held under this fence: Postgres said that it is settled.
    pub(crate) fn forget(&mut self, id: i64, fence: i64) {
        self.remove(id, fence);
    }

    /// The job is no longer held under this fence, and Postgres may think that it still is.
    pub(crate) fn let_go(&mut self, id: i64, fence: i64) {
        if let Some(seq) = self.remove(id, fence) {
            self.doubt(seq);
        }
    }

    /// A heartbeat with these doubts was answered, and the answer fits what was held: nothing is left of them in Postgres.
    /// A claim that came into doubt again meanwhile stays there.
    pub(crate) fn looked_into(&mut self, doubts: &[(i64, u32)]) {
        for (seq, times) in doubts {
            if self.doubts.get(seq) == Some(times) {
                self.doubts.remove(seq);
            }
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
        let mark = self.open.first().map_or(self.last_seq, |open| open - 1);
        let first = [self.held_by_seq.keys().next(), self.doubts.keys().next()];
        let oldest = first.into_iter().flatten().min().map_or(mark + 1, |first| (mark + 1).min(*first));
        let doubts = self.doubts.range(..=mark).map(|(seq, times)| (*seq, *times)).collect();
        let held = self.held.iter().filter(|(_, held)| held.seq <= mark).map(|(id, held)| (*id, held.fence)).collect();
        Holding { mark, oldest, doubts, held }
    }

    /// Answers with the claim that the job came from.
    fn remove(&mut self, id: i64, fence: i64) -> Option<i64> {
        let Entry::Occupied(held) = self.held.entry(id) else { return None };
        if held.get().fence != fence {
            return None;
        }
        let seq = held.remove().seq;
        self.uncount(seq);
        Some(seq)
    }

    /// Jobs of this claim may run in Postgres under our name without being held.
    pub(crate) fn doubt(&mut self, seq: i64) {
        let times = self.doubts.entry(seq).or_default();
        *times = times.wrapping_add(1);
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
        assert_eq!(holding(&ledger), (1, 1, 0));
        assert!(!ledger.answered(seq, [(7, 1, ())]));
        assert_eq!(ledger.len(), 0);
        let seq = ledger.begin();
        ledger.close();
        assert!(!ledger.answered(seq, [(7, 1, ())]), "everything is over");
    }

    #[test]
    fn postgres_looks_once_at_what_is_in_doubt_before_it_is_over() {
        let mut ledger = Ledger::default();
        let given_up = ledger.begin();
        ledger.give_up(given_up);
        let seq = ledger.begin();
        ledger.answered(seq, [(7, 1, ()), (8, 1, ())]);
        assert_eq!(holding(&ledger), (2, given_up, 2));
        let sent = ledger.holding();
        ledger.looked_into(&sent.doubts);
        assert_eq!(holding(&ledger), (2, seq, 2));
        ledger.let_go(7, 1);
        let sent = ledger.holding();
        // Held when the heartbeat was sent, so that it says nothing about this one.
        ledger.let_go(8, 1);
        ledger.looked_into(&sent.doubts);
        assert_eq!(holding(&ledger), (2, seq, 0));
        let sent = ledger.holding();
        ledger.looked_into(&sent.doubts);
        assert_eq!(holding(&ledger), (2, 3, 0));
    }

    #[test]
    fn the_mark_waits_for_the_first_of_two_that_are_on_their_way() {
        let mut ledger = Ledger::default();
        let (first, second) = (ledger.begin(), ledger.begin());
        assert!(ledger.answered(second, [(8, 1, ())]));
        // Nothing is said of the second, since Postgres would look for what is held up to the mark.
        assert_eq!(holding(&ledger), (0, 1, 0));
        assert!(ledger.answered(first, [(7, 1, ())]));
        assert_eq!(holding(&ledger), (2, 1, 2));
    }

    #[test]
    fn a_heartbeat_says_nothing_about_a_doubt_above_its_mark() {
        let mut ledger = Ledger::<()>::default();
        let (first, second) = (ledger.begin(), ledger.begin());
        ledger.give_up(second);
        let sent = ledger.holding();
        assert_eq!((sent.mark, sent.oldest, sent.doubts.as_slice()), (0, 1, [].as_slice()));
        ledger.looked_into(&sent.doubts);
        assert!(ledger.answered(first, []));
        assert_eq!(holding(&ledger), (2, second, 0), "its jobs were not looked for yet");
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
        /// Whatever happens in whatever order, with up to three claims on their way: a claim at or below the mark is closed, what
        /// is held of such is in the list and nothing else, and none of it is older than `oldest`, nor is any claim with a job
        /// that runs in Postgres without being held.
        #[test]
        fn mark_and_held_always_fit(steps in prop::collection::vec((0..6u8, 0..12i64), 0..200)) {
            let mut ledger = Ledger::default();
            let mut model: HashMap<i64, (i64, i64)> = HashMap::new();
            // Claims with jobs that Postgres takes for running and that are not held.
            let mut strays: Vec<i64> = Vec::new();
            let mut sent: Option<(Holding, Vec<i64>)> = None;
            let (mut open, mut seq, mut fence): (Vec<i64>, i64, i64) = (Vec::new(), 0, 0);
            for (what, id) in steps {
                // The one of those on their way that it is about: any of them.
                let at = (!open.is_empty()).then(|| usize::try_from(id).unwrap_or_default() % open.len());
                match (what, at) {
                    (0, _) if open.len() < 3 => {
                        seq = ledger.begin();
                        open.push(seq);
                    }
                    (1, Some(at)) => {
                        let s = open.remove(at);
                        fence += 1;
                        prop_assert!(ledger.answered(s, [(id, fence, ())]));
                        model.insert(id, (fence, s));
                    }
                    (2, Some(at)) => {
                        let s = open.remove(at);
                        ledger.give_up(s);
                        strays.push(s);
                    }
                    (3, _) => {
                        if let Some((f, s)) = model.remove(&id) {
                            ledger.let_go(id, f);
                            strays.push(s);
                        }
                    }
                    // A heartbeat that Postgres has looked into: it takes back the strays of that moment from `oldest` on.
                    (4, _) => {
                        if let Some((holding, seen)) = sent.take() {
                            for stray in seen.into_iter().filter(|seq| (holding.oldest..=holding.mark).contains(seq)) {
                                if let Some(at) = strays.iter().position(|seq| *seq == stray) {
                                    strays.swap_remove(at);
                                }
                            }
                            ledger.looked_into(&holding.doubts);
                        } else {
                            sent = Some((ledger.holding(), strays.clone()));
                        }
                    }
                    _ => {
                        if let Some((f, _)) = model.remove(&id) {
                            ledger.forget(id, f);
                        }
                    }
                }
                let holding = ledger.holding();
                let mark = open.iter().min().map_or(seq, |first| first - 1);
                prop_assert_eq!(holding.mark, mark);
                let covered = |seq: &i64| *seq <= mark;
                let oldest = model.values().map(|(_, s)| *s).filter(covered).min().unwrap_or(mark + 1);
                prop_assert!(holding.oldest <= oldest);
                prop_assert!(holding.oldest <= mark + 1);
                prop_assert!(strays.iter().all(|seq| *seq >= holding.oldest), "{strays:?} before {}", holding.oldest);
                if holding.doubts.is_empty() {
                    prop_assert_eq!(holding.oldest, oldest);
                }
                let mut held = holding.held;
                held.sort_unstable();
                let mut expected: Vec<_> =
                    model.iter().filter(|(_, (_, s))| covered(s)).map(|(id, (f, _))| (*id, *f)).collect();
                expected.sort_unstable();
                prop_assert_eq!(held, expected);
            }
        }
    }
}
