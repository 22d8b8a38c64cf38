//! What is known of slices: when it is found out, what may change it, and that neither a drop nor a deletion goes by what no longer holds.

use posthouse::testing::TestCluster;
use serde_json::{Value, json};

use super::partitions::{expire, ids_up_to, old_jobs, old_jobs_in, retire};
use super::support::{Queue, Session, said};
use crate::harness::{SOON, wait_until};
use crate::worker_support::database_on;

async fn survey(s: &Session) {
    while s.get::<bool>("select posthouse.survey_slices()").await {}
}

/// Let what is due be deleted until nothing is, looking at nothing else.
async fn only_expire(s: &Session) {
    while s.get::<bool>("select posthouse.expire()").await {}
}

#[tokio::test]
async fn history_is_looked_at_again_only_where_something_has_changed() {
    let (_queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 1_100_000).await;
    survey(&s).await;
    let stale = "posthouse.slice where stale";
    assert_eq!(s.count(stale).await, 0);
    s.run("select posthouse.set_queue('q', '30 days'), posthouse.set_queue('other', null, 'failed')").await;
    assert_eq!(s.count(stale).await, 0, "nothing is different");
    for (queue, time) in [("q", "'1 month'"), ("q", "'31 days'"), ("q", "null"), ("other", "'1 day'")] {
        s.run(&format!("select posthouse.set_queue('{queue}', {time})")).await;
        assert!(s.count(stale).await > 100, "{queue} {time}");
        survey(&s).await;
    }
    // Slices that are made meanwhile would be overlooked.
    s.run("begin isolation level repeatable read").await;
    assert_eq!(s.refused("select posthouse.set_queue('q', '1 day')").await.code, "PH002");
    s.run("rollback").await;
}

#[tokio::test]
async fn what_is_not_known_elsewhere_keeps_nothing_from_expiring() {
    let (_queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 500_000).await;
    survey(&s).await;
    s.run("update posthouse.slice set stale = true").await;
    only_expire(&s).await;
    assert_eq!(s.count("posthouse.archive").await, 0);
}

#[tokio::test]
async fn a_partition_that_may_be_over_is_waited_for_but_not_for_its_dead_letters() {
    let (queue, s, worker) = old_jobs().await;
    s.run("select posthouse.set_queue('q', '20 days', 'failed')").await;
    let id = s.enqueue("kind => 'k', queue => 'q'").await;
    worker.claim(&s, 10).await;
    s.settle(worker.id, &json!([{"id": id, "fence": 1, "outcome": "fail"}])).await;
    ids_up_to(&s, 1_100_000).await;
    survey(&s).await;
    s.run("update posthouse.dead_letter set failed_at = failed_at - interval '25 days'; update posthouse.slice set stale = true where lower = 500000")
        .await;
    let hour_later = "update posthouse.slice set due_at = '-infinity' where due_at < 'infinity'";
    s.run(hour_later).await;
    only_expire(&s).await;
    assert_eq!((s.count("posthouse.dead_letter").await, s.count("posthouse.archive").await), (0, 1_001));
    assert!(s.count("posthouse.slice where due_at < clock_timestamp() + interval '1 minute'").await > 0);
    // All is over, and somebody holds it.
    survey(&s).await;
    let reader = queue.session().await;
    reader.run("begin; select from posthouse.archive").await;
    s.run(hour_later).await;
    only_expire(&s).await;
    assert_eq!((s.count("posthouse.archive").await, retire(&s).await), (1_001, vec!["busy".to_owned()]));
    assert_eq!(s.count("posthouse.slice where due_at < clock_timestamp() + interval '50 minutes'").await, 0);
    reader.run("commit").await;
    // It turns out that one of them is not over.
    s.run("update posthouse.slice set over_at = 'infinity' where lower = 500000").await;
    s.run(hour_later).await;
    only_expire(&s).await;
    assert_eq!(s.count("posthouse.archive").await, 0);
}

/// A job that was enqueued by a transaction that was prepared and outlived a start of Postgres, and ended after all beside it had
/// expired. The answer: its state.
async fn prepared(counts: bool) -> String {
    let settings = [("max_prepared_transactions", "5")];
    let cluster = tokio::task::spawn_blocking(move || TestCluster::dedicated(&settings)).await.unwrap();
    let database = database_on(&cluster).await;
    let session = async || {
        let client = database.connect().await;
        let pid = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
        Session { client, pid }
    };
    let (mut s, other) = (session().await, session().await);
    let _worker = old_jobs_in(&s).await;
    other.run("begin").await;
    other.run("set local posthouse.notify = 'off'").await;
    let id = other.enqueue("kind => 'k', queue => 'q', delay => '1 hour'").await;
    ids_up_to(&s, 1_100_000).await;
    survey(&s).await;
    other.run("prepare transaction 'later'").await;
    cluster.server().restart().unwrap();
    s = session().await;
    if !counts {
        s.cripple("is_open", "h.name like '-1/%'", "false").await;
    }
    s.run("update posthouse.slice set stale = true").await;
    survey(&s).await;
    s.run("commit prepared 'later'").await;
    assert_eq!(s.get::<String>(&format!("select posthouse.cancel({id})")).await, "cancelled");
    expire(&s).await;
    retire(&s).await;
    s.state(id).await
}

#[tokio::test]
async fn a_transaction_that_was_prepared_still_holds_its_ids() {
    assert_eq!(prepared(true).await, "cancelled");
    assert_eq!(prepared(false).await, "");
}

#[tokio::test]
async fn a_day_is_24_hours_wherever_the_sweep_runs() {
    let (_queue, s, _worker) = old_jobs().await;
    // The clocks were put forward that night.
    s.run(
        "set timezone = 'Europe/Berlin'; update posthouse.archive set finished_at = '2025-03-29 12:00:00+01';
         select posthouse.set_queue('q', '1 day')",
    )
    .await;
    let over: String =
        s.get("select (over_at at time zone 'UTC')::text from posthouse.survey_slice(0, '{}', true)").await;
    assert_eq!(over, "2025-03-30 11:00:00");
}

#[tokio::test]
async fn a_partition_is_complete_once_its_last_id_is_handed_out() {
    let (_queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 999_999).await;
    expire(&s).await;
    assert_eq!(retire(&s).await, ["detached", "dropped", "idle"]);
}

#[tokio::test]
async fn a_detached_partition_that_is_held_keeps_no_other_from_going() {
    let (queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 2_100_000).await;
    expire(&s).await;
    let step = async || s.get::<String>("select posthouse.retire()").await;
    assert_eq!(step().await, "detached");
    let name: String = s.get("select min(name) from posthouse.detached").await;
    let reader = queue.session().await;
    reader.run(&format!("begin; select from posthouse.{name}")).await;
    assert_eq!(step().await, "dropped", "its other half");
    assert_eq!(retire(&s).await, ["detached", "dropped", "busy"]);
    assert_eq!(s.list::<String>("select name from posthouse.detached").await, [name]);
    reader.run("commit").await;
    assert_eq!(retire(&s).await, ["dropped", "idle"]);
}

#[tokio::test]
async fn statistics_that_somebody_stands_in_the_way_of_are_no_failure() {
    let (queue, s, _worker) = old_jobs().await;
    let other = queue.session().await;
    let rows = "select coalesce(sum(pg_stat_get_live_tuples(i.inhrelid)), 0)::bigint from pg_inherits i where i.inhparent = 'posthouse.archive'::regclass";
    wait_until(SOON, "the rows are counted", async || s.get::<i64>(rows).await > 1_000).await;
    other.run("begin; lock table only posthouse.archive, posthouse.payload in share update exclusive mode").await;
    let analyze = "update posthouse.sweep set ran_at = '-infinity' where name = 'analyze'";
    s.run(analyze).await;
    assert_eq!(s.get::<Value>("select posthouse.tidy('analyze') -> 'failed'").await, json!([]));
    let seen = "select reltuples::float8 from pg_class where oid = 'posthouse.archive'::regclass";
    assert!(s.get::<f64>(seen).await < 1_000.0);
    other.run("commit").await;
    s.run(analyze).await;
    s.run("select posthouse.tidy('analyze')").await;
    assert!(s.get::<f64>(seen).await > 1_000.0);
}

#[tokio::test]
async fn a_dead_letter_of_long_ago_is_found_beside_younger_jobs() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["q"], &["k"], 3_600_000).await;
    s.run("select posthouse.set_queue('q', '30 days'), posthouse.set_queue('q', '10 days', 'failed')").await;
    for outcome in ["done", "fail", "done"] {
        let id = s.enqueue("kind => 'k', queue => 'q'").await;
        worker.claim(&s, 1).await;
        let settled = s.settle(worker.id, &json!([{"id": id, "fence": 1, "outcome": outcome}])).await;
        assert_eq!(said(&settled)[0].0, "applied");
    }
    s.run("update posthouse.dead_letter set failed_at = failed_at - interval '20 days'").await;
    expire(&s).await;
    assert_eq!((s.count("posthouse.dead_letter").await, s.count("posthouse.archive").await), (0, 2));
}

/// A dead letter that was redriven, failed, and is redriven again while its slice is looked at.
#[tokio::test]
async fn a_job_that_comes_back_again_and_again_keeps_its_partition() {
    let (queue, s, worker) = old_jobs().await;
    let other = queue.session().await;
    let id = s.enqueue("kind => 'k', queue => 'q', max_attempts => 1").await;
    let end = async |outcome: &str| {
        let job = worker.claim(&s, 10).await.remove(0);
        let ended = json!([{"id": id, "fence": job.fence, "outcome": outcome, "result": "paid"}]);
        assert_eq!(said(&s.settle(worker.id, &ended).await)[0].0, "applied");
    };
    end("fail").await;
    ids_up_to(&s, 1_100_000).await;
    survey(&s).await;
    let redrive = format!("select posthouse.redrive(array[{id}])");
    s.run(&redrive).await;
    end("fail").await;
    other.run(&format!("begin; {redrive}")).await;
    survey(&s).await;
    other.run("commit").await;
    end("done").await;
    retire(&s).await;
    expire(&s).await;
    retire(&s).await;
    assert_eq!((s.state(id).await, &s.job(id).await["result"]), ("done".to_owned(), &json!("paid")));
}

#[tokio::test]
async fn what_somebody_brings_back_keeps_nothing_else_from_expiring() {
    let (queue, s, _worker) = old_jobs().await;
    let other = queue.session().await;
    s.run("update posthouse.archive set state = 'cancelled' where id = 11; set lock_timeout = '2s'").await;
    ids_up_to(&s, 20_000).await;
    survey(&s).await;
    other.run("begin; select posthouse.retry(11)").await;
    only_expire(&s).await;
    assert_eq!(s.list::<i64>("select id from posthouse.archive").await, [11]);
    other.run("rollback; update posthouse.slice set due_at = '-infinity' where due_at < 'infinity'").await;
    only_expire(&s).await;
    assert_eq!(s.count("posthouse.archive").await, 0);
}
