//! Workers that know nothing of each other's kinds keep house for each other.

use posthouse::NewJob;

use super::support::{Journal, assert_one_record_each, assert_worker_lost, number, work};
use crate::client::queue_database;
use crate::harness::{Program, SOON};
use crate::worker_support::{enqueue, job_in, queue_at};

const SHORT: [&str; 2] = ["--lease-ms", "1500"];

async fn killed(worker: &mut Program) {
    worker.kill_9();
    worker.ended(SOON).await;
}

#[tokio::test]
async fn a_sweep_gives_back_kinds_it_does_not_know_and_leaves_the_living_alone() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let b = format!("b={}", journal.command("[ $POSTHOUSE_ATTEMPT -gt 1 ] || wait_for gate"));
    let c = format!("c={}", journal.command("sleep 600"));
    let (a, of_b, of_c) = ("a=true", ["--queue", "qb", "--exec", &b], ["--queue", "qc", "--exec", &c]);
    let enqueue = async |kind: &str| {
        let job = NewJob::from_json(kind, "{}").unwrap().queue(format!("q{kind}"));
        queue.enqueue_job(job).await.unwrap().id
    };
    let started = async |kind: &str, arguments: &[&str]| {
        let id = enqueue(kind).await;
        let worker =
            work(database.url(), &journal, &[&SHORT[..], &["--no-sweep", "--concurrency", "1"], arguments].concat());
        journal.wait_for("start", id, 1).await;
        (id, worker)
    };
    let (lost_b, mut dead_b) = started("b", &of_b).await;
    let (live_b, living) = started("b", &of_b).await;
    let (lost_c, mut dead_c) = started("c", &of_c).await;
    let unknown = enqueue("d").await;
    killed(&mut dead_b).await;
    killed(&mut dead_c).await;
    // The only one that sweeps.
    let sweeper = work(database.url(), &journal, &[&SHORT[..], &["--queue", "qa", "--exec", a]].concat());

    for (id, dead) in [(lost_b, &dead_b), (lost_c, &dead_c)] {
        let job = job_in(&queue, id, "queued").await;
        assert_eq!(job.attempt, 1);
        assert_worker_lost(&queue, &job, 1, dead.pid()).await;
    }
    let job = job_in(&queue, live_b, "running").await;
    assert_eq!((job.attempt, job.errors), (1, None), "the living are left alone");
    let _third = work(database.url(), &journal, &[&SHORT[..], &["--no-sweep"], &of_b[..]].concat());
    assert_eq!(job_in(&queue, lost_b, "done").await.attempt, 2);
    journal.open("gate");
    assert_eq!(job_in(&queue, live_b, "done").await.attempt, 1);
    assert_eq!(journal.runs()[&live_b], 1);
    assert!(!living.output().contains("lost"), "{}", living.output());
    // What nobody serves waits.
    for (id, attempt) in [(lost_c, 1), (unknown, 0)] {
        let job = queue.job(id).await.unwrap().unwrap();
        assert_eq!((&*job.state, job.attempt), ("queued", attempt));
    }
    assert!(!sweeper.output().contains("job "), "it ran nothing:\n{}", sweeper.output());
    assert_one_record_each(&database, &[lost_b, live_b]).await;
}

#[tokio::test]
async fn jobs_are_found_when_the_row_of_their_worker_is_gone() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("[ $POSTHOUSE_ATTEMPT -gt 1 ] || sleep 600"));
    let arguments = [&SHORT[..], &["--exec", &handler]].concat();
    let ids = enqueue(&queue, "k", 5).await;
    let mut dead = work(database.url(), &journal, &arguments);
    journal.wait_for("start", None, 5).await;
    killed(&mut dead).await;
    let deleted = "with gone as (delete from posthouse.worker returning id) select count(*) from gone";
    assert_eq!(number(&database, deleted).await, 1);
    let _other = work(database.url(), &journal, &arguments);
    for id in &ids {
        let job = job_in(&queue, *id, "done").await;
        assert_eq!((job.attempt, journal.runs()[id]), (2, 2));
        let error = &job.errors.unwrap()[0];
        assert_eq!(error["class"], "worker_lost", "{error}");
    }
    assert_one_record_each(&database, &ids).await;
}
