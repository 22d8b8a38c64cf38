//! One job from the command line.

use crate::support::{Queue, file};

#[tokio::test]
async fn a_gate_that_is_not_there_is_noted() {
    let queue = Queue::new().await;
    queue.run(&["gate", "set", "crm", "--running", "1"]).fine();
    let said = queue.run(&["enqueue", "k", "--gate", "crm", "--gate", "cmr", "--gate", "model:small"]).fine();
    assert_eq!(said.stdout, "job 1 queued\n");
    let note = |gate: &str| format!("no gate {gate} yet: it limits nothing until it is set\n");
    assert_eq!(said.stderr, note("cmr") + &note("model:small"));
    queue.run(&["gate", "set", "model:*", "--running", "1"]).fine();
    assert_eq!(queue.run(&["enqueue", "k", "--gate", "model:small"]).fine().stderr, "");
    assert_eq!(queue.run(&["enqueue", "k", "--gate", "cmr", "--json"]).fine().stderr, "");
    assert_eq!(
        queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--gate", "cmr"], "{\"kind\":\"k\"}\n").fine().stderr,
        ""
    );
}

#[tokio::test]
async fn a_job_goes_in_with_all_that_was_said() {
    let queue = Queue::new().await;
    let answer = queue.run(&["enqueue", "summarize", "{\"text\":\"hi\"}"]).fine();
    assert_eq!(answer.stdout, "job 1 queued\n");
    let id = queue.enqueue(&[
        "report",
        "-5",
        "--queue",
        "slow",
        "--tenant",
        "acme",
        "--priority",
        "-3",
        "--delay",
        "1h",
        "--max-attempts",
        "2",
        "--timeout",
        "1m 30s",
    ]);
    let job = queue.run(&["job", "show", &id.to_string(), "--json"]).fine().json();
    for (field, expected) in [
        ("kind", "\"report\""),
        ("queue", "\"slow\""),
        ("tenant", "\"acme\""),
        ("state", "\"queued\""),
        ("priority", "-3"),
        ("max_attempts", "2"),
        ("timeout_ms", "90000"),
        ("payload", "-5"),
    ] {
        assert_eq!(job[field].to_string(), expected, "{field}");
    }
    let explained = queue.run(&["job", "explain", &id.to_string()]).fine().stdout;
    assert!(explained.contains("not due yet") && explained.contains("in 59m"), "{explained}");
}

#[tokio::test]
async fn a_dedupe_key_answers_with_the_job_that_holds_it() {
    let queue = Queue::new().await;
    let first = ["enqueue", "k", "--dedupe-key", "hook-17"];
    assert_eq!(queue.run(&first).fine().stdout, "job 1 queued\n");
    assert_eq!(queue.run(&first).fine().stdout, "job 1 duplicate (queued)\n");
    let json = queue.run(&[&first[..], &["--json"]].concat()).fine().json();
    assert_eq!(json, serde_json::json!({ "id": 1, "state": "queued", "duplicate": true, "deduped": "kept" }));
    queue.run(&["job", "cancel", "1"]).fine();
    assert_eq!(queue.enqueue(&["k", "--dedupe-key", "hook-17", "--dedupe-for", "1h"]).to_string(), last_id(&queue));
    let again = queue.run(&["enqueue", "k", "--dedupe-key", "hook-17", "--dedupe-for", "1h"]).fine();
    assert!(again.stdout.contains("duplicate (queued)"), "{again:?}");
}

fn last_id(queue: &Queue) -> String {
    queue.run(&["job", "list", "--limit", "1", "--json"]).fine().json()[0]["id"].to_string()
}

#[tokio::test]
async fn payloads_come_through_as_they_were_written() {
    let queue = Queue::new().await;
    let text = r#"{"big":123456789012345678901234567890,"exact":1.10,"text":"ä\"\\ \u2028"}"#;
    let path = file("payload.json", format!("\u{feff}{text}\r\n"));
    let from_file = queue.enqueue(&["k", &format!("@{}", path.display())]);
    let stdin = queue.run_with_stdin(&["enqueue", "k", "-", "--json"], text).fine().json()["id"].as_i64().unwrap();
    for id in [queue.enqueue(&["k", text]), from_file, stdin] {
        let shown = queue.run(&["job", "show", &id.to_string(), "--json"]).fine().stdout;
        assert!(shown.contains("123456789012345678901234567890") && shown.contains("1.10"), "{shown}");
        let text = queue.run(&["job", "show", &id.to_string()]).fine().stdout;
        assert!(text.contains("\"big\": 123456789012345678901234567890"), "{text}");
    }
    queue.run_with_stdin(&["enqueue", "k", "-"], b"\"\xff\"").failed(2, &["UTF-8", "iconv"]);
    queue.run_with_stdin(&["enqueue", "k", "-"], "").failed(2, &["standard input"]);
}

#[tokio::test]
async fn what_the_database_refuses_is_named() {
    let queue = Queue::new().await;
    // Exit code 2, as for what is found without the database: what was typed cannot be right.
    queue.run(&["enqueue", ""]).failed(2, &["kind"]);
    queue.run(&["enqueue", "k", "--max-attempts", "0"]).failed(2, &["max_attempts"]);
    queue.run(&["enqueue", "k", "--run-at", "soonish"]).failed(2, &["run_at", "soonish", "such as '2027-01-31 08:00'"]);
    queue.run(&["enqueue", "k", "--run-at", "-soonish"]).failed(2, &["run_at", "-soonish"]);
    queue.run(&["enqueue", "k", "--delay", "-5s"]).failed(2, &["--delay", "write it like 30s"]);
    queue.run(&["enqueue", "k", "\"\\u0000\""]).failed(2, &["payload", "\\u0000"]);
    assert_eq!(queue.run(&["job", "list", "--json"]).fine().json(), serde_json::json!([]));
    queue.run(&["enqueue", "k", "--run-at", "2099-01-31 08:00 Europe/Rome"]).fine();
}

#[tokio::test]
async fn a_statement_timeout_of_the_database_is_not_in_the_way() {
    let queue = Queue::new().await;
    let path = file("slow.json", format!("\"{}\"", "x".repeat(8_000_000)));
    let payload = format!("@{}", path.display());
    let url = format!("{}?options=-c%20statement_timeout%3D1", queue.url());
    queue.run(&["enqueue", "k", &payload, "--database-url", &url]).fine();
}
