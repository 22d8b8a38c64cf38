//! The simulated provider: a real HTTP server that behaves as badly as it is told.
//!
//! It serves `POST /v1/chat/completions` (stream and not), `GET /v1/models`, and `GET /sim/stats` with counters of what it
//! was asked. Its answers are derived from the input (`expected_answer`), so that a test can tell whose answer it got.
//! `script` says what can be scripted, `fault` lists the ways to behave.

mod answer;
mod connection;
mod delay;
mod fault;
mod limit;
mod reply;
mod script;
mod server;
mod stats;

pub use answer::{checksum, expected_answer};
pub use delay::Delay;
pub use fault::Fault;
pub use limit::{Limit, Rates};
pub use script::{Script, Step};
pub use stats::{InputStats, Seen, Stats};

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tokio::net::{TcpListener, TcpSocket};
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
        let listener = listen(address)?;
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

/// Connections that may wait to be taken. The usual 128 are too few for a worker that begins a thousand calls at once: the
/// system drops what comes beyond, and a caller tries again after a whole second. The system may bound it lower.
const BACKLOG: u32 = 4096;

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // As `TcpListener::bind` does: a restart need not wait for old connections to be forgotten.
    #[cfg(unix)]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The runtime is busy with connecting, so that nothing is taken meanwhile.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_burst_of_connections_waits_to_be_taken_and_is_not_dropped() {
        let sim = Sim::start(Script::default()).await.unwrap();
        let connect = || std::net::TcpStream::connect_timeout(&sim.address(), std::time::Duration::from_millis(900));
        let connections: Vec<_> = (0..300).map(|_| connect().unwrap()).collect();
        assert_eq!(connections.len(), 300);
    }
}
