//! Gates of endpoints in this process alone: for programs without a database, and for tests.
//!
//! They behave as those in the database do, but nobody can open them: an empty account is tried again after a pause.

use super::keeper::{Closure, EndpointGates, Finding, Report, Told};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The first pause after a "not now" that names no time; it doubles with every one in a row.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
/// The longest pause that is not the provider's own wish.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The first pause of a broken endpoint; it doubles with every probe that fails.
const BROKEN_FIRST: Duration = Duration::from_secs(10);
/// The longest pause of a broken endpoint.
const BROKEN_MAX: Duration = Duration::from_secs(300);
/// The pause after an empty account, where the provider's section sets none.
const QUOTA_PAUSE: Duration = Duration::from_secs(300);
/// A probe that has not ended by then does not keep others from trying.
const PROBE_MAX: Duration = Duration::from_secs(60);

/// Gates that only this process knows of.
#[derive(Debug, Default)]
pub struct LocalGates {
    closed: Mutex<HashMap<String, Closed>>,
}

#[derive(Debug, Clone)]
struct Closed {
    since: Instant,
    until: Instant,
    reason: String,
    finding: Finding,
    /// Closings in a row for the same reason.
    strikes: u32,
    /// The job that tries it, and until when.
    probe: Option<(i64, Instant)>,
}

impl LocalGates {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Closed>> {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, report: Report<'_>) -> Option<Duration> {
        let now = Instant::now();
        let sent = now.checked_sub(report.age).unwrap_or(now);
        let mut all = self.lock();
        let old = all.get(report.endpoint).cloned();
        if report.finding == Finding::Ok {
            // Only a probe was sent after the time was over. A call from before it closed says nothing about now.
            let closed = old.filter(|old| sent < old.until);
            if closed.is_none() {
                all.remove(report.endpoint);
            }
            return closed.map(|closed| closed.until.saturating_duration_since(now));
        }
        if let Some(old) = old.as_ref().filter(|old| old.finding == Finding::Quota && old.until > now) {
            return Some(old.until - now);
        }
        let is_echo = old.as_ref().is_some_and(|old| sent < old.since);
        // A refusal says nothing of how long an endpoint stays broken, nor a failure how long one that refuses will.
        let in_a_row = old.as_ref().filter(|old| old.finding == report.finding);
        let before = in_a_row.map_or(0, |old| old.strikes);
        let strikes = if is_echo { before } else { before.saturating_add(1) };
        let (first, most) =
            if report.finding == Finding::Broken { (BROKEN_FIRST, BROKEN_MAX) } else { (PAUSE_FIRST, PAUSE_MAX) };
        let pause = match report.finding {
            Finding::Quota => QUOTA_PAUSE,
            _ => first.saturating_mul(1 << strikes.saturating_sub(1).min(10)).min(most),
        };
        let until = match (&old, report.wait) {
            // An echo without a time of its own lengthens nothing.
            (Some(old), None) if is_echo => old.until,
            (Some(old), wait) => old.until.max(now + wait.unwrap_or(pause)),
            (None, wait) => now + wait.unwrap_or(pause),
        };
        let since = old.filter(|_| is_echo).map_or(now, |old| old.since);
        let closed =
            Closed { since, until, reason: report.reason.to_owned(), finding: report.finding, strikes, probe: None };
        all.insert(report.endpoint.to_owned(), closed);
        Some(until.saturating_duration_since(now))
    }

    fn try_probe(&self, endpoint: &str, job: i64) -> bool {
        let now = Instant::now();
        let mut all = self.lock();
        let Some(closed) = all.get_mut(endpoint) else { return true };
        if closed.until > now || closed.probe.is_some_and(|(other, until)| other != job && until > now) {
            return false;
        }
        closed.probe = Some((job, now + PROBE_MAX));
        true
    }
}

impl EndpointGates for LocalGates {
    fn closures(&self) -> Told<'_, Vec<Closure>> {
        Box::pin(async {
            let now = Instant::now();
            let closure = |(endpoint, closed): (&String, &Closed)| Closure {
                endpoint: endpoint.clone(),
                closed_for: closed.until.saturating_duration_since(now),
                reason: closed.reason.clone(),
                closed_by: closed.finding.closed_by().to_owned(),
            };
            Ok(self.lock().iter().map(closure).collect())
        })
    }

    fn report<'a>(&'a self, report: Report<'a>) -> Told<'a, Option<Duration>> {
        Box::pin(async move { Ok(self.note(report)) })
    }

    fn begin_probe<'a>(&'a self, endpoint: &'a str, job: i64) -> Told<'a, bool> {
        Box::pin(async move { Ok(self.try_probe(endpoint, job)) })
    }

    fn give_up_probe(&self, endpoint: &str, job: i64) {
        if let Some(closed) = self.lock().get_mut(endpoint) {
            closed.probe = closed.probe.filter(|(other, _)| *other != job);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn report(finding: Finding, wait: Option<Duration>, sent: Instant) -> Report<'static> {
        Report { endpoint: "p/m", finding, wait, reason: "slow down", age: sent.elapsed() }
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_opens_it() {
        let gates = LocalGates::default();
        let before = Instant::now();
        tokio::time::advance(SECOND).await;
        assert_eq!(gates.note(report(Finding::Refused, Some(SECOND * 10), before)), Some(SECOND * 10));
        assert_eq!(gates.note(report(Finding::Ok, None, before)), Some(SECOND * 10), "an older answer opens nothing");
        assert!(!gates.try_probe("p/m", 1), "its time is not over");

        tokio::time::advance(SECOND * 11).await;
        assert_eq!(gates.closures().await.map(|all| all[0].closed_for).ok(), Some(Duration::ZERO));
        assert!(gates.try_probe("p/m", 1));
        assert!(!gates.try_probe("p/m", 2), "one probe at a time");
        gates.give_up_probe("p/m", 2);
        assert!(!gates.try_probe("p/m", 2), "only who tries can give up");
        gates.give_up_probe("p/m", 1);
        assert!(gates.try_probe("p/m", 2));
        tokio::time::advance(PROBE_MAX).await;
        assert!(gates.try_probe("p/m", 3), "a probe does not hold it for ever");
        assert_eq!(gates.note(report(Finding::Ok, None, Instant::now())), None);
        assert!(gates.try_probe("p/m", 4) && gates.try_probe("p/m", 5));
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_with_answers_in_a_row_and_not_with_echoes() {
        for (finding, expected) in
            [(Finding::Refused, [1, 2, 4, 8, 16, 32, 60, 60]), (Finding::Broken, [10, 20, 40, 80, 160, 300, 300, 300])]
        {
            let gates = LocalGates::default();
            let before = Instant::now();
            for (number, expected) in expected.into_iter().enumerate() {
                tokio::time::advance(SECOND * 400).await;
                let sent = if number == 0 { before } else { Instant::now() };
                assert_eq!(gates.note(report(finding, None, sent)), Some(SECOND * expected), "{finding:?}");
                if number == 0 {
                    for _ in 0..100 {
                        assert_eq!(gates.note(report(finding, None, before)), Some(SECOND * expected));
                    }
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_do_not_lengthen_the_pause_of_a_broken_endpoint_nor_the_other_way_round() {
        let gates = LocalGates::default();
        let note = async |finding, wait| {
            tokio::time::advance(SECOND * 400).await;
            gates.note(report(finding, wait, Instant::now()))
        };
        for _ in 0..6 {
            assert_eq!(note(Finding::Refused, Some(SECOND)).await, Some(SECOND));
        }
        assert_eq!(note(Finding::Broken, None).await, Some(BROKEN_FIRST));
        assert_eq!(note(Finding::Broken, None).await, Some(BROKEN_FIRST * 2));
        assert_eq!(note(Finding::Refused, None).await, Some(PAUSE_FIRST));
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_account_is_tried_again_after_a_pause() {
        let gates = LocalGates::default();
        assert_eq!(gates.note(report(Finding::Quota, None, Instant::now())), Some(QUOTA_PAUSE));
        assert_eq!(gates.note(report(Finding::Refused, Some(SECOND), Instant::now())), Some(QUOTA_PAUSE));
    }
}
