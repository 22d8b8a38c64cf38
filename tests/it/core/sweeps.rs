//! The sweep: each part once an interval in the fleet, one that fails is counted and keeps nobody from anything.

use serde_json::{Value, json};

use super::support::{Queue, Session};
use crate::harness::{SOON, wait_until};

const DUE: &str = "update posthouse.sweep set ran_at = '-infinity'";
const TIDY: &str = "update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()";
/// What Postgres does not do by itself: the parts that the library runs.
const LIBRARYS: &str = "'rescue', 'retire', 'schedules'";

/// Parts that Postgres does by itself and that ran so often.
async fn ran(s: &Session, runs: i64) -> Vec<String> {
    s.list(&format!("select name from posthouse.sweep where runs = {runs} and name not in ({LIBRARYS}) order by name"))
        .await
}

/// All parts that Postgres does by itself.
async fn all(s: &Session) -> Vec<String> {
    let parts: Vec<String> =
        s.list(&format!("select name from posthouse.sweep where name not in ({LIBRARYS}) order by name")).await;
    assert!(parts.len() >= 10, "{parts:?}");
    parts
}

/// What the view says of a part: runs, failures, failing, the last error.
async fn book(s: &Session, part: &str) -> (i64, i64, bool, Option<String>) {
    let rows =
        s.rows(&format!("select runs, failures, failing, error from posthouse.sweeps where name = '{part}'")).await;
    (rows[0].get(0), rows[0].get(1), rows[0].get(2), rows[0].get(3))
}

/// Tallies cannot be added up any more.
async fn break_folds(s: &Session) {
    s.run(
        "create function public.no() returns trigger language plpgsql as $$ begin raise exception 'no more tallies'; end $$;
         create trigger no before delete on posthouse.tally for each statement execute function public.no()",
    )
    .await;
}

#[tokio::test]
async fn each_part_runs_once_an_interval_in_the_fleet() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    s.run(TIDY).await;
    // Those that run every second or two are left out.
    let rare = "select extract(epoch from ran_at)::float8 from posthouse.sweep
      where every > interval '2 seconds' order by name";
    let first: Vec<f64> = s.list(rare).await;
    s.run("select posthouse.tidy(); select posthouse.tidy()").await;
    assert_eq!(s.list::<f64>(rare).await, first);
    assert_eq!(ran(&s, 1).await, all(&s).await);
    // A second sweeper goes around what another one does, instead of waiting for it.
    s.run(&format!("{DUE}; begin; select posthouse.tidy()")).await;
    other.run("set lock_timeout = '2s'").await;
    let answer = json!({"alerts": [], "failed": [], "more": false});
    assert_eq!(other.get::<Value>("select posthouse.tidy() - 'wait_ms'").await, answer);
    assert!(!other.get::<bool>("select posthouse.begin_sweep('floors')").await);
    s.run("commit").await;
    // Partitions are made a million ids ahead.
    s.run("select setval('posthouse.job_id_seq', 950000)").await;
    s.run(TIDY).await;
    assert!(s.get::<i64>("select max(upper) from posthouse.id_range").await > 1_950_000);
    let made = s
        .count("pg_inherits where inhparent = any(array['posthouse.payload'::regclass, 'posthouse.archive'::regclass])")
        .await;
    assert_eq!(made, 2 * s.count("posthouse.id_range").await);
}

#[tokio::test]
async fn one_part_alone_can_be_swept() {
    let (_queue, s) = Queue::with_session().await;
    let due: Vec<String> = s.list("select posthouse.due_sweeps()").await;
    assert!(all(&s).await.iter().all(|part| due.contains(part)), "{due:?}");
    s.run(
        "select posthouse.tidy('usage'), posthouse.tidy('usage'), posthouse.tidy('nonsense'), posthouse.tidy('rescue')",
    )
    .await;
    assert_eq!(s.list::<String>("select name from posthouse.sweep where runs > 0").await, ["usage"]);
    assert!(!s.list::<String>("select posthouse.due_sweeps()").await.contains(&"usage".to_owned()));
    // The one that waited longest comes first.
    s.run("update posthouse.sweep set ran_at = clock_timestamp() - case name when 'watch' then interval '2 hours' else interval '1 hour' end")
        .await;
    assert_eq!(s.list::<String>("select posthouse.due_sweeps()").await[0], "watch");
}

#[tokio::test]
async fn a_part_that_fails_is_counted_and_keeps_no_other_from_running() {
    let (_queue, s) = Queue::with_session().await;
    s.run(TIDY).await;
    break_folds(&s).await;
    s.run(DUE).await;
    let answer: Value = s.get("select posthouse.tidy()").await;
    assert_eq!(answer["failed"], json!([{"sweep": "folds", "error": "no more tallies"}]));
    assert_eq!(book(&s, "folds").await, (2, 1, true, Some("no more tallies".to_owned())));
    assert_eq!(ran(&s, 2).await, all(&s).await);
    // It is not tried again and again, but when its turn comes.
    assert!(!s.list::<String>("select posthouse.due_sweeps()").await.contains(&"folds".to_owned()));
    s.run("drop trigger no on posthouse.tally").await;
    s.run(TIDY).await;
    assert_eq!(book(&s, "folds").await, (3, 1, false, Some("no more tallies".to_owned())));
    assert_eq!(s.count("posthouse.alerts where kind = 'sweep'").await, 0, "once is no news");
}

#[tokio::test]
async fn who_looks_after_the_queue_is_told_of_a_part_that_goes_on_failing() {
    let (_queue, s) = Queue::with_session().await;
    break_folds(&s).await;
    s.run(TIDY).await;
    s.run(TIDY).await;
    s.run(TIDY).await;
    let text: String = s
        .get("select text from posthouse.alerts where kind = 'sweep' and subject = 'folds' and resolved_at is null")
        .await;
    assert!(text.starts_with("the sweep of folds fails since ") && text.ends_with(": no more tallies"), "{text}");
    s.run("drop trigger no on posthouse.tally").await;
    s.run(TIDY).await;
    s.run(TIDY).await;
    assert_eq!(s.count("posthouse.alerts where kind = 'sweep' and resolved_at is null").await, 0);
}

#[tokio::test]
async fn a_part_that_takes_longer_than_the_statement_timeout_fails_alone() {
    let (_queue, s) = Queue::with_session().await;
    s.run("create function public.slow() returns trigger language plpgsql as $$ begin perform pg_sleep(60); return null; end $$;
           create trigger slow before delete on posthouse.tally for each statement execute function public.slow()")
        .await;
    s.run("set statement_timeout = '2s'").await;
    let answer: Value = s.get("select posthouse.tidy()").await;
    assert_eq!(answer["failed"][0]["sweep"], "folds");
    assert_eq!(book(&s, "folds").await.1, 1);
    assert_eq!(ran(&s, 1).await, all(&s).await);
}

#[tokio::test]
async fn a_part_waits_for_nobody_for_long() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    other.run("begin; lock table posthouse.tally").await;
    let answer: Value = s.get("select posthouse.tidy('folds')").await;
    assert!(answer["failed"][0]["error"].as_str().unwrap().contains("lock timeout"), "{answer}");
    other.run("rollback").await;
    // The caller's own setting is as it was.
    assert_eq!(s.get::<String>("show lock_timeout").await, "0");
}

#[tokio::test]
async fn what_takes_several_transactions_is_taken_once_and_written_down() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    assert!(s.get::<bool>("select posthouse.begin_sweep('rescue')").await);
    assert!(!other.get::<bool>("select posthouse.begin_sweep('rescue')").await, "not before its interval is over");
    assert!(!s.get::<bool>("select posthouse.begin_sweep('nonsense')").await);
    s.run("select posthouse.end_sweep('rescue', 12.5, error => 'no such thing')").await;
    assert_eq!(book(&s, "rescue").await, (1, 1, true, Some("no such thing".to_owned())));
    s.run("update posthouse.sweep set took_ms = 1.23456789 where name = 'rescue'").await;
    assert_eq!(s.get::<f64>("select took_ms from posthouse.sweeps where name = 'rescue'").await, 1.2);
    // More to do: it is due again at once.
    s.run("select posthouse.end_sweep('rescue', 0, more => true)").await;
    assert!(other.get::<bool>("select posthouse.begin_sweep('rescue')").await);
    s.run("select posthouse.end_sweep('rescue', 0)").await;
    assert!(!other.get::<bool>("select posthouse.begin_sweep('rescue')").await);
    assert_eq!(book(&s, "rescue").await, (3, 1, false, Some("no such thing".to_owned())));
    // One that began and died is late, not lost.
    s.run("update posthouse.sweep set ran_at = clock_timestamp() - interval '2 minutes' where name = 'rescue'").await;
    assert!(s.get::<bool>("select late from posthouse.sweeps where name = 'rescue'").await);
    assert!(other.get::<bool>("select posthouse.begin_sweep('rescue')").await);
}

#[tokio::test]
async fn who_sweeps_is_told_when_there_is_something_to_do_again() {
    let (_queue, s) = Queue::with_session().await;
    let wait_ms = "select (posthouse.tidy('nonsense') ->> 'wait_ms')::int";
    assert_eq!(s.get::<i32>(wait_ms).await, 0, "nothing ran yet");
    s.run("update posthouse.sweep set ran_at = clock_timestamp() + interval '4 seconds'").await;
    assert_eq!(s.get::<i32>(wait_ms).await, 1_000, "a second at most");
    assert_eq!(s.get::<Option<i32>>("select posthouse.more_due_in()").await, None);
    // A part that left some to do rests for fifty times as long as it took.
    s.run("update posthouse.sweep set ran_at = clock_timestamp() + interval '500 milliseconds', took_ms = 2, more = true where name = 'slices'")
        .await;
    let (wait, more): (i32, Option<i32>) = (s.get(wait_ms).await, s.get("select posthouse.more_due_in()").await);
    assert!((1..=600).contains(&wait) && (1..=600).contains(&more.unwrap()), "{wait} {more:?}");
    // A clock that was set back does not keep it for long.
    s.run("update posthouse.sweep set ran_at = clock_timestamp() + interval '1 day' where name = 'slices'").await;
    assert_eq!(s.get::<Option<i32>>("select posthouse.more_due_in()").await, Some(0));
}

#[tokio::test]
async fn a_sweeper_that_dies_in_the_middle_holds_nobody_up() {
    let (queue, s) = Queue::with_session().await;
    let dies = queue.session().await;
    dies.run(&format!("{DUE}; begin; select posthouse.tidy()")).await;
    s.run(&format!("select pg_terminate_backend({})", dies.pid)).await;
    wait_until(SOON, "another one has swept it all", async || {
        s.run("select posthouse.tidy()").await;
        ran(&s, 1).await == all(&s).await
    })
    .await;
}
