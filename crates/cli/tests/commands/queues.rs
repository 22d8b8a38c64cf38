//! The settings of queues.

use posthouse::Outcome;
use serde_json::json;

use crate::support::Queue;

#[tokio::test]
async fn a_queue_without_history_answers_who_waits_and_forgets() {
    let queue = Queue::new().await;
    assert!(queue.run(&["queue", "list"]).fine().stderr.contains("no queues yet"));
    let id = queue.enqueue(&["k", "{}", "--queue", "mail"]).to_string();
    queue.enqueue(&["other", "{}"]);
    let list = || queue.run(&["queue", "list", "--json"]).fine().json();
    let row = |queue: &str, retention_ms: Option<i64>| json!({ "queue": queue, "retention_ms": retention_ms, "closed_until": null, "closed_reason": null });
    let as_it_comes = row("default", None);
    assert_eq!(list(), json!([as_it_comes, row("mail", None)]));
    let set = queue.run(&["queue", "set", "mail", "--retention", "0"]).fine();
    assert!(set.stdout.contains("queue mail keeps no history"), "{set:?}");
    assert_eq!(list(), json!([as_it_comes, row("mail", Some(0))]));
    let text = queue.run(&["queue", "list"]).fine().stdout;
    assert_eq!(
        text.split_whitespace().collect::<Vec<_>>(),
        ["QUEUE", "RETENTION", "PAUSED", "default", "forever", "mail", "0"]
    );
    queue.work_on("mail", "k", || Outcome::done(&json!({ "sent": 7 }))).await;
    let waited = queue.run(&["job", "wait", &id, "--json"]).fine().json();
    assert_eq!((&waited[0]["state"], &waited[0]["result"]), (&json!("done"), &json!({ "sent": 7 })));
    let explained = queue.run(&["job", "explain", &id]).fine().stdout;
    assert!(explained.contains("keeps no history, until "), "{explained}");
    assert_eq!(queue.run(&["job", "list", "--queue", "mail", "--json"]).fine().json()[0]["state"], "done");
    assert!(queue.run(&["job", "show", &id]).fine().stdout.contains("\"sent\": 7"));
    // Ten minutes later.
    queue
        .sql(
            "update posthouse.tombstone set finished_at = finished_at - interval '11 minutes';
             update posthouse.burial set buried_at = buried_at - interval '11 minutes';
             update posthouse.sweep set floor_at = '-infinity'; select posthouse.forget()",
        )
        .await;
    queue.run(&["job", "wait", &id]).failed(1, &["job 1: there is no such job"]);
    let set = queue.run(&["queue", "set", "mail", "--retention", "forever", "--json"]).fine();
    assert_eq!(set.json(), json!({ "queue": "mail", "retention_ms": null }));
    assert_eq!(list()[1]["retention_ms"], json!(null));
}

#[tokio::test]
async fn what_cannot_be_set_is_refused() {
    let queue = Queue::new().await;
    queue.run(&["queue", "set", "mail", "--retention", "7d"]).failed(2, &["7d", "--retention", "0, forever"]);
    queue.run(&["queue", "set", "mail"]).failed(2, &["--retention"]);
    queue.run(&["queue", "set", "", "--retention", "0"]).failed(1, &["queue: must not be empty"]);
}
