//! Users' own transactions, made with another driver: the job exists when, and only if, they commit.

use sqlx::{Connection, PgConnection, Row};

use crate::client::queue_database;

#[tokio::test(flavor = "multi_thread")]
async fn sqlx_enqueues_in_its_own_transaction() {
    let database = queue_database().await;
    let mut connection = PgConnection::connect(database.url()).await.unwrap();
    sqlx::query("create table orders (id int)").execute(&mut connection).await.unwrap();
    for commit in [false, true] {
        let mut tx = connection.begin().await.unwrap();
        sqlx::query("insert into orders values (1)").execute(&mut *tx).await.unwrap();
        let job = sqlx::query(
            "select id, state, duplicate from posthouse.enqueue(kind => $1, payload => $2::jsonb, tenant => $3)",
        )
        .bind("summarize")
        .bind(r#"{"text":"…"}"#)
        .bind("acme")
        .fetch_one(&mut *tx)
        .await
        .unwrap();
        assert_eq!((job.get::<&str, _>("state"), job.get::<bool, _>("duplicate")), ("queued", false));
        if commit {
            tx.commit().await.unwrap()
        } else {
            tx.rollback().await.unwrap()
        }
        let jobs: i64 =
            sqlx::query_scalar("select count(*) from posthouse.jobs").fetch_one(&mut connection).await.unwrap();
        let orders: i64 = sqlx::query_scalar("select count(*) from orders").fetch_one(&mut connection).await.unwrap();
        assert_eq!((jobs, orders), if commit { (1, 1) } else { (0, 0) });
    }
}
