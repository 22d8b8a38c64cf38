//! The simulated provider: a real HTTP server that behaves as badly as it is told.
//!
//! It serves `POST /v1/chat/completions` (stream and not), `GET /v1/models`, and `GET /sim/stats` with counters of what it
//! was asked. Its answers are derived from the input (`expected_answer`), so that a test can tell whose answer it got.
//! `script` says what can be scripted, `fault` lists the ways to behave.

mod answer;
mod connection;
mod fault;
mod reply;
mod script;
mod server;
mod stats;

pub use answer::{checksum, expected_answer};
pub use fault::Fault;
pub use script::{Delay, Script, Step};
pub use stats::{InputStats, Seen, Stats};

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A running simulated provider. It stops when this is dropped.
pub struct Sim {
    address: SocketAddr,
    shared: Arc<server::Shared>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Sim {
    /// Starts on a free port of the loopback interface.
    ///
    /// # Errors
    /// When no port can be had.
    pub async fn start(script: Script) -> io::Result<Self> {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), script).await
    }

    /// Starts on an address.
    ///
    /// # Errors
    /// When the address cannot be had.
    pub async fn start_at(address: SocketAddr, script: Script) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(server::Shared::new(script));
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(server::serve(listener, shared.clone(), stopped));
        Ok(Self { address, shared, stop, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What a provider's `base_url` has to be.
    #[must_use]
    pub fn base_url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// The counters now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.shared.stats().clone()
    }

    /// Stops it and closes its connections.
    pub async fn shutdown(mut self) {
        self.stop.send_replace(true);
        // The task has nothing to say: it ends at the signal or has panicked, and is gone either way.
        let _ = (&mut self.task).await;
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

impl std::fmt::Debug for Sim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sim").field("address", &self.address).finish_non_exhaustive()
    }
}
