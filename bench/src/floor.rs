//! The floor: what the machine and Postgres can do at all, by raw statements without a queue, with the driver that the
//! library uses.

use std::future::poll_fn;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::SinkExt;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use crate::error::{Error, Result};
use crate::figure::{Sample, percentiles};
use crate::ground::{Scratch, connect};
use crate::sizes::Sizes;

/// Names of figures that others are compared with.
pub(crate) const COMMITS_1: &str = "commits, 1 client";
pub(crate) const COMMITS_16: &str = "commits, 16 clients";
pub(crate) const CLAIM_SETTLE: &str = "claimed and settled";
pub(crate) const COPY: &str = "copied";
pub(crate) const COPY_TABLES: &str = "copied into the queue's tables";
pub(crate) const NOTIFY_P50: &str = "notify p50";
pub(crate) const NOTIFY_P95: &str = "notify p95";
pub(crate) const NOTIFY_P99: &str = "notify p99";

/// Jobs of one claim.
const BATCH: u32 = 500;
/// Rows of one piece of a COPY.
const PIECE: u32 = 5_000;
/// A notification that takes longer than this was lost.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two notifications, so that nobody is awake already.
const NOTIFY_PAUSE: Duration = Duration::from_millis(2);

pub(crate) async fn measure(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let mut samples = vec![
        Sample::new(COMMITS_1, "1/s", commits(scratch, 1, sizes.commit_time).await?),
        Sample::new(COMMITS_16, "1/s", commits(scratch, 16, sizes.commit_time).await?),
        Sample::rate(CLAIM_SETTLE, sizes.claims, claims(scratch, sizes.claims).await?),
        Sample::rate(COPY, sizes.copies, copies(scratch, sizes.copies).await?),
        Sample::rate(COPY_TABLES, sizes.copies, copies_into_tables(scratch, sizes.copies).await?),
    ];
    samples.extend(percentiles([NOTIFY_P50, NOTIFY_P95, NOTIFY_P99], &notifies(scratch, sizes.notifies).await?));
    Ok(samples)
}

/// The smallest transactions that must reach the disk, a second.
async fn commits(scratch: &Scratch, clients: u32, time: Duration) -> Result<f64> {
    let mut connections = Vec::new();
    for _ in 0..clients {
        let client = connect(&scratch.url).await?;
        let statement = client.prepare("select pg_logical_emit_message(true, 'x', 'y')").await?;
        connections.push((client, statement));
    }
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for (client, statement) in connections {
        tasks.spawn(async move {
            let mut commits = 0_u32;
            while start.elapsed() < time {
                client.query_one(&statement, &[]).await?;
                commits += 1;
            }
            Ok::<_, tokio_postgres::Error>(commits)
        });
    }
    let mut commits = 0;
    while let Some(ended) = tasks.join_next().await {
        commits += ended.map_err(|error| Error::Stuck(format!("commits: {error}")))??;
    }
    Ok(f64::from(commits) / start.elapsed().as_secs_f64())
}

/// Claims of 500 by UPDATE … SKIP LOCKED, each settled by a DELETE, on one connection. Answers with the seconds.
async fn claims(scratch: &Scratch, rows: u32) -> Result<f64> {
    let client = connect(&scratch.url).await?;
    client
        .batch_execute(
            "create table floor_state (id bigint primary key, state smallint not null default 0, lease timestamptz, \
             worker int, payload jsonb not null)",
        )
        .await?;
    let fill = "insert into floor_state (id, payload) select n, jsonb_build_object('n', n) from generate_series(1, $1::bigint) n";
    client.execute(fill, &[&i64::from(rows)]).await?;
    client.batch_execute("create index floor_ready on floor_state (id) where state = 0").await?;
    client.batch_execute("vacuum analyze floor_state").await?;
    let claim = client
        .prepare(
            "update floor_state set state = 1, lease = now(), worker = 1 where id = any(array(select id from floor_state \
             where state = 0 order by id limit $1 for update skip locked)) returning id, payload::text",
        )
        .await?;
    let settle = client.prepare("delete from floor_state where id = any($1)").await?;
    let start = Instant::now();
    loop {
        let claimed = client.query(&claim, &[&i64::from(BATCH)]).await?;
        if claimed.is_empty() {
            return Ok(start.elapsed().as_secs_f64());
        }
        let ids: Vec<i64> = claimed.iter().map(|row| row.get(0)).collect();
        client.execute(&settle, &[&ids]).await?;
    }
}

/// COPY into a table with a primary key. Answers with the seconds.
async fn copies(scratch: &Scratch, rows: u32) -> Result<f64> {
    let client = connect(&scratch.url).await?;
    client
        .batch_execute(
            "create table floor_copy (id bigint primary key, state smallint not null default 0, payload jsonb not null)",
        )
        .await?;
    let rows = pieces(rows, |n| format!("{n}\t{{\"n\": {n}}}\n"));
    let start = Instant::now();
    copy(&client, "copy floor_copy (id, payload) from stdin", rows).await?;
    Ok(start.elapsed().as_secs_f64())
}

/// COPY into copies of the two tables that an enqueue writes to, with their indexes and settings, on one connection. Answers
/// with the seconds.
async fn copies_into_tables(scratch: &Scratch, rows: u32) -> Result<f64> {
    let client = connect(&scratch.url).await?;
    client.batch_execute("set search_path to public, posthouse").await?;
    for table in ["payload", "job"] {
        let settings = "select coalesce('with (' || array_to_string(reloptions, ', ') || ')', '') from pg_class \
             where oid = $1::text::regclass";
        let settings: String = client.query_one(settings, &[&table]).await?.get(0);
        client.batch_execute(&format!("create table floor_{table} (like {table} including all) {settings}")).await?;
    }
    let payloads = pieces(rows, |n| format!("{n}\t{{\"n\": {n}}}\n"));
    let jobs = pieces(rows, |n| format!("{n}\t1\t2000-01-01\t2000-01-01\t5\tf\n"));
    let start = Instant::now();
    copy(&client, "copy floor_payload (id, payload) from stdin", payloads).await?;
    let job = "copy floor_job (id, lane_id, run_at, created_at, max_attempts, keyed) from stdin";
    copy(&client, job, jobs).await?;
    Ok(start.elapsed().as_secs_f64())
}

async fn copy(client: &Client, into: &str, pieces: Vec<Bytes>) -> Result<()> {
    let sink = client.copy_in(into).await?;
    let mut sink = std::pin::pin!(sink);
    for piece in pieces {
        sink.send(piece).await?;
    }
    sink.finish().await?;
    Ok(())
}

/// Lines for a COPY, from 1 on, some thousand a piece.
fn pieces(rows: u32, line: impl Fn(u32) -> String) -> Vec<Bytes> {
    let numbers: Vec<u32> = (1..=rows).collect();
    numbers.chunks(PIECE as usize).map(|piece| piece.iter().map(|n| line(*n)).collect::<String>().into()).collect()
}

/// NOTIFY there and back between two connections, in ms.
async fn notifies(scratch: &Scratch, rounds: u32) -> Result<Vec<f64>> {
    let (here, mut back) = listen(scratch, "floor_pong").await?;
    let (there, mut forth) = listen(scratch, "floor_ping").await?;
    let echo = tokio::spawn(async move {
        while forth.recv().await.is_some() {
            there.batch_execute("notify floor_pong").await?;
        }
        Ok::<_, tokio_postgres::Error>(())
    });
    let mut times = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        here.batch_execute("notify floor_ping").await?;
        let heard = tokio::time::timeout(NOTIFY_TIMEOUT, back.recv()).await;
        heard.ok().flatten().ok_or_else(|| Error::Stuck("floor: a notification did not come back".to_owned()))?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        tokio::time::sleep(NOTIFY_PAUSE).await;
    }
    echo.abort();
    Ok(times)
}

/// A connection that listens; the time comes out of the channel for each notification.
pub(crate) async fn listen(scratch: &Scratch, channel: &str) -> Result<(Client, mpsc::UnboundedReceiver<Instant>)> {
    let (client, mut connection) = tokio_postgres::connect(&scratch.url, NoTls).await?;
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if matches!(message, AsyncMessage::Notification(_)) && sender.send(Instant::now()).is_err() {
                break;
            }
        }
    });
    client.batch_execute(&format!("listen {channel}")).await?;
    Ok((client, receiver))
}
