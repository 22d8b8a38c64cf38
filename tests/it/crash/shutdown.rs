//! Workers that are asked to end: programs they run end with them, unfinished jobs start elsewhere at once and uncharged.

use std::time::{Duration, Instant};

use posthouse::NewJob;

use super::support::{Journal, assert_one_record_each, assert_worker_lost, falls_asleep, only_when_told, runs, work};
use crate::client::queue_database;
use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::{enqueue, job_in, queue_at};

/// Far longer than any test: what moves a job is not that it ran out.
const LONG: [&str; 2] = ["--lease-ms", "60000"];

#[tokio::test]
async fn three_rollouts_of_the_binary_cost_no_attempt() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    // A command with a child of its own, whose process id is noted in place of the command's.
    let child = "sh -c 'exec sleep 600' & echo \"child $POSTHOUSE_JOB_ID $POSTHOUSE_ATTEMPT $PPID $!\" >> journal";
    let handler = format!("k={}", journal.command(&format!("{child}; wait_for gate")));
    let arguments = [&LONG[..], &["--grace-ms", "500", "--exec", &handler]].concat();
    let id = queue.enqueue_job(NewJob::from_json("k", "{}").unwrap().max_attempts(2)).await.unwrap().id;
    let mut old = work(database.url(), &journal, &arguments);
    for rollout in 1..=3 {
        journal.wait_for("child", id, rollout).await;
        let new = work(database.url(), &journal, &arguments);
        new.printed("registered", SOON).await;
        let asked = Instant::now();
        old.terminate();
        let status = old.ended(SOON).await;
        assert_eq!(status.code(), Some(0), "{}", old.output());
        assert!(old.output().contains(&format!("job {id} released")), "{}", old.output());
        let left: Vec<_> = journal.notes().into_iter().filter(|n| n.worker == old.pid() && runs(n.process)).collect();
        assert!(left.is_empty(), "left running: {left:?}");
        journal.wait_for("start", id, rollout + 1).await;
        assert!(asked.elapsed() < Duration::from_secs(15), "started elsewhere only after {:?}", asked.elapsed());
        let newest = journal.noted("start", id).pop().unwrap();
        assert_eq!((newest.worker, newest.attempt), (new.pid(), 1), "uncharged");
        old = new;
    }
    journal.open("gate");
    let job = job_in(&queue, id, "done").await;
    assert_eq!((job.attempt, job.errors), (1, None));
    assert_one_record_each(&database, &[id]).await;
}

#[tokio::test]
async fn after_the_first_signal_nothing_is_claimed_and_what_ends_in_time_counts() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("wait_for gate"));
    let arguments = [&LONG[..], &["--grace-ms", "20000", "--exec", &handler]].concat();
    let ids = enqueue(&queue, "k", 2).await;
    let mut worker = work(database.url(), &journal, &arguments);
    journal.wait_for("start", None, 2).await;
    worker.terminate();
    let slots = "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'posthouse/claim'";
    let client = database.connect().await;
    wait_until(SOON, "it stops claiming", async || client.query_one(slots, &[]).await.unwrap().get::<_, i64>(0) == 0)
        .await;
    let late = enqueue(&queue, "k", 1).await[0];
    journal.open("gate");
    assert_eq!(worker.ended(SOON).await.code(), Some(0), "{}", worker.output());
    for id in &ids {
        let job = queue.job(*id).await.unwrap().unwrap();
        assert_eq!((&*job.state, job.attempt), ("done", 1));
    }
    let job = queue.job(late).await.unwrap().unwrap();
    assert_eq!((&*job.state, job.attempt), ("queued", 0));
    journal.assert_each_ran_once(&ids);
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once_and_the_rescue_brings_its_job_back() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let child =
        "sh -c 'trap \"\" TERM; sleep 600' & echo \"child $POSTHOUSE_JOB_ID $POSTHOUSE_ATTEMPT $PPID $!\" >> journal";
    let handler = format!("k={}", journal.command(&format!("[ $POSTHOUSE_ATTEMPT -gt 1 ] || {{ {child}; wait; }}")));
    let arguments = ["--lease-ms", "1500", "--grace-ms", "60000", "--exec", &handler];
    let id = enqueue(&queue, "k", 1).await[0];
    let mut worker = work(database.url(), &journal, &arguments);
    journal.wait_for("child", id, 1).await;
    // Two signals that come too soon after each other are one; so the second is repeated.
    let asked = Instant::now();
    while runs(worker.pid()) {
        worker.terminate();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(asked.elapsed() < SOON, "it does not end:\n{}", worker.output());
    }
    assert_eq!(worker.ended(SOON).await.code(), Some(143), "{}", worker.output());
    journal.nothing_left_running().await;
    let _other = work(database.url(), &journal, &arguments);
    let job = job_in(&queue, id, "done").await;
    assert_eq!(job.attempt, 2, "an end without order costs the attempt");
    assert_worker_lost(&queue, &job, 1, worker.pid()).await;
    assert_eq!(journal.runs()[&id], 2);
    assert_one_record_each(&database, &[id]).await;
}

#[tokio::test]
async fn a_claim_whose_answer_is_on_its_way_at_the_end_strands_nothing() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let handler = format!("k={}", journal.command("true"));
    let arguments = [&LONG[..], &only_when_told(&database), &["--exec", &handler]].concat();
    let mut worker = work(&proxy.url(database.url()), &journal, &arguments);
    falls_asleep(&database).await;
    proxy.stall_answers();
    let ids = enqueue(&queue, "k", 20).await;
    job_in(&queue, ids[0], "running").await;
    worker.terminate();
    assert_eq!(worker.ended(SOON).await.code(), Some(0), "{}", worker.output());
    assert!(journal.notes().is_empty(), "the answer was not to arrive");
    for id in &ids {
        let job = job_in(&queue, *id, "queued").await;
        assert_eq!((job.attempt, job.errors), (0, None));
    }
}
