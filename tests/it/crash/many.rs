//! Many processes on one queue.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use posthouse::NewJob;
use posthouse::store::{Database, Registration};
use uuid::Uuid;

use super::support::{Journal, LATER, all_final, assert_one_record_each, became_worker, child};
use crate::client::queue_database;
use crate::harness::{Program, SOON, wait_until};
use crate::worker_support::{enqueue, job_in, queue_at};

const LEASE: Duration = Duration::from_millis(1_500);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_processes_share_twenty_thousand_jobs_on_five_connections_each() {
    const PROCESSES: i64 = 8;
    if became_worker(|builder| builder.concurrency(100), |_| async {}).await {
        return;
    }
    let test = "crash::many::eight_processes_share_twenty_thousand_jobs_on_five_connections_each";
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let mut workers: Vec<Program> = (0..PROCESSES).map(|_| child(test, database.url(), &journal)).collect();
    for worker in &workers {
        worker.printed("registered", SOON).await;
    }
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.extend(enqueue(&queue, "k", 5_000).await);
    }
    let client = database.connect().await;
    // Each process has one session of each name; the client of this test has others.
    let sessions = "select application_name, count(*) from pg_stat_activity where datname = current_database()
        and application_name ~ '^posthouse/' and application_name !~ '^posthouse/(client|enqueue)' group by 1";
    wait_until(LATER, "no live job is left", async || {
        let counted = client.query(sessions, &[]).await.unwrap();
        let counted: HashMap<&str, i64> = counted.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert!(counted.values().all(|count| *count <= PROCESSES), "{counted:?}");
        assert!(counted.values().sum::<i64>() <= 5 * PROCESSES, "{counted:?}");
        client.query_one("select count(*) from posthouse.job", &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    for worker in &mut workers {
        worker.terminate();
        assert_eq!(worker.ended(SOON).await.code(), Some(0), "{}", worker.output());
        assert!(worker.output().contains("lost: 0, unwritten: 0"), "{}", worker.output());
        assert!(journal.noted("start", None).iter().any(|note| note.worker == worker.pid()), "it got nothing to do");
    }
    journal.assert_each_ran_once(&ids);
    assert_one_record_each(&database, &ids).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_orphans_are_shared_and_do_not_hold_up_new_work() {
    const ORPHANS: usize = 10_000;
    if became_worker(|builder| builder.concurrency(100).lease(LEASE), |_| async {}).await {
        return;
    }
    let test = "crash::many::ten_thousand_orphans_are_shared_and_do_not_hold_up_new_work";
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let mut ids = Vec::new();
    for _ in 0..2 {
        ids.extend(enqueue(&queue, "k", ORPHANS / 2).await);
    }
    // A worker that claims all of them and is never heard of again.
    let store = Database::new(database.url()).unwrap().store("dead");
    let dead = Uuid::new_v4();
    let registration = Registration {
        worker: dead,
        lease: LEASE,
        queues: vec!["default".to_owned()],
        kinds: vec!["k".to_owned()],
        slots: 10_000,
        host: "nowhere".to_owned(),
        pid: 1,
        version: "0".to_owned(),
    };
    store.register_worker(&registration).await.unwrap();
    for seq in 1..=20 {
        assert_eq!(store.claim(dead, seq, 500, 0).await.unwrap().len(), 500);
    }
    let mut workers: Vec<Program> = (0..3).map(|_| child(test, database.url(), &journal)).collect();
    let first = "select count(*) from posthouse.job where state = 'queued' or attempt > 1";
    let client = database.connect().await;
    wait_until(LATER, "the rescue has begun", async || {
        client.query_one(first, &[]).await.unwrap().get::<_, i64>(0) > 0
    })
    .await;
    let asked = Instant::now();
    let new = NewJob::from_json("k", "{}").unwrap().priority(-1);
    let new = queue.enqueue_job(new).await.unwrap().id;
    job_in(&queue, new, "done").await;
    assert!(asked.elapsed() < Duration::from_secs(10), "new work started after {:?}", asked.elapsed());
    all_final(&database).await;
    for worker in &mut workers {
        worker.terminate();
        assert_eq!(worker.ended(SOON).await.code(), Some(0), "{}", worker.output());
        let ran = journal.noted("start", None).iter().filter(|note| note.worker == worker.pid()).count();
        assert!(ran > ORPHANS / 20, "one of three ran {ran} of {ORPHANS}");
    }
    ids.push(new);
    journal.assert_each_ran_once(&ids);
    assert_one_record_each(&database, &ids).await;
}
