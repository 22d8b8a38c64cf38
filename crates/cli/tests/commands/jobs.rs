//! Looking at jobs and managing them.

use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::Duration;

use posthouse::{JobError, Outcome};
use serde_json::{Value, json};

use crate::support::{Queue, answer};

fn ids(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|job| job["id"].as_i64().unwrap()).collect()
}

#[tokio::test]
async fn lists_are_filtered_and_paged() {
    let queue = Queue::new().await;
    for n in 0..4 {
        queue.enqueue(&[["a", "b"][n % 2], "--tenant", ["x", "y"][n / 2], "--queue", ["p", "q"][n / 2]]);
    }
    queue.run(&["job", "cancel", "2"]).fine();
    let list = |arguments: &[&str]| ids(&queue.run(&[&["job", "list", "--json"], arguments].concat()).fine().json());
    assert_eq!(list(&[]), [4, 3, 2, 1]);
    assert_eq!(list(&["--kind", "a"]), [3, 1]);
    assert_eq!(list(&["--tenant", "x", "--queue", "p"]), [2, 1]);
    assert_eq!(list(&["--state", "queued"]), [4, 3, 1]);
    assert_eq!(list(&["--state", "cancelled"]), [2]);
    assert!(list(&["--state", "failed"]).is_empty());
    assert_eq!(list(&["--limit", "2"]), [4, 3]);
    assert_eq!(list(&["--limit", "2", "--before", "3"]), [2, 1]);
    let text = queue.run(&["job", "list", "--limit", "3"]).fine();
    assert_eq!(text.stdout.lines().count(), 4, "{text:?}");
    assert!(text.stdout.starts_with("ID") && text.stderr.contains("--before 2"), "{text:?}");
}

#[tokio::test]
async fn a_done_job_shows_its_result_and_wait_prints_it() {
    let queue = Queue::new().await;
    let id = queue.enqueue(&["k", "{\"text\":\"hi\"}"]).to_string();
    queue.run(&["job", "wait", &id, "--timeout", "100ms"]).failed(1, &["timeout", "posthouse job explain 1"]);
    let waiting = queue.command(&["job", "wait", &id, "--timeout", "1m", "--json"]);
    let waiting = std::thread::spawn(move || {
        let mut waiting = waiting;
        answer(&mut waiting, None)
    });
    queue.work("k", || Outcome::done(&json!({ "summary": "greeting" }))).await;
    let waited = waiting.join().unwrap().fine().json();
    assert_eq!(waited[0]["result"], json!({ "summary": "greeting" }));
    let shown = queue.run(&["job", "show", &id]).fine().stdout;
    for part in ["job 1 done", "attempt   1 of 5", "\"text\": \"hi\"", "\"summary\": \"greeting\"", "finished"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    queue.run(&["job", "wait", &id]).fine();
    let twice = queue.run(&["job", "wait", &id, &id, "--timeout", "0s"]).fine();
    assert_eq!(twice.stdout.matches("job 1 done").count(), 1, "{twice:?}");
    queue.run(&["job", "wait", &id, "99"]).failed(1, &["job 99: there is no such job"]);
    let cancelled = queue.run(&["job", "cancel", &id, "99"]).failed(1, &["job 99"]);
    assert_eq!(cancelled.stdout, "job 1 done already, nothing is left to cancel\n");
    queue.run(&["job", "retry", &id]).failed(1, &["job 1 is done"]);
    let both = queue.run(&["job", "retry", &id, "99", "--json"]);
    assert_eq!((both.code, both.json().as_array().unwrap().len()), (1, 2));
}

#[tokio::test]
async fn who_waits_for_a_job_that_nobody_serves_is_told_so_once() {
    let queue = Queue::new().await;
    let id = queue.enqueue(&["k"]).to_string();
    let mut waiting = queue.command(&["job", "wait", &id, "--timeout", "2m"]);
    let mut waiting = waiting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(waiting.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "job 1 queued: no live worker serves kind k on queue \"default\"\n");
    queue.work("k", || Outcome::done(&json!(1))).await;
    let ended = waiting.wait_with_output().unwrap();
    assert_eq!((ended.status.code(), &*ended.stdout), (Some(0), &b"job 1 done\n1\n"[..]));
    let mut more = String::new();
    said.read_to_string(&mut more).unwrap();
    assert_eq!(more, "");
}

#[tokio::test]
async fn a_failed_job_shows_every_error_and_nothing_that_steers_a_terminal() {
    let queue = Queue::new().await;
    let id = queue.enqueue(&["k"]).to_string();
    let fail = || {
        Outcome::fail(
            JobError::new("terminal", "401 Unauthorized: \u{1b}[31mbad key").with_detail(json!({ "status": 401 })),
        )
    };
    queue.work("k", fail).await;
    let shown = queue.run(&["job", "show", &id]).fine().stdout;
    for part in ["job 1 failed", "attempt 1", "terminal", "401 Unauthorized", "\"status\": 401"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(!shown.contains('\u{1b}'), "{shown:?}");
    let waited = queue.run(&["job", "wait", &id]);
    assert_eq!(waited.code, 1);
    assert!(waited.stdout.contains("401 Unauthorized"), "{waited:?}");
    let explained = queue.run(&["job", "explain", &id, "--json"]).fine().json();
    assert_eq!(explained[0]["state"], "failed");
    assert_eq!(queue.run(&["job", "retry", &id]).fine().stdout, "job 1 queued\n");
    queue.run(&["job", "show", "99"]).failed(1, &["job 99", "posthouse job list"]);
    queue.run(&["job", "explain", "99"]).failed(1, &["job 99"]);
}

#[tokio::test]
async fn a_long_payload_is_cut_unless_all_of_it_is_wanted() {
    let queue = Queue::new().await;
    let items: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    let id = queue.enqueue(&["k", &format!("[{}]", items.join(","))]).to_string();
    let cut = queue.run(&["job", "show", &id]).fine();
    assert!(cut.stdout.contains("more lines") && cut.stderr.contains("--full"), "{cut:?}");
    let full = queue.run(&["job", "show", &id, "--full"]).fine();
    assert!(full.stdout.contains("    99\n") && full.stderr.is_empty(), "{full:?}");
}

#[tokio::test]
async fn status_says_what_waits_and_who_is_missing() {
    let queue = Queue::new().await;
    assert!(queue.run(&["status"]).fine().stdout.contains("no jobs yet"));
    queue.enqueue(&["k", "--tenant", "acme"]);
    queue.enqueue(&["k", "--tenant", "acme", "--delay", "1h"]);
    queue.enqueue(&["broken", "--tenant", "acme"]);
    queue.work("broken", || Outcome::fail(JobError::new("error", "it broke"))).await;
    let text = queue.run(&["status"]).fine().stdout;
    for part in ["acme", "no workers", "nobody serves k on queue default", "it broke"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let status = queue.run(&["status", "--json"]).fine().json();
    let row = &status["queues"][0];
    let counts = ["due", "later", "running", "waiting", "done", "failed"].map(|field| row[field].as_i64().unwrap());
    assert_eq!(counts, [1, 1, 0, 0, 0, 1], "{row}");
    assert!(row["oldest_due_age_ms"].as_i64().unwrap() >= 0);
    assert_eq!(row["unserved_kinds"], json!(["k"]));
    assert_eq!(status["failures"][0]["error"], "it broke");
    assert_eq!(status["workers"], json!([]));
}

#[tokio::test]
async fn watching_prints_again_and_again() {
    let queue = Queue::new().await;
    let mut watching = queue.command(&["status", "--watch", "0.1", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).take(3).try_for_each(|line| sender.send(line)));
    for _ in 0..3 {
        let line = receiver.recv_timeout(Duration::from_secs(20));
        if line.is_err() {
            watching.kill().unwrap();
        }
        assert!(serde_json::from_str::<Value>(&line.unwrap()).unwrap()["queues"].is_array());
    }
    watching.kill().unwrap();
    watching.wait().unwrap();
}

#[tokio::test]
async fn a_reader_that_went_away_is_no_error() {
    let queue = Queue::new().await;
    queue.enqueue(&["k"]);
    for arguments in
        [&["job", "list"][..], &["job", "list", "--json"], &["status"], &["job", "show", "1"], &["completions", "bash"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = queue.command(arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{arguments:?}");
    }
}
