//! Dedupe keys under concurrency: no deadlock reaches a caller, what came last is run, and a key that somebody holds delays nobody
//! who has another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use posthouse::job::{DedupePolicy, Deduped};
use posthouse::{NewJob, Posthouse};
use serde_json::{Value, json};

use super::support::{Queue, Session, refusal};
use crate::harness::{SOON, wait_until};

const SESSIONS: usize = 8;
const KEYS: usize = 500;

/// A generator of numbers, the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % sides
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for n in (1..items.len()).rev() {
            items.swap(n, self.roll(n + 1));
        }
    }
}

/// Claims and settles whatever comes until `stop` is set and nothing is left; the payloads that ran, by key.
async fn work(s: Session, stop: &AtomicBool) -> Vec<Value> {
    let worker = s.worker(&["a"]).await;
    let mut dice = Dice(worker.id.as_u128() as u64);
    let mut ran = Vec::new();
    let mut idle = 0;
    while idle < 3 {
        let over = stop.load(Ordering::SeqCst);
        // Before the claim: whoever lets a job run looks for it afterwards.
        if over {
            s.run("update posthouse.sweep set ran_at = '-infinity' where name = 'dedupe'; select posthouse.tidy()")
                .await;
        }
        let jobs = worker.claim(&s, 50).await;
        idle = if over && jobs.is_empty() { idle + 1 } else { 0 };
        let outcomes: Vec<Value> = jobs
            .iter()
            .map(|job| {
                // Not at the last attempt, which would end as failed: here every job is done some day.
                let again = dice.roll(4) == 0 && job.attempt < job.max_attempts;
                let outcome = if again { "retry" } else { "done" };
                if outcome == "done" {
                    ran.push(job.payload.clone());
                }
                json!({"id": job.id, "fence": job.fence, "outcome": outcome, "delay_ms": 0})
            })
            .collect();
        let verdicts = s.settle(worker.id, &json!(outcomes)).await;
        assert!(verdicts.iter().all(|v| v.1 == "applied"), "{verdicts:?}");
    }
    ran
}

/// Some rounds of batches of overlapping keys in random order from eight sessions at once, while others claim and settle; the answer is
/// what they were refused.
async fn collide(queue: &Queue, rounds: usize) -> Vec<String> {
    let stop = AtomicBool::new(false);
    let refused = Mutex::new(Vec::new());
    let workers = (0..2).map(async |_| work(queue.session().await, &stop).await);
    let enqueuers = (0..SESSIONS).map(async |n| {
        let s = queue.session().await;
        let mut dice = Dice(n as u64);
        for _ in 0..rounds {
            let mut keys: Vec<usize> = (0..KEYS).map(|key| key + dice.roll(3) * KEYS / 2).collect();
            dice.shuffle(&mut keys);
            let jobs: Vec<Value> = keys
                .iter()
                .map(|key| {
                    let policy = ["keep", "replace", "rerun", "keep"][dice.roll(4)];
                    json!({"kind": "a", "tenant": format!("t{}", key % 3), "payload": key, "dedupe_key": key.to_string(), "dedupe_policy": policy})
                })
                .collect();
            let sql = "select count(*) from posthouse.enqueue_many($1::jsonb)";
            match s.client.query_one(sql, &[&json!(jobs)]).await {
                Ok(row) => assert_eq!(row.get::<_, i64>(0), KEYS as i64),
                Err(error) => refused.lock().unwrap().push(refusal(&error).code),
            }
        }
    });
    let enqueued = async {
        join_all(enqueuers).await;
        stop.store(true, Ordering::SeqCst);
    };
    join(join_all(workers), enqueued).await;
    refused.into_inner().unwrap()
}

#[tokio::test]
async fn overlapping_batches_in_any_order_never_deadlock() {
    let (queue, s) = Queue::with_session().await;
    assert_eq!(collide(&queue, 6).await, [""; 0]);
    assert!(s.count("posthouse.archive").await > KEYS as i64);
    let left = "select to_jsonb(j) || jsonb_build_object('keys', (select jsonb_agg(d) from posthouse.dedupe d)) from posthouse.job j";
    assert_eq!(s.list::<Value>(left).await, [Value::Null; 0]);
    assert_eq!(s.count("posthouse.dedupe").await, 0);
    // Not by luck: in the order of the arrays they do.
    s.cripple("take_keys", "order by p.tenant, p.kind, p.dedupe_key, p.ordinal", "order by p.ordinal").await;
    assert!(collide(&queue, 2).await.iter().any(|code| code == "40P01"));
}

#[tokio::test]
async fn what_was_asked_for_last_is_run() {
    let (queue, s) = Queue::with_session().await;
    let stop = AtomicBool::new(false);
    let workers = (0..3).map(async |_| work(queue.session().await, &stop).await);
    // Each key is one session's, so that it knows which version of it came last.
    let enqueuers = (0..4).map(async |n: usize| {
        let s = queue.session().await;
        let mut dice = Dice(n as u64);
        let mut newest = BTreeMap::new();
        for version in 0..150_i64 {
            let key = format!("{n}-{}", dice.roll(5));
            let payload = json!({"key": key, "version": version});
            s.rows(&format!(
                "select * from posthouse.enqueue('a', '{payload}', dedupe_key => '{key}', dedupe_policy => 'rerun')"
            ))
            .await;
            newest.insert(key, version);
        }
        newest
    });
    let enqueued = async {
        let newest: BTreeMap<String, i64> = join_all(enqueuers).await.into_iter().flatten().collect();
        stop.store(true, Ordering::SeqCst);
        newest
    };
    let (jobs, newest) = join(join_all(workers), enqueued).await;
    let mut ran: BTreeMap<String, i64> = BTreeMap::new();
    for job in jobs.into_iter().flatten() {
        let version = ran.entry(job["key"].as_str().unwrap().to_owned()).or_default();
        *version = (*version).max(job["version"].as_i64().unwrap());
    }
    assert_eq!(ran, newest);
    assert_eq!(s.count("posthouse.job").await, 0);
}

#[tokio::test]
async fn a_claim_and_a_replacement_never_lose_a_payload_in_silence() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    let worker = other.worker(&["a"]).await;
    // A claim that is not committed yet has the job.
    let id = s.enqueue("kind => 'a', payload => '1', dedupe_key => 'k'").await;
    other.run("begin").await;
    assert_eq!(worker.claim(&other, 1).await.len(), 1);
    let rows = s
        .rows("select id, deduped from posthouse.enqueue('a', '2', dedupe_key => 'k', dedupe_policy => 'rerun')")
        .await;
    assert_eq!(rows[0].get::<_, Option<String>>(1).as_deref(), Some("behind"), "it is as good as taken");
    other.run("rollback").await;
    // It was not taken after all: both run, one after the other.
    let first = worker.claim(&other, 10).await;
    assert_eq!(first.iter().map(|job| job.id).collect::<Vec<_>>(), [id]);
    other.settle(worker.id, &json!([{"id": id, "fence": first[0].fence, "outcome": "done"}])).await;
    assert_eq!(worker.claim(&other, 10).await[0].payload, json!(2));
    // A replacement that is not committed yet: claims go around the job, and run the new payload later.
    let id = s.enqueue("kind => 'a', payload => '3', dedupe_key => 'k2'").await;
    s.run("begin; select posthouse.enqueue('a', '4', dedupe_key => 'k2', dedupe_policy => 'replace')").await;
    assert!(worker.claim(&other, 10).await.is_empty());
    s.run("commit").await;
    let jobs = worker.claim(&other, 10).await;
    assert_eq!((jobs[0].id, &jobs[0].payload), (id, &json!(4)));
    // And one that is undone leaves what there was.
    let id = s.enqueue("kind => 'a', payload => '5', dedupe_key => 'k3'").await;
    s.run("begin; select posthouse.enqueue('a', '6', dedupe_key => 'k3', dedupe_policy => 'replace'); rollback").await;
    assert_eq!(worker.claim(&other, 10).await[0].payload, json!(5));
    assert_eq!(s.state(id).await, "running");
}

#[tokio::test]
async fn stricter_isolation_levels_are_told_to_run_again() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    for (level, policy) in [("repeatable read", "rerun"), ("serializable", "replace")] {
        let key = format!("dedupe_key => '{level}'");
        s.run(&format!("begin isolation level {level}; select posthouse.enqueue('x')")).await;
        other.enqueue(&format!("kind => 'a', payload => '1', {key}")).await;
        let refusal =
            s.refused(&format!("select posthouse.enqueue('a', '2', {key}, dedupe_policy => '{policy}')")).await;
        assert!(["40001", "PH007"].contains(&&*refusal.code), "{level}: {} {}", refusal.code, refusal.message);
        s.run("rollback").await;
        s.run(&format!("begin isolation level {level}")).await;
        let rows = s
            .rows(&format!("select deduped from posthouse.enqueue('a', '2', {key}, dedupe_policy => '{policy}')"))
            .await;
        assert_eq!(rows[0].get::<_, Option<String>>(0).as_deref(), Some("replaced"), "{level}");
        s.run("commit").await;
    }
}

#[tokio::test]
async fn a_key_that_is_held_delays_nobody_without_it() {
    let (queue, s) = Queue::with_session().await;
    s.run("begin").await;
    for n in 0..40 {
        s.enqueue(&format!("kind => 'a', dedupe_key => 'held{n}'")).await;
    }
    let client = Posthouse::connect(queue.url()).await.unwrap();
    let done = Arc::new(AtomicUsize::new(0));
    let ids = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for n in 0..40 {
        let (client, done, ids) = (client.clone(), done.clone(), ids.clone());
        waiting.push(tokio::spawn(async move {
            let job = NewJob::from_json("a", "{}").unwrap().dedupe_key(format!("held{n}"));
            let answer = match n % 2 {
                0 => client.enqueue_job(job).await.unwrap(),
                _ => client.enqueue_many(&[job]).await.unwrap().remove(0),
            };
            done.fetch_add(1, Ordering::SeqCst);
            ids.lock().unwrap().push(answer);
        }));
    }
    let waiters =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    let other = queue.session().await;
    wait_until(SOON, "some of them wait for the keys", async || other.get::<i64>(waiters).await > 0).await;
    let begun = Instant::now();
    for n in 0..20 {
        let job = || NewJob::from_json("a", "{}").unwrap();
        assert!(!client.enqueue_job(job().dedupe_key(format!("free{n}"))).await.unwrap().duplicate);
        client.enqueue_job(job()).await.unwrap();
        let both = client.enqueue_many(&[job(), job().dedupe_key(format!("free{n}"))]).await.unwrap();
        assert_eq!(both[1].deduped, Some(Deduped::Kept));
        client.job(both[0].id).await.unwrap().unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    assert_eq!(done.load(Ordering::SeqCst), 0, "nobody got a key that is held");
    s.run("commit").await;
    for task in waiting {
        task.await.unwrap();
    }
    assert!(ids.lock().unwrap().iter().all(|answer| answer.duplicate && answer.state == "queued"));
    // At the same time in one statement a session.
    let bare = other.client.query_one("show lock_timeout", &[]).await.unwrap().get::<_, String>(0);
    assert_eq!(bare, "0");
}

#[tokio::test]
async fn the_client_says_what_became_of_it() {
    let (queue, s) = Queue::with_session().await;
    let client = Posthouse::connect(queue.url()).await.unwrap();
    let job = |payload: &str| NewJob::from_json("a", payload).unwrap().dedupe_key("k");
    let first = client.enqueue_job(job("1")).await.unwrap();
    assert_eq!((first.duplicate, first.deduped), (false, None));
    let replaced = client.enqueue_job(job("2").dedupe_policy(DedupePolicy::Replace)).await.unwrap();
    assert_eq!((replaced.id, replaced.duplicate, replaced.deduped), (first.id, true, Some(Deduped::Replaced)));
    let same = job("2.0").dedupe_policy(DedupePolicy::Same);
    assert_eq!(client.enqueue_job(same.clone()).await.unwrap().deduped, Some(Deduped::Kept));
    for policy in [DedupePolicy::Reject, DedupePolicy::Same] {
        let error = client.enqueue_job(job("3").dedupe_policy(policy)).await.unwrap_err();
        assert!(
            error.is_duplicate() && !error.is_transient() && error.to_string().contains(&first.id.to_string()),
            "{error}"
        );
        let error = client.enqueue_many(&[job("3").dedupe_policy(policy)]).await.unwrap_err();
        assert!(error.is_duplicate(), "{error}");
    }
    let by_payload = |payload: &str| NewJob::from_json("b", payload).unwrap().dedupe_by_payload();
    let one = client.enqueue_job(by_payload("{\"a\": 1, \"b\": 2}")).await.unwrap();
    assert_eq!(client.enqueue_many(&[by_payload("{\"b\":2,\"a\":1.0}")]).await.unwrap()[0].id, one.id);
    s.worker(&["a"]).await.claim(&s, 1).await;
    let behind = client.enqueue_job(job("4").dedupe_policy(DedupePolicy::Rerun)).await.unwrap();
    assert_eq!((behind.duplicate, behind.deduped), (false, Some(Deduped::Behind)));
    let error =
        client.enqueue_job(NewJob::from_json("a", "1").unwrap().dedupe_policy(DedupePolicy::Keep)).await.unwrap_err();
    assert!(error.is_invalid() && error.to_string().starts_with("dedupe_policy:"), "{error}");
}
