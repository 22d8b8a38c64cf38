//! Payloads from small to large: how fast they come in and are worked off, and what each costs in WAL.

use std::time::Instant;

use posthouse::store::Database;
use posthouse::{Context, Job, NewJob, Posthouse, Worker};
use serde::{Deserialize, Serialize};
use tokio_postgres::Client;

use crate::error::Result;
use crate::figure::Sample;
use crate::ground::{Scratch, connect};
use crate::sizes::{SLOTS, Sizes};
use crate::work::until_done;

/// Bytes of a payload, and how they are called.
const PAYLOADS: [(u32, &str); 4] = [(200, "0.2 KB"), (1_000, "1 KB"), (20_000, "20 KB"), (200_000, "200 KB")];
/// A payload counts for at least so much, so that small ones do not come in millions.
const COUNTED_MIN: u32 = 4_000;
/// Bytes of one call of `enqueue_many`.
const CALL: u32 = 8_000_000;
/// What words are made of, two of them each: a thousand words, so texts compress about as prose does.
const SYLLABLES: [&str; 32] = [
    "ter", "ing", "hor", "let", "man", "der", "sta", "rin", "pos", "ver", "con", "lan", "tri", "mor", "wea", "cha",
    "ger", "ton", "ble", "per", "sil", "dra", "kno", "fol", "est", "qui", "bra", "sun", "ort", "net", "hil", "wod",
];

#[derive(Serialize, Deserialize)]
struct Letter {
    text: String,
}

impl Job for Letter {
    const KIND: &'static str = "letter";
}

pub(crate) async fn measure(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    for (bytes, name) in PAYLOADS {
        samples.extend(one(scratch, name, bytes, (sizes.large_total / bytes.max(COUNTED_MIN)).max(1)).await?);
    }
    Ok(samples)
}

/// So many jobs with payloads of so many bytes.
async fn one(scratch: &Scratch, name: &str, bytes: u32, jobs: u32) -> Result<Vec<Sample>> {
    let letters =
        (0..jobs).map(|n| NewJob::of(&Letter { text: text(n, bytes) })).collect::<posthouse::Result<Vec<_>>>()?;
    let queue = Posthouse::connect(&scratch.url).await?;
    let client = connect(&scratch.url).await?;

    let before = wal(&client).await?;
    let start = Instant::now();
    for call in letters.chunks((CALL / bytes) as usize) {
        queue.enqueue_many(call).await?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let between = wal(&client).await?;
    let enqueued = told(name, "enqueued", bytes, jobs, seconds, between - before);

    let worker = Worker::builder(Database::new(&scratch.url)?).concurrency(SLOTS);
    let seconds = until_done(worker.handle(|_: Letter, _: Context| async {}), jobs).await?;
    let done = told(name, "done", bytes, jobs, seconds, wal(&client).await? - between);
    Ok([enqueued, done].concat())
}

fn told(name: &str, what: &str, bytes: u32, jobs: u32, seconds: f64, wal: f64) -> Vec<Sample> {
    let megabytes = f64::from(jobs) * f64::from(bytes) / 1e6;
    vec![
        Sample::rate(format!("{name}: {what}"), jobs, seconds),
        Sample::new(format!("{name}: {what}, payload"), "MB/s", megabytes / seconds),
        Sample::new(format!("{name}: {what}, WAL a job"), "B", wal / f64::from(jobs)),
    ]
}

/// Bytes that the server has ever written into its WAL.
async fn wal(client: &Client) -> Result<f64> {
    let position = "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::float8";
    Ok(client.query_one(position, &[]).await?.get(0))
}

/// Words without end, different for each number, cut so that the payload has so many bytes.
fn text(n: u32, bytes: u32) -> String {
    let length = bytes as usize - r#"{"text":""}"#.len();
    let mut text = format!("{n}:");
    // A linear congruential generator: the same texts in every run.
    let mut state = u64::from(n);
    while text.len() < length {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push(' ');
        text.push_str(SYLLABLES[(state >> 59) as usize]);
        text.push_str(SYLLABLES[(state >> 54 & 31) as usize]);
    }
    text.truncate(length);
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_payload_has_the_bytes_that_it_is_said_to_have() {
        for (bytes, name) in PAYLOADS {
            let payload = serde_json::to_string(&Letter { text: text(7, bytes) }).unwrap();
            assert_eq!(payload.len(), bytes as usize, "{name}");
        }
        assert_ne!(text(1, 200), text(2, 200));
    }
}
