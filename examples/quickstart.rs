//! A typed job from enqueue to result: in a transaction of your own, by a worker in the same program.
//!
//! ```text
//! DATABASE_URL=postgres://… cargo run --example quickstart
//! ```

use std::time::Duration;

use posthouse::{Context, Job, JobError, Outcome, Posthouse, Worker};
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;

#[derive(Serialize, Deserialize)]
struct Shout {
    text: String,
}

impl Job for Shout {
    const KIND: &'static str = "shout";
    const MAX_ATTEMPTS: Option<u32> = Some(3);
    const TIMEOUT: Option<Duration> = Some(Duration::from_secs(60));
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL (`posthouse dev` prints one)")?;
    Posthouse::migrate(&url).await?;
    let queue = Posthouse::connect(&url).await?;

    // In your own transaction: the job exists when, and only if, it commits.
    let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    let transaction = client.transaction().await?;
    let hello = queue.enqueue(Shout { text: "hello".into() }).tenant("acme").in_transaction(&transaction).await?;
    transaction.commit().await?;

    // Without one; the key makes it happen once however often this runs before the job is done.
    let twice = || queue.enqueue(Shout { text: String::new() }).tenant("acme").dedupe_key("hook-17");
    let (empty, again) = (twice().await?, twice().await?);
    assert_eq!((empty.id, true), (again.id, again.duplicate));

    // A handler says what became of the attempt by what it returns.
    Worker::builder(&queue)
        .concurrency(1_000)
        .handle(|job: Shout, context: Context| async move {
            if job.text.is_empty() {
                return Outcome::fail(JobError::new("empty", "there is nothing to shout"));
            }
            println!("job {} attempt {} for {}", context.job_id(), context.attempt(), context.tenant());
            Outcome::done(&job.text.to_uppercase())
        })
        .until_empty(true)
        .run()
        .await?;

    let done = queue.wait(hello.id, Duration::from_millis(100)).await?;
    println!("job {} is {}: {}", done.id, done.state, done.result_as::<String>()?);
    let failed = queue.wait(empty.id, Duration::from_millis(100)).await?;
    println!("job {} is {}: {}", failed.id, failed.state, failed.error.unwrap_or_default());
    Ok(())
}
