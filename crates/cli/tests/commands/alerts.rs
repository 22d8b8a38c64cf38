//! Alerts as people see and set them.

use posthouse::store::{Database, Store};
use serde_json::{Value, json};

use crate::support::Queue;

fn store(queue: &Queue) -> Store {
    Database::new(queue.url()).unwrap().store("test")
}

#[tokio::test]
async fn open_alerts_are_listed_and_stand_in_the_status() {
    let queue = Queue::new().await;
    let store = store(&queue);
    assert!(queue.run(&["alert", "list"]).fine().stdout.contains("no open alerts"));
    assert_eq!(queue.run(&["status", "--json"]).fine().json()["alerts"], json!([]));
    for _ in 0..3 {
        assert!(
            store.raise_alert("budget", "tenant:a", "half is \u{1b}[2Jspent", &json!({"share": 0.5})).await.unwrap()
        );
    }
    let told = store.tidy(None).await.unwrap().alerts;
    assert_eq!((told.len(), told[0].data.count, &told[0].data.detail), (1, 3, &json!({"share": 0.5})));
    let listed = queue.run(&["alert", "list", "--json"]).fine().json();
    assert_eq!((&listed["alerts"][0]["kind"], &listed["alerts"][0]["count"]), (&json!("budget"), &json!(3)));
    assert_eq!(listed["webhook"], json!({"enabled": false, "reason": null}));
    let status = queue.run(&["status"]).fine().stdout;
    assert!(status.contains("alert budget: half is  [2Jspent (3 times, "), "{status}");
    store.resolve_alert("budget", "tenant:a").await.unwrap();
    queue.sql("update posthouse.sweep set ran_at = '-infinity'").await;
    store.tidy(None).await.unwrap();
    assert_eq!(queue.run(&["alert", "list", "--json"]).fine().json()["alerts"], json!([]));
    assert_eq!(queue.texts("select subject from posthouse.alerts where resolved_at is not null").await, ["tenant:a"]);
    let all = queue.run(&["alert", "list", "--all"]).fine().stdout;
    assert!(all.contains("budget") && all.contains("over"), "{all}");
    assert!(!queue.run(&["status"]).fine().stdout.contains("alert budget"));
}

#[tokio::test]
async fn what_is_set_is_shown() {
    let queue = Queue::new().await;
    queue.run(&["alert", "set", "dead_letter", "--off"]).fine();
    queue.run(&["alert", "set", "budget", "--quiet", "1h"]).fine();
    let set = queue.run(&["alert", "set", "oldest_due", "--queue", "nightly", "--after", "8h", "--json"]).fine().json();
    let rule = |queue: Value, after_ms: i64, quiet_ms: Value| json!({"kind": "oldest_due", "queue": queue, "enabled": true, "quiet_ms": quiet_ms, "after_ms": after_ms});
    assert_eq!(
        set,
        json!([rule(Value::Null, 900_000, json!(300_000)), rule(json!("nightly"), 28_800_000, Value::Null)])
    );
    let text = queue.run(&["alert", "list"]).fine().stdout;
    let row = |kind: &str| {
        text.lines().find(|line| line.starts_with(kind)).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        [row("dead_letter"), row("budget"), row("no_worker")],
        ["dead_letter no 5m", "budget yes 1h", "no_worker yes 5m 1m"]
    );
    assert_eq!([row("sweep"), row("schedule")], ["sweep yes 5m", "schedule yes 5m"]);
    assert!(text.contains("webhook: off; [alerts] in the posthouse.toml of a worker turns it on"), "{text}");
    let test = queue.run(&["alert", "test"]).fine().stdout;
    assert!(test.contains("notified on channel posthouse_alert") && test.contains("webhook: off"), "{test}");
    queue.run(&["alert", "set", "--webhook", "on"]).fine();
    assert!(queue.run(&["alert", "test"]).fine().stdout.contains("webhook: job 1; "));
    queue.run(&["alert", "set", "--webhook", "off", "--json"]).fine();
    assert_eq!(queue.run(&["alert", "test", "--json"]).fine().json(), json!({"webhook_job": null}));
}

#[tokio::test]
async fn what_cannot_be_set_is_refused() {
    let queue = Queue::new().await;
    queue.run(&["alert", "set"]).failed(2, &["--webhook"]);
    queue.run(&["alert", "set", "budget"]).failed(2, &["--on"]);
    queue.run(&["alert", "set", "budget", "--on", "--off"]).failed(2, &["--off"]);
    queue.run(&["alert", "set", "budget", "--webhook", "off"]).failed(2, &["--webhook"]);
    queue
        .run(&["alert", "set", "budget", "--after", "1h"])
        .failed(2, &["after: is for alerts of kind no_worker and oldest_due"]);
    queue.run(&["alert", "set", "budget", "--quiet", "99999999999y"]).failed(2, &["quiet: ", "0 and 30 days"]);
    queue.run(&["alert", "set", "budget", "--quiet", "soon"]).failed(2, &["like 30s, 5m"]);
}
