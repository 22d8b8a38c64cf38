//! What gates cost, and whether they hold: the same slots with and without one, how full a gate keeps them across processes, and
//! tokens per minute against a provider that counts.

use std::sync::Mutex;
use std::time::Duration;

use posthouse::store::{Database, GateLimits};
use posthouse::{Context, NewJob, Posthouse, Worker};
use posthouse_llm::CHAT;
use posthouse_llm::sim::{Limit, Script, Sim};
use serde_json::json;
use tokio_postgres::Client;

use crate::crew::Crew;
use crate::error::{Error, Result};
use crate::figure::Sample;
use crate::ground::{Scratch, connect};
use crate::jobs::{Noop, QUEUE, fill};
use crate::part::{Jobs, MODEL, Work};
use crate::sizes::{GATE, GATED_WORK, PROCESSES, SLOTS, Sizes};
use crate::work::until_done;

/// Time between two looks at how many jobs run.
const LOOK: Duration = Duration::from_millis(20);
/// Tokens of a prompt and its answer.
const TOKENS: u32 = 400;
/// Jobs at once of each process that asks the provider.
const ASKING_SLOTS: u32 = 2;

/// The same number of jobs at once, by a worker that has so many slots and by a gate before one that has many.
pub(crate) async fn measure(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let mut samples = Vec::new();
    for (name, jobs, work) in [("no-op", sizes.gated_noop, Duration::ZERO), ("50 ms", sizes.gated, GATED_WORK)] {
        fill(scratch, jobs).await?;
        let slots = work_off(scratch, GATE, jobs, work).await?;
        queue.set_gate(&gate(), &GateLimits { max_running: Some(GATE), ..GateLimits::default() }).await?;
        fill(scratch, jobs).await?;
        let gated = work_off(scratch, SLOTS, jobs, work).await?;
        queue.remove_gate(&gate()).await?;
        samples.push(Sample::rate(format!("{name}: done by {GATE} slots"), jobs, slots));
        samples.push(Sample::rate(format!("{name}: done behind a gate of {GATE}"), jobs, gated));
        samples.push(Sample::new(format!("{name}: gate to slots"), "", slots / gated));
    }
    queue.set_gate(&gate(), &GateLimits { max_running: Some(GATE), ..GateLimits::default() }).await?;
    samples.extend(across_processes(scratch, sizes).await?);
    Ok(samples)
}

/// The gate of the queue where all jobs are.
fn gate() -> String {
    format!("queue:{QUEUE}")
}

async fn work_off(scratch: &Scratch, slots: u32, jobs: u32, work: Duration) -> Result<f64> {
    let worker = Worker::builder(Database::new(&scratch.url)?).concurrency(slots);
    let worker = if work.is_zero() {
        worker.handle(|_: Noop, _: Context| async {})
    } else {
        worker.handle(move |_: Noop, _: Context| tokio::time::sleep(work))
    };
    until_done(worker, jobs).await
}

/// How many jobs run at once behind the gate, on several processes that all have more slots than may run.
async fn across_processes(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let jobs = sizes.gated_long;
    fill(scratch, jobs).await?;
    let client = connect(&scratch.url).await?;
    let work = Work { database_url: scratch.url.clone(), slots: GATE, jobs: Jobs::Wait(sizes.gated_long_time) };
    let crew = Crew::workers(PROCESSES, work).await?;
    let seen = Mutex::new(Vec::new());
    let worked = tokio::select! {
        worked = crew.work_off(jobs) => worked?,
        error = look(&client, jobs, &seen) => return Err(error),
    };
    let seen = seen.into_inner().unwrap_or_default();
    if seen.is_empty() {
        return Err(Error::Stuck("gated: the jobs ended before anybody looked at how many run".to_owned()));
    }
    let (most, sum) = seen.iter().fold((0, 0), |(most, sum), running| (i64::max(most, *running), sum + running));
    let mean = sum as f64 / seen.len() as f64;
    Ok(vec![
        Sample::new(format!("{PROCESSES} processes: most at once, of {GATE}"), "", most as f64),
        Sample::new(format!("{PROCESSES} processes: at once on average, of {GATE}"), "", mean),
        Sample::rate(format!("{PROCESSES} processes: done"), jobs, worked.seconds),
    ])
}

/// Notes how many jobs run, from when the gate was full first until fewer are left than may run.
async fn look(client: &Client, jobs: u32, seen: &Mutex<Vec<i64>>) -> Error {
    let sql = "select count(*) filter (where state = 'running'), count(*) from posthouse.job";
    let mut full = false;
    loop {
        match client.query_one(sql, &[]).await {
            Ok(row) => {
                let (running, left): (i64, i64) = (row.get(0), row.get(1));
                full |= running >= i64::from(GATE) || left < i64::from(jobs) - i64::from(GATE);
                if full && left > 2 * i64::from(GATE) {
                    seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(running);
                }
            }
            Err(error) => return error.into(),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Tokens per minute, with more to do than that: what a provider that lets everything through counts.
pub(crate) async fn rates(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let (limit, jobs) = (sizes.tokens_per_minute, sizes.rated);
    let queue = Posthouse::connect(&scratch.url).await?;
    let limits = GateLimits { tokens_per_minute: Some(limit.into()), ..GateLimits::default() };
    queue.set_gate(&format!("model:{MODEL}"), &limits).await?;
    let ask = |n: u32| {
        let prompt = NewJob::new(CHAT, &json!({ "messages": [{ "role": "user", "content": format!("Letter {n}") }] }));
        Ok(prompt?.gate(format!("model:{MODEL}")).tokens(TOKENS))
    };
    let list: Vec<_> = (0..jobs).map(ask).collect::<posthouse::Result<_>>()?;
    queue.enqueue_many(&list).await?;
    let counting = Script {
        input_tokens: Some(u64::from(TOKENS) / 4),
        output_tokens: Some(u64::from(TOKENS) * 3 / 4),
        limit: Some(Limit {
            tokens_per_minute: Some(limit.into()),
            enforce: false,
            headers: false,
            ..Limit::default()
        }),
        ..Script::default()
    };
    let sim = Sim::start(counting).await.map_err(|error| Error::Stuck(format!("the simulated provider: {error}")))?;
    let work = Work {
        database_url: scratch.url.clone(),
        slots: ASKING_SLOTS,
        jobs: Jobs::Ask { base_url: sim.base_url(), warm_up: false },
    };
    let worked = Crew::workers(PROCESSES, work).await?.work_off(jobs).await?;
    let stats = sim.stats();
    sim.shutdown().await;
    let counted = stats.rates.ok_or_else(|| Error::Stuck("the simulated provider has counted nothing".to_owned()))?;
    // The first request is sent at once, and the time of the last one is not waited for.
    let minutes = worked.seconds / 60.0;
    let average = f64::from(jobs.saturating_sub(1) * TOKENS) / minutes;
    Ok(vec![
        Sample::new("tokens in the worst minute", "", counted.worst_minute_tokens as f64),
        Sample::new(
            "tokens in the worst minute, above the limit",
            "",
            counted.worst_minute_tokens as f64 - f64::from(limit),
        ),
        Sample::new("tokens of the largest request", "", counted.largest_tokens as f64),
        Sample::new("tokens a minute on average, to the limit", "", average / f64::from(limit)),
    ])
}
