//! What stands on the wire, seen by a bare socket: headers, address, one request on one connection after the other.

use crate::{KEY, within};
use posthouse_llm::{Attempt, Config, Engine};
use std::path::Path;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Reads one request and answers it with these bytes.
async fn serve_one(stream: &mut BufReader<TcpStream>, reply: &str) -> (String, String) {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(stream.read_line(&mut head).await.unwrap(), 0, "the client went away: {head:?}");
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    stream.write_all(reply.as_bytes()).await.unwrap();
    (head, String::from_utf8(body).unwrap())
}

fn chunked(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    )
}

#[tokio::test]
async fn address_headers_body_and_reuse_of_the_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let text = format!(
        "[providers.azure]\nbase_url = \"http://{address}/openai/deployments/d/?api-version=7\"\nstream_usage = false\n\
         max_tokens_field = \"max_completion_tokens\"\nheaders = {{ \"api-key\" = {{ env = \"KEY\" }}, \"x-title\" = \"posthouse\" }}\n\
         [models.m]\nprovider = \"azure\"\nmax_output_tokens = 77"
    );
    let config = Config::parse(&text, Path::new("")).unwrap();
    let engine = Engine::from_config_with(&config, &|_| Some(KEY.to_owned())).unwrap();
    let reply = chunked(
        "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\r\n\r\ndata: [DONE]\r\n\r\n",
    );
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let first = serve_one(&mut stream, &reply).await;
        let second = serve_one(&mut stream, &reply).await;
        [first, second]
    });
    for _ in 0..2 {
        let answer = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap();
        assert_eq!((answer.text.as_str(), answer.model.as_str()), ("hi", "m"));
    }
    for (head, body) in within(server).await.unwrap() {
        assert!(head.starts_with("POST /openai/deployments/d/chat/completions?api-version=7 HTTP/1.1\r\n"), "{head}");
        for line in [
            &format!("api-key: {KEY}"),
            "x-title: posthouse",
            "content-type: application/json",
            "user-agent: posthouse/",
        ] {
            assert!(head.contains(line), "{line} in {head}");
        }
        assert!(!head.contains("accept-encoding") && !head.contains("authorization"), "{head}");
        assert!(
            body.contains("\"max_completion_tokens\":77")
                && body.contains("\"stream\":true")
                && !body.contains("stream_options"),
            "{body}"
        );
    }
}

#[tokio::test]
async fn a_key_in_the_address_is_not_shown() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let text = format!(
        "[providers.p]\nbase_url = \"http://user:hunter2hunter2@{address}/v1?key=AIzaSecretSecret\"\n[models.m]\nprovider = \"p\""
    );
    let engine = Engine::from_config(&Config::parse(&text, Path::new("")).unwrap()).unwrap();
    let error = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err();
    let shown = format!("{error} {error:?} {} {engine:?}", error.to_json());
    assert!(!shown.contains("hunter2") && !shown.contains("AIzaSecret"), "{shown}");
}

#[tokio::test]
async fn a_server_that_does_not_speak_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    });
    let engine = Engine::from_config(&Config::single(&format!("https://{address}/v1"), "m", None).unwrap()).unwrap();
    let error = within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err();
    assert_eq!(error.code, "connection_failed", "{error:?}");
    server.await.unwrap();
}
