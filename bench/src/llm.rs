//! Calls of a model in flight: one worker process against the simulated provider, which is another one.

use std::iter::zip;

use posthouse::{NewJob, Posthouse};
use posthouse_llm::CHAT;
use serde_json::json;

use crate::crew::Crew;
use crate::error::{Error, Result};
use crate::figure::Sample;
use crate::ground::Scratch;
use crate::part::{Jobs, Task, Work};
use crate::sizes::Sizes;

pub(crate) async fn measure(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let (calls, time) = (sizes.llm, sizes.llm_time);
    enqueue(scratch, calls).await?;
    let provider = Crew::start(&[Task::Sim { latency: time }]).await?;
    let base_url = provider.ready.iter().find_map(|ready| ready.base_url.clone());
    let base_url =
        base_url.ok_or_else(|| Error::Stuck("the simulated provider does not say where it is".to_owned()))?;
    let work = Work { database_url: scratch.url.clone(), slots: calls, jobs: Jobs::Ask { base_url, warm_up: true } };
    let worker = Crew::workers(1, work).await?;
    let before: Vec<_> = worker.ready.iter().map(|ready| ready.resident_kib).collect();
    let worked = worker.work_off(calls).await?;
    let mut samples = vec![
        Sample::new("time", "s", worked.seconds),
        Sample::new("time over the calls' own", "", worked.seconds / time.as_secs_f64()),
    ];
    for (before, worker) in zip(before, worked.workers) {
        let grown = before.zip(worker.peak_kib).map(|(before, peak)| (peak - before) / f64::from(calls));
        samples.extend(grown.map(|kib| Sample::new("memory a call", "KiB", kib)));
    }
    Ok(samples)
}

/// Each with a text of its own, of some hundred bytes.
async fn enqueue(scratch: &Scratch, calls: u32) -> Result<()> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let prompt = |n: u32| {
        let text = format!("Summarize letter {n}. {}", "A tired horse was changed for a fresh one. ".repeat(10));
        NewJob::new(CHAT, &json!({ "messages": [{ "role": "user", "content": text }] }))
    };
    let jobs = (0..calls).map(prompt).collect::<posthouse::Result<Vec<_>>>()?;
    queue.enqueue_many(&jobs).await?;
    Ok(())
}
