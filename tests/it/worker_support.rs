//! What the tests of the worker share: a database with the schema, workers that run in the background and can be watched,
//! and a log of who ran what and when.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use posthouse::error::Result;
use posthouse::store::{Database, JobRecord, Registration, Store};
use posthouse::testing::{TestCluster, TestDatabase};
use posthouse::worker::{Builder, Event, Summary};
use posthouse::{Context, NewJob, Outcome, Posthouse, Worker};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::harness::{SOON, wait_until};

/// A database with the schema of Posthouse.
pub(crate) async fn database() -> TestDatabase {
    TestDatabase::new(&posthouse::store::schema_sql(), async |url: &str| Posthouse::migrate(url).await).await
}

/// The same on a server of its own.
pub(crate) async fn database_on(cluster: &TestCluster) -> TestDatabase {
    cluster.database(&posthouse::store::schema_sql(), async |url: &str| Posthouse::migrate(url).await).await
}

pub(crate) fn queue_at(url: &str) -> Posthouse {
    Posthouse::new(Database::new(url).unwrap())
}

/// Settings for tests: a worker that polls often. Handlers are to be added.
pub(crate) fn worker_at(url: &str) -> Builder {
    Worker::builder(Database::new(url).unwrap()).poll(Duration::from_millis(200)).grace(Duration::from_secs(5))
}

/// A handler of `k` that notes its run and waits for a permit.
pub(crate) fn waits_for(builder: Builder, log: &Log, gate: &Arc<Semaphore>) -> Builder {
    let (log, gate) = (log.clone(), gate.clone());
    builder.handle_kind("k", move |_, context: Context| {
        let (run, gate) = (log.begin(context.job_id()), gate.clone());
        async move {
            let _run = run;
            gate.acquire().await.unwrap().forget();
            Outcome::done(&"the answer")
        }
    })
}

/// A worker that does nothing but to be registered, for steps set out by hand.
pub(crate) async fn registered(store: &Store, lease: Duration, kinds: &[&str]) -> Uuid {
    let worker = Uuid::new_v4();
    let registration = Registration {
        worker,
        lease,
        queues: vec!["default".to_owned()],
        kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
        slots: 250,
        host: "test".to_owned(),
        pid: 1,
        version: "test".to_owned(),
    };
    store.register_worker(&registration).await.unwrap();
    worker
}

/// So many jobs of a kind, payload `{"n": 0}` and so on. Answers with their ids.
pub(crate) async fn enqueue(queue: &Posthouse, kind: &str, jobs: usize) -> Vec<i64> {
    let new: Vec<NewJob> = (0..jobs).map(|n| NewJob::from_json(kind, format!("{{\"n\":{n}}}")).unwrap()).collect();
    queue.enqueue_many(&new).await.unwrap().iter().map(|job| job.id).collect()
}

/// The job when it has reached this state.
pub(crate) async fn job_in(queue: &Posthouse, id: i64, state: &str) -> JobRecord {
    let deadline = Instant::now() + SOON;
    loop {
        let job = queue.job(id).await.unwrap().expect("the job is there");
        if job.state == state {
            return job;
        }
        assert!(Instant::now() < deadline, "job {id} is {} and not {state}: {job:?}", job.state);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Fails unless the condition holds all the time.
pub(crate) async fn stays(so_long: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let until = Instant::now() + so_long;
    while Instant::now() < until {
        assert!(condition().await, "not all the time: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A worker that runs in the background. Ends with the test.
pub(crate) struct Background {
    stop: CancellationToken,
    task: JoinHandle<Result<Summary>>,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Background {
    pub(crate) fn start(builder: Builder) -> Self {
        let (stop, lines) = (CancellationToken::new(), Arc::new(Mutex::new(Vec::new())));
        let (until, log) = (stop.clone(), lines.clone());
        let builder = builder.on_event(move |event: &Event<'_>| log.lock().unwrap().push(event.to_string()));
        let task = tokio::spawn(async move { builder.run_until(until.cancelled()).await });
        Self { stop, task, lines }
    }

    /// Every event so far, as lines.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    pub(crate) fn said(&self, text: &str) -> bool {
        self.lines().iter().any(|line| line.contains(text))
    }

    /// Waits until an event's line contains the text.
    pub(crate) async fn says(&self, text: &str) {
        let deadline = Instant::now() + SOON;
        while !self.said(text) {
            assert!(Instant::now() < deadline, "no {text:?} in {:#?}", self.lines());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Asks it to end and waits until it has.
    pub(crate) async fn end(self) -> Summary {
        self.stop.cancel();
        self.ended().await
    }

    /// Asks it to end, without waiting.
    pub(crate) fn ask_to_end(&self) {
        self.stop.cancel();
    }

    /// Waits until it has ended by itself.
    pub(crate) async fn ended(mut self) -> Summary {
        let ended = tokio::time::timeout(SOON * 2, &mut self.task).await;
        ended.unwrap_or_else(|_| panic!("the worker does not end; it said {:#?}", self.lines())).unwrap().unwrap()
    }

    /// Drops the future of the worker, as an impatient program would.
    pub(crate) fn drop_it(&self) {
        self.task.abort();
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Who ran which job, from when to when: a run ends when its handler returns or is dropped.
#[derive(Clone, Default)]
pub(crate) struct Log {
    runs: Arc<Mutex<Vec<Run>>>,
}

#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) job: i64,
    pub(crate) from: Instant,
    pub(crate) to: Option<Instant>,
}

/// Ends a run when it is dropped.
pub(crate) struct Open {
    log: Log,
    place: usize,
}

impl Log {
    pub(crate) fn begin(&self, job: i64) -> Open {
        let mut runs = self.runs.lock().unwrap();
        runs.push(Run { job, from: Instant::now(), to: None });
        Open { log: self.clone(), place: runs.len() - 1 }
    }

    pub(crate) fn runs(&self) -> Vec<Run> {
        self.runs.lock().unwrap().clone()
    }

    /// How many runs a job had.
    pub(crate) fn runs_of(&self, job: i64) -> usize {
        self.runs().iter().filter(|run| run.job == job).count()
    }

    /// How many runs have begun and not ended.
    pub(crate) fn open(&self) -> usize {
        self.runs().iter().filter(|run| run.to.is_none()).count()
    }

    /// Fails if two runs of one job overlap.
    pub(crate) fn assert_no_overlap(&self) {
        let mut runs = self.runs();
        runs.sort_by_key(|run| (run.job, run.from));
        for pair in runs.windows(2) {
            let apart = pair[0].job != pair[1].job || pair[0].to.is_some_and(|to| to <= pair[1].from);
            assert!(apart, "two runs of job {} overlap: {pair:?}", pair[0].job);
        }
    }

    pub(crate) async fn wait_for_open(&self, runs: usize) {
        wait_until(SOON, "so many handlers run", async || self.open() == runs).await;
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.log.runs.lock().unwrap()[self.place].to = Some(Instant::now());
    }
}
