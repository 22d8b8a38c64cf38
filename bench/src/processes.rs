//! Several workers, a process each: whether more of them do more.

use crate::crew::Crew;
use crate::error::Result;
use crate::figure::Sample;
use crate::floor::CLAIM_SETTLE;
use crate::ground::Scratch;
use crate::jobs::fill;
use crate::options::Scenario;
use crate::part::{Jobs, Work};
use crate::sizes::{PROCESSES, SLOTS, Sizes, WAIT, WAIT_SLOTS};

/// Worker processes of the runs of `scaling`, each compared with the first.
const WORKERS: [u32; 4] = [1, 2, 4, 10];

pub(crate) async fn drain_multi(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    fill(scratch, sizes.drain).await?;
    let work = Work { database_url: scratch.url.clone(), slots: SLOTS, jobs: Jobs::Nothing };
    let worked = Crew::workers(PROCESSES, work).await?.work_off(sizes.drain).await?;
    let done = Sample::rate("done", sizes.drain, worked.seconds);
    Ok(vec![done.against(CLAIM_SETTLE).beside(Scenario::Drain, "done")])
}

pub(crate) async fn scaling(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    let mut rates = Vec::new();
    for workers in WORKERS {
        let jobs = workers * sizes.scaling;
        fill(scratch, jobs).await?;
        let work = Work { database_url: scratch.url.clone(), slots: WAIT_SLOTS, jobs: Jobs::Wait(WAIT) };
        let worked = Crew::workers(workers, work).await?.work_off(jobs).await?;
        rates.push((workers, f64::from(jobs) / worked.seconds));
    }
    let one = rates[0].1;
    let done = rates.iter().map(|(workers, rate)| Sample::new(format!("done, {}", text(*workers)), "1/s", *rate));
    let linear = rates.iter().skip(1).map(|(workers, rate)| {
        Sample::new(format!("of linear, {}", text(*workers)), "", rate / (f64::from(*workers) * one))
    });
    Ok(done.chain(linear).collect())
}

fn text(workers: u32) -> String {
    if workers == 1 { "1 worker".to_owned() } else { format!("{workers} workers") }
}
