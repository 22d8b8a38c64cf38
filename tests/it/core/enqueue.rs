//! Enqueue: every option, every refusal with the name of its field, dedupe keys under both policies.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio_postgres::{AsyncMessage, Client};

use super::support::{Queue, Session, ids};
use crate::harness::{SOON, wait_until};

/// Enqueue many; the answers in order.
async fn many(session: &Session, jobs: &Value) -> Vec<(i32, i64, String, bool)> {
    let rows = session.client.query("select * from posthouse.enqueue_many($1::jsonb)", &[jobs]).await.unwrap();
    rows.iter().map(|r| (r.get(0), r.get(1), r.get(2), r.get(3))).collect()
}

/// A connection that listens, and what it heard.
pub(super) struct Listener {
    client: Client,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Listener {
    pub(super) async fn new(queue: &Queue) -> Self {
        let (client, heard) = queue
            .hearing(|message| match message {
                AsyncMessage::Notification(notification) => Some(notification.payload().to_owned()),
                _ => None,
            })
            .await;
        client.batch_execute("listen posthouse_wake; listen test_end").await.unwrap();
        Self { client, heard }
    }

    /// The queues that were told since the last call.
    pub(super) async fn told(&self) -> Vec<String> {
        self.client.batch_execute("notify test_end, 'end'").await.unwrap();
        let ended = async || self.heard.lock().unwrap().iter().any(|payload| payload == "end");
        wait_until(SOON, "notifications come in order", ended).await;
        let mut told = std::mem::take(&mut *self.heard.lock().unwrap());
        told.retain(|payload| payload != "end");
        told
    }
}

#[tokio::test]
async fn workers_are_told_unless_all_of_them_are_behind() {
    let (queue, s) = Queue::with_session().await;
    let listener = Listener::new(&queue).await;
    let worker = s.worker(&["a", "b"]).await;
    let both = json!([{"kind": "a"}, {"kind": "b", "queue": "q2"}, {"kind": "a"}]);
    s.enqueue("kind => 'a'").await;
    assert_eq!(listener.told().await, ["default"]);
    many(&s, &both).await;
    let mut told = listener.told().await;
    told.sort();
    assert_eq!(told, ["default", "q2"]);
    // A job has been due for long, and nobody took it: no worker that could have sleeps.
    s.run("update posthouse.job set run_at = run_at - interval '4 seconds' where id = 1").await;
    s.enqueue("kind => 'a'").await;
    assert!(listener.told().await.is_empty());
    many(&s, &both).await;
    assert_eq!(listener.told().await, ["q2"]);
    // They may have caught up by the end of a longer transaction.
    s.run("begin; select pg_sleep(0.05)").await;
    s.enqueue("kind => 'a'").await;
    many(&s, &both).await;
    s.run("commit").await;
    assert_eq!(listener.told().await.iter().filter(|queue| *queue == "default").count(), 1);
    // Nor does an old snapshot say who is behind.
    s.run("begin isolation level repeatable read; select posthouse.enqueue('a'); commit").await;
    assert_eq!(listener.told().await, ["default"]);
    // Another line of the same queue is not behind.
    s.enqueue("kind => 'b'").await;
    assert_eq!(listener.told().await, ["default"]);
    // Nor is that one any more, once its jobs were taken; nor because of jobs that wait for their time.
    worker.claim(&s, 100).await;
    s.enqueue("kind => 'a', delay => '1 hour'").await;
    listener.told().await;
    s.enqueue("kind => 'a'").await;
    assert_eq!(listener.told().await, ["default"]);
    s.run("set posthouse.notify = off").await;
    s.enqueue("kind => 'a'").await;
    many(&s, &both).await;
    assert!(listener.told().await.is_empty());
}

#[tokio::test]
async fn every_option_arrives_at_the_worker() {
    let (_queue, s) = Queue::with_session().await;
    let plain = s.enqueue("kind => 'a'").await;
    let full = s
        .enqueue(
            r#"kind => 'b', payload => '{"text": "hello"}', queue => 'q2', tenant => 'acme', priority => -3, max_attempts => 9,
               timeout => '90 seconds', dedupe_key => 'k', dedupe_for => '1 hour', trace => '{"traceparent": "00-1"}'"#,
        )
        .await;
    let job = s.job(plain).await;
    for (field, value) in [
        ("state", json!("queued")),
        ("queue", json!("default")),
        ("tenant", json!("default")),
        ("priority", json!(0)),
        ("max_attempts", json!(5)),
        ("timeout_ms", Value::Null),
        ("payload", json!({})),
    ] {
        assert_eq!(job[field], value, "{field}");
    }
    let worker = s.worker_of(&["default", "q2"], &["a", "b"], 60_000).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(ids(&jobs), [full, plain]);
    assert_eq!(
        (&*jobs[0].kind, &*jobs[0].queue, &*jobs[0].tenant, jobs[0].priority, jobs[0].max_attempts, jobs[0].timeout_ms),
        ("b", "q2", "acme", -3, 9, Some(90_000))
    );
    assert_eq!(jobs[0].payload, json!({"text": "hello"}));
    assert_eq!((jobs[0].fence, jobs[0].attempt), (1, 1));
    let trace: Value =
        s.get(&format!("select trace from posthouse.claim('{}', 1, 10) where id = {full}", worker.id)).await;
    assert_eq!(trace, json!({"traceparent": "00-1"}));
}

#[tokio::test]
async fn times_far_and_near() {
    let (_queue, s) = Queue::with_session().await;
    let now = [
        "delay => '-1 second'",
        "delay => '-9000 years'",
        "delay => '-170000000 years'",
        "run_at => '-infinity'",
        "run_at => '1970-01-01'",
        "delay => '0'",
    ];
    for when in now {
        let id = s.enqueue(&format!("kind => 'a', {when}")).await;
        let due: bool = s.get(&format!("select run_at between clock_timestamp() - interval '10 seconds' and clock_timestamp() from posthouse.job where id = {id}")).await;
        assert!(due, "{when}");
    }
    let later = [
        ("delay => '25 days'", "25 days"),
        ("delay => '60 days'", "60 days"),
        ("delay => '10 years'", "10 years"),
        ("run_at => '9999-12-31'", "7000 years"),
    ];
    let mut far = Vec::new();
    for (when, least) in later {
        let id = s.enqueue(&format!("kind => 'a', {when}")).await;
        let waits: bool = s.get(&format!("select run_at > clock_timestamp() + interval '{least}' - interval '1 minute' from posthouse.job where id = {id}")).await;
        assert!(waits, "{when}");
        far.push(id);
    }
    let worker = s.worker(&["a"]).await;
    assert_eq!(worker.claim(&s, 100).await.len(), now.len());
    assert!(worker.claim(&s, 100).await.is_empty());
    // The sweeps survive them, and so does a row with a time that no enqueue lets in.
    s.run(&format!("update posthouse.job set run_at = 'infinity' where id = {}", far[0])).await;
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    s.run("update posthouse.lane set awake_until = '-infinity'").await;
    assert!(worker.claim(&s, 100).await.is_empty());
    let wait: i64 = s.get(&format!("select posthouse.next_due('{}')", worker.id)).await;
    assert!(wait > 24 * 24 * 3_600_000, "{wait}");
    s.get::<String>(&format!("select posthouse.retry({})", far[1])).await;
    assert_eq!(ids(&worker.claim(&s, 100).await), [far[1]]);
}

#[tokio::test]
async fn refusals_name_the_field() {
    let (_queue, s) = Queue::with_session().await;
    let long = "x".repeat(201);
    let long_key = "k".repeat(513);
    for (arguments, field) in [
        ("kind => ''".to_owned(), "kind"),
        ("kind => null".to_owned(), "kind"),
        (format!("kind => '{long}'"), "kind"),
        ("kind => E'a\\nb'".to_owned(), "kind"),
        ("kind => 'a', queue => ''".to_owned(), "queue"),
        ("kind => 'a', queue => E'\\x01'".to_owned(), "queue"),
        ("kind => 'a', tenant => null".to_owned(), "tenant"),
        (format!("kind => 'a', tenant => '{long}'"), "tenant"),
        ("kind => 'a', payload => null".to_owned(), "payload"),
        ("kind => 'a', payload => to_jsonb(repeat('x', 33554440))".to_owned(), "payload"),
        ("kind => 'a', priority => null".to_owned(), "priority"),
        ("kind => 'a', delay => '1 s', run_at => now()".to_owned(), "delay, run_at"),
        ("kind => 'a', delay => '101 years'".to_owned(), "delay"),
        ("kind => 'a', delay => '170000000 years'".to_owned(), "delay"),
        ("kind => 'a', run_at => 'infinity'".to_owned(), "run_at"),
        // Readable to Postgres, but to hardly any program: it would break whoever lists jobs.
        ("kind => 'a', run_at => '10000-01-01 00:00+00'".to_owned(), "run_at"),
        ("kind => 'a', run_at => '294276-12-31'".to_owned(), "run_at"),
        ("kind => 'a', max_attempts => 0".to_owned(), "max_attempts"),
        ("kind => 'a', max_attempts => -1".to_owned(), "max_attempts"),
        ("kind => 'a', max_attempts => 1001".to_owned(), "max_attempts"),
        ("kind => 'a', timeout => '0'".to_owned(), "timeout"),
        ("kind => 'a', timeout => '-1 s'".to_owned(), "timeout"),
        ("kind => 'a', timeout => '400 microseconds'".to_owned(), "timeout"),
        ("kind => 'a', timeout => '2 years'".to_owned(), "timeout"),
        ("kind => 'a', dedupe_for => '1 s'".to_owned(), "dedupe_for"),
        ("kind => 'a', dedupe_key => 'k', dedupe_for => '0'".to_owned(), "dedupe_for"),
        ("kind => 'a', dedupe_key => 'k', dedupe_for => '11 years'".to_owned(), "dedupe_for"),
        ("kind => 'a', dedupe_key => ''".to_owned(), "dedupe_key"),
        (format!("kind => 'a', dedupe_key => '{long_key}'"), "dedupe_key"),
        ("kind => 'a', trace => to_jsonb(repeat('x', 100000))".to_owned(), "trace"),
    ] {
        let refusal = s.refused(&format!("select * from posthouse.enqueue({arguments})")).await;
        assert_eq!(refusal.code, "PH001", "{arguments:.200}: {}", refusal.message);
        assert!(refusal.message.starts_with(&format!("{field}:")), "{arguments:.200}: {}", refusal.message);
    }
    // What is no jsonb or no time at all never gets as far as the function.
    for (arguments, code) in [
        (r#"kind => 'a', payload => '{"a": "x\u0000y"}'"#, "22P05"),
        (r#"kind => 'a', payload => '{"a": "\ud800"}'"#, "22P02"),
        ("kind => 'a', run_at => '294277-01-01'", "22008"),
    ] {
        assert_eq!(s.refused(&format!("select * from posthouse.enqueue({arguments})")).await.code, code, "{arguments}");
    }
    assert_eq!(s.count("posthouse.job").await + s.count("posthouse.payload").await, 0);
}

#[tokio::test]
async fn corner_values_of_json_are_kept() {
    let (_queue, s) = Queue::with_session().await;
    for (payload, stored) in [
        ("9007199254740993", "9007199254740993"),
        ("1e400", &*format!("1{}", "0".repeat(400))),
        ("-0", "0"),
        ("1e-400", &*format!("0.{}1", "0".repeat(399))),
        (r#"{"a": 1, "a": 2}"#, r#"{"a": 2}"#),
        ("[]", "[]"),
        ("\"\u{FFFD}\u{1F40E}\"", "\"\u{FFFD}\u{1F40E}\""),
    ] {
        let id = s.enqueue(&format!("kind => 'a', payload => '{payload}'")).await;
        let text: String = s.get(&format!("select payload::text from posthouse.payload where id = {id}")).await;
        assert_eq!(text, stored, "{payload:.40}");
        let id: i64 = s
            .get(&format!("select id from posthouse.enqueue_many('[{{\"kind\": \"a\", \"payload\": {payload}}}]')"))
            .await;
        let text: String = s.get(&format!("select payload::text from posthouse.jobs where id = {id}")).await;
        assert_eq!(text, stored, "many: {payload:.40}");
    }
    // Nested as deep as the server takes it: stored whole; deeper: refused, and the session goes on.
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let id = s.enqueue(&format!("kind => 'a', payload => '{}'", nested(1_000))).await;
    assert_eq!(
        s.get::<String>(&format!("select payload::text from posthouse.payload where id = {id}")).await,
        nested(1_000)
    );
    let refusal =
        s.refused(&format!("select * from posthouse.enqueue(kind => 'a', payload => '{}')", nested(100_000))).await;
    assert_eq!(refusal.code, "54001");
}

#[tokio::test]
async fn many_at_once_keep_their_order() {
    let (_queue, s) = Queue::with_session().await;
    let jobs: Vec<Value> = (0..10_000)
        .map(|n| json!({"kind": format!("k{}", n % 3), "tenant": format!("t{}", n % 7), "priority": n % 2, "payload": n}))
        .collect();
    let answers = many(&s, &json!(jobs)).await;
    assert_eq!(answers.len(), 10_000);
    for (n, (ordinal, id, state, duplicate)) in answers.iter().enumerate() {
        assert_eq!((*ordinal as usize, &**state, *duplicate), (n + 1, "queued", false));
        assert_eq!(*id, answers[0].1 + n as i64);
    }
    let wrong = s
        .count(
            "(select row_number() over (order by id) - 1 as n, * from posthouse.jobs) j
             where kind <> 'k' || n % 3 or tenant <> 't' || n % 7 or priority <> n % 2 or payload <> to_jsonb(n)",
        )
        .await;
    assert_eq!(wrong, 0);
    assert_eq!(s.count("posthouse.lane").await, 42);
    assert!(many(&s, &json!([])).await.is_empty());
    let refusal = s.refused("select * from posthouse.enqueue_many((select jsonb_agg('{\"kind\": \"a\"}'::jsonb) from generate_series(1, 10001)))").await;
    assert_eq!((&*refusal.code, refusal.message.starts_with("jobs:")), ("PH001", true), "{}", refusal.message);
}

#[tokio::test]
async fn thousands_of_tenants_in_one_transaction_do_not_use_up_the_locks() {
    let (_queue, s) = Queue::with_session().await;
    s.run("begin").await;
    s.run("select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't' || n)) from generate_series(1, 3000) n))").await;
    let locks: i64 = s.get("select count(*) from pg_locks where pid = pg_backend_pid()").await;
    // The share of a connection: twice max_locks_per_transaction, and some for tables.
    assert!(locks < 2 * 64 + 40, "{locks}");
    s.run("commit").await;
}

#[tokio::test]
async fn a_bad_job_among_many_is_named_and_refuses_all() {
    let (_queue, s) = Queue::with_session().await;
    let good = json!({"kind": "a"});
    for (bad, ordinal, field) in [
        (json!({}), 2, "kind"),
        (json!({"kind": ""}), 2, "kind"),
        (json!({"kind": "a", "queue": ""}), 2, "queue"),
        (json!({"kind": "a", "priority": "soon"}), 2, "priority"),
        (json!({"kind": "a", "priority": 1e10}), 2, "priority"),
        (json!({"kind": "a", "delay_ms": 1e308}), 2, "delay_ms"),
        (json!({"kind": "a", "delay_ms": "x"}), 2, "delay_ms"),
        (json!({"kind": "a", "delay_ms": 4e12}), 2, "delay"),
        (json!({"kind": "a", "run_at": "tomorrowish"}), 2, "run_at"),
        (json!({"kind": "a", "run_at": "infinity"}), 2, "run_at"),
        (json!({"kind": "a", "max_attempts": 0}), 2, "max_attempts"),
        (json!({"kind": "a", "timeout_ms": -1}), 2, "timeout"),
        (json!({"kind": "a", "dedupe_for_ms": 5}), 2, "dedupe_for"),
        (json!({"kind": "a", "dedupe_key": ""}), 2, "dedupe_key"),
        (json!({"kind": "a", "delay": 5}), 2, "delay"),
        (json!("a"), 2, "object"),
        (json!(null), 2, "object"),
        (json!([1]), 2, "object"),
    ] {
        let sql = format!("select * from posthouse.enqueue_many('{}')", json!([good, bad, good]));
        let refusal = s.refused(&sql).await;
        assert_eq!(refusal.code, "PH001", "{bad}: {}", refusal.message);
        assert!(refusal.message.contains(&format!("job {ordinal} ")), "{bad}: {}", refusal.message);
        assert!(refusal.message.contains(field), "{bad}: {}", refusal.message);
    }
    for jobs in ["'{}'", "null", "'5'"] {
        let refusal = s.refused(&format!("select * from posthouse.enqueue_many({jobs})")).await;
        assert_eq!(refusal.code, "PH001");
    }
    assert_eq!(s.count("posthouse.job").await, 0);
}

#[tokio::test]
async fn a_job_exists_when_and_only_if_the_transaction_commits() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    let worker = other.worker(&["a"]).await;
    for level in ["read committed", "repeatable read", "serializable"] {
        s.run(&format!("begin isolation level {level}")).await;
        let id = s.enqueue("kind => 'a', dedupe_key => 'k'").await;
        let two = many(&s, &json!([{"kind": "a"}, {"kind": "a", "dedupe_key": "k"}])).await;
        assert_eq!((two[1].1, &*two[1].2, two[1].3), (id, "queued", true), "{level}");
        assert_eq!(other.count("posthouse.jobs").await, 0, "{level}");
        assert!(worker.claim(&other, 10).await.is_empty(), "{level}");
        s.run("rollback").await;
        assert_eq!(other.count("posthouse.jobs").await, 0, "{level}");
        s.run(&format!("begin isolation level {level}")).await;
        let id = s.enqueue("kind => 'a', dedupe_key => 'k'").await;
        s.run("commit").await;
        let jobs = worker.claim(&other, 10).await;
        assert_eq!(ids(&jobs), [id], "{level}");
        other.settle(worker.id, &json!([{"id": id, "fence": 1, "outcome": "done"}])).await;
        s.run("truncate posthouse.archive").await;
    }
}

#[tokio::test]
async fn a_key_stands_until_its_job_is_final() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a", "b"]).await;
    let key = "kind => 'a', dedupe_key => 'k'";
    for last in ["done", "fail", "cancelled", "cancel", "lost"] {
        let (id, state, duplicate) = s.enqueued(key).await;
        assert_eq!((&*state, duplicate), ("queued", false), "{last}");
        assert_eq!(s.enqueued(key).await, (id, "queued".to_owned(), true), "{last}");
        // The key belongs to the tenant and the kind.
        for other in ["kind => 'b', dedupe_key => 'k'", "kind => 'a', tenant => 't', dedupe_key => 'k'"] {
            let (other, _, duplicate) = s.enqueued(other).await;
            assert!(other != id && !duplicate);
            s.get::<String>(&format!("select posthouse.cancel({other})")).await;
        }
        if last == "cancel" {
            assert_eq!(s.get::<String>(&format!("select posthouse.cancel({id})")).await, "cancelled");
        } else if last == "lost" {
            let dying = s.worker(&["a"]).await;
            assert_eq!(ids(&dying.claim(&s, 1).await), [id]);
            // Before the lease is over and after: the same job, which will run.
            s.expire(dying.id).await;
            assert_eq!(s.enqueued(key).await, (id, "running".to_owned(), true));
            assert_eq!(s.rescue(dying.id).await, 1);
            assert_eq!(s.enqueued(key).await, (id, "queued".to_owned(), true));
            let jobs = worker.claim(&s, 1).await;
            s.settle(worker.id, &json!([{"id": id, "fence": jobs[0].fence, "outcome": "done"}])).await;
        } else {
            let jobs = worker.claim(&s, 1).await;
            assert_eq!(s.enqueued(key).await, (id, "running".to_owned(), true), "{last}");
            // A failing attempt with more to come does not give the key up.
            s.settle(worker.id, &json!([{"id": id, "fence": jobs[0].fence, "outcome": "retry", "delay_ms": 0}])).await;
            assert_eq!(s.enqueued(key).await, (id, "queued".to_owned(), true), "{last}");
            let jobs = worker.claim(&s, 1).await;
            s.settle(worker.id, &json!([{"id": id, "fence": jobs[0].fence, "outcome": last}])).await;
        }
        assert_eq!(s.count("posthouse.dedupe").await, 0, "{last}");
    }
}

#[tokio::test]
async fn a_key_stands_for_a_window() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let key = "kind => 'a', dedupe_key => 'k', dedupe_for => '1 hour'";
    let (first, ..) = s.enqueued(key).await;
    let jobs = worker.claim(&s, 1).await;
    s.settle(worker.id, &json!([{"id": first, "fence": jobs[0].fence, "outcome": "done"}])).await;
    assert_eq!(s.enqueued(key).await, (first, "done".to_owned(), true));
    // Also whoever asks for the other policy hears of it.
    assert_eq!(s.enqueued("kind => 'a', dedupe_key => 'k'").await, (first, "done".to_owned(), true));
    s.run("update posthouse.dedupe set expires_at = clock_timestamp() - interval '1 second'").await;
    let (second, state, duplicate) = s.enqueued(key).await;
    assert!(second != first && !duplicate && state == "queued");
    assert_eq!(s.enqueued(key).await, (second, "queued".to_owned(), true));
    // A window that is over while its job still runs gives way too.
    s.run("update posthouse.dedupe set expires_at = clock_timestamp() - interval '1 second'").await;
    assert!(!s.enqueued(key).await.2);
    // The sweep forgets windows that are over.
    s.run("update posthouse.dedupe set expires_at = clock_timestamp() - interval '1 second'").await;
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    assert_eq!(s.count("posthouse.dedupe").await, 0);
}

#[tokio::test]
async fn duplicates_within_a_batch() {
    let (_queue, s) = Queue::with_session().await;
    let keyed = |key: &str| json!({"kind": "a", "dedupe_key": key});
    let answers = many(&s, &json!([keyed("z"), keyed("a"), {"kind": "a"}, keyed("z"), keyed("a"), keyed("z")])).await;
    let of = |n: usize| (answers[n].1, answers[n].3);
    assert!([0, 1, 2].iter().all(|n| !answers[*n].3));
    assert_eq!([of(3), of(4), of(5)], [(of(0).0, true), (of(1).0, true), (of(0).0, true)]);
    assert!(answers.iter().all(|a| a.2 == "queued"));
    assert_eq!(s.count("posthouse.job").await, 3);
    assert_eq!(s.count("posthouse.payload").await, 3);
    // With a window, and against what was there before.
    let answers =
        many(&s, &json!([{"kind": "a", "dedupe_key": "w", "dedupe_for_ms": 60000}, keyed("w"), keyed("z")])).await;
    assert_eq!(answers.iter().map(|a| a.3).collect::<Vec<_>>(), [false, true, true]);
}

#[tokio::test]
async fn an_orphaned_key_stands_for_nothing() {
    let (_queue, s) = Queue::with_session().await;
    // A key whose job is gone, as a settle leaves it when somebody looks at the key at that moment.
    s.run("insert into posthouse.dedupe values ('default', 'a', 'k', 4711, null)").await;
    let (id, _, duplicate) = s.enqueued("kind => 'a', dedupe_key => 'k'").await;
    assert!(!duplicate && id != 4711);
    s.run("insert into posthouse.dedupe values ('default', 'a', 'k2', 4711, null)").await;
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    assert_eq!(s.list::<i64>("select job_id from posthouse.dedupe").await, [id]);
}

#[tokio::test]
async fn numbers_of_jobs_past_32_bits() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select setval('posthouse.job_id_seq', 2147483640), setval('posthouse.lane_id_seq', 2147483640)").await;
    let worker = s.worker(&["a"]).await;
    worker.seq.set(2_147_483_640);
    for n in 0..20 {
        let id = s.enqueue(&format!("kind => 'a', dedupe_key => 'k{}'", n / 2)).await;
        assert!(id > 2_147_483_640);
    }
    s.run("update posthouse.job set fence = 32767, attempt = 900, max_attempts = 1000").await;
    let jobs = worker.claim(&s, 100).await;
    assert_eq!(jobs.len(), 10);
    let outcomes: Vec<Value> = jobs.iter().map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "done"})).collect();
    assert!(s.settle(worker.id, &json!(outcomes)).await.iter().all(|v| v.1 == "applied"));
    assert_eq!(s.count("posthouse.archive where fence = 32768").await, 10);
    let ranges: i64 = s.count("posthouse.id_range").await;
    assert!(ranges <= 4, "{ranges} partitions for a gap");
}

#[tokio::test]
async fn an_enqueue_tells_listeners_at_its_commit() {
    let (queue, s) = Queue::with_session().await;
    let database = posthouse::store::Database::new(queue.url()).unwrap();
    let mut listener = posthouse::store::Listener::connect(&database).await.unwrap();
    s.run("begin").await;
    s.enqueue("kind => 'a', queue => 'q1'").await;
    s.enqueue("kind => 'a', queue => 'q2'").await;
    s.run("rollback; begin").await;
    s.enqueue("kind => 'a', queue => 'q3'").await;
    s.enqueue("kind => 'a', queue => 'q3'").await;
    s.run("commit").await;
    many(&s, &json!([{"kind": "a", "queue": "q4"}, {"kind": "b", "queue": "q4"}])).await;
    let mut heard = Vec::new();
    wait_until(SOON, "both queues are told", async || {
        if let Ok(posthouse::store::Notice::Wake { queue }) = listener.next().await {
            heard.push(queue);
        }
        heard.len() == 2
    })
    .await;
    assert_eq!(heard, ["q3", "q4"]);
}
