//! Schedules through the handle to a queue: set them, look at them, let them rest.

use super::Posthouse;
use crate::error::Result;
use crate::store::{Schedule, ScheduleChange, ScheduleRecord, ScheduleRun};

impl Posthouse {
    /// Set a schedule: make it, or change it. What is set already may be set again at any time, as at each start of a program: nothing
    /// changes then, the next tick either. Any worker's sweep fires it, also one that does not know the kind.
    ///
    /// ```no_run
    /// # async fn f(queue: &posthouse::Posthouse) -> posthouse::Result<()> {
    /// use posthouse::{NewJob, store::Schedule};
    /// let report = NewJob::from_json("report", r#"{"of": "yesterday"}"#)?.tenant("acme");
    /// queue.set_schedule(&Schedule::new("nightly-report", "30 2 * * *", report).timezone("Europe/Rome")).await?;
    /// # Ok(()) }
    /// ```
    pub async fn set_schedule(&self, schedule: &Schedule) -> Result<ScheduleChange> {
        self.store.set_schedule(schedule).await
    }

    /// Every schedule, by name, without the payloads of its jobs.
    pub async fn schedules(&self) -> Result<Vec<ScheduleRecord>> {
        self.store.schedules().await
    }

    /// One schedule, whole. `None`: there is none of this name.
    pub async fn schedule(&self, name: &str) -> Result<Option<ScheduleRecord>> {
        self.store.schedule(name).await
    }

    /// The ticks that were fired of a schedule, the newest first, at most `limit`, with their jobs.
    pub async fn schedule_runs(&self, name: &str, limit: u32) -> Result<Vec<ScheduleRun>> {
        self.store.schedule_runs(name, limit).await
    }

    /// Let a schedule rest, and say why. Ticks in that time are no missed ones. `false`: it rested already.
    pub async fn pause_schedule(&self, name: &str, reason: Option<&str>) -> Result<bool> {
        self.store.pause_schedule(name, reason).await
    }

    /// Let a schedule go on, from its next tick. `false`: it did not rest.
    pub async fn resume_schedule(&self, name: &str) -> Result<bool> {
        self.store.resume_schedule(name).await
    }

    /// Remove a schedule; its jobs stay. `false`: there is none of this name.
    pub async fn remove_schedule(&self, name: &str) -> Result<bool> {
        self.store.remove_schedule(name).await
    }
}
