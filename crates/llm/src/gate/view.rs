//! What this process goes by: a copy of the closed endpoints that is at most a second old.
//!
//! Whoever is about to ask refreshes it, one at a time, so an idle process asks nobody; what this process reports itself is in
//! its copy at once. A pass is the leave to make one call, and what comes of that call is told through it.

use super::breaker::Breaker;
use super::scout::{Entry, Scout};
use super::{Closure, EndpointGates, Finding, LocalGates, Report, spread};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// How old the copy may be.
const AGE_MAX: Duration = Duration::from_secs(1);
/// How long the answer of the gates is waited for. Calls go on by the old copy then: no gate is worth a standstill.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long those wait who find a probe under way.
const PROBE_WAIT: Duration = Duration::from_secs(1);
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
    scout: Scout,
}

impl EndpointGate {
    pub(crate) fn new(name: String) -> Self {
        Self { name, breaker: Mutex::default(), scout: Scout::default() }
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
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
}

#[derive(Debug, Clone)]
struct Closed {
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
        let wait = if wait > WAIT_MAX { PERSON_WAIT } else { wait };
        TurnedAway { wait: spread(wait), reason: self.reason.clone(), closed_by: self.closed_by.clone() }
    }
}

/// What the copy says to somebody who wants to make a call.
enum Begin {
    Open,
    Closed(TurnedAway),
    /// Its time is over: ask whether it may be tried.
    Over(Closed),
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

    /// Asks for leave to make a call for a job.
    pub(crate) async fn enter<'a>(&'a self, gate: &'a EndpointGate, job: i64) -> Result<Pass<'a>, TurnedAway> {
        let came = Instant::now();
        self.refresh(came.checked_sub(AGE_MAX)).await;
        if !self.may_pass(gate) {
            // Nobody is turned away by an old copy: who was claimed the moment a gate opened should not wait.
            self.refresh(Some(came)).await;
        }
        let pass = |is_probe, is_ahead| Pass {
            gates: self,
            gate,
            job,
            sent: Instant::now(),
            probing: AtomicBool::new(is_probe),
            ahead: AtomicBool::new(is_ahead),
        };
        let is_ahead = if self.is_open(gate) {
            let entry = match gate.scout.enter() {
                // Boxed: few calls wait here, and all would hold the room.
                Entry::Wait => Box::pin(gate.scout.wait()).await,
                entry => entry,
            };
            entry == Entry::GoAhead
        } else {
            false
        };
        let turned_away = match self.begin_probe(gate) {
            Begin::Open => return Ok(pass(false, is_ahead)),
            Begin::Closed(away) => away,
            Begin::Over(closed) => match Box::pin(self.try_it(gate, job, &closed)).await {
                Ok(()) => return Ok(pass(true, is_ahead)),
                Err(away) => away,
            },
        };
        if is_ahead {
            gate.scout.lost();
        }
        Err(turned_away)
    }

    /// What the copy says. Of those who find the time over, one is to ask whether it may try.
    fn begin_probe(&self, gate: &EndpointGate) -> Begin {
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
    async fn try_it(&self, gate: &EndpointGate, job: i64, closed: &Closed) -> Result<(), TurnedAway> {
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

    fn may_pass(&self, gate: &EndpointGate) -> bool {
        self.lock().closed.get(&gate.name).is_none_or(|closed| closed.is_over(Instant::now()))
    }

    fn lock(&self) -> MutexGuard<'_, View> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_fresh(&self, since: Option<Instant>) -> bool {
        self.lock().asked_at.is_some_and(|at| since.is_none_or(|since| at >= since))
    }

    /// Looks again, unless somebody has since then.
    async fn refresh(&self, since: Option<Instant>) {
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
    async fn report(
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
                endpoint = gate.name,
                finding = finding.as_str(),
                closed_ms = crate::call::millis(time),
                "endpoint closed: {reason}"
            ),
            None => tracing::info!(endpoint = gate.name, "endpoint open"),
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
        self.closed.extend(old.into_iter().filter(|(name, _)| own.get(name).is_some_and(|changed| *changed > asked)));
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

/// Leave to make one call. Dropping it without a word leaves the gate as it was.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gates: &'a Gates,
    gate: &'a EndpointGate,
    job: i64,
    sent: Instant,
    /// It tries an endpoint whose time is over, and nothing has been said about that yet.
    probing: AtomicBool,
    /// Others wait to hear how it is received.
    ahead: AtomicBool,
}

impl Pass<'_> {
    /// Whether this call tries an endpoint whose time is over.
    pub(crate) fn is_probe(&self) -> bool {
        self.probing.load(Ordering::Acquire)
    }

    /// There was an answer, of whatever sort: those who wait for it may go by what it said.
    pub(crate) fn heard(&self) {
        self.ahead.store(false, Ordering::Release);
        self.gate.scout.heard();
    }

    /// The provider took the call. `exhausted`: and says that it takes no further one for so long.
    pub(crate) async fn taken(&self, exhausted: Option<Duration>) {
        if let Some(wait) = exhausted {
            if self.covered(wait).is_none() {
                self.say(
                    Finding::Refused,
                    Some(wait),
                    "the rate limit is exhausted, say the headers of its last answer",
                )
                .await;
            }
        } else if self.is_probe() {
            self.say(Finding::Ok, None, "").await;
        }
    }

    /// The answer came to its end, or was a refusal that has to do with the request alone.
    pub(crate) fn answered(&self) {
        self.gate.breaker().answered(self.sent);
    }

    /// The provider said "not now". Returns how long to wait.
    pub(crate) async fn refused(&self, wait: Option<Duration>, reason: &str) -> Duration {
        // Of a thousand calls that were under way when it closed, one has to be told.
        let known = self.covered(wait.unwrap_or_default()).filter(|_| !self.is_probe());
        let closed_for = match known {
            Some(closed_for) => Some(closed_for),
            None => self.say(Finding::Refused, wait, reason).await,
        };
        let wait = wait.into_iter().chain(closed_for).max().unwrap_or(PROBE_WAIT);
        spread(if wait > WAIT_MAX { PERSON_WAIT } else { wait })
    }

    /// The account is empty. `pause` is for gates that nobody can open.
    pub(crate) async fn out_of_credit(&self, pause: Duration, reason: &str) -> Duration {
        let closed_for = self.say(Finding::Quota, Some(pause), reason).await.unwrap_or(pause);
        spread(if closed_for > WAIT_MAX { PERSON_WAIT } else { closed_for })
    }

    /// The call failed, and it was the endpoint's fault.
    pub(crate) async fn failed(&self, reason: &str) {
        let is_broken = self.gate.breaker().failed(self.sent);
        if is_broken || self.is_probe() {
            self.say(Finding::Broken, None, reason).await;
        }
    }

    async fn say(&self, finding: Finding, wait: Option<Duration>, reason: &str) -> Option<Duration> {
        let closed_for = self.gates.report(self.gate, finding, wait, reason, self.sent).await;
        self.probing.store(false, Ordering::Release);
        closed_for
    }

    /// For how long it is closed, if it was closed after this call was sent and for as long as that.
    fn covered(&self, wait: Duration) -> Option<Duration> {
        let view = self.gates.lock();
        let closed = view.closed.get(&self.gate.name).filter(|closed| closed.since >= self.sent)?;
        let left = closed.until.saturating_duration_since(Instant::now());
        (left + NEARLY >= wait).then_some(left)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.ahead.load(Ordering::Acquire) {
            self.gate.scout.lost();
        }
        if self.is_probe() {
            self.gates.source.give_up_probe(&self.gate.name, self.job);
            if let Some(closed) = self.gates.lock().closed.get_mut(&self.gate.name) {
                closed.probed_until = None;
            }
        }
    }
}
