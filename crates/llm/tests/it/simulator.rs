//! The simulated provider as a stranger sees it: with a plain HTTP client.

use crate::{fault, step, until};
use posthouse_llm::Secret;
use posthouse_llm::sim::{Delay, Fault, Script, Sim, checksum, expected_answer};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn post(sim: &Sim, body: &Value) -> (u16, String) {
    let client = reqwest::Client::builder().no_proxy().tls_backend_preconfigured(no_tls()).build().unwrap();
    let response =
        client.post(format!("{}/chat/completions", sim.base_url())).body(body.to_string()).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn get(sim: &Sim, path: &str) -> (u16, Value) {
    let client = reqwest::Client::builder().no_proxy().tls_backend_preconfigured(no_tls()).build().unwrap();
    let response = client.get(format!("http://{}{path}", sim.address())).send().await.unwrap();
    (response.status().as_u16(), serde_json::from_str(&response.text().await.unwrap()).unwrap())
}

fn no_tls() -> rustls::ClientConfig {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let versions = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    versions.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth()
}

fn ask(text: &str) -> Value {
    json!({ "model": "m", "messages": [{ "role": "system", "content": "s" }, { "role": "user", "content": text }] })
}

#[tokio::test]
async fn answers_without_a_stream_and_with_one() {
    let sim = Sim::start(Script::default()).await.unwrap();
    let (status, body) = post(&sim, &ask("Hello there. More.")).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (status, &body["choices"][0]["message"]["content"]),
        (200, &Value::from(expected_answer("Hello there. More.")))
    );
    assert_eq!(
        body["usage"]["total_tokens"],
        body["usage"]["prompt_tokens"].as_u64().unwrap() + body["usage"]["completion_tokens"].as_u64().unwrap()
    );
    let mut streamed = ask("Hello there. More.");
    streamed["stream"] = json!(true);
    let (_, body) = post(&sim, &streamed).await;
    assert!(body.ends_with("data: [DONE]\n\n") && !body.contains("prompt_tokens"), "usage only if asked for: {body}");
    let (status, stats) = get(&sim, "/sim/stats").await;
    assert_eq!((status, &stats["requests"], &stats["outcomes"]["ok"]), (200, &json!(2), &json!(2)));
    let input = &stats["inputs"][checksum("Hello there. More.")];
    assert_eq!((&input["requests"], &input["answered"]), (&json!(2), &json!(2)));
    sim.shutdown().await;
}

#[tokio::test]
async fn keys_models_and_other_paths() {
    let script = Script { api_key: Some(Secret::new("abcdefgh")), models: vec!["m".to_owned()], ..Script::default() };
    let sim = Sim::start(script).await.unwrap();
    assert_eq!(post(&sim, &ask("x")).await.0, 401);
    assert_eq!(get(&sim, "/v1/models").await.0, 401);
    assert_eq!(get(&sim, "/nothing").await.0, 404);
    let sim = Sim::start(Script { models: vec!["other".to_owned()], ..Script::default() }).await.unwrap();
    assert_eq!(post(&sim, &ask("x")).await.0, 404);
    assert_eq!(get(&sim, "/v1/models").await.1["data"][0]["id"], "other");
}

#[tokio::test]
async fn conditions_of_steps() {
    let lines = ["match=foo,first=2,do=429", "from=5,to=5,do=500", "match=each,tries=1,do=503"];
    let script = Script { steps: lines.iter().map(|line| line.parse().unwrap()).collect(), ..Script::default() };
    let sim = Sim::start(script).await.unwrap();
    let mut found = Vec::new();
    for text in ["foo", "bar", "a foo", "foo", "bar", "each 1", "each 2", "each 1"] {
        found.push(post(&sim, &ask(text)).await.0);
    }
    assert_eq!(found, [429, 200, 429, 200, 500, 503, 503, 200]);
}

#[tokio::test]
async fn the_dice_falls_the_same_for_the_same_seed() {
    let mut runs = Vec::new();
    for seed in [1, 1, 2] {
        let sim = Sim::start(Script { seed, ..step("rate=0.5,do=500") }).await.unwrap();
        let mut statuses = Vec::new();
        for number in 0..40 {
            statuses.push(post(&sim, &ask(&format!("text {number}"))).await.0);
        }
        let failed = statuses.iter().filter(|status| **status == 500).count();
        assert!((8..=32).contains(&failed), "half of 40, more or less: {failed}");
        runs.push(statuses);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[tokio::test]
async fn latency_is_kept() {
    let sim =
        Sim::start(Script { latency: Delay::fixed(Duration::from_millis(120)), ..Script::default() }).await.unwrap();
    let start = Instant::now();
    post(&sim, &ask("x")).await;
    assert!(start.elapsed() >= Duration::from_millis(120));
}

#[tokio::test]
async fn shutdown_ends_open_connections() {
    let sim = Sim::start(fault(Fault::Hang)).await.unwrap();
    let body = ask("x").to_string();
    let mut stream = tokio::net::TcpStream::connect(sim.address()).await.unwrap();
    let request =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes()).await.unwrap();
    until("the request has arrived", || sim.stats().in_flight == 1).await;
    sim.shutdown().await;
    let mut rest = Vec::new();
    crate::within(tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest)).await.unwrap();
    assert!(rest.is_empty());
}
