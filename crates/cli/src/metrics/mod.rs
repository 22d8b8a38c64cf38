//! `work --metrics-listen`: what the process counts and what the sweep counted for the fleet (`/metrics`), whether the process is
//! alive (`/healthz`), and whether it does its work (`/readyz`).
//!
//! It runs on the runtime of the worker, so that a process whose threads all hang answers nobody, and is restarted. No request asks
//! Postgres anything: that is done every few seconds, over a connection of its own.

mod book;
mod health;
mod http;

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use posthouse::metrics::Source;
use posthouse::store::{Database, Store};
use posthouse::sweep::Sweeper;
use posthouse::worker::Builder;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::failure::{Failure, Result};
use book::Book;

/// Between two questions to Postgres: what is due at most every five seconds is not asked for more often.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// After one that was not answered; and as long as nothing else of this process was answered, Postgres is asked for a sign of life.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// An answer is not waited for longer.
const ANSWER: Duration = Duration::from_secs(10);

/// Where to listen: `9464`, on this machine only, or `ADDRESS:PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listen(SocketAddr);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(port) = text.parse() {
            return Ok(Self(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)));
        }
        text.replace("localhost:", "127.0.0.1:").parse().map(Self).map_err(|_| {
            "write PORT for this machine only, as in 9464, or ADDRESS:PORT, as in 0.0.0.0:9464 for everybody who can reach it"
                .to_owned()
        })
    }
}

/// The server; it ends when this is dropped.
pub(crate) struct Server {
    book: Arc<Book>,
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Server {
    /// Listens, if it is to. `works`: the process runs a worker.
    pub(crate) async fn start(listen: Option<Listen>, database: &Database, works: bool) -> Result<Option<Self>> {
        let Some(Listen(address)) = listen else { return Ok(None) };
        let failed = |error: std::io::Error| {
            let failure = Failure::new(format!("--metrics-listen {address}: {error}"));
            match error.kind() {
                ErrorKind::AddrInUse => failure.hint("another process serves there; choose another port"),
                _ => failure.hint("write PORT for this machine only, or an ADDRESS:PORT of this machine"),
            }
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let book = Arc::new(Book::new(works, database.clone()));
        let mut tasks = JoinSet::new();
        tasks.spawn(ask(database.store("metrics").with_timeout(ANSWER), book.clone()));
        tasks.spawn(http::serve(listener, book.clone()));
        Ok(Some(Self { book, address, _tasks: tasks }))
    }

    /// Where it can be read.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/metrics", self.address)
    }

    /// Serves also what this counts.
    pub(crate) fn add(&self, source: impl Source + 'static) {
        self.book.metrics.add(source);
    }

    /// Counts what a worker does.
    pub(crate) fn watch(&self, builder: Builder) -> Builder {
        builder.meter(&self.book.meter)
    }

    /// Counts what a sweeper does.
    pub(crate) fn watch_sweeper(&self, sweeper: Sweeper) -> Sweeper {
        let meter = self.book.meter.clone();
        sweeper.on_event(move |event| meter.count(event))
    }
}

/// Asks Postgres for what is known of the fleet, for as long as the process runs, and in between, if nobody else heard of it lately,
/// whether it is there.
async fn ask(store: Store, book: Arc<Book>) {
    let mut told: Option<Instant> = None;
    loop {
        if told.is_none_or(|at| at.elapsed() >= ASK_EVERY) {
            match store.fleet_metrics().await {
                Ok(fleet) => {
                    book.meter.set_clock_ahead(fleet.clock_ahead);
                    book.fleet.keep(fleet);
                    told = Some(Instant::now());
                }
                Err(error) => tracing::debug!(%error, "what metrics say about the fleet is not known"),
            }
        } else if book.database.answer_age().is_none_or(|age| age >= ASK_AGAIN)
            && let Err(error) = store.ping().await
        {
            tracing::debug!(%error, "Postgres gave no sign of life");
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_port_alone_is_for_this_machine_only() {
        for (text, address) in [
            ("9464", "127.0.0.1:9464"),
            ("0", "127.0.0.1:0"),
            ("0.0.0.0:9464", "0.0.0.0:9464"),
            ("localhost:9464", "127.0.0.1:9464"),
            ("[::1]:9464", "[::1]:9464"),
        ] {
            assert_eq!(text.parse::<Listen>().unwrap().0.to_string(), address);
        }
        for text in [":9464", "", "nowhere", "host.example:9464", "70000", "127.0.0.1"] {
            let refused = text.parse::<Listen>().unwrap_err();
            assert!(refused.contains("0.0.0.0:9464"), "{text}: {refused}");
        }
    }
}
