//! A job a line, in bulk.

use std::io::Write;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::support::{Queue, file};

fn count(queue: &Queue) -> usize {
    queue.run(&["job", "list", "--limit", "100000", "--json"]).fine().json().as_array().unwrap().len()
}

#[tokio::test]
async fn every_line_becomes_a_job_in_order() {
    let queue = Queue::new().await;
    let mut lines = String::from("\u{feff}");
    for n in 0..2_500 {
        let end = if n % 2 == 0 { "\r\n" } else { "\n\n" };
        lines.push_str(&format!("{{\"kind\":\"k\",\"payload\":{{\"n\":{n}}},\"queue\":\"q{}\"}}{end}", n % 3));
    }
    lines.push_str("{\"kind\":\"last\",\"payload\":12345678901234567890123,\"tenant\":\"acme\"}");
    let path = file("jobs.jsonl", &lines);
    let answer = queue.run(&["enqueue", "--jsonl", path.to_str().unwrap(), "--queue", "rest"]).fine();
    assert_eq!(answer.stdout, "2501 jobs enqueued\n");
    assert_eq!(count(&queue), 2_501);
    let jobs = queue.run(&["job", "list", "--limit", "2", "--json"]).fine().json();
    assert_eq!(
        (&jobs[0]["kind"], &jobs[0]["queue"], &jobs[0]["tenant"]),
        (&json!("last"), &json!("rest"), &json!("acme"))
    );
    let id = |at: usize| jobs[at]["id"].to_string();
    assert!(queue.run(&["job", "show", &id(0), "--json"]).fine().stdout.contains("12345678901234567890123"));
    assert_eq!(queue.run(&["job", "show", &id(1), "--json"]).fine().json()["payload"], json!({ "n": 2_499 }));
}

#[tokio::test]
async fn it_stops_at_a_bad_line_and_goes_on_from_there() {
    let queue = Queue::new().await;
    // Line 4 is no JSON; the database refuses line 3, in the same batch.
    let lines = "{\"kind\":\"a\"}\n\n{\"kind\":\"b\",\"run_at\":\"soonish\"}\n{\"kind\":\"c\"\n{\"kind\":\"d\",\"max_attempts\":0}\n{\"kind\":\"e\"}";
    let stopped = queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--json"], lines);
    let stopped = stopped.failed(1, &["line 3", "run_at", "soonish", "--skip 2", "--skip 3", "--keep-going"]);
    assert_eq!(stopped.json()["enqueued"], 1);
    assert_eq!(count(&queue), 1);
    let next =
        queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--skip", "3"], lines).failed(1, &["line 4", "--skip 4"]);
    assert_eq!(next.stdout, "0 jobs enqueued\n");
    queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--skip", "5"], lines).fine();
    assert_eq!(count(&queue), 2);
    let all = queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--keep-going", "--json"], lines);
    let all = all.failed(1, &["line 3: run_at", "line 4: ", "line 5: max_attempts", "3 lines were refused"]);
    assert_eq!(all.json(), json!({ "enqueued": 2, "duplicates": 0, "refused": 3, "lines": 6 }));
    assert_eq!(count(&queue), 4);
}

#[tokio::test]
async fn one_bad_line_in_a_full_batch_takes_no_other_with_it() {
    let queue = Queue::new().await;
    let lines: String = (1..=1_200)
        .map(|n| {
            if n == 777 {
                "{\"kind\":\"k\",\"payload\":\"\\u0000\"}\n".to_owned()
            } else {
                format!("{{\"kind\":\"k\",\"payload\":{n}}}\n")
            }
        })
        .collect();
    queue.run_with_stdin(&["enqueue", "--jsonl", "-"], &lines).failed(1, &["line 777: payload"]);
    assert_eq!(count(&queue), 776);
    let rest = queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--skip", "777", "--json"], &lines).fine();
    assert_eq!(rest.json()["enqueued"], 423);
    assert_eq!(count(&queue), 1_199);
}

#[tokio::test]
async fn a_signal_in_the_middle_says_how_to_go_on() {
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let queue = Queue::new().await;
        let mut command = queue.command(&["enqueue", "--jsonl", "-"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = child.stdin.take().unwrap();
        lines.write_all("{\"kind\":\"k\"}\n".repeat(1_000).as_bytes()).unwrap();
        let begun = Instant::now();
        while count(&queue) < 1_000 {
            assert!(begun.elapsed() < Duration::from_secs(20), "the first batch does not arrive");
        }
        kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
        // It looks between two lines.
        while child.try_wait().unwrap().is_none() && lines.write_all(b"{\"kind\":\"k\"}\n").is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(20), "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("interrupted after line 1000") && said.contains("--skip 1000"), "{said}");
        assert_eq!(count(&queue), 1_000);
    }
}

#[tokio::test]
async fn keys_make_a_second_run_harmless() {
    let queue = Queue::new().await;
    let lines: String = (0..20).map(|n| format!("{{\"kind\":\"k\",\"dedupe_key\":\"{}\"}}\n", n % 15)).collect();
    let first = queue.run_with_stdin(&["enqueue", "--jsonl", "-"], &lines).fine();
    assert_eq!(first.stdout, "15 jobs enqueued, 5 duplicates\n");
    let second = queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--json"], &lines).fine();
    assert_eq!(second.json(), json!({ "enqueued": 0, "duplicates": 20, "refused": 0, "lines": 20 }));
}

#[tokio::test]
async fn nothing_in_is_nothing_done() {
    let queue = Queue::new().await;
    assert_eq!(queue.run_with_stdin(&["enqueue", "--jsonl", "-"], "\n\r\n  ").fine().stdout, "0 jobs enqueued\n");
    queue.run_with_stdin(&["enqueue", "--jsonl", "-"], b"\xff\xfe{\0}\0").failed(1, &["UTF-16", "iconv"]);
    queue.run_with_stdin(&["enqueue", "--jsonl", "-"], "[{\"kind\":\"k\"}]").failed(1, &["line 1", "jq -c '.[]'"]);
}
