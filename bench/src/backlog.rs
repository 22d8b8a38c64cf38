//! Whether claims depend on what they do not touch: jobs that wait behind, and tenants without work.

use std::ops::Range;
use std::time::{Duration, Instant};

use posthouse::store::Database;
use posthouse::{Context, NewJob, Posthouse, Worker};
use tokio::task::JoinSet;
use tokio_postgres::Client;

use crate::claims::{Claims, with_housekeeping};
use crate::error::{Error, Result};
use crate::figure::{Sample, number, percentiles};
use crate::ground::{Scratch, connect};
use crate::jobs::Noop;
use crate::sizes::{BATCH, Sizes};
use crate::statements::Statements;
use crate::tables::vacuum;

/// Connections that fill the queue.
const FILLERS: u32 = 2;
/// Jobs of a call.
const CALL: u32 = 10_000;
/// Of all claims, this part before them does not count.
const WARM_UP: u32 = 10;
/// Claims between two looks at how many tenants are at rest: enough to have seen all of those that are not.
const ROUND: u32 = 50;
/// Tenants without work are at rest by then.
const REST: Duration = Duration::from_secs(120);

/// The queues of [`tenants`].
const MANY: &str = "many";
const ONE: &str = "one";

/// Claims from ever larger backlogs in one database.
pub(crate) async fn depths(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let client = connect(&scratch.url).await?;
    let statements = Statements::count(scratch).await?;
    let (mut samples, mut seen) = (Vec::new(), Vec::new());
    let (mut there, mut filled) = (0, 0.0);
    for depth in sizes.depths {
        let start = Instant::now();
        fill(scratch, there..depth, |job, _| job).await?;
        filled = f64::from(depth - there) / start.elapsed().as_secs_f64();
        there = depth;
        settle_down(&client).await?;
        let (at, name) = (at_depth(scratch, sizes, statements.as_ref()).await?, number(depth.into()));
        samples.push(Sample::new(format!("claim p50 at {name} jobs"), "ms", at.claim_p50));
        samples.push(Sample::new(format!("claim p99 at {name} jobs"), "ms", at.claim_p99));
        samples.extend(at.buffers.map(|buffers| Sample::new(format!("buffers a claim at {name} jobs"), "", buffers)));
        seen.push(at);
    }
    if let [first, .., last] = &seen[..] {
        let ratio = |of: &str, of_last: f64, of_first: f64| {
            Sample::new(format!("{of}, largest to smallest"), "", of_last / of_first)
        };
        samples.push(ratio("claim p50", last.claim_p50, first.claim_p50));
        samples.push(ratio("claim p99", last.claim_p99, first.claim_p99));
        samples.push(ratio("settle p99", last.settle_p99, first.settle_p99));
        samples.extend(last.buffers.zip(first.buffers).map(|(last, first)| ratio("buffers a claim", last, first)));
    }
    samples.push(Sample::new("filled", "1/s", filled));
    Ok(samples)
}

/// What claims cost at one depth.
struct AtDepth {
    claim_p50: f64,
    claim_p99: f64,
    settle_p99: f64,
    /// On average. `None`: the server does not count.
    buffers: Option<f64>,
}

async fn at_depth(scratch: &Scratch, sizes: &Sizes, statements: Option<&Statements>) -> Result<AtDepth> {
    let look = async || match statements {
        Some(statements) => statements.look().await.map(Some),
        None => Ok(None),
    };
    let mut claims = Claims::begin(scratch, "default").await?;
    let (before, after) = with_housekeeping(scratch, async {
        claims.turns(sizes.claims_timed / WARM_UP).await?;
        let before = look().await?;
        claims.turns(sizes.claims_timed).await?;
        Ok((before, look().await?))
    })
    .await?;
    let ([claim_p50, _, claim_p99], [_, _, settle_p99]) = (of(&claims.claims), of(&claims.settles));
    let cost = after.zip(before).and_then(|(after, before)| after.mean(&before, "claim"));
    Ok(AtDepth { claim_p50, claim_p99, settle_p99, buffers: cost.map(|cost| cost.buffers) })
}

/// Claims from many tenants of which a tenth has work, and in turn with them from one that has as much by itself.
pub(crate) async fn tenants(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let client = connect(&scratch.url).await?;
    let (tenants, busy) = (sizes.tenants, sizes.tenants / 10);
    fill(scratch, 0..tenants, |job, n| job.queue(MANY).tenant(format!("tenant-{n}"))).await?;
    let worker = Worker::builder(Database::new(&scratch.url)?).queue(MANY).handle(|_: Noop, _: Context| async {});
    worker.until_empty(true).run_until(std::future::pending()).await?;
    fill(scratch, 0..busy * BATCH, move |job, n| job.queue(MANY).tenant(format!("tenant-{}", n % busy * 10))).await?;
    fill(scratch, 0..busy * BATCH, |job, _| job.queue(ONE)).await?;
    settle_down(&client).await?;
    let (mut many, mut one) = (Claims::begin(scratch, MANY).await?, Claims::begin(scratch, ONE).await?);
    with_housekeeping(scratch, async {
        let mut samples = Vec::new();
        in_turn(&mut many, &mut one, sizes.claims_timed / WARM_UP).await?;
        in_turn(&mut many, &mut one, sizes.claims_timed).await?;
        samples.extend(compared(&many, &one, "others just ran empty"));
        let left = come_to_rest(&client, busy, &mut many, &mut one).await?;
        in_turn(&mut many, &mut one, sizes.claims_timed).await?;
        samples.extend(compared(&many, &one, "others at rest"));
        samples.push(Sample::new("others at rest: not yet", "", left));
        Ok(samples)
    })
    .await
}

async fn in_turn(many: &mut Claims, one: &mut Claims, turns: u32) -> Result<()> {
    many.forget();
    one.forget();
    for _ in 0..turns {
        many.turn().await?;
        one.turn().await?;
    }
    Ok(())
}

fn compared(many: &Claims, one: &Claims, when: &str) -> Vec<Sample> {
    let ([many_p50, _, many], [one_p50, _, one]) = (of(&many.claims), of(&one.claims));
    vec![
        Sample::new(format!("{when}: claim p50"), "ms", many_p50),
        Sample::new(format!("{when}: claim p50 of one tenant"), "ms", one_p50),
        Sample::new(format!("{when}: claim p99"), "ms", many),
        Sample::new(format!("{when}: claim p99 of one tenant"), "ms", one),
        Sample::new(format!("{when}: claim p99, many tenants to one"), "", many / one),
    ]
}

/// Goes on until claims do not send any more tenants to rest. Answers with the number of those that have no work and yet are
/// not at rest.
async fn come_to_rest(client: &Client, busy: u32, many: &mut Claims, one: &mut Claims) -> Result<f64> {
    let deadline = Instant::now() + REST;
    loop {
        let before = awake(client).await?;
        in_turn(many, one, ROUND).await?;
        // Those that were served a moment ago are left alone at first.
        if awake(client).await? == before && before < 2 * i64::from(busy) {
            return Ok(u32::try_from(before).map_or(f64::INFINITY, f64::from) - f64::from(busy));
        }
        if Instant::now() > deadline {
            return Err(Error::Stuck("tenants: those without work do not come to rest".to_owned()));
        }
    }
}

/// Tenants of the queue that claims look at.
async fn awake(client: &Client) -> Result<i64> {
    let count = "select count(*) from posthouse.lane where queue = $1 and ready_at < 'infinity'";
    Ok(client.query_one(count, &[&MANY]).await?.get(0))
}

/// Enqueues jobs with these numbers.
async fn fill(
    scratch: &Scratch,
    jobs: Range<u32>,
    shape: impl Fn(NewJob, u32) -> NewJob + Copy + Send + 'static,
) -> Result<()> {
    let mut tasks = JoinSet::new();
    for filler in 0..FILLERS {
        let (queue, jobs) = (Posthouse::connect(&scratch.url).await?, jobs.clone());
        tasks.spawn(async move {
            let calls = jobs.clone().step_by(CALL as usize).skip(filler as usize).step_by(FILLERS as usize);
            for first in calls {
                let call = first..jobs.end.min(first.saturating_add(CALL));
                let new =
                    call.map(|n| Ok(shape(NewJob::of(&Noop { n })?, n))).collect::<posthouse::Result<Vec<_>>>()?;
                queue.enqueue_many(&new).await?;
            }
            Ok::<_, posthouse::Error>(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| Error::Stuck(format!("filling the queue: {error}")))??;
    }
    Ok(())
}

/// What the filling left to be done is done now, and not by autovacuum and the checkpointer beside the claims.
async fn settle_down(client: &Client) -> Result<()> {
    vacuum(client).await?;
    // Not everybody may.
    let _ = client.batch_execute("checkpoint").await;
    Ok(())
}

/// The times that so many of 100 did not exceed: 50, 95, 99.
fn of(milliseconds: &[f64]) -> [f64; 3] {
    let samples = percentiles(["p50", "p95", "p99"], milliseconds);
    [0, 1, 2].map(|n| samples[n].value)
}
