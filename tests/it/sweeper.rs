//! A process that does nothing but sweep, and workers that know nothing of what they sweep.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use posthouse::store::{Database, SweepRecord, WorkerRecord};
use posthouse::sweep::Sweeper;
use posthouse::worker::Event;
use tokio::task::JoinHandle;

use crate::harness::{SOON, wait_until};
use crate::worker_support::{Background, database, enqueue, job_in, queue_at, registered, worker_at};

const LEASE: Duration = Duration::from_secs(1);

/// A sweeper in the background, and what it told.
fn sweeper(url: &str) -> (JoinHandle<posthouse::Result<()>>, Arc<Mutex<Vec<String>>>) {
    let told = Arc::new(Mutex::new(Vec::new()));
    let lines = told.clone();
    let sweeper = Sweeper::new(Database::new(url).unwrap())
        .on_event(move |event: &Event<'_>| lines.lock().unwrap().push(event.to_string()));
    (tokio::spawn(sweeper.run_until(std::future::pending())), told)
}

/// What the database says of a part.
async fn part(url: &str, name: &str) -> SweepRecord {
    let parts = Database::new(url).unwrap().store("test").sweeps().await.unwrap();
    parts.into_iter().find(|part| part.name == name).unwrap()
}

/// Jobs of kind `k` that a worker claimed before it died.
async fn orphans(url: &str, jobs: usize) -> Vec<i64> {
    let ids = enqueue(&queue_at(url), "k", jobs).await;
    let store = Database::new(url).unwrap().store("test");
    let dead = registered(&store, LEASE, &["k"]).await;
    assert_eq!(store.claim(dead, 1, 100, 0).await.unwrap().len(), jobs);
    ids
}

#[tokio::test]
async fn a_process_that_only_sweeps_rescues_the_jobs_of_the_dead_and_claims_nothing() {
    let database = database().await;
    let url = database.url();
    let ids = orphans(url, 3).await;
    let (task, told) = sweeper(url);
    for id in &ids {
        job_in(&queue_at(url), *id, "queued").await;
    }
    let has_told = |text: &str| told.lock().unwrap().iter().any(|line| line.contains(text));
    wait_until(SOON, "it says so", async || has_told("3 jobs of dead workers rescued") && has_told("swept")).await;
    wait_until(SOON, "it is written down", async || part(url, "rescue").await.runs > 0).await;
    let workers: Vec<WorkerRecord> = Database::new(url).unwrap().store("test").workers().await.unwrap();
    assert_eq!(workers.len(), 1, "only the dead one: {workers:?}");
    task.abort();
}

#[tokio::test]
async fn a_sweeper_ends_when_it_is_told_to() {
    let database = database().await;
    let sweeper = Sweeper::new(Database::new(database.url()).unwrap());
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(sweeper.run_until(async move { drop(ended.await) }));
    wait_until(SOON, "it sweeps", async || part(database.url(), "floors").await.runs > 0).await;
    end.send(()).unwrap();
    tokio::time::timeout(SOON, task).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_sweeper_without_a_schema_says_what_to_do() {
    let database = posthouse::testing::TestDatabase::new("", async |_: &str| Ok::<(), String>(())).await;
    let sweeper = Sweeper::new(Database::new(database.url()).unwrap());
    let error = tokio::time::timeout(SOON, sweeper.run_until(std::future::pending())).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("posthouse db migrate"), "{error}");
}

#[tokio::test]
async fn a_worker_that_knows_none_of_the_kinds_sweeps_for_all() {
    let database = database().await;
    let ids = orphans(database.url(), 5).await;
    let worker = Background::start(worker_at(database.url()).queue("far").handle_kind("other", |_, _| async {}));
    for id in &ids {
        let job = job_in(&queue_at(database.url()), *id, "queued").await;
        assert_eq!((job.attempt, job.kind.as_str()), (1, "k"));
    }
    worker.says("5 jobs of dead workers rescued").await;
    assert_eq!(worker.end().await.started, 0);
}

#[tokio::test]
async fn a_part_that_fails_is_told_and_the_others_go_on() {
    let database = database().await;
    let admin = database.connect().await;
    admin
        .batch_execute(
            "create function public.no() returns trigger language plpgsql as $$ begin raise exception 'no more tallies'; end $$;
             create trigger no before delete on posthouse.tally for each statement execute function public.no()",
        )
        .await
        .unwrap();
    let worker = Background::start(worker_at(database.url()).handle_kind("k", |_, _| async {}));
    worker.says("sweep of folds failed and comes again: no more tallies").await;
    wait_until(SOON, "the others go on", async || part(database.url(), "floors").await.runs > 1).await;
    let folds = part(database.url(), "folds").await;
    assert!(folds.failing && folds.failures > 0, "{folds:?}");
    assert_eq!(folds.error.as_deref(), Some("no more tallies"));
    admin.batch_execute("drop trigger no on posthouse.tally").await.unwrap();
    admin.batch_execute("update posthouse.sweep set ran_at = '-infinity' where name = 'folds'").await.unwrap();
    wait_until(SOON, "it is over", async || !part(database.url(), "folds").await.failing).await;
    worker.end().await;
}

#[tokio::test]
async fn a_worker_that_shall_not_sweep_does_not() {
    let database = database().await;
    let worker = Background::start(worker_at(database.url()).no_sweep().handle_kind("k", |_, _| async {}));
    let ids = enqueue(&queue_at(database.url()), "k", 1).await;
    job_in(&queue_at(database.url()), ids[0], "done").await;
    let sweeping = worker_at(database.url()).handle_kind("other", |_, _| async {});
    assert_eq!(part(database.url(), "floors").await.runs, 0);
    let sweeping = Background::start(sweeping);
    wait_until(SOON, "the other one does", async || part(database.url(), "floors").await.runs > 0).await;
    sweeping.says("swept").await;
    assert!(!worker.said("swept"), "{:?}", worker.lines());
}
