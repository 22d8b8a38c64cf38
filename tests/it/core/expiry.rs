//! Jobs that are kept for a time: each outcome for its own, deleted in pieces, never sooner, and whoever may still need them keeps them.

use posthouse::store::{Ended, Retention};
use serde_json::{Value, json};

use super::partitions::expire;
use super::support::{Queue, Session, Worker, said};

/// Let days pass for what has ended, and for the sweep.
async fn pass(s: &Session, days: f64) {
    s.run(&format!(
        "update posthouse.archive set finished_at = finished_at - interval '{days} days';
         update posthouse.dead_letter set failed_at = failed_at - interval '{days} days';
         update posthouse.tombstone set finished_at = finished_at - interval '{days} days';
         update posthouse.burial set buried_at = buried_at - interval '{days} days';
         update posthouse.dedupe set expires_at = expires_at - interval '{days} days';
         update posthouse.slice set due_at = due_at - interval '{days} days' where due_at < 'infinity'"
    ))
    .await;
}

async fn keep(s: &Session, queue: &str, outcome: &str, time: &str) {
    s.run(&format!("select posthouse.set_queue('{queue}', {time}, '{outcome}')")).await;
}

/// A job of a queue that has ended this way. A cancelled one while it ran.
async fn ended(s: &Session, worker: &Worker, queue: &str, outcome: &str) -> i64 {
    let id = s.enqueue(&format!("kind => 'k', queue => '{queue}', payload => '{{\"of\": \"{outcome}\"}}'")).await;
    end(s, worker, id, outcome).await;
    id
}

async fn end(s: &Session, worker: &Worker, id: i64, outcome: &str) {
    let job = worker.claim(s, 10).await.into_iter().find(|job| job.id == id).unwrap();
    let settled = s.settle(worker.id, &json!([{"id": id, "fence": job.fence, "outcome": outcome}])).await;
    assert_eq!(said(&settled)[0].0, "applied");
}

/// Which of these jobs there are, with their payloads.
async fn there(s: &Session, ids: &[i64]) -> Vec<i64> {
    let jobs: Vec<i64> =
        s.list(&format!("select id from posthouse.jobs where id = any(array{ids:?}::bigint[]) order by id")).await;
    let payloads: Vec<i64> = s.list("select id from posthouse.payload order by id").await;
    assert_eq!(jobs, payloads);
    jobs
}

#[tokio::test]
async fn each_outcome_is_kept_for_its_own_time() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["a", "b", "c"], &["k"], 3_600_000).await;
    keep(&s, "a", "done", "'10 days'").await;
    keep(&s, "a", "cancelled", "'2 days'").await;
    keep(&s, "a", "failed", "'20 days'").await;
    keep(&s, "b", "done", "'4 days'").await;
    keep(&s, "*", "failed", "'30 days'").await;
    keep(&s, "*", "done", "'6 days'").await;
    let mut ids = Vec::new();
    for queue in ["a", "b", "c"] {
        for outcome in ["done", "cancelled", "fail"] {
            ids.push(ended(&s, &worker, queue, outcome).await);
        }
    }
    let forever = s.enqueue("kind => 'k', queue => 'd'").await;
    keep(&s, "d", "done", "'1000 years'").await;
    s.run(&format!("select posthouse.cancel({forever})")).await;
    ids.push(forever);
    expire(&s).await;
    assert_eq!(there(&s, &ids).await, ids);
    let mut left = ids.clone();
    // Days, and which go on them. A day is the longest that a slice waits, here it is a sixteenth of the time.
    for (days, gone) in [
        (1.9, vec![]),
        (0.3, vec![1]),    // 2.2: cancelled of a
        (1.7, vec![]),     // 3.9
        (0.4, vec![3, 4]), // 4.3: done and cancelled of b
        (1.6, vec![]),     // 5.9
        (0.5, vec![6, 7]), // 6.4: done and cancelled of c
        (4.5, vec![0]),    // 10.9: done of a
        (9.0, vec![]),     // 19.9
        (1.3, vec![2]),    // 21.2: failed of a
        (8.7, vec![]),     // 29.9
        (1.2, vec![5, 8]), // 31.1: failed of b and c
        (100_000.0, vec![]),
    ] {
        pass(&s, days).await;
        expire(&s).await;
        let going: Vec<i64> = gone.iter().map(|&n: &usize| ids[n]).collect();
        left.retain(|id| !going.contains(id));
        assert_eq!(there(&s, &ids).await, left, "{days} days later");
    }
    assert_eq!(left, [forever]);
}

#[tokio::test]
async fn a_time_that_is_changed_counts_at_once_for_what_has_ended() {
    let (queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["q"], &["k"], 3_600_000).await;
    let id = ended(&s, &worker, "q", "done").await;
    pass(&s, 100.0).await;
    expire(&s).await;
    assert_eq!(s.count("posthouse.slice").await, 0, "where all is kept for ever there is nothing to look after");
    keep(&s, "q", "done", "'1 year'").await;
    expire(&s).await;
    assert_eq!(s.state(id).await, "done");
    keep(&s, "q", "done", "'1000 years'").await;
    expire(&s).await;
    assert_eq!(s.state(id).await, "done");
    let store = posthouse::store::Database::new(queue.url()).unwrap().store("test");
    store.set_retention("q", Ended::Done, Retention::For(std::time::Duration::from_hours(24))).await.unwrap();
    expire(&s).await;
    assert_eq!(s.state(id).await, "");
    // Also from a time to no history at all.
    store.set_retention("q", Ended::Done, Retention::Forever).await.unwrap();
    let id = ended(&s, &worker, "q", "done").await;
    keep(&s, "q", "done", "'0'").await;
    expire(&s).await;
    assert_eq!(s.state(id).await, "");
    store.set_retention("q", Ended::Done, Retention::Default).await.unwrap();
    assert_eq!(store.queues().await.unwrap()[0].retention_ms, None);
}

#[tokio::test]
async fn it_goes_in_bounded_pieces() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["q"], &["k"], 3_600_000).await;
    ended(&s, &worker, "q", "done").await;
    s.run(
        "insert into posthouse.archive (id, lane_id, created_at, finished_at, fence, attempt, max_attempts, state)
           select n, lane_id, created_at, finished_at, 1, 1, 5, 'done' from posthouse.archive, generate_series(2, 39000) n;
         insert into posthouse.payload (id, payload) select n, '{}' from generate_series(2, 39000) n;
         select setval('posthouse.job_id_seq', 39000); select posthouse.set_queue('q', '1 day')",
    )
    .await;
    pass(&s, 2.0).await;
    // First all slices are made and looked at, one in a piece.
    let mut looks = 0;
    while s.get::<bool>("select posthouse.survey_slices('0')").await {
        looks += 1;
    }
    assert!((4..=6).contains(&looks), "{looks}");
    assert_eq!(s.count("posthouse.archive").await, 39_000);
    // Then they go, the oldest first.
    let mut left = vec![39_000];
    while s.get::<bool>("select posthouse.expire(1000, '1 hour')").await {
        left.push(s.count("posthouse.archive").await);
        assert_eq!(s.count("posthouse.payload").await, *left.last().unwrap());
        assert_eq!(s.count("posthouse.archive where id <= 5000").await, (*left.last().unwrap() - 34_000).max(0));
    }
    assert_eq!(left, (0..=39).rev().map(|thousands| thousands * 1_000).collect::<Vec<i64>>());
}

#[tokio::test]
async fn a_key_that_stands_for_a_window_keeps_its_job() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["q"], &["k"], 3_600_000).await;
    keep(&s, "q", "done", "'2 days'").await;
    let keyed = "kind => 'k', queue => 'q', dedupe_key => 'a', dedupe_for => '5 days'";
    let id = s.enqueue(keyed).await;
    end(&s, &worker, id, "done").await;
    let other = ended(&s, &worker, "q", "done").await;
    expire(&s).await;
    pass(&s, 3.0).await;
    expire(&s).await;
    assert_eq!((s.state(id).await, s.state(other).await), ("done".to_owned(), String::new()));
    assert_eq!(s.enqueued(keyed).await, (id, "done".to_owned(), true));
    pass(&s, 3.0).await;
    expire(&s).await;
    assert_eq!(s.state(id).await, "");
}

#[tokio::test]
async fn what_ends_or_commits_after_the_look_expires_too() {
    let (queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["q"], &["k"], 3_600_000).await;
    keep(&s, "q", "done", "'2 days'").await;
    keep(&s, "q", "failed", "'2 days'").await;
    let long = s.enqueue("kind => 'k', queue => 'q'").await;
    let open = queue.session().await;
    open.run("begin").await;
    let late = open.enqueue("kind => 'k', queue => 'q'").await;
    let dead = s.enqueue("kind => 'k', queue => 'q', max_attempts => 1").await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(jobs.len(), 2);
    s.settle(worker.id, &json!([{"id": dead, "fence": 1, "outcome": "fail"}])).await;
    s.run("select setval('posthouse.job_id_seq', 20000)").await;
    expire(&s).await;
    open.run("commit").await;
    // Looked at again within a day, whatever is in it.
    pass(&s, 1.1).await;
    s.run(&format!("select posthouse.retry({dead})")).await;
    expire(&s).await;
    s.settle(worker.id, &json!([{"id": long, "fence": 1, "outcome": "done"}])).await;
    for id in [late, dead] {
        let job = worker.claim(&s, 1).await.remove(0);
        assert!([late, dead].contains(&job.id), "{id}");
        s.settle(worker.id, &json!([{"id": job.id, "fence": job.fence, "outcome": "done"}])).await;
    }
    for _ in 0..4 {
        pass(&s, 1.1).await;
        expire(&s).await;
    }
    assert_eq!((s.count("posthouse.jobs").await, s.count("posthouse.payload").await), (0, 0));
}

#[tokio::test]
async fn a_queue_without_history_and_its_neighbour_with_some() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["bare", "kept", "other"], &["k"], 3_600_000).await;
    keep(&s, "*", "done", "'0'").await;
    keep(&s, "kept", "done", "'3 days'").await;
    keep(&s, "other", "cancelled", "'1 day'").await;
    let kept = ended(&s, &worker, "kept", "done").await;
    let bare = ended(&s, &worker, "bare", "done").await;
    let dropped = ended(&s, &worker, "bare", "cancelled").await;
    let cancelled = ended(&s, &worker, "other", "cancelled").await;
    let archived: Vec<i64> = s.list("select id from posthouse.archive order by id").await;
    assert_eq!((archived, s.count("posthouse.tombstone").await), (vec![kept, cancelled], 2));
    expire(&s).await;
    pass(&s, 1.0).await;
    s.run("update posthouse.sweep set floor_at = '-infinity'; select posthouse.forget()").await;
    assert_eq!((s.state(bare).await, s.state(dropped).await), (String::new(), String::new()));
    pass(&s, 0.2).await;
    expire(&s).await;
    assert_eq!(there(&s, &[kept, cancelled]).await, [kept]);
}

#[tokio::test]
async fn a_payload_goes_with_its_job_where_the_kind_asks() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["q", "bare"], &["k", "plain"], 3_600_000).await;
    s.run("select posthouse.set_kind('k', '{crm}', 100); select posthouse.set_kind('k', drop_payload => true)").await;
    let known: Value = s.get("select to_jsonb(k) from posthouse.kind k").await;
    assert_eq!(known, json!({"name": "k", "gates": ["crm"], "max_output_tokens": 100, "drops_payload": true}));
    keep(&s, "bare", "done", "'0'").await;
    let enqueue = async |kind: &str, queue: &str| {
        s.enqueue(&format!("kind => '{kind}', queue => '{queue}', payload => '{{\"a\": 1}}'")).await
    };
    let (done, retried, failed) = (enqueue("k", "q").await, enqueue("k", "q").await, enqueue("k", "q").await);
    let (cancelled, bare, plain) = (enqueue("k", "q").await, enqueue("k", "bare").await, enqueue("plain", "q").await);
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(jobs.len(), 6);
    let outcomes: Value = [
        (done, "done"),
        (retried, "retry"),
        (failed, "fail"),
        (cancelled, "cancelled"),
        (bare, "done"),
        (plain, "done"),
    ]
    .into_iter()
    .map(|(id, outcome)| json!({"id": id, "fence": 1, "outcome": outcome, "result": 1}))
    .collect();
    s.settle(worker.id, &outcomes).await;
    let left: Vec<i64> = s.list("select id from posthouse.payload order by id").await;
    assert_eq!(left, [retried, failed, plain]);
    assert_eq!(s.job(done).await["payload"], Value::Null);
    assert_eq!(s.job(done).await["result"], json!(1));
    let refused = s.refused(&format!("select posthouse.retry({cancelled})")).await;
    assert!(refused.code == "PH004" && refused.message.contains("payload was dropped"), "{refused:?}");
    assert_eq!(s.state(cancelled).await, "cancelled");
    // One in line goes with it too.
    let queued = enqueue("k", "q").await;
    assert_eq!(s.get::<String>(&format!("select posthouse.cancel({queued})")).await, "cancelled");
    assert_eq!(s.count(&format!("posthouse.payload where id = {queued}")).await, 0);
    // A dead letter keeps it, and can be redriven.
    assert_eq!(s.get::<String>(&format!("select posthouse.retry({failed})")).await, "queued");
    s.run("select posthouse.set_kind('k', '{crm}')").await;
    assert!(s.get::<bool>("select drops_payload from posthouse.kind").await, "what is not said stays");
}
