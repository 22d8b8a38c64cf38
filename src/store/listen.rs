//! LISTEN: hints that there is work, or that somebody asked to cancel a job. Whoever misses one finds out by polling.

use futures_util::stream::{Stream, StreamExt, poll_fn};
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client};
use uuid::Uuid;

use super::database::Database;
use crate::error::{Error, Result};

/// A connection that listens.
pub struct Listener {
    /// Held, since dropping it ends the connection.
    _client: Client,
    messages: tokio::sync::mpsc::Receiver<Notice>,
    task: JoinHandle<()>,
}

/// What a listener heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A queue has work.
    Wake {
        /// The queue.
        queue: String,
    },
    /// Somebody asked to cancel a job that a worker runs.
    Cancel {
        /// The worker's id.
        worker: Uuid,
    },
}

/// Notices kept for a slow reader; more are dropped, since they are only hints. The socket itself is always drained, so
/// that Postgres never waits for us.
const BACKLOG: usize = 1024;

impl Listener {
    /// Connect and listen; what happens after this returns is heard. An error if the database has no URL to listen on.
    pub async fn connect(database: &Database) -> Result<Self> {
        let target = database.listen.as_ref().ok_or_else(|| Error::config("there is no URL to listen on"))?;
        let mut config = target.config.clone();
        config.application_name("posthouse/listen");
        let (sender, messages) = tokio::sync::mpsc::channel(BACKLOG);
        #[cfg(feature = "tls")]
        let (client, mut connection) = config.connect(super::tls::connector(target)?).await?;
        #[cfg(not(feature = "tls"))]
        let (client, mut connection) = config.connect(tokio_postgres::NoTls).await?;
        let task = tokio::spawn(forward(poll_fn(move |cx| connection.poll_message(cx)), sender));
        client.batch_execute("listen posthouse_wake; listen posthouse_cancel").await?;
        Ok(Self { _client: client, messages, task })
    }

    /// The next notice. An error if the connection broke.
    pub async fn next(&mut self) -> Result<Notice> {
        match self.messages.recv().await {
            Some(notice) => Ok(notice),
            None => Err(Error::disconnected("the listening connection broke", false)),
        }
    }
}

async fn forward(
    messages: impl Stream<Item = Result<AsyncMessage, tokio_postgres::Error>>,
    sender: tokio::sync::mpsc::Sender<Notice>,
) {
    let mut messages = std::pin::pin!(messages);
    while let Some(Ok(message)) = messages.next().await {
        if let AsyncMessage::Notification(n) = message {
            let notice = match (n.channel(), Uuid::parse_str(n.payload())) {
                ("posthouse_cancel", Ok(worker)) => Notice::Cancel { worker },
                ("posthouse_cancel", Err(_)) => continue,
                _ => Notice::Wake { queue: n.payload().to_owned() },
            };
            if let Err(tokio::sync::mpsc::error::TrySendError::Closed(_)) = sender.try_send(notice) {
                return;
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.task.abort();
    }
}
