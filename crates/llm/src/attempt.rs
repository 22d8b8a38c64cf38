//! One attempt: along the route of a model, until somebody answers or fails in earnest.
//!
//! The next endpoint is asked when one is closed, says "not now", has no credit left, or is too slow to begin: none of these
//! is an answer, and none is paid. Everything else ends the attempt, since who tries again is for the queue to say.

use crate::answer::Answer;
use crate::call::call;
use crate::clock::Clock;
use crate::config::Timeouts;
use crate::error::{CallError, ErrorClass, FIRST_TOKEN_TIMEOUT};
use crate::gate::{Gates, Pass, TurnedAway};
use crate::hedge::{Winner, race};
use crate::idempotency::key;
use crate::judge::judge;
use crate::millis::millis;
use crate::prompt_kind::{Draft, Expected, PromptKind};
use crate::redact::Redactor;
use crate::route::{Model, Stop};
use crate::trace;
use crate::trail::{CLOSED, DROPPED, OK, SLOW, Trail, Why};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Boxed, since it is handed through many hands, and none of them shall hold room for it while the call lasts.
type Outcome = Result<Box<Answer>, Box<CallError>>;

/// The code of a context that is too long, whoever says so.
const TOO_LONG: &str = "context_length_exceeded";

/// A request that is ready to be sent along a route.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) kind: &'a PromptKind,
    pub(crate) model: &'a Model,
    /// The model to ask when the context is too long.
    pub(crate) larger: Option<&'a Model>,
    /// The endpoint to begin with, for which the draft is written, and why.
    pub(crate) first: usize,
    pub(crate) why: Why,
    pub(crate) draft: Draft,
    /// When the attempt began, and how long it may take.
    pub(crate) start: Instant,
    pub(crate) time: Duration,
    pub(crate) job: i64,
    /// Of the keys by which providers know a call again. `None`: none is sent.
    pub(crate) seed: Option<String>,
}

impl Request<'_> {
    /// Whether somebody along the route is told when it has seen a call before.
    pub(crate) fn takes_key(&self) -> bool {
        let models = [Some(self.model), self.larger];
        models.into_iter().flatten().flat_map(|model| &model.route).any(|stop| stop.transport.takes_key())
    }
}

/// An attempt under way.
pub(crate) struct Walk<'a> {
    request: Box<Request<'a>>,
    /// For whom the request is written at present.
    addressed: &'a Stop,
    gates: &'a Gates,
    redactor: &'a Redactor,
    trail: Trail,
    /// Whether endpoints follow the present one.
    is_more: bool,
}

/// One call, ready to be made.
struct Lane<'a> {
    stop: &'a Stop,
    pass: Pass<'a>,
    body: Bytes,
    /// By which the provider knows the call again.
    key: Option<String>,
    expected: Expected,
    timeouts: Timeouts,
    /// When the attempt began, and how long it may take.
    attempt: (Instant, Duration),
    begun: Option<Arc<Notify>>,
}

impl<'a> Walk<'a> {
    pub(crate) fn new(request: Box<Request<'a>>, gates: &'a Gates, redactor: &'a Redactor) -> Self {
        let addressed = &request.model.route[request.first];
        Self { request, addressed, gates, redactor, trail: Trail::default(), is_more: true }
    }

    /// Makes the attempt.
    pub(crate) async fn run(&mut self) -> Outcome {
        let (model, first, why) = (self.request.model, self.request.first, self.request.why);
        let mut outcome = self.along(model, first, why).await;
        if let (Err(error), Some(larger)) = (&outcome, self.request.larger)
            && error.code == TOO_LONG
            && !std::ptr::eq(larger, model)
        {
            // Boxed: hardly any attempt comes here, and all would hold the room.
            outcome = Box::pin(self.along(larger, 0, Why::ContextLength)).await;
        }
        match &mut outcome {
            Ok(answer) => answer.trail = std::mem::take(&mut self.trail),
            Err(error) => error.trail = std::mem::take(&mut self.trail),
        }
        outcome
    }

    /// Asks one endpoint of a model after the other.
    async fn along(&mut self, model: &'a Model, first: usize, mut why: Why) -> Outcome {
        let mut kept = None;
        for (count, stop) in (1..).zip(model.stops_from(first)) {
            self.is_more = count < model.route.len();
            if kept.is_some() && self.request.start.elapsed() >= self.request.time {
                break;
            }
            match self.gates.enter(&stop.gate, self.request.job).await {
                Err(away) => {
                    self.trail.note(stop.asked(), why, CLOSED);
                    keep(&mut kept, turned_away(stop, away));
                }
                Ok(pass) => {
                    let is_another_open = model.route.iter().any(|other| self.is_other_open(other, stop));
                    let (outcome, is_slow) = self.visit(model, (stop, pass), why, is_another_open).await;
                    match outcome {
                        Err(error) if is_slow || error.passes_on() => keep(&mut kept, error),
                        outcome => return outcome,
                    }
                }
            }
            why = Why::Next;
        }
        Err(kept.expect("a route has at least one endpoint, checked with the configuration"))
    }

    fn is_other_open(&self, other: &Stop, stop: &Stop) -> bool {
        !std::ptr::eq(other, stop) && self.gates.is_open(&other.gate)
    }

    /// Asks one endpoint, and a second one beside it if the model is to be hedged. Says whether it was given up as too slow.
    async fn visit(
        &mut self,
        model: &'a Model,
        (stop, pass): (&'a Stop, Pass<'a>),
        why: Why,
        is_another_open: bool,
    ) -> (Outcome, bool) {
        let mut lane = self.lane(model, stop, pass, false);
        let patience = stop.first_token().filter(|limit| is_another_open && *limit < model.timeouts.first_token());
        if let Some(limit) = patience {
            lane.timeouts.first_token_ms = millis(limit);
        }
        let outcome = match model.hedge_after {
            Some(delay) => Box::pin(self.hedged(model, lane, why, delay)).await,
            None => {
                let outcome = lane.call(self.request.kind, self.redactor).await;
                self.note(stop, why, &outcome, patience.is_some());
                outcome
            }
        };
        let is_slow = patience.is_some() && outcome.as_ref().is_err_and(|error| is_slow(error));
        (outcome, is_slow)
    }

    /// Asks one endpoint, and after a delay without a token another one. Who begins to answer first is heard out.
    async fn hedged(&mut self, model: &'a Model, mut lane: Lane<'a>, why: Why, delay: Duration) -> Outcome {
        let (begun, stop) = (Arc::new(Notify::new()), lane.stop);
        lane.begun = Some(begun.clone());
        let (kind, redactor) = (self.request.kind, self.redactor);
        let (is_probe, is_impatient) =
            (lane.pass.is_probe(), lane.timeouts.first_token() < model.timeouts.first_token());
        let mut first = Box::pin(async move { lane.call(kind, redactor).await });
        let has_begun = tokio::select! {
            outcome = &mut first => {
                self.note(stop, why, &outcome, is_impatient);
                return outcome;
            }
            () = begun.notified() => true,
            () = tokio::time::sleep(delay) => false,
        };
        let second = if has_begun { None } else { self.second(model, stop, is_probe).await };
        let Some(mut second) = second else {
            let outcome = first.await;
            self.note(stop, why, &outcome, is_impatient);
            return outcome;
        };
        tracing::info!(
            endpoint = second.stop.gate.name,
            "no token from {} for {delay:?}: asked as well",
            stop.gate.name
        );
        self.trail.hedged = true;
        let (second_begun, second_stop) = (Arc::new(Notify::new()), second.stop);
        second.begun = Some(second_begun.clone());
        let second = Box::pin(async move { second.call(kind, redactor).await });
        match race((first, &begun), (second, &second_begun), |error| error.class == ErrorClass::Terminal).await {
            Winner::First(outcome) => {
                self.note(stop, why, &outcome, is_impatient);
                self.trail.note(second_stop.asked(), Why::Hedge, DROPPED);
                outcome
            }
            Winner::Second(outcome) => {
                self.trail.note(stop.asked(), why, DROPPED);
                self.note(second_stop, Why::Hedge, &outcome, false);
                outcome
            }
            Winner::Both(one, other) => {
                self.note(stop, why, &one, is_impatient);
                self.note(second_stop, Why::Hedge, &other, false);
                // What fails in earnest ends the attempt, and a refusal does not undo that.
                match (one, other) {
                    (Ok(answer), _) | (_, Ok(answer)) => Ok(answer),
                    (Err(one), Err(other)) => Err(if one.passes_on() || is_slow(&one) { other } else { one }),
                }
            }
        }
    }

    /// The call that goes beside a slow one: to the next open endpoint, else to the same.
    async fn second(&mut self, model: &'a Model, stop: &'a Stop, is_probe: bool) -> Option<Lane<'a>> {
        let at = model.route.iter().position(|other| std::ptr::eq(other, stop)).unwrap_or(0);
        let another = model.stops_from(at).skip(1).find(|other| self.gates.is_open(&other.gate));
        // What is only being tried is not tried twice.
        let other = another.or((!is_probe && self.gates.is_open(&stop.gate)).then_some(stop))?;
        let pass = self.gates.enter(&other.gate, self.request.job).await.ok()?;
        Some(self.lane(model, other, pass, std::ptr::eq(other, stop)))
    }

    fn lane(&mut self, model: &'a Model, stop: &'a Stop, pass: Pass<'a>, beside: bool) -> Lane<'a> {
        if !std::ptr::eq(stop, self.addressed) {
            let (kind, dialect) = (self.request.kind, stop.transport.dialect);
            self.request.draft.text =
                kind.redraft(&self.request.draft, &stop.endpoint, dialect, model.max_output_tokens);
            self.addressed = stop;
        }
        self.trail.requests += 1;
        let is_asked_again = self.may_ask_again(model);
        let seed = self.request.seed.as_deref().filter(|_| stop.transport.takes_key());
        let key = seed.map(|seed| key(seed, self.request.job, stop.asked(), &self.request.draft.text, beside));
        // What nobody is asked with again is gone as soon as it is sent, and not only when the answer has come.
        let text = &mut self.request.draft.text;
        let body = if is_asked_again { text.clone() } else { std::mem::take(text) };
        Lane {
            stop,
            pass,
            body,
            key,
            expected: self.request.draft.expected,
            timeouts: model.timeouts,
            attempt: (self.request.start, self.request.time),
            begun: None,
        }
    }

    /// Whether the request may have to be sent once more in this attempt, whatever comes of it now.
    fn may_ask_again(&self, model: &Model) -> bool {
        let larger = self.request.larger.filter(|larger| !std::ptr::eq(*larger, model));
        self.is_more || model.hedge_after.is_some() || larger.is_some()
    }

    /// Notes what came of a call.
    fn note(&mut self, stop: &Stop, why: Why, outcome: &Outcome, is_impatient: bool) {
        let class = match outcome {
            Ok(_) => OK,
            Err(error) if is_impatient && is_slow(error) => SLOW,
            Err(error) => error.class.as_str(),
        };
        self.trail.note(stop.asked(), why, class);
        if outcome.as_ref().is_err_and(|error| !error.was_sent) {
            self.trail.requests -= 1;
        }
    }
}

impl Lane<'_> {
    /// Makes the call, and lets the gate know what came of it.
    async fn call(&mut self, kind: &PromptKind, redactor: &Redactor) -> Outcome {
        let (stop, expected) = (self.stop, self.expected);
        let clock = Clock::start(self.timeouts, self.attempt).tell(self.begun.take());
        let body = std::mem::take(&mut self.body);
        let span = trace::calling(stop);
        let sent = (body, self.key.as_deref(), expected.choices);
        let received = call(&stop.transport, sent, clock, &self.pass, redactor).await;
        let outcome = received.and_then(|received| judge(received, expected, kind, stop.asked(), redactor));
        match outcome {
            Ok(answer) => {
                let mut answer = Box::new(answer);
                stop.price.fill(&mut answer.usage, Some(&answer.model));
                log_answer(&answer);
                trace::answered(&span, &answer);
                stop.meter.answered(&answer);
                self.pass.answered();
                Ok(answer)
            }
            Err(mut error) => {
                stop.price.fill(&mut error.usage, None);
                error.endpoint = Some(stop.endpoint.provider.clone());
                error.model = Some(stop.endpoint.model.clone());
                stop.meter.failed(&error);
                trace::failed(&span, &error);
                drop(span);
                Box::pin(heed(stop, &self.pass, &mut error)).await;
                if error.status.is_some() {
                    self.pass.heard();
                }
                tracing::info!(endpoint = stop.endpoint.provider, model = stop.endpoint.model, class = %error.class, code = error.code, status = error.status, latency_ms = error.latency_ms, "call failed: {error}");
                Err(error)
            }
        }
    }
}

/// Lets the gate know what a failure means for others, and the job how long to wait.
async fn heed(stop: &Stop, pass: &Pass<'_>, error: &mut CallError) {
    let said = error.to_string();
    match error.class {
        // It is this process that has no more connections: the provider has said nothing.
        ErrorClass::NotNow if error.status.is_none() => {}
        ErrorClass::NotNow => {
            error.wait = Some(pass.refused(error.wait, &said).await);
            error.gate = Some(stop.gate_name());
        }
        ErrorClass::OutOfCredit => {
            error.wait = Some(pass.out_of_credit(stop.credit_pause, &said).await);
            error.gate = Some(stop.gate_name());
            tracing::warn!(endpoint = stop.gate.name, "out of credit, endpoint closed: {error}");
        }
        _ if error.blames_endpoint() => pass.failed(&said).await,
        // Any other answer shows that the provider takes calls; no answer shows nothing.
        _ if error.status.is_some() => {
            pass.answered();
            pass.taken(None).await;
        }
        _ => {}
    }
}

/// The failure of a call that was not made.
fn turned_away(stop: &Stop, away: TurnedAway) -> Box<CallError> {
    let (provider, model) = stop.asked();
    let TurnedAway { wait, reason, closed_by } = away;
    let (code, message) = match &*closed_by {
        "quota" => ("out_of_credit", format!("not asked: the account at {provider} is empty: {reason}")),
        "breaker" => ("broken", format!("not asked: {provider} failed too often for {model}: {reason}")),
        "person" => ("closed", format!("not asked: somebody closed the gate {}: {reason}", stop.gate_name())),
        _ => ("rate_limited", format!("not asked: {provider} said for {model} a moment ago: {reason}")),
    };
    let mut error = CallError::new(ErrorClass::NotNow, code, message);
    error.wait = Some(wait);
    error.endpoint = Some(provider.to_owned());
    error.model = Some(model.to_owned());
    error.gate = Some(stop.gate_name());
    error
}

/// Keeps the failure after which there is something to be had soonest; one that is an attempt only if there is no other.
fn keep(kept: &mut Option<Box<CallError>>, error: Box<CallError>) {
    let rank = |error: &CallError| {
        let class = match error.class {
            ErrorClass::NotNow => 0,
            ErrorClass::OutOfCredit => 1,
            _ => 2,
        };
        (class, error.wait.unwrap_or(Duration::MAX))
    };
    if kept.as_ref().is_none_or(|kept| rank(&error) < rank(kept)) {
        *kept = Some(error);
    }
}

fn is_slow(error: &CallError) -> bool {
    error.code == FIRST_TOKEN_TIMEOUT
}

fn log_answer(answer: &Answer) {
    tracing::debug!(
        endpoint = answer.endpoint,
        model = answer.model,
        latency_ms = answer.latency_ms,
        first_token_ms = answer.first_token_ms,
        input_tokens = answer.usage.input_tokens,
        output_tokens = answer.usage.output_tokens,
        "call answered"
    );
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use crate::config::Config;
    use crate::engine::{Attempt, Engine};
    use crate::prompt_kind::SUMMARIZE;
    use std::path::Path;

    /// How many bytes of the request are left after an attempt that nobody answers.
    async fn left(model: &str, kind: &str) -> usize {
        let text = format!(
            "default_model = \"m\"\n[providers.p]\nbase_url = \"http://127.0.0.1:1/v1\"\n[models.m]\n{model}\n\
             [models.big]\nprovider = \"p\"\nmodel = \"b\"\n[kinds.summarize]\nmodel = \"m\"\n{kind}"
        );
        let engine = Engine::from_config(&Config::parse(&text, Path::new("")).unwrap()).unwrap();
        let request = engine.request(SUMMARIZE, r#"{"text":"A tale."}"#, Attempt::default()).unwrap();
        let mut walk = engine.walk(request);
        assert_eq!(walk.run().await.unwrap_err().code, "connection_failed");
        walk.request.draft.text.len()
    }

    #[tokio::test]
    async fn a_request_is_held_only_for_those_who_may_be_asked_yet() {
        let one = "provider = \"p\"\nmodel = \"up\"";
        let two = "route = [{ provider = \"p\", model = \"a\" }, { provider = \"p\", model = \"b\" }]";
        assert_eq!(left(one, "").await, 0);
        assert_ne!(left(two, "").await, 0, "another endpoint follows");
        assert_ne!(left(&format!("{one}\nhedge_after_ms = 1000"), "").await, 0, "another call may go beside it");
        assert_ne!(left(one, "on_context_length = \"big\"").await, 0, "a larger model may follow");
    }
}
