//! Connections that wait for their next request. All of them lead to the same provider.

use bytes::Bytes;
use http_body_util::Full;
use hyper::client::conn::http1::SendRequest;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};

/// What a request carries. Boxed, since hyper has room for 32 requests a connection and uses that of one.
pub(super) type Body = Box<Full<Bytes>>;

/// A connection, as seen by who sends. Dropping it closes the connection.
pub(super) type Sender = SendRequest<Body>;

/// How long a connection may need to notice that the answer is over, which whoever reads that knows a little earlier.
const READY_MAX: Duration = Duration::from_millis(50);

pub(super) struct Pool {
    /// How long a connection is kept.
    idle_max: Duration,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    /// Those that have waited longest first.
    idle: Vec<(Instant, Sender)>,
    /// Closes those that nobody needed. It runs while there are any, and keeps the pool alive no longer than others do.
    closing: Option<JoinHandle<()>>,
}

impl Pool {
    pub(super) fn new(idle_max: Duration) -> Self {
        Self { idle_max, list: Mutex::default() }
    }

    /// The connection that was used last, if it can be used again: the others get a chance to become old.
    pub(super) async fn take(&self) -> Option<Sender> {
        while let Some(mut sender) = self.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
            // Boxed, as it is hardly ever waited for.
            match Box::pin(timeout(READY_MAX, sender.ready())).await {
                Ok(Ok(())) => return Some(sender),
                Ok(Err(_)) => {}
                // Waited for once only: others may have as much to send still to a provider that answered before it had read all.
                Err(_) => return None,
            }
        }
        None
    }

    /// Keeps a connection whose last answer was read to its end.
    pub(super) fn put(self: &Arc<Self>, sender: Sender) {
        if sender.is_closed() {
            return;
        }
        let mut list = self.lock();
        list.idle.push((Instant::now(), sender));
        // Also when it ended with the runtime that it ran on.
        if list.closing.as_ref().is_none_or(JoinHandle::is_finished) {
            list.closing = Some(tokio::spawn(close_in_time(Arc::downgrade(self), Instant::now() + self.idle_max)));
        }
    }

    fn pop(&self) -> Option<Sender> {
        let mut list = self.lock();
        let (since, sender) = list.idle.pop()?;
        if since.elapsed() >= self.idle_max {
            // The others have waited even longer.
            list.idle.clear();
            return None;
        }
        Some(sender)
    }

    /// Closes those that have waited too long. The moment when the next one has; `None`: there are no more.
    fn close_old(&self) -> Option<Instant> {
        let mut list = self.lock();
        let old = list.idle.iter().take_while(|(since, _)| since.elapsed() >= self.idle_max).count();
        list.idle.drain(..old);
        let next = list.idle.first().map(|(since, _)| *since + self.idle_max);
        if next.is_none() {
            list.closing = None;
        }
        next
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn close_in_time(pool: Weak<Pool>, mut next: Instant) {
    loop {
        sleep_until(next).await;
        let later = pool.upgrade().and_then(|pool| pool.close_old());
        let Some(later) = later else { return };
        next = later;
    }
}
