//! The races, each forced by transactions that are held open; and, where there is a cure, the harm that is done without it.

use std::time::Duration;

use futures_util::join;
use serde_json::json;

use super::support::{Pulse, Queue, Session, held, ids, refusal, said};
use crate::harness::{FaultProxy, SOON, wait_until};

/// A lane that is empty falls asleep at the next claim.
const NO_FLAPPING: &str = "update posthouse.lane set awake_until = '-infinity'";
const IMPATIENT: &str = "set lock_timeout = '3s'";
const TIDY: &str = "update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()";

/// Run something that has to wait for another session: see that it waits, let the other go on, and take the answer.
async fn blocked<T>(
    watcher: &Session,
    pid: i32,
    waits: impl Future<Output = T>,
    release: impl Future<Output = ()>,
) -> T {
    let (answer, ()) = join!(waits, async {
        watcher.wait_blocked(pid).await;
        release.await;
    });
    answer
}

/// A claim that was given up commits while the heartbeat that counts its worker's jobs waits. The answer: whether the
/// heartbeat saw that, and how many claims are left to be found.
async fn claim_during_a_heartbeat(cure: bool) -> (bool, i64) {
    let (queue, s) = Queue::with_session().await;
    if !cure {
        s.cripple("heartbeat", "exit when before.oldest_seq = from_seq and", "exit when true or").await;
    }
    let (beats, watcher) = (queue.session().await, queue.session().await);
    s.enqueue_bulk("k", "t", 3).await;
    let worker = s.worker(&["k"]).await;
    s.run("begin").await;
    worker.claim(&s, 3).await;
    let pulse = blocked(&watcher, beats.pid, beats.beat(worker.id, (1, 2), &[], false), s.run("commit")).await.unwrap();
    (pulse.mismatch, s.count("posthouse.claimed").await)
}

#[tokio::test]
async fn a_heartbeat_counts_a_claim_that_commits_while_it_waits() {
    assert_eq!(claim_during_a_heartbeat(true).await, (true, 1));
    assert_eq!(claim_during_a_heartbeat(false).await, (false, 0));
}

/// Claim 2 is about to commit, and its answer to be on its way, when a heartbeat comes that was made up before.
/// The answer: how many jobs went back.
async fn reconcile_against_a_claim(cure: bool) -> i32 {
    let (queue, s) = Queue::with_session().await;
    if !cure {
        s.cripple("heartbeat", "where j.seq <= heartbeat.mark\n", "where true\n").await;
    }
    let beats = queue.session().await;
    let watcher = queue.session().await;
    s.enqueue_bulk("k", "t", 4).await;
    let worker = s.worker(&["k"]).await;
    let first = worker.claim(&s, 2).await;
    s.run("begin").await;
    let second = worker.claim(&s, 2).await;
    let list = held(&first);
    // It waits for the claim, so that it cannot miss what that takes.
    let pulse =
        blocked(&watcher, beats.pid, beats.beat(worker.id, (1, 1), &list, true), s.run("commit")).await.unwrap();
    if cure {
        // The answer arrives; now the worker holds them, and the next heartbeat agrees.
        let all = [held(&first), held(&second)].concat();
        let pulse = beats.beat(worker.id, (2, 1), &all, false).await.unwrap();
        assert_eq!(pulse, Pulse { mismatch: false, cancel: vec![], lost: vec![], released: 0 });
    }
    pulse.released
}

#[tokio::test]
async fn reconcile_leaves_a_claim_alone_whose_answer_is_on_its_way() {
    assert_eq!(reconcile_against_a_claim(true).await, 0);
    assert_eq!(reconcile_against_a_claim(false).await, 2);
}

/// A heartbeat that came in time and has not committed yet when somebody else sees the lease run out and rescues.
/// The answer: the state of the worker's job.
async fn rescue_against_a_heartbeat(rescue: &str) -> String {
    let (queue, s) = Queue::with_session().await;
    s.run(
        "create function naive_rescue(suspects jsonb) returns bigint language sql as $$
           with dead as (select w.id from posthouse.worker w where w.expires_at <= clock_timestamp()),
           moved as (update posthouse.job j set state = 'queued', worker = null from dead where j.worker = dead.id returning 1)
           select count(*) from moved $$",
    )
    .await;
    let id = s.enqueue("kind => 'k'").await;
    let worker = s.worker_of(&["default"], &["k"], 2_000).await;
    worker.claim(&s, 1).await;
    s.run("update posthouse.worker set expires_at = clock_timestamp() + interval '1 second'").await;
    let suspects: String = s
        .get("select jsonb_agg(jsonb_build_object('worker', id, 'beat_at', beat_at))::text from posthouse.worker")
        .await;
    wait_until(SOON, "the server is up for a lease", async || {
        s.get("select clock_timestamp() > pg_postmaster_start_time() + interval '2 seconds'").await
    })
    .await;
    s.run("update posthouse.worker set expires_at = clock_timestamp() + interval '300 milliseconds'").await;
    let beats = queue.session().await;
    beats.run("begin").await;
    beats.beat(worker.id, (1, 1), &[(id, 1)], false).await.expect("in time");
    wait_until(SOON, "the lease looks over to others", async || {
        s.get("select expired from posthouse.worker_beats()").await
    })
    .await;
    s.run(IMPATIENT).await;
    s.rows(&format!("select {rescue}('{suspects}')")).await;
    beats.run("commit").await;
    // And once more with what was known before the heartbeat.
    s.rows(&format!("select {rescue}('{suspects}')")).await;
    assert!(s.get::<bool>("select dead_at is null and expires_at > clock_timestamp() from posthouse.worker").await);
    s.state(id).await
}

#[tokio::test]
async fn rescue_releases_nothing_under_a_lease_that_was_renewed_late() {
    assert_eq!(rescue_against_a_heartbeat("posthouse.rescue").await, "running");
    assert_eq!(rescue_against_a_heartbeat("naive_rescue").await, "queued");
}

#[tokio::test]
async fn a_heartbeat_that_comes_after_the_rescue_hears_that_it_is_over() {
    let (queue, s) = Queue::with_session().await;
    let (beats, watcher) = (queue.session().await, queue.session().await);
    for end in ["commit", "rollback"] {
        let id = s.enqueue("kind => 'k'").await;
        let worker = s.worker(&["k"]).await;
        worker.claim(&s, 1).await;
        // The heartbeat has found the row in time, and waits for it.
        s.run(&format!("begin; update posthouse.worker set dead_at = clock_timestamp() where id = '{}'", worker.id))
            .await;
        assert_eq!(s.get::<i32>("select jobs from posthouse.rescue('[]')").await, 1);
        let pulse = blocked(&watcher, beats.pid, beats.beat(worker.id, (1, 1), &[(id, 1)], false), s.run(end)).await;
        assert_eq!(
            (pulse.is_some(), &*s.state(id).await),
            if end == "commit" { (false, "queued") } else { (true, "running") }
        );
        s.run(&format!("select posthouse.retire_worker('{}'); select posthouse.cancel({id})", worker.id)).await;
    }
}

#[tokio::test]
async fn a_claim_in_flight_keeps_its_worker_from_being_declared_dead() {
    let (queue, s) = Queue::with_session().await;
    let rescuer = queue.session().await;
    rescuer.run(IMPATIENT).await;
    s.enqueue_bulk("k", "t", 2).await;
    let worker = s.worker_of(&["default"], &["k"], 2_000).await;
    s.run("begin").await;
    assert_eq!(worker.claim(&s, 2).await.len(), 2);
    wait_until(SOON, "the lease is over", async || rescuer.get("select expired from posthouse.worker_beats()").await)
        .await;
    assert_eq!(rescuer.rescue(worker.id).await, 0);
    assert!(rescuer.get::<bool>("select dead_at is null from posthouse.worker").await);
    s.run("commit").await;
    assert_eq!(rescuer.rescue(worker.id).await, 2);
    // Two sweepers at once: the second goes around what the first works on.
    let other = s.worker(&["k"]).await;
    other.claim(&s, 1).await;
    other.claim(&s, 1).await;
    s.run(&format!("update posthouse.worker set dead_at = clock_timestamp() where id = '{}'", other.id)).await;
    s.run("begin").await;
    assert_eq!(s.get::<i32>("select jobs from posthouse.rescue('[]', 1)").await, 1);
    rescuer.run("begin").await;
    let rest = rescuer.get::<i32>("select jobs from posthouse.rescue('[]')").await;
    rescuer.run("commit").await;
    s.run("commit").await;
    // What the first had locked ahead is found the next time.
    let last = rescuer.get::<i32>("select jobs from posthouse.rescue('[]')").await;
    assert_eq!(rest + last, 1);
}

#[tokio::test]
async fn a_settle_repeated_after_its_answer_was_lost_says_already() {
    let (queue, s) = Queue::with_session().await;
    let proxy = FaultProxy::start(queue.url()).await;
    let through = async || {
        let (client, connection) =
            tokio_postgres::connect(&proxy.url(queue.url()), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    };
    for (lost, verdict) in [
        ("commit answer", "already"),
        ("settle answer", "already"),
        ("commit request", "applied"),
        ("settle request", "applied"),
    ] {
        let outcomes = ["done", "retry", "snooze", "fail", "cancelled", "release"];
        s.enqueue_bulk("k", "t", 6).await;
        let worker = s.worker(&["k"]).await;
        let jobs = worker.claim(&s, 6).await;
        let settle = format!(
            "select * from posthouse.settle('{}', '{}')",
            worker.id,
            json!(
                outcomes
                    .iter()
                    .zip(&jobs)
                    .map(|(o, j)| json!({"id": j.id, "fence": j.fence, "outcome": o, "delay_ms": 3600000}))
                    .collect::<Vec<_>>()
            )
        );
        let client = through().await;
        let marker = if lost.starts_with("commit") { "commit" } else { "posthouse.settle" };
        if lost.ends_with("answer") {
            proxy.lose_answer_to(marker)
        } else {
            proxy.lose_request(marker)
        }
        let mut result = Ok(());
        for sql in if marker == "commit" { vec!["begin", &settle, "commit"] } else { vec![&*settle] } {
            result = result.and(client.batch_execute(sql).await);
        }
        assert!(result.is_err(), "{lost}");
        let verdicts = s.rows(&settle).await;
        assert!(verdicts.iter().all(|row| row.get::<_, &str>(2) == verdict), "{lost}");
        let once = s.count("posthouse.attempt").await
            + s.count("posthouse.archive").await
            + s.count("posthouse.dead_letter").await;
        assert_eq!(once, 4, "{lost}");
        s.run("delete from posthouse.attempt; delete from posthouse.job; delete from posthouse.archive; delete from posthouse.dead_letter").await;
    }
    assert_eq!(proxy.cuts(), 4);
}

#[tokio::test]
async fn the_same_claim_from_two_sessions_takes_its_jobs_once() {
    let (queue, s) = Queue::with_session().await;
    let (again, watcher) = (queue.session().await, queue.session().await);
    s.enqueue_bulk("k", "t", 10).await;
    let worker = s.worker(&["k"]).await;
    // The connection broke while the server still works on the claim; the worker asks again on a new one.
    s.run("begin").await;
    let jobs = worker.claim_as(&s, 1, 3).await.unwrap();
    let refused = blocked(&watcher, again.pid, worker.claim_as(&again, 1, 3), s.run("commit")).await.unwrap_err();
    assert_eq!(refused.code, "40001", "{}", refused.message);
    assert_eq!(worker.claim_as(&again, 1, 3).await.unwrap(), jobs);
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 3);
}

/// A lane that a claim wants to put to sleep while an enqueue into it is under way. The answer: what a claim finds after
/// the enqueue's commit.
async fn sleep_against_an_enqueue(cure: bool) -> usize {
    let (queue, s) = Queue::with_session().await;
    if !cure {
        s.cripple("hold_lane", "pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int)", "1").await;
        s.cripple("enqueue", "pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int)", "1").await;
    }
    let enqueuer = queue.session().await;
    s.run(IMPATIENT).await;
    let worker = s.worker(&["k"]).await;
    s.enqueue("kind => 'k'").await;
    worker.claim(&s, 1).await;
    enqueuer.run("begin").await;
    enqueuer.enqueue("kind => 'k'").await;
    s.run(NO_FLAPPING).await;
    assert!(worker.claim(&s, 1).await.is_empty());
    let asleep = s.count("posthouse.lane where ready_at = 'infinity'").await;
    assert_eq!(asleep, i64::from(!cure));
    enqueuer.run("commit").await;
    worker.claim(&s, 1).await.len()
}

#[tokio::test]
async fn a_lane_does_not_fall_asleep_over_an_open_enqueue() {
    assert_eq!(sleep_against_an_enqueue(true).await, 1);
    assert_eq!(sleep_against_an_enqueue(false).await, 0);
}

/// A transaction with an old snapshot, which shows the lane awake, enqueues after the lane fell asleep. The answer: whether a
/// job was committed that no claim finds.
async fn enqueue_with_an_old_snapshot(level: &str, cure: bool) -> bool {
    let (queue, s) = Queue::with_session().await;
    if !cure {
        s.cripple("wake_lane", "= 'read committed'", "<> 'none'").await;
    }
    let enqueuer = queue.session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue("kind => 'k'").await;
    worker.claim(&s, 1).await;
    enqueuer.run(&format!("begin isolation level {level}; select count(*) from posthouse.job")).await;
    s.run(NO_FLAPPING).await;
    assert!(worker.claim(&s, 1).await.is_empty());
    assert_eq!(s.count("posthouse.lane where ready_at = 'infinity'").await, 1);
    let enqueue = "select * from posthouse.enqueue('k')";
    if let Err(error) = enqueuer.client.batch_execute(enqueue).await {
        // A stable code that says: run the transaction again. And then it works.
        assert_eq!(refusal(&error).code, "40001");
        enqueuer.run(&format!("rollback; begin isolation level {level}; {enqueue}")).await;
    }
    enqueuer.run("commit").await;
    assert_eq!(s.count("posthouse.job where state = 'queued'").await, 1);
    worker.claim(&s, 1).await.is_empty()
}

#[tokio::test]
async fn an_enqueue_with_an_old_snapshot_is_found() {
    for level in ["read committed", "repeatable read", "serializable"] {
        assert!(!enqueue_with_an_old_snapshot(level, true).await, "{level}");
    }
    assert!(enqueue_with_an_old_snapshot("repeatable read", false).await);
}

/// A floor that rises while an enqueue is open. The answer: what a claim finds after its commit, before and after the sweep
/// for stragglers.
async fn floors_against_an_enqueue(function: &str, cure: &str, without: &str) -> (usize, usize) {
    let (queue, s) = Queue::with_session().await;
    s.cripple(function, cure, without).await;
    let enqueuer = queue.session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue("kind => 'k'").await;
    worker.claim(&s, 1).await;
    // The transaction began long before its enqueue, and other work goes on during it.
    enqueuer.run("begin").await;
    enqueuer.enqueue("kind => 'k'").await;
    s.run("select pg_sleep(0.2)").await;
    let between = s.enqueue("kind => 'k'").await;
    assert_eq!(ids(&worker.claim(&s, 1).await), [between]);
    s.run("select posthouse.advance_floors()").await;
    enqueuer.run("commit").await;
    s.run("select posthouse.advance_floors()").await;
    let found = worker.claim(&s, 10).await.len();
    s.run(TIDY).await;
    (found, worker.claim(&s, 10).await.len())
}

#[tokio::test]
async fn a_floor_does_not_pass_an_enqueue_that_is_still_open() {
    let own = "k.pid is distinct from pg_backend_pid()";
    assert_eq!(floors_against_an_enqueue("oldest_writer", own, own).await, (1, 0));
    // Without the look at open transactions the floor passes it, and only the sweep for stragglers finds it.
    assert_eq!(floors_against_an_enqueue("oldest_writer", own, "false").await, (0, 1));
    // The same after the bound: a transaction that stays open longer holds no floor back.
    let bound = "interval '30 seconds'";
    assert_eq!(floors_against_an_enqueue("advance_floors", bound, "interval '0'").await, (0, 1));
}

/// A job given back to the front of the line while floors rise, in either order. The answer: what a claim finds.
async fn floors_against_a_release(floors_first: bool, cure: bool) -> usize {
    let (queue, s) = Queue::with_session().await;
    if !cure {
        s.cripple("requeue_job", "perform pg_advisory_xact_lock_shared(1346912000, 2);", "").await;
    }
    let (other, watcher) = (queue.session().await, queue.session().await);
    let worker = s.worker(&["k"]).await;
    let id = s.enqueue("kind => 'k'").await;
    worker.claim(&s, 1).await;
    let release = format!("select posthouse.release('{}', '{{{id}}}', '{{1}}')", worker.id);
    let advance = "select posthouse.advance_floors()";
    s.run("select pg_sleep(0.2)").await;
    if floors_first {
        other.run(&format!("begin; {advance}")).await;
        if cure {
            blocked(&watcher, s.pid, s.run(&release), other.run("commit")).await;
        } else {
            s.run(&release).await;
            other.run("commit").await;
        }
    } else {
        s.run(&format!("begin; {release}")).await;
        other.run(IMPATIENT).await;
        other.run(advance).await;
        s.run("commit").await;
    }
    worker.claim(&s, 10).await.len()
}

#[tokio::test]
async fn a_job_given_back_does_not_land_behind_a_floor() {
    for floors_first in [true, false] {
        assert_eq!(floors_against_a_release(floors_first, true).await, 1);
    }
    assert_eq!(floors_against_a_release(true, false).await, 0);
}

#[tokio::test]
async fn an_open_enqueue_blocks_no_other_enqueuer() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    other.run(IMPATIENT).await;
    let mut committed = 0;
    for level in ["read committed", "repeatable read", "serializable"] {
        // Into a lane that is new, one that is awake, and one that sleeps; and many at once.
        for lane in ["drop", "keep", "sleep"] {
            if lane == "drop" {
                committed = 0;
                s.run("delete from posthouse.lane; delete from posthouse.job").await;
            } else if lane == "sleep" {
                s.run("update posthouse.lane set ready_at = 'infinity'").await;
            }
            for session in [&s, &other] {
                session.run(&format!("begin isolation level {level}")).await;
                session.enqueue("kind => 'k'").await;
                session.enqueue_bulk("k", "default", 3).await;
            }
            for session in [&other, &s] {
                match session.client.batch_execute("commit").await {
                    Ok(()) => committed += 4,
                    // Serializable transactions that do the same at once are asked to be run again, by Postgres' own rules.
                    Err(error) => assert_eq!((level, &*refusal(&error).code), ("serializable", "40001")),
                }
            }
        }
        let worker = s.worker(&["k"]).await;
        // This test put lanes to sleep that had work.
        s.run("update posthouse.lane set ready_at = '-infinity'").await;
        assert_eq!(worker.claim(&s, 1000).await.len(), committed, "{level}");
        assert!(committed >= 12);
    }
}

#[tokio::test]
async fn an_enqueue_waits_for_the_open_transaction_that_holds_its_key() {
    let (queue, s) = Queue::with_session().await;
    let (waiter, other, watcher) = (queue.session().await, queue.session().await, queue.session().await);
    other.run(IMPATIENT).await;
    let key = "kind => 'k', dedupe_key => 'a'";
    for end in ["commit", "rollback"] {
        s.run("delete from posthouse.dedupe").await;
        s.run("begin").await;
        let first = s.enqueue(key).await;
        let (id, _, duplicate) = blocked(&watcher, waiter.pid, waiter.enqueued(key), async {
            // Other keys and jobs without one are not delayed.
            other.enqueue("kind => 'k', dedupe_key => 'b'").await;
            other.enqueue("kind => 'k', tenant => 't', dedupe_key => 'a'").await;
            other.enqueue("kind => 'k'").await;
            s.run(end).await;
        })
        .await;
        assert_eq!((id == first, duplicate), if end == "commit" { (true, true) } else { (false, false) });
    }
    // A settle that frees the key, and is not over yet.
    let worker = s.worker(&["k"]).await;
    for (end, outcome) in [("rollback", "done"), ("commit", "fail")] {
        s.run("delete from posthouse.job; delete from posthouse.dedupe").await;
        let first = s.enqueue(key).await;
        let fence = worker.claim(&s, 1).await[0].fence;
        s.run("begin").await;
        s.settle(worker.id, &json!([{"id": first, "fence": fence, "outcome": outcome}])).await;
        let (id, _, duplicate) = blocked(&watcher, waiter.pid, waiter.enqueued(key), s.run(end)).await;
        assert_eq!((id == first, duplicate), if end == "rollback" { (true, true) } else { (false, false) });
    }
    // An old snapshot cannot tell who holds the key: a stable code says that the transaction is to be run again.
    for level in ["repeatable read", "serializable"] {
        s.run("delete from posthouse.job; delete from posthouse.dedupe").await;
        s.run("begin").await;
        s.enqueue(key).await;
        waiter.run(&format!("begin isolation level {level}; select 1 from posthouse.job")).await;
        let sql = format!("select * from posthouse.enqueue({key})");
        let refused = blocked(&watcher, waiter.pid, waiter.refused(&sql), s.run("commit")).await;
        assert!(["40001", "PH007"].contains(&&*refused.code), "{refused:?}");
        waiter.run("rollback").await;
    }
}

#[tokio::test]
async fn batches_take_their_keys_in_one_order() {
    let (queue, s) = Queue::with_session().await;
    let (batch, other, watcher) = (queue.session().await, queue.session().await, queue.session().await);
    other.run(IMPATIENT).await;
    s.run("begin").await;
    s.enqueue("kind => 'k', dedupe_key => 'a'").await;
    // The batch names b first, and yet waits for a before it takes b: two batches can never wait for each other.
    let sql =
        r#"select posthouse.enqueue_many('[{"kind": "k", "dedupe_key": "b"}, {"kind": "k", "dedupe_key": "a"}]')"#;
    blocked(&watcher, batch.pid, batch.run(sql), async {
        other.run("begin").await;
        other.enqueue("kind => 'k', dedupe_key => 'b'").await;
        other.run("rollback").await;
        s.run("commit").await;
    })
    .await;
    assert_eq!(s.count("posthouse.job").await, 2);
}

#[tokio::test]
async fn a_settle_never_waits_for_an_open_enqueue_that_looks_at_its_key() {
    let (queue, s) = Queue::with_session().await;
    let enqueuer = queue.session().await;
    s.run(IMPATIENT).await;
    let worker = s.worker(&["k"]).await;
    for outcome in ["done", "fail", "cancelled"] {
        let key = "kind => 'k', dedupe_key => 'a'";
        let id = s.enqueue(key).await;
        let fence = worker.claim(&s, 1).await[0].fence;
        enqueuer.run("begin").await;
        assert_eq!(enqueuer.enqueued(key).await, (id, "running".to_owned(), true));
        let verdicts = s.settle(worker.id, &json!([{"id": id, "fence": fence, "outcome": outcome}])).await;
        assert_eq!(said(&verdicts)[0].0, "applied");
        enqueuer.run("commit").await;
        // The key stands for nothing now, though its row is still here.
        let (next, _, duplicate) = s.enqueued(key).await;
        assert!(next != id && !duplicate);
        s.get::<String>(&format!("select posthouse.cancel({next})")).await;
        assert_eq!(s.count("posthouse.dedupe").await, 0);
    }
}

/// The sweep finds a key without a live job at the moment when an enqueue gives it to a new one. The answer: whether the
/// new job still holds it.
async fn fold_against_an_enqueue(cure: bool) -> bool {
    let (queue, s) = Queue::with_session().await;
    // The look at the keys waits, after it took its snapshot, for a lock that the test holds.
    let pause = "where (select true from pg_advisory_xact_lock(77)) and x.expires_at is null and x.next_id is null and not exists";
    s.cripple("fold", "where x.expires_at is null and x.next_id is null and not exists", pause).await;
    if !cure {
        s.cripple(
            "fold",
            "and d.expires_at is null and d.next_id is null and not exists (select from posthouse.job j where j.id = d.job_id)",
            "",
        )
        .await;
    }
    let (sweeper, holder, watcher) = (queue.session().await, queue.session().await, queue.session().await);
    s.run("insert into posthouse.dedupe values ('default', 'k', 'a', 4711, null)").await;
    holder.run("select pg_advisory_lock(77)").await;
    let id = blocked(&watcher, sweeper.pid, sweeper.run("select posthouse.fold()"), async {
        s.enqueue("kind => 'k', dedupe_key => 'a'").await;
        holder.run("select pg_advisory_unlock(77)").await;
    });
    id.await;
    s.enqueued("kind => 'k', dedupe_key => 'a'").await.2
}

#[tokio::test]
async fn the_sweep_does_not_forget_a_key_that_was_just_given_to_a_new_job() {
    assert!(fold_against_an_enqueue(true).await);
    assert!(!fold_against_an_enqueue(false).await);
}

#[tokio::test]
async fn a_cancel_and_a_settle_at_the_same_instant_have_one_outcome() {
    let (queue, s) = Queue::with_session().await;
    let canceller = queue.session().await;
    let worker = s.worker(&["k"]).await;
    let mut seen = std::collections::BTreeMap::<String, usize>::new();
    for round in 0..1_000 {
        let id = s.enqueue("kind => 'k', dedupe_key => 'one'").await;
        let fence = worker.claim(&s, 1).await[0].fence;
        let outcome = ["done", "retry", "fail", "snooze"][round % 4];
        let wait = async || tokio::time::sleep(Duration::from_micros(fastrand::u64(0..800))).await;
        let outcomes = json!([{"id": id, "fence": fence, "outcome": outcome, "delay_ms": 0}]);
        let (answer, verdicts) = join!(
            async {
                wait().await;
                canceller.get::<String>(&format!("select posthouse.cancel({id})")).await
            },
            async {
                wait().await;
                s.settle(worker.id, &outcomes).await
            }
        );
        assert_eq!(verdicts[0].1, "applied");
        let settled = verdicts[0].2.clone().unwrap();
        let end = s.state(id).await;
        *seen.entry(format!("{outcome}: cancel {answer}, settle {settled}, {end}")).or_default() += 1;
        let linear: &[(&str, &str, &str)] = match outcome {
            // (what cancel answered, what settle answered, what it is now)
            "done" => &[("running", "done", "done"), ("done", "done", "done")],
            "fail" => &[("running", "failed", "failed"), ("failed", "failed", "failed")],
            _ => &[
                ("running", "cancelled", "cancelled"),
                ("cancelled", "queued", "cancelled"),
                ("cancelled", "cancelled", "cancelled"),
            ],
        };
        assert!(
            linear.contains(&(&answer, &settled, &end)),
            "{outcome}: cancel {answer}, settle {settled}, then {end}"
        );
        let homes = s.count(&format!("posthouse.jobs where id = {id}")).await;
        assert_eq!((homes, s.count("posthouse.dedupe").await), (1, 0), "{outcome}");
    }
    assert!(seen.len() >= 6, "the offsets never met: {seen:?}");
}

#[tokio::test]
async fn a_partition_made_after_an_old_snapshot_is_found() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    for level in ["repeatable read", "serializable"] {
        other.run(&format!("begin isolation level {level}; select count(*) from posthouse.id_range")).await;
        s.run("select setval('posthouse.job_id_seq', (select max(upper) from posthouse.id_range))").await;
        s.enqueue("kind => 'k'").await;
        other.enqueue("kind => 'k'").await;
        other.enqueue_bulk("k", "t", 3).await;
        other.run("commit").await;
    }
    assert_eq!(s.count("posthouse.payload").await, 10);
}

#[tokio::test]
async fn an_open_enqueue_that_made_a_partition_holds_up_no_sweep() {
    let (queue, s) = Queue::with_session().await;
    let sweeper = queue.session().await;
    sweeper.run(IMPATIENT).await;
    s.run("select setval('posthouse.job_id_seq', (select max(upper) from posthouse.id_range))").await;
    s.run("begin").await;
    s.enqueue("kind => 'k'").await;
    sweeper.run(TIDY).await;
    // Nor those who enqueue into the partitions that are there.
    sweeper.run("select setval('posthouse.job_id_seq', 10)").await;
    sweeper.enqueue("kind => 'k'").await;
    s.run("commit").await;
    sweeper.run(TIDY).await;
    assert_eq!(s.count("posthouse.payload").await, 2);
}
