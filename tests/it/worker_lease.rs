//! The lease: jobs longer than it, runtimes that stand still, wires that are cut, servers that go away.

use std::sync::Arc;
use std::time::{Duration, Instant};

use posthouse::context::CancelReason;
use posthouse::store::Database;
use posthouse::testing::{TestCluster, TestDatabase};
use posthouse::{Context, Outcome, Posthouse};
use tokio::sync::Semaphore;

use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::{
    Background, Log, database, database_on, enqueue, job_in, queue_at, registered, stays, waits_for, worker_at,
};

const LEASE: Duration = Duration::from_secs(2);

/// By then the sweep of a worker would have rescued the jobs of a worker that fell silent at the beginning, and then some.
const LONGER_THAN_A_RESCUE: Duration = Duration::from_secs(2 * LEASE.as_secs() + 2);

async fn count(database: &TestDatabase, sql: &str) -> i64 {
    database.connect().await.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_job_may_be_longer_than_many_leases() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    let workers = [0, 1].map(|_| Background::start(waits_for(worker_at(database.url()).lease(LEASE), &log, &gate)));
    log.wait_for_open(1).await;
    stays(LONGER_THAN_A_RESCUE, "one handler runs", async || (log.open(), log.runs_of(id)) == (1, 1)).await;
    gate.add_permits(1);
    assert_eq!(job_in(&queue, id, "done").await.attempt, 1);
    assert_eq!(log.runs_of(id), 1);
    for worker in workers {
        assert_eq!(worker.end().await.lost, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_stands_still_loses_no_lease() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    // A runtime of its own, whose only thread the handler blocks.
    let (runs, url) = (log.clone(), database.url().to_owned());
    let blocked = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let worker = worker_at(&url).lease(LEASE).until_empty(true).handle_kind("k", move |_, context: Context| {
            let run = runs.begin(context.job_id());
            async move {
                let _run = run;
                std::thread::sleep(LEASE * 3);
                Outcome::done(&"the answer")
            }
        });
        runtime.block_on(worker.run_until(std::future::pending())).unwrap()
    });
    log.wait_for_open(1).await;
    let other =
        Background::start(waits_for(worker_at(database.url()).lease(LEASE), &log, &Arc::new(Semaphore::new(9))));
    let job = job_in(&queue, id, "done").await;
    assert_eq!((job.attempt, log.runs_of(id)), (1, 1));
    let summary = tokio::task::spawn_blocking(move || blocked.join().unwrap()).await.unwrap();
    assert_eq!((summary.done, summary.lost), (1, 0));
    other.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_runtime_that_stands_still_drains_its_notifications() {
    let (database, log) = (database().await, Log::default());
    enqueue(&queue_at(database.url()), "k", 1).await;
    let (go_on, blocked) = std::sync::mpsc::channel::<()>();
    let (runs, url, blocked) = (log.clone(), database.url().to_owned(), Arc::new(std::sync::Mutex::new(blocked)));
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let worker = worker_at(&url).until_empty(true).handle_kind("k", move |_, context: Context| {
            let (run, blocked) = (runs.begin(context.job_id()), blocked.clone());
            async move {
                let _run = run;
                blocked.lock().unwrap().recv().ok();
            }
        });
        runtime.block_on(worker.run_until(std::future::pending())).unwrap()
    });
    log.wait_for_open(1).await;
    let admin = database.connect().await;
    // More than the buffers of a socket hold.
    let said = "select pg_notify('posthouse_wake', n || repeat('x', 2000)) from generate_series(1, 20000) n";
    admin.batch_execute(said).await.unwrap();
    let stuck = "select count(*) from pg_stat_activity where datname = current_database()
        and application_name = 'posthouse/listen' and (wait_event is distinct from 'ClientRead' or backend_xmin is not null)";
    let look = database.connect().await;
    let stuck = async || look.query_one(stuck, &[]).await.unwrap().get::<_, i64>(0) > 0;
    let mut free_since = Instant::now();
    wait_until(SOON, "the listener is free for a second", async || {
        if stuck().await {
            free_since = Instant::now();
        }
        free_since.elapsed() > Duration::from_secs(1)
    })
    .await;
    assert_eq!(log.open(), 1, "the handler blocks all the time");
    go_on.send(()).unwrap();
    assert_eq!(tokio::task::spawn_blocking(move || worker.join().unwrap()).await.unwrap().done, 1);
}

#[tokio::test]
async fn behind_a_cut_wire_the_handler_stops_before_another_starts() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let id = enqueue(&queue, "k", 1).await[0];
    let cut_off = Background::start(waits_for(worker_at(&proxy.url(database.url())).lease(LEASE), &log, &gate));
    log.wait_for_open(1).await;
    let began = Instant::now();
    proxy.stall();
    log.wait_for_open(0).await;
    assert!(began.elapsed() < LEASE + Duration::from_secs(1), "stopped after {:?}", began.elapsed());
    let other = Background::start(waits_for(worker_at(database.url()).lease(LEASE), &log, &gate));
    wait_until(SOON, "the other worker runs it", async || log.runs_of(id) == 2).await;
    proxy.heal();
    cut_off.says("lost its lease").await;
    gate.add_permits(1);
    let job = job_in(&queue, id, "done").await;
    assert_eq!(job.attempt, 2, "the lost attempt counts");
    assert!(job.errors.unwrap()[0].to_string().contains("worker_lost"));
    log.assert_no_overlap();
    // Healed, it serves again under a new id.
    gate.add_permits(1);
    other.end().await;
    let next = enqueue(&queue, "k", 1).await[0];
    job_in(&queue, next, "done").await;
    let summary = cut_off.end().await;
    assert_eq!((summary.lost, summary.done), (1, 1));
}

#[tokio::test]
async fn an_outcome_that_comes_too_late_changes_nothing() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let id = enqueue(&queue, "k", 1).await[0];
    // The first handler blocks its thread over the end of its lease, and then returns something.
    let (runs, url) = (log.clone(), proxy.url(database.url()));
    let late = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let worker = worker_at(&url).lease(LEASE).handle_kind("k", move |_, context: Context| {
            let run = runs.begin(context.job_id());
            async move {
                let _run = run;
                std::thread::sleep(LEASE * 4);
                Outcome::done(&"late")
            }
        });
        runtime.block_on(async { worker.run_until(tokio::time::sleep(LEASE * 5)).await.unwrap() })
    });
    log.wait_for_open(1).await;
    proxy.stall();
    let gate = Arc::new(Semaphore::new(1));
    let other = Background::start(waits_for(worker_at(database.url()).lease(LEASE), &log, &gate));
    let job = job_in(&queue, id, "done").await;
    assert_eq!((job.result.unwrap().get(), job.attempt), (r#""the answer""#, 2));
    proxy.heal();
    let summary = tokio::task::spawn_blocking(move || late.join().unwrap()).await.unwrap();
    assert_eq!((summary.done, summary.lost), (0, 1));
    let job = queue.job(id).await.unwrap().unwrap();
    assert_eq!((job.result.unwrap().get(), job.attempt), (r#""the answer""#, 2));
    other.end().await;
}

#[tokio::test]
async fn a_server_that_is_down_for_longer_than_a_lease_costs_no_second_run() {
    let cluster = tokio::task::spawn_blocking(|| Arc::new(TestCluster::dedicated(&[]))).await.unwrap();
    let (database, log, gate) = (database_on(&cluster).await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 40).await;
    let workers = [0, 1]
        .map(|_| Background::start(waits_for(worker_at(database.url()).concurrency(20).lease(LEASE), &log, &gate)));
    log.wait_for_open(40).await;
    cluster.server().kill_immediate();
    // Half of them finish while nobody can take the answer.
    gate.add_permits(20);
    log.wait_for_open(20).await;
    for worker in &workers {
        worker.says("connection to Postgres lost").await;
    }
    // Nobody can take the work, so nothing is stopped.
    stays(LONGER_THAN_A_RESCUE, "twenty handlers run", async || log.open() == 20).await;
    let server = cluster.clone();
    tokio::task::spawn_blocking(move || server.server().restart().unwrap()).await.unwrap();
    for worker in &workers {
        worker.says("connection to Postgres restored").await;
    }
    stays(LONGER_THAN_A_RESCUE, "each job has run once", async || log.runs().len() == 40).await;
    gate.add_permits(20);
    for id in ids {
        assert_eq!(job_in(&queue, id, "done").await.attempt, 1);
        assert_eq!(log.runs_of(id), 1);
    }
    for worker in workers {
        assert!(!worker.said("lost its lease"), "{:#?}", worker.lines());
        assert_eq!(worker.end().await.done, 20);
    }
}

#[tokio::test]
async fn a_server_that_is_read_only_for_longer_than_a_lease_costs_no_second_run() {
    let cluster = tokio::task::spawn_blocking(|| TestCluster::dedicated(&[])).await.unwrap();
    let (database, log, gate) = (database_on(&cluster).await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 4).await;
    let worker = Background::start(waits_for(worker_at(database.url()).lease(LEASE), &log, &gate));
    log.wait_for_open(4).await;
    let admin = database.connect().await;
    let read_only = async |on: &str| {
        admin.batch_execute(&format!("alter system set default_transaction_read_only = {on}")).await.unwrap();
        admin.batch_execute("select pg_reload_conf()").await.unwrap();
    };
    read_only("on").await;
    worker.says("connection to Postgres lost").await;
    gate.add_permits(2);
    log.wait_for_open(2).await;
    stays(LONGER_THAN_A_RESCUE, "two handlers run", async || log.open() == 2).await;
    admin.batch_execute("set default_transaction_read_only = off").await.unwrap();
    read_only("off").await;
    gate.add_permits(2);
    // Postgres did not start anew, so by its clock the lease is over and the jobs may be given to the worker's next
    // incarnation; what was finished is offered first.
    for id in &ids {
        job_in(&queue, *id, "done").await;
    }
    log.assert_no_overlap();
    worker.end().await;
}

#[tokio::test]
async fn a_rescue_that_is_cut_short_is_finished_later() {
    const JOBS: usize = 250;
    let cluster = tokio::task::spawn_blocking(|| Arc::new(TestCluster::dedicated(&[]))).await.unwrap();
    let (database, log, gate) = (database_on(&cluster).await, Log::default(), Arc::new(Semaphore::new(JOBS)));
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", JOBS).await;
    let store = Database::new(database.url()).unwrap().store("test");
    let silent = registered(&store, LEASE, &["k"]).await;
    let mut taken = 0;
    for seq in 1.. {
        taken += store.claim(silent, seq, 50, 0).await.unwrap().len();
        if taken == JOBS {
            break;
        }
    }
    // Slow enough to be caught in the middle.
    let slow = "create function public.slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.01); return new; end $$;
        create trigger slow before update on posthouse.job for each row
        when (old.state = 'running' and new.state = 'queued') execute function public.slow()";
    database.connect().await.batch_execute(slow).await.unwrap();
    let worker = Background::start(waits_for(worker_at(database.url()).lease(LEASE).concurrency(300), &log, &gate));
    let rescuing =
        "select count(*) from pg_stat_activity where application_name = 'posthouse/sweep' and state = 'active'
        and query like '%rescue%' and query_start < clock_timestamp() - interval '200 milliseconds'";
    wait_until(SOON, "the rescue is in the middle", async || count(&database, rescuing).await == 1).await;
    cluster.server().kill_immediate();
    let server = cluster.clone();
    tokio::task::spawn_blocking(move || server.server().restart().unwrap()).await.unwrap();
    for id in &ids {
        assert_eq!(job_in(&queue, *id, "done").await.attempt, 2, "lost once");
    }
    assert!(ids.iter().all(|id| log.runs_of(*id) == 1));
    assert_eq!(worker.end().await.done, JOBS as u64);
}

#[tokio::test]
async fn a_hundred_claims_whose_answers_are_lost_cost_no_attempt() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(1_000)));
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let worker = worker_at(&proxy.url(database.url()))
        .concurrency(10)
        .lease(Duration::from_secs(30))
        .poll(Duration::from_secs(60));
    let worker = Background::start(waits_for(worker, &log, &gate));
    worker.says("registered").await;
    for n in 0..100 {
        proxy.lose_answer_to("posthouse.claim(");
        let id = enqueue(&queue, "k", 1).await[0];
        assert_eq!(job_in(&queue, id, "done").await.attempt, 1);
        assert_eq!(log.runs_of(id), 1);
        assert_eq!(proxy.cuts(), n + 1, "the answer was not lost");
    }
    assert_eq!(worker.end().await.done, 100);
    assert_eq!(count(&database, "select count(*) from posthouse.jobs where state <> 'done'").await, 0);
}

#[tokio::test]
async fn settles_whose_answers_are_lost_are_repeated_and_counted_once() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(1_000)));
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let worker =
        Background::start(waits_for(worker_at(&proxy.url(database.url())).lease(Duration::from_secs(30)), &log, &gate));
    for n in 0..20 {
        proxy.lose_answer_to("posthouse.settle");
        for id in enqueue(&queue, "k", 3).await {
            job_in(&queue, id, "done").await;
            assert_eq!(log.runs_of(id), 1);
        }
        wait_until(SOON, &format!("answer {n} is lost"), async || proxy.cuts() == n + 1).await;
    }
    wait_until(SOON, "the worker knows it", async || {
        worker.lines().iter().filter(|l| l.ends_with(" done")).count() == 60
    })
    .await;
    let summary = worker.end().await;
    assert_eq!((summary.done, summary.lost), (60, 0));
}

#[tokio::test]
async fn the_heartbeat_finds_out_which_jobs_are_lost() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 2).await;
    let (runs, pass) = (log.clone(), gate.clone());
    let worker = worker_at(database.url()).lease(LEASE).handle_kind("k", move |_, context: Context| {
        let (run, pass) = (runs.begin(context.job_id()), pass.clone());
        async move {
            let _run = run;
            let _watch = tokio::spawn(async move {
                assert_eq!(context.cancelled().await, CancelReason::LostLease);
                pass.add_permits(1);
            });
            std::future::pending::<()>().await;
        }
    });
    let worker = Background::start(worker);
    log.wait_for_open(2).await;
    // As after a failover that lost the claim.
    let admin = database.connect().await;
    admin
        .execute(
            "update posthouse.job set state = 'queued', worker = null, run_at = 'infinity' where id = $1",
            &[&ids[0]],
        )
        .await
        .unwrap();
    worker.says(&format!("job {} lost", ids[0])).await;
    assert_eq!(log.open(), 1, "the other goes on");
    drop(tokio::time::timeout(SOON, gate.acquire()).await.expect("a spawned task is told, too"));
    worker.drop_it();
}

#[tokio::test]
async fn no_connection_waits_in_a_transaction_while_handlers_run() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
    let admin = database.connect().await;
    // At any default isolation level.
    let name: String = admin.query_one("select current_database()", &[]).await.unwrap().get(0);
    admin
        .batch_execute(&format!("alter database {name} set default_transaction_isolation = 'serializable'"))
        .await
        .unwrap();
    let queue = queue_at(database.url());
    enqueue(&queue, "k", 10).await;
    let worker = Background::start(waits_for(worker_at(database.url()), &log, &gate));
    log.wait_for_open(10).await;
    wait_until(SOON, "all sessions are idle", async || {
        count(&database, "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'").await == 0
    })
    .await;
    gate.add_permits(10);
    wait_until(SOON, "all are done", async || all_done(&queue).await == 10).await;
    let summary = worker.end().await;
    assert_eq!((summary.done, summary.retried, summary.failed), (10, 0, 0));
}

async fn all_done(queue: &Posthouse) -> i64 {
    queue.health().await.unwrap().iter().map(|queue| queue.done).sum()
}

#[tokio::test]
async fn connections_that_are_cut_again_and_again_lose_nothing() {
    let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(10_000)));
    let queue = queue_at(database.url());
    let worker = Background::start(waits_for(worker_at(database.url()).lease(Duration::from_secs(30)), &log, &gate));
    let admin = database.connect().await;
    let mut ids = Vec::new();
    for _ in 0..30 {
        ids.extend(enqueue(&queue, "k", 20).await);
        admin
            .execute(
                "select pg_terminate_backend(pid) from pg_stat_activity
                 where datname = current_database() and application_name ~ '^posthouse/(claim|settle|heartbeat|listen|sweep)$'",
                &[],
            )
            .await
            .unwrap();
    }
    wait_until(SOON * 2, "all are done", async || all_done(&queue).await == ids.len() as i64).await;
    assert!(ids.iter().all(|id| log.runs_of(*id) == 1), "each ran once");
    wait_until(SOON, "no more connections than before", async || {
        let sessions = "select count(*) from pg_stat_activity where datname = current_database()
            and application_name ~ '^posthouse/(claim|settle|heartbeat|listen|sweep)$'";
        (1..=5).contains(&count(&database, sessions).await)
    })
    .await;
    assert_eq!(worker.end().await.done, ids.len() as u64);
}
