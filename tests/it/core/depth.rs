//! How many jobs may wait before new ones are refused: exact where it is counted, never in the way of what was taken in, and free of
//! charge where nothing is set.

use std::time::Duration;

use futures_util::future::join_all;
use posthouse::store::{Database, DepthOf};
use posthouse::{NewJob, Posthouse};
use serde_json::json;

use super::support::{Queue, Session};

async fn set(s: &Session, arguments: &str) {
    s.run(&format!("select posthouse.set_depth({arguments})")).await;
}

async fn refused(s: &Session, arguments: &str) -> String {
    let refusal = s.refused(&format!("select posthouse.enqueue({arguments})")).await;
    assert_eq!(refusal.code, "PH010", "{}", refusal.message);
    refusal.message
}

#[tokio::test]
async fn a_full_queue_refuses_new_jobs_and_nothing_else() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a", "b"]).await;
    set(&s, "queue => 'default', max_depth => 3").await;
    s.enqueue("kind => 'a'").await;
    s.enqueue("kind => 'b', tenant => 't', delay => '1 hour'").await;
    let keyed = s.enqueue("kind => 'a', dedupe_key => 'k', priority => 5").await;
    let message = refused(&s, "kind => 'a'").await;
    assert_eq!(message, "queue 'default' is full: 3 jobs wait, 3 may");
    refused(&s, "kind => 'new', tenant => 'new'").await;
    assert_eq!(s.count("posthouse.lane where kind = 'new'").await, 0);
    // Other queues are not.
    s.enqueue("kind => 'a', queue => 'q2'").await;
    // An answer with a job that is there takes no room; nor does what is replaced.
    assert_eq!(s.enqueue("kind => 'a', dedupe_key => 'k'").await, keyed);
    assert_eq!(s.enqueue("kind => 'a', dedupe_key => 'k', dedupe_policy => 'replace'").await, keyed);
    // What runs does not wait; what comes back is never refused, and counts.
    let jobs = worker.claim(&s, 1).await;
    let added = s.enqueue("kind => 'a'").await;
    s.settle(worker.id, &json!([{"id": jobs[0].id, "fence": jobs[0].fence, "outcome": "retry", "delay_ms": 0}])).await;
    assert_eq!(s.count("posthouse.job where state = 'queued'").await, 5, "one of them in the other queue");
    refused(&s, "kind => 'a'").await;
    s.get::<String>(&format!("select posthouse.cancel({added})")).await;
    s.get::<String>(&format!("select posthouse.cancel({keyed})")).await;
    s.enqueue("kind => 'a'").await;
    assert_eq!(s.get::<String>(&format!("select posthouse.retry({added})")).await, "queued");
    let dying = s.worker(&["a", "b"]).await;
    assert_eq!(dying.claim(&s, 10).await.len(), 3);
    s.enqueue("kind => 'a'").await;
    s.enqueue("kind => 'a'").await;
    s.expire(dying.id).await;
    assert_eq!(s.rescue(dying.id).await, 3);
    refused(&s, "kind => 'a'").await;
    // The limit is taken away.
    set(&s, "queue => 'default'").await;
    s.enqueue("kind => 'a'").await;
}

#[tokio::test]
async fn a_tenant_over_all_its_queues_and_an_array_as_a_whole() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue("kind => 'a', tenant => 't'").await;
    set(&s, "tenant => 't', max_depth => 4").await;
    set(&s, "queue => 'q2', max_depth => 2").await;
    let many = |jobs: serde_json::Value| format!("select posthouse.enqueue_many('{jobs}')");
    let job = |queue: &str, tenant: &str| json!({"kind": "a", "queue": queue, "tenant": tenant});
    s.run(&many(json!([job("q1", "t"), job("q2", "t"), job("q2", "u")]))).await;
    // One too many of the tenant, with as many of others as there may be.
    let refusal = s.refused(&many(json!([job("q3", "t"), job("q3", "u"), job("q4", "t")]))).await;
    assert_eq!((&*refusal.code, &*refusal.message), ("PH010", "tenant 't' is full: 3 jobs wait, 4 may"));
    assert_eq!(s.count("posthouse.job").await, 4);
    let refusal = s.refused(&many(json!([job("q3", "t"), job("q2", "u")]))).await;
    assert_eq!(refusal.message, "queue 'q2' is full: 2 jobs wait, 2 may");
    s.run(&many(json!([job("q3", "t"), job("q3", "u")]))).await;
    refused(&s, "kind => 'a', tenant => 't', queue => 'q9'").await;
    // Duplicates in an array take no room.
    let same =
        json!([{"kind": "b", "queue": "q5", "dedupe_key": "k"}, {"kind": "b", "queue": "q5", "dedupe_key": "k"}]);
    set(&s, "queue => 'q5', max_depth => 1").await;
    s.run(&many(same)).await;
}

#[tokio::test]
async fn lanes_that_gates_hold_back_count_too() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "queue => 'default', max_depth => 5").await;
    s.run("select posthouse.close_gate('queue:default')").await;
    let worker = s.worker(&["a"]).await;
    for _ in 0..5 {
        s.enqueue("kind => 'a'").await;
    }
    s.run("update posthouse.lane set awake_until = '-infinity'").await;
    assert!(worker.claim(&s, 10).await.is_empty());
    assert!(s.get::<bool>("select blocked_by is not null from posthouse.lane").await, "the gate put the lane to sleep");
    refused(&s, "kind => 'a'").await;
}

#[tokio::test]
async fn many_at_once_do_not_pass_it_together() {
    let (queue, s) = Queue::with_session().await;
    set(&s, "queue => 'default', max_depth => 100").await;
    let sessions = (0..8).map(async |_| {
        let s = queue.session().await;
        let mut taken = 0;
        for _ in 0..40 {
            match s.client.query("select posthouse.enqueue('a')", &[]).await {
                Ok(_) => taken += 1,
                Err(error) => assert_eq!(super::support::refusal(&error).code, "PH010"),
            }
        }
        taken
    });
    let taken: i64 = join_all(sessions).await.into_iter().sum();
    assert_eq!((taken, s.count("posthouse.job").await), (100, 100));
    // The client's group commit refuses those alone for whom there is no room, also where nothing was enqueued before.
    let client = Posthouse::connect(queue.url()).await.unwrap();
    set(&s, "queue => 'new', max_depth => 10").await;
    let jobs = (0..12).map(|_| client.enqueue_job(NewJob::from_json("a", "{}").unwrap().queue("new")).into_future());
    let taken = join_all(jobs).await.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!((taken, s.count("posthouse.jobs where queue = 'new'").await), (10, 10));
    s.run("delete from posthouse.job j using posthouse.lane l where l.id = j.lane_id and l.queue = 'new'").await;
    set(&s, "queue => 'default', max_depth => 150").await;
    let jobs = (0..300).map(|n| {
        let job = NewJob::from_json("a", "{}").unwrap();
        client.enqueue_job(if n % 3 == 0 { job.queue("other") } else { job }).into_future()
    });
    let answers = join_all(jobs).await;
    let full: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().err()).collect();
    assert!(full.iter().all(|error| error.is_full() && error.to_string().contains("'default' is full")), "{full:?}");
    assert_eq!((answers.len() - full.len(), s.count("posthouse.job").await), (50 + 100, 250));
}

#[tokio::test]
async fn an_open_transaction_keeps_nobody_waiting() {
    let (queue, s) = Queue::with_session().await;
    set(&s, "queue => 'default', max_depth => 3").await;
    s.run("begin").await;
    s.client.query("select pg_sleep(0.05)", &[]).await.unwrap();
    s.enqueue("kind => 'a'").await;
    let other = queue.session().await;
    other.run("set statement_timeout = '5s'").await;
    for _ in 0..3 {
        other.enqueue("kind => 'a'").await;
    }
    refused(&other, "kind => 'a'").await;
    s.run("commit").await;
    assert_eq!(s.count("posthouse.job").await, 4);
}

#[tokio::test]
async fn large_limits_go_by_what_was_counted() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "queue => 'default', max_depth => 20000").await;
    s.enqueue_bulk("a", "t", 19_999).await;
    // Nobody has swept yet: whoever enqueues counts, and then not for half a minute.
    let counted = "select jobs from posthouse.depth_count";
    s.run("update posthouse.depth_count set counted_at = counted_at - interval '1 minute'").await;
    s.enqueue("kind => 'a'").await;
    assert_eq!(s.get::<i64>(counted).await, 19_999);
    s.enqueue("kind => 'a'").await;
    s.run("update posthouse.sweep set ran_at = '-infinity' where name = 'depths'; select posthouse.tidy()").await;
    assert_eq!(s.get::<i64>(counted).await, 20_000, "no further than the limit");
    let refusal = s.refused("select posthouse.enqueue_many('[{\"kind\": \"a\"}]')").await;
    assert_eq!((&*refusal.code, &*refusal.message), ("PH010", "queue 'default' is full: 20000 jobs wait, 20000 may"));
    s.run("delete from posthouse.job where id <= 5000; update posthouse.sweep set ran_at = '-infinity' where name = 'depths'; select posthouse.tidy()").await;
    assert_eq!(s.get::<i64>(counted).await, 15_001);
    s.enqueue("kind => 'a'").await;
    let refusal = s.refused(&format!("select posthouse.enqueue_many((select jsonb_agg('{{\"kind\": \"a\"}}'::jsonb) from generate_series(1, {}) n))", 5_000)).await;
    assert_eq!(refusal.code, "PH010");
    set(&s, "queue => 'default'").await;
    s.run("update posthouse.sweep set ran_at = '-infinity' where name = 'depths'; select posthouse.tidy()").await;
    assert_eq!(s.count("posthouse.depth_count").await, 0);
    assert_eq!(s.count("posthouse.lane where limited").await, 0);
}

#[tokio::test]
async fn lanes_that_were_made_meanwhile_are_found_by_the_sweep() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    other.run("begin").await;
    other.enqueue("kind => 'a'").await;
    set(&s, "queue => 'default', max_depth => 1").await;
    other.run("commit").await;
    // The lane does not tell of the limit yet.
    assert_eq!(s.count("posthouse.lane where limited").await, 0);
    s.run("update posthouse.sweep set ran_at = '-infinity' where name = 'depths'; select posthouse.tidy()").await;
    refused(&s, "kind => 'a'").await;
}

#[tokio::test]
async fn what_cannot_be_set_and_what_is_shown() {
    let (queue, s) = Queue::with_session().await;
    for (arguments, says) in [
        ("max_depth => 5", "queue, tenant: "),
        ("queue => 'a', tenant => 'b', max_depth => 5", "queue, tenant: "),
        ("queue => '', max_depth => 5", "queue: "),
        ("queue => '*', max_depth => 5", "queue: '*'"),
        ("tenant => 'b', max_depth => 0", "max_depth: 0"),
        ("tenant => 'b', max_depth => 100000001", "max_depth: 100000001"),
    ] {
        let refusal = s.refused(&format!("select posthouse.set_depth({arguments})")).await;
        assert_eq!(refusal.code, "PH001");
        assert!(refusal.message.starts_with(says), "{}", refusal.message);
    }
    let store = Database::new(queue.url()).unwrap().store("test").with_timeout(Duration::from_secs(10));
    store.set_depth(DepthOf::Queue("q"), Some(7)).await.unwrap();
    store.set_depth(DepthOf::Tenant("t"), Some(8)).await.unwrap();
    store.set_depth(DepthOf::Queue("q"), Some(9)).await.unwrap();
    let limits: Vec<_> = store.depths().await.unwrap().into_iter().map(|l| (l.scope, l.name, l.max_depth)).collect();
    assert_eq!(limits, [("queue".to_owned(), "q".to_owned(), 9), ("tenant".to_owned(), "t".to_owned(), 8)]);
    store.set_depth(DepthOf::Queue("q"), None).await.unwrap();
    assert_eq!(store.depths().await.unwrap().len(), 1);
}
