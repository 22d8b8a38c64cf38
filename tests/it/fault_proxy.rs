//! The faulty wire does what tests rely on: a lost answer means done, a lost request means not done.

use std::time::{Duration, Instant};

use posthouse::testing::TestDatabase;
use tokio_postgres::{Client, NoTls};

use crate::harness::{FaultProxy, SOON, wait_until};

async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

async fn letters() -> (TestDatabase, FaultProxy) {
    let schema = "create table letter (id bigint)";
    let migrate = async |url: &str| connect(url).await?.batch_execute(schema).await;
    let database = TestDatabase::new(schema, migrate).await;
    let proxy = FaultProxy::start(database.url()).await;
    (database, proxy)
}

async fn count(client: &Client) -> i64 {
    client.query_one("select count(*) from letter", &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_lost_answer_means_done() {
    let (database, proxy) = letters().await;
    let through = connect(&proxy.url(database.url())).await.unwrap();
    let direct = database.connect().await;
    through.batch_execute("insert into letter values (1)").await.unwrap();
    proxy.lose_answer_to("values (2)");
    assert!(through.batch_execute("insert into letter values (2)").await.is_err());
    // The server answered before the cut, so it is done by now.
    assert_eq!(count(&direct).await, 2);
    assert_eq!(proxy.cuts(), 1);
    // Only once: the repeat goes through.
    let through = connect(&proxy.url(database.url())).await.unwrap();
    through.batch_execute("insert into letter values (2)").await.unwrap();
    assert_eq!(count(&direct).await, 3);
}

#[tokio::test]
async fn a_lost_commit_answer_means_committed() {
    let (database, proxy) = letters().await;
    let mut through = connect(&proxy.url(database.url())).await.unwrap();
    proxy.lose_answer_to("COMMIT");
    let transaction = through.transaction().await.unwrap();
    transaction.execute("insert into letter values ($1)", &[&7_i64]).await.unwrap();
    assert!(transaction.commit().await.is_err());
    assert_eq!(count(&database.connect().await).await, 1);
}

#[tokio::test]
async fn a_lost_request_means_not_done() {
    let (database, proxy) = letters().await;
    let through = connect(&proxy.url(database.url())).await.unwrap();
    proxy.lose_request("values (2)");
    assert!(through.batch_execute("insert into letter values (2)").await.is_err());
    assert_eq!((proxy.cuts(), count(&database.connect().await).await), (1, 0));
}

#[tokio::test]
async fn refuses_and_heals() {
    let (database, proxy) = letters().await;
    let url = proxy.url(database.url());
    let through = connect(&url).await.unwrap();
    proxy.refuse();
    wait_until(SOON, "the old connection is cut", async || through.is_closed()).await;
    assert!(connect(&url).await.is_err());
    proxy.heal();
    let through = connect(&url).await.unwrap();
    assert_eq!(count(&through).await, 0);
    proxy.cut_all();
    wait_until(SOON, "the connection is cut", async || through.is_closed()).await;
    assert_eq!(count(&connect(&url).await.unwrap()).await, 0);
}

#[tokio::test]
async fn stalls_and_delays() {
    let (database, proxy) = letters().await;
    let through = connect(&proxy.url(database.url())).await.unwrap();
    proxy.stall();
    let mut held = std::pin::pin!(count(&through));
    assert!(tokio::time::timeout(Duration::from_millis(200), &mut held).await.is_err());
    proxy.heal();
    assert_eq!(tokio::time::timeout(SOON, held).await.unwrap(), 0);
    proxy.delay(Duration::from_millis(50));
    let start = Instant::now();
    through.batch_execute("select 1").await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(100), "there and back took {:?}", start.elapsed());
}
