//! Workers that stand still past their lease, and jobs that take longer than it.

use super::support::{Journal, LATER, assert_one_record_each, number, work};
use crate::client::queue_database;
use crate::harness::{SOON, wait_until};
use crate::worker_support::{enqueue, job_in, queue_at};

use posthouse::NewJob;

#[tokio::test]
async fn a_worker_stopped_past_its_lease_writes_nothing_and_begins_anew() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let later = "[ $POSTHOUSE_ATTEMPT -gt 1 ] ||";
    let endless = format!("endless={}", journal.command(&format!("{later} sleep 600; echo $PPID")));
    let ends = format!("ends={}", journal.command(&format!("{later} wait_for gate; echo $PPID")));
    let arguments = ["--lease-ms", "1500", "--queue", "default", "--exec", &endless, "--exec", &ends];
    let ids = [enqueue(&queue, "endless", 1).await[0], enqueue(&queue, "ends", 1).await[0]];
    let stopped = work(database.url(), &journal, &[&arguments[..], &["--queue", "own"]].concat());
    journal.wait_for("start", None, 2).await;
    stopped.pause();
    // One of the commands finishes meanwhile, and nobody takes note of it.
    journal.open("gate");
    journal.wait_for("end", ids[1], 1).await;
    let other = work(database.url(), &journal, &arguments);
    let mut taken_over = Vec::new();
    for id in ids {
        let job = job_in(&queue, id, "done").await;
        assert_eq!((job.attempt, job.result_as::<u32>().unwrap()), (2, other.pid()));
        taken_over.push(job);
    }
    let overlap = format!(
        "select count(*) from posthouse.archive a, posthouse.worker w
         where w.pid = {} and (w.dead_at is null or w.dead_at < w.expires_at or a.started_at < w.dead_at)",
        stopped.pid()
    );
    assert_eq!(number(&database, &overlap).await, 0, "the other began when the lease was over and the worker dead");

    stopped.resume();
    stopped.printed("lost its lease", SOON).await;
    for id in ids {
        stopped.printed(&format!("job {id} lost"), SOON).await;
    }
    journal.nothing_left_running().await;
    let next = queue.enqueue_job(NewJob::from_json("ends", "{}").unwrap().queue("own")).await.unwrap().id;
    let job = job_in(&queue, next, "done").await;
    assert_eq!(job.result_as::<u32>().unwrap(), stopped.pid(), "it serves again");
    assert_eq!(stopped.output().matches("registered").count(), 2, "under a new id:\n{}", stopped.output());
    for before in taken_over {
        let after = queue.job(before.id).await.unwrap().unwrap();
        assert_eq!((after.fence, &after.finished_at, after.attempt), (before.fence, &before.finished_at, 2));
        assert_eq!(after.result_as::<u32>().unwrap(), other.pid());
        assert_eq!(journal.runs()[&after.id], 2);
    }
    assert_one_record_each(&database, &[ids[0], ids[1], next]).await;
}

#[tokio::test]
async fn a_job_as_long_as_six_leases_runs_once() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("sleep 6"));
    let arguments = ["--lease-ms", "1000", "--until-empty", "--exec", &handler];
    let id = enqueue(&queue, "k", 1).await[0];
    let mut workers = [work(database.url(), &journal, &arguments), work(database.url(), &journal, &arguments)];
    assert_eq!(job_in(&queue, id, "done").await.attempt, 1);
    for worker in &mut workers {
        assert!(worker.ended(LATER).await.success(), "{}", worker.output());
        assert!(!worker.output().contains("lost"), "{}", worker.output());
    }
    journal.assert_each_ran_once(&[id]);
    wait_until(SOON, "both said goodbye", async || {
        number(&database, "select count(*) from posthouse.worker where dead_at is not null").await == 2
    })
    .await;
    assert_one_record_each(&database, &[id]).await;
}
