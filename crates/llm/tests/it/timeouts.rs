//! The clocks, one at a time: only the tested one is short. And that giving up closes the connection.

use crate::{Pair, assert_error, engine, until, within};
use posthouse_llm::ErrorClass::Transient;
use posthouse_llm::sim::Fault;
use posthouse_llm::{Attempt, Verdict};
use std::time::Duration;

async fn times_out(behaviour: Fault, timeouts: &str, code: &str, status: Option<u16>) {
    let pair = Pair::with(behaviour, &format!("timeouts = {{ {timeouts} }}"), "").await;
    let error = pair.fails().await;
    assert_error(&error, Transient, code, status);
    assert_eq!(error.verdict(), Verdict::Retry);
    assert!(error.latency_ms >= 100, "{error:?}");
    until("the connection is closed", || pair.sim.stats().in_flight == 0).await;
    assert_eq!(pair.sim.stats().abandoned, 1);
}

#[tokio::test]
async fn nothing_at_all() {
    times_out(Fault::Hang, "first_token_ms = 150", "first_token_timeout", None).await;
}

#[tokio::test]
async fn keep_alive_comments_are_no_content() {
    times_out(Fault::Drip, "first_token_ms = 150", "first_token_timeout", Some(200)).await;
}

#[tokio::test]
async fn silence_after_some_tokens() {
    times_out(Fault::HangMid, "between_tokens_ms = 150", "between_tokens_timeout", Some(200)).await;
}

#[tokio::test]
async fn the_whole_attempt() {
    times_out(Fault::Drip, "attempt_ms = 150", "attempt_timeout", Some(200)).await;
}

#[tokio::test]
async fn the_jobs_own_deadline_shortens_the_attempt() {
    let pair = Pair::new(Fault::Hang).await;
    let attempt = Attempt { deadline: Some(Duration::from_millis(150)), ..Attempt::default() };
    let error = within(pair.engine.run("summarize", r#"{"text":"x"}"#, attempt)).await.unwrap_err();
    assert_error(&error, Transient, "attempt_timeout", None);
}

#[tokio::test]
async fn a_host_that_does_not_answer() {
    // A listener whose queue is full drops further connections, like a host behind a silent firewall.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(Ok(stream)) =
        tokio::time::timeout(Duration::from_millis(200), tokio::net::TcpStream::connect(address)).await
    {
        queued.push(stream);
        assert!(queued.len() < 1000, "the queue never fills");
    }
    let engine = engine(&format!("http://{address}/v1"), "timeouts = { connect_ms = 150 }", "");
    let error = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err();
    assert_error(&error, Transient, "connect_timeout", None);
}

#[tokio::test]
async fn dropping_the_future_drops_the_call() {
    for behaviour in [Fault::Hang, Fault::HangMid, Fault::Drip] {
        let pair = Pair::new(behaviour).await;
        let call = pair.engine.run("summarize", r#"{"text":"x"}"#, Attempt::default());
        let mut call = Box::pin(call);
        tokio::select! {
            outcome = &mut call => panic!("{outcome:?}"),
            () = until("the call is under way", || pair.sim.stats().in_flight == 1) => {}
        }
        drop(call);
        until("the call is gone", || pair.sim.stats().in_flight == 0).await;
        assert_eq!(pair.sim.stats().abandoned, 1, "{behaviour}");
    }
}
