//! What stands on the wire, seen by a bare socket: headers, address, one request on one connection after the other.

use crate::{KEY, within};
use posthouse_llm::{Attempt, CallError, Config, Engine, ErrorClass};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::path::Path;
use std::sync::Arc;
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

async fn fails(provider: &str) -> Box<CallError> {
    let text = format!("[providers.p]\n{provider}\n[models.m]\nprovider = \"p\"");
    let engine = Engine::from_config(&Config::parse(&text, Path::new("")).unwrap()).unwrap();
    within(engine.run("summarize", r#"{"text":"x"}"#, Attempt::default())).await.unwrap_err()
}

#[tokio::test]
async fn a_certificate_of_nobody_is_not_asked_again() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // Signed by itself, for this test only; the key opens nothing.
    let certificate = CertificateDer::from_pem_slice(include_bytes!("certificate.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let tls = versions.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        acceptor.accept(stream).await.map(|_| ())
    });
    let error = fails(&format!("base_url = \"https://{address}/v1\"")).await;
    assert_eq!((error.class, error.code.as_str()), (ErrorClass::Terminal, "tls_certificate"), "{error:?}");
    assert!(error.message.starts_with(&format!("the certificate of {address} is not to be trusted")), "{error}");
    within(server).await.unwrap().unwrap_err();
}

#[tokio::test]
async fn a_proxy_that_wants_a_password() {
    for (scheme, code) in [("https", "proxy_authentication"), ("http", "http_407")] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let mut stream = BufReader::new(stream);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                stream.read_line(&mut head).await.unwrap();
            }
            stream.write_all(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            head
        });
        let error = fails(&format!("base_url = \"{scheme}://example.invalid/v1\"\nproxy = \"http://{proxy}\"")).await;
        assert_eq!((error.class, error.code.as_str()), (ErrorClass::Terminal, code), "{error:?}");
        assert!(within(server).await.unwrap().contains("example.invalid"), "the proxy was asked");
    }
}

/// A key that does not look like one: only who knows it can redact it.
const UNSHAPED: &str = "Qz7aBcDeFgHiJkLmNoPqRsTuVw";

/// Lets a provider send exactly this, once.
async fn answer_to(reply: String) -> Result<posthouse_llm::Answer, Box<CallError>> {
    answer_in(reply, "").await
}

/// For `answer_in`: no kind with keys, but `llm.chat` asked for two choices.
const CHAT_FOR_TWO: &str = "# two choices";

/// As `answer_to`, for a kind `k` with these keys.
async fn answer_in(reply: String, keys: &str) -> Result<posthouse_llm::Answer, Box<CallError>> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base_url = format!("http://{}/v1", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        serve_one(&mut BufReader::new(stream), &reply).await;
    });
    let text = format!(
        "[providers.p]\nbase_url = \"{base_url}\"\napi_key_env = \"KEY\"\n[models.m]\nprovider = \"p\"\n\
         timeouts = {{ first_token_ms = 5000, between_tokens_ms = 3000 }}\n[kinds.k]\nuser = \"{{{{ text }}}}\"\n{keys}"
    );
    let config = Config::parse(&text, Path::new("")).unwrap();
    let engine = Engine::from_config_with(&config, &|_| Some(UNSHAPED.to_owned())).unwrap();
    let (kind, payload) = match keys {
        CHAT_FOR_TWO => ("llm.chat", r#"{"messages":[],"n":2}"#),
        _ => ("k", r#"{"text":"x"}"#),
    };
    let outcome = within(engine.run(kind, payload, Attempt::default())).await;
    within(server).await.unwrap();
    outcome
}

fn reply(status: &str, kind: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn choice(delta: &str, finish_reason: &str) -> String {
    format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{delta},\"finish_reason\":{finish_reason}}}]}}\n\n")
}

#[tokio::test]
async fn odd_streams_that_are_no_answer() {
    let hi = choice(r#"{"content":"hi"}"#, "null");
    let done = "data: [DONE]\n\n";
    for (body, class, code) in [
        (choice(r#"{"refusal":"I cannot."}"#, "\"stop\"") + done, ErrorClass::Terminal, "refusal"),
        (choice(r#"{"content":"hi"}"#, "\"error\"") + done, ErrorClass::Incomplete, "finish_error"),
        (choice("{}", "\"stop\"") + done, ErrorClass::Incomplete, "empty_answer"),
        (done.to_owned(), ErrorClass::Incomplete, "no_choices"),
        (hi.clone() + "data: {\"error\":\"boom\"}\n\n", ErrorClass::Incomplete, "error_in_answer"),
        (hi.clone() + "event: error\ndata: {}\n\n", ErrorClass::Incomplete, "error_in_answer"),
        (hi.clone() + "event: error\ndata: sorry\n\n", ErrorClass::Incomplete, "error_in_answer"),
        (hi.clone() + "data: {\"error\":[\"boom\"]}\n\n" + done, ErrorClass::Incomplete, "error_in_answer"),
        (hi.clone() + "data: {\"error\":503}\n\n" + done, ErrorClass::Transient, "http_503"),
        (hi + "data: {\"error\":{\"code\":429,\"message\":\"slow\"}}\n\n", ErrorClass::NotNow, "rate_limited"),
    ] {
        let error = answer_to(chunked(&body)).await.unwrap_err();
        assert_eq!((error.class, error.code.as_str()), (class, code), "{body}: {error:?}");
    }
}

#[tokio::test]
async fn odd_streams_that_are_answers() {
    let hi = choice(r#"{"content":"hi"}"#, "null");
    let stop = choice("{}", "\"stop\"");
    let usage = "data: {\"choices\":[{\"index\":0,\"delta\":{}}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"cost\":0.25}}\n\n";
    let plain = |body: &str| chunked(body).replace("text/event-stream", "text/plain");
    let costly =
        chunked(&format!("{hi}{stop}")).replace("content-type", "x-litellm-response-cost: 0.5\r\ncontent-type");
    for (reply, reason, cost) in [
        (chunked(&format!("{hi}{stop}")), Some("stop"), None),
        (chunked(&format!("{hi}data: [DONE]")), None, None),
        (chunked(&format!(": hello\r\n\r\n{hi}{stop}{usage}data: [DONE]\n\n")), Some("stop"), Some("0.25")),
        (plain(&format!("{hi}{stop}data: [DONE]\n\n")), Some("stop"), None),
        (costly, Some("stop"), Some("0.5")),
    ] {
        let answer = answer_to(reply.clone()).await.unwrap();
        assert_eq!((answer.text.as_str(), answer.finish_reason.as_deref()), ("hi", reason), "{reply}");
        assert_eq!(answer.usage.cost_usd.as_deref(), cost, "{reply}");
    }
}

#[tokio::test]
async fn several_choices_are_all_kept() {
    let body = "data: {\"choices\":[{\"index\":1,\"delta\":{\"content\":\"b\"},\"finish_reason\":\"stop\"}]}\n\n\
                data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    let answer = answer_to(chunked(body)).await.unwrap();
    assert_eq!((answer.text.as_str(), answer.choices.len()), ("a", 2));
    assert_eq!(answer.choices[1]["message"]["content"], "b");
}

#[tokio::test]
async fn marks_types_and_statuses_that_gateways_change() {
    let stream = choice(r#"{"content":"hi"}"#, "\"stop\"") + "data: [DONE]\n\n";
    let body = r#"{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}],"error":""}"#;
    for reply in [
        reply("200 OK", "application/json", &format!("\u{feff}{body}")),
        reply("201 Created", "application/json", body),
        reply("200 OK", "text/plain", &format!("\u{feff}{stream}")),
        reply("200 OK", "text/plain", &format!("id: 1\n{stream}")),
        // Without an end: the end mark ends it.
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n{stream}"),
        reply("200 OK", "text/event-stream", &stream)
            .replace("\r\ncontent-length", &("\r\nx-a: b".repeat(300) + "\r\ncontent-length")),
    ] {
        let answer = answer_to(reply.clone()).await.unwrap_or_else(|error| panic!("{error:?} {reply}"));
        assert_eq!(answer.text, "hi", "{reply}");
    }
    let quota = r#"{"error":{"message":"a\ud800b","code":"insufficient_quota"}}"#;
    for body in [format!("\u{feff}{}", quota.replace("\\ud800", "")), quota.to_owned()] {
        let error = answer_to(reply("429 Too Many Requests", "application/json", &body)).await.unwrap_err();
        assert_eq!(error.class, ErrorClass::OutOfCredit, "{error:?}");
    }
}

#[tokio::test]
async fn what_is_no_http_is_named() {
    for reply in ["SSH-2.0-OpenSSH_9.2\r\n", "HTTP/1.1 200 OK\r\nno colon\r\n\r\n"] {
        let error = answer_to(reply.to_owned()).await.unwrap_err();
        assert_eq!((error.class, error.code.as_str()), (ErrorClass::Incomplete, "not_http"), "{error:?}");
    }
    let zipped = reply("401 Unauthorized", "application/json", "PK..")
        .replace("content-length", "content-encoding: gzip\r\ncontent-length");
    let error = answer_to(zipped).await.unwrap_err();
    assert!(error.message.contains("compressed (gzip)") && error.body_snippet.is_none(), "{error:?}");
}

#[tokio::test]
async fn no_word_of_a_provider_brings_the_key_back() {
    let whole = format!(
        r#"{{"id":"{UNSHAPED}","model":"{UNSHAPED}","choices":[{{"index":0,"message":{{"content":"{{\"a\":\"{UNSHAPED}\"}}"}},"finish_reason":"{UNSHAPED}"}}]}}"#
    );
    let cost = |reply: String| {
        reply.replace(
            "\r\n\r\n",
            &format!("\r\nx-request-id: {UNSHAPED}\r\nx-litellm-response-cost: {UNSHAPED}\r\n\r\n"),
        )
    };
    let answer = answer_in(cost(reply("200 OK", "application/json", &whole)), "schema = {}").await.unwrap();
    assert_eq!(answer.json.as_ref().unwrap().get(), r#"{"a":"[redacted]"}"#);
    let shown = format!("{answer:?} {} {}", answer.result_json(), answer.usage_json());
    assert!(!shown.contains(UNSHAPED), "{shown}");

    let half = &UNSHAPED[..UNSHAPED.len() / 2];
    let padded = |most: usize| format!("{} {UNSHAPED} …", "x".repeat(most - half.len() - 1));
    for bad in [
        reply("400 Bad Request", "text/plain", &padded(200)),
        reply("400 Bad Request", "text/html", &format!("<html><title>{}</title>", padded(120))),
        reply(
            "400 Bad Request",
            "application/json",
            &format!(r#"{{"error":{{"message":"{}","code":"{}"}}}}"#, padded(2048), padded(200)),
        ),
        cost(reply("200 OK", "application/json", &format!(r#"{{"id":"{}","choices":[]}}"#, padded(5000)))),
        reply(
            "200 OK",
            "application/json",
            &format!(r#"{{"id":"{}","choices":[{{"message":{{"refusal":"{}"}}}}]}}"#, padded(200), padded(500)),
        ),
        reply(
            "200 OK",
            "application/json",
            &format!(r#"{{"id":"{}","choices":[{{"message":{{"content":""}}}}]}}"#, padded(60_000)),
        ),
    ] {
        let error = answer_to(bad).await.unwrap_err();
        let shown = format!("{error:?} {}", error.to_json());
        assert!(!shown.contains(half), "{shown}");
        assert!(error.provider_request_id.as_ref().is_none_or(|id| id.len() <= 200), "{shown}");
    }
}

#[tokio::test]
async fn of_two_choices_one_is_no_answer_unless_the_provider_says_so() {
    let one = choice(r#"{"content":"one"}"#, "\"stop\"");
    let two = one.clone() + &one.replace("\"index\":0", "\"index\":1");
    let cut = answer_in(chunked(&one), CHAT_FOR_TWO).await.unwrap_err();
    assert_eq!((cut.class, cut.code.as_str()), (ErrorClass::Incomplete, "incomplete_stream"), "{cut:?}");
    let ended = answer_in(chunked(&(one + "data: [DONE]\n\n")), CHAT_FOR_TWO).await.unwrap();
    assert_eq!(ended.text, "one", "a server that does not know n");
    assert_eq!(answer_in(chunked(&two), CHAT_FOR_TWO).await.unwrap().choices.len(), 2);
}
