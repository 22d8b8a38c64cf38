//! A schema that is brought up to the next version while the queue is at work, while somebody reads for long, by several at once, and
//! by one that dies in between. The next version is made up: two tables get a column, and a function changes.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio_postgres::Client;

use super::{Progress, Run, Step, attempt};
use crate::error::Result;
use crate::job::NewJob;
use crate::store::migrate::{Migration, OURS, Schema, schema_sql, schema_status, status};
use crate::store::{Database, migrate};
use crate::testing::{TestCluster, TestDatabase};

const LATER: &str =
    "alter table posthouse.queue add column from_next int; alter table posthouse.job add column from_next int";

/// Ours and a migration more; its functions differ by a comment.
fn next() -> Schema {
    let later = Migration { version: OURS.version() + 1, name: "later", breaking: false, sql: LATER };
    let migrations = [OURS.migrations, &[later]].concat().leak();
    Schema { migrations, functions: [OURS.functions, &["-- newer"]].concat().leak() }
}

async fn database() -> TestDatabase {
    TestDatabase::new(&schema_sql(), async |url: &str| migrate(&Database::new(url)?).await.map(drop)).await
}

fn target(database: &TestDatabase) -> Database {
    Database::new(database.url()).unwrap()
}

/// What was told, as text.
type Told = Arc<Mutex<Vec<String>>>;

/// Migrate to the next version; what happens is written down.
async fn advance(database: Database, patience: Duration, told: Told) -> Result<Vec<Migration>> {
    let tell = move |progress: &Progress| {
        let text = match progress {
            Progress::Waiting { step, blockers, .. } => {
                let who: Vec<_> = blockers.iter().map(ToString::to_string).collect();
                format!("{step} waits for {}", who.join("; "))
            }
            Progress::Applied(migration) => format!("{} {}", migration.version, migration.name),
            Progress::Renewed => "renewed".to_owned(),
        };
        told.lock().unwrap().push(text);
    };
    Run { database: &database, schema: next(), patience, tell }.run().await
}

async fn value(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Waits until it is so.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether both tables have their new column.
const COLUMNS: &str = "select count(*)::text from information_schema.columns where table_schema = 'posthouse' and column_name = 'from_next'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_reader_holds_up_the_migration_and_nobody_else() {
    let test = database().await;
    let reader = test.connect().await;
    reader.batch_execute("set application_name = 'report'; begin; select count(*) from posthouse.jobs").await.unwrap();
    let told = Told::default();
    let migration = tokio::spawn(advance(target(&test), Duration::from_secs(60), told.clone()));
    let heard = |text: &str| told.lock().unwrap().iter().any(|line| line.contains(text));
    until("it says who holds it up", async || heard("report, idle in transaction")).await;
    assert!(heard("migration") && heard("later waits for pid"), "{told:?}");

    // Enqueue and look all the while: whoever comes behind a try waits no longer than that does.
    let store = target(&test).store("busy");
    let (mut slowest, began, mut jobs) = (Duration::ZERO, Instant::now(), 0);
    while began.elapsed() < Duration::from_secs(4) {
        let at = Instant::now();
        store.enqueue(&NewJob::new("k", &1).unwrap()).await.unwrap();
        slowest = slowest.max(at.elapsed());
        jobs += 1;
    }
    assert!(!migration.is_finished(), "{told:?}");
    assert!(slowest < Duration::from_secs(1) && jobs > 20, "slowest of {jobs}: {slowest:?}");

    reader.batch_execute("commit").await.unwrap();
    let applied = migration.await.unwrap().unwrap();
    assert_eq!(applied.iter().map(|m| m.name).collect::<Vec<_>>(), ["later"]);
    assert_eq!(value(&reader, COLUMNS).await, "2");
    assert!(heard(" later") && heard("renewed"), "{told:?}");
}

#[tokio::test]
async fn a_reader_of_a_view_holds_up_the_renewal_and_nobody_else() {
    let test = database().await;
    let (reader, other) = (test.connect().await, test.connect().await);
    other
        .batch_execute(
            "update posthouse.meta set value = 'older' where name = 'functions'; set statement_timeout = '2s'",
        )
        .await
        .unwrap();
    reader
        .batch_execute("set application_name = 'report'; begin; select count(*) from posthouse.workers")
        .await
        .unwrap();
    let told = Told::default();
    let (to, hear) = (target(&test), told.clone());
    let renewal = tokio::spawn(async move {
        let tell = move |progress: &Progress| hear.lock().unwrap().push(format!("{progress:?}"));
        super::migrate_telling(&to, Duration::from_secs(60), tell).await
    });
    until("it says who holds it up", async || told.lock().unwrap().iter().any(|l| l.contains("report"))).await;
    let until_then = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until_then {
        other.batch_execute("select count(*) from posthouse.workers").await.unwrap();
    }
    reader.batch_execute("commit").await.unwrap();
    assert!(renewal.await.unwrap().unwrap().is_empty());
    assert!(schema_status(&target(&test)).await.unwrap().functions_current);
}

#[tokio::test]
async fn a_function_that_answered_otherwise_is_replaced() {
    let test = database().await;
    let client = test.connect().await;
    client
        .batch_execute(
            "drop function posthouse.claim_level;
             create function posthouse.claim_level(worker uuid, queues text[], kinds text[], priority int, max_jobs int,
               after_lane bigint, due timestamptz, gated boolean, wait boolean, out jobs posthouse.job[], out empty bigint[])
             language sql as 'select null::posthouse.job[], null::bigint[]';
             update posthouse.meta set value = 'older' where name = 'functions'",
        )
        .await
        .unwrap();
    migrate(&target(&test)).await.unwrap();
    let answers = "select count(*)::text from pg_proc, unnest(proargmodes) m where proname = 'claim_level' and m = 'o'";
    assert_eq!(value(&client, answers).await, "9");
}

#[tokio::test]
async fn a_migration_that_gets_no_lock_gives_up_and_has_done_nothing() {
    let test = database().await;
    let holder = test.connect().await;
    holder
        .batch_execute("set application_name = 'report'; begin; lock table posthouse.job in access share mode")
        .await
        .unwrap();
    let error = advance(target(&test), Duration::from_millis(300), Told::default()).await.unwrap_err().to_string();
    assert!(error.contains("later: no lock within") && error.contains("report"), "{error}");
    holder.batch_execute("commit").await.unwrap();
    assert_eq!(value(&holder, COLUMNS).await, "0");
    assert_eq!(value(&holder, "select count(*)::text from posthouse.meta where name = 'tables'").await, "0");
    advance(target(&test), Duration::from_secs(20), Told::default()).await.unwrap();
    assert_eq!(value(&holder, COLUMNS).await, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_migrates_a_queue_in_use() {
    let test = database().await;
    let runs =
        join_all((0..4).map(|_| tokio::spawn(advance(target(&test), Duration::from_secs(60), Told::default())))).await;
    let applied: usize = runs.into_iter().map(|run| run.unwrap().unwrap().len()).sum();
    assert_eq!(applied, 1);
    let client = test.connect().await;
    assert_eq!(
        value(&client, "select max(version)::text from posthouse.migration").await,
        next().version().to_string()
    );
}

#[tokio::test]
async fn one_that_dies_between_tables_and_functions_is_finished_by_the_next() {
    let test = database().await;
    let mut client = test.connect().await;
    let step = attempt(&mut client, &next(), &[], &super::At::default()).await.unwrap();
    assert!(matches!(step, Step::Tables(m) if m.name == "later"), "{step:?}");
    // The tables are there and nothing is booked: this binary and its jobs go on, the next one says what is missing.
    let store = target(&test).store("old");
    store.enqueue(&NewJob::new("k", &1).unwrap()).await.unwrap();
    store.tidy(None).await.unwrap();
    let now = schema_status(&target(&test)).await.unwrap();
    assert!(now.check().is_ok() && now.functions_current);
    assert!(status(&client, &next()).await.unwrap().check().unwrap_err().to_string().contains("db migrate"));
    // The older one has nothing to do, and takes nothing back.
    assert!(migrate(&target(&test)).await.unwrap().is_empty());
    assert_eq!(value(&client, COLUMNS).await, "2");
    let told = Told::default();
    let applied = advance(target(&test), Duration::from_secs(20), told.clone()).await.unwrap();
    assert_eq!((applied.len(), &told.lock().unwrap()[..]), (1, &["renewed".to_owned()][..]));
    assert!(status(&client, &next()).await.unwrap().check().is_ok());
    assert_eq!(value(&client, "select count(*)::text from posthouse.meta where name = 'tables'").await, "0");
}

#[tokio::test]
async fn a_migration_needs_no_favourable_settings() {
    let test = TestDatabase::new("select 1", async |_: &str| Ok::<(), crate::Error>(())).await;
    let client = test.connect().await;
    let name = value(&client, "select current_database()::text").await;
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "statement_timeout = '100ms'",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '1s'",
        "search_path = ''",
        "row_security = off",
        "standard_conforming_strings = off",
        "check_function_bodies = off",
    ] {
        client.batch_execute(&format!("alter database {name} set {setting}")).await.unwrap();
    }
    assert_eq!(migrate(&target(&test)).await.unwrap().len(), OURS.migrations.len());
    advance(target(&test), Duration::from_secs(20), Told::default()).await.unwrap();
    assert_eq!(value(&client, COLUMNS).await, "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_autovacuum_makes_room() {
    let often = [("autovacuum_naptime", "1s")];
    let cluster = tokio::task::spawn_blocking(move || TestCluster::dedicated(&often)).await.unwrap();
    let test = cluster.database(&schema_sql(), async |url: &str| migrate(&Database::new(url)?).await.map(drop)).await;
    let client = test.connect().await;
    client
        .batch_execute(
            "-- So slow that it would take minutes; other tables, which come before it, are done fast.
             alter table posthouse.job set (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1);
             select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k')) from generate_series(1, 10000)));
             update posthouse.job set reason = 'x'",
        )
        .await
        .unwrap();
    let runs = "select count(*)::text from pg_stat_activity where backend_type = 'autovacuum worker' and query like 'autovacuum: VACUUM%posthouse.job'";
    until("autovacuum is at it", async || value(&client, runs).await == "1").await;
    let told = Told::default();
    advance(target(&test), Duration::from_secs(30), told.clone()).await.unwrap();
    assert!(told.lock().unwrap().iter().any(|line| line.contains("autovacuum")), "it was not in the way: {told:?}");
    assert_eq!(value(&client, COLUMNS).await, "2");
    drop(test);
}
