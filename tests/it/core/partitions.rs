//! Partitions of payload and archive: made where they are missing, few, dropped whole when all in them has expired, whoever
//! reads, redrives, settles late or dies meanwhile.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::support::{Queue, Session, Worker, said};
use crate::harness::{SOON, wait_until};
use crate::worker_support::{Background, worker_at};

/// How long a test waits for what the sweep does in pieces of ten milliseconds, with rests of many times that in between: on a slow machine a
/// piece is a slice or two.
const GENTLY: Duration = Duration::from_secs(120);

/// Sweep what has expired until nothing is left to do.
pub(super) async fn expire(s: &Session) {
    while s.get::<bool>("select posthouse.survey_slices()").await {}
    while s.get::<bool>("select posthouse.expire()").await {}
}

/// Go on with dropping until there is nothing more to do, or somebody is in the way. Answers with the steps.
pub(super) async fn retire(s: &Session) -> Vec<String> {
    let mut steps = Vec::new();
    loop {
        let step: String = s.get("select posthouse.retire()").await;
        let last = step == "idle" || step == "busy";
        steps.push(step);
        if last {
            return steps;
        }
    }
}

/// The ranges that have partitions, by their lower ends, as the books say and as it is.
async fn ranges(s: &Session) -> Vec<i64> {
    let booked: Vec<i64> = s.list("select lower from posthouse.id_range order by lower").await;
    let made: Vec<i64> = s
        .list(
            "select lower from posthouse.id_range where posthouse.partition_of('posthouse.payload', lower, upper) is not null
               and posthouse.partition_of('posthouse.archive', lower, upper) is not null order by lower",
        )
        .await;
    assert_eq!(booked, made);
    let attached: i64 = s
        .get(
            "select count(*) from pg_inherits where inhparent in ('posthouse.payload'::regclass, 'posthouse.archive'::regclass)",
        )
        .await;
    assert_eq!(attached, 2 * i64::try_from(booked.len()).unwrap());
    booked
}

/// A queue that keeps jobs for 30 days, and jobs in its first partition that were done 40 days ago, with ids up to 10,000 or
/// so; the ids since are in the third one.
pub(super) async fn old_jobs() -> (Queue, Session, Worker) {
    let (queue, s) = Queue::with_session().await;
    let worker = old_jobs_in(&s).await;
    (queue, s, worker)
}

pub(super) async fn old_jobs_in(s: &Session) -> Worker {
    let worker = s.worker_of(&["q"], &["k"], 3_600_000).await;
    s.run("select posthouse.set_queue('q', '30 days')").await;
    let id = s.enqueue("kind => 'k', queue => 'q', payload => '{\"a\": 1}'").await;
    worker.claim(s, 10).await;
    assert_eq!(said(&s.settle(worker.id, &done(id, 1)).await), [("applied", Some("done"))]);
    s.run(
        "insert into posthouse.archive (id, lane_id, created_at, finished_at, fence, attempt, max_attempts, state)
           select n * 11, lane_id, created_at, finished_at, 1, 1, 5, 'done' from posthouse.archive, generate_series(1, 1000) n;
         insert into posthouse.payload (id, payload) select n * 11, '{}' from generate_series(1, 1000) n;
         update posthouse.archive set finished_at = finished_at - interval '40 days'",
    )
    .await;
    worker
}

/// Let ids be handed out up to here.
pub(super) async fn ids_up_to(s: &Session, id: i64) {
    s.run(&format!("select setval('posthouse.job_id_seq', {id}); select posthouse.partitions_ahead()")).await;
}

fn done(id: i64, fence: i64) -> Value {
    json!([{"id": id, "fence": fence, "outcome": "done"}])
}

fn failed(id: i64, fence: i64) -> Value {
    json!([{"id": id, "fence": fence, "outcome": "fail", "error": {"class": "c", "message": "m"}}])
}

#[tokio::test]
async fn a_partition_in_which_all_has_expired_is_dropped_whole() {
    let (_queue, s, _worker) = old_jobs().await;
    assert_eq!(retire(&s).await, ["idle"], "ids of it are still handed out");
    ids_up_to(&s, 2_100_000).await;
    expire(&s).await;
    assert_eq!(s.count("posthouse.archive").await, 1_001, "no row was deleted by itself");
    assert_eq!(retire(&s).await, ["detached", "dropped", "detached", "dropped", "idle"], "the second one is empty");
    assert_eq!(ranges(&s).await, [2_000_000, 3_000_000]);
    for table in ["archive", "payload", "detached", "slice where lower < 2000000"] {
        assert_eq!(s.count(&format!("posthouse.{table}")).await, 0, "{table}");
    }
    assert_eq!(s.count("pg_class where relname ~ '^(payload|archive)_(0|1000000)'").await, 0);
    // Once more there is nothing to do, and the queue goes on.
    s.run("select posthouse.partitions_ahead()").await;
    assert_eq!(retire(&s).await, ["idle"]);
    s.enqueue("kind => 'k', queue => 'q'").await;
}

#[tokio::test]
async fn one_that_died_between_detach_and_drop_is_followed_by_another() {
    let (queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    // A crash before the commit is a transaction that never was.
    let dies = queue.session().await;
    dies.run("begin").await;
    assert_eq!(dies.get::<String>("select posthouse.retire()").await, "detached");
    assert_eq!(s.get::<String>("select posthouse.retire()").await, "idle", "another sweeper is at it");
    dies.run("rollback").await;
    assert_eq!(ranges(&s).await, [0, 1_000_000, 2_000_000]);
    assert_eq!(dies.get::<String>("select posthouse.retire()").await, "detached");
    drop(dies);
    assert_eq!(s.count("pg_class where relname in ('payload_0', 'archive_0')").await, 2);
    assert_eq!(retire(&s).await, ["dropped", "idle"]);
    assert_eq!(s.count("pg_class where relname in ('payload_0', 'archive_0')").await, 0);
    // One that somebody drops or attaches again by hand in between is his.
    let (_queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    assert_eq!(s.get::<String>("select posthouse.retire()").await, "detached");
    s.run(
        "drop table posthouse.payload_0;
         alter table posthouse.archive attach partition posthouse.archive_0 for values from (0) to (1000000)",
    )
    .await;
    assert_eq!(retire(&s).await, ["dropped", "idle"]);
    assert_eq!(s.count("posthouse.archive").await, 1_001);
}

#[tokio::test]
async fn two_sweepers_share_the_work() {
    let (queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 4_100_000).await;
    let other = queue.session().await;
    let sweep = async |s: &Session| {
        wait_until(GENTLY, "only the newest partitions are left", async || {
            s.run("select posthouse.survey_slices(), posthouse.expire(), posthouse.retire(), posthouse.partitions_ahead()")
                .await;
            s.count("posthouse.id_range").await == 2
        })
        .await;
    };
    tokio::join!(sweep(&s), sweep(&other));
    assert_eq!(ranges(&s).await, [4_000_000, 5_000_000]);
}

#[tokio::test]
async fn dead_letters_keep_their_payload_and_come_back() {
    let (_queue, s, worker) = old_jobs().await;
    let id = s.enqueue("kind => 'k', queue => 'q', payload => '{\"b\": 2}', trace => '{\"traceparent\": \"x\"}'").await;
    worker.claim(&s, 10).await;
    s.settle(worker.id, &failed(id, 1)).await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    assert_eq!(retire(&s).await, ["spared", "detached", "dropped", "idle"]);
    assert_eq!(ranges(&s).await, [1_000_000, 2_000_000]);
    assert_eq!((s.count("posthouse.payload").await, s.count("posthouse.spare_payload").await), (0, 1));
    assert_eq!(s.job(id).await["payload"], json!({"b": 2}));
    assert_eq!(s.get::<i64>(&format!("select posthouse.redrive(array[{id}]::bigint[])")).await, 1);
    assert_eq!(ranges(&s).await, [0, 1_000_000, 2_000_000], "its partition was made on the spot");
    assert_eq!((s.count("posthouse.payload").await, s.count("posthouse.spare_payload").await), (1, 0));
    assert_eq!(s.get::<Value>("select trace from posthouse.payload").await, json!({"traceparent": "x"}));
    let jobs = worker.claim(&s, 10).await;
    assert_eq!((jobs[0].id, &jobs[0].payload), (id, &json!({"b": 2})));
    expire(&s).await;
    assert_eq!(retire(&s).await, ["idle"], "it is live");
    assert_eq!(said(&s.settle(worker.id, &done(id, 2)).await), [("applied", Some("done"))]);
    s.run("update posthouse.archive set finished_at = finished_at - interval '31 days'; update posthouse.slice set due_at = '-infinity'").await;
    expire(&s).await;
    assert_eq!(retire(&s).await, ["detached", "dropped", "idle"]);
    assert_eq!(s.state(id).await, "");
}

#[tokio::test]
async fn a_purged_dead_letter_leaves_no_payload_anywhere() {
    let (_queue, s, worker) = old_jobs().await;
    let id = s.enqueue("kind => 'k', queue => 'q'").await;
    worker.claim(&s, 10).await;
    s.settle(worker.id, &failed(id, 1)).await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    assert_eq!(retire(&s).await, ["spared", "detached", "dropped", "idle"]);
    assert_eq!(s.get::<i64>("select posthouse.purge(queue => 'q')").await, 1);
    assert_eq!((s.count("posthouse.payload").await, s.count("posthouse.spare_payload").await), (0, 0));
}

/// A dead letter that was redriven and done after the look at its slice, right before its partition is detached. The answer: its state.
async fn comes_back_in_between(noted: bool) -> String {
    let (_queue, s, worker) = old_jobs().await;
    let id = s.enqueue("kind => 'k', queue => 'q'").await;
    worker.claim(&s, 10).await;
    s.settle(worker.id, &failed(id, 1)).await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    if !noted {
        s.cripple(
            "detach_range",
            "exists (select from posthouse.revived v",
            "false and exists (select from posthouse.revived v",
        )
        .await;
    }
    s.run(&format!("select posthouse.retry({id})")).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(said(&s.settle(worker.id, &done(id, jobs[0].fence)).await), [("applied", Some("done"))]);
    let steps = retire(&s).await;
    assert_eq!(steps.last().unwrap(), if noted { "busy" } else { "idle" }, "{steps:?}");
    expire(&s).await;
    retire(&s).await;
    s.state(id).await
}

#[tokio::test]
async fn a_job_that_came_back_and_ended_anew_is_not_dropped_with_the_old_ones() {
    assert_eq!(comes_back_in_between(true).await, "done");
    assert_eq!(comes_back_in_between(false).await, "");
}

#[tokio::test]
async fn an_open_redrive_holds_off_the_drop() {
    let (queue, s, worker) = old_jobs().await;
    let id = s.enqueue("kind => 'k', queue => 'q', payload => '{\"b\": 2}'").await;
    worker.claim(&s, 10).await;
    s.settle(worker.id, &failed(id, 1)).await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    assert_eq!(s.get::<String>("select posthouse.retire()").await, "spared");
    // What a snapshot of before does not show must be seen.
    s.run("begin isolation level repeatable read").await;
    assert_eq!(s.refused("select posthouse.retire()").await.code, "PH002");
    s.run("rollback").await;
    let open = queue.session().await;
    open.run(&format!("begin; select posthouse.retry({id})")).await;
    assert_eq!(retire(&s).await, ["busy"]);
    open.run("commit").await;
    assert_eq!(retire(&s).await, ["busy"], "until its slice was looked at again");
    expire(&s).await;
    assert_eq!(retire(&s).await, ["idle"]);
    assert_eq!(worker.claim(&s, 10).await[0].payload, json!({"b": 2}));
}

#[tokio::test]
async fn a_redrive_by_an_older_snapshot_brings_back_no_payload_of_before() {
    let (queue, s, worker) = old_jobs().await;
    let id = s.enqueue("kind => 'k', queue => 'q', payload => '{\"b\": 2}'").await;
    worker.claim(&s, 10).await;
    s.settle(worker.id, &failed(id, 1)).await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    let old = queue.session().await;
    old.run("begin isolation level repeatable read; select from posthouse.job").await;
    assert_eq!(s.get::<String>("select posthouse.retire()").await, "spared");
    let change =
        format!(r#"select changed from posthouse.redrive_many('{{"ids": [{id}]}}', '{{"payload": {{"b": 3}}}}')"#);
    assert_eq!(old.refused(&change).await.code, "40001");
    old.run("rollback").await;
    assert_eq!(old.get::<i64>(&change).await, 1);
    assert_eq!(s.count("posthouse.spare_payload").await, 0);
    assert_eq!(worker.claim(&s, 10).await[0].payload, json!({"b": 3}));
}

/// An enqueue that was given its id long ago and has put nothing into a table yet, when everything else in its partition has expired.
/// The answer: whether the partition is still there.
async fn late_enqueue(look_at_takers: bool) -> bool {
    let (queue, s, _worker) = old_jobs().await;
    let (holder, late) = (queue.session().await, queue.session().await);
    let keyed = "kind => 'k', queue => 'q', dedupe_key => 'a'";
    holder.run("begin").await;
    holder.enqueue(keyed).await;
    // It has its id and waits for the key.
    let waiting = tokio::spawn(async move { late.enqueue("kind => 'k', queue => 'q', dedupe_key => 'a'").await });
    wait_until(SOON, "the second enqueue waits", async || s.count("pg_locks where not granted").await > 0).await;
    ids_up_to(&s, 1_100_000).await;
    if !look_at_takers {
        s.cripple("is_open", "takers && now_taking", "false").await;
    }
    expire(&s).await;
    let steps = retire(&s).await;
    holder.run("rollback").await;
    let kept = ranges(&s).await.contains(&0);
    assert_eq!(waiting.await.is_ok(), kept, "it fails for want of its partition");
    assert_eq!(steps.len() == 1, kept, "{steps:?}");
    kept
}

#[tokio::test]
async fn an_id_that_was_handed_out_long_ago_has_a_partition() {
    assert!(late_enqueue(true).await);
}

#[tokio::test]
async fn a_long_lived_job_keeps_no_more_than_its_own_partition() {
    let (_queue, s, worker) = old_jobs().await;
    let id = s.enqueue("kind => 'k', queue => 'q', delay => '1 year', payload => '{\"b\": 2}'").await;
    ids_up_to(&s, 3_100_000).await;
    expire(&s).await;
    retire(&s).await;
    assert_eq!(ranges(&s).await, [0, 3_000_000, 4_000_000]);
    assert_eq!(s.count("posthouse.archive").await, 0, "what has expired beside it went row by row");
    assert_eq!(s.count("posthouse.payload").await, 1);
    s.run(&format!("select posthouse.retry({id})")).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!((jobs[0].id, &jobs[0].payload), (id, &json!({"b": 2})));
    // It ends in the middle of the sweep; its slice is looked at again.
    assert_eq!(said(&s.settle(worker.id, &done(id, 1)).await), [("applied", Some("done"))]);
    let again: bool =
        s.get("select due_at < clock_timestamp() + interval '25 hours' from posthouse.slice where lower = 0").await;
    assert!(again);
    s.run("update posthouse.archive set finished_at = finished_at - interval '33 days'; update posthouse.slice set due_at = due_at - interval '2 days'").await;
    expire(&s).await;
    retire(&s).await;
    assert_eq!((ranges(&s).await, s.state(id).await), (vec![3_000_000, 4_000_000], String::new()));
}

/// How long enqueue and settle took while nobody could drop a partition because of a reader; at most.
#[tokio::test]
async fn nobody_waits_behind_a_drop_that_waits_for_a_reader() {
    let (queue, s, worker) = old_jobs().await;
    ids_up_to(&s, 1_100_000).await;
    expire(&s).await;
    let (reader, sweeper) = (queue.session().await, queue.session().await);
    reader.run("begin; select count(*) from posthouse.archive; select count(*) from posthouse.payload").await;
    let mut worst = Duration::ZERO;
    let mut tries = 0;
    let sweeping = tokio::spawn(async move {
        let mut steps = Vec::new();
        let deadline = Instant::now() + SOON;
        while steps.last().is_none_or(|step| step != "dropped") {
            assert!(Instant::now() < deadline, "{steps:?}");
            steps.push(sweeper.get::<String>("select posthouse.retire()").await);
        }
        steps
    });
    for _ in 0..50 {
        let began = Instant::now();
        let id = s.enqueue("kind => 'k', queue => 'q'").await;
        let jobs = worker.claim(&s, 10).await;
        assert_eq!(jobs.len(), 1);
        s.settle(worker.id, &done(id, 1)).await;
        worst = worst.max(began.elapsed());
        tries += 1;
    }
    assert!(!sweeping.is_finished());
    reader.run("commit").await;
    let since = Instant::now();
    let steps = sweeping.await.unwrap();
    let took = since.elapsed();
    assert!(steps[0] == "busy" && steps.contains(&"detached".to_owned()), "{steps:?}");
    println!("figure: {tries} rounds, the worst of {worst:?}; dropped {took:?} after the reader's end");
    // Generous, since other tests run beside this; a wait behind the reader would have no end at all.
    assert!(worst < Duration::from_secs(5), "{worst:?}");
}

#[tokio::test]
async fn a_partition_that_is_missing_is_made_on_the_spot() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 4).await;
    let ids: Vec<i64> = worker.claim(&s, 2).await.iter().map(|job| job.id).collect();
    // Whoever did it: the table is gone, and the books say so.
    let lose = "drop table posthouse.archive_0; delete from posthouse.id_range where lower = 0";
    s.run(lose).await;
    assert_eq!(said(&s.settle(worker.id, &done(ids[0], 1)).await), [("applied", Some("done"))]);
    s.run(lose).await;
    assert_eq!(
        said(&s.settle(worker.id, &json!([{"id": ids[1], "fence": 1, "outcome": "cancelled"}])).await),
        [("applied", Some("cancelled"))]
    );
    s.run(lose).await;
    assert_eq!(s.get::<String>("select posthouse.cancel(max(id)) from posthouse.job").await, "cancelled");
    s.run(lose).await;
    // The books do not say so yet: the sweep finds out.
    s.run("select posthouse.make_partitions(0); drop table posthouse.archive_0; select posthouse.partitions_ahead()")
        .await;
    assert_eq!(ranges(&s).await, [0, 1_000_000]);
    // Some jobs of a batch may be much older than others.
    let last = worker.claim(&s, 1).await;
    ids_up_to(&s, 7_500_000).await;
    let young = s.enqueue("kind => 'k'").await;
    worker.claim(&s, 1).await;
    s.run("delete from posthouse.id_range where lower between 1 and 6000000; drop table posthouse.archive_0; delete from posthouse.id_range where lower = 0").await;
    let both = json!([{"id": last[0].id, "fence": 1, "outcome": "done"}, {"id": young, "fence": 1, "outcome": "done"}]);
    assert_eq!(said(&s.settle(worker.id, &both).await), [("applied", Some("done")); 2]);
}

#[tokio::test]
async fn partitions_stay_few_whatever_the_ids() {
    let (_queue, s) = Queue::with_session().await;
    // Five hundred million, two million after the other, nothing ever dropped.
    s.run("do $$ begin for n in 0..250 loop perform posthouse.make_partitions(n * 2000000::bigint); end loop; end $$")
        .await;
    let without = s.count("posthouse.id_range").await;
    assert!(without < 60, "{without}");
    // An id far ahead, and ids that come back into the gap before it from everywhere.
    s.run("select posthouse.make_partitions(100000000000)").await;
    s.run("do $$ begin for n in 1..1000 loop perform posthouse.make_partitions(500000000 + n * 99000000::bigint); end loop; end $$").await;
    let scattered = s.count("posthouse.id_range").await - without;
    assert!(scattered < 80, "{scattered}");
    let overlaps = "posthouse.id_range a, posthouse.id_range b where a.lower < b.lower and a.upper > b.lower";
    assert_eq!(s.count(overlaps).await, 0);
    assert_eq!(s.count("posthouse.id_range where lower % 10000 <> 0 or upper % 10000 <> 0").await, 0);
    s.run("select setval('posthouse.job_id_seq', 100000000010)").await;
    s.enqueue("kind => 'k'").await;
}

#[tokio::test]
async fn with_retention_they_stay_as_small_as_what_is_kept() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_queue('q', '1 hour')").await;
    // Fifty million ids, of which the last four million are kept.
    for last in (1..50).map(|n| n * 1_000_000 + 500_000) {
        ids_up_to(&s, last).await;
        s.run(&format!(
            "insert into posthouse.slice (lower, stale, over_at, takers)
               select n, false, '-infinity', '{{}}' from generate_series(0, {last} - 4000000, 10000) n on conflict do nothing;
             update posthouse.id_range set sliced_to = upper where upper < {last} - 4000000"
        ))
        .await;
        retire(&s).await;
    }
    let widest: i64 = s.get("select max(upper - lower) from posthouse.id_range").await;
    assert!(widest <= 2_000_000, "{widest}");
    assert!(ranges(&s).await.len() <= 8);
}

#[tokio::test]
async fn a_partition_that_a_person_detaches_is_his_and_another_one_takes_its_place() {
    let (queue, s, _worker) = old_jobs().await;
    s.run("select posthouse.set_queue('q', null)").await;
    let (reader, person) = (queue.session().await, queue.session().await);
    reader.run("begin; select count(*) from posthouse.archive").await;
    // Given up while it waits for the reader: nothing can be put into the partition until somebody finishes it.
    person.run("set lock_timeout = '200ms'").await;
    person.refused("alter table posthouse.archive detach partition posthouse.archive_0 concurrently").await;
    assert_eq!(s.count("pg_inherits where inhdetachpending").await, 1);
    assert_eq!(retire(&s).await, ["busy"], "the reader is still there");
    reader.run("commit").await;
    wait_until(SOON, "the detach is finished", async || retire(&s).await == ["idle"]).await;
    assert_eq!(s.count("pg_inherits where inhdetachpending").await, 0);
    s.run("select posthouse.partitions_ahead()").await;
    assert_eq!(ranges(&s).await, [0, 1_000_000]);
    assert_eq!((s.count("posthouse.archive_0").await, s.count("posthouse.archive").await), (1_001, 0));
    assert_eq!(retire(&s).await, ["idle"]);
    assert_eq!(s.count("posthouse.archive_0").await, 1_001, "what somebody detached nobody else drops");
}

#[tokio::test]
async fn parents_have_statistics_without_anybodys_doing() {
    let (_queue, s, _worker) = old_jobs().await;
    let seen = "select reltuples::float8 from pg_class where oid = 'posthouse.archive'::regclass";
    wait_until(SOON, "the sweep has analysed", async || {
        s.run("select posthouse.analyze_parents()").await;
        s.get::<f64>(seen).await >= 1_001.0
    })
    .await;
    let columns: Vec<String> =
        s.list("select attname::text from pg_stats where schemaname = 'posthouse' and tablename = 'archive'").await;
    assert!(columns.iter().any(|c| c == "lane_id") && !columns.iter().any(|c| c == "result"), "{columns:?}");
}

#[tokio::test]
async fn a_worker_drops_what_is_over_by_itself() {
    let (queue, s, _worker) = old_jobs().await;
    ids_up_to(&s, 1_100_000).await;
    let worker = Background::start(
        worker_at(queue.url())
            .handle_kind("other", |_, _| async { Ok::<_, std::io::Error>(posthouse::Outcome::done(&())) }),
    );
    wait_until(GENTLY, "the partition is gone", async || s.count("posthouse.id_range where lower = 0").await == 0)
        .await;
    wait_until(SOON, "so are its tables", async || {
        s.count("pg_class where relname in ('payload_0', 'archive_0')").await == 0
    })
    .await;
    worker.end().await;
    let failing = s.count("posthouse.sweeps where failures > 0").await;
    assert_eq!(failing, 0);
}
