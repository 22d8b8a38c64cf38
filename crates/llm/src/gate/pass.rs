//! Leave to make one call, through which is told what comes of it.

use super::keeper::Finding;
use super::scout::Entry;
use super::view::{AGE_MAX, Begin, EndpointGate, Gates, PROBE_WAIT, TurnedAway, for_jobs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// What is used up for less than this is left to the provider to refuse: by the time that others heard of it, it would be over.
const EXHAUSTED_MIN: Duration = Duration::from_secs(1);

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

impl Gates {
    /// Asks for leave to make a call for a job.
    pub(crate) async fn enter<'a>(&'a self, gate: &'a EndpointGate, job: i64) -> Result<Pass<'a>, TurnedAway> {
        let came = Instant::now();
        self.refresh(came.checked_sub(AGE_MAX)).await;
        if !self.may_pass(gate) {
            // Nobody is turned away by an old copy: who was claimed the moment a gate opened should not wait.
            self.refresh(Some(came)).await;
        }
        let pass = |is_probe, is_ahead| Pass::new(self, (gate, job), is_probe, is_ahead);
        let is_ahead = self.is_open(gate) && {
            let opened = self.opened(gate);
            let entry = match gate.scout.enter(opened) {
                // Boxed: few calls wait here, and all would hold the room.
                Entry::Wait(_) => Box::pin(gate.scout.wait(opened)).await,
                entry => entry,
            };
            entry == Entry::GoAhead
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
}

impl<'a> Pass<'a> {
    fn new(gates: &'a Gates, (gate, job): (&'a EndpointGate, i64), is_probe: bool, is_ahead: bool) -> Self {
        let (probing, ahead) = (AtomicBool::new(is_probe), AtomicBool::new(is_ahead));
        Self { gates, gate, job, sent: Instant::now(), probing, ahead }
    }

    /// Whether this call tries an endpoint whose time is over.
    pub(crate) fn is_probe(&self) -> bool {
        self.probing.load(Ordering::Acquire)
    }

    /// The provider has begun to refuse: nobody else need go before it is told what it said.
    pub(crate) fn hold(&self) {
        self.gate.scout.hold();
    }

    /// There was an answer, of whatever sort: those who wait for it may go by what it said.
    pub(crate) fn heard(&self) {
        self.ahead.store(false, Ordering::Release);
        self.gate.scout.heard();
    }

    /// The provider took the call. `exhausted`: and says that it takes no further one for so long.
    pub(crate) async fn taken(&self, exhausted: Option<Duration>) {
        if let Some(wait) = exhausted.filter(|wait| *wait >= EXHAUSTED_MIN) {
            if self.gates.covers(self.gate, self.sent, wait).is_none() {
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
        let known = self.gates.covers(self.gate, self.sent, wait.unwrap_or_default()).filter(|_| !self.is_probe());
        let closed_for = match known {
            Some(closed_for) => Some(closed_for),
            None => self.say(Finding::Refused, wait, reason).await,
        };
        let wait = wait.into_iter().chain(closed_for).max().unwrap_or(PROBE_WAIT);
        for_jobs(wait)
    }

    /// The account is empty. `pause` is for gates that nobody can open.
    pub(crate) async fn out_of_credit(&self, pause: Duration, reason: &str) -> Duration {
        let closed_for = self.say(Finding::Quota, Some(pause), reason).await.unwrap_or(pause);
        for_jobs(closed_for)
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
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.ahead.load(Ordering::Acquire) {
            self.gate.scout.lost();
        }
        if self.is_probe() {
            self.gates.give_up_probe(self.gate, self.job);
        }
    }
}
