//! Workers killed with SIGKILL, at every stage of a job: before its handler starts, in the middle, after it has finished,
//! after that was recorded; and by the job itself.

use posthouse::NewJob;

use super::support::{
    Journal, LATER, all_final, assert_one_record_each, assert_worker_lost, falls_asleep, number, only_when_told, runs,
    work,
};
use crate::client::queue_database;
use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::{enqueue, job_in, queue_at};

#[tokio::test]
async fn before_the_handler_starts() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let handler = format!("k={}", journal.command("true"));
    let arguments = ["--lease-ms", "1500", "--exec", &handler];
    let told = only_when_told(&database);
    let mut doomed = work(&proxy.url(database.url()), &journal, &[&arguments[..], &told].concat());
    falls_asleep(&database).await;
    proxy.stall_answers();
    let id = enqueue(&queue, "k", 1).await[0];
    job_in(&queue, id, "running").await;
    doomed.kill_9();
    doomed.ended(SOON).await;
    assert!(journal.notes().is_empty(), "the answer to the claim was not to arrive");
    let _other = work(database.url(), &journal, &arguments);
    let job = job_in(&queue, id, "done").await;
    // Nobody can know that it had not begun.
    assert_eq!(job.attempt, 2);
    assert_worker_lost(&queue, &job, 1, doomed.pid()).await;
    journal.assert_each_ran_once(&[id]);
    assert_one_record_each(&database, &[id]).await;
}

#[tokio::test]
async fn in_the_middle_of_ten_jobs_while_others_work_on() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("[ $POSTHOUSE_ATTEMPT -gt 1 ] || sleep 600"));
    let steady = format!("steady={}", journal.command("wait_for rescued"));
    let lease = ["--lease-ms", "1500", "--concurrency", "20", "--exec"];
    let ids = enqueue(&queue, "k", 10).await;
    let mut doomed = work(database.url(), &journal, &[&lease[..], &[&handler]].concat());
    journal.wait_for("start", None, 10).await;
    let other = work(database.url(), &journal, &[&lease[..], &[&handler, "--exec", &steady]].concat());
    let long = enqueue(&queue, "steady", 1).await[0];
    journal.wait_for("start", long, 1).await;
    doomed.kill_9();
    doomed.ended(SOON).await;
    for id in &ids {
        let job = job_in(&queue, *id, "done").await;
        assert_eq!(job.attempt, 2);
        assert_worker_lost(&queue, &job, 1, doomed.pid()).await;
        let workers: Vec<u32> = journal.noted("start", *id).iter().map(|note| note.worker).collect();
        assert_eq!(workers, [doomed.pid(), other.pid()], "once each");
        assert_eq!(journal.noted("end", *id).len(), 1, "the first attempt was to end with its worker");
    }
    journal.open("rescued");
    assert_eq!(job_in(&queue, long, "done").await.attempt, 1, "a job of a living worker goes on");
    assert_eq!(journal.noted("start", long).len(), 1);
    journal.nothing_left_running().await;
    assert_one_record_each(&database, &[&ids[..], &[long]].concat()).await;
    let claims = "select count(*) from posthouse.claimed c join posthouse.worker w on w.id = c.worker where w.dead_at is not null";
    assert_eq!(number(&database, claims).await, 0, "nothing is left of the dead worker's claims");
}

#[tokio::test]
async fn after_the_handler_has_finished() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let handler = format!("k={}", journal.command("wait_for gate; echo $PPID"));
    let arguments = ["--lease-ms", "1500", "--exec", &handler];
    let id = enqueue(&queue, "k", 1).await[0];
    let mut doomed = work(&proxy.url(database.url()), &journal, &arguments);
    journal.wait_for("start", id, 1).await;
    proxy.stall();
    journal.open("gate");
    journal.wait_for("end", id, 1).await;
    let command = journal.noted("end", id)[0].process;
    wait_until(SOON, "the command has ended", async || !runs(command)).await;
    doomed.kill_9();
    doomed.ended(SOON).await;
    assert_eq!(queue.job(id).await.unwrap().unwrap().state, "running", "the outcome was not to be recorded");
    let other = work(database.url(), &journal, &arguments);
    let job = job_in(&queue, id, "done").await;
    assert_eq!((job.attempt, job.result_as::<u32>().unwrap()), (2, other.pid()));
    assert_worker_lost(&queue, &job, 1, doomed.pid()).await;
    assert_eq!(journal.runs()[&id], 2);
    assert_one_record_each(&database, &[id]).await;
}

#[tokio::test]
async fn after_the_outcome_was_recorded_and_before_it_knew() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let handler = format!("k={}", journal.command("wait_for gate; echo $PPID"));
    let arguments = ["--lease-ms", "1500", "--exec", &handler, "--exec", "first=true"];
    // So that the connection for outcomes is there.
    let first = enqueue(&queue, "first", 1).await[0];
    let mut doomed = work(&proxy.url(database.url()), &journal, &arguments);
    job_in(&queue, first, "done").await;
    let id = enqueue(&queue, "k", 1).await[0];
    journal.wait_for("start", id, 1).await;
    proxy.stall_answers();
    journal.open("gate");
    job_in(&queue, id, "done").await;
    doomed.kill_9();
    doomed.ended(SOON).await;
    assert!(!doomed.output().contains(&format!("job {id} done")), "the answer was not to arrive:\n{}", doomed.output());
    let _other = work(database.url(), &journal, &arguments);
    wait_until(LATER, "the dead worker and its claims are cleared away", async || {
        let left = "select (select count(*) from posthouse.worker where dead_at is not null) = 1 and
            not exists (select from posthouse.claimed)";
        number(&database, &format!("select ({left})::int::bigint")).await == 1
    })
    .await;
    let job = queue.job(id).await.unwrap().unwrap();
    assert_eq!((&*job.state, job.attempt, job.errors.is_none()), ("done", 1, true), "what is recorded stays");
    assert_eq!(job.result_as::<u32>().unwrap(), doomed.pid());
    journal.assert_each_ran_once(&[id]);
    assert_one_record_each(&database, &[id]).await;
}

#[tokio::test]
async fn by_its_own_job_in_the_last_attempt() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("case $(cat) in *poison*) kill -9 $PPID; sleep 600;; esac"));
    let arguments = ["--lease-ms", "1500", "--concurrency", "1", "--exec", &handler];
    let poison = NewJob::from_json("k", r#"{"what":"poison"}"#).unwrap().max_attempts(1);
    let poison = queue.enqueue_job(poison).await.unwrap().id;
    let next = enqueue(&queue, "k", 1).await[0];
    let mut doomed = work(database.url(), &journal, &arguments);
    doomed.ended(SOON).await;
    let _other = work(database.url(), &journal, &arguments);
    let job = job_in(&queue, poison, "failed").await;
    assert_eq!((job.attempt, job.reason.as_deref()), (1, Some("worker_lost")));
    assert!(job.error.as_ref().is_some_and(|error| error.starts_with("worker lost: ")), "{job:?}");
    assert_worker_lost(&queue, &job, 1, doomed.pid()).await;
    assert_eq!(job_in(&queue, next, "done").await.attempt, 1);
    all_final(&database).await;
    journal.assert_each_ran_once(&[poison, next]);
    journal.nothing_left_running().await;
    assert_one_record_each(&database, &[poison, next]).await;
}
