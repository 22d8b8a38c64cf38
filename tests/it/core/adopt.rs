//! A copy of a database runs no jobs until somebody says so; an upgrade, a restart and a failover are no copies.

use futures_util::future::join_all;
use posthouse::Posthouse;
use posthouse::store::{Database, Store, schema_sql};
use posthouse::testing::{TestCluster, TestDatabase};
use serde_json::json;

use super::support::{Queue, Session};
use crate::harness::{Program, SOON};

const REGISTER: &str = "select posthouse.register_worker(gen_random_uuid(), kinds => array['a'])";

async fn refused(s: &Session, why: &str) {
    let refusal = s.refused(REGISTER).await;
    assert_eq!(refusal.code, "PH011", "{}", refusal.message);
    assert!(refusal.message.contains(why), "{}", refusal.message);
}

fn store(url: &str) -> Store {
    Database::new(url).unwrap().store("test")
}

/// The stamp, changed so as if the database had been stamped somewhere else.
async fn restamp(s: &Session, change: serde_json::Value) {
    s.run(&format!("update posthouse.meta set value = (value::jsonb || '{change}')::text where name = 'origin'")).await;
}

#[tokio::test]
async fn a_database_that_is_no_copy_never_notices() {
    let (queue, s) = Queue::with_session().await;
    assert!(!store(queue.url()).origin().await.unwrap().is_stamped);
    let stamps = join_all((0..8).map(async |_| queue.session().await.run(REGISTER).await)).await;
    assert_eq!(stamps.len(), 8);
    assert_eq!(s.count("posthouse.meta where name = 'origin'").await, 1);
    let origin = store(queue.url()).origin().await.unwrap();
    assert_eq!((origin.is_copy, origin.is_stamped, origin.reason), (false, true, None));
    assert!(!store(queue.url()).adopt().await.unwrap(), "there is nothing to adopt");
    // A new major version with another system identifier, as after pg_upgrade.
    restamp(&s, json!({"server": "1", "major": 13})).await;
    s.run(REGISTER).await;
    // A host that does not tell its system identifier, before or now.
    restamp(&s, json!({"server": null})).await;
    s.run(REGISTER).await;
    // A dump of the schema into the same place does not stamp it: migrating again is no copy either.
    Posthouse::migrate(queue.url()).await.unwrap();
    s.run(REGISTER).await;
}

#[tokio::test]
async fn another_server_with_the_same_numbers_by_chance() {
    let (_queue, s) = Queue::with_session().await;
    s.run(REGISTER).await;
    restamp(&s, json!({"server": "1"})).await;
    refused(&s, "on another server").await;
}

#[tokio::test]
async fn one_who_may_not_read_the_control_file() {
    let cluster = tokio::task::spawn_blocking(|| TestCluster::dedicated(&[])).await.unwrap();
    let database = cluster.database(&schema_sql(), async |url: &str| Posthouse::migrate(url).await).await;
    let client = database.connect().await;
    client
        .batch_execute(
            "revoke execute on function pg_control_system() from public; create role plain login;
             grant usage on schema posthouse to plain; grant all on all tables in schema posthouse to plain;
             grant execute on all functions in schema posthouse to plain; set role plain",
        )
        .await
        .unwrap();
    client.batch_execute(REGISTER).await.unwrap();
    client.batch_execute(REGISTER).await.unwrap();
    let server: Option<String> = client
        .query_one("select value::jsonb ->> 'server' from posthouse.meta where name = 'origin'", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(server, None);
}

/// A copy of a test's database by `create database … template`, and a session in it.
async fn template_copy(queue: &Queue, s: &Session) -> (String, tokio_postgres::Client) {
    let name: String = s.get("select current_database()::text").await;
    let copy = format!("{name}_copy");
    let url = queue.url().replace(&name, &copy);
    let (admin, connection) =
        tokio_postgres::connect(&queue.url().replace(&name, "postgres"), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    admin
        .batch_execute(&format!(
            "select pg_terminate_backend(pid, 20000) from pg_stat_activity where datname = '{name}'"
        ))
        .await
        .unwrap();
    admin.batch_execute(&format!("create database {copy} template {name}")).await.unwrap();
    (url, admin)
}

#[tokio::test]
async fn a_copy_by_template_waits_for_a_word() {
    let (queue, s) = Queue::with_session().await;
    s.run(REGISTER).await;
    s.enqueue("kind => 'a'").await;
    let (url, admin) = template_copy(&queue, &s).await;
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let copy = Session { client, pid: 0 };
    refused(&copy, "template").await;
    // Jobs can be put in and looked at; a worker process ends at once, and says what to do.
    copy.enqueue("kind => 'a'").await;
    let mut worker = Program::start(Program::posthouse().args(["work", "--exec", "a=true", "--database-url", &url]));
    assert!(!worker.ended(SOON).await.success());
    assert!(worker.output().contains("posthouse db adopt"), "{}", worker.output());
    assert!(store(&url).adopt().await.unwrap());
    copy.run(REGISTER).await;
    // The original is not touched, and a renamed database is the same one.
    let there = queue.session().await;
    there.run(REGISTER).await;
    drop(copy);
    let (name, renamed) = (url.rsplit('/').next().unwrap(), "x");
    let renamed = format!("{name}_{renamed}");
    admin
        .batch_execute(&format!(
            "select pg_terminate_backend(pid, 20000) from pg_stat_activity where datname = '{name}'"
        ))
        .await
        .unwrap();
    admin.batch_execute(&format!("alter database {name} rename to {renamed}")).await.unwrap();
    let (client, connection) =
        tokio_postgres::connect(&url.replace(name, &renamed), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute(REGISTER).await.unwrap();
    drop(client);
    admin.batch_execute(&format!("drop database {renamed} with (force)")).await.unwrap();
}

#[tokio::test]
async fn a_restored_dump_waits_for_a_word() {
    let (_queue, s) = Queue::with_session().await;
    s.run(REGISTER).await;
    let stamp: String = s.get("select value from posthouse.meta where name = 'origin'").await;
    // What a restore does, as far as the stamp goes: new tables, old rows.
    let target = TestDatabase::new("select 2", async |_: &str| Ok::<(), posthouse::Error>(())).await;
    Posthouse::migrate(target.url()).await.unwrap();
    let client = target.connect().await;
    let restored = Session { client, pid: 0 };
    let sql = "insert into posthouse.meta values ('origin', $1)";
    restored.client.execute(sql, &[&stamp]).await.unwrap();
    let why =
        if s.get::<bool>(&format!("select '{stamp}'::jsonb ->> 'table' = 'posthouse.meta'::regclass::oid::text")).await
        {
            "copy"
        } else {
            "dump"
        };
    refused(&restored, why).await;
    restored.run("select posthouse.adopt()").await;
    restored.run(REGISTER).await;
    // Also into the very same database: older rows, of which some may have been run since.
    let old: String = restored.get("select value from posthouse.meta where name = 'origin'").await;
    restored.run("drop schema posthouse cascade").await;
    Posthouse::migrate(target.url()).await.unwrap();
    restored.client.execute(sql, &[&old]).await.unwrap();
    refused(&restored, "dump").await;
}

#[tokio::test]
async fn whoever_copies_files_says_so() {
    let (queue, s) = Queue::with_session().await;
    // With and without a stamp.
    for _ in 0..2 {
        store(queue.url()).disown().await.unwrap();
        refused(&s, "somebody said").await;
        let origin = store(queue.url()).origin().await.unwrap();
        assert!(origin.is_copy && origin.reason.unwrap().contains("somebody said"));
        assert!(store(queue.url()).adopt().await.unwrap());
        s.run(REGISTER).await;
    }
}
