//! Many jobs that wait, all at once in one worker process: how long that takes, and the memory and connections it needs.

use std::convert::Infallible;
use std::time::Duration;

use tokio_postgres::{Client, Statement};

use crate::crew::Crew;
use crate::error::{Error, Result};
use crate::figure::Sample;
use crate::ground::{Scratch, connect};
use crate::jobs::fill;
use crate::part::{Jobs, Work};

/// How often connections are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// So many jobs that take so long each.
pub(crate) async fn measure(scratch: &Scratch, jobs: u32, time: Duration) -> Result<Vec<Sample>> {
    fill(scratch, jobs).await?;
    let work = Work { database_url: scratch.url.clone(), slots: jobs, jobs: Jobs::Wait(time) };
    let worker = Crew::workers(1, work).await?;
    let connections = Connections::of(scratch).await?;
    connections.none().await?;
    let mut most = 0;
    let worked = tokio::select! {
        worked = worker.work_off(jobs) => worked?,
        error = connections.watch(&mut most) => return Err(error),
    };
    let mut samples = vec![
        Sample::new("time", "s", worked.seconds),
        Sample::new("time over the jobs' own", "", worked.seconds / time.as_secs_f64()),
        Sample::new("connections", "", f64::from(most)),
    ];
    let peak_kib = worked.workers.iter().filter_map(|worker| worker.peak_kib);
    samples.extend(peak_kib.map(|kib| Sample::new("peak memory of the process", "MiB", kib / 1_024.0)));
    Ok(samples)
}

/// Looks how many connections of the queue there are.
struct Connections {
    client: Client,
    count: Statement,
}

impl Connections {
    async fn of(scratch: &Scratch) -> Result<Self> {
        let client = connect(&scratch.url).await?;
        let count = "select count(*)::int from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() \
                     and application_name like 'posthouse/%'";
        let count = client.prepare(count).await?;
        Ok(Self { client, count })
    }

    async fn now(&self) -> Result<i32> {
        Ok(self.client.query_one(&self.count, &[]).await?.get(0))
    }

    /// Waits until those that enqueued the jobs are closed.
    async fn none(&self) -> Result<()> {
        while self.now().await? > 0 {
            tokio::time::sleep(LOOK / 10).await;
        }
        Ok(())
    }

    /// Keeps the most that there were at a time. Ends only if that fails.
    async fn watch(&self, most: &mut i32) -> Error {
        let Err(error) = self.watch_for_ever(most).await;
        error
    }

    async fn watch_for_ever(&self, most: &mut i32) -> Result<Infallible> {
        loop {
            *most = self.now().await?.max(*most);
            tokio::time::sleep(LOOK).await;
        }
    }
}
