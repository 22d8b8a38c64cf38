//! Dead letters: looked at, redriven, purged.

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
    assert_eq!((&list[0]["id"], &list[0]["class"]), (&json!(4), &json!("terminal")));
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
    let rehearsed = queue.run(&["dead", "redrive", "--class", "terminal", "--kind", "b", "--dry-run"]).fine().stdout;
    assert!(rehearsed.contains("2 would be redriven; nothing was changed"), "{rehearsed}");
    let one = queue.run(&["dead", "redrive", "1", "99"]).failed(1, &["job 99: there is no such job"]);
    assert_eq!(one.stdout, "1 redriven\n");
    assert_eq!(queue.run(&["dead", "redrive", "--kind", "b", "--json"]).fine().json(), json!({ "redriven": 2 }));
    assert_eq!(queue.run(&["job", "list", "--state", "queued", "--json"]).fine().json().as_array().unwrap().len(), 3);
    assert_eq!(queue.run(&["dead", "redrive", "--all"]).fine().stdout, "1 redriven\n");
    assert_eq!(queue.run(&["dead", "redrive", "--all"]).fine().stdout, "0 redriven\n");
    assert_eq!(count(&queue), 0);
}

#[tokio::test]
async fn a_rate_gives_them_times_one_after_the_other() {
    let queue = broken().await;
    let answer = queue.run(&["dead", "redrive", "--all", "--rate", "30/m"]).fine();
    assert_eq!((&*answer.stdout, &*answer.stderr), ("4 redriven\n", "one becomes due every 2s\n"));
    let apart = "select round(extract(epoch from run_at - lag(run_at) over (order by run_at)))::text
      from posthouse.job order by run_at offset 1";
    assert_eq!(queue.texts(apart).await, ["2", "2", "2"]);
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

#[tokio::test]
async fn they_are_filtered_by_class_text_and_time_and_paged() {
    let queue = broken().await;
    queue.enqueue(&["c", "--tenant", "acme"]);
    queue.work("c", || Outcome::fail(JobError::new("timeout", "no answer within 30 s"))).await;
    let list = |arguments: &[&str]| -> Vec<i64> {
        let found = queue.run(&[&["dead", "list", "--json"], arguments].concat()).fine().json();
        found.as_array().unwrap().iter().map(|letter| letter["id"].as_i64().unwrap()).collect()
    };
    assert_eq!(list(&[]).len(), 5);
    assert_eq!(list(&["--class", "timeout"]), [5]);
    assert_eq!(list(&["--tenant", "acme", "--since", "1h"]), [5]);
    assert_eq!(list(&["--error", "NO ANSWER"]), [5]);
    assert!(list(&["--before", "1h"]).is_empty());
    assert!(list(&["--since", "tomorrow"]).is_empty());
    // Before there were computers.
    assert_eq!((list(&["--since", "1000y"]).len(), list(&["--before", "99999999999y"]).len()), (5, 0));
    queue.run(&["dead", "list", "--since", "someday"]).failed(2, &["failed_since", "someday"]);
    let mut seen = Vec::new();
    let mut next = Vec::new();
    loop {
        let page = queue
            .run(
                &[&["dead", "list", "--limit", "2"][..], &next.iter().map(String::as_str).collect::<Vec<_>>()].concat(),
            )
            .fine();
        seen.extend(page.stdout.lines().skip(1).map(|line| line.split_whitespace().next().unwrap().to_owned()));
        match page.stderr.split_once("--next ") {
            Some((_, cursor)) => next = vec!["--next".to_owned(), cursor.trim().to_owned()],
            None => break,
        }
    }
    seen.sort();
    assert_eq!(seen, ["1", "2", "3", "4", "5"]);
}

#[tokio::test]
async fn the_command_for_the_next_page_can_be_pasted() {
    let queue = Queue::new().await;
    for _ in 0..5 {
        queue.enqueue(&["it's $HOME", "--tenant", "a b"]);
        queue.enqueue(&["other"]);
    }
    for kind in ["it's $HOME", "other"] {
        queue.work(kind, || Outcome::fail(JobError::new("terminal", "no"))).await;
    }
    let list = ["dead", "list", "--kind", "it's $HOME", "--tenant=a b", "--since", "1h", "--limit", "2"];
    let mut page = queue.run(&list).fine();
    let mut seen = Vec::new();
    loop {
        seen.extend(page.stdout.lines().skip(1).map(|line| line.split_whitespace().next().unwrap().to_owned()));
        let Some((_, command)) = page.stderr.split_once("older ones: ") else { break };
        assert!(!command.contains("1h"), "the bounds stay those of the first page: {command}");
        page = queue.paste(command).fine();
    }
    assert_eq!(seen, ["9", "7", "5", "3", "1"]);
    let said = queue.run(&["dead", "list", "--limit", "1", "--database-url", queue.url()]).fine().stderr;
    assert!(
        said.starts_with("older ones (with --database-url as before): posthouse dead list --limit 1 --next 2"),
        "{said}"
    );
}

#[tokio::test]
async fn they_go_back_changed_and_job_show_tells_of_it() {
    let queue = Queue::new().await;
    queue.enqueue(&[
        "llm.chat",
        r#"{"model":"big","messages":[{"role":"user","content":"x"}],"seed":9007199254740993}"#,
    ]);
    queue.work("llm.chat", || Outcome::fail(JobError::new("context_length", "too long"))).await;
    let answer = queue
        .run(&[
            "dead",
            "redrive",
            "1",
            "--model",
            "small",
            "--max-attempts",
            "2",
            "--set",
            "messages.0.content=short",
            "--priority",
            "-1",
        ])
        .fine();
    assert_eq!(answer.stdout, "1 redriven\n");
    let shown = queue.run(&["job", "show", "1"]).fine().stdout;
    for part in [
        "job 1 queued",
        "0 of 2",
        "redriven",
        "model: \"big\" to \"small\"",
        "max_attempts: 5 to 2",
        "payload before",
        "9007199254740993",
        "context_length",
    ] {
        assert!(shown.contains(part), "no {part:?} in {shown}");
    }
    let job = queue.run(&["job", "show", "1", "--json"]).fine().json();
    assert_eq!(job["payload"]["messages"][0]["content"], "short");
    assert_eq!(job["redrives"][0]["payload"]["messages"][0]["content"], "x");
    assert_eq!(
        queue.texts("select gates::text from posthouse.lane l join posthouse.job j on j.lane_id = l.id").await,
        ["{model:small}"]
    );
    queue.work("llm.chat", || Outcome::fail(JobError::new("context_length", "too long"))).await;
    let refused = queue
        .run(&["dead", "redrive", "1", "--set", "messages.7.content=x"])
        .failed(1, &["messages.7.content cannot be set"]);
    assert_eq!(refused.stdout, "0 redriven\n");
    queue.run(&["dead", "redrive", "--all", "--payload", "{}"]).failed(2, &["--payload is for one"]);
    queue.run(&["dead", "redrive", "1", "--payload", "{"]).failed(2, &["not valid JSON"]);
    queue.run_with_stdin(&["dead", "redrive", "1", "--payload", "-"], r#"{"n": 12345678901234567890123}"#).fine();
    assert_eq!(queue.texts("select payload::text from posthouse.payload").await, [r#"{"n": 12345678901234567890123}"#]);
    let twice = queue.run(&["dead", "list"]).fine();
    assert_eq!(twice.stderr, "no dead letters\n");
    assert_eq!(queue.run(&["job", "show", "1", "--json"]).fine().json()["redrives"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn a_dry_run_tries_the_change_and_undoes_it() {
    let queue = Queue::new().await;
    for payload in [r#"{"options":{"words":9}}"#, r#"{"text":"no options"}"#, r#"{"options":{}}"#] {
        queue.enqueue(&["a", payload]);
    }
    queue.work("a", || Outcome::fail(JobError::new("terminal", "no"))).await;
    let dry = ["dead", "redrive", "--kind", "a", "--set", "options.words=50", "--dry-run"];
    let text = queue.run(&dry).fine().stdout;
    assert!(text.contains("job 2 would be refused: options.words cannot be set"), "{text}");
    assert!(text.ends_with("2 would be redriven, 1 refused; nothing was changed\n"), "{text}");
    let json = queue.run(&[&dry[..], &["--json"]].concat()).fine().json();
    assert_eq!((&json["redriven"], &json["would_be_redriven"], &json["tried"]), (&json!(0), &json!(2), &json!(null)));
    assert_eq!(json["would_be_refused"][0]["id"], 2);
    // A change that suits none is said at once, as in the real run.
    let bad = ["dead", "redrive", "--all", "--to-queue", "", "--dry-run"];
    queue.run(&bad).failed(2, &["changes: queue"]);
    assert_eq!(count(&queue), 3);
    assert_eq!(
        queue.texts("select payload::text from posthouse.payload where id = 1").await,
        [r#"{"options": {"words": 9}}"#]
    );
    assert!(queue.texts("select job_id::text from posthouse.redriven").await.is_empty());
    let real = queue.run(&dry[..dry.len() - 1]).failed(1, &["job 2: options.words cannot be set"]);
    assert_eq!(real.stdout, "2 redriven\n");
}

#[tokio::test]
async fn a_dry_run_tries_so_many_and_says_so() {
    let queue = Queue::new().await;
    let lines: String = (0..1_001).map(|n| format!("{{\"kind\":\"a\",\"payload\":{{\"n\":{n}}}}}\n")).collect();
    queue.run_with_stdin(&["enqueue", "--jsonl", "-"], lines).fine();
    queue.work("a", || Outcome::fail(JobError::new("terminal", "no"))).await;
    let dry = ["dead", "redrive", "--all", "--set", "n.x=1", "--dry-run"];
    let text = queue.run(&dry).fine().stdout;
    assert!(text.contains("… and 990 more would be refused\ntried on the first 1000 of 1001 only\n"), "{text}");
    assert!(text.ends_with("1 would be redriven, 1000 refused; nothing was changed\n"), "{text}");
    assert_eq!(queue.run(&[&dry[..], &["--json"]].concat()).fine().json()["tried"], 1_000);
}
