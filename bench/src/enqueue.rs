//! How fast jobs come in: one by one, from many tasks at once, in bulk.

use std::time::Instant;

use posthouse::Posthouse;
use tokio::task::JoinSet;

use crate::error::{Error, Result};
use crate::figure::Sample;
use crate::floor::{COMMITS_1, COMMITS_16, COPY, COPY_TABLES};
use crate::ground::Scratch;
use crate::jobs::{Noop, fill};
use crate::options::Scenario;
use crate::sizes::{Sizes, TASKS};

const NAME: &str = "enqueued";

pub(crate) async fn single(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let queue = Posthouse::connect(&scratch.url).await?;
    // Makes the connection.
    queue.enqueue(Noop { n: 0 }).await?;
    let jobs = sizes.single;
    let start = Instant::now();
    // In a task, as the code of a service runs (and the commits of the floor): the first thread would hand over to another one
    // at each await.
    let enqueueing = tokio::spawn(async move {
        for n in 1..=jobs {
            queue.enqueue(Noop { n }).await?;
        }
        Ok::<_, posthouse::Error>(())
    });
    enqueueing.await.map_err(|error| Error::Stuck(format!("enqueue-single: {error}")))??;
    Ok(vec![Sample::rate(NAME, sizes.single, start.elapsed().as_secs_f64()).against(COMMITS_1)])
}

pub(crate) async fn concurrent(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let queue = Posthouse::connect(&scratch.url).await?;
    queue.enqueue(Noop { n: 0 }).await?;
    let each = sizes.concurrent / TASKS;
    let mut tasks = JoinSet::new();
    let start = Instant::now();
    for task in 0..TASKS {
        let queue = queue.clone();
        tasks.spawn(async move {
            for n in 0..each {
                queue.enqueue(Noop { n: task * each + n }).await?;
            }
            Ok::<_, posthouse::Error>(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.map_err(|error| Error::Stuck(format!("enqueue-concurrent: {error}")))??;
    }
    Ok(vec![Sample::rate(NAME, each * TASKS, start.elapsed().as_secs_f64()).against(COMMITS_16)])
}

pub(crate) async fn bulk(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let seconds = fill(scratch, sizes.bulk).await?;
    let enqueued = Sample::rate(NAME, sizes.bulk, seconds);
    Ok(vec![enqueued.against(COPY).beside(Scenario::Floor, COPY_TABLES)])
}
