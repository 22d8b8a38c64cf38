//! Routes: who is asked, who next, what of it is told; hedging; broken endpoints.

use crate::{assert_error, step, until, within};
use posthouse_llm::ErrorClass::{NotNow, OutOfCredit, Terminal, Transient};
use posthouse_llm::sim::{Fault, Script, Sim};
use posthouse_llm::{Answer, Attempt, CallError, Config, Engine, KindGates};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Two simulated providers, `one` and `two`, and an engine.
struct Two {
    one: Sim,
    two: Sim,
    engine: Engine,
}

impl Two {
    /// `keys` goes into the only model, whose route is both, and `more` behind it.
    async fn new(one: impl Into<Script>, two: impl Into<Script>, keys: &str, more: &str) -> Self {
        let route = "route = [{ provider = \"one\", model = \"a\" }, { provider = \"two\", model = \"b\" }]";
        Self::with(one, two, &format!("[models.m]\n{route}\n{keys}\n{more}")).await
    }

    async fn with(one: impl Into<Script>, two: impl Into<Script>, sections: &str) -> Self {
        let (one, two) = (Sim::start(one.into()).await.unwrap(), Sim::start(two.into()).await.unwrap());
        let text = format!(
            "default_model = \"m\"\n[providers.one]\nbase_url = \"{}\"\n[providers.two]\nbase_url = \"{}\"\n\
             max_tokens_field = \"max_completion_tokens\"\nstream_usage = false\n{sections}",
            one.base_url(),
            two.base_url()
        );
        let engine = Engine::from_config(&Config::parse(&text, Path::new("")).unwrap()).unwrap();
        Self { one, two, engine }
    }

    async fn run(&self, attempt: Attempt<'_>) -> Result<Answer, Box<CallError>> {
        within(self.engine.run("summarize", r#"{"text":"One. Two."}"#, attempt)).await
    }

    fn requests(&self) -> (u64, u64) {
        (self.one.stats().requests, self.two.stats().requests)
    }
}

/// The route in a usage as `endpoint why class`.
fn route(usage: &Value) -> Vec<String> {
    let word = |visit: &Value, name: &str| visit[name].as_str().unwrap().to_owned();
    let shown = |visit: &Value| ["endpoint", "why", "class"].map(|name| word(visit, name)).join(" ");
    usage["route"].as_array().unwrap().iter().map(shown).collect()
}

#[tokio::test]
async fn the_usage_tells_where_an_attempt_went_and_why() {
    let two = Two::new(Fault::Status(429), Fault::Ok, "", "").await;
    let usage = two.run(Attempt::default()).await.unwrap().usage_json();
    assert_eq!((&usage["requests"], &usage["hedged"]), (&json!(2), &json!(false)));
    assert_eq!(route(&usage), ["one first not_now", "two next ok"]);
    assert_eq!(usage["route"][1]["model"], "b");
    let usage = two.run(Attempt::default()).await.unwrap().usage_json();
    assert_eq!((&usage["requests"], route(&usage)), (&json!(1), vec!["one first closed".into(), "two next ok".into()]));
    let usage = two.run(Attempt { number: 2, ..Attempt::default() }).await.unwrap().usage_json();
    assert_eq!(route(&usage), ["two later_attempt ok"]);
}

#[tokio::test]
async fn nobody_left_is_a_wait_for_the_first_to_open() {
    let two = Two::new(step("do=429,retry_after=40s"), step("do=529,retry_after=20s"), "", "").await;
    for requests in [2, 0] {
        let error = two.run(Attempt::default()).await.unwrap_err();
        assert_eq!((error.class, error.gate.as_deref()), (NotNow, Some("endpoint:two/b")), "{error:?}");
        assert!(error.wait.unwrap() < Duration::from_secs(26), "{error:?}");
        assert_eq!(error.usage_json()["requests"], requests);
    }
    assert_eq!(two.requests(), (1, 1));
    let poor = Two::new(Fault::InsufficientQuota, Fault::InsufficientQuota, "", "").await;
    let error = poor.run(Attempt::default()).await.unwrap_err();
    assert_error(&error, OutOfCredit, "insufficient_quota", Some(429));
    assert_eq!((error.verdict(), error.gate.is_some()), (posthouse_llm::Verdict::Snooze, true));
}

#[tokio::test]
async fn what_fails_in_earnest_ends_the_attempt() {
    for (fault, class) in [(Fault::Status(500), Transient), (Fault::Status(401), Terminal)] {
        let two = Two::new(fault, Fault::Ok, "", "").await;
        assert_eq!(two.run(Attempt::default()).await.unwrap_err().class, class);
        assert_eq!(two.requests(), (1, 0), "who tries again is for the queue to say");
    }
}

#[tokio::test]
async fn too_slow_to_begin_is_passed_by_while_another_is_open() {
    let model = "[models.m]\nroute = [{ provider = \"one\", model = \"a\", first_token_ms = 100 }, { provider = \"two\", model = \"b\" }]";
    let slow = || step("do=ok,first_token=400ms");
    let two = Two::with(slow(), Fault::Ok, model).await;
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(route(&answer.usage_json()), ["one first slow", "two next ok"]);
    until("the slow one is cut off", || two.one.stats().in_flight == 0).await;

    let two = Two::with(slow(), step("do=429,retry_after=60s"), model).await;
    let error = two.run(Attempt::default()).await.unwrap_err();
    assert_eq!(route(&error.usage_json()), ["one first slow", "two next not_now"]);
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(answer.endpoint, "one", "with nobody else to ask, it has the model's own time");
}

#[tokio::test]
async fn a_broken_endpoint_is_not_asked_until_a_probe_finds_it_well() {
    let two = Two::new(step("first=5,do=500"), Fault::Ok, "", "").await;
    for _ in 0..5 {
        assert_eq!(two.run(Attempt::default()).await.unwrap_err().class, Transient);
    }
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(route(&answer.usage_json()), ["one first closed", "two next ok"]);
    assert_eq!(two.requests(), (5, 1));

    let lonely = Two::with(step("do=502"), Fault::Ok, "[models.m]\nprovider = \"one\"").await;
    for _ in 0..5 {
        lonely.run(Attempt::default()).await.unwrap_err();
    }
    let error = lonely.run(Attempt::default()).await.unwrap_err();
    assert_error(&error, NotNow, "broken", None);
    assert!(error.wait.unwrap() > Duration::from_secs(5), "{error:?}");
    assert!(error.message.starts_with("not asked: one failed too often for m: 502 Bad Gateway"), "{error}");
}

#[tokio::test]
async fn a_context_too_long_goes_to_the_larger_model_at_once() {
    let models = "[models.m]\nprovider = \"one\"\nmodel = \"a\"\nmax_output_tokens = 5\n\
                  [models.large]\nprovider = \"two\"\nmodel = \"b\"\nmax_output_tokens = 7\n\
                  [kinds.summarize]\non_context_length = \"large\"";
    let two = Two::with(Fault::ContextLength, Fault::Ok, models).await;
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(route(&answer.usage_json()), ["one first terminal", "two context_length ok"]);
    assert_eq!((answer.model.as_str(), two.requests()), ("b", (1, 1)));
    let error = Two::with(Fault::ContextLength, Fault::ContextLength, models).await.run(Attempt::default()).await;
    assert_error(&error.unwrap_err(), Terminal, "context_length_exceeded", Some(400));
    assert_eq!(
        two.engine.kind_gates()[1],
        KindGates {
            kind: "summarize".into(),
            gates: vec!["model:m".into()],
            max_output_tokens: Some(5),
            drop_payload: false
        }
    );
}

#[tokio::test]
async fn another_model_is_used_where_a_budget_is_spent() {
    let models = "[models.m]\nprovider = \"one\"\nmodel = \"a\"\n[models.cheap]\nprovider = \"two\"\nmodel = \"b\"";
    let two = Two::with(Fault::Ok, Fault::Ok, models).await;
    for name in ["cheap", "b"] {
        let answer = two.run(Attempt { model: Some(name), ..Attempt::default() }).await.unwrap();
        assert_eq!(route(&answer.usage_json()), ["two instead ok"]);
    }
    let error = two.run(Attempt { model: Some("elsewhere"), ..Attempt::default() }).await.unwrap_err();
    assert_error(&error, NotNow, "unknown_model", None);
    assert_eq!(two.requests(), (0, 2));
}

#[tokio::test]
async fn hedged_the_first_to_begin_is_heard_and_the_other_cut_off() {
    let slow = || step("do=ok,first_token=5s");
    let two = Two::new(slow(), Fault::Ok, "hedge_after_ms = 100", "").await;
    let start = Instant::now();
    let answer = two.run(Attempt::default()).await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(4));
    let usage = answer.usage_json();
    assert_eq!((&usage["requests"], &usage["hedged"]), (&json!(2), &json!(true)));
    assert_eq!(route(&usage), ["one first dropped", "two hedge ok"]);
    until("the loser is cut off", || two.one.stats().in_flight == 0).await;
    assert_eq!((two.one.stats().abandoned, two.requests()), (1, (1, 1)));

    let two = Two::new(step("do=ok,first_token=300ms"), slow(), "hedge_after_ms = 100", "").await;
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(route(&answer.usage_json()), ["one first ok", "two hedge dropped"]);
    until("the loser is cut off", || two.two.stats().in_flight == 0).await;

    let two = Two::new(step("do=ok,first_token=50ms"), Fault::Ok, "hedge_after_ms = 2000", "").await;
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!((route(&answer.usage_json()), answer.trail.hedged), (vec!["one first ok".into()], false));
}

#[tokio::test]
async fn hedged_the_same_endpoint_is_asked_where_no_other_is_open() {
    let lonely = "[models.m]\nprovider = \"one\"\nhedge_after_ms = 100";
    let two = Two::with(step("first=1,do=hang"), Fault::Ok, lonely).await;
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(route(&answer.usage_json()), ["one first dropped", "one hedge ok"]);
    assert_eq!(two.requests(), (2, 0));
}

#[tokio::test]
async fn hedged_a_failure_of_one_leaves_it_to_the_other() {
    let two = Two::new(step("do=500,latency=300ms"), step("do=ok,first_token=600ms"), "hedge_after_ms = 100", "").await;
    let answer = two.run(Attempt::default()).await.unwrap();
    assert_eq!(route(&answer.usage_json()), ["one first transient", "two hedge ok"]);
    let two = Two::new(step("do=429,latency=300ms"), step("do=500,latency=600ms"), "hedge_after_ms = 100", "").await;
    let error = two.run(Attempt::default()).await.unwrap_err();
    assert_eq!(
        (error.class, route(&error.usage_json())),
        (Transient, vec!["one first not_now".into(), "two hedge transient".into()])
    );
}

#[tokio::test]
async fn an_exhausted_limit_is_heeded_before_anybody_is_refused() {
    let limited = |headers| {
        Script::parse(&format!("[limit]\nrequests_per_minute = 2\nwindow = \"2s\"\nheaders = {headers}")).unwrap()
    };
    for (headers, refused) in [(true, 0), (false, 1)] {
        let two = Two::with(limited(headers), Fault::Ok, "[models.m]\nprovider = \"one\"").await;
        two.run(Attempt::default()).await.unwrap();
        two.run(Attempt::default()).await.unwrap();
        let error = two.run(Attempt::default()).await.unwrap_err();
        assert_eq!((error.class, error.gate.as_deref()), (NotNow, Some("endpoint:one/m")));
        assert_eq!(two.one.stats().rates.unwrap().over_limit, refused);
        tokio::time::sleep(error.wait.unwrap()).await;
        two.run(Attempt::default()).await.unwrap();
        let rates = two.one.stats().rates.unwrap();
        assert_eq!((rates.worst_minute_requests, rates.over_limit), (2, refused));
    }
}

#[tokio::test]
async fn nothing_is_counted_as_sent_that_was_not() {
    let two = Two::new(Fault::Ok, Fault::Ok, "", "").await;
    let Two { one, two: _two, engine } = two;
    one.shutdown().await;
    let error = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err();
    assert_eq!((error.code.as_str(), &error.usage_json()["requests"]), ("connection_failed", &json!(0)));
    let error = within(engine.run("summarize", "{}", Attempt::default())).await.unwrap_err();
    assert_eq!(error.usage_json()["requests"], 0);
}

/// The file in the guide is one that works.
#[test]
fn the_guide_is_true() {
    let guide = include_str!("../../../../docs/routes.md");
    let toml = guide.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let config = Config::parse(toml, Path::new("")).unwrap();
    let engine = Engine::from_config_with(&config, &|_| Some("sk-0123456789".to_owned())).unwrap();
    for (model, endpoints) in engine.routes() {
        for endpoint in endpoints {
            assert!(guide.contains(&format!("`{endpoint}`")), "{model} is asked at {endpoint}");
        }
    }
    for word in ["first", "later_attempt", "next", "hedge", "context_length", "instead"] {
        assert!(guide.contains(&format!("`{word}`")), "{word}");
    }
}

#[test]
fn the_database_is_told_models_by_all_their_names() {
    let text = "default_model = \"m\"\n[providers.p]\nbase_url = \"http://x/v1\"\ngate_by_key = true\napi_key_env = \"KEY\"\n\
                [providers.q]\nbase_url = \"http://y/v1\"\n\
                [models.m]\nroute = [{ provider = \"p\", model = \"a\" }, { provider = \"q\", model = \"b\" }]\n\
                [models.b]\nprovider = \"q\"";
    let with_key = |key: &str| {
        let config = Config::parse(text, Path::new("")).unwrap();
        Engine::from_config_with(&config, &|_| Some(key.to_owned())).unwrap().routes()
    };
    let routes = with_key("sk-first-key");
    let names: Vec<&str> = routes.iter().map(|(model, _)| model.as_str()).collect();
    assert_eq!(names, ["a", "b", "m"]);
    assert_eq!(routes[1].1, ["q/b"], "a section's own route counts for its name");
    assert!(
        routes[2].1[0].starts_with("p@") && routes[2].1[0].ends_with("/a") && routes[2].1[1] == "q/b",
        "{routes:?}"
    );
    assert_eq!(routes, with_key("sk-first-key"));
    assert_ne!(routes, with_key("sk-second-key"));
}
