//! Other people's snapshots: transactions that keep Postgres from removing dead rows.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::error::{Error, Result};
use crate::ground::{Scratch, connect};

/// A server may end idle transactions; this one must stay. The first query takes the snapshot.
const BEGIN: &str = "set idle_in_transaction_session_timeout = 0; begin isolation level repeatable read; \
                     select 1";

/// How long the snapshots last.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pin {
    /// One, all the time.
    Still,
    /// A new one every so often, each lasting twice that: there always is one, but the oldest is never old.
    Moving(Duration),
}

/// Snapshots that are held until they are released.
pub(crate) struct Held {
    stop: Arc<Notify>,
    task: JoinHandle<Result<()>>,
}

impl Pin {
    /// The first snapshot has been taken when this returns.
    pub(crate) async fn hold(self, scratch: &Scratch) -> Result<Held> {
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(connect(&scratch.url).await?);
        }
        clients[0].batch_execute(BEGIN).await?;
        let stop = Arc::new(Notify::new());
        let task = tokio::spawn(keep(self, clients, stop.clone()));
        Ok(Held { stop, task })
    }
}

async fn keep(pin: Pin, clients: Vec<Client>, stop: Arc<Notify>) -> Result<()> {
    let moving = async {
        let Pin::Moving(step) = pin else { return std::future::pending().await };
        let mut newest = 0;
        loop {
            tokio::time::sleep(step).await;
            newest += 1;
            clients[newest % 3].batch_execute(BEGIN).await?;
            if newest >= 2 {
                clients[(newest - 2) % 3].batch_execute("commit").await?;
            }
        }
    };
    tokio::select! {
        ended = moving => ended,
        () = stop.notified() => {
            for client in &clients {
                // Without a transaction this is a warning only.
                client.batch_execute("commit").await?;
            }
            Ok(())
        }
    }
}

impl Held {
    /// No snapshot is held any more when this returns.
    ///
    /// # Errors
    ///
    /// A snapshot was lost before.
    pub(crate) async fn release(self) -> Result<()> {
        self.stop.notify_one();
        self.task.await.map_err(|error| Error::Stuck(format!("holding a snapshot: {error}")))?
    }
}
