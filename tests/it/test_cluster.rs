//! A test gets a database of its own, copied from one template; tests of one run share a server.

use std::sync::atomic::{AtomicUsize, Ordering};

use posthouse::testing::{TestCluster, TestDatabase};

const SCHEMA: &str = "create table letter (id bigint primary key); insert into letter values (1)";

async fn migrate(url: &str) -> Result<(), tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
    let driver = tokio::spawn(connection);
    client.batch_execute(SCHEMA).await?;
    drop(client);
    driver.await.ok();
    Ok(())
}

async fn count(client: &tokio_postgres::Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn databases_are_apart_and_dropped_at_the_end() {
    let one = TestDatabase::new(SCHEMA, migrate).await;
    let two = TestDatabase::new(SCHEMA, migrate).await;
    let (client, other) = (one.connect().await, two.connect().await);
    client.batch_execute("insert into letter values (2)").await.unwrap();
    assert_eq!(count(&client, "select count(*) from letter").await, 2);
    assert_eq!(count(&other, "select count(*) from letter").await, 1);
    let name = two.url().rsplit('/').next().unwrap().to_owned();
    let look = format!("select count(*) from pg_database where datname = '{name}'");
    assert_eq!(count(&client, &look).await, 1);
    drop(two);
    assert_eq!(count(&client, &look).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_schema_is_made_once_whoever_comes_first() {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    // A schema of this test's own, since others may have made the usual one.
    let schema = format!("{SCHEMA}; -- {}", uuid::Uuid::new_v4());
    let all = (0..4).map(|_| {
        let schema = schema.clone();
        tokio::spawn(async move {
            let counted = async |url: &str| {
                MADE.fetch_add(1, Ordering::SeqCst);
                migrate(url).await
            };
            TestDatabase::new(&schema, counted).await
        })
    });
    for database in all.collect::<Vec<_>>() {
        let database = database.await.unwrap();
        let client = database.connect().await;
        assert_eq!(count(&client, "select count(*) from letter").await, 1);
    }
    assert_eq!(MADE.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_database_of_a_failed_test_is_kept() {
    let database = TestDatabase::new(SCHEMA, migrate).await;
    let name = database.url().rsplit('/').next().unwrap().to_owned();
    let failed = std::thread::spawn(move || {
        let _database = database;
        panic!("on purpose");
    });
    assert!(failed.join().is_err());
    let other = TestDatabase::new(SCHEMA, migrate).await;
    let look = other.connect().await;
    assert_eq!(count(&look, &format!("select count(*) from pg_database where datname = '{name}'")).await, 1);
    look.batch_execute(&format!("drop database {name}")).await.unwrap();
}

#[tokio::test]
async fn a_dedicated_cluster_can_be_crashed() {
    let cluster = TestCluster::dedicated(&[("shared_buffers", "16MB")]);
    let database = cluster.database(SCHEMA, migrate).await;
    let client = database.connect().await;
    client.batch_execute("insert into letter values (2)").await.unwrap();
    cluster.server().kill_immediate();
    assert!(client.query_one("select 1", &[]).await.is_err());
    cluster.server().restart().unwrap();
    assert_eq!(count(&database.connect().await, "select count(*) from letter").await, 2);
    assert_ne!(TestCluster::shared().url("postgres"), cluster.url("postgres"));
}
