//! What people do to jobs, what they see of them, and the housekeeping behind it.

use serde_json::{Value, json};

use super::support::{Queue, Session, Worker, ids, said};

const TIDY: &str = "update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()";

/// Let jobs fail until they are dead letters; the answer are their ids.
async fn dead(s: &Session, worker: &Worker, jobs: i64, tenant: &str) -> Vec<i64> {
    s.enqueue_bulk("k", tenant, jobs).await;
    let taken = worker.claim(s, i32::try_from(jobs).unwrap()).await;
    let outcomes: Vec<Value> = taken
        .iter()
        .map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "fail", "error": {"class": "bad", "message": "no"}}))
        .collect();
    s.settle(worker.id, &json!(outcomes)).await;
    ids(&taken)
}

async fn explain(s: &Session, id: i64) -> Vec<(String, String)> {
    s.rows(&format!("select state, reason from posthouse.explain({id})"))
        .await
        .iter()
        .map(|r| (r.get(0), r.get(1)))
        .collect()
}

#[tokio::test]
async fn cancel_in_each_state() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let cancel = async |id: i64| s.get::<String>(&format!("select posthouse.cancel({id})")).await;
    let queued = s.enqueue("kind => 'k', delay => '1 hour', dedupe_key => 'a'").await;
    assert_eq!(cancel(queued).await, "cancelled");
    assert_eq!(cancel(queued).await, "cancelled");
    assert!(!s.enqueued("kind => 'k', delay => '1 hour', dedupe_key => 'a'").await.2);
    // A running one: whatever its worker then says but done or fail makes it cancelled.
    for (said_by_worker, state) in [
        ("done", "done"),
        ("fail", "failed"),
        ("retry", "cancelled"),
        ("snooze", "cancelled"),
        ("cancelled", "cancelled"),
        ("release", "cancelled"),
    ] {
        let id = s.enqueue("kind => 'k'").await;
        let fence = worker.claim(&s, 1).await[0].fence;
        assert_eq!(cancel(id).await, "running");
        assert_eq!(cancel(id).await, "running");
        assert_eq!(s.job(id).await["cancel_asked"], json!(true));
        s.settle(worker.id, &json!([{"id": id, "fence": fence, "outcome": said_by_worker, "delay_ms": 0}])).await;
        assert_eq!(s.state(id).await, state, "{said_by_worker}");
        assert_eq!(cancel(id).await, state, "{said_by_worker}");
        assert!(worker.claim(&s, 1).await.is_empty());
        // What it said is kept.
        let errors = s.job(id).await["errors"].as_array().map_or(0, Vec::len);
        assert_eq!(errors, usize::from(["fail", "retry"].contains(&said_by_worker)), "{said_by_worker}");
    }
    for call in ["cancel(999)", "retry(999)", "explain(999)"] {
        let refusal = s.refused(&format!("select * from posthouse.{call}")).await;
        assert_eq!((&*refusal.code, refusal.message.contains("999")), ("PH003", true), "{call}");
    }
}

#[tokio::test]
async fn retry_in_each_state() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let retry = async |id: i64| s.get::<String>(&format!("select posthouse.retry({id})")).await;
    // Sooner.
    let later = s.enqueue("kind => 'k', delay => '1 hour'").await;
    assert!(worker.claim(&s, 1).await.is_empty());
    assert_eq!(retry(later).await, "queued");
    assert_eq!(retry(later).await, "queued");
    let jobs = worker.claim(&s, 1).await;
    assert_eq!(ids(&jobs), [later]);
    // Not while it runs, nor when it is done.
    let refusal = s.refused(&format!("select posthouse.retry({later})")).await;
    assert_eq!(refusal.code, "PH004", "{}", refusal.message);
    s.settle(worker.id, &json!([{"id": later, "fence": 1, "outcome": "done"}])).await;
    let refusal = s.refused(&format!("select posthouse.retry({later})")).await;
    assert_eq!((&*refusal.code, refusal.message.contains("done")), ("PH004", true), "{}", refusal.message);
    // Failed, and cancelled.
    let failed = dead(&s, &worker, 1, "t").await[0];
    let cancelled = s.enqueue("kind => 'k', payload => '{\"a\": 1}'").await;
    s.get::<String>(&format!("select posthouse.cancel({cancelled})")).await;
    assert_eq!(retry(failed).await, "queued");
    assert_eq!(retry(cancelled).await, "queued");
    let mut jobs = worker.claim(&s, 10).await;
    jobs.sort_by_key(|j| j.id);
    assert_eq!(
        jobs.iter().map(|j| (j.id, j.fence, j.attempt)).collect::<Vec<_>>(),
        [(failed, 2, 1), (cancelled, 1, 1)]
    );
    assert_eq!(jobs[1].payload, json!({"a": 1}));
    s.settle(
        worker.id,
        &json!([{"id": failed, "fence": 2, "outcome": "done"}, {"id": cancelled, "fence": 1, "outcome": "done"}]),
    )
    .await;
    assert_eq!(s.count("posthouse.jobs").await, 3);
    assert_eq!(s.count("posthouse.archive where state = 'done'").await, 3);
    // Its history goes with it.
    assert_eq!(s.job(failed).await["errors"][0]["class"], json!("bad"));
}

#[tokio::test]
async fn a_job_that_is_replaced_meanwhile_is_cancelled_and_retried_all_the_same() {
    let (queue, s) = Queue::with_session().await;
    let open = queue.session().await;
    let keyed = "kind => 'k', delay => '1 hour', dedupe_key => 'a'";
    let id = s.enqueue(keyed).await;
    for (call, state) in [("retry", "queued"), ("cancel", "cancelled")] {
        open.run(&format!("begin; select posthouse.enqueue({keyed}, dedupe_policy => 'replace')")).await;
        let other = queue.session().await;
        let pid: i32 = other.get("select pg_backend_pid()").await;
        let waits = tokio::spawn(async move { other.get::<String>(&format!("select posthouse.{call}({id})")).await });
        s.wait_blocked(pid).await;
        open.run("commit").await;
        assert_eq!(waits.await.unwrap(), state);
        assert_eq!(s.state(id).await, state);
        assert_eq!(s.count("posthouse.job where run_at > clock_timestamp()").await, 0, "{call}");
    }
}

#[tokio::test]
async fn redrive_keeps_history_and_does_nothing_twice() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let a = dead(&s, &worker, 5, "a").await;
    let b = dead(&s, &worker, 5, "b").await;
    let redrive = async |arguments: &str| s.get::<i64>(&format!("select posthouse.redrive({arguments})")).await;
    assert_eq!(redrive("queue => 'nope'").await, 0);
    assert_eq!(redrive("kind => 'nope'").await, 0);
    assert_eq!(redrive("max_jobs => 0").await, 0);
    assert_eq!(redrive("max_jobs => -1").await, 0);
    assert_eq!(redrive("ids => '{}'").await, 0);
    assert_eq!(redrive(&format!("ids => '{{{},{},777}}', tenant => 'a'", a[0], b[0])).await, 1);
    // Oldest first, in pieces, twice.
    assert_eq!(redrive("tenant => 'a', max_jobs => 2").await, 2);
    assert_eq!(
        (s.state(a[1]).await, s.state(a[2]).await, s.state(a[3]).await),
        ("queued".into(), "queued".into(), "failed".into())
    );
    assert_eq!(redrive("kind => 'k'").await, 7);
    assert_eq!(redrive("queue => 'default'").await, 0);
    assert_eq!(redrive(&format!("ids => '{{{}}}'", a[0])).await, 0);
    let fresh = s.count("posthouse.job where state = 'queued' and attempt = 0 and fence = 1 and worker is null and started_at is null and not cancel_asked").await;
    assert_eq!(fresh, 10);
    // A settle from before the failure is still known; it writes nothing.
    let verdicts = s.settle(worker.id, &json!([{"id": a[0], "fence": 1, "outcome": "fail"}])).await;
    assert_eq!(said(&verdicts), [("already", Some("queued"))]);
    // All attempts count anew, and all errors are kept.
    let mut jobs = worker.claim(&s, 100).await;
    jobs.sort_by_key(|j| j.id);
    assert_eq!((jobs.len(), jobs[0].attempt, jobs[0].fence), (10, 1, 2));
    s.settle(
        worker.id,
        &json!([{"id": a[0], "fence": 2, "outcome": "fail", "error": {"class": "worse", "message": "still no"}}]),
    )
    .await;
    let job = s.job(a[0]).await;
    let classes: Vec<&str> = job["errors"].as_array().unwrap().iter().map(|e| e["class"].as_str().unwrap()).collect();
    assert_eq!((classes, &job["error"]), (vec!["bad", "worse"], &json!("still no")));
}

#[tokio::test]
async fn purge_removes_dead_letters_and_payloads() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let a = dead(&s, &worker, 5, "a").await;
    dead(&s, &worker, 5, "b").await;
    s.enqueue("kind => 'k', tenant => 'a'").await;
    let purge = async |arguments: &str| s.get::<i64>(&format!("select posthouse.purge({arguments})")).await;
    assert_eq!(purge("queue => 'nope'").await, 0);
    assert_eq!(purge(&format!("ids => '{{{},777}}'", a[4])).await, 1);
    assert_eq!(purge("tenant => 'a', max_jobs => 3").await, 3);
    assert_eq!(s.list::<i64>("select id from posthouse.dead_letter order by id limit 1").await, [a[3]]);
    assert_eq!(s.count("posthouse.payload").await, 7);
    assert_eq!(purge("kind => 'k'").await, 6);
    assert_eq!(s.count("posthouse.payload").await, 1);
    assert_eq!(s.state(a[0]).await, "");
}

#[tokio::test]
async fn explain_says_what_holds_a_job() {
    let (_queue, s) = Queue::with_session().await;
    let has = |reasons: &[(String, String)], texts: &[&str]| {
        assert_eq!(reasons.len(), texts.len(), "{reasons:?}");
        for ((_, reason), text) in reasons.iter().zip(texts) {
            assert!(reason.contains(text), "{reasons:?}");
        }
    };
    let id = s.enqueue("kind => 'k', max_attempts => 3").await;
    let second = s.enqueue("kind => 'k'").await;
    let later = s.enqueue("kind => 'k', delay => '1 hour'").await;
    has(&explain(&s, id).await, &["no live worker serves kind k on queue"]);
    has(&explain(&s, later).await, &["not due yet", "no live worker serves"]);
    let unserved: Vec<String> = s.get("select posthouse.unserved_kinds('default', 'default')").await;
    assert_eq!(unserved, ["k"]);
    let worker = s.worker(&["k"]).await;
    let unserved: Vec<String> = s.get("select posthouse.unserved_kinds('default', 'default')").await;
    assert!(unserved.is_empty());
    has(&explain(&s, second).await, &["free slot: 1 jobs"]);
    has(&explain(&s, later).await, &["not due yet"]);
    let until: bool = s
        .get(&format!("select until > clock_timestamp() + interval '59 minutes' from posthouse.explain({later})"))
        .await;
    assert!(until);
    worker.claim(&s, 1).await;
    has(&explain(&s, id).await, &["attempt 1 of 3 runs on worker box pid 7"]);
    s.settle(
        worker.id,
        &json!([{"id": id, "fence": 1, "outcome": "snooze", "delay_ms": 60000, "reason": "429 from upstream"}]),
    )
    .await;
    has(&explain(&s, id).await, &["not due yet: 429 from upstream"]);
    s.get::<String>(&format!("select posthouse.retry({id})")).await;
    let jobs = worker.claim(&s, 10).await;
    s.get::<String>(&format!("select posthouse.cancel({id})")).await;
    has(&explain(&s, id).await, &["asked to cancel"]);
    s.expire(worker.id).await;
    has(&explain(&s, second).await, &["lease of its worker box pid 7 is over"]);
    s.run("update posthouse.worker set dead_at = now()").await;
    has(&explain(&s, second).await, &["is lost; the next sweep"]);
    let fence = jobs.iter().find(|j| j.id == second).unwrap().fence;
    s.settle(worker.id, &json!([{"id": second, "fence": fence, "outcome": "done"}])).await;
    has(&explain(&s, second).await, &["done at"]);
    s.settle(worker.id, &json!([{"id": id, "fence": 2, "outcome": "fail", "error": "401"}])).await;
    has(&explain(&s, id).await, &["failed after attempt 1 of 3: 401"]);
    assert_eq!(explain(&s, id).await[0].0, "failed");
}

#[tokio::test]
async fn the_views_show_every_home_of_a_job_as_one() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 4).await;
    s.enqueue("kind => 'k', tenant => 't', delay => '1 hour'").await;
    s.enqueue("kind => 'k', tenant => 'u', queue => 'q'").await;
    let jobs = worker.claim(&s, 3).await;
    s.settle(
        worker.id,
        &json!([{"id": jobs[0].id, "fence": 1, "outcome": "done"}, {"id": jobs[1].id, "fence": 1, "outcome": "fail"}]),
    )
    .await;
    s.run("update posthouse.job set run_at = clock_timestamp() - interval '1 minute' where state = 'queued' and run_at <= clock_timestamp()").await;
    let health = async || -> Vec<(String, String, Vec<i64>)> {
        s.rows("select queue, tenant, array[due, later, running, waiting, done, failed] from posthouse.queue_health order by queue")
            .await
            .iter()
            .map(|r| (r.get(0), r.get(1), r.get(2)))
            .collect()
    };
    let expected = [
        ("default".to_owned(), "t".to_owned(), vec![1, 1, 1, 0, 1, 1]),
        ("q".to_owned(), "u".to_owned(), vec![1, 0, 0, 0, 0, 0]),
    ];
    assert_eq!(health().await, expected);
    let age: bool = s.get("select bool_and(oldest_due_age between interval '59 seconds' and interval '2 minutes') from posthouse.queue_health").await;
    assert!(age);
    // The same after the counts were folded.
    s.run(TIDY).await;
    assert_eq!(health().await, expected);
    let states: Vec<String> =
        s.list("select state || ' ' || count(*) from posthouse.jobs group by state order by state").await;
    assert_eq!(states, ["done 1", "failed 1", "queued 3", "running 1"]);
    let distinct: i64 = s.get("select count(distinct id) from posthouse.jobs").await;
    assert_eq!(distinct, 6);
}

#[tokio::test]
async fn floors_rise_to_the_oldest_job_and_stragglers_are_found() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let first = s.enqueue("kind => 'k'").await;
    s.run(TIDY).await;
    let floor = async || {
        s.get::<Option<f64>>(
            "select extract(epoch from clock_timestamp() - max(floor_at))::float8 from posthouse.lane_floor",
        )
        .await
    };
    let at: bool = s.get("select max(f.floor_at) = min(j.run_at) from posthouse.lane_floor f, posthouse.job j").await;
    assert!(at, "the floor stops at the oldest job");
    worker.claim(&s, 1).await;
    let before = floor().await.unwrap();
    s.run(TIDY).await;
    assert!(floor().await.unwrap() < before.max(1.0), "nothing is queued: the floor follows the clock");
    // A job that goes back to the front, or was committed behind the floor, is found.
    s.settle(worker.id, &json!([{"id": first, "fence": 1, "outcome": "release"}])).await;
    assert_eq!(ids(&worker.claim(&s, 1).await), [first]);
    s.settle(worker.id, &json!([{"id": first, "fence": 2, "outcome": "snooze", "delay_ms": 3600000}])).await;
    s.run("update posthouse.job set run_at = clock_timestamp() - interval '1 hour'").await;
    assert!(worker.claim(&s, 1).await.is_empty(), "it is behind the floor");
    // Even if its lane fell asleep meanwhile.
    s.run("update posthouse.lane set ready_at = 'infinity'").await;
    s.run(TIDY).await;
    assert_eq!(ids(&worker.claim(&s, 1).await), [first]);
    // One floor a lane is kept.
    s.run(TIDY).await;
    s.run(TIDY).await;
    assert!(s.count("posthouse.lane_floor").await <= 2);
}

#[tokio::test]
async fn a_part_of_the_sweep_that_fails_holds_up_no_other() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.enqueue('k')").await;
    // A worker's role that may not make tables, as is common.
    let role = format!("worker_{}", uuid::Uuid::new_v4().simple());
    s.run(&format!(
        "create role {role}; grant usage on schema posthouse to {role};
         grant select, insert, update, delete on all tables in schema posthouse to {role};
         grant usage, select on all sequences in schema posthouse to {role};
         grant execute on all functions in schema posthouse to {role};
         select setval('posthouse.job_id_seq', 950000); set role {role}"
    ))
    .await;
    s.run(TIDY).await;
    assert_eq!(
        s.get::<i64>("select max(upper) from posthouse.id_range").await,
        1_000_000,
        "it may not make partitions"
    );
    assert_eq!(s.count("posthouse.lane_floor").await, 1, "the floors went up all the same");
    s.run(&format!("reset role; drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn partitions_stay_few_and_indexed_for_every_id() {
    let (_queue, s) = Queue::with_session().await;
    for last in [0_i64, 999_999, 1_000_000, 5_500_000, 40_000_000, 5_000_000_000, 4_000_000_000] {
        s.run(&format!("select posthouse.make_partitions({last})")).await;
        let covered: bool = s
            .get(&format!("select exists (select from posthouse.id_range where lower <= {last} and upper > {last})"))
            .await;
        assert!(covered, "{last}");
    }
    assert!(s.count("posthouse.id_range").await < 40);
    // Without gaps but for the jumps.
    let gaps = s
        .count("posthouse.id_range a where lower > 0 and not exists (select from posthouse.id_range b where b.upper = a.lower)")
        .await;
    assert_eq!(gaps, 2);
    let overlaps =
        s.count("posthouse.id_range a, posthouse.id_range b where a.lower < b.lower and a.upper > b.lower").await;
    assert_eq!(overlaps, 0);
    let bare = s
        .count("pg_inherits i where inhparent in ('posthouse.payload'::regclass, 'posthouse.archive'::regclass) and not exists (select from pg_index x where x.indrelid = i.inhrelid and x.indisprimary)")
        .await;
    assert_eq!(bare, 0);
    // Ids whose enqueue was rolled back, right where a partition ends, leave no gap behind a sweep.
    s.run("select setval('posthouse.job_id_seq', (select max(upper) from posthouse.id_range) + 3)").await;
    s.run(TIDY).await;
    s.run("select setval('posthouse.job_id_seq', (select max(lower) from posthouse.id_range) - 3)").await;
    s.enqueue_bulk("k", "t", 10).await;
    s.run("delete from posthouse.job; delete from posthouse.payload").await;
    // An enqueue makes the partition that is missing, and many at once across a boundary do too.
    s.run("select setval('posthouse.job_id_seq', (select max(upper) from posthouse.id_range) - 5)").await;
    s.enqueue_bulk("k", "t", 10).await;
    assert_eq!(s.count("posthouse.payload").await, 10);
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 10).await;
    let outcomes: Vec<Value> = jobs.iter().map(|j| json!({"id": j.id, "fence": 1, "outcome": "done"})).collect();
    s.settle(worker.id, &json!(outcomes)).await;
    assert_eq!(s.count("posthouse.archive").await, 10);
}

#[tokio::test]
async fn a_redriven_job_leaves_its_key_to_whoever_took_it_meanwhile() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let key = "kind => 'k', dedupe_key => 'a'";
    let first = s.enqueue(key).await;
    worker.claim(&s, 1).await;
    s.settle(worker.id, &json!([{"id": first, "fence": 1, "outcome": "fail"}])).await;
    let second = s.enqueue(key).await;
    assert_ne!(first, second);
    assert_eq!(s.get::<i64>("select posthouse.redrive(kind => 'k')").await, 1);
    assert_eq!(s.enqueued(key).await, (second, "queued".to_owned(), true));
    // The end of the first does not free the key of the second.
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(jobs.len(), 2);
    s.settle(worker.id, &json!([{"id": first, "fence": 2, "outcome": "done"}])).await;
    assert_eq!(s.enqueued(key).await, (second, "running".to_owned(), true));
}
