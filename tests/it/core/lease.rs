//! Leases: heartbeat and reconcile, rescue, retirement.

use futures_util::future::join_all;
use serde_json::json;

use super::support::{Pulse, Queue, held, ids, said};

const FINE: Pulse = Pulse { mismatch: false, cancel: Vec::new(), lost: Vec::new(), released: 0 };

#[tokio::test]
async fn a_heartbeat_renews_the_lease_of_a_live_worker_only() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["default"], &["k"], 60_000).await;
    s.run("update posthouse.worker set expires_at = clock_timestamp() + interval '2 seconds', beat_at = '-infinity'")
        .await;
    let lease: i64 = s.get(&format!("select expires_in_ms from posthouse.heartbeat('{}')", worker.id)).await;
    assert_eq!(lease, 60_000);
    let renewed: bool = s
        .get("select expires_at between clock_timestamp() + interval '55 seconds' and clock_timestamp() + interval '60 seconds' and beat_at > clock_timestamp() - interval '5 seconds' from posthouse.worker")
        .await;
    assert!(renewed);
    s.expire(worker.id).await;
    assert_eq!(s.beat(worker.id, (0, 1), &[], false).await, None);
    assert_eq!(s.beat(worker.id, (0, 1), &[], true).await, None);
    let still: bool = s.get("select expires_at < clock_timestamp() and dead_at is null from posthouse.worker").await;
    assert!(still);
    assert_eq!(s.beat(uuid::Uuid::new_v4(), (0, 1), &[], false).await, None);
}

#[tokio::test]
async fn what_a_worker_does_not_hold_goes_back_uncharged() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 7).await;
    let worker = s.worker(&["k"]).await;
    let first = worker.claim(&s, 3).await;
    let second = worker.claim(&s, 2).await;
    let third = worker.claim(&s, 2).await;
    let all: Vec<_> = first.iter().chain(&second).cloned().collect();
    // Exactly what the database has; and number and sums tell what is not.
    assert_eq!(s.beat(worker.id, (2, 1), &held(&all), false).await.unwrap(), FINE);
    for wrong in [&held(&all[1..])[..], &[], &[(all[0].id, 2)], &held(&first)] {
        assert!(s.beat(worker.id, (2, 1), wrong, false).await.unwrap().mismatch);
    }
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 7);
    // The list: one of claim 1 and one of claim 2 are not held. Those of claim 3 are above the mark.
    let mut list = held(&all);
    let gone = [list.remove(4).0, list.remove(0).0];
    let pulse = s.beat(worker.id, (2, 1), &list, true).await.unwrap();
    assert_eq!(pulse, Pulse { released: 2, ..FINE });
    assert_eq!(s.beat(worker.id, (2, 1), &list, false).await.unwrap(), FINE);
    let back = s
        .count(&format!(
            "posthouse.job where state = 'queued' and attempt = 0 and worker is null and id in ({}, {})",
            gone[0], gone[1]
        ))
        .await;
    assert_eq!(back, 2);
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 5);
    // A late settle of what went back is lost; what another worker makes of it stays.
    let other = s.worker(&["k"]).await;
    let again = other.claim(&s, 10).await;
    assert_eq!(again.iter().map(|j| (j.fence, j.attempt)).collect::<Vec<_>>(), [(2, 1), (2, 1)]);
    let verdicts = s.settle(worker.id, &json!([{"id": gone[0], "fence": 1, "outcome": "done"}])).await;
    assert_eq!(said(&verdicts), [("lost", Some("running"))]);
    // With the third claim answered, everything fits.
    list.extend(held(&third));
    assert_eq!(s.beat(worker.id, (3, 1), &list, false).await.unwrap(), FINE);
}

#[tokio::test]
async fn a_claim_whose_answer_was_lost_goes_back_when_it_is_given_up() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 5).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 2).await;
    s.settle(
        worker.id,
        &json!([{"id": jobs[0].id, "fence": 1, "outcome": "done"}, {"id": jobs[1].id, "fence": 1, "outcome": "done"}]),
    )
    .await;
    // Claim 2 committed, and the worker never heard of it. It holds nothing: oldest is behind its mark.
    worker.claim(&s, 3).await;
    let pulse = s.beat(worker.id, (2, 3), &[], false).await.unwrap();
    assert_eq!(pulse, Pulse { mismatch: true, ..FINE });
    let pulse = s.beat(worker.id, (2, 3), &[], true).await.unwrap();
    assert_eq!(pulse, Pulse { released: 3, ..FINE });
    assert_eq!(s.count("posthouse.job where state = 'queued' and attempt = 0").await, 3);
    assert_eq!(s.beat(worker.id, (2, 3), &[], false).await.unwrap(), FINE);
    assert_eq!(s.count("posthouse.claimed").await, 0);
    // And had the worker died between the two heartbeats, the rescue would have found them.
    let dying = s.worker(&["k"]).await;
    dying.claim(&s, 3).await;
    assert!(s.beat(dying.id, (1, 2), &[], false).await.unwrap().mismatch);
    s.expire(dying.id).await;
    assert_eq!(s.rescue(dying.id).await, 3);
}

#[tokio::test]
async fn held_jobs_that_are_no_longer_its_own_are_lost() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 4).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 4).await;
    // One was settled, and the worker does not know; one it was given a second time, with a newer fence.
    s.settle(worker.id, &json!([{"id": jobs[0].id, "fence": 1, "outcome": "done"}, {"id": jobs[1].id, "fence": 1, "outcome": "release"}])).await;
    let again = worker.claim(&s, 1).await;
    assert_eq!((again[0].id, again[0].fence), (jobs[1].id, 2));
    let mut list = held(&jobs);
    assert!(s.beat(worker.id, (2, 1), &list, false).await.unwrap().mismatch);
    list.extend(held(&again));
    list.push((999, 1));
    let mut pulse = s.beat(worker.id, (2, 1), &list, true).await.unwrap();
    pulse.lost.sort_unstable();
    assert_eq!(pulse, Pulse { lost: vec![jobs[0].id, jobs[1].id, 999], ..FINE });
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 3);
}

#[tokio::test]
async fn a_heartbeat_tells_whose_cancel_was_asked_for() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 3).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 3).await;
    let database = posthouse::store::Database::new(queue.url()).unwrap();
    let mut listener = posthouse::store::Listener::connect(&database).await.unwrap();
    assert_eq!(s.get::<String>(&format!("select posthouse.cancel({})", jobs[1].id)).await, "running");
    let notice = tokio::time::timeout(crate::harness::SOON, listener.next()).await.unwrap().unwrap();
    assert_eq!(notice, posthouse::store::Notice::Cancel { worker: worker.id });
    for with_list in [false, true] {
        let pulse = s.beat(worker.id, (1, 1), &held(&jobs), with_list).await.unwrap();
        assert_eq!(pulse, Pulse { cancel: vec![jobs[1].id], ..FINE });
    }
    // Also of a claim that is above the mark: its answer may be on its way.
    let pulse = s.beat(worker.id, (0, 1), &[], false).await.unwrap();
    assert_eq!(pulse, Pulse { cancel: vec![jobs[1].id], ..FINE });
}

#[tokio::test]
async fn heartbeats_forget_claims_that_are_over() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 40).await;
    let worker = s.worker(&["k"]).await;
    let mut open = Vec::new();
    for _ in 0..20 {
        open.push(worker.claim(&s, 2).await);
    }
    let finish = async |n: usize| {
        let jobs: Vec<_> = open[n].iter().map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "done"})).collect();
        s.settle(worker.id, &json!(jobs)).await;
    };
    for n in (0..20).filter(|n| *n != 7) {
        finish(n).await;
    }
    assert_eq!(s.count("posthouse.claimed").await, 20);
    // Claim 8 is still open: it and those after it stay.
    assert_eq!(s.beat(worker.id, (20, 8), &held(&open[7]), false).await.unwrap(), FINE);
    assert_eq!(s.list::<i64>("select seq from posthouse.claimed order by seq").await, (8..=20).collect::<Vec<i64>>());
    // A worker that is wrong about the oldest does not lose what runs.
    assert_eq!(s.beat(worker.id, (20, 21), &held(&open[7]), false).await.unwrap(), FINE);
    assert_eq!(s.beat(worker.id, (20, 8), &held(&open[7]), false).await.unwrap(), FINE);
    finish(7).await;
    assert_eq!(s.beat(worker.id, (20, 21), &[], false).await.unwrap(), FINE);
    assert_eq!(s.count("posthouse.claimed").await, 0);
    assert_eq!(s.get::<i64>("select oldest_seq from posthouse.worker").await, 21);
}

#[tokio::test]
async fn a_lost_worker_costs_its_jobs_an_attempt() {
    let (_queue, s) = Queue::with_session().await;
    let twice = s.enqueue("kind => 'k', max_attempts => 2").await;
    let once = s.enqueue("kind => 'k', max_attempts => 1, dedupe_key => 'acct-7'").await;
    let unwanted = s.enqueue("kind => 'k', max_attempts => 9").await;
    let worker = s.worker(&["k"]).await;
    assert_eq!(worker.claim(&s, 10).await.len(), 3);
    let behind = s.enqueue("kind => 'k'").await;
    s.get::<String>(&format!("select posthouse.cancel({unwanted})")).await;
    // A live lease is left alone, also one that another clock thinks is over.
    assert_eq!(s.rescue(worker.id).await, 0);
    s.expire(worker.id).await;
    // As is one whose beat moved since the caller began to watch it.
    let moved: i32 = s
        .get(&format!(
            "select jobs from posthouse.rescue('[{{\"worker\": \"{}\", \"beat_at\": \"2001-01-01\"}}]')",
            worker.id
        ))
        .await;
    assert_eq!(moved, 0);
    assert_eq!(s.get::<i32>("select jobs from posthouse.rescue('[]')").await, 0);
    assert_eq!(s.rescue(worker.id).await, 3);
    assert_eq!(s.rescue(worker.id).await, 0);
    assert_eq!(
        (s.state(twice).await, s.state(once).await, s.state(unwanted).await),
        ("queued".into(), "failed".into(), "cancelled".into())
    );
    let job = s.job(twice).await;
    assert_eq!(
        (&job["attempt"], &job["reason"], &job["errors"][0]["class"]),
        (&json!(1), &json!("worker lost"), &json!("worker_lost"))
    );
    assert!(job["error"].as_str().unwrap().contains("box pid 7"), "{job}");
    let job = s.job(once).await;
    assert_eq!((&job["reason"], job["errors"].as_array().unwrap().len()), (&json!("worker_lost"), 1));
    // The line behind goes on, the lost one first; the key is free.
    let other = s.worker(&["k"]).await;
    let again = other.claim(&s, 10).await;
    assert_eq!(ids(&again), [twice, behind]);
    assert_eq!((again[0].attempt, again[0].fence), (2, 2));
    assert!(!s.enqueued("kind => 'k', dedupe_key => 'acct-7'").await.2);
    // Losing the second worker too was the last attempt.
    s.expire(other.id).await;
    assert_eq!(s.rescue(other.id).await, 2);
    assert_eq!(s.state(twice).await, "failed");
    let errors = s.job(twice).await["errors"].clone();
    assert_eq!(errors.as_array().unwrap().iter().map(|e| &e["fence"]).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(s.count("posthouse.claimed").await, 0);
}

#[tokio::test]
async fn for_one_lease_after_a_start_of_postgres_nobody_is_rescued() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue("kind => 'k'").await;
    let worker = s.worker(&["k"]).await;
    worker.claim(&s, 1).await;
    // Its lease of ten years is over by its own row, but not counted from when the server started.
    s.run("update posthouse.worker set expires_at = clock_timestamp() - interval '1 minute', lease_ms = 315360000000")
        .await;
    assert_eq!(s.rescue(worker.id).await, 0);
    assert!(!s.get::<bool>("select expired from posthouse.worker_beats()").await);
    assert_eq!(s.beat(worker.id, (0, 1), &[], false).await.unwrap(), FINE);
}

#[tokio::test]
async fn jobs_are_rescued_though_their_workers_row_is_gone() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 5).await;
    let worker = s.worker(&["k"]).await;
    worker.claim(&s, 5).await;
    s.run("delete from posthouse.worker").await;
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    assert_eq!(s.get::<i32>("select jobs from posthouse.rescue('[]')").await, 5);
    assert_eq!(s.count("posthouse.job where state = 'queued'").await, 5);
    // The sweep keeps a dead worker's row for a day, and as long as it has jobs.
    let worker = s.worker(&["k"]).await;
    worker.claim(&s, 5).await;
    s.run("update posthouse.worker set dead_at = clock_timestamp() - interval '2 days'").await;
    let tidy = "update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()";
    s.run(tidy).await;
    assert_eq!(s.count(&format!("posthouse.worker where id = '{}'", worker.id)).await, 1);
    assert_eq!(s.get::<i32>("select jobs from posthouse.rescue('[]')").await, 5);
    s.run(tidy).await;
    assert_eq!(s.count(&format!("posthouse.worker where id = '{}'", worker.id)).await, 0);
}

#[tokio::test]
async fn three_sweepers_share_thirty_thousand_orphans() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 30_000).await;
    let worker = s.worker(&["k"]).await;
    for _ in 0..300 {
        worker.claim(&s, 100).await;
    }
    s.expire(worker.id).await;
    s.run(&format!("update posthouse.worker set dead_at = clock_timestamp() where id = '{}'", worker.id)).await;
    let sweepers = [queue.session().await, queue.session().await, queue.session().await];
    let live = s.worker(&["k"]).await;
    let sweeps = sweepers.iter().map(|sweeper| async {
        let mut moved = 0;
        loop {
            let row = &sweeper.rows("select jobs, more from posthouse.rescue('[]', 500)").await[0];
            let jobs: i32 = row.get(0);
            assert!(jobs < 600, "{jobs} in one go");
            moved += i64::from(jobs);
            if jobs == 0 && !row.get::<_, bool>(1) {
                return moved;
            }
        }
    });
    // Meanwhile new work starts.
    let (moved, first) = futures_util::join!(join_all(sweeps), async {
        loop {
            let jobs = live.claim(&s, 1).await;
            if !jobs.is_empty() {
                break jobs.len();
            }
        }
    });
    assert_eq!(first, 1);
    assert_eq!(moved.iter().sum::<i64>(), 30_000, "{moved:?}");
    assert!(moved.iter().all(|n| *n >= 1_000), "not shared: {moved:?}");
    assert_eq!(
        s.count("posthouse.job where attempt = 1 and errors = 1").await
            + s.count("posthouse.job where attempt = 2").await,
        30_000
    );
    assert_eq!(s.count("posthouse.attempt").await, 30_000);
}

#[tokio::test]
async fn a_worker_that_retires_gives_everything_back_uncharged() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 4).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 3).await;
    s.settle(worker.id, &json!([{"id": jobs[0].id, "fence": 1, "outcome": "done"}])).await;
    s.get::<String>(&format!("select posthouse.cancel({})", jobs[1].id)).await;
    s.run(&format!("select posthouse.retire_worker('{}')", worker.id)).await;
    s.run(&format!("select posthouse.retire_worker('{}')", worker.id)).await;
    assert_eq!(s.state(jobs[1].id).await, "cancelled");
    assert_eq!(s.count("posthouse.job where state = 'queued' and attempt = 0 and errors = 0").await, 2);
    assert_eq!(s.count("posthouse.claimed").await, 0);
    let verdicts = s.settle(worker.id, &json!([{"id": jobs[2].id, "fence": 1, "outcome": "done"}])).await;
    assert_eq!(said(&verdicts), [("lost", Some("queued"))]);
    assert_eq!(s.get::<String>("select state from posthouse.workers").await, "over");
    s.run(&format!("select posthouse.retire_worker('{}')", uuid::Uuid::new_v4())).await;
}

#[tokio::test]
async fn the_view_of_workers() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 5).await;
    let live = s.worker(&["k"]).await;
    live.claim(&s, 3).await;
    let expired = s.worker(&["k"]).await;
    expired.claim(&s, 1).await;
    s.expire(expired.id).await;
    let rows = s.rows("select id, state, running, host, pid from posthouse.workers order by running desc").await;
    let seen: Vec<(uuid::Uuid, &str, i64, &str, i32)> =
        rows.iter().map(|r| (r.get(0), r.get(1), r.get(2), r.get(3), r.get(4))).collect();
    assert_eq!(seen, [(live.id, "live", 3, "box", 7), (expired.id, "expired", 1, "box", 7)]);
    let expired_only: Vec<uuid::Uuid> = s.list("select worker from posthouse.worker_beats() where expired").await;
    assert_eq!(expired_only, [expired.id]);
}
