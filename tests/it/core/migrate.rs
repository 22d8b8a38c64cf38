//! A rolling deploy: workers of this version and of the next one on the schema of the next, while jobs come and go. The next version
//! is made up: its tables have columns more, and its functions take an argument more. (How a schema is changed while the queue is at
//! work is tested beside `src/store/apply.rs`.)

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use posthouse::store::{Database, schema_status};
use posthouse::{NewJob, Outcome, Posthouse};

use super::support::{Queue, Session, ids, refusal};
use crate::harness::{SOON, wait_until};
use crate::worker_support::{Background, worker_at};

/// What workers and enqueuers call.
const CALLED: [&str; 7] =
    ["register_worker", "claim", "settle", "heartbeat", "enqueue", "enqueue_many", "retire_worker"];

/// The statements that make the next version of the schema.
async fn next_version(s: &Session) -> String {
    let mut sql = String::from("begin; set local lock_timeout = '50ms';");
    for table in ["job", "archive", "worker", "lane", "queue"] {
        sql += &format!("alter table posthouse.{table} add column from_next text;");
    }
    for function in CALLED {
        let signature: String =
            s.get(&format!("select oid::regprocedure::text from pg_proc where proname = '{function}' and pronamespace = 'posthouse'::regnamespace")).await;
        let definition: String = s.get(&format!("select pg_get_functiondef('{signature}'::regprocedure)")).await;
        let end = definition.find(")\n RETURNS").expect("its arguments end");
        sql += &format!("drop function {signature};");
        sql += &format!("{}, from_next text default null{};", &definition[..end], &definition[end..]);
    }
    sql += "create function posthouse.from_next() returns int language sql set search_path = pg_catalog, pg_temp as 'select 1';
            insert into posthouse.migration (version, name, breaking) select max(version) + 1, 'next', false from posthouse.migration;
            update posthouse.meta set value = 'next' where name = 'functions'; commit";
    sql
}

/// Enqueues one and two jobs in turn until it is told to stop; the answer is how many.
async fn send(client: Posthouse, stop: Arc<AtomicBool>) -> i64 {
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        let job = || NewJob::new("k", &sent).unwrap();
        client.enqueue_job(job()).await.unwrap();
        client.enqueue_many(&[job(), job()]).await.unwrap();
        sent += 3;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_of_two_versions_share_a_queue_through_a_deploy() {
    let (queue, s) = Queue::with_session().await;
    let client = Posthouse::connect(queue.url()).await.unwrap();
    let older = || worker_at(queue.url()).handle_kind("k", async |_, _| Outcome::done(&"older")).concurrency(4);
    let worker = Background::start(older());
    let stop = Arc::new(AtomicBool::new(false));
    let sending = tokio::spawn(send(client, stop.clone()));
    let done = async || s.count("posthouse.archive where result = '\"older\"'").await;
    wait_until(SOON, "the older worker works", async || done().await > 20).await;
    // As a migration does it: for a moment at a time.
    let next = next_version(&s).await;
    wait_until(SOON, "the next version is there", async || {
        let tried = s.client.batch_execute(&next).await.map_err(|error| refusal(&error).code);
        assert!(matches!(tried.as_ref().err().map(String::as_str), None | Some("55P03" | "40P01")), "{tried:?}");
        if tried.is_err() {
            s.run("rollback").await;
        }
        tried.is_ok()
    })
    .await;

    // The older one goes on, and so does one that starts now; the newer one calls with what only it knows.
    let so_far = done().await;
    let second = Background::start(older());
    wait_until(SOON, "the older ones go on", async || done().await > so_far + 50).await;
    let newer: uuid::Uuid = uuid::Uuid::new_v4();
    s.run(&format!("select posthouse.register_worker('{newer}', '{{default}}', '{{k}}', 10, 600000, '{{\"host\": \"box\", \"pid\": 7}}', from_next => 'x')"))
        .await;
    let mut seq = 0;
    wait_until(SOON, "the newer one gets jobs too", async || {
        seq += 1;
        let claimed: Vec<(i64, i64)> = s
            .rows(&format!("select id, fence from posthouse.claim('{newer}', {seq}, 5, from_next => 'x')"))
            .await
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect();
        for (id, fence) in &claimed {
            let settle = format!(
                "select verdict from posthouse.settle('{newer}', '[{{\"id\": {id}, \"fence\": {fence}, \"outcome\": \"done\", \"result\": \"newer\"}}]', from_next => 'x')"
            );
            assert_eq!(s.get::<String>(&settle).await, "applied");
        }
        seq > 5 && s.count("posthouse.archive where result = '\"newer\"'").await > 10
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    let sent = sending.await.unwrap();
    wait_until(SOON, "all jobs are done", async || s.count("posthouse.archive where state = 'done'").await == sent)
        .await;
    assert_eq!(s.count("posthouse.job").await + s.count("posthouse.dead_letter").await, 0);
    assert_eq!(s.count("posthouse.archive where errors is not null or attempt <> 1").await, 0, "an attempt was lost");
    for worker in [worker, second] {
        assert!(!worker.said("lost"), "{:#?}", worker.lines());
        worker.end().await;
    }
    // It may migrate again, which changes nothing, and knows that the schema is newer.
    assert!(posthouse::store::migrate(&Database::new(queue.url()).unwrap()).await.unwrap().is_empty());
    assert_eq!(s.get::<i32>("select posthouse.from_next()").await, 1);
    let status = schema_status(&Database::new(queue.url()).unwrap()).await.unwrap();
    assert!(status.version == status.known + 1 && !status.functions_current && status.check().is_ok(), "{status:?}");
    let worker = s.worker(&["k"]).await;
    let id = s.enqueue("'k'").await;
    assert_eq!(ids(&worker.claim(&s, 1).await), [id]);
}
