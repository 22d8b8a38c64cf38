//! Cancelling, retrying, reprioritising and purging what has something in common.

use posthouse::{JobError, Outcome};
use serde_json::json;

use crate::support::Queue;

/// Jobs 1 to 4: queued of tenant acme, queued for later of acme, failed of acme, done of bolt.
async fn mixed() -> Queue {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "--tenant", "acme"]);
    queue.enqueue(&["k", "--tenant", "acme", "--delay", "1h"]);
    queue.enqueue(&["f", "--tenant", "acme"]);
    queue.enqueue(&["d", "--tenant", "bolt"]);
    queue.work("f", || Outcome::fail(JobError::new("timeout", "no answer"))).await;
    queue.work("d", || Outcome::done(&json!(1))).await;
    queue
}

async fn states(queue: &Queue) -> Vec<String> {
    queue.texts("select state from posthouse.jobs order by id").await
}

#[tokio::test]
async fn nobody_means_every_job_by_chance() {
    let queue = mixed().await;
    for command in
        [&["cancel"][..], &["retry"], &["purge", "--yes"], &["reprioritise", "--to", "1"], &["cancel", "--dry-run"]]
    {
        queue.run(&[&["job"], command].concat()).failed(2, &["which jobs is not said", "--queue", "--all"]);
    }
    queue.run(&["job", "cancel", "--created-before", "someday"]).failed(2, &["created_before", "someday"]);
    queue.run(&["job", "cancel", "--state", "done"]).failed(2, &["state: done is not possible here", "queued"]);
    queue.run(&["job", "cancel", "--state", "asleep"]).failed(2, &["asleep", "queued"]);
    assert_eq!(states(&queue).await, ["queued", "queued", "failed", "done"]);
}

#[tokio::test]
async fn a_dry_run_says_which_and_changes_nothing() {
    let queue = mixed().await;
    let said = queue.run(&["job", "cancel", "--tenant", "acme", "--dry-run"]).fine().stdout;
    assert!(said.contains("2 would be cancelled; nothing was changed"), "{said}");
    assert_eq!(said.lines().count(), 4, "{said}");
    let said = queue.run(&["job", "purge", "--all", "--dry-run", "--json"]).fine().json();
    assert_eq!((&said["purged"], &said["would_be_purged"]), (&json!(0), &json!(2)));
    assert_eq!(said["sample"][0]["id"], json!(3));
    assert!(said["sample"][0].get("payload").is_none(), "{said}");
    let said = queue.run(&["job", "retry", "2", "3", "--dry-run"]).fine().stdout;
    assert!(said.contains("2 would be retried"), "{said}");
    assert_eq!(states(&queue).await, ["queued", "queued", "failed", "done"]);
}

#[tokio::test]
async fn what_fits_is_changed_and_the_rest_is_left_alone() {
    let queue = mixed().await;
    assert_eq!(
        queue.run(&["job", "reprioritise", "--to", "-7", "--tenant", "acme"]).fine().stdout,
        "2 reprioritised\n"
    );
    assert_eq!(queue.texts("select priority::text from posthouse.jobs order by id").await, ["-7", "-7", "0", "0"]);
    assert_eq!(queue.run(&["job", "retry", "--class", "timeout", "--failed-since", "1h"]).fine().stdout, "1 retried\n");
    assert_eq!(states(&queue).await, ["queued", "queued", "queued", "done"]);
    let by = queue.texts("select redriven_by from posthouse.redrives").await;
    assert_eq!(by.len(), 1, "{by:?}");
    assert_eq!(queue.run(&["job", "cancel", "--kind", "k", "--json"]).fine().json(), json!({ "cancelled": 2 }));
    assert_eq!(states(&queue).await, ["cancelled", "cancelled", "queued", "done"]);
    assert_eq!(queue.run(&["job", "cancel", "--created-before", "1h"]).fine().stdout, "0 cancelled\n");
    let asked =
        queue.run(&["job", "purge", "--state", "cancelled", "--json"]).failed(1, &["would remove 2 jobs", "--yes"]);
    assert_eq!(asked.json(), json!({ "purged": 0, "would_purge": 2 }));
    assert_eq!(queue.run(&["job", "purge", "--state", "cancelled", "--yes"]).fine().stdout, "2 purged\n");
    assert_eq!(
        queue.run(&["job", "purge", "3", "4"]).failed(1, &["job 3 is queued and must be cancelled first"]).stdout,
        "1 purged\n"
    );
    assert_eq!(states(&queue).await, ["queued"]);
    // Ids and conditions together: of these, those that fit.
    let none = queue.run(&["job", "cancel", "3", "--tenant", "bolt"]).failed(1, &[]);
    assert_eq!(none.stdout, "0 cancelled\n");
}
