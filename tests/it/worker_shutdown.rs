//! The end of a worker: jobs that finish in time, jobs that do not, signals, impatience.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use posthouse::context::CancelReason;
use posthouse::worker::Event;
use posthouse::{Context, JobError, NewJob};
use tokio::sync::Semaphore;

use crate::harness::{FaultProxy, Program, SOON, wait_until};
use crate::worker_support::{Background, Log, database, enqueue, job_in, queue_at, waits_for, worker_at};

#[tokio::test]
async fn jobs_get_the_grace_period_and_go_back_uncharged_after_it() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 5).await;
    let grace = Duration::from_secs(2);
    let worker = Background::start(waits_for(worker_at(database.url()).grace(grace), &log, &gate));
    log.wait_for_open(5).await;
    worker.ask_to_end();
    let asked = Instant::now();
    // New work is not taken any more; running work may finish.
    let new = enqueue(&queue, "k", 1).await[0];
    gate.add_permits(2);
    let summary = worker.ended().await;
    assert!(asked.elapsed() >= grace && asked.elapsed() < grace + Duration::from_secs(5), "{:?}", asked.elapsed());
    assert_eq!((summary.done, summary.released, summary.unwritten), (2, 3, 0));
    assert_eq!((log.open(), log.runs_of(new)), (0, 0));
    let health = &queue.health().await.unwrap()[0];
    assert_eq!((health.due, health.later, health.running, health.done), (4, 0, 0, 2));
    for id in ids {
        let job = queue.job(id).await.unwrap().unwrap();
        assert!(job.state == "done" || job.attempt == 0, "{job:?}");
    }
    assert!(queue.workers().await.unwrap().iter().all(|worker| worker.state == "over"), "it has said goodbye");
}

#[tokio::test]
async fn an_idle_worker_ends_at_once() {
    let (database, log) = (database().await, Log::default());
    let worker = Background::start(waits_for(worker_at(database.url()), &log, &Arc::new(Semaphore::new(0))));
    worker.says("registered").await;
    let asked = Instant::now();
    worker.end().await;
    assert!(asked.elapsed() < Duration::from_secs(3), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn three_rollouts_in_a_row_cost_no_attempt_and_the_job_starts_elsewhere_at_once() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let job = NewJob::from_json("k", "{}").unwrap().max_attempts(2);
    let id = queue.enqueue_job(job).await.unwrap().id;
    // A lease so long that no rescue can be what moves the job.
    let worker = || worker_at(database.url()).lease(Duration::from_secs(600)).grace(Duration::from_millis(200));
    let mut old = Background::start(waits_for(worker(), &log, &gate));
    for rollout in 1..=3 {
        log.wait_for_open(1).await;
        let new = Background::start(waits_for(worker(), &log, &gate));
        new.says("registered").await;
        assert_eq!(old.end().await.released, 1);
        wait_until(SOON, "the job runs elsewhere", async || log.runs_of(id) == rollout + 1).await;
        old = new;
    }
    gate.add_permits(1);
    let job = job_in(&queue, id, "done").await;
    assert_eq!(job.attempt, 1);
    log.assert_no_overlap();
    old.end().await;
}

#[tokio::test]
async fn handlers_are_told_and_an_error_in_answer_to_it_is_not_charged() {
    let database = database().await;
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    let worker =
        Background::start(worker_at(database.url()).grace(SOON).handle_kind("k", |_, context: Context| async move {
            assert_eq!(context.cancelled().await, CancelReason::Shutdown);
            Err::<(), _>(JobError::new("interrupted", "checkpoint written"))
        }));
    worker.says("started").await;
    assert_eq!(worker.end().await.released, 1);
    let job = queue.job(id).await.unwrap().unwrap();
    assert_eq!((job.state.as_str(), job.attempt, job.error), ("queued", 0, None));
}

#[tokio::test]
async fn a_worker_that_is_dropped_leaves_nothing_behind() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    let worker = Background::start(waits_for(worker_at(database.url()).lease(Duration::from_secs(600)), &log, &gate));
    log.wait_for_open(1).await;
    worker.drop_it();
    log.wait_for_open(0).await;
    assert_eq!(job_in(&queue, id, "queued").await.attempt, 0);
    let look = database.connect().await;
    wait_until(SOON, "its connections are closed", async || {
        let sessions = "select count(*) from pg_stat_activity where datname = current_database()
            and application_name ~ '^posthouse/(claim|settle|heartbeat|listen|sweep)$'";
        look.query_one(sessions, &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
}

#[tokio::test]
async fn it_ends_in_time_though_postgres_is_away() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    enqueue(&queue, "k", 3).await;
    let worker = worker_at(&proxy.url(database.url())).grace(Duration::from_secs(1)).lease(Duration::from_secs(60));
    let worker = Background::start(waits_for(worker, &log, &gate));
    log.wait_for_open(3).await;
    proxy.stall();
    gate.add_permits(2);
    log.wait_for_open(1).await;
    worker.ask_to_end();
    let asked = Instant::now();
    let summary = worker.ended().await;
    assert!(asked.elapsed() < Duration::from_secs(8), "{:?}", asked.elapsed());
    assert_eq!((summary.done, summary.unwritten), (0, 3));
}

/// Set in a child process: the database it works on.
const CHILD: &str = "POSTHOUSE_TEST_WORKER_URL";

/// Runs the named test of this program as a process of its own, which becomes a worker.
fn child(test: &str, url: &str) -> Program {
    let mut command = Command::new(std::env::current_exe().unwrap());
    Program::start(command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(CHILD, url))
}

/// What the child does: a worker as the binary would run it, with handlers that never end.
async fn work_as_child(lease: Duration) -> bool {
    let Ok(url) = std::env::var(CHILD) else { return false };
    let worker =
        worker_at(&url).lease(lease).grace(Duration::from_secs(1)).on_event(|event: &Event<'_>| println!("{event}"));
    worker.handle_kind("k", |_, _| std::future::pending::<()>()).run().await.unwrap();
    println!("ended in good order");
    true
}

#[tokio::test]
async fn a_first_signal_ends_it_in_good_order() {
    if work_as_child(Duration::from_secs(600)).await {
        return;
    }
    let database = database().await;
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    let mut worker = child("worker_shutdown::a_first_signal_ends_it_in_good_order", database.url());
    worker.printed(&format!("job {id} started"), SOON).await;
    worker.terminate();
    let status = worker.ended(SOON).await;
    assert_eq!(status.code(), Some(0), "{}", worker.output());
    assert!(worker.output().contains("ended in good order"), "{}", worker.output());
    assert_eq!(job_in(&queue, id, "queued").await.attempt, 0);
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    if let Ok(url) = std::env::var(CHILD) {
        // Blocks the runtime's only thread: nothing but the thread for signals can act.
        let block = |_, _| async { std::thread::sleep(SOON * 2) };
        worker_at(&url).on_event(|event: &Event<'_>| println!("{event}")).handle_kind("k", block).run().await.unwrap();
        return;
    }
    let database = database().await;
    let id = enqueue(&queue_at(database.url()), "k", 1).await[0];
    let mut worker = child("worker_shutdown::a_second_signal_ends_it_at_once", database.url());
    worker.printed(&format!("job {id} started"), SOON).await;
    // Two different ones, since two of a kind may arrive as one.
    let asked = Instant::now();
    worker.terminate();
    kill(Pid::from_raw(i32::try_from(worker.pid()).unwrap()), Signal::SIGINT).unwrap();
    let code = worker.ended(SOON).await.code();
    assert!([Some(143), Some(130)].contains(&code), "{code:?}");
    assert!(asked.elapsed() < Duration::from_secs(3));
}

#[tokio::test]
async fn a_signal_that_comes_twice_at_once_is_one() {
    if let Ok(url) = std::env::var(CHILD) {
        let told = |_, context: Context| async move {
            context.cancelled().await;
            println!("told to end");
            std::future::pending::<()>().await
        };
        let worker = worker_at(&url).grace(Duration::from_secs(1)).on_event(|event: &Event<'_>| println!("{event}"));
        worker.handle_kind("k", told).run().await.unwrap();
        println!("ended in good order");
        return;
    }
    let database = database().await;
    let queue = queue_at(database.url());
    // As `timeout` does, which signals its child and then the whole group. On a busy machine the second may come too late to
    // be an echo; then try again.
    let in_time = Duration::from_millis(200);
    loop {
        let id = enqueue(&queue, "k", 1).await[0];
        let mut worker = child("worker_shutdown::a_signal_that_comes_twice_at_once_is_one", database.url());
        worker.printed(&format!("job {id} started"), SOON).await;
        let asked = Instant::now();
        worker.terminate();
        worker.printed("told to end", SOON).await;
        worker.terminate();
        let took = asked.elapsed();
        let status = worker.ended(SOON).await;
        if took < in_time {
            assert_eq!(status.code(), Some(0), "{}", worker.output());
            assert!(worker.output().contains("ended in good order"), "{}", worker.output());
            assert_eq!(job_in(&queue, id, "queued").await.attempt, 0);
            return;
        }
    }
}

#[tokio::test]
async fn a_worker_stopped_past_its_lease_does_not_go_on_as_if_nothing_had_happened() {
    const LEASE: Duration = Duration::from_secs(2);
    if let Ok(url) = std::env::var(CHILD) {
        let worker = worker_at(&url).lease(LEASE).on_event(|event: &Event<'_>| println!("{event}"));
        let steps = |_, _| async {
            loop {
                println!("a step");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            #[allow(unreachable_code)]
            ()
        };
        worker.handle_kind("k", steps).run().await.unwrap();
        return;
    }
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    let stopped = child(
        "worker_shutdown::a_worker_stopped_past_its_lease_does_not_go_on_as_if_nothing_had_happened",
        database.url(),
    );
    stopped.printed("a step", SOON).await;
    stopped.pause();
    let steps = || stopped.output().matches("a step").count();
    let other = Background::start(waits_for(worker_at(database.url()).lease(LEASE), &log, &gate));
    log.wait_for_open(1).await;
    let before = steps();
    stopped.resume();
    stopped.printed("lost its lease", SOON).await;
    assert_eq!(steps(), before, "not one step more:\n{}", stopped.output());
    gate.add_permits(1);
    let job = job_in(&queue, id, "done").await;
    assert_eq!((job.attempt, log.runs_of(id)), (2, 1));
    other.end().await;
}
