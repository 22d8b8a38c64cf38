//! The header by which a provider knows a call again, seen by a bare socket, through a real queue.

use crate::queue::{database, summarize};
use crate::{engine, within};
use posthouse::store::Database;
use posthouse::{Posthouse, Worker};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

/// What becomes of a call.
#[derive(Clone, Copy)]
enum Fate {
    /// The connection is closed after the request was read: nobody knows whether it was billed.
    Cut,
    /// An answer that ends in the middle.
    CutLater,
    /// A status and nothing more.
    Status(u16),
    Answer,
}

const DELTA: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"finish_reason\":null}]}\n\n";
const END: &str =
    "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// A provider that treats one call after the other so; its address, and the values of the header in their order.
async fn provider(fates: &'static [Fate], header: &'static str) -> (String, Arc<Mutex<Vec<Option<String>>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let seen: Arc<Mutex<Vec<Option<String>>>> = Arc::default();
    let keys = seen.clone();
    tokio::spawn(async move {
        for fate in fates {
            let mut stream = BufReader::new(listener.accept().await.unwrap().0);
            let mut head = String::new();
            while !head.ends_with("\r\n\r\n") {
                assert_ne!(stream.read_line(&mut head).await.unwrap(), 0, "{head:?}");
            }
            let value =
                |name: &str| head.lines().find_map(|line| line.strip_prefix(&format!("{name}: "))).map(str::to_owned);
            let mut body = vec![0; value("content-length").unwrap().parse().unwrap()];
            stream.read_exact(&mut body).await.unwrap();
            keys.lock().unwrap().push(value(header));
            let reply = match fate {
                Fate::Cut => continue,
                Fate::CutLater => {
                    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n{DELTA}")
                }
                Fate::Status(status) => format!(
                    "HTTP/1.1 {status} No\r\nretry-after-ms: 50\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}"
                ),
                Fate::Answer => format!(
                    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{END}",
                    END.len()
                ),
            };
            stream.write_all(reply.as_bytes()).await.unwrap();
        }
    });
    (url, seen)
}

/// Runs jobs to their end and answers with the header's values.
async fn keys(fates: &'static [Fate], header: &'static str, setting: &str, texts: &[&str]) -> Vec<Option<String>> {
    let database = database().await;
    let (url, seen) = provider(fates, header).await;
    let engine = engine(&url, "", "");
    let engine = if setting.is_empty() {
        engine
    } else {
        let text = format!(
            "[providers.sim]\nbase_url = \"{url}\"\n{setting}\n[models.m]\nprovider = \"sim\"\nmodel = \"up\"\n"
        );
        let config = posthouse_llm::Config::parse(&text, std::path::Path::new("")).unwrap();
        posthouse_llm::Engine::from_config_with(&config, &|_| None).unwrap()
    };
    let queue = Posthouse::new(Database::new(database.url()).unwrap());
    for text in texts {
        let id = queue.enqueue_job(summarize(text).max_attempts(20)).await.unwrap().id;
        loop {
            let worker = Worker::builder(Database::new(database.url()).unwrap())
                .poll(Duration::from_millis(20))
                .until_empty(true);
            let running = tokio::spawn(engine.register(worker).run());
            while !running.is_finished() {
                // Waits are none of this test's business.
                let _ = queue.retry(id).await;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            within(running).await.unwrap().unwrap();
            let job = queue.job(id).await.unwrap().unwrap();
            if job.is_final() {
                assert_eq!(job.state, "done", "{job:?}");
                break;
            }
        }
    }
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.len(), fates.len());
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_may_have_been_billed_is_made_again_with_the_same_key() {
    use Fate::{Answer, Cut, CutLater, Status};
    let fates: &[Fate] = &[Cut, CutLater, Status(500), Cut, Answer, Answer];
    let keys = keys(fates, "idempotency-key", "", &["One.", "One."]).await;
    let keys: Vec<String> = keys.into_iter().map(Option::unwrap).collect();
    assert!(keys.iter().all(|key| key.starts_with("posthouse-") && key.len() == 42), "{keys:?}");
    // Cut, and cut again: the same call; also the one that is made in their place and fails for good.
    assert_eq!((&keys[1], &keys[2]), (&keys[0], &keys[0]));
    // That was an answer, so the next is another call, and the same again after it was cut.
    assert_ne!(keys[3], keys[0]);
    assert_eq!(keys[4], keys[3]);
    // Another job, with the same payload.
    assert!(!keys[..5].contains(&keys[5]));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_header_has_the_name_that_is_set_or_none() {
    use Fate::Answer;
    let named = keys(&[Answer], "x-once", "idempotency_header = \"X-Once\"", &["One."]).await;
    assert!(named[0].is_some());
    let none = keys(&[Answer], "idempotency-key", "idempotency_header = \"none\"", &["One."]).await;
    assert_eq!(none, [None]);
}
