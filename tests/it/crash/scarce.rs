//! A Postgres that is there and refuses: read-only, or without a free connection.

use std::time::Duration;

use posthouse::testing::TestDatabase;
use tokio_postgres::{Client, NoTls};

use super::support::{Journal, assert_one_record_each, dedicated, number, work};
use crate::harness::{SOON, wait_until};
use crate::worker_support::{database_on, enqueue, job_in, queue_at};

#[tokio::test]
async fn a_read_only_server_is_waited_for_and_outcomes_are_written_after_it() {
    let cluster = dedicated(&[]).await;
    let (database, journal) = (database_on(&cluster).await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("wait_for gate; echo $PPID"));
    let arguments = ["--lease-ms", "3000", "--concurrency", "2", "--exec", &handler];
    let ids = enqueue(&queue, "k", 4).await;
    let workers = [work(database.url(), &journal, &arguments), work(database.url(), &journal, &arguments)];
    journal.wait_for("start", None, 4).await;
    let admin = database.connect().await;
    let read_only = async |on: &str| {
        admin.batch_execute(&format!("alter system set default_transaction_read_only = {on}")).await.unwrap();
        admin.batch_execute("select pg_reload_conf()").await.unwrap();
    };
    read_only("on").await;
    admin.batch_execute("set default_transaction_read_only = off").await.unwrap();
    for worker in &workers {
        worker.printed("connection to Postgres lost", SOON).await;
    }
    journal.open("gate");
    journal.wait_for("end", None, 4).await;
    let refused = async || {
        let sql = "select xact_rollback from pg_stat_database where datname = current_database()";
        admin.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    // Longer than a lease, and as long as Postgres takes to count.
    let before = refused().await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let asked = refused().await - before;
    assert!((1..200).contains(&asked), "they asked {asked} times in 5 s");
    assert_eq!(number(&database, "select count(*) from posthouse.archive").await, 0, "nothing can be written");
    read_only("off").await;
    for id in &ids {
        let job = job_in(&queue, *id, "done").await;
        assert_eq!((job.attempt, job.result_as::<u32>().unwrap()), (1, journal.noted("end", *id)[0].worker));
    }
    let next = enqueue(&queue, "k", 4).await;
    for id in &next {
        job_in(&queue, *id, "done").await;
    }
    let all = [ids, next].concat();
    journal.assert_each_ran_once(&all);
    assert_one_record_each(&database, &all).await;
}

/// Takes every free connection of the server; answers when it refuses the next one.
async fn hog(database: &TestDatabase, taken: &mut Vec<Client>) {
    loop {
        match tokio_postgres::connect(database.url(), NoTls).await {
            Ok((client, connection)) => {
                tokio::spawn(connection);
                taken.push(client);
            }
            Err(error) => {
                assert_eq!(error.code().map(|code| code.code()), Some("53300"), "{error}");
                return;
            }
        }
    }
}

#[tokio::test]
async fn a_server_without_a_free_connection_is_waited_for_and_nothing_finished_is_lost() {
    let cluster = dedicated(&[("max_connections", "16")]).await;
    let (database, journal) = (database_on(&cluster).await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("wait_for gate; echo $PPID"));
    let id = enqueue(&queue, "k", 1).await[0];
    let admin = database.connect().await;
    let mut taken = Vec::new();

    // At the start.
    hog(&database, &mut taken).await;
    let log = cluster.server().directory().join("postgres.log");
    let refusals = || std::fs::read_to_string(&log).unwrap().matches("too many clients").count();
    let before = refusals();
    let mut worker = work(database.url(), &journal, &["--lease-ms", "20000", "--exec", &handler]);
    wait_until(SOON, "the worker was refused three times", async || {
        assert!(super::support::runs(worker.pid()), "it gave up:\n{}", worker.output());
        refusals() >= before + 3
    })
    .await;
    worker.printed("too many clients", SOON).await;
    taken.clear();
    journal.wait_for("start", id, 1).await;

    // And when its connections break while a job runs.
    let ours = "from pg_stat_activity where datname = current_database() and application_name ~ '^posthouse/(claim|settle|heartbeat|listen|sweep)$'";
    wait_until(SOON, "every connection of the worker is gone, and none is free", async || {
        admin.batch_execute(&format!("select pg_terminate_backend(pid) {ours}")).await.unwrap();
        hog(&database, &mut taken).await;
        admin.query_one(&format!("select count(*) {ours}"), &[]).await.unwrap().get::<_, i64>(0) == 0
    })
    .await;
    journal.open("gate");
    journal.wait_for("end", id, 1).await;
    let before = refusals();
    wait_until(SOON, "the worker is refused and goes on asking", async || refusals() >= before + 5).await;
    let state = "select state::text from posthouse.job where id = $1";
    assert_eq!(admin.query_one(state, &[&id]).await.unwrap().get::<_, &str>(0), "running", "nobody could record it");
    taken.clear();
    let job = job_in(&queue, id, "done").await;
    assert_eq!((job.attempt, job.result_as::<u32>().unwrap()), (1, worker.pid()));
    journal.assert_each_ran_once(&[id]);
    assert_one_record_each(&database, &[id]).await;
    worker.terminate();
    assert_eq!(worker.ended(SOON).await.code(), Some(0), "{}", worker.output());
}
