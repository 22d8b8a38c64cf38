//! A year of traffic: whether claims and settles feel the history that lies behind and its deletion, and whether anybody feels
//! that a partition is dropped while somebody reads.

use std::ops::Range;
use std::time::{Duration, Instant};

use posthouse::store::{Database, Ended, Retention};
use posthouse::{Job as _, NewJob, Posthouse};
use tokio_postgres::Client;

use crate::claims::{Claims, with_housekeeping};
use crate::error::{Error, Result};
use crate::figure::{Sample, percentiles};
use crate::ground::{Scratch, connect};
use crate::jobs::Noop;
use crate::sizes::{BATCH, Sizes};

/// Jobs that wait while claims are timed, in batches.
const WAITING: u32 = 50;
/// Of all turns, this part before them does not count.
const WARM_UP: u32 = 10;
/// The queue whose jobs ended long ago.
const OLD: &str = "old";
/// The one that is at work.
const NEW: &str = "new";
/// Ids that are left to what is being enqueued when history is put behind it.
const ROOM: i64 = 10_000;
/// Rows that are made in one statement.
const CHUNK: i64 = 500_000;
/// Longer than the sweep takes to read a history at its pace, and to drop a partition.
const REST: Duration = Duration::from_secs(300);
/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(10);

/// Claims and settles without history, and beside archived rows of which half have expired and are being deleted.
pub(crate) async fn archived(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let client = connect(&scratch.url).await?;
    fill(scratch).await?;
    let mut claims = Claims::begin(scratch, NEW).await?;
    let measured = async {
        claims.turns(sizes.claims_timed / WARM_UP).await?;
        claims.forget();
        turns(&mut claims, sizes.reader_time / 4).await?;
        let before = [take(&mut claims.claims), take(&mut claims.settles)];
        // Jobs that are on their way into the queue take ids yet.
        let first = format!("select last_value + {ROOM} from posthouse.job_id_seq");
        let first: i64 = client.query_one(&first, &[]).await?.get(0);
        let rows = i64::from(sizes.archived);
        // Their partitions first, as the sweep would have made them over time.
        client.batch_execute(&format!(
            "do $$ begin for n in 0..{rows} / 1000000 loop perform posthouse.make_partitions({first} + n * 1000000); end loop; end $$;
             select setval('posthouse.job_id_seq', {first} + {rows}); select posthouse.partitions_ahead()"
        ))
        .await?;
        history(&client, first..first + rows, "60 days").await?;
        settle_down(&client).await?;
        keep(scratch).await?;
        survey(&client).await?;
        let there = "select count(*) from posthouse.id_range";
        let (deleted, ranges) = (deleted(&client).await?, count(&client, there).await?);
        let begun = format!("select not exists (select from posthouse.archive where id = {first})");
        wait_for(&client, "the first job is gone", &begun).await?;
        claims.turns(sizes.claims_timed / WARM_UP).await?;
        claims.forget();
        turns(&mut claims, sizes.reader_time / 4).await?;
        let after = [take(&mut claims.claims), take(&mut claims.settles)];
        let went = deleted_since(&client, deleted).await?;
        let dropped = ranges - count(&client, there).await?;
        Ok((before, after, went, dropped))
    };
    let (before, after, deleted, dropped) = with_housekeeping(scratch, measured).await?;
    let mut samples = Vec::new();
    for (name, before, after) in
        ["claim", "settle"].into_iter().zip(before).zip(after).map(|((name, before), after)| (name, before, after))
    {
        samples.extend(compared(name, "without history", &before, "with history", &after));
    }
    samples.push(Sample::new("rows deleted meanwhile", "", deleted));
    samples.push(Sample::new("partitions dropped meanwhile", "", dropped));
    Ok(samples)
}

/// A partition in which all has expired, while somebody reads its parent for some time: how enqueues and settles do meanwhile, and
/// how long after the reader's end it is gone.
pub(crate) async fn dropped(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let (client, reader) = (connect(&scratch.url).await?, connect(&scratch.url).await?);
    let width = (i64::from(sizes.dropped) / 1_000_000 + 1) * 1_000_000;
    client
        .batch_execute(&format!(
            "delete from posthouse.id_range; drop table posthouse.payload_0, posthouse.archive_0;
         drop table if exists posthouse.payload_1000000, posthouse.archive_1000000;
         select posthouse.make_range(0, {width}); insert into posthouse.id_range values (0, {width}, 0);
         select setval('posthouse.job_id_seq', {width}); select posthouse.partitions_ahead()"
        ))
        .await?;
    history(&client, 1..i64::from(sizes.dropped) + 1, "0 days").await?;
    settle_down(&client).await?;
    fill(scratch).await?;
    let mut claims = Claims::begin(scratch, NEW).await?;
    let queue = Posthouse::connect(&scratch.url).await?;
    let measured = async {
        claims.turns(sizes.claims_timed / WARM_UP).await?;
        claims.forget();
        let alone = enqueues(&queue, &mut claims, sizes.reader_time).await?;
        let settles = take(&mut claims.settles);
        reader
            .batch_execute("begin; select from posthouse.archive limit 1; select from posthouse.payload limit 1")
            .await?;
        keep(scratch).await?;
        let beside = enqueues(&queue, &mut claims, sizes.reader_time).await?;
        let settles_beside = take(&mut claims.settles);
        // It has been ready to go for a while, or the figure would tell how fast slices are looked at.
        survey(&client).await?;
        wait_for(&client, "the sweep would drop it", "select more from posthouse.sweep where name = 'retire'").await?;
        reader.batch_execute("commit").await?;
        let gone = Instant::now();
        wait_for(
            &client,
            "it is dropped",
            "select to_regclass('posthouse.archive_0') is null and to_regclass('posthouse.payload_0') is null",
        )
        .await?;
        Ok(([alone, settles], [beside, settles_beside], gone.elapsed()))
    };
    let (before, after, gone) = with_housekeeping(scratch, measured).await?;
    let mut samples = vec![Sample::new("gone after the reader's end", "s", gone.as_secs_f64())];
    for ((name, before), after) in ["enqueue", "settle"].into_iter().zip(before).zip(after) {
        samples.extend(compared(name, "alone", &before, "beside the drop", &after));
    }
    Ok(samples)
}

/// Median, p99 and the worst of two series, and the ratios of the first two.
fn compared(name: &str, one: &str, before: &[f64], other: &str, after: &[f64]) -> Vec<Sample> {
    let of = |times: &[f64]| percentiles(["p50", "p95", "p99"], times);
    let mut samples = Vec::new();
    for (before, after) in of(before).into_iter().zip(of(after)).filter(|(before, _)| before.name != "p95") {
        let percentile = before.name;
        samples.push(Sample::new(format!("{name} {percentile} {one}"), "ms", before.value));
        samples.push(Sample::new(format!("{name} {percentile} {other}"), "ms", after.value));
        samples.push(Sample::new(format!("{name} {percentile}, {other} to {one}"), "", after.value / before.value));
    }
    let worst = after.iter().copied().fold(0.0, f64::max);
    samples.push(Sample::new(format!("{name}, the longest {other}"), "ms", worst));
    samples
}

fn take(times: &mut Vec<f64>) -> Vec<f64> {
    std::mem::take(times)
}

/// Claims and settles for so long: long enough for the sweep to get to work.
async fn turns(claims: &mut Claims, time: Duration) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        claims.turn().await?;
    }
    Ok(())
}

/// Single enqueues beside claims and settles, for so long. Answers with the times of the enqueues, in ms.
async fn enqueues(queue: &Posthouse, claims: &mut Claims, time: Duration) -> Result<Vec<f64>> {
    let (mut times, start) = (Vec::new(), Instant::now());
    while start.elapsed() < time {
        claims.turn().await?;
        let began = Instant::now();
        queue.enqueue_job(NewJob::of(&Noop { n: 0 })?.queue(NEW)).await?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    Ok(times)
}

/// Jobs to claim.
async fn fill(scratch: &Scratch) -> Result<()> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let jobs = (0..WAITING * BATCH).map(|n| Ok(NewJob::of(&Noop { n })?.queue(NEW)));
    queue.enqueue_many(&jobs.collect::<posthouse::Result<Vec<_>>>()?).await?;
    Ok(())
}

/// Jobs of [`OLD`] with these ids, done more than 30 days ago, spread back over `since`.
async fn history(client: &Client, ids: Range<i64>, spread: &str) -> Result<()> {
    let kind = Noop::KIND;
    client
        .batch_execute(&format!(
            "insert into posthouse.lane (queue, priority, tenant, kind, ready_at, awake_until)
               values ('{OLD}', 0, 'default', '{kind}', 'infinity', '-infinity')"
        ))
        .await?;
    let (first, all) = (ids.start, ids.end - ids.start);
    for from in ids.clone().step_by(usize::try_from(CHUNK).unwrap_or(usize::MAX)) {
        let to = (from + CHUNK).min(ids.end) - 1;
        // The oldest first, as time would have it. With a spread of 60 days half of them have expired.
        client
            .batch_execute(&format!(
                "insert into posthouse.payload (id, payload) select n, '{{\"n\": 1}}' from generate_series({from}, {to}) n;
                 insert into posthouse.archive (id, lane_id, created_at, finished_at, fence, attempt, max_attempts, state, result)
                   select n, l.id, t.at, t.at, 1, 1, 5, 'done', 'null'
                   from posthouse.lane l, generate_series({from}, {to}) n,
                     lateral (select now() - case when interval '{spread}' = '0' then interval '40 days'
                       else interval '{spread}' * (1 - (n - {first})::float8 / {all}) end as at) t
                   where l.queue = '{OLD}'"
            ))
            .await?;
    }
    Ok(())
}

/// Leaves nothing over of so many rows put in at once, which no queue does: what a vacuum and a checkpoint have to do would be felt
/// later. Who may not make checkpoints waits for none.
async fn settle_down(client: &Client) -> Result<()> {
    client.batch_execute("vacuum (freeze, analyze) posthouse.archive, posthouse.payload").await?;
    let _ = client.batch_execute("checkpoint").await;
    Ok(())
}

/// From now on the old queue keeps jobs for 30 days.
async fn keep(scratch: &Scratch) -> Result<()> {
    let store = Database::new(&scratch.url)?.store("keep");
    let month = Retention::For(Duration::from_hours(30 * 24));
    Ok(store.set_retention(OLD, Ended::Done, month).await?)
}

/// Looks at all of history that is left at once, for which the sweep at its pace would take minutes. Deleting and dropping is left to that.
async fn survey(client: &Client) -> Result<()> {
    // Nothing comes of it while the worker's sweep is at it.
    let left = "select posthouse.survey_slices('1 second') or exists (select from posthouse.slice where stale)
                  or exists (select from posthouse.id_range r, posthouse.job_id_seq s where r.sliced_to < r.upper and r.sliced_to <= s.last_value)";
    while client.query_one(left, &[]).await?.get(0) {}
    Ok(())
}

async fn count(client: &Client, sql: &str) -> Result<f64> {
    let count: i64 = client.query_one(sql, &[]).await?.get(0);
    Ok(count as f64)
}

/// Rows that are there of the old queue, by their statistics: a count would take its time.
async fn deleted(client: &Client) -> Result<f64> {
    count(client, "select coalesce(sum(n_tup_del), 0)::bigint from pg_stat_user_tables where schemaname = 'posthouse' and relname ~ '^archive_'").await
}

async fn deleted_since(client: &Client, before: f64) -> Result<f64> {
    // Sessions tell their statistics once a second.
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    Ok(deleted(client).await? - before)
}

async fn wait_for(client: &Client, what: &str, condition: &str) -> Result<()> {
    let deadline = Instant::now() + REST;
    while !client.query_one(condition, &[]).await?.get::<_, bool>(0) {
        if Instant::now() > deadline {
            return Err(Error::Stuck(format!("{} s later it is not so that {what}", REST.as_secs())));
        }
        tokio::time::sleep(LOOK).await;
    }
    Ok(())
}
