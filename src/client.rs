//! The handle to a queue: enqueue jobs, look at them, manage them.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join;
use serde_json::value::RawValue;
use tokio_postgres::GenericClient;

use crate::error::{Error, Result};
use crate::job::{DedupeFor, DedupePolicy, Enqueued, Job, NewJob};
use crate::store::{
    self, Database, EnqueueCall, JobFilter, JobRecord, QueueHealth, QueueSettings, Reason, Store, WorkerRecord,
};
use crate::trace::{self, Parent, Span};

mod alert;
mod gate;
mod gather;
mod operate;
mod schedule;
mod usage;

use gather::Gatherer;

/// A queue in a Postgres database. Cheap to clone. Uses one connection for enqueueing, a second one where
/// many enqueue at once, one for everything else, and up to four for enqueues with a dedupe key, each made when it is first needed. Enqueues that
/// do not wait for each other's answers have no order among them.
///
/// ```no_run
/// # async fn f() -> posthouse::Result<()> {
/// # #[derive(serde::Serialize, serde::Deserialize)] struct Summarize { text: String }
/// # impl posthouse::Job for Summarize { const KIND: &'static str = "summarize"; }
/// let queue = posthouse::Posthouse::connect("postgres://localhost/app").await?;
/// let job = queue.enqueue(Summarize { text: "…".into() }).tenant("acme").dedupe_key("hook-17").await?;
/// println!("job {} (duplicate: {})", job.id, job.duplicate);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Posthouse {
    database: Database,
    store: Store,
    gatherer: Arc<Gatherer>,
}

/// The jobs of one commit of many.
enum Part<'a> {
    /// Some have dedupe keys.
    Keyed(&'a [NewJob]),
    Call(EnqueueCall),
}

impl<'a> Part<'a> {
    fn new(jobs: &'a [NewJob]) -> Result<Self> {
        match jobs.iter().any(|job| job.dedupe.is_some()) {
            true => Ok(Self::Keyed(jobs)),
            false => Ok(Self::Call(EnqueueCall::new(jobs)?)),
        }
    }
}

impl Posthouse {
    /// Connect, and check that the schema is there and fits this library ([`migrate`](Self::migrate) makes it).
    pub async fn connect(url: &str) -> Result<Self> {
        let database = Database::new(url)?;
        store::schema_status(&database).await?.check()?;
        Ok(Self::new(database))
    }

    /// The handle to a database, without connecting.
    pub fn new(database: Database) -> Self {
        let store = database.store("client");
        let gatherer = Arc::new(Gatherer::new(&database));
        Self { database, store, gatherer }
    }

    /// Bring the schema up to date. Safe to run from several processes at once.
    pub async fn migrate(url: &str) -> Result<()> {
        store::migrate(&Database::new(url)?).await.map(|_| ())
    }

    /// The database it works on.
    pub fn database(&self) -> &Database {
        &self.database
    }

    /// Enqueue a job of a typed kind: set what it needs, then `.await` it, or hand it a transaction.
    pub fn enqueue<J: Job>(&self, job: J) -> Enqueue<'_> {
        Enqueue { queue: self, job: NewJob::of(&job) }
    }

    /// Enqueue a job put together by hand.
    pub fn enqueue_job(&self, job: NewJob) -> Enqueue<'_> {
        Enqueue { queue: self, job: Ok(job) }
    }

    /// Enqueue many jobs, up to 10,000 a commit. If one of a commit is refused, so are the others of it; the error names the
    /// job. Answers in the order of the jobs.
    pub async fn enqueue_many(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        if Span::are_on() {
            let (jobs, span) = trace::sending_many(jobs.to_vec(), Parent::Current);
            return trace::sent(self.send_many(&jobs).await, &span);
        }
        self.send_many(jobs).await
    }

    async fn send_many(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let mut answers = Vec::with_capacity(jobs.len());
        let mut parts = jobs.chunks(store::MANY_MAX);
        let mut next = parts.next().map(Part::new).transpose()?;
        while let Some(part) = next {
            // The next one is put together meanwhile, and sent when this one is in.
            let (answer, following) = join(self.send(part), async { parts.next().map(Part::new).transpose() }).await;
            answers.extend(answer?);
            next = following?;
        }
        Ok(answers)
    }

    async fn send(&self, part: Part<'_>) -> Result<Vec<Enqueued>> {
        match part {
            Part::Keyed(jobs) => self.gatherer.enqueue_keyed(jobs).await,
            Part::Call(call) => self.store.enqueue_call(call).await,
        }
    }

    /// One job, whole. `None`: there is no such job.
    pub async fn job(&self, id: i64) -> Result<Option<JobRecord>> {
        self.store.job(id).await
    }

    /// Jobs, newest first, at most `limit`, without their payloads and results.
    pub async fn jobs(&self, filter: &JobFilter, limit: u32) -> Result<Vec<JobRecord>> {
        self.store.jobs(filter, limit).await
    }

    /// Wait until a job is final; look every `every`. An error if there is no such job.
    pub async fn wait(&self, id: i64, every: Duration) -> Result<JobRecord> {
        loop {
            match self.store.states(&[id]).await?.first().map(|s| s.1.as_str()) {
                None => return Err(Error::invalid(format!("job {id}: there is no such job"))),
                Some("done" | "failed" | "cancelled") => {
                    // Final, unless somebody retried it just now.
                    if let Some(job) = self.store.job(id).await?.filter(JobRecord::is_final) {
                        return Ok(job);
                    }
                }
                Some(_) => {}
            }
            tokio::time::sleep(every).await;
        }
    }

    /// The states of these jobs; an id that does not exist is left out.
    pub async fn states(&self, ids: &[i64]) -> Result<Vec<(i64, String)>> {
        self.store.states(ids).await
    }

    /// Every queue and tenant with jobs, now or ever.
    pub async fn health(&self) -> Result<Vec<QueueHealth>> {
        self.store.queue_health().await
    }

    /// The workers of the last day, live ones first.
    pub async fn workers(&self) -> Result<Vec<WorkerRecord>> {
        self.store.workers().await
    }

    /// Set for how long a queue keeps done jobs, and cancelled ones that have no time of their own: `None`, as it comes, for ever.
    /// Zero keeps no history: results can be had for ten minutes, then nothing is left of the jobs, payloads included. It counts
    /// for the history that is there already, too. Failed jobs are kept all the same.
    pub async fn set_retention(&self, queue: &str, retention: Option<Duration>) -> Result<()> {
        let retention = retention.map_or(store::Retention::Forever, store::Retention::For);
        self.store.set_retention(queue, store::Ended::Done, retention).await
    }

    /// Let the jobs of a queue that share a field of their payload (and the tenant) run one at a time, in the order in which they
    /// came due, across retries and rescue: the next one begins when the one before is done, failed or cancelled. It counts for
    /// jobs that are enqueued from now on; those without the field run as they come. `None`: all of them do.
    pub async fn set_serial_by(&self, queue: &str, field: Option<&str>) -> Result<()> {
        self.store.set_serial_by(queue, field).await
    }

    /// Set by what a queue is fair between its tenants: `jobs`, as it comes, or `tokens`: then a tenant whose jobs use twice as
    /// many gets half as many of them done.
    pub async fn set_fair_by(&self, queue: &str, fair_by: &str) -> Result<()> {
        self.store.set_fair_by(queue, fair_by).await
    }

    /// Every queue that has had jobs or settings, with its settings.
    pub async fn queues(&self) -> Result<Vec<QueueSettings>> {
        self.store.queues().await
    }

    /// Cancel a job. Answers with its state now: `cancelled`, `running` (its worker has been told), or the final state it had
    /// reached before.
    pub async fn cancel(&self, id: i64) -> Result<String> {
        self.store.cancel(id).await
    }

    /// Run a job again, or sooner: one that waits for its time, one that failed, one that was cancelled.
    pub async fn retry(&self, id: i64) -> Result<String> {
        self.store.retry(id).await
    }

    /// Why a job is where it is, and what would move it.
    pub async fn explain(&self, id: i64) -> Result<Vec<Reason>> {
        self.store.explain(id).await
    }
}

impl From<&Posthouse> for Database {
    fn from(queue: &Posthouse) -> Self {
        queue.database.clone()
    }
}

impl From<Posthouse> for Database {
    fn from(queue: Posthouse) -> Self {
        queue.database
    }
}

/// A job on its way into the queue: `.await` it, or call [`in_transaction`](Self::in_transaction).
#[must_use = "nothing is enqueued until this is awaited"]
pub struct Enqueue<'a> {
    queue: &'a Posthouse,
    job: Result<NewJob>,
}

impl<'a> Enqueue<'a> {
    fn with(mut self, change: impl FnOnce(NewJob) -> NewJob) -> Self {
        self.job = self.job.map(change);
        self
    }

    /// The queue. Default: `default`.
    pub fn queue(self, queue: impl Into<String>) -> Self {
        self.with(|j| j.queue(queue))
    }

    /// Whose job it is. Default: `default`.
    pub fn tenant(self, tenant: impl Into<String>) -> Self {
        self.with(|j| j.tenant(tenant))
    }

    /// Smaller runs first. Default: 0.
    pub fn priority(self, priority: i32) -> Self {
        self.with(|j| j.priority(priority))
    }

    /// Due this long from now. Default: at once.
    pub fn delay(self, delay: Duration) -> Self {
        self.with(|j| j.delay(delay))
    }

    /// Due at this time. A time in the past means at once.
    pub fn run_at(self, run_at: SystemTime) -> Self {
        self.with(|j| j.run_at(run_at))
    }

    /// Attempts before the job becomes a dead letter. Default: 5.
    pub fn max_attempts(self, max_attempts: u32) -> Self {
        self.with(|j| j.max_attempts(max_attempts))
    }

    /// Longest time one attempt may take. Default: no limit.
    pub fn timeout(self, timeout: Duration) -> Self {
        self.with(|j| j.timeout(timeout))
    }

    /// While a job of this tenant and kind holds this key, enqueueing again answers with that job.
    pub fn dedupe_key(self, key: impl Into<String>) -> Self {
        self.with(|j| j.dedupe_key(key))
    }

    /// The dedupe key is a hash of the payload: jobs of this tenant and kind with equal JSON are the same job.
    pub fn dedupe_by_payload(self) -> Self {
        self.with(NewJob::dedupe_by_payload)
    }

    /// What becomes of it if the dedupe key is held. Default: the job that holds it stands for it.
    pub fn dedupe_policy(self, policy: DedupePolicy) -> Self {
        self.with(|j| j.dedupe_policy(policy))
    }

    /// How long the dedupe key stands. Default: until the job is final.
    pub fn dedupe_for(self, stands: DedupeFor) -> Self {
        self.with(|j| j.dedupe_for(stands))
    }

    /// A gate that the job passes besides those of its queue, tenant and kind: `model:NAME`, or a name without a colon. Can be
    /// given several times, up to 16.
    pub fn gate(self, gate: impl Into<String>) -> Self {
        self.with(|j| j.gate(gate))
    }

    /// How many tokens it is expected to use, prompt and answer together. Default: estimated, where a gate counts them.
    pub fn tokens(self, tokens: u32) -> Self {
        self.with(|j| j.tokens(tokens))
    }

    /// The W3C trace context that it goes on with, as JSON. Default: that of this enqueue, where [traces](crate::trace) are on.
    pub fn trace(self, trace: Box<RawValue>) -> Self {
        self.with(|j| j.trace(trace))
    }

    /// Enqueue in a transaction of yours (`tokio_postgres::Transaction`, or a pool's): the job exists when, and only if,
    /// that commits. With any other driver, call `select * from posthouse.enqueue(…)` in the transaction.
    pub async fn in_transaction<C: GenericClient + Sync>(self, transaction: &C) -> Result<Enqueued> {
        let job = self.job?;
        let span = trace::sending(job.queue.as_deref(), 1, Parent::Current);
        trace::sent(store::enqueue_in(transaction, &trace::carry(job, &span)).await, &span)
    }
}

impl<'a> IntoFuture for Enqueue<'a> {
    type Output = Result<Enqueued>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let job = self.job?;
            let span = trace::sending(job.queue.as_deref(), 1, Parent::Current);
            trace::sent(self.queue.gatherer.enqueue(trace::carry(job, &span)).await, &span)
        })
    }
}
