//! The jobs that are measured with, and filling a queue with them.

use std::time::Instant;

use posthouse::{Job, NewJob, Posthouse};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::ground::Scratch;

/// Where jobs go that name no queue.
pub(crate) const QUEUE: &str = "default";

/// A job with a small payload.
#[derive(Serialize, Deserialize)]
pub(crate) struct Noop {
    pub(crate) n: u32,
}

impl Job for Noop {
    const KIND: &'static str = "noop";
}

/// Enqueues so many jobs in bulk. Answers with the seconds that took, from the jobs' values to the last commit.
pub(crate) async fn fill(scratch: &Scratch, jobs: u32) -> Result<f64> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let start = Instant::now();
    let jobs = (0..jobs).map(|n| NewJob::of(&Noop { n })).collect::<posthouse::Result<Vec<_>>>()?;
    queue.enqueue_many(&jobs).await?;
    Ok(start.elapsed().as_secs_f64())
}
