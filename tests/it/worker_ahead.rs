//! Claims that are asked ahead: two on their way at a time, answers that get lost, and an end in between.

use std::sync::Arc;
use std::time::Duration;

use posthouse::testing::TestDatabase;
use tokio::sync::Semaphore;

use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::{Background, Log, database, enqueue, queue_at, waits_for, worker_at};

/// Jobs in one claim.
const CLAIM: usize = 500;

async fn count(database: &TestDatabase, from: &str) -> i64 {
    database.connect().await.query_one(&format!("select count(*) from {from}"), &[]).await.unwrap().get(0)
}

/// What is on the wire of this claim, and of no other call: its number, and that it asks for all that a claim can have.
fn full_claim(seq: i64) -> Vec<u8> {
    let jobs = i32::try_from(CLAIM).unwrap();
    [&8_i32.to_be_bytes()[..], &seq.to_be_bytes(), &4_i32.to_be_bytes(), &jobs.to_be_bytes()].concat()
}

/// Runs 2,500 jobs while the wire is cut at the second claim, which is asked together with the third.
async fn runs_once_each(cut: impl FnOnce(&FaultProxy, Vec<u8>)) {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 5 * CLAIM).await;
    let proxy = FaultProxy::start(database.url()).await;
    cut(&proxy, full_claim(2));
    let gate = Arc::new(Semaphore::new(ids.len()));
    let worker = worker_at(&proxy.url(database.url())).concurrency(2_000).until_empty(true);
    let summary = Background::start(waits_for(worker, &log, &gate)).ended().await;
    assert_eq!(proxy.cuts(), 1);
    assert_eq!((summary.done, summary.lost, summary.released), (ids.len() as u64, 0, 0));
    assert_eq!(log.runs().len(), ids.len());
    log.assert_no_overlap();
    assert_eq!(count(&database, "posthouse.archive where attempt = 1 and fence = 1").await, 2_500);
}

#[tokio::test]
async fn an_answer_that_is_lost_while_two_are_awaited_costs_nothing() {
    runs_once_each(|proxy, claim| proxy.lose_answer_to(claim)).await;
}

#[tokio::test]
async fn so_does_a_question() {
    runs_once_each(|proxy, claim| proxy.lose_request(claim)).await;
}

/// The most runs that there were at a time.
fn peak(log: &Log) -> i32 {
    let runs = log.runs();
    let begun = runs.iter().map(|run| (run.from, 1));
    let ended = runs.iter().filter_map(|run| Some((run.to?, -1)));
    let mut steps: Vec<_> = begun.chain(ended).collect();
    steps.sort_unstable();
    let mut open = 0;
    steps
        .into_iter()
        .map(|(_, step)| {
            open += step;
            open
        })
        .max()
        .unwrap_or_default()
}

#[tokio::test]
async fn never_more_than_the_slots() {
    const JOBS: usize = 2_000;
    for slots in [501, 999, 1_200] {
        let (database, log, gate) = (database().await, Log::default(), Arc::new(Semaphore::new(0)));
        enqueue(&queue_at(database.url()), "k", JOBS).await;
        let worker = worker_at(database.url()).concurrency(u32::try_from(slots).unwrap());
        let worker = Background::start(waits_for(worker, &log, &gate));
        let mut left = JOBS;
        // None of the slots becomes free, a few, many, and all.
        for ended in [0, 3, slots / 2, slots] {
            gate.add_permits(ended);
            left -= ended;
            let open = slots.min(left);
            wait_until(SOON, "all slots are taken, and no job is held beside them", async || {
                let running = count(&database, "posthouse.job where state = 'running'").await;
                log.open() == open && usize::try_from(running).unwrap() == open
            })
            .await;
        }
        gate.add_permits(left);
        wait_until(SOON, "all are done", async || count(&database, "posthouse.job").await == 0).await;
        assert_eq!(worker.end().await.done, JOBS as u64);
        assert_eq!(log.runs().len(), JOBS);
        assert_eq!(peak(&log), i32::try_from(slots).unwrap());
    }
}

#[tokio::test]
async fn an_end_with_two_on_their_way_gives_back_what_they_took() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 4 * CLAIM).await;
    let proxy = FaultProxy::start(database.url()).await;
    let gate = Arc::new(Semaphore::new(0));
    let worker = worker_at(&proxy.url(database.url())).concurrency(2_000).lease(Duration::from_secs(600));
    // Of the first two claims it hears; no answer comes to the others, whose jobs run in Postgres and nowhere else.
    proxy.stall_answers_from(full_claim(2));
    let worker = Background::start(waits_for(worker, &log, &gate));
    wait_until(SOON, "two claims are on their way", async || count(&database, "posthouse.claimed").await == 3).await;
    assert_eq!((log.open(), count(&database, "posthouse.job where state = 'running'").await), (CLAIM, 1_500));
    gate.add_permits(CLAIM);
    worker.ask_to_end();
    proxy.heal();
    let summary = worker.ended().await;
    assert_eq!((summary.done, summary.lost, summary.unwritten), (CLAIM as u64, 0, 0));
    assert_eq!(log.runs().len(), CLAIM);
    let back = count(&database, "posthouse.job where state = 'queued' and attempt = 0").await;
    assert_eq!(usize::try_from(back).unwrap(), ids.len() - CLAIM);
}
