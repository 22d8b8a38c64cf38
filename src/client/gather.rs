//! Group commit of enqueues: while one is on its way to the database, those that come meanwhile gather and share the next
//! commit. Where many come, a second batch goes on its way beside the first, on a connection of its own: Postgres works on one while the other
//! becomes durable. A lone enqueue waits for nobody, and passes through no other task. A batch belongs to a task of its own: dropping the
//! future of an enqueue takes nothing away from the others of its batch.

use std::borrow::Borrow;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Mutex, Notify, Semaphore, mpsc, oneshot};

use crate::error::{Error, Result};
use crate::job::{Enqueued, NewJob};
use crate::pause::Pause;
use crate::store::{Database, Store};

/// Jobs in one commit. More would make the first ones wait without saving much.
const BATCH_JOBS: usize = 500;
/// Bytes of payload in one commit.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// So many wait before a batch begins beside another: fewer would rather share the next one than pay for a commit.
const WORTH_A_BATCH: usize = 16;
/// Enqueues that wait for their turn; more make the callers wait.
const WAITING: usize = 10_000;
/// Connections for enqueues with a dedupe key. Such an enqueue waits while another transaction holds its key: a moment on its connection,
/// which everything behind it there would have to wait for, and longer off it, between one try and the next.
const KEYED_CONNECTIONS: usize = 4;
/// How long an enqueue tries to get a key that another transaction holds.
const KEY_PATIENCE: Duration = Duration::from_secs(30);

struct Request {
    job: NewJob,
    answer: oneshot::Sender<Result<Enqueued>>,
}

impl Borrow<NewJob> for Request {
    fn borrow(&self) -> &NewJob {
        &self.job
    }
}

/// Gathers enqueues into batches.
pub(super) struct Gatherer {
    /// The second one is for batches beside another, and connected when there are such.
    stores: [Store; 2],
    /// Held while a commit is on its way.
    busy: Arc<Mutex<()>>,
    /// Enough wait for a batch beside another.
    enough: Arc<Notify>,
    requests: OnceLock<mpsc::Sender<Request>>,
    keyed: Vec<Store>,
    keyed_turn: Semaphore,
    keyed_free: std::sync::Mutex<Vec<usize>>,
}

impl Gatherer {
    pub(super) fn new(database: &Database) -> Self {
        Self {
            stores: [database.store("enqueue"), database.store("enqueue")],
            busy: Arc::default(),
            enough: Arc::default(),
            requests: OnceLock::new(),
            keyed: (0..KEYED_CONNECTIONS).map(|_| database.store("enqueue-keyed")).collect(),
            keyed_turn: Semaphore::new(KEYED_CONNECTIONS),
            keyed_free: std::sync::Mutex::new((0..KEYED_CONNECTIONS).collect()),
        }
    }

    /// Enqueue a job; the answer comes after its commit.
    pub(super) async fn enqueue(&self, job: NewJob) -> Result<Enqueued> {
        if job.dedupe.is_some() {
            let answer = self.enqueue_keyed(&[job]).await?.pop();
            return answer.ok_or_else(|| Error::schema("posthouse.enqueue answered nothing"));
        }
        if let Ok(_alone) = self.busy.try_lock() {
            return self.stores[0].enqueue(&job).await;
        }
        let requests = self.requests.get_or_init(|| {
            let (sender, receiver) = mpsc::channel(WAITING);
            tokio::spawn(gather(self.stores.clone(), self.busy.clone(), self.enough.clone(), receiver));
            sender
        });
        let (answer, answered) = oneshot::channel();
        let gone = || Error::disconnected("the runtime that this queue was first used on has ended", false);
        requests.send(Request { job, answer }).await.map_err(|_| gone())?;
        if requests.max_capacity() - requests.capacity() >= WORTH_A_BATCH {
            self.enough.notify_one();
        }
        answered.await.map_err(|_| gone())?
    }

    /// Enqueue jobs of which some have dedupe keys, in one commit.
    pub(super) async fn enqueue_keyed(&self, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        let begun = Instant::now();
        let mut pause = Pause::new(Duration::from_millis(20), Duration::from_millis(500));
        loop {
            let answer = {
                let _turn = self.keyed_turn.acquire().await.map_err(|_| Error::disconnected("closed", false))?;
                let slot = Slot::take(&self.keyed_free)?;
                self.keyed[slot.index].enqueue_soon(jobs).await
            };
            match answer {
                Err(error) if error.sqlstate() == Some("55P03") => {
                    if begun.elapsed() > KEY_PATIENCE {
                        return Err(error.saying(format!(
                            "dedupe_key: another transaction has held it for {KEY_PATIENCE:?}; nothing was enqueued. See pg_stat_activity for \
                             what is open that long"
                        )));
                    }
                }
                answer => return answer,
            }
            tokio::time::sleep(pause.next()).await;
        }
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

/// Commits batch after batch until nobody asks for more, and waits then.
async fn gather(stores: [Store; 2], busy: Arc<Mutex<()>>, enough: Arc<Notify>, mut requests: mpsc::Receiver<Request>) {
    while let Some(request) = requests.recv().await {
        let _busy = busy.lock().await;
        let mut waiting = VecDeque::from([request]);
        // The first one first.
        let mut free = vec![1, 0];
        let mut flights = FuturesUnordered::new();
        loop {
            // Those who just got an answer are about to ask again: let them, so that they share a commit.
            tokio::task::yield_now().await;
            while waiting.len() < BATCH_JOBS
                && let Ok(request) = requests.try_recv()
            {
                waiting.push_back(request);
            }
            // The second connection is made when the first one is there, so as not to take the only one that a server has to give.
            while waiting.len() >= if flights.is_empty() { 1 } else { WORTH_A_BATCH }
                && let Some(store) = free.pop_if(|store| *store == 0 || stores[0].is_connected())
            {
                flights.push(fly(&stores, store, next_batch(&mut waiting)));
            }
            if flights.is_empty() {
                break;
            }
            tokio::select! {
                biased;
                Some(store) = flights.next() => {
                    free.extend(store);
                    free.sort_unstable_by(|a, b| b.cmp(a));
                }
                () = enough.notified(), if !free.is_empty() => {}
            }
        }
    }
}

/// Commit a batch on this connection. Answers with it, unless it is a second one that a server has not to give: then the first one serves.
async fn fly(stores: &[Store; 2], store: usize, batch: Vec<Request>) -> Option<usize> {
    let is_there = store == 0 || stores[store].connect().await.is_ok();
    commit(&stores[if is_there { store } else { 0 }], batch).await;
    is_there.then_some(store)
}

/// As many of those that wait as go together.
fn next_batch(waiting: &mut VecDeque<Request>) -> Vec<Request> {
    let mut bytes = 0;
    let fits = |request: &&Request| {
        bytes += request.job.payload.get().len();
        bytes <= BATCH_BYTES
    };
    let jobs = waiting.iter().take(BATCH_JOBS).take_while(fits).count().max(1);
    waiting.drain(..jobs.min(waiting.len())).collect()
}

/// Commit a batch. If a job of it is refused, commit its halves, so that the bad one is alone in the end and spoils nothing for
/// the others.
async fn commit(store: &Store, batch: Vec<Request>) {
    let mut batches = vec![batch];
    while let Some(mut batch) = batches.pop() {
        let answers = match &batch[..] {
            [only] => store.enqueue(&only.job).await.map(|enqueued| vec![enqueued]),
            several => store.enqueue_many(several).await,
        };
        match answers {
            Ok(answers) => {
                for (request, enqueued) in batch.into_iter().zip(answers) {
                    let _ = request.answer.send(Ok(enqueued));
                }
            }
            Err(error) if error.is_invalid() && batch.len() > 1 => {
                batches.push(batch.split_off(batch.len() / 2));
                batches.push(batch);
            }
            Err(error) => batches.extend(refuse(batch, &error)),
        }
    }
}

/// Tell those of a batch of an error that it is for. Where a queue or tenant is full, the others are to be tried again: those that are not of
/// it, and as many of it as there is room for.
fn refuse(batch: Vec<Request>, error: &Error) -> Vec<Vec<Request>> {
    let mut again = Vec::new();
    let refused = match error.full() {
        Some((scope, name, room)) if batch.len() > 1 => {
            let of = |job: &NewJob| if scope == "queue" { job.queue.clone() } else { job.tenant.clone() };
            let is_of = |request: &Request| of(&request.job).as_deref().unwrap_or("default") == name;
            let (mut theirs, mut others): (Vec<_>, Vec<_>) = batch.into_iter().partition(is_of);
            // At least one is told, so that this comes to an end.
            let refused = match theirs.len() {
                0 => std::mem::take(&mut others),
                some => theirs.split_off(room.min(some - 1)),
            };
            again = [theirs, others].into_iter().filter(|part| !part.is_empty()).collect();
            refused
        }
        _ => batch,
    };
    for request in refused {
        let _ = request.answer.send(Err(error.again()));
    }
    again
}
