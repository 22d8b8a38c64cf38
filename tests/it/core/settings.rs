//! Hostile settings: whatever a database or a role has set for every session of it, jobs live their lives as anywhere else.
//! Each setting is given to the whole database, before the programs connect.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::join_all;
use posthouse::store::{GateLimits, JobFilter, Settlement, Verdict};
use posthouse::testing::TestCluster;
use posthouse::{Error, JobError, NewJob, Outcome, Posthouse};
use serde_json::json;

use super::support::{Queue, Session};
use crate::harness::{SOON, wait_until};
use crate::worker_support::{Background, database_on, registered, worker_at};

/// A database with these settings, and a session that is older than they are.
async fn hostile(settings: &[&str]) -> (Queue, Session) {
    let (queue, s) = Queue::with_session().await;
    let name: String = s.get("select current_database()::text").await;
    for setting in settings {
        s.run(&format!("alter database {name} set {setting}")).await;
    }
    (queue, s)
}

fn job(kind: &str) -> NewJob {
    NewJob::new(kind, &json!({ "text": "it's a \\ test" })).unwrap()
}

/// Jobs of every sort, from the enqueue to the end, and what people do with them.
async fn live_and_let_live(queue: &Queue, s: &Session) {
    let client = Posthouse::connect(queue.url()).await.unwrap();
    let tried = Arc::new(AtomicU32::new(0));
    let again = tried.clone();
    let worker = worker_at(queue.url())
        .handle_kind("k", async |_, _| Outcome::done(&"fine \\ fine"))
        .handle_kind("dies", async |_, _| Outcome::fail(JobError::new("test", "no good")))
        .handle_kind("retries", move |_, _| {
            let first = again.fetch_add(1, Ordering::SeqCst) == 0;
            async move { if first { Outcome::retry(JobError::new("test", "again")) } else { Outcome::done(&1) } }
        });
    let worker = Background::start(worker);
    client.set_gate("crm", &GateLimits { max_running: Some(3), ..GateLimits::default() }).await.unwrap();
    let minute = Duration::from_secs(60);
    let mut ids = vec![
        client.enqueue_job(job("k")).timeout(minute).gate("crm").await.unwrap().id,
        client.enqueue_job(job("k")).run_at(SystemTime::now() - minute).tokens(5).await.unwrap().id,
        client.enqueue_job(job("retries").delay(Duration::from_millis(3))).await.unwrap().id,
    ];
    let late = client.enqueue_job(job("k")).run_at(SystemTime::now() + minute).dedupe_key("late").await.unwrap();
    let same = client.enqueue_job(job("k")).dedupe_key("late").await.unwrap();
    assert_eq!((same.id, same.duplicate), (late.id, true));
    let wait: f64 = s
        .get(&format!(
            "select extract(epoch from run_at - created_at)::float8 from posthouse.job where id = {}",
            late.id
        ))
        .await;
    assert!((30.0..61.0).contains(&wait), "a minute ahead, or what was left of it: {wait}");
    assert_eq!(client.cancel(late.id).await.unwrap(), "cancelled");
    ids.extend(client.enqueue_many(&[job("k"), job("k").tenant("acme")]).await.unwrap().iter().map(|e| e.id));
    let dead = client.enqueue_job(job("dies")).await.unwrap().id;
    for id in ids {
        let done = tokio::time::timeout(SOON, client.wait(id, Duration::from_millis(20))).await.unwrap().unwrap();
        assert_eq!(done.state, "done", "{done:?}");
        assert_eq!(done.payload.unwrap().get().replace(' ', ""), r#"{"text":"it'sa\\test"}"#);
    }
    assert_eq!(client.wait(dead, Duration::from_millis(20)).await.unwrap().state, "failed");
    client.retry(dead).await.unwrap();
    wait_until(SOON, "it failed again", async || {
        s.count("posthouse.dead_letter where jsonb_array_length(errors) = 2").await == 1
    })
    .await;
    assert_eq!(client.jobs(&JobFilter::default(), 100).await.unwrap().len(), 7);
    assert!(!client.health().await.unwrap().is_empty() && !client.explain(late.id).await.unwrap().is_empty());
    assert_eq!(client.workers().await.unwrap()[0].state, "live");
    let summary = worker.end().await;
    assert_eq!(tried.load(Ordering::SeqCst), 2, "{summary:?}");
    assert_eq!(s.count("posthouse.job").await, 0);
}

async fn live_with(settings: &[&str]) {
    let (queue, s) = hostile(settings).await;
    live_and_let_live(&queue, &s).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_live_at_any_default_isolation_level() {
    for level in ["repeatable read", "serializable"] {
        live_with(&[&format!("default_transaction_isolation = '{level}'")]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_live_with_short_timeouts() {
    live_with(&[
        "statement_timeout = '100ms'",
        "lock_timeout = '10ms'",
        "idle_in_transaction_session_timeout = '10ms'",
    ])
    .await;
    live_with(&["statement_timeout = '1s'", "idle_session_timeout = '50ms'"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_live_whatever_text_looks_like() {
    live_with(&[
        "datestyle = 'SQL, DMY'",
        "intervalstyle = 'sql_standard'",
        "timezone = 'Asia/Kathmandu'",
        "bytea_output = 'escape'",
    ])
    .await;
    live_with(&["standard_conforming_strings = off", "backslash_quote = off", "extra_float_digits = -15"]).await;
    live_with(&[
        "quote_all_identifiers = on",
        "transform_null_equals = on",
        "array_nulls = off",
        "xmloption = document",
    ])
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_live_with_any_plan_and_path() {
    live_with(&["row_security = off", "search_path = ''"]).await;
    live_with(&[
        "plan_cache_mode = force_custom_plan",
        "jit_above_cost = 0",
        "enable_indexscan = off",
        "work_mem = '64kB'",
    ])
    .await;
    // Somebody else's functions and operators before those of Postgres.
    let (queue, s) = Queue::with_session().await;
    s.run(
        "create schema evil; create function evil.stolen(text, text) returns boolean language plpgsql as $$ begin raise exception 'stolen'; end $$;
         create function evil.to_jsonb(timestamptz) returns jsonb language plpgsql as $$ begin raise exception 'stolen'; end $$;
         create function evil.set_config(text, text, boolean) returns text language plpgsql as $$ begin raise exception 'stolen'; end $$;
         create function evil.current_setting(text) returns text language plpgsql as $$ begin raise exception 'stolen'; end $$;
         create operator evil.= (leftarg = text, rightarg = text, function = evil.stolen);
         create operator evil.<> (leftarg = text, rightarg = text, function = evil.stolen)",
    )
    .await;
    let name: String = s.get("select current_database()::text").await;
    s.run(&format!("alter database {name} set search_path = evil, pg_catalog")).await;
    live_and_let_live(&queue, &s).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_live_with_everything_at_once() {
    live_with(&[
        "default_transaction_isolation = 'serializable'",
        "default_transaction_deferrable = on",
        "statement_timeout = '100ms'",
        "lock_timeout = '10ms'",
        "idle_in_transaction_session_timeout = '10ms'",
        "row_security = off",
        "search_path = ''",
        "datestyle = 'SQL, DMY'",
    ])
    .await;
}

/// Holds what the call needs for longer than the timeout of the database; the call waits all the same.
async fn waits_in_spite_of(setting: &str) {
    let (queue, s) = hostile(&[setting]).await;
    let client = Posthouse::connect(queue.url()).await.unwrap();
    s.run("begin; select posthouse.enqueue('k', dedupe_key => 'held')").await;
    let began = Instant::now();
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.enqueue_job(job("k")).dedupe_key("held").await }
    });
    let watcher = queue.session().await;
    watcher.run("begin; set local statement_timeout = 0").await;
    wait_until(SOON, "it has waited for longer than the timeout, or given up", async || {
        waiting.is_finished() || began.elapsed() > Duration::from_millis(400)
    })
    .await;
    assert!(!waiting.is_finished(), "{setting}: {:?}", waiting.await);
    s.run("commit").await;
    assert!(waiting.await.unwrap().unwrap().duplicate, "{setting}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_of_the_database_ends_no_call_of_ours() {
    for setting in ["statement_timeout = '100ms'", "lock_timeout = '50ms'"] {
        waits_in_spite_of(setting).await;
    }
    let (_queue, s) = Queue::with_session().await;
    if s.get::<i32>("select current_setting('server_version_num')::int").await >= 170_000 {
        waits_in_spite_of("transaction_timeout = '100ms'").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_setting_that_comes_while_programs_run_is_met_too() {
    let cluster = TestCluster::dedicated(&[]);
    let database = database_on(&cluster).await;
    let client = Posthouse::connect(database.url()).await.unwrap();
    client.enqueue_job(job("k")).dedupe_key("a").await.unwrap();
    let s = database.connect().await;
    for (setting, value) in [("default_transaction_isolation", "'serializable'"), ("lock_timeout", "'20ms'")] {
        // For every session of the server, those that are there already too.
        for sql in [format!("alter system set {setting} = {value}"), "select pg_reload_conf()".to_owned()] {
            s.execute(&sql, &[]).await.unwrap();
        }
        let shown = format!("select 1 where current_setting('{setting}') = {value}");
        wait_until(SOON, "the setting is there", async || s.query_opt(&shown, &[]).await.unwrap().is_some()).await;
        let worker = worker_at(database.url()).handle_kind("k", async |_, _| Outcome::done(&1)).until_empty(true);
        client.enqueue_job(job("k")).await.unwrap();
        Background::start(worker).ended().await;
        s.execute(&format!("alter system reset {setting}"), &[]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadlock_in_a_transaction_of_ours_is_run_again() {
    // Time enough for both to be in it before the settle looks.
    let (queue, s) = hostile(&["deadlock_timeout = '3s'"]).await;
    let watcher = queue.session().await;
    let client = Posthouse::connect(queue.url()).await.unwrap();
    let ids: Vec<i64> = client.enqueue_many(&[job("k"), job("k")]).await.unwrap().iter().map(|e| e.id).collect();
    let store = client.database().store("test");
    let worker = registered(&store, Duration::from_secs(600), &["k"]).await;
    let claimed = store.claim(worker, 1, 10, 0).await.unwrap();
    assert_eq!(claimed.len(), 2);
    // Somebody holds the second job, and wants the first once the settle has that. He does not look for deadlocks himself.
    let hold = |id: i64| format!("select from posthouse.job where id = {id} for update");
    s.run(&format!("begin; set local deadlock_timeout = '1h'; {}", hold(ids[1]))).await;
    let settle = tokio::spawn(async move {
        let outcomes: Vec<_> = claimed.iter().map(|j| Settlement::new(j.id, j.fence, Outcome::done(&1))).collect();
        store.settle(worker, &outcomes).await
    });
    let waits = format!("select exists (select from pg_stat_activity where {} = any(pg_blocking_pids(pid)))", s.pid);
    wait_until(SOON, "the settle waits", async || watcher.get(&waits).await).await;
    s.run(&hold(ids[0])).await;
    s.run("rollback").await;
    let settled = settle.await.unwrap().unwrap();
    assert!(settled.iter().all(|s| s.verdict == Verdict::Applied), "{settled:?}");
    let ended = "select deadlocks = 1 from pg_stat_database where datname = current_database()";
    wait_until(SOON, "there has been a deadlock", async || watcher.get(ended).await).await;
    assert_eq!(s.count("posthouse.archive where errors is null").await, 2);
}

#[tokio::test]
async fn in_a_transaction_of_the_callers_a_deadlock_keeps_its_code() {
    let (queue, s) = Queue::with_session().await;
    let (other, watcher) = (queue.session().await, queue.session().await);
    let enqueue = |key: &str| format!("select posthouse.enqueue('k', dedupe_key => '{key}')");
    s.run(&format!("begin; {}", enqueue("a"))).await;
    other.run(&format!("begin; {}", enqueue("b"))).await;
    let (pid, crossing) = (s.pid, enqueue("b"));
    let one = tokio::spawn(async move { s.client.batch_execute(&crossing).await });
    watcher.wait_blocked(pid).await;
    let two = other.client.batch_execute(&enqueue("a")).await;
    if two.is_err() {
        other.run("rollback").await;
    }
    let errors: Vec<_> = [one.await.unwrap(), two].into_iter().filter_map(Result::err).map(Error::from).collect();
    assert_eq!(errors.len(), 1, "one of the two is ended: {errors:?}");
    assert_eq!(errors[0].sqlstate(), Some("40P01"));
    assert!(errors[0].is_rolled_back() && errors[0].is_transient());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn serializable_defaults_make_no_call_of_ours_fail() {
    let (queue, s) = hostile(&["default_transaction_isolation = 'serializable'"]).await;
    let clients: Vec<_> =
        join_all((0..8).map(|_| Posthouse::connect(queue.url()))).await.into_iter().map(Result::unwrap).collect();
    let sent = clients.iter().enumerate().map(|(n, client)| async move {
        for round in 0..20 {
            client.enqueue_job(job("k")).await.unwrap();
            client.enqueue_job(job("k")).dedupe_key(format!("key {}", (round + n) % 5)).await.unwrap();
        }
    });
    join_all(sent).await;
    assert_eq!(s.count("posthouse.job").await, 165);
    let worker = worker_at(queue.url()).handle_kind("k", async |_, _| Outcome::done(&1)).until_empty(true);
    Background::start(worker).ended().await;
    assert_eq!(s.count("posthouse.archive where state = 'done'").await, 165);
    assert_eq!(s.count("posthouse.archive where errors is not null").await, 0);
}
