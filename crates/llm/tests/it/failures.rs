//! Every way to fail, its class, its code, and that it cost one request.

use crate::{KEY, Pair, assert_error, engine, fault, step, within};
use posthouse_llm::ErrorClass::{Ambiguous, Incomplete, NotNow, OutOfCredit, Terminal, Transient};
use posthouse_llm::sim::{Fault, Script, Sim};
use posthouse_llm::{Attempt, Secret, Verdict};
use std::time::Duration;

#[tokio::test]
async fn a_bad_key_reads_like_the_tutorial() {
    let pair = Pair::new(Script { api_key: Some(Secret::new("another-key")), ..Script::default() }).await;
    let error = pair.fails().await;
    assert_eq!(error.to_string(), "401 Unauthorized: Incorrect API key provided");
    assert_error(&error, Terminal, "invalid_api_key", Some(401));
    assert_eq!(error.verdict(), Verdict::Fail);
    assert_eq!((error.endpoint.as_deref(), error.model.as_deref()), (Some("sim"), Some("up")));
}

#[tokio::test]
async fn statuses_and_bodies() {
    for (behaviour, class, code, status) in [
        (Fault::Status(400), Terminal, "invalid_value", 400),
        (Fault::Status(403), Terminal, "unsupported_country_region_territory", 403),
        (Fault::ModelNotFound, Terminal, "model_not_found", 404),
        (Fault::Status(413), Terminal, "request_too_large", 413),
        (Fault::Status(422), Terminal, "refused", 422),
        (Fault::ContextLength, Terminal, "context_length_exceeded", 400),
        (Fault::Filter, Terminal, "content_filter", 200),
        (Fault::Empty400, Terminal, "http_400", 400),
        (Fault::Redirect, Terminal, "redirect", 302),
        (Fault::InsufficientQuota, OutOfCredit, "insufficient_quota", 429),
        (Fault::Status(402), OutOfCredit, "insufficient_credits", 402),
        (Fault::Status(429), NotNow, "rate_limit_exceeded", 429),
        (Fault::Status(529), NotNow, "overloaded_error", 529),
        (Fault::StreamError, NotNow, "overloaded_error", 200),
        (Fault::Status(503), Transient, "service_unavailable", 503),
        (Fault::Status(500), Transient, "server_error", 500),
        (Fault::Status(408), Transient, "refused", 408),
        (Fault::Status(522), Transient, "server_error", 522),
        (Fault::Html502, Transient, "http_502", 502),
        (Fault::Error200, Transient, "http_502", 200),
        (Fault::Cut, Incomplete, "incomplete_stream", 200),
        (Fault::CutUtf8, Incomplete, "stream_cut", 200),
        (Fault::CutToolCall, Incomplete, "incomplete_stream", 200),
        (Fault::ResetMid, Incomplete, "stream_cut", 200),
        (Fault::ContentLength, Incomplete, "stream_cut", 200),
        (Fault::Garbage, Incomplete, "bad_chunk", 200),
        (Fault::NoChoices, Incomplete, "no_choices", 200),
        (Fault::Html200, Incomplete, "html_answer", 200),
        (Fault::Empty, Incomplete, "empty_answer", 200),
        (Fault::Gzip, Incomplete, "compressed_answer", 200),
    ] {
        let error = Pair::new(behaviour).await.fails().await;
        assert_error(&error, class, code, Some(status));
    }
}

#[tokio::test]
async fn messages_say_what_came_instead() {
    for (behaviour, expected) in [
        (Fault::Html502, "502 Bad Gateway: an HTML page from a proxy or gateway: 502 Bad Gateway"),
        (Fault::Html200, "an HTML page came instead of an answer: Sign in"),
        (Fault::Empty400, "400 Bad Request: the provider gave no reason"),
        (Fault::Redirect, "302 Found: the provider redirects to /elsewhere; put the final address into base_url"),
        (Fault::StreamError, "Overloaded"),
    ] {
        assert_eq!(Pair::new(behaviour).await.fails().await.to_string(), expected);
    }
}

#[tokio::test]
async fn partial_text_is_kept_as_a_diagnostic_only() {
    let error = Pair::new(step("do=cut,after_tokens=1")).await.fails().await;
    assert_eq!(error.body_snippet.as_deref(), Some("One."), "{error:?}");
    assert!(error.first_token_ms.is_some());
    assert_eq!(error.verdict(), Verdict::Retry);
}

#[tokio::test]
async fn endless_answers_are_cut_off() {
    for behaviour in [Fault::Huge, Fault::HugeLine] {
        let pair = Pair::new(behaviour).await;
        assert_error(&pair.fails().await, Incomplete, "answer_too_large", Some(200));
    }
}

#[tokio::test]
async fn waits_are_taken_from_the_answer() {
    for (behaviour, wait_ms, class) in [
        ("do=429,retry_after=3s", 3_000, NotNow),
        ("do=429,retry_after_ms=2500", 2_500, NotNow),
        ("do=429,retry_after=9s,retry_after_ms=1200", 1_200, NotNow),
        ("do=429,retry_after=1.5s", 1_500, NotNow),
        ("do=503,retry_after=2s", 2_000, NotNow),
        ("do=429,retry_after=1440m", 3_600_000, NotNow),
    ] {
        let error = Pair::new(step(behaviour)).await.fails().await;
        let wait = error.wait.unwrap();
        let least = Duration::from_millis(wait_ms);
        assert!(
            error.class == class && wait >= least && wait <= least + (least / 4).min(Duration::from_secs(5)),
            "{behaviour}: {wait:?}"
        );
        assert_eq!(error.verdict(), Verdict::Snooze);
    }
    assert!(
        Pair::new(fault(Fault::Status(429))).await.fails().await.wait.is_some(),
        "a pause of ours where none is named"
    );
    assert_eq!(Pair::new(fault(Fault::Status(500))).await.fails().await.wait, None);
}

#[tokio::test]
async fn an_echo_of_the_request_shows_no_key() {
    let headers = "[kinds.k]\nuser = \"{{ text }}\"";
    let pair = Pair::with(Fault::Echo, "", headers).await;
    let error = pair.fails().await;
    assert_error(&error, Terminal, "invalid_request", Some(400));
    let snippet = error.body_snippet.unwrap();
    assert!(snippet.contains("authorization: Bearer [redacted]") && error.message.contains("[redacted]"), "{snippet}");
    assert!(!format!("{:?} {:?}", pair.engine, pair.sim).contains(KEY));
    assert!(!serde_json::to_string(&pair.sim.stats()).unwrap().contains(KEY));
}

#[tokio::test]
async fn lost_connections() {
    assert_error(&Pair::new(Fault::Reset).await.fails().await, Ambiguous, "connection_lost", None);

    let sim = Sim::start(Script::default()).await.unwrap();
    let address = sim.base_url();
    sim.shutdown().await;
    let refused =
        within(engine(&address, "", "").run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err();
    assert_error(&refused, Transient, "connection_failed", None);
    assert!(
        refused.message.starts_with("cannot connect to 127.0.0.1:") && refused.message.contains("refused"),
        "{refused}"
    );
}

#[tokio::test]
async fn no_such_host_is_asked_again_slowly() {
    let engine = engine("http://nowhere.invalid/v1", "timeouts = { connect_ms = 10000 }", "");
    let error = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err();
    assert_eq!((error.class, error.status), (Transient, None), "{error}");
    assert!(["unknown_host", "dns"].contains(&error.code.as_str()), "{error:?}");
    assert!(error.message.contains("nowhere.invalid:80"), "{error}");
}
