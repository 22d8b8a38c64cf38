//! Who was told "not now" does not ask again at once; and routes.

use crate::{Pair, assert_error, engine, fault, step, within};
use posthouse_llm::ErrorClass::{NotNow, OutOfCredit, Transient};
use posthouse_llm::sim::{Fault, Sim};
use posthouse_llm::{Attempt, Config, Engine, Verdict};
use std::path::Path;
use std::time::Duration;

#[tokio::test]
async fn an_empty_account_is_asked_once_for_a_hundred_jobs() {
    let pair = Pair::new(Fault::InsufficientQuota).await;
    assert_error(&pair.fails().await, OutOfCredit, "insufficient_quota", Some(429));
    for number in 0..99 {
        let error = pair.summarize(&format!("Text {number}.")).await.unwrap_err();
        assert_error(&error, NotNow, "out_of_credit", None);
        assert!(error.wait.unwrap() > Duration::from_secs(50), "{error:?}");
        assert!(error.message.contains("429 Too Many Requests: You exceeded your current quota"), "{error}");
        assert_eq!(error.verdict(), Verdict::Snooze);
    }
    assert_eq!(pair.sim.stats().requests, 1);
}

#[tokio::test]
async fn a_hundred_jobs_at_once_ask_an_empty_account_once() {
    let sim = Sim::start(step("do=insufficient_quota,latency=50ms")).await.unwrap();
    let engine = engine(&sim.base_url(), "", "");
    let calls = (0..100).map(|_| {
        let engine = engine.clone();
        tokio::spawn(async move { engine.run("summarize", r#"{"text":"x"}"#, Attempt::default()).await })
    });
    let mut classes = Vec::new();
    for call in calls.collect::<Vec<_>>() {
        classes.push(within(call).await.unwrap().unwrap_err().class);
    }
    assert_eq!(classes.iter().filter(|class| **class == OutOfCredit).count(), 1);
    assert_eq!((classes.len(), sim.stats().requests), (100, 1));
}

#[tokio::test]
async fn after_the_wait_a_probe_opens_the_gate() {
    let pair = Pair::new(step("first=1,do=429,retry_after_ms=150")).await;
    let wait = pair.fails().await.wait.unwrap();
    let turned_away = pair.summarize("Other.").await.unwrap_err();
    assert_error(&turned_away, NotNow, "rate_limited", None);
    assert_eq!(pair.sim.stats().requests, 1);
    tokio::time::sleep(wait).await;
    pair.summarize("Probe.").await.unwrap();
    pair.summarize("All.").await.unwrap();
    assert_eq!(pair.sim.stats().requests, 3);
}

#[tokio::test]
async fn an_ordinary_failure_closes_nothing() {
    let pair = Pair::new(step("first=1,do=500")).await;
    assert_error(&pair.fails().await, Transient, "server_error", Some(500));
    pair.summarize("Next.").await.unwrap();
}

async fn two_stops(first: Fault, second: Fault) -> (Sim, Sim, Engine) {
    let (one, two) = (Sim::start(fault(first)).await.unwrap(), Sim::start(fault(second)).await.unwrap());
    let text = format!(
        "[providers.one]\nbase_url = \"{}\"\n[providers.two]\nbase_url = \"{}\"\n\
         [models.m]\nroute = [{{ provider = \"one\", model = \"a\" }}, {{ provider = \"two\", model = \"b\" }}]",
        one.base_url(),
        two.base_url()
    );
    let engine = Engine::from_config(&Config::parse(&text, Path::new("")).unwrap()).unwrap();
    (one, two, engine)
}

#[tokio::test]
async fn each_attempt_moves_on_along_the_route() {
    let (one, two, engine) = two_stops(Fault::Status(500), Fault::Ok).await;
    let run = |number| engine.run("summarize", r#"{"text":"x"}"#, Attempt { number, ..Attempt::default() });
    assert_eq!(within(run(1)).await.unwrap_err().endpoint.as_deref(), Some("one"));
    let answer = within(run(2)).await.unwrap();
    assert_eq!((answer.endpoint.as_str(), answer.model.as_str()), ("two", "b"));
    assert_eq!(within(run(3)).await.unwrap_err().endpoint.as_deref(), Some("one"));
    assert_eq!((one.stats().requests, two.stats().requests), (2, 1));
}

#[tokio::test]
async fn a_closed_gate_is_passed_by() {
    for fault in [Fault::Status(429), Fault::InsufficientQuota] {
        let (one, two, engine) = two_stops(fault, Fault::Ok).await;
        let run = || engine.run("summarize", r#"{"text":"x"}"#, Attempt::default());
        let refused = within(run()).await.unwrap();
        assert_eq!((refused.endpoint.as_str(), refused.trail.requests), ("two", 2), "the next one is asked at once");
        let closed = within(run()).await.unwrap();
        assert_eq!((closed.endpoint.as_str(), closed.trail.requests), ("two", 1));
        assert_eq!((one.stats().requests, two.stats().requests), (1, 2));
    }
}

#[tokio::test]
async fn clones_share_their_gates() {
    let sim = Sim::start(step("do=429,retry_after=60s")).await.unwrap();
    let engine = engine(&sim.base_url(), "", "");
    let calls = (0..20).map(|_| {
        let engine = engine.clone();
        tokio::spawn(async move { engine.run("summarize", r#"{"text":"x"}"#, Attempt::default()).await })
    });
    for call in calls.collect::<Vec<_>>() {
        assert_eq!(within(call).await.unwrap().unwrap_err().class, NotNow);
    }
    let asked = sim.stats().requests;
    assert_eq!(within(engine.run("summarize", r#"{"text":"y"}"#, Attempt::default())).await.unwrap_err().class, NotNow);
    assert_eq!(sim.stats().requests, asked);
}
