//! Gauges of the whole fleet: what the sweep counts, what a process serves of it, and the backlog for autoscalers.

use std::collections::BTreeMap;

use posthouse::store::Database;
use serde_json::json;

use super::support::{Queue, Session};

/// Lets both parts count now.
const COUNT: &str = "update posthouse.sweep set ran_at = '-infinity' where name in ('gauges', 'counts');
  select posthouse.tidy('gauges'), posthouse.tidy('counts')";

/// What is served under a name, by the value of a label.
async fn served(s: &Session, name: &str, label: &str) -> BTreeMap<String, f64> {
    let rows = s
        .rows(&format!(
            "select coalesce(labels ->> '{label}', ''), value from posthouse.metrics() where name = '{name}'"
        ))
        .await;
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

async fn of_queue(s: &Session, name: &str, queue: &str) -> f64 {
    served(s, name, "queue").await[queue]
}

async fn backlog(s: &Session, queue: &str) -> i64 {
    s.get(&format!("select posthouse.backlog('{queue}')")).await
}

#[tokio::test]
async fn jobs_are_counted_by_queue_and_state() {
    let (_queue, s) = Queue::with_session().await;
    for tenant in ["a", "b", "c"] {
        s.enqueue(&format!("kind => 'k', tenant => '{tenant}'")).await;
    }
    s.enqueue("kind => 'k', delay => '1 hour'").await;
    s.enqueue("kind => 'k', queue => 'slow', delay => '1 hour'").await;
    s.enqueue("kind => 'held', gates => '{shut}'").await;
    s.run("select posthouse.close_gate('shut', 'infinity', 'a test')").await;
    let worker = s.worker(&["k", "held"]).await;
    let jobs = worker.claim(&s, 2).await;
    s.settle(worker.id, &json!([{"id": jobs[0].id, "fence": jobs[0].fence, "outcome": "done"}])).await;
    // A claim that meets the closed gate puts its lane to sleep.
    s.run("update posthouse.lane set awake_until = '-infinity'").await;
    let more = worker.claim(&s, 10).await;
    assert_eq!((jobs.len(), more.len()), (2, 1));
    s.run("update posthouse.job set run_at = clock_timestamp() - interval '90 seconds' where state = 'queued' and run_at <= clock_timestamp()").await;
    s.run("delete from posthouse.lane_floor").await;
    s.run(COUNT).await;
    for (name, n) in [
        ("queue_due_jobs", 1.0),
        ("queue_held_jobs", 1.0),
        ("queue_later_jobs", 1.0),
        ("queue_running_jobs", 2.0),
        ("queue_dead_letters", 0.0),
    ] {
        assert_eq!(of_queue(&s, name, "default").await, n, "{name}");
    }
    assert_eq!(of_queue(&s, "queue_later_jobs", "slow").await, 1.0);
    assert_eq!(of_queue(&s, "queue_due_jobs", "slow").await, 0.0, "a queue without work is told all the same");
    let ended = "select sum(value)::float8 from posthouse.metrics() where name = 'queue_ended_jobs_total' and labels ->> 'state' =";
    assert_eq!(
        (s.get::<f64>(&format!("{ended} 'done'")).await, s.get::<f64>(&format!("{ended} 'cancelled'")).await),
        (1.0, 0.0)
    );
    // What a closed gate holds back does not wait for a slot.
    assert_eq!(of_queue(&s, "queue_oldest_due_age_seconds", "default").await, 0.0);
    assert_eq!(backlog(&s, "default").await, 2);
    s.run("select posthouse.open_gate('shut')").await;
    s.run(COUNT).await;
    let age = of_queue(&s, "queue_oldest_due_age_seconds", "default").await;
    assert!((90.0..150.0).contains(&age), "{age}");
    assert_eq!(of_queue(&s, "queue_held_jobs", "default").await, 0.0);
    assert_eq!(backlog(&s, "default").await, 3);
    assert_eq!(backlog(&s, "nowhere").await, 0);
    // What failed for good.
    let failed =
        json!([{"id": more[0].id, "fence": more[0].fence, "outcome": "fail", "error": {"class": "c", "message": "m"}}]);
    s.settle(worker.id, &failed).await;
    s.run(COUNT).await;
    assert_eq!(of_queue(&s, "queue_dead_letters", "default").await, 1.0);
    assert_eq!(s.count("posthouse.gauge").await, 2, "what was counted before is gone");
}

#[tokio::test]
async fn workers_gates_and_the_server_are_told() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    let (_live, dead) = (s.worker(&["k"]).await, s.worker(&["k"]).await);
    s.expire(dead.id).await;
    s.run("select posthouse.set_gate('model:m', max_running => 4); select posthouse.set_gate('model:n', max_running => 10)").await;
    s.run(
        "select posthouse.close_gate('tenant:t', 'infinity', 'x'); select posthouse.close_gate('crm', 'infinity', 'x')",
    )
    .await;
    s.enqueue("kind => 'k', gates => '{model:m}'").await;
    let worker = s.worker(&["k"]).await;
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
    other.run("begin isolation level repeatable read; select 1 from posthouse.job").await;
    s.run("select pg_sleep(0.3)").await;
    s.run(COUNT).await;
    let workers = served(&s, "fleet_workers", "state").await;
    // A start of Postgres not long ago gives every lease its time.
    assert_eq!(workers["live"] + workers["expired"], 3.0);
    assert_eq!(served(&s, "fleet_slots", "").await[""], 10.0 * workers["live"]);
    let closed = "select sum(value)::float8 from posthouse.metrics() where name = 'gates_closed' and labels = ";
    assert_eq!(s.get::<f64>(&format!("{closed} '{{\"scope\": \"tenant\", \"closed_by\": \"person\"}}'")).await, 1.0);
    assert_eq!(s.get::<f64>(&format!("{closed} '{{\"scope\": \"named\", \"closed_by\": \"person\"}}'")).await, 1.0);
    assert_eq!(s.get::<f64>(&format!("{closed} '{{\"scope\": \"model\", \"closed_by\": \"quota\"}}'")).await, 0.0);
    assert_eq!(served(&s, "gate_room_ratio", "scope").await, [("model".to_owned(), 0.75)].into());
    let age = served(&s, "database_xmin_age_seconds", "").await[""];
    assert!((0.3..600.0).contains(&age), "{age}");
    assert!(served(&s, "table_bytes", "table").await["payload"] > 0.0);
    assert!(served(&s, "database_connections_max", "").await[""] >= 1.0);
    assert!(served(&s, "sweep_runs_total", "part").await["gauges"] >= 1.0);
    let ran = served(&s, "sweep_ran_timestamp_seconds", "part").await;
    assert!(ran["counts"] > 1.7e9 && ran["rescue"] == 0.0, "{ran:?}");
}

#[tokio::test]
async fn queues_beyond_a_hundred_are_counted_together() {
    let (_queue, s) = Queue::with_session().await;
    s.run(
        "select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'queue', 'q' || lpad(n::text, 3, '0')))
           from generate_series(1, 150) n cross join generate_series(1, 2) m))",
    )
    .await;
    s.enqueue("kind => 'k', queue => 'q150'").await;
    s.run(COUNT).await;
    let due = served(&s, "queue_due_jobs", "queue").await;
    assert_eq!((due.len(), due["other"], due["q150"], due["q099"]), (101, 100.0, 3.0, 2.0));
    assert_eq!(served(&s, "queue_running_jobs", "queue").await.len(), 101);
}

#[tokio::test]
async fn missed_ticks_are_told_by_schedule_the_most_first() {
    let (_queue, s) = Queue::with_session().await;
    s.run(
        "select posthouse.set_schedule('s' || lpad(n::text, 3, '0'), '@daily', '{\"kind\": \"k\"}') from generate_series(1, 102) n;
         update posthouse.schedule set missed = 1; update posthouse.schedule set missed = 5 where name = 's102'",
    )
    .await;
    s.run(COUNT).await;
    let missed = served(&s, "schedule_missed_ticks_total", "schedule").await;
    assert_eq!((missed.len(), missed["s102"], missed["s001"], missed["other"]), (101, 5.0, 1.0, 2.0));
}

#[tokio::test]
async fn the_backlog_is_exact_up_to_ten_thousand_and_then_as_counted_last() {
    let (_queue, s) = Queue::with_session().await;
    for tenant in ["a", "b"] {
        s.enqueue_bulk("k", tenant, 4_999).await;
    }
    assert_eq!(backlog(&s, "default").await, 9_998);
    for tenant in ["a", "b"] {
        s.enqueue_bulk("k", tenant, 5_001).await;
    }
    assert_eq!(backlog(&s, "default").await, 10_000, "nobody has counted");
    s.run(COUNT).await;
    s.enqueue_bulk("k", "a", 10_000).await;
    assert_eq!(backlog(&s, "default").await, 20_000);
    let worker = s.worker(&["k"]).await;
    worker.claim(&s, 7).await;
    assert_eq!(backlog(&s, "default").await, 20_007);
}

#[tokio::test]
async fn of_very_many_jobs_a_sample_is_counted() {
    let (_queue, s) = Queue::with_session().await;
    let percent = "select posthouse.sample_percent('posthouse.job')";
    s.enqueue_bulk("k", "a", 20_000).await;
    assert_eq!(s.get::<f64>(percent).await, 100.0);
    // As statistics of thirty million jobs would have it.
    s.run("analyze posthouse.job; update pg_class set reltuples = 3e7 where oid = 'posthouse.job'::regclass").await;
    let share = s.get::<f64>(percent).await;
    assert!((33.0..34.0).contains(&share), "{share}");
    s.run(COUNT).await;
    let due = of_queue(&s, "queue_due_jobs", "default").await;
    assert!((10_000.0..30_000.0).contains(&due), "{due}");
}

#[tokio::test]
async fn every_name_is_known_to_the_library() {
    let (queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_gate('model:m', max_running => 4)").await;
    s.enqueue("kind => 'k'").await;
    let store = Database::new(queue.url()).unwrap().store("test");
    let before = store.fleet_metrics().await.unwrap();
    assert_eq!(before.sweep_age, None);
    s.run(COUNT).await;
    let metrics = store.fleet_metrics().await.unwrap();
    assert!(metrics.sweep_age.unwrap().as_secs() < 60 && metrics.clock_ahead.abs() < 1.0, "{metrics:?}");
    let told: Vec<String> =
        s.list("select distinct 'posthouse_' || name from posthouse.metrics() where name <> 'clock' order by 1").await;
    let mut known: Vec<&str> = metrics.families.iter().map(|family| family.name).collect();
    known.sort_unstable();
    assert_eq!(told, known);
    let due = metrics.families.iter().find(|family| family.name == "posthouse_queue_due_jobs").unwrap();
    assert_eq!(due.samples[0].labels, [("queue", "default".to_owned())]);
    assert_eq!(store.backlog("default").await.unwrap(), 1);
}
