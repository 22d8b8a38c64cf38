//! Programs cancelled at any moment of their run.

use std::collections::HashSet;
use std::time::Duration;

use super::support::{Journal, all_final, assert_one_record_each, work};
use crate::client::queue_database;
use crate::harness::{SOON, wait_until};
use crate::worker_support::{enqueue, queue_at};

#[tokio::test]
async fn a_hundred_programs_cancelled_at_random_end_once() {
    const JOBS: usize = 100;
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    // Every tenth does not listen to SIGTERM and would go on for long; every fifth says "not now", and would run again.
    let body = "case $(cat) in *0}) trap '' TERM; sleep 600;; esac; sleep 0.1; case $POSTHOUSE_JOB_ID in *[05]) exit 75;; esac";
    let handler = format!("k={}", journal.command(body));
    let ids = enqueue(&queue, "k", JOBS).await;
    let worker = work(database.url(), &journal, &["--concurrency", "8", "--lease-ms", "10000", "--exec", &handler]);
    let (mut asked, mut tasks) = (HashSet::new(), Vec::new());
    wait_until(SOON * 2, "all have started", async || {
        for note in journal.noted("start", None) {
            if asked.insert(note.job) {
                let queue = queue.clone();
                tasks.push(tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(0..160))).await;
                    (note.job, queue.cancel(note.job).await)
                }));
            }
        }
        asked.len() == JOBS
    })
    .await;
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(task.await.unwrap());
    }
    all_final(&database).await;
    let mut cancelled = 0;
    for (id, answer) in answers {
        let job = queue.job(id).await.unwrap().unwrap();
        match answer {
            // Asked in time, or while it waited for its next attempt: no retry, no result.
            Ok(said) if job.state == "cancelled" => {
                assert!(["running", "cancelled"].contains(&&*said), "{said}: {job:?}");
                assert!(job.result.is_none_or(|result| result.get() == "null"), "a cancelled job has no result");
                cancelled += 1;
            }
            // It was faster.
            Ok(_) | Err(_) => assert_eq!((&*job.state, job.attempt), ("done", 1), "{job:?}"),
        }
        assert_eq!(journal.runs()[&id], 1, "it was started again");
    }
    assert!((5..=JOBS).contains(&cancelled), "{cancelled} of {JOBS} were cancelled: this test tests nothing");
    journal.nothing_left_running().await;
    assert!(!worker.output().contains("lost"), "{}", worker.output());
    assert_one_record_each(&database, &ids).await;
}
