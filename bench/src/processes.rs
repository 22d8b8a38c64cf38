//! Workers in processes of their own: several at a drain.

use crate::crew::Crew;
use crate::error::Result;
use crate::figure::Sample;
use crate::floor::CLAIM_SETTLE;
use crate::ground::Scratch;
use crate::jobs::fill;
use crate::options::{PROCESSES, SLOTS, Scenario, Sizes};
use crate::part::{Jobs, Work};

pub(crate) async fn drain_multi(scratch: &Scratch, sizes: &Sizes) -> Result<Vec<Sample>> {
    fill(scratch, sizes.drain).await?;
    let work = Work { database_url: scratch.url.clone(), slots: SLOTS, jobs: Jobs::Nothing };
    let worked = Crew::workers(PROCESSES, work).await?.work_off(sizes.drain).await?;
    let done = Sample::rate("done", sizes.drain, worked.seconds);
    Ok(vec![done.against(CLAIM_SETTLE).beside(Scenario::Drain, "done")])
}
