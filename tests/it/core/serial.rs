//! Jobs of a queue that share a field of their payload: one at a time, in order, whatever becomes of them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fastrand::Rng;
use futures_util::future::join_all;
use posthouse::Posthouse;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::support::{Claimed, Queue, Session, Worker, ids};

/// A queue whose jobs are serial by the field `chat`, and a worker of kind `k`.
async fn by_chat() -> (Queue, Session, Worker) {
    let (queue, s, worker) = Queue::with_worker().await;
    s.run("select posthouse.set_serial_by('default', 'chat')").await;
    (queue, s, worker)
}

impl Session {
    /// Enqueue a job of kind `k` of this chat.
    async fn say(&self, chat: &str) -> i64 {
        self.enqueue(&format!("kind => 'k', payload => $p${{\"chat\": {chat}}}$p$")).await
    }

    async fn many(&self, jobs: &Value) -> Vec<i64> {
        self.list(&format!("select id from posthouse.enqueue_many($jobs${jobs}$jobs$) order by ordinal")).await
    }

    /// A settle of one job.
    async fn ends(&self, worker: &Worker, job: &Claimed, outcome: &Value) {
        self.end(worker.id, std::slice::from_ref(job), outcome).await;
    }

    async fn explained(&self, id: i64) -> String {
        self.list::<String>(&format!("select reason from posthouse.explain({id})")).await.join("; ")
    }
}

#[tokio::test]
async fn one_of_each_value_runs_at_a_time_in_order() {
    let (_queue, s, worker) = by_chat().await;
    let a = [s.say("1").await, s.say("1").await, s.say("1").await];
    let b = [s.say("2").await, s.say("2").await];
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(ids(&jobs), [a[0], b[0]]);
    assert_eq!(ids(&worker.claim(&s, 10).await), [0; 0]);
    s.ends(&worker, &jobs[0], &json!({"outcome": "done"})).await;
    let next = worker.claim(&s, 10).await;
    assert_eq!(ids(&next), [a[1]]);
    s.done(worker.id, &[next[0].clone(), jobs[1].clone()]).await;
    let next = worker.claim(&s, 1).await;
    let last = worker.claim(&s, 1).await;
    let mut both = ids(&[next, last].concat());
    both.sort_unstable();
    assert_eq!(both, [a[2], b[1]]);
    assert_eq!(ids(&worker.claim(&s, 10).await), [0; 0]);
}

#[tokio::test]
async fn whatever_becomes_of_an_attempt_the_next_job_waits_for_its_end() {
    let (_queue, s, worker) = by_chat().await;
    let line = [s.say("1").await, s.say("1").await, s.say("1").await];
    // A retry, a snooze, a release: the same job goes on.
    for outcome in [
        json!({"outcome": "retry", "delay_ms": 0}),
        json!({"outcome": "snooze", "delay_ms": 0}),
        json!({"outcome": "release"}),
    ] {
        let jobs = worker.claim(&s, 10).await;
        assert_eq!(ids(&jobs), [line[0]]);
        s.ends(&worker, &jobs[0], &outcome).await;
    }
    // One that waits for its next attempt holds up the others; they say so.
    let jobs = worker.claim(&s, 10).await;
    s.ends(&worker, &jobs[0], &json!({"outcome": "retry", "delay_ms": 3_600_000})).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [0; 0]);
    let why = s.explained(line[1]).await;
    assert_eq!(why, format!("job {}, which shares its value \"1\", runs first", line[0]));
    // Sooner, by hand.
    s.run(&format!("select posthouse.retry({})", line[0])).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(ids(&jobs), [line[0]]);
    // Lost with its worker.
    s.expire(worker.id).await;
    assert_eq!(s.rescue(worker.id).await, 1);
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!((ids(&jobs), jobs[0].attempt), (vec![line[0]], 4));
    assert_eq!(s.explained(line[2]).await, format!("job {}, which shares its value \"1\", runs first", line[0]));
    // It fails for good, the next one is cancelled while it waits for its turn: then comes the last.
    s.ends(&worker, &jobs[0], &json!({"outcome": "fail"})).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(ids(&jobs), [line[1]]);
    s.ends(&worker, &jobs[0], &json!({"outcome": "retry", "delay_ms": 3_600_000})).await;
    s.run(&format!("select posthouse.cancel({})", line[1])).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(ids(&jobs), [line[2]]);
    // One that is put back while another runs waits for it.
    s.run(&format!("select posthouse.redrive(array[{}])", line[0])).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [0; 0]);
    s.done(worker.id, &jobs).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [line[0]]);
}

#[tokio::test]
async fn a_worker_lost_in_the_last_attempt_frees_the_line() {
    let (_queue, s, worker) = by_chat().await;
    let job = r#"kind => 'k', max_attempts => 1, payload => '{"chat": 1}'"#;
    let (first, second) = (s.enqueue(job).await, s.enqueue(job).await);
    assert_eq!(ids(&worker.claim(&s, 10).await), [first]);
    assert_eq!(worker.claim(&s, 10).await.len(), 0);
    s.expire(worker.id).await;
    s.rescue(worker.id).await;
    assert_eq!(s.state(first).await, "failed");
    let worker = s.worker(&["k"]).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [second]);
}

#[tokio::test]
async fn lanes_that_sleep_wake_for_their_turn_and_for_a_retry_when_it_is_due() {
    let (_queue, s, worker) = by_chat().await;
    let first = s.say("1").await;
    let second = s.say("1").await;
    let awake = "posthouse.lane where ready_at <= clock_timestamp()";
    let jobs = worker.claim(&s, 10).await;
    // The lane sleeps at once: nothing in it can run before the job ends.
    assert_eq!(worker.claim(&s, 10).await.len(), 0);
    assert_eq!(s.count(awake).await, 0);
    let due = s.next_due(worker.id).await;
    assert!(due.is_none_or(|due| due == -1 || due > 60_000), "{due:?}");
    s.ends(&worker, &jobs[0], &json!({"outcome": "retry", "delay_ms": 90_000})).await;
    assert_eq!(s.count(awake).await, 1);
    // Not for ten minutes, as behind a gate of which nothing is known, but until the retry is due.
    s.without_naps().await;
    assert_eq!(worker.claim(&s, 10).await.len(), 0);
    assert_eq!(s.count(awake).await, 0);
    assert!(s.get::<bool>("select ready_at < clock_timestamp() + interval '91 seconds' from posthouse.lane").await);
    let due = s.next_due(worker.id).await.unwrap();
    assert!((80_000..=90_000).contains(&due), "{due}");
    // A cancel wakes it, and so does the sweep where a wake-up was missed.
    s.run(&format!("update posthouse.job set state = 'queued', run_at = '-infinity' where id = {first}")).await;
    s.run("select posthouse.wake_missed()").await;
    assert_eq!(s.count(awake).await, 1);
    s.run(&format!("update posthouse.job set run_at = clock_timestamp() + interval '1 minute' where id = {first}"))
        .await;
    s.without_naps().await;
    assert_eq!(worker.claim(&s, 10).await.len(), 0);
    assert_eq!(s.count(awake).await, 0);
    assert_eq!(s.get::<i32>("select posthouse.wake_missed()").await, 0);
    s.run(&format!("select posthouse.cancel({first})")).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [second]);
}

#[tokio::test]
async fn values_are_told_apart_by_tenant_and_text() {
    let (_queue, s, worker) = by_chat().await;
    let long = "x".repeat(5_000);
    let odd = [
        json!("\u{1f}"),
        json!("a\u{1f}b"),
        json!("a b'\"\\"),
        json!("ä"),
        json!(long),
        json!({"a": [1]}),
        json!(true),
    ];
    for value in odd.iter().chain(&[json!(7)]) {
        s.many(&json!([{"kind": "k", "payload": {"chat": value}}, {"kind": "k", "payload": {"chat": value}}])).await;
    }
    // A number and its text are the same; so are lanes of enqueue and enqueue_many.
    s.say("\"7\"").await;
    s.say(&json!(format!("{long}")).to_string()).await;
    let jobs = worker.claim(&s, 100).await;
    assert_eq!(jobs.len(), odd.len() + 1, "{jobs:?}");
    s.done(worker.id, &jobs).await;
    let jobs = worker.claim(&s, 100).await;
    assert_eq!(jobs.len(), odd.len() + 1);
    s.done(worker.id, &jobs).await;
    let jobs = worker.claim(&s, 100).await;
    assert_eq!(jobs.len(), 2);
    s.done(worker.id, &jobs).await;
    // Longer ones differ though they begin alike.
    s.say(&json!(format!("{long}1")).to_string()).await;
    s.say(&json!(format!("{long}2")).to_string()).await;
    assert_eq!(worker.claim(&s, 100).await.len(), 2);
    // Without a value, and of two tenants, nobody waits.
    for payload in ["{}", "{\"chat\": null}", "{\"chat\": \"\"}", "[1]", "3", "null"] {
        for _ in 0..2 {
            s.enqueue(&format!("kind => 'k', payload => '{payload}'")).await;
        }
    }
    assert_eq!(worker.claim(&s, 100).await.len(), 12);
    for tenant in ["a", "b"] {
        s.enqueue(&format!("kind => 'k', tenant => '{tenant}', payload => '{{\"chat\": 9}}'")).await;
    }
    assert_eq!(worker.claim(&s, 100).await.len(), 2);
    // Nobody names by hand what jobs share.
    for payload in ["{}", "{\"chat\": 1}"] {
        let sql = format!(
            r#"select posthouse.enqueue_many('[{{"kind": "k", "gates": ["\u001fx"], "payload": {payload}}}]')"#
        );
        assert!(s.refused(&sql).await.message.contains("control characters"));
    }
    let refused = s.refused("select posthouse.remove_gate('serial:default')").await;
    assert_eq!(refused.code, "PH001", "{refused:?}");
}

#[tokio::test]
async fn order_holds_over_kinds_priorities_and_a_batch() {
    let (_queue, s, _worker) = by_chat().await;
    let worker = s.worker(&["a", "b"]).await;
    let job = |kind: &str, priority: i32| json!({"kind": kind, "priority": priority, "payload": {"chat": 1}});
    let line = s.many(&json!([job("b", 5), job("a", 0), job("b", -5), job("a", 0), job("b", 5)])).await;
    for id in &line {
        let jobs = worker.claim(&s, 10).await;
        assert_eq!(ids(&jobs), [*id], "{line:?}");
        assert_eq!(worker.claim(&s, 10).await.len(), 0);
        s.without_naps().await;
        assert_eq!(worker.claim(&s, 10).await.len(), 0);
        s.done(worker.id, &jobs).await;
    }
    // One of a kind that nobody here runs holds up the others.
    let other = s.enqueue(r#"kind => 'other', payload => '{"chat": 1}'"#).await;
    let mine = s.enqueue(r#"kind => 'a', payload => '{"chat": 1}'"#).await;
    assert_eq!(worker.claim(&s, 10).await.len(), 0);
    assert_eq!(s.explained(mine).await, format!("job {other}, which shares its value \"1\", runs first"));
    s.run(&format!("select posthouse.cancel({other})")).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [mine]);
    // One that is due later does not.
    s.enqueue(r#"kind => 'a', delay => '1 hour', payload => '{"chat": 2}'"#).await;
    let now = s.enqueue(r#"kind => 'a', payload => '{"chat": 2}'"#).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [now]);
}

#[tokio::test]
async fn it_is_turned_off_for_jobs_to_come_and_needs_no_room_for_values_that_are_over() {
    let (queue, s, worker) = by_chat().await;
    let client = Posthouse::connect(queue.url()).await.unwrap();
    s.say("1").await;
    s.say("1").await;
    client.set_serial_by("default", None).await.unwrap();
    s.say("1").await;
    s.say("1").await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(jobs.len(), 3);
    assert_eq!(client.queues().await.unwrap()[0].serial_by, None);
    client.set_serial_by("default", Some("chat")).await.unwrap();
    assert_eq!(client.queues().await.unwrap()[0].serial_by.as_deref(), Some("chat"));
    s.say("1").await;
    assert_eq!(worker.claim(&s, 10).await.len(), 0);
    let states = "posthouse.gate_state";
    s.run("select posthouse.fold()").await;
    assert_eq!(s.count(states).await, 1);
    s.done(worker.id, &jobs).await;
    s.run("select posthouse.fold()").await;
    assert_eq!(s.count(states).await, 0);
    for _ in 0..2 {
        let jobs = worker.claim(&s, 10).await;
        assert_eq!(jobs.len(), 1);
        assert_eq!(worker.claim(&s, 10).await.len(), 0);
        s.done(worker.id, &jobs).await;
    }
    assert!(client.set_serial_by("default", Some("")).await.unwrap_err().to_string().contains("field"));
    assert!(client.set_serial_by("", Some("a")).await.unwrap_err().to_string().contains("queue"));
}

#[tokio::test]
async fn a_job_of_little_urgency_does_not_starve_behind_lines_that_wait() {
    let (_queue, s, worker) = by_chat().await;
    for chat in 0..20 {
        s.say(&chat.to_string()).await;
        s.say(&chat.to_string()).await;
    }
    assert_eq!(worker.claim(&s, 100).await.len(), 20);
    s.run("update posthouse.lane set naps = 2, awake_until = 'infinity'").await;
    let patient = s.enqueue("kind => 'k', priority => 9").await;
    s.enqueue_with(100, "{}").await;
    for claims in 1.. {
        if ids(&worker.claim(&s, 1).await) == [patient] {
            break;
        }
        assert!(claims <= 20, "not among the first {claims} claims");
    }
}

/// What eight sessions know of the order of each value.
#[derive(Default)]
struct Order {
    running: RefCell<BTreeSet<i64>>,
    /// The last job that was seen to begin of each value, and those that are over.
    last: RefCell<BTreeMap<i64, i64>>,
    over: RefCell<BTreeSet<i64>>,
    done: Cell<usize>,
}

impl Order {
    fn began(&self, jobs: &[Claimed]) {
        for job in jobs {
            let chat = job.payload["chat"].as_i64().unwrap();
            assert!(self.running.borrow_mut().insert(chat), "two jobs of value {chat} run at once");
            let last = self.last.borrow_mut().insert(chat, job.id);
            if let Some(last) = last.filter(|last| *last != job.id) {
                assert!(last < job.id, "{} began after {last}", job.id);
                assert!(self.over.borrow().contains(&last), "{} began while {last} was not over", job.id);
            }
        }
    }

    fn ends(&self, job: &Claimed, is_over: bool) {
        self.running.borrow_mut().remove(&job.payload["chat"].as_i64().unwrap());
        if is_over {
            self.over.borrow_mut().insert(job.id);
            self.done.set(self.done.get() + 1);
        }
    }
}

/// Claim and settle at random until all jobs are over.
async fn at_random(s: &Session, order: &Order, seed: u64, jobs: usize) {
    let mut rng = Rng::with_seed(seed);
    let mut worker = s.worker(&["a", "b"]).await;
    let mut held: Vec<Claimed> = Vec::new();
    while order.done.get() < jobs {
        if rng.u8(0..60) == 0 {
            // It is lost, with all that it runs.
            for job in &held {
                order.ends(job, false);
            }
            held.clear();
            s.expire(worker.id).await;
            s.rescue(worker.id).await;
            worker = s.worker(&["a", "b"]).await;
        } else if rng.bool() {
            let claimed = worker.claim(s, rng.i32(1..20)).await;
            order.began(&claimed);
            if claimed.is_empty() {
                sleep(Duration::from_millis(rng.u64(0..4))).await;
            }
            held.extend(claimed);
        } else {
            rng.shuffle(&mut held);
            let some = held.split_off(held.len() - rng.usize(0..=held.len()));
            let mut outcomes = Vec::new();
            for job in &some {
                let outcome = match rng.u8(0..8) {
                    0 => "release",
                    1 if job.attempt < job.max_attempts => "retry",
                    2 => "snooze",
                    3 => "fail",
                    _ => "done",
                };
                order.ends(job, matches!(outcome, "fail" | "done"));
                outcomes.push(json!({"id": job.id, "fence": job.fence, "outcome": outcome, "delay_ms": rng.u8(0..20)}));
            }
            let verdicts = s.settle(worker.id, &json!(outcomes)).await;
            assert!(verdicts.iter().all(|verdict| verdict.1 == "applied"), "{verdicts:?}");
        }
    }
}

#[tokio::test]
async fn eight_sessions_at_random_keep_the_order_of_every_value() {
    const JOBS: usize = 1_200;
    let (queue, s, _worker) = by_chat().await;
    let mut rng = Rng::with_seed(5);
    let jobs: Vec<Value> = (0..JOBS)
        .map(|_| json!({"kind": if rng.bool() { "a" } else { "b" }, "priority": rng.i32(0..2), "max_attempts": 1000, "payload": {"chat": rng.u8(0..40)}}))
        .collect();
    s.many(&json!(jobs)).await;
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push(queue.session().await);
    }
    let order = Order::default();
    join_all((1..).zip(&sessions).map(|(seed, s)| at_random(s, &order, seed, JOBS))).await;
    assert_eq!(order.done.get(), JOBS);
    assert_eq!(s.count("posthouse.job").await, 0);
}

/// Buffers that a statement touches, planning aside.
async fn buffers(s: &Session, sql: &str) -> i64 {
    let plan: Value = s.get(&format!("explain (analyze, buffers, format json) {sql}")).await;
    let of = |name: &str| plan[0]["Plan"][name].as_i64().unwrap();
    of("Shared Hit Blocks") + of("Shared Read Blocks")
}

#[tokio::test]
async fn thousands_of_values_that_wait_cost_a_claim_nothing() {
    let (queue, s, worker) = by_chat().await;
    s.run(
        "select posthouse.enqueue_many(jobs) from (
           select jsonb_agg(jsonb_build_object('kind', 'k', 'payload', jsonb_build_object('chat', n % 5000))) as jobs
           from generate_series(1, 10000) n) b",
    )
    .await;
    let claim = |n: i32| format!("select * from posthouse.claim('{}', {n}, 10)", worker.id);
    assert_eq!(worker.claim(&s, 10_000).await.len(), 5_000);
    // The first ones put lanes to sleep, a thousand each.
    for _ in 0..6 {
        assert_eq!(worker.claim(&s, 1).await.len(), 0);
    }
    let idle = buffers(&s, &claim(101)).await;
    assert!(idle < 5_000, "a claim that finds nothing touches {idle} buffers");
    // Somebody looks at an old state of the database meanwhile; one value has much to do.
    let watcher = queue.session().await;
    watcher.run("begin isolation level repeatable read; select count(*) from posthouse.job").await;
    let fields = r#"{"tenant": "busy", "payload": {"chat": 1}}"#;
    s.enqueue_with(400, fields).await;
    let mut costs = Vec::new();
    for round in 0..400 {
        let sql = claim(1000 + round);
        costs.push(if !(20..380).contains(&round) {
            buffers(&s, &sql).await
        } else {
            s.rows(&sql).await.len().try_into().unwrap()
        });
        let jobs: Vec<(i64, i32)> = s
            .rows("select j.id, j.fence from posthouse.job j join posthouse.lane l on l.id = j.lane_id where l.tenant = 'busy' and j.state = 'running'")
            .await
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect();
        assert_eq!(jobs.len(), 1, "round {round}");
        let outcome = json!([{"id": jobs[0].0, "fence": jobs[0].1, "outcome": "done"}]);
        s.settle(worker.id, &outcome).await;
        if round % 50 == 0 {
            s.run("select posthouse.fold(); select posthouse.advance_floors()").await;
        }
    }
    let (first, last): (i64, i64) = (costs[..20].iter().sum(), costs[380..].iter().sum());
    // On a busy machine a window of lanes may be awake in the end: that costs 1,400 buffers a claim. All 5,000 would cost 20 times as many.
    assert!(
        last < first * 2 || last < 20 * 2_500,
        "20 claims touched {first} buffers at first and {last} in the end: {costs:?}"
    );
}
