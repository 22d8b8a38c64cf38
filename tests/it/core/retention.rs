//! Queues that keep no history: what is left of their jobs, for how long, and that nobody else loses anything by it.

use std::time::Duration;

use posthouse::{Outcome, Posthouse, Worker as RustWorker};
use serde_json::{Value, json};

use super::support::{Claimed, Queue, Session, Worker, ids, said};

/// Let so many minutes pass for what is buried.
async fn pass(s: &Session, minutes: f64) {
    s.run(&format!(
        "update posthouse.tombstone set finished_at = finished_at - interval '{minutes} minutes';
         update posthouse.burial set buried_at = buried_at - interval '{minutes} minutes';
         update posthouse.sweep set floor_at = floor_at - interval '{minutes} minutes'"
    ))
    .await;
}

async fn sweep(s: &Session) {
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
}

async fn set(s: &Session, queue: &str, retention: &str) {
    s.run(&format!("select posthouse.set_queue('{queue}', {retention})")).await;
}

/// Claimed jobs of a queue.
async fn claimed(s: &Session, queue: &str, jobs: i64) -> (Worker, Vec<Claimed>) {
    for _ in 0..jobs {
        s.enqueue(&format!("kind => 'k', queue => '{queue}', payload => '{{\"a\": 1}}'")).await;
    }
    let worker = s.worker_of(&[queue], &["k"], 3_600_000).await;
    let mut taken = worker.claim(s, i32::try_from(jobs).unwrap()).await;
    taken.sort_by_key(|job| job.id);
    (worker, taken)
}

fn outcome(job: &Claimed, outcome: &str) -> Value {
    json!({"id": job.id, "fence": job.fence, "outcome": outcome, "result": {"of": job.id}, "usage": {"tokens": 7}, "delay_ms": 0})
}

fn outcomes(jobs: &[Claimed], what: &str) -> Value {
    jobs.iter().map(|job| outcome(job, what)).collect()
}

#[tokio::test]
async fn a_settle_is_applied_once_and_known_until_it_is_swept() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    let (worker, jobs) = claimed(&s, "bare", 3).await;
    let stranger = s.worker_of(&["bare"], &["k"], 3_600_000).await;
    let done = outcomes(&jobs, "done");
    let answers = |verdict| vec![(verdict, Some("done")); 3];
    assert_eq!(said(&s.settle(worker.id, &done).await), answers("applied"));
    assert_eq!(said(&s.settle(worker.id, &done).await), answers("already"));
    assert_eq!(said(&s.settle(stranger.id, &done).await), answers("lost"));
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.archive").await), (3, 0));
    assert_eq!(s.count("posthouse.job").await, 0);
    let job = s.job(jobs[0].id).await;
    for (field, value) in [
        ("state", json!("done")),
        ("queue", json!("bare")),
        ("kind", json!("k")),
        ("attempt", json!(1)),
        ("max_attempts", json!(5)),
        ("fence", json!(1)),
        ("worker", json!(worker.id)),
        ("payload", json!({"a": 1})),
        ("result", json!({"of": jobs[0].id})),
        ("usage", Value::Null),
    ] {
        assert_eq!(job[field], value, "{field}");
    }
    assert!(job["created_at"].is_string() && job["finished_at"].is_string());
    // Nearly ten minutes later all of it is still there.
    pass(&s, 9.8).await;
    sweep(&s).await;
    assert_eq!(said(&s.settle(worker.id, &done).await), answers("already"));
    assert_eq!((s.count("posthouse.payload").await, s.count("posthouse.jobs where result is not null").await), (3, 3));
    pass(&s, 0.3).await;
    sweep(&s).await;
    for table in ["tombstone", "burial", "payload", "jobs", "archive"] {
        assert_eq!(s.count(&format!("posthouse.{table}")).await, 0, "{table}");
    }
    assert_eq!(said(&s.settle(worker.id, &done).await), vec![("lost", None); 3]);
    // They are counted all the same.
    assert_eq!(s.get::<i64>("select done from posthouse.queue_health where queue = 'bare'").await, 3);
}

#[tokio::test]
async fn each_outcome_where_no_history_is_kept() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    let (worker, jobs) = claimed(&s, "bare", 6).await;
    let all = ["done", "retry", "snooze", "fail", "cancelled", "release"];
    let each: Value = jobs.iter().zip(all).map(|(job, what)| outcome(job, what)).collect();
    let states = ["done", "queued", "queued", "failed", "cancelled", "queued"];
    assert_eq!(said(&s.settle(worker.id, &each).await), states.map(|state| ("applied", Some(state))));
    assert_eq!(said(&s.settle(worker.id, &each).await), states.map(|state| ("already", Some(state))));
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.archive").await), (2, 0));
    assert_eq!(s.job(jobs[4].id).await["result"], json!({"of": jobs[4].id}));
    // The errors of a job that was retried go when it is done.
    assert_eq!(s.count("posthouse.attempt").await, 1);
    let again = worker.claim(&s, 10).await;
    assert_eq!(again.len(), 3);
    s.settle(worker.id, &outcomes(&again, "done")).await;
    assert_eq!(s.count("posthouse.attempt").await, 0);
    pass(&s, 11.0).await;
    sweep(&s).await;
    // The dead letter is kept whole, and can be redriven.
    assert_eq!(s.list::<i64>("select id from posthouse.jobs").await, [jobs[3].id]);
    assert_eq!(s.list::<i64>("select id from posthouse.payload").await, [jobs[3].id]);
    assert_eq!(s.get::<i64>("select posthouse.redrive(queue => 'bare')").await, 1);
    let again = worker.claim(&s, 10).await;
    assert_eq!((ids(&again), &again[0].payload), (vec![jobs[3].id], &json!({"a": 1})));
}

#[tokio::test]
async fn a_batch_of_both_sorts() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    for n in 0..20 {
        let queue = ["bare", "kept"][n % 2];
        s.enqueue(&format!("kind => 'k', queue => '{queue}', tenant => 't{}', dedupe_key => 'key{n}'", n % 3)).await;
    }
    let worker = s.worker_of(&["bare", "kept"], &["k"], 3_600_000).await;
    let mut jobs = worker.claim(&s, 20).await;
    jobs.extend(worker.claim(&s, 20).await);
    assert_eq!(jobs.len(), 20);
    // Errors of both sorts: these are archived, those are not.
    s.settle(worker.id, &outcomes(&jobs[..10], "retry")).await;
    let again = worker.claim(&s, 20).await;
    assert_eq!(again.len(), 10);
    let now: Vec<Claimed> = [&again[..], &jobs[10..]].concat();
    let verdicts = s.settle(worker.id, &outcomes(&now, "done")).await;
    assert!(verdicts.iter().all(|v| v.1 == "applied"), "{verdicts:?}");
    for (table, queue) in [("tombstone", "bare"), ("archive", "kept")] {
        let from = format!("posthouse.{table} x join posthouse.lane l on l.id = x.lane_id where x.result is not null");
        assert_eq!(s.count(&format!("{from} and l.queue = '{queue}'")).await, 10, "{table}");
        assert_eq!(s.count(&from).await, 10, "{table}");
    }
    let with_errors = again.iter().filter(|job| job.queue == "kept").count();
    assert_eq!(s.count("posthouse.archive where errors is not null").await, i64::try_from(with_errors).unwrap());
    assert_eq!((s.count("posthouse.attempt").await, s.count("posthouse.dedupe").await), (0, 0));
    assert_eq!(s.count("posthouse.jobs where state = 'done'").await, 20);
    pass(&s, 11.0).await;
    sweep(&s).await;
    assert_eq!((s.count("posthouse.jobs").await, s.count("posthouse.payload").await), (10, 10));
    assert_eq!(s.count("posthouse.jobs where queue = 'kept' and payload is not null").await, 10);
}

#[tokio::test]
async fn history_switched_off_and_on_while_jobs_are_live() {
    let (_queue, s) = Queue::with_session().await;
    let (worker, jobs) = claimed(&s, "q", 3).await;
    let settle = async |n: usize| {
        let verdicts = s.settle(worker.id, &outcomes(&jobs[n..=n], "done")).await;
        assert_eq!(said(&verdicts), [("applied", Some("done"))]);
    };
    settle(0).await;
    set(&s, "q", "'0'").await;
    settle(1).await;
    set(&s, "q", "null").await;
    settle(2).await;
    let homes = |table: &str| format!("select id from posthouse.{table} order by id");
    assert_eq!(s.list::<i64>(&homes("archive")).await, [jobs[0].id, jobs[2].id]);
    assert_eq!(s.list::<i64>(&homes("tombstone")).await, [jobs[1].id]);
    assert_eq!(said(&s.settle(worker.id, &outcomes(&jobs, "done")).await), [("already", Some("done")); 3]);
    pass(&s, 11.0).await;
    sweep(&s).await;
    assert_eq!(s.list::<i64>(&homes("jobs")).await, [jobs[0].id, jobs[2].id]);
}

#[tokio::test]
async fn a_key_that_stands_for_a_window_keeps_its_job_that_long() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    let enqueue = "kind => 'k', queue => 'bare', dedupe_key => ";
    let window = s.enqueue(&format!("{enqueue} 'a', dedupe_for => '1 hour'")).await;
    let plain = s.enqueue(&format!("{enqueue} 'b'")).await;
    let worker = s.worker_of(&["bare"], &["k"], 3_600_000).await;
    let jobs = worker.claim(&s, 10).await;
    s.settle(worker.id, &outcomes(&jobs, "done")).await;
    assert_eq!(s.enqueued(&format!("{enqueue} 'a'")).await, (window, "done".to_owned(), true));
    assert!(!s.enqueued(&format!("{enqueue} 'b', delay => '1 hour'")).await.2, "that key was free");
    pass(&s, 11.0).await;
    sweep(&s).await;
    assert_eq!((s.state(plain).await, s.state(window).await), (String::new(), "done".to_owned()));
    assert_eq!(s.enqueued(&format!("{enqueue} 'a'")).await, (window, "done".to_owned(), true));
    sweep(&s).await;
    assert_eq!(s.job(window).await["payload"], json!({}));
    // Once the window is over, so is the job.
    s.run("update posthouse.dedupe set expires_at = clock_timestamp() where expires_at is not null").await;
    pass(&s, 60.0).await;
    sweep(&s).await;
    assert_eq!(s.state(window).await, "");
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.payload").await), (0, 1));
}

#[tokio::test]
async fn a_cancelled_job_can_be_retried_until_it_is_swept() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    let arguments = "kind => 'k', queue => 'bare', payload => '{\"a\": 1}', max_attempts => 7, timeout => '5 s'";
    let (first, second) = (s.enqueue(arguments).await, s.enqueue(arguments).await);
    let call = async |verb: &str, id: i64| s.get::<String>(&format!("select posthouse.{verb}({id})")).await;
    for id in [first, second] {
        assert_eq!(call("cancel", id).await, "cancelled");
        assert_eq!(call("cancel", id).await, "cancelled");
    }
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.archive").await), (2, 0));
    assert_eq!(call("retry", first).await, "queued");
    // What was buried first is no longer: its time must not end the job, nor its next tombstone.
    pass(&s, 11.0).await;
    sweep(&s).await;
    assert_eq!((s.state(first).await, s.state(second).await), ("queued".to_owned(), String::new()));
    assert_eq!(s.refused(&format!("select posthouse.retry({second})")).await.code, "PH003");
    let worker = s.worker_of(&["bare"], &["k"], 3_600_000).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!((jobs[0].max_attempts, jobs[0].timeout_ms, &jobs[0].payload), (7, Some(5_000), &json!({"a": 1})));
    assert_eq!(call("cancel", first).await, "running");
    s.settle(worker.id, &outcomes(&jobs, "cancelled")).await;
    assert_eq!(call("retry", first).await, "queued");
    let jobs = worker.claim(&s, 10).await;
    s.settle(worker.id, &outcomes(&jobs, "done")).await;
    s.run("update posthouse.burial set buried_at = buried_at - interval '11 minutes' where buried_at < (select max(buried_at) from posthouse.burial)").await;
    sweep(&s).await;
    assert_eq!(s.state(first).await, "done", "its younger tombstone stays");
    let refusal = s.refused(&format!("select posthouse.retry({first})")).await;
    assert_eq!(refusal.code, "PH004", "{}", refusal.message);
    let explained: bool = s
        .get(&format!("select reason like '%keeps no history' and until > clock_timestamp() + interval '9 minutes' from posthouse.explain({first})"))
        .await;
    assert!(explained);
    pass(&s, 11.0).await;
    sweep(&s).await;
    assert_eq!(s.state(first).await, "");
    assert_eq!(s.count("posthouse.payload").await, 0);
}

#[tokio::test]
async fn all_of_it_happens_or_nothing() {
    let (queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    let (worker, jobs) = claimed(&s, "bare", 2).await;
    let done = outcomes(&jobs, "done");
    // A crash before the commit is a transaction that never was.
    let dies = queue.session().await;
    dies.run("begin").await;
    dies.settle(worker.id, &done).await;
    dies.run("rollback").await;
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 2);
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.burial").await), (0, 0));
    assert_eq!(said(&s.settle(worker.id, &done).await), [("applied", Some("done")); 2]);
    pass(&s, 11.0).await;
    dies.run("begin; update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    assert_eq!(dies.count("posthouse.payload").await, 0);
    dies.run("rollback").await;
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.payload").await), (2, 2));
    sweep(&s).await;
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.payload").await), (0, 0));
}

/// A settle whose transaction stays open while a later one is swept. The answer: payloads left at the end.
async fn late_settle(look_at_open_transactions: bool) -> i64 {
    let (queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    s.cripple("forget", "interval '10 minutes'", "interval '0'").await;
    if !look_at_open_transactions {
        s.cripple("oldest_writer", "k.pid is distinct from pg_backend_pid()", "false").await;
    }
    let (worker, jobs) = claimed(&s, "bare", 3).await;
    let late = queue.session().await;
    late.run("begin").await;
    late.settle(worker.id, &outcomes(&jobs[..1], "done")).await;
    s.settle(worker.id, &outcomes(&jobs[1..], "done")).await;
    sweep(&s).await;
    assert_eq!(s.list::<i64>("select id from posthouse.payload").await, [jobs[0].id]);
    late.run("commit").await;
    sweep(&s).await;
    s.count("posthouse.payload").await
}

#[tokio::test]
async fn a_settle_that_commits_late_is_swept_too() {
    assert_eq!(late_settle(true).await, 0);
    // Without the look at open transactions the floor passes it.
    assert_eq!(late_settle(false).await, 1);
}

#[tokio::test]
async fn it_is_swept_in_bounded_pieces_oldest_first() {
    let (_queue, s) = Queue::with_session().await;
    set(&s, "bare", "'0'").await;
    let (worker, jobs) = claimed(&s, "bare", 12).await;
    for pair in jobs.chunks(2) {
        s.settle(worker.id, &outcomes(pair, "done")).await;
    }
    pass(&s, 11.0).await;
    let forget = async || s.get::<i32>("select posthouse.forget(5)").await;
    assert_eq!(forget().await, 6, "five, or a settle more");
    assert_eq!(s.list::<i64>("select id from posthouse.payload order by id").await, ids(&jobs[6..]));
    assert_eq!((forget().await, forget().await), (6, 0));
    assert_eq!(s.count("posthouse.payload").await, 0);
}

#[tokio::test]
async fn who_waits_gets_the_result() {
    let (queue, s) = Queue::with_session().await;
    let posthouse = Posthouse::connect(queue.url()).await.unwrap();
    posthouse.set_retention("bare", Some(Duration::ZERO)).await.unwrap();
    let settings = posthouse.queues().await.unwrap();
    assert_eq!((settings.len(), &*settings[0].queue, settings[0].retention_ms), (1, "bare", Some(0)));
    let id = s.enqueue("kind => 'k', queue => 'bare'").await;
    let waiting = tokio::spawn({
        let posthouse = posthouse.clone();
        async move { posthouse.wait(id, Duration::from_millis(10)).await }
    });
    let worker = RustWorker::builder(&posthouse)
        .queues(["bare"])
        .until_empty(true)
        .handle_kind("k", |_, _| async { Ok::<_, std::io::Error>(Outcome::done(&json!({"answer": 42}))) });
    worker.run_until(std::future::pending()).await.unwrap();
    let job = waiting.await.unwrap().unwrap();
    assert_eq!(job.result_as::<Value>().unwrap(), json!({"answer": 42}));
    assert_eq!(s.count("posthouse.tombstone").await, 1);
    let listed = posthouse.jobs(&Default::default(), 10).await.unwrap();
    assert_eq!((listed.len(), listed[0].id, &*listed[0].state), (1, id, "done"));
    posthouse.set_retention("bare", None).await.unwrap();
    assert_eq!(posthouse.queues().await.unwrap()[0].retention_ms, None);
}

#[tokio::test]
async fn what_is_no_retention_is_refused() {
    let (_queue, s) = Queue::with_session().await;
    for arguments in ["'-1 second'", "'1 millisecond'", "'0', 'failed'", "'-1 day', 'cancelled'"] {
        let refusal = s.refused(&format!("select posthouse.set_queue('q', {arguments})")).await;
        assert_eq!(refusal.code, "PH001");
        assert!(refusal.message.starts_with("retention: "), "{}", refusal.message);
        assert_eq!(refusal.message.contains("or zero"), !arguments.contains("failed"), "{}", refusal.message);
    }
    for outcome in ["'queued'", "null"] {
        let refusal = s.refused(&format!("select posthouse.set_queue('q', '1 day', {outcome})")).await;
        assert!(refusal.code == "PH001" && refusal.message.starts_with("outcome: "), "{}", refusal.message);
    }
    for queue in ["''", "null", "repeat('x', 201)", "E'a\\nb'"] {
        let refusal = s.refused(&format!("select posthouse.set_queue({queue}, '0')")).await;
        assert_eq!((&*refusal.code, refusal.message.starts_with("queue: ")), ("PH001", true), "{}", refusal.message);
    }
    assert_eq!(s.count("posthouse.queue").await, 0);
}

#[tokio::test]
async fn what_somebody_brings_back_keeps_nothing_else_from_being_forgotten() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    set(&s, "bare", "'0'").await;
    let (worker, jobs) = claimed(&s, "bare", 3).await;
    let done = json!([outcome(&jobs[0], "cancelled"), outcome(&jobs[1], "done"), outcome(&jobs[2], "done")]);
    assert_eq!(said(&s.settle(worker.id, &done).await)[0], ("applied", Some("cancelled")));
    pass(&s, 11.0).await;
    other.run(&format!("begin; select posthouse.retry({})", jobs[0].id)).await;
    s.run("set lock_timeout = '2s'; select posthouse.forget()").await;
    let left = async || s.list::<i64>("select id from posthouse.tombstone").await;
    assert_eq!(left().await, [jobs[0].id]);
    other.run("rollback").await;
    pass(&s, 11.0).await;
    s.run("select posthouse.forget()").await;
    assert_eq!((left().await, s.count("posthouse.payload").await), (vec![], 0));
}
