//! Dead letters: looked at, redriven, purged.

use std::time::{Duration, Instant};

use posthouse::{JobError, Outcome};
use serde_json::json;

use crate::support::Queue;

/// A queue with dead letters: 1 to 4 of kind a, b, a, b.
async fn broken() -> Queue {
    let queue = Queue::new().await;
    for n in 0..4 {
        queue.enqueue(&[["a", "b"][n % 2]]);
    }
    for kind in ["a", "b"] {
        queue.work(kind, || Outcome::fail(JobError::new("terminal", "no such model"))).await;
    }
    queue
}

fn count(queue: &Queue) -> usize {
    queue.run(&["dead", "list", "--json"]).fine().json().as_array().unwrap().len()
}

#[tokio::test]
async fn they_are_listed_and_shown() {
    let queue = broken().await;
    let text = queue.run(&["dead", "list"]).fine().stdout;
    assert!(text.contains("terminal") && text.contains("no such model"), "{text}");
    let list = queue.run(&["dead", "list", "--kind", "b", "--limit", "1", "--json"]).fine().json();
    assert_eq!((&list[0]["id"], &list[0]["reason"]), (&json!(4), &json!("terminal")));
    assert!(queue.run(&["dead", "show", "1"]).fine().stdout.contains("attempt 1"));
    assert_eq!(queue.run(&["dead", "show", "1", "--json"]).fine().json()["errors"][0]["error"], "no such model");
    let live = queue.enqueue(&["c"]).to_string();
    queue.run(&["dead", "show", &live]).failed(1, &["is queued and no dead letter", "posthouse job show"]);
}

#[tokio::test]
async fn they_go_back_into_line_by_id_by_filter_and_all() {
    let queue = broken().await;
    queue.run(&["dead", "redrive"]).failed(2, &["ID", "--kind", "--all"]);
    queue.run(&["dead", "purge", "--yes"]).failed(2, &["ID", "--kind", "--all"]);
    let one = queue.run(&["dead", "redrive", "1", "99"]).failed(1, &["job 99: there is no such job"]);
    assert_eq!(one.stdout, "1 redriven\n");
    assert_eq!(queue.run(&["dead", "redrive", "--kind", "b", "--json"]).fine().json(), json!({ "redriven": 2 }));
    assert_eq!(queue.run(&["job", "list", "--state", "queued", "--json"]).fine().json().as_array().unwrap().len(), 3);
    assert_eq!(queue.run(&["dead", "redrive", "--all"]).fine().stdout, "1 redriven\n");
    assert_eq!(queue.run(&["dead", "redrive", "--all"]).fine().stdout, "0 redriven\n");
    assert_eq!(count(&queue), 0);
}

#[tokio::test]
async fn a_rate_is_kept() {
    let queue = broken().await;
    let start = Instant::now();
    assert_eq!(queue.run(&["dead", "redrive", "--all", "--rate", "5"]).fine().stdout, "4 redriven\n");
    // The first at once, then one every 200 ms.
    assert!(start.elapsed() >= Duration::from_millis(600), "{:?}", start.elapsed());
    queue.run(&["dead", "redrive", "--all", "--rate", "0"]).failed(2, &["--rate"]);
}

#[tokio::test]
async fn they_are_purged_only_when_it_is_meant() {
    let queue = broken().await;
    let asked = queue.run(&["dead", "purge", "--kind", "a", "--json"]).failed(1, &["would remove 2", "--yes"]);
    assert_eq!(asked.json(), json!({ "purged": 0, "would_purge": 2 }));
    assert_eq!(count(&queue), 4);
    assert_eq!(queue.run(&["dead", "purge", "--kind", "a", "--yes"]).fine().stdout, "2 purged\n");
    assert_eq!(queue.run(&["dead", "purge", "2", "--json"]).fine().json(), json!({ "purged": 1 }));
    queue.run(&["dead", "purge", "1"]).failed(1, &["job 1: there is no such job"]);
    assert_eq!(count(&queue), 1);
    queue.run(&["job", "show", "1"]).failed(1, &["no such job"]);
}
