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
    let row = |queue: &str, retention_ms: Option<i64>| json!({ "queue": queue, "retention_ms": retention_ms, "retention_cancelled_ms": retention_ms, "retention_failed_ms": null, "fair_by": "jobs", "serial_by": null, "max_depth": null, "closed_until": null, "closed_reason": null });
    let as_it_comes = row("default", None);
    assert_eq!(list(), json!([as_it_comes, row("mail", None)]));
    let set = queue.run(&["queue", "set", "mail", "--retention", "0"]).fine();
    assert!(set.stdout.contains("queue mail keeps no history of done jobs"), "{set:?}");
    assert_eq!(list(), json!([as_it_comes, row("mail", Some(0))]));
    let text = queue.run(&["queue", "list"]).fine().stdout;
    assert_eq!(
        text.split_whitespace().collect::<Vec<_>>(),
        [
            "QUEUE",
            "RETENTION",
            "CANCELLED",
            "FAILED",
            "SERIAL",
            "BY",
            "FAIR",
            "BY",
            "MAY",
            "WAIT",
            "PAUSED",
            "default",
            "forever",
            "forever",
            "forever",
            "jobs",
            "mail",
            "0",
            "0",
            "forever",
            "jobs"
        ]
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
    assert_eq!(
        set.json(),
        json!({ "queue": "mail", "retention_ms": null, "retention_cancelled_ms": null, "retention_failed_ms": null, "fair_by": "jobs", "serial_by": null, "max_depth": null, "closed_until": null, "closed_reason": null })
    );
    assert_eq!(list()[1]["retention_ms"], json!(null));
}

#[tokio::test]
async fn a_queue_runs_what_belongs_together_one_at_a_time_and_is_fair_by_tokens() {
    let queue = Queue::new().await;
    let set = queue.run(&["queue", "set", "chats", "--serial-by", "chat", "--fair-by", "tokens"]).fine().stdout;
    assert!(set.contains("queue chats runs jobs that share the field chat one at a time"), "{set}");
    assert!(set.contains("queue chats is fair between its tenants by tokens"), "{set}");
    let list = || queue.run(&["queue", "list", "--json"]).fine().json();
    let row = |serial_by: Option<&str>, fair_by: &str| json!([{ "queue": "chats", "retention_ms": null, "retention_cancelled_ms": null, "retention_failed_ms": null, "fair_by": fair_by, "serial_by": serial_by, "max_depth": null, "closed_until": null, "closed_reason": null }]);
    assert_eq!(list(), row(Some("chat"), "tokens"));
    let text = queue.run(&["queue", "list"]).fine().stdout;
    assert!(
        text.lines()
            .any(|line| line.split_whitespace().eq(["chats", "forever", "forever", "forever", "chat", "tokens"])),
        "{text}"
    );
    queue.run(&["enqueue", "k", r#"{"chat": 7}"#, "--queue", "chats"]).fine();
    let second = queue.enqueue(&["k", r#"{"chat": 7}"#, "--queue", "chats"]).to_string();
    let why = queue.run(&["job", "explain", &second]).fine().stdout;
    assert!(why.contains("job 1, which shares its value \"7\", runs first"), "{why}");
    let set = queue.run(&["queue", "set", "chats", "--serial-by", "none", "--fair-by", "jobs", "--json"]).fine().json();
    assert_eq!(
        set,
        json!({ "queue": "chats", "retention_ms": null, "retention_cancelled_ms": null, "retention_failed_ms": null, "fair_by": "jobs", "serial_by": null, "max_depth": null, "closed_until": null, "closed_reason": null })
    );
    assert_eq!(list(), row(None, "jobs"));
}

#[tokio::test]
async fn each_outcome_has_a_time_of_its_own_and_a_default() {
    let queue = Queue::new().await;
    let day = 86_400_000_i64;
    let set = queue
        .run(&["queue", "set", "mail", "--retention", "30d", "--retention-cancelled", "7d", "--retention-failed", "1y"])
        .fine()
        .stdout;
    for line in ["keeps done jobs for 30 days", "keeps cancelled jobs for 7 days", "keeps failed jobs for 1 year"] {
        assert!(set.contains(&format!("queue mail {line}")), "{set}");
    }
    queue.run(&["queue", "set", "*", "--retention", "90d"]).fine();
    queue.run(&["queue", "set", "*", "--retention-failed", "2h"]).fine();
    queue.enqueue(&["k", "{}"]);
    let kept = || {
        let list = queue.run(&["queue", "list", "--json"]).fine().json();
        let fields = ["retention_ms", "retention_cancelled_ms", "retention_failed_ms"];
        ["default", "mail"].map(|name| {
            let row = list.as_array().unwrap().iter().find(|row| row["queue"] == name).unwrap();
            fields.map(|field| row[field].as_i64())
        })
    };
    let year = Some(31_557_600_000);
    let all = [Some(90 * day), Some(90 * day), Some(7_200_000)];
    assert_eq!(kept(), [all, [Some(30 * day), Some(7 * day), year]]);
    queue.run(&["queue", "set", "mail", "--retention", "forever", "--retention-cancelled", "DEFAULT"]).fine();
    assert_eq!(kept()[1], [None, None, year], "cancelled jobs go with done ones");
    queue.run(&["queue", "set", "mail", "--retention", "default", "--retention-failed", "default"]).fine();
    assert_eq!(kept(), [all, all]);
    let text = queue.run(&["queue", "list"]).fine().stdout;
    assert!(text.lines().any(|line| line.split_whitespace().eq(["default", "90d", "90d", "2h", "jobs"])), "{text}");
}

#[tokio::test]
async fn what_cannot_be_set_is_refused() {
    let queue = Queue::new().await;
    queue
        .run(&["queue", "set", "mail", "--retention", "soon"])
        .failed(2, &["soon", "--retention", "0, forever, default"]);
    queue.run(&["queue", "set", "mail", "--retention", "10ms"]).failed(2, &["retention: ", "a second at least"]);
    queue.run(&["queue", "set", "mail", "--retention-failed", "0"]).failed(2, &["retention: ", "a second at least"]);
    queue.run(&["queue", "set", "mail"]).failed(2, &["--retention", "--serial-by", "--fair-by"]);
    queue.run(&["queue", "set", "mail", "--fair-by", "money"]).failed(2, &["money", "jobs, tokens"]);
    queue.run(&["queue", "set", "mail", "--serial-by", ""]).failed(2, &["field: must not be empty"]);
    queue.run(&["queue", "set", "", "--retention", "0"]).failed(2, &["queue: must not be empty"]);
}

#[tokio::test]
async fn a_worker_says_which_kinds_need_no_payload_in_the_end() {
    let queue = Queue::new().await;
    let id = queue.enqueue(&["shout", r#"{"secret": 1}"#]).to_string();
    queue.run(&["work", "--exec", "shout=echo 7", "--drop-payload", "shout", "--until-empty"]).fine();
    let job = queue.run(&["job", "show", &id, "--json"]).fine().json();
    assert_eq!((&job["state"], &job["payload"], &job["result"]), (&json!("done"), &json!(null), &json!(7)));
}
