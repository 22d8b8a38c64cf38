//! Group commit of enqueues: while one is on its way to the database, those that come meanwhile gather and share the next
//! commit. A lone enqueue waits for nobody. A batch belongs to a task of its own: dropping the future of an enqueue takes
//! nothing away from the others of its batch.

use std::sync::OnceLock;

use tokio::sync::{Semaphore, mpsc, oneshot};

use crate::error::{Error, Result};
use crate::job::{Enqueued, NewJob};
use crate::store::{Database, Store};

/// Jobs in one commit. More would make the first ones wait without saving much.
const BATCH_JOBS: usize = 500;
/// Bytes of payload in one commit.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// Enqueues that wait for their turn; more make the callers wait.
const WAITING: usize = 10_000;
/// Connections for enqueues with a dedupe key. Such an enqueue waits while another transaction holds its key, and would make
/// everything behind it on its connection wait too.
const KEYED_CONNECTIONS: usize = 4;

struct Request {
    job: NewJob,
    answer: oneshot::Sender<Result<Enqueued>>,
}

/// Gathers enqueues into batches.
pub(super) struct Gatherer {
    store: Store,
    requests: OnceLock<mpsc::Sender<Request>>,
    keyed: Vec<Store>,
    keyed_turn: Semaphore,
    keyed_free: std::sync::Mutex<Vec<usize>>,
}

impl Gatherer {
    pub(super) fn new(database: &Database) -> Self {
        Self {
            store: database.store("enqueue"),
            requests: OnceLock::new(),
            keyed: (0..KEYED_CONNECTIONS).map(|_| database.store("enqueue-keyed")).collect(),
            keyed_turn: Semaphore::new(KEYED_CONNECTIONS),
            keyed_free: std::sync::Mutex::new((0..KEYED_CONNECTIONS).collect()),
        }
    }

    /// Enqueue a job; the answer comes after its commit.
    pub(super) async fn enqueue(&self, job: NewJob) -> Result<Enqueued> {
        if job.dedupe.is_some() {
            return self.enqueue_keyed(job).await;
        }
        let requests = self.requests.get_or_init(|| {
            let (sender, receiver) = mpsc::channel(WAITING);
            tokio::spawn(gather(self.store.clone(), receiver));
            sender
        });
        let (answer, answered) = oneshot::channel();
        let gone = || Error::disconnected("the runtime that this queue was first used on has ended", false);
        requests.send(Request { job, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    async fn enqueue_keyed(&self, job: NewJob) -> Result<Enqueued> {
        let _turn = self.keyed_turn.acquire().await.map_err(|_| Error::disconnected("closed", false))?;
        let slot = Slot::take(&self.keyed_free)?;
        self.keyed[slot.index].enqueue(&job).await
    }
}

/// A keyed connection in use; given back when dropped.
struct Slot<'a> {
    free: &'a std::sync::Mutex<Vec<usize>>,
    index: usize,
}

impl<'a> Slot<'a> {
    fn take(free: &'a std::sync::Mutex<Vec<usize>>) -> Result<Self> {
        let index = free.lock().ok().and_then(|mut f| f.pop());
        index.map(|index| Self { free, index }).ok_or_else(|| Error::disconnected("no connection is free", false))
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if let Ok(mut free) = self.free.lock() {
            free.push(self.index);
        }
    }
}

async fn gather(store: Store, mut requests: mpsc::Receiver<Request>) {
    let mut left_over: Option<Request> = None;
    loop {
        let first = match left_over.take() {
            Some(request) => request,
            None => match requests.recv().await {
                Some(request) => request,
                None => return,
            },
        };
        let mut bytes = first.job.payload.get().len();
        let mut batch = vec![first];
        while batch.len() < BATCH_JOBS {
            let Ok(next) = requests.try_recv() else { break };
            bytes += next.job.payload.get().len();
            if bytes > BATCH_BYTES {
                left_over = Some(next);
                break;
            }
            batch.push(next);
        }
        commit(&store, batch).await;
    }
}

/// Commit a batch; if one job is refused, try each by itself, so that it spoils nothing for the others.
async fn commit(store: &Store, batch: Vec<Request>) {
    if batch.len() > 1 {
        let (jobs, answers): (Vec<_>, Vec<_>) = batch.into_iter().map(|r| (r.job, r.answer)).unzip();
        match store.enqueue_many(&jobs).await {
            Ok(enqueued) => {
                for (answer, enqueued) in answers.into_iter().zip(enqueued) {
                    let _ = answer.send(Ok(enqueued));
                }
            }
            Err(error) if error.is_invalid() => {
                for (job, answer) in jobs.iter().zip(answers) {
                    let _ = answer.send(store.enqueue(job).await);
                }
            }
            Err(error) => {
                for answer in answers {
                    let _ = answer.send(Err(error.again()));
                }
            }
        }
        return;
    }
    for Request { job, answer } in batch {
        let _ = answer.send(store.enqueue(&job).await);
    }
}
