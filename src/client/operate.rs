//! Do something to many jobs at once, and look at dead letters.

use super::Posthouse;
use crate::error::Result;
use crate::store::{Action, Batch, DeadLetter, Redrive, Selection};

/// Jobs in one transaction: a few at a time hold up nobody.
const BATCH: u32 = 500;

impl Posthouse {
    /// How many jobs a selection names now.
    pub async fn count_jobs(&self, selection: &Selection) -> Result<u64> {
        let mut count = 0;
        let mut next = None;
        loop {
            let (ids, then) = self.store.find_jobs(selection, 10_000, next).await?;
            count += ids.len() as u64;
            next = then;
            if next.is_none() {
                return Ok(count);
            }
        }
    }

    /// Do something to all jobs that a selection names, in batches of 500 a transaction. If this ends early, what was done stays
    /// done, and the same call does the rest. [`Batch::busy`] counts jobs that somebody else was at: they are left as they are.
    ///
    /// ```no_run
    /// # async fn f(queue: posthouse::Posthouse) -> posthouse::Result<()> {
    /// use posthouse::store::{Action, Selection};
    /// let stale = Selection { queue: Some("mail".into()), created_before: Some("yesterday".into()), ..Selection::default() };
    /// println!("{} cancelled", queue.change_jobs(&stale, &Action::Cancel).await?.changed);
    /// # Ok(()) }
    /// ```
    pub async fn change_jobs(&self, selection: &Selection, action: &Action) -> Result<Batch> {
        let mut sum = Batch::default();
        loop {
            let batch = self.store.change_jobs(selection, action, BATCH, sum.next.take()).await?;
            sum.changed += batch.changed;
            sum.busy += batch.busy;
            sum.refused.extend(batch.refused);
            sum.next = batch.next;
            if sum.next.is_none() {
                return Ok(sum);
            }
        }
    }

    /// Do something to the next jobs that a selection names, at most `max_jobs` (10,000 at the most), in one transaction.
    pub async fn change_some(
        &self,
        selection: &Selection,
        action: &Action,
        max_jobs: u32,
        after: Option<serde_json::Value>,
    ) -> Result<Batch> {
        self.store.change_jobs(selection, action, max_jobs, after).await
    }

    /// Put all dead letters that a selection names back into line as they are, those that failed first before the others. Answers how
    /// many.
    pub async fn redrive(&self, selection: &Selection) -> Result<i64> {
        let action = Action::Redrive { changes: None, rate: None, asked_by: None };
        Ok(self.change_jobs(selection, &action).await?.changed)
    }

    /// Remove all dead letters that a selection names, and their payloads, for good. Answers how many.
    pub async fn purge(&self, selection: &Selection) -> Result<i64> {
        Ok(self.change_jobs(selection, &Action::Purge).await?.changed)
    }

    /// Dead letters, newest failures first, at most `limit`, without their payloads. The next page begins behind `before`: `failed_at` and
    /// `id` of the last one of this page.
    pub async fn dead_letters(
        &self,
        selection: &Selection,
        limit: u32,
        before: Option<(String, i64)>,
    ) -> Result<Vec<DeadLetter>> {
        self.store.dead_letters(selection, limit, before).await
    }

    /// When and why a job was put back into line after it had ended, oldest first.
    pub async fn redrives(&self, id: i64) -> Result<Vec<Redrive>> {
        self.store.redrives(id).await
    }
}
