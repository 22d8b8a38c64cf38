//! The races between a worker and Postgres about who holds what, each step set out by hand.

use std::time::Duration;

use posthouse::store::{Beat, Database, Pulse, Settlement, Store, Verdict};
use posthouse::testing::TestDatabase;
use posthouse::{Outcome, Posthouse};
use uuid::Uuid;

use crate::worker_support::{database, enqueue, job_in, queue_at, registered};

const LEASE: Duration = Duration::from_secs(600);

async fn three_queued() -> (TestDatabase, Posthouse, Store, Vec<i64>) {
    let database = database().await;
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 3).await;
    let store = Database::new(database.url()).unwrap().store("test");
    (database, queue, store, ids)
}

async fn beat(store: &Store, worker: Uuid, mark: i64, oldest: i64, held: &[(i64, i64)], with_list: bool) -> Pulse {
    let beat = Beat { mark, oldest, held: held.to_vec(), with_list };
    store.heartbeat(worker, &beat).await.unwrap().expect("the incarnation lives")
}

#[tokio::test]
async fn jobs_of_a_claim_that_was_given_up_go_back_uncharged() {
    let (_database, queue, store, ids) = three_queued().await;
    let worker = registered(&store, LEASE, &["k"]).await;
    // The first claim is answered; the answer to the second is lost, and the worker gives it up.
    let first = store.claim(worker, 1, 1, 0).await.unwrap();
    store.claim(worker, 2, 2, 0).await.unwrap();
    let held = [(first[0].id, first[0].fence)];
    assert!(beat(&store, worker, 2, 1, &held, false).await.mismatch);
    let pulse = beat(&store, worker, 2, 1, &held, true).await;
    assert_eq!((pulse.released, pulse.lost.len()), (2, 0));
    for id in &ids[1..] {
        assert_eq!(job_in(&queue, *id, "queued").await.attempt, 0);
    }
    job_in(&queue, first[0].id, "running").await;
    assert!(!beat(&store, worker, 2, 1, &held, false).await.mismatch, "now it fits");
}

#[tokio::test]
async fn so_do_they_when_the_worker_holds_nothing_else() {
    let (_database, queue, store, ids) = three_queued().await;
    let worker = registered(&store, LEASE, &["k"]).await;
    store.claim(worker, 1, 3, 0).await.unwrap();
    assert!(beat(&store, worker, 1, 2, &[], false).await.mismatch);
    assert_eq!(beat(&store, worker, 1, 2, &[], true).await.released, 3);
    for id in ids {
        assert_eq!(job_in(&queue, id, "queued").await.attempt, 0);
    }
}

#[tokio::test]
async fn a_claim_whose_answer_is_on_its_way_is_left_alone() {
    let (_database, queue, store, ids) = three_queued().await;
    let worker = registered(&store, LEASE, &["k"]).await;
    // The heartbeat was made up before the answer to claim 1 arrived: its mark is 0.
    let claimed = store.claim(worker, 1, 3, 0).await.unwrap();
    assert!(!beat(&store, worker, 0, 1, &[], false).await.mismatch);
    assert_eq!(beat(&store, worker, 0, 1, &[], true).await.released, 0);
    let again = store.claim(worker, 1, 3, 0).await.unwrap();
    let same: Vec<_> = again.iter().map(|job| (job.id, job.fence, job.attempt)).collect();
    assert_eq!(same, claimed.iter().map(|job| (job.id, job.fence, job.attempt)).collect::<Vec<_>>());
    for id in ids {
        job_in(&queue, id, "running").await;
    }
}

#[tokio::test]
async fn a_claim_that_arrives_after_it_was_given_up_strands_nothing() {
    let (_database, queue, store, ids) = three_queued().await;
    let worker = registered(&store, LEASE, &["k"]).await;
    // Claim 1 is still somewhere on the way when the worker gives it up and says so.
    assert!(!beat(&store, worker, 1, 2, &[], false).await.mismatch);
    let late = store.claim(worker, 1, 3, 0).await;
    // Refused, or found by the next heartbeats.
    if late.is_ok_and(|jobs| !jobs.is_empty()) {
        assert!(beat(&store, worker, 1, 2, &[], false).await.mismatch);
        assert_eq!(beat(&store, worker, 1, 2, &[], true).await.released, 3);
    }
    for id in ids {
        assert_eq!(job_in(&queue, id, "queued").await.attempt, 0);
    }
}

#[tokio::test]
async fn a_late_release_does_not_touch_the_next_attempt() {
    let (_database, queue, store, ids) = three_queued().await;
    let (slow, next) = (registered(&store, LEASE, &["k"]).await, registered(&store, LEASE, &["k"]).await);
    let old = store.claim(slow, 1, 1, 0).await.unwrap();
    store.retire_worker(slow).await.unwrap();
    let new = store.claim(next, 1, 1, 0).await.unwrap();
    assert_eq!((new[0].id, new[0].attempt), (old[0].id, 1), "it is back at the front, uncharged");
    assert!(new[0].fence > old[0].fence);
    for late in [Settlement::release(ids[0], old[0].fence), Settlement::new(ids[0], old[0].fence, Outcome::done(&1))] {
        assert_eq!(store.settle(slow, &[late]).await.unwrap()[0].verdict, Verdict::Lost);
    }
    let job = job_in(&queue, ids[0], "running").await;
    assert_eq!((job.worker, job.fence), (Some(next), new[0].fence));
}
