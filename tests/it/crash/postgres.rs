//! Postgres itself killed and started again: under load, for longer than a lease, in the middle of a rescue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use posthouse::NewJob;

use super::support::{
    Journal, LATER, all_final, assert_one_record_each, became_worker, child, crash, dedicated, number, restart, work,
};
use crate::harness::{Program, SOON, wait_until};
use crate::worker_support::{database_on, enqueue, job_in, queue_at};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_three_times_under_load_it_loses_nothing() {
    let cluster = dedicated(&[]).await;
    let (database, journal) = (database_on(&cluster).await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("sleep 0.1"));
    let arguments = ["--lease-ms", "2000", "--concurrency", "5", "--exec", &handler];
    let workers: Vec<Program> = (0..4).map(|_| work(database.url(), &journal, &arguments)).collect();
    // Somebody enqueues all the time, and remembers what was confirmed.
    let stop = Arc::new(AtomicBool::new(false));
    let enqueuer = tokio::spawn({
        let (queue, stop) = (queue.clone(), stop.clone());
        async move {
            let mut confirmed = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let job = NewJob::from_json("k", "{}").unwrap();
                confirmed.extend(queue.enqueue_job(job).await.ok().map(|job| job.id));
                tokio::time::sleep(Duration::from_millis(15)).await;
            }
            confirmed
        }
    });
    for crashes in 1..=3 {
        enqueue(&queue, "k", 40).await;
        journal.wait_for("start", None, 60 * crashes).await;
        crash(&cluster).await;
        restart(&cluster).await;
    }
    journal.wait_for("start", None, 200).await;
    stop.store(true, Ordering::Relaxed);
    let mut ids = enqueuer.await.unwrap();
    assert!(ids.len() >= 40, "{} confirmed", ids.len());
    all_final(&database).await;
    // Also those whose confirmation was lost.
    let all = database.connect().await.query("select id from posthouse.jobs where state = 'done'", &[]).await.unwrap();
    let all: Vec<i64> = all.iter().map(|row| row.get(0)).collect();
    ids.retain(|id| !all.contains(id));
    assert!(ids.is_empty(), "confirmed and lost: {ids:?}");
    assert_one_record_each(&database, &all).await;
    for (id, runs) in journal.runs() {
        if runs > 1 {
            let job = queue.job(id).await.unwrap().unwrap();
            let lost = job.errors.iter().flat_map(|e| e.as_array().unwrap()).filter(|e| e["class"] == "worker_lost");
            assert_eq!(lost.count() + 1, runs, "run again though no lease was lost: {job:?}");
        }
    }
    for worker in &workers {
        assert!(worker.output().contains("restored"), "{}", worker.output());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn away_for_longer_than_a_lease_it_costs_no_second_run() {
    const LEASE: Duration = Duration::from_secs(1);
    let cluster = dedicated(&[]).await;
    let (database, journal) = (database_on(&cluster).await, Journal::new());
    let queue = queue_at(database.url());
    let early = format!("early={}", journal.command("wait_for one; echo $PPID"));
    let late = format!("late={}", journal.command("wait_for two; echo $PPID"));
    let arguments = ["--lease-ms", "1000", "--concurrency", "4", "--exec", &early, "--exec", &late];
    let mut ids = enqueue(&queue, "early", 4).await;
    ids.extend(enqueue(&queue, "late", 4).await);
    let workers = [work(database.url(), &journal, &arguments), work(database.url(), &journal, &arguments)];
    journal.wait_for("start", None, 8).await;
    crash(&cluster).await;
    // Half of them finish while nobody can take note of it.
    journal.open("one");
    journal.wait_for("end", None, 4).await;
    for worker in &workers {
        worker.printed("connection to Postgres lost", SOON).await;
    }
    tokio::time::sleep(LEASE * 3).await;
    restart(&cluster).await;
    for worker in &workers {
        worker.printed("connection to Postgres restored", SOON).await;
    }
    // A rescue would come now, if anybody thought that there was something to rescue.
    tokio::time::sleep(LEASE * 3).await;
    journal.open("two");
    for id in &ids {
        let job = job_in(&queue, *id, "done").await;
        assert_eq!((job.attempt, job.errors.is_none()), (1, true));
        assert_eq!(job.result_as::<u32>().unwrap(), journal.noted("end", *id)[0].worker);
    }
    journal.assert_each_ran_once(&ids);
    for worker in &workers {
        assert!(!worker.output().contains("lost its lease"), "{}", worker.output());
    }
    assert_one_record_each(&database, &ids).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_during_a_rescue_of_250_jobs_it_loses_none() {
    let settings = |builder: posthouse::worker::Builder| builder.lease(Duration::from_millis(1_500)).concurrency(250);
    let first_never_ends = |context: posthouse::Context| async move {
        if context.attempt() == 1 {
            std::future::pending::<()>().await;
        }
    };
    if became_worker(settings, first_never_ends).await {
        return;
    }
    let start = |url: &str, journal: &Journal| {
        child("crash::postgres::killed_during_a_rescue_of_250_jobs_it_loses_none", url, journal)
    };
    let cluster = dedicated(&[]).await;
    let (database, journal) = (database_on(&cluster).await, Journal::new());
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 250).await;
    let mut dead = start(database.url(), &journal);
    journal.wait_for("start", None, 250).await;
    // A rescue that takes its time, so that it can be hit in the middle.
    let slow = "create function public.slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.01); return new; end $$;
        create trigger slow before insert on posthouse.attempt for each row execute function public.slow()";
    database.connect().await.batch_execute(slow).await.unwrap();
    dead.kill_9();
    dead.ended(SOON).await;
    // One, so that nobody makes up for it.
    let rescuer = start(database.url(), &journal);
    let rescuing = "select count(*) from pg_stat_activity where state = 'active' and query like '%posthouse.rescue(%'
        and pid <> pg_backend_pid() and query_start < clock_timestamp() - interval '300 milliseconds'";
    wait_until(LATER, "the rescue is under way", async || number(&database, rescuing).await > 0).await;
    crash(&cluster).await;
    restart(&cluster).await;
    assert_eq!(number(&database, "select count(*) from posthouse.job where state = 'running'").await, 250, "hit it");
    all_final(&database).await;
    assert_one_record_each(&database, &ids).await;
    let sql = "select count(*) from posthouse.archive where state = 'done' and attempt = 2
        and jsonb_array_length(errors) = 1 and errors -> 0 ->> 'class' = 'worker_lost'";
    assert_eq!(number(&database, sql).await, 250);
    assert!(journal.runs().values().all(|runs| *runs == 2), "each ran again once");
    assert!(!rescuer.output().contains("lost its lease"), "{}", rescuer.output());
}
