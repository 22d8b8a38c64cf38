//! Dedupe policies, limits of jobs that may wait, and copies of a database, as a person or a script meets them.

use posthouse::Outcome;
use serde_json::{Value, json};

use crate::support::Queue;

#[tokio::test]
async fn what_becomes_of_a_job_whose_key_is_held() {
    let queue = Queue::new().await;
    let keyed = |payload: &'static str, policy: &'static str| {
        ["enqueue", "k", payload, "--dedupe-key", "x", "--dedupe-policy", policy]
    };
    queue.run(&keyed("1", "keep")).fine();
    assert_eq!(queue.run(&keyed("2", "replace")).fine().stdout, "job 1 replaced (queued)\n");
    assert_eq!(queue.run(&keyed("2.0", "same")).fine().stdout, "job 1 duplicate (queued)\n");
    queue.run(&keyed("3", "same")).failed(1, &["job 1 holds it with another payload"]);
    queue.run(&keyed("3", "reject")).failed(1, &["job 1 holds it (queued)"]);
    queue.run(&keyed("3", "newest")).failed(2, &["keep, reject, replace, rerun or same"]);
    queue.run(&["enqueue", "k", "--dedupe-policy", "keep"]).failed(2, &["dedupe_policy: needs a dedupe_key"]);
    queue.run(&["enqueue", "k", "--dedupe-key", "x", "--dedupe-by-payload"]).failed(2, &["cannot be used with"]);
    // It runs, as far as the database knows.
    queue.sql("update posthouse.job set state = 'running'").await;
    let behind = queue.run(&keyed("4", "rerun")).fine().stdout;
    let id: i64 = behind.split(' ').nth(1).unwrap().parse().unwrap();
    assert_eq!(behind, format!("job {id} queued (after the one that runs)\n"));
    let json = queue.run(&[&keyed("5", "rerun")[..], &["--json"]].concat()).fine().json();
    assert_eq!(json, json!({ "id": id, "state": "queued", "duplicate": true, "deduped": "replaced" }));
    let shown = queue.run(&["job", "explain", &id.to_string()]).fine().stdout;
    assert!(shown.contains("job 1"), "{shown}");
    queue.run(&["enqueue", "p", "{\"a\": 1.0}", "--dedupe-by-payload"]).fine();
    assert!(queue.run(&["enqueue", "p", "{\"a\":1}", "--dedupe-by-payload"]).fine().stdout.contains("duplicate"));
}

#[tokio::test]
async fn lines_have_policies_of_their_own_or_the_command_lines() {
    let queue = Queue::new().await;
    let lines = "{\"kind\":\"k\",\"dedupe_key\":\"x\",\"payload\":1}\n\
                 {\"kind\":\"k\",\"dedupe_key\":\"x\",\"payload\":2,\"dedupe_policy\":\"same\"}\n\
                 {\"kind\":\"k\"}\n\
                 {\"kind\":\"k\",\"dedupe_key\":\"x\",\"payload\":3}\n";
    let run = ["enqueue", "--jsonl", "-", "--dedupe-policy", "replace", "--keep-going", "--json"];
    let stopped = queue.run_with_stdin(&run, lines).failed(1, &["line 2: dedupe_key: job ", "another payload"]);
    assert_eq!(stopped.json(), json!({ "enqueued": 2, "duplicates": 1, "refused": 1, "lines": 4 }));
    let payloads = queue.texts("select payload::text from posthouse.jobs order by id").await;
    assert_eq!(payloads, ["3", "{}"]);
    let by_payload = "{\"kind\":\"p\",\"payload\":[1]}\n{\"kind\":\"p\",\"payload\":[1.0]}\n";
    let counted =
        queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--dedupe-by-payload", "--json"], by_payload).fine();
    assert_eq!(counted.json()["duplicates"], 1);
    let unkeyed = "{\"kind\":\"k\",\"dedupe_policy\":\"keep\"}\n";
    queue.run_with_stdin(&["enqueue", "--jsonl", "-"], unkeyed).failed(1, &["dedupe_policy: needs a dedupe_key"]);
}

#[tokio::test]
async fn a_line_that_is_full_says_so() {
    let queue = Queue::new().await;
    let set = queue.run(&["queue", "set", "imports", "--max-depth", "1"]).fine().stdout;
    assert_eq!(set, "queue imports takes in no new jobs while 1 wait\n");
    queue.run(&["enqueue", "k", "--queue", "imports"]).fine();
    queue.run(&["enqueue", "k", "--queue", "imports"]).failed(
        1,
        &[
            "queue 'imports' is full: 1 jobs wait, 1 may",
            "Room for 0 more",
            "posthouse queue set 'imports' --max-depth N",
        ],
    );
    queue.run(&["tenant", "set", "acme", "--max-depth", "1", "--weight", "2"]).fine();
    queue.run(&["enqueue", "k", "--tenant", "acme"]).fine();
    queue
        .run(&["enqueue", "k", "--tenant", "acme"])
        .failed(1, &["tenant 'acme' is full", "posthouse tenant set 'acme' --max-depth N"]);
    let listed = queue.run(&["queue", "list", "--json"]).fine().json();
    let imports = listed.as_array().unwrap().iter().find(|row| row["queue"] == "imports").unwrap().clone();
    assert_eq!(imports["max_depth"], 1);
    let tenants = queue.run(&["tenant", "list", "--json"]).fine().json();
    let acme = tenants.as_array().unwrap().iter().find(|row| row["tenant"] == "acme").unwrap().clone();
    assert_eq!((&acme["max_depth"], &acme["weight"]), (&json!(1), &json!(2.0)));
    assert!(queue.run(&["queue", "list"]).fine().stdout.contains("MAY WAIT"));
    let freed = queue.run(&["tenant", "set", "acme", "--max-depth", "none", "--json"]).fine().json();
    assert_eq!(freed, json!({ "tenant": "acme", "max_depth": null }));
    queue.run(&["enqueue", "k", "--tenant", "acme"]).fine();
    queue.run(&["queue", "set", "imports", "--max-depth", "0"]).failed(2, &["max_depth: 0 is not between 1"]);
    queue.run(&["queue", "set", "imports", "--max-depth", "many"]).failed(2, &["a number of jobs is needed, or none"]);
    queue.run(&["tenant", "set", "acme"]).failed(2, &["--weight", "--max-depth"]);
}

#[tokio::test]
async fn a_copy_is_adopted_after_a_look_at_it() {
    let queue = Queue::new().await;
    let at_home = queue.run(&["db", "adopt"]).fine().stdout;
    assert!(at_home.contains("no worker has been here yet"), "{at_home}");
    queue.enqueue(&["k"]);
    queue.work("k", || Outcome::done(&1)).await;
    assert!(queue.run(&["db", "adopt"]).fine().stdout.contains("no copy"));
    queue.enqueue(&["k"]);
    queue.enqueue(&["k", "--queue", "later", "--delay", "1h"]);
    // As after a dump was restored elsewhere.
    queue
        .sql("update posthouse.meta set value = (value::jsonb || '{\"table\": \"1\"}')::text where name = 'origin'")
        .await;
    let refused = queue.run(&["work", "--exec", "k=true", "--until-empty"]);
    assert!(
        refused.code != 0
            && refused.stderr.contains("restored from a dump")
            && refused.stderr.contains("posthouse db adopt"),
        "{refused:?}"
    );
    let status = queue.run(&["status"]).fine().stdout;
    assert!(
        status.starts_with("this database is a copy of another (it was restored from a dump)")
            && status.contains("`posthouse db adopt` shows"),
        "{status}"
    );
    assert_eq!(queue.run(&["status", "--json"]).fine().json()["copy"], "it was restored from a dump");
    let findings = queue.run(&["db", "doctor", "--json"]).json()["findings"].as_array().unwrap().clone();
    assert!(findings.iter().any(|found| found["check"] == "copy" && found["severity"] == "bad"), "{findings:?}");
    queue.run(&["db", "adopt"]).failed(2, &["--yes", "--dry-run"]);
    let shown = queue.run(&["db", "adopt", "--dry-run"]).fine();
    for word in ["restored from a dump", "default", "later"] {
        assert!(shown.stdout.contains(word), "{word}: {shown:?}");
    }
    let seen = queue.run(&["db", "adopt", "--dry-run", "--json"]).fine().json();
    let row = |queue: &str, due: i32, later: i32| json!({ "queue": queue, "due": due, "later": later, "running": 0, "failed": 0 });
    assert_eq!(seen["queues"], json!([row("default", 1, 0), row("later", 0, 1)]));
    assert_eq!((&seen["is_copy"], &seen["adopted"]), (&Value::Bool(true), &Value::Bool(false)));
    let adopted = queue.run(&["db", "adopt", "--yes"]).fine().stdout;
    assert!(adopted.contains("adopted"), "{adopted}");
    assert_eq!(queue.run(&["status", "--json"]).fine().json()["copy"], Value::Null);
    assert!(queue.run(&["db", "adopt", "--yes"]).fine().stdout.contains("there is nothing to adopt"));
    queue.run(&["work", "--exec", "k=true", "--until-empty"]).fine();
    // Said by a person of a copy of files.
    queue.run(&["db", "adopt", "--undo"]).fine();
    assert!(queue.run(&["work", "--exec", "k=true", "--until-empty"]).stderr.contains("somebody said"));
    assert_eq!(queue.run(&["db", "adopt", "--yes", "--json"]).fine().json()["adopted"], true);
}
