//! What this process goes by: a copy of the closed endpoints that is at most a second old.
//!
//! Whoever is about to ask refreshes it, one at a time, so an idle process asks nobody; what this process reports itself is in
//! its copy at once.

use super::breaker::Breaker;
use super::keeper::{Closure, EndpointGates, Finding, Report, spread};
use super::local::LocalGates;
use super::scout::{SILENCE, Scout};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// How old the copy may be.
pub(super) const AGE_MAX: Duration = Duration::from_secs(1);
/// How long the answer of the gates is waited for. Calls go on by the old copy then: no gate is worth a standstill.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long those wait who find a probe under way.
pub(super) const PROBE_WAIT: Duration = Duration::from_secs(1);
/// What is closed for longer waits for a person, who may open it any time.
const WAIT_MAX: Duration = crate::hint::WAIT_MAX;
/// How long a job waits where nobody knows for how long.
const PERSON_WAIT: Duration = Duration::from_secs(60);
/// Closed for ever, in a number that can be added to a time.
const EVER: Duration = Duration::from_secs(365 * 86_400);
/// A closure that ends so much earlier is as good as the same: clocks and answers take their time.
const NEARLY: Duration = Duration::from_millis(250);

/// The gate of one endpoint, as far as this process is concerned.
#[derive(Debug)]
pub(crate) struct EndpointGate {
    /// `PROVIDER/MODEL`.
    pub(crate) name: String,
    breaker: Mutex<Breaker>,
    pub(super) scout: Scout,
}

impl EndpointGate {
    pub(crate) fn new(name: String) -> Self {
        Self { name, breaker: Mutex::default(), scout: Scout::default() }
    }

    pub(super) fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The gates of all endpoints.
#[derive(Debug)]
pub(crate) struct Gates {
    source: Arc<dyn EndpointGates>,
    view: Mutex<View>,
    /// Held by whoever refreshes the copy.
    refreshing: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct View {
    asked_at: Option<Instant>,
    closed: HashMap<String, Closed>,
    /// When this process itself last changed an endpoint: an answer that was asked for before knows nothing of it.
    own: HashMap<String, Instant>,
    /// When somebody else was seen to have opened an endpoint, until everybody has forgotten what it said before.
    opened: HashMap<String, Instant>,
}

#[derive(Debug, Clone)]
pub(super) struct Closed {
    since: Instant,
    until: Instant,
    reason: Arc<str>,
    closed_by: Arc<str>,
    /// Somebody tries it: nobody need ask for a probe before that.
    probed_until: Option<Instant>,
}

impl Closed {
    /// Whether somebody may ask to try it. A little early, as its keeper's clock is the one that counts.
    fn is_over(&self, now: Instant) -> bool {
        self.until <= now + NEARLY
    }

    fn turn_away(&self, wait: Duration) -> TurnedAway {
        TurnedAway { wait: for_jobs(wait), reason: self.reason.clone(), closed_by: self.closed_by.clone() }
    }
}

/// What the copy says to somebody who wants to make a call.
pub(super) enum Begin {
    Open,
    Closed(TurnedAway),
    /// Its time is over: ask whether it may be tried.
    Over(Closed),
}

/// How long a job waits for an endpoint that is closed for so long.
pub(super) fn for_jobs(closed_for: Duration) -> Duration {
    spread(if closed_for > WAIT_MAX { PERSON_WAIT } else { closed_for })
}

/// Turned away: come back after `wait`.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    pub(crate) wait: Duration,
    pub(crate) reason: Arc<str>,
    pub(crate) closed_by: Arc<str>,
}

impl Default for Gates {
    fn default() -> Self {
        Self::new(Arc::new(LocalGates::default()))
    }
}

impl Gates {
    pub(crate) fn new(source: Arc<dyn EndpointGates>) -> Self {
        Self { source, view: Mutex::default(), refreshing: tokio::sync::Mutex::default() }
    }

    /// When an endpoint was seen to be opened by somebody else, not long ago.
    pub(super) fn opened(&self, gate: &EndpointGate) -> Option<Instant> {
        self.lock().opened.get(&gate.name).copied()
    }

    /// What the copy says. Of those who find the time over, one is to ask whether it may try.
    pub(super) fn begin_probe(&self, gate: &EndpointGate) -> Begin {
        let now = Instant::now();
        let mut view = self.lock();
        let Some(closed) = view.closed.get_mut(&gate.name) else { return Begin::Open };
        if !closed.is_over(now) {
            return Begin::Closed(closed.turn_away(closed.until - now));
        }
        if closed.probed_until.is_some_and(|until| until > now) {
            return Begin::Closed(closed.turn_away(PROBE_WAIT));
        }
        closed.probed_until = Some(now + PROBE_WAIT);
        Begin::Over(closed.clone())
    }

    /// Asks whether this job may try an endpoint whose time is over.
    pub(super) async fn try_it(&self, gate: &EndpointGate, job: i64, closed: &Closed) -> Result<(), TurnedAway> {
        match timeout(PATIENCE, self.source.begin_probe(&gate.name, job)).await {
            Ok(Ok(true)) => return Ok(()),
            // Not quite over.
            Ok(Ok(false)) if closed.until > Instant::now() => {
                if let Some(closed) = self.lock().closed.get_mut(&gate.name) {
                    closed.probed_until = Some(closed.until);
                }
                return Err(closed.turn_away(closed.until.saturating_duration_since(Instant::now())));
            }
            Ok(Ok(false)) => {}
            Ok(Err(error)) => tracing::warn!(endpoint = gate.name, "cannot ask whether it may be tried: {error}"),
            Err(_) => tracing::warn!(endpoint = gate.name, "cannot ask whether it may be tried: no answer in time"),
        }
        Err(closed.turn_away(PROBE_WAIT))
    }

    /// Whether calls pass now, by the copy as it is.
    pub(crate) fn is_open(&self, gate: &EndpointGate) -> bool {
        !self.lock().closed.contains_key(&gate.name)
    }

    pub(super) fn may_pass(&self, gate: &EndpointGate) -> bool {
        let now = Instant::now();
        let is_free = |closed: &Closed| closed.is_over(now) && closed.probed_until.is_none_or(|until| until <= now);
        self.lock().closed.get(&gate.name).is_none_or(is_free)
    }

    /// For how long an endpoint is closed, if it was closed after `sent`, and for as long as `wait`.
    pub(super) fn covers(&self, gate: &EndpointGate, sent: Instant, wait: Duration) -> Option<Duration> {
        let view = self.lock();
        let closed = view.closed.get(&gate.name).filter(|closed| closed.since >= sent)?;
        let left = closed.until.saturating_duration_since(Instant::now());
        (left + NEARLY >= wait).then_some(left)
    }

    /// A probe ended without an answer: somebody else may ask to try.
    pub(super) fn give_up_probe(&self, gate: &EndpointGate, job: i64) {
        self.source.give_up_probe(&gate.name, job);
        if let Some(closed) = self.lock().closed.get_mut(&gate.name) {
            closed.probed_until = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_fresh(&self, since: Option<Instant>) -> bool {
        self.lock().asked_at.is_some_and(|at| since.is_none_or(|since| at >= since))
    }

    /// Looks again, unless somebody has since then.
    pub(super) async fn refresh(&self, since: Option<Instant>) {
        if self.is_fresh(since) {
            return;
        }
        let _turn = self.refreshing.lock().await;
        if self.is_fresh(since) {
            return;
        }
        let asked = Instant::now();
        let told = timeout(PATIENCE, self.source.closures()).await;
        let mut view = self.lock();
        // Also after a failure: the next try is a second away, and what is known stands.
        view.asked_at = Some(asked);
        match told {
            Ok(Ok(closures)) => view.replace(closures, asked),
            Ok(Err(error)) => tracing::warn!("cannot ask which endpoints are closed; going by what is known: {error}"),
            Err(_) => {
                tracing::warn!("cannot ask which endpoints are closed; going by what is known: no answer in time")
            }
        }
    }

    /// Tells what an endpoint answered, and notes at once what that means. Returns for how long it is closed.
    pub(super) async fn report(
        &self,
        gate: &EndpointGate,
        finding: Finding,
        wait: Option<Duration>,
        reason: &str,
        sent: Instant,
    ) -> Option<Duration> {
        let report = Report { endpoint: &gate.name, finding, wait, reason, age: sent.elapsed() };
        let closed_for = match timeout(PATIENCE, self.source.report(report)).await {
            Ok(Ok(closed_for)) => closed_for,
            failed => {
                let problem = failed.map_or_else(
                    |_| "no answer in time".to_owned(),
                    |told| told.err().map_or_else(String::new, |error| error.to_string()),
                );
                tracing::warn!(endpoint = gate.name, finding = finding.as_str(), "cannot tell the others: {problem}");
                // This process at least heeds it.
                (finding != Finding::Ok).then(|| wait.unwrap_or(PROBE_WAIT))
            }
        };
        match closed_for {
            Some(time) => tracing::info!(
                target: "posthouse::event::gate",
                event = "gate_closed",
                gate = gate.name,
                finding = finding.as_str(),
                closed_ms = crate::millis::millis(time),
                reason,
                "gate {} closed: {reason}", gate.name
            ),
            None => {
                tracing::info!(target: "posthouse::event::gate", event = "gate_opened", gate = gate.name, "gate {} open", gate.name);
            }
        }
        self.lock().note(&gate.name, closed_for, (reason, finding));
        closed_for
    }
}

impl View {
    fn replace(&mut self, closures: Vec<Closure>, asked: Instant) {
        let now = Instant::now();
        let mut old = std::mem::take(&mut self.closed);
        for closure in closures {
            let before = old.remove(&closure.endpoint);
            let is_newer = self.own.get(&closure.endpoint).is_some_and(|changed| *changed > asked);
            let closed = match before {
                Some(before) if is_newer => before,
                None if is_newer => continue,
                before => Closed {
                    since: before.as_ref().map_or(now, |before| before.since),
                    until: now + closure.closed_for.min(EVER),
                    reason: closure.reason.into(),
                    closed_by: closure.closed_by.into(),
                    probed_until: before.and_then(|before| before.probed_until),
                },
            };
            self.closed.insert(closure.endpoint, closed);
        }
        // What was not told may have been closed by us a moment ago.
        let own = &self.own;
        let is_newer = |(name, _): &(String, Closed)| own.get(name).is_some_and(|changed| *changed > asked);
        let (ours, opened): (HashMap<_, _>, HashMap<_, _>) = old.into_iter().partition(is_newer);
        self.closed.extend(ours);
        self.opened.retain(|_, at| now < *at + SILENCE);
        self.opened.extend(opened.into_keys().map(|name| (name, now)));
        self.own.retain(|_, changed| *changed > asked);
    }

    fn note(&mut self, endpoint: &str, closed_for: Option<Duration>, (reason, finding): (&str, Finding)) {
        let now = Instant::now();
        self.own.insert(endpoint.to_owned(), now);
        let Some(closed_for) = closed_for else {
            self.closed.remove(endpoint);
            return;
        };
        let until = now + closed_for.min(EVER);
        match self.closed.get_mut(endpoint) {
            // It was closed before and still is: an answer that came late.
            Some(closed) if finding == Finding::Ok => closed.until = until,
            _ => {
                let (reason, closed_by) = (reason.into(), finding.closed_by().into());
                self.closed
                    .insert(endpoint.to_owned(), Closed { since: now, until, reason, closed_by, probed_until: None });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::Told;
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use tokio::time::sleep;

    const SECOND: Duration = Duration::from_secs(1);

    /// Gates as in a database: slow, countable, and away at times.
    #[derive(Debug, Default)]
    struct Remote {
        inner: LocalGates,
        looks: AtomicU32,
        reports: AtomicU32,
        is_away: AtomicBool,
    }

    impl Remote {
        async fn answer<T>(&self, counter: &AtomicU32, told: Told<'_, T>) -> Result<T, super::super::GateError> {
            counter.fetch_add(1, Ordering::Relaxed);
            let answer = told.await;
            sleep(Duration::from_millis(10)).await;
            if self.is_away.load(Ordering::Relaxed) { Err("away".into()) } else { answer }
        }

        fn counts(&self) -> (u32, u32) {
            (self.looks.load(Ordering::Relaxed), self.reports.load(Ordering::Relaxed))
        }
    }

    impl EndpointGates for Remote {
        fn closures(&self) -> Told<'_, Vec<Closure>> {
            Box::pin(self.answer(&self.looks, self.inner.closures()))
        }
        fn report<'a>(&'a self, report: Report<'a>) -> Told<'a, Option<Duration>> {
            Box::pin(self.answer(&self.reports, self.inner.report(report)))
        }
        fn begin_probe<'a>(&'a self, endpoint: &'a str, job: i64) -> Told<'a, bool> {
            self.inner.begin_probe(endpoint, job)
        }
        fn give_up_probe(&self, endpoint: &str, job: i64) {
            self.inner.give_up_probe(endpoint, job);
        }
    }

    fn two_processes() -> (Arc<Remote>, Gates, Gates, EndpointGate) {
        let remote = Arc::new(Remote::default());
        let gate = EndpointGate::new("p/m".to_owned());
        gate.scout.heard();
        (remote.clone(), Gates::new(remote.clone()), Gates::new(remote), gate)
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_many_looks_and_only_when_the_copy_is_old() {
        let (remote, one, _, gate) = two_processes();
        let mut passes = Vec::new();
        for _ in 0..3 {
            let (a, b, c) = tokio::join!(one.enter(&gate, 1), one.enter(&gate, 2), one.enter(&gate, 3));
            passes.extend([a.unwrap(), b.unwrap(), c.unwrap()]);
        }
        assert_eq!(remote.counts().0, 1);
        sleep(SECOND).await;
        one.enter(&gate, 1).await.unwrap();
        assert_eq!(remote.counts(), (2, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_told_once_and_heeded_by_others_within_a_second() {
        let (remote, one, two, gate) = two_processes();
        two.enter(&gate, 0).await.unwrap();
        let (first, echo) = (one.enter(&gate, 1).await.unwrap(), one.enter(&gate, 2).await.unwrap());
        sleep(Duration::from_millis(5)).await;
        assert!(first.refused(Some(SECOND * 20), "slow down").await >= SECOND * 20);
        assert!(echo.refused(Some(SECOND * 20), "slow down").await >= SECOND * 19);
        echo.refused(None, "slow down").await;
        assert_eq!(remote.counts().1, 1, "what is known is not told again");
        let away = one.enter(&gate, 3).await.unwrap_err();
        assert!(away.wait > SECOND * 19 && away.wait < SECOND * 26, "{away:?}");
        assert_eq!((&*away.reason, &*away.closed_by), ("slow down", "provider"));
        assert!(two.enter(&gate, 4).await.is_ok(), "an old copy may still let through");
        sleep(SECOND).await;
        assert!(two.enter(&gate, 5).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn one_probe_of_all_and_its_answer_opens_it_for_all() {
        let (remote, one, two, gate) = two_processes();
        one.enter(&gate, 1).await.unwrap().refused(Some(SECOND * 3), "slow down").await;
        sleep(SECOND * 3).await;
        let probe = one.enter(&gate, 1).await.unwrap();
        assert!(probe.is_probe());
        for gates in [&one, &two] {
            let away = gates.enter(&gate, 2).await.unwrap_err();
            assert!(away.wait < SECOND * 2, "they come back soon: {away:?}");
        }
        drop(probe);
        let probe = one.enter(&gate, 3).await.unwrap();
        probe.taken(None).await;
        assert!(!probe.is_probe() && !one.enter(&gate, 4).await.unwrap().is_probe());
        assert!(!two.enter(&gate, 5).await.unwrap().is_probe(), "nobody is turned away by an old copy");
        assert_eq!(remote.counts().1, 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_said_meanwhile_is_not_forgotten_by_an_older_answer() {
        let (_, one, _, gate) = two_processes();
        let pass = one.enter(&gate, 1).await.unwrap();
        sleep(SECOND).await;
        let look = async { one.enter(&gate, 2).await.is_ok() };
        let refuse = async {
            // The copy is asked for before this, and comes after it.
            one.lock().note("p/m", Some(SECOND * 9), ("slow down", Finding::Refused));
            sleep(Duration::from_millis(1)).await;
        };
        tokio::join!(look, async {
            sleep(Duration::from_millis(5)).await;
            refuse.await;
        });
        assert!(!one.is_open(&gate));
        drop(pass);
    }

    #[tokio::test(start_paused = true)]
    async fn calls_go_on_while_the_gates_are_away() {
        let (remote, one, _, gate) = two_processes();
        remote.is_away.store(true, Ordering::Relaxed);
        let pass = one.enter(&gate, 1).await.unwrap();
        assert!(pass.refused(Some(SECOND * 5), "slow down").await >= SECOND * 5);
        assert!(one.enter(&gate, 2).await.is_err(), "this process heeds it all the same");
        let other = EndpointGate::new("p/other".to_owned());
        assert!(one.enter(&other, 3).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn five_failures_are_told_once() {
        let (remote, one, _, gate) = two_processes();
        for number in 1..=5 {
            sleep(Duration::from_millis(1)).await;
            let pass = one.enter(&gate, number).await.unwrap();
            pass.failed("it broke").await;
        }
        assert_eq!(remote.counts().1, 1);
        let away = one.enter(&gate, 6).await.unwrap_err();
        assert!(&*away.closed_by == "breaker" && away.wait > SECOND * 9, "{away:?}");
        sleep(SECOND * 10).await;
        one.enter(&gate, 7).await.unwrap().failed("it broke").await;
        assert_eq!(remote.counts().1, 2, "a probe that fails is one too many");
        assert!(one.enter(&gate, 8).await.unwrap_err().wait > SECOND * 19);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_used_up_for_a_blink_closes_nothing() {
        let (remote, one, _, gate) = two_processes();
        let pass = one.enter(&gate, 1).await.unwrap();
        pass.taken(Some(SECOND / 2)).await;
        assert_eq!(remote.counts().1, 0);
        pass.taken(Some(SECOND * 2)).await;
        assert!(one.enter(&gate, 2).await.is_err());
    }
}
