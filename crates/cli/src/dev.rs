//! `posthouse dev`: a private Postgres with the schema in it and a simulated provider, empty, until Ctrl-C. Other commands
//! find the database by the record it leaves.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use posthouse::Posthouse;
use posthouse::private_postgres::PrivatePostgres;
use posthouse_llm::sim::{Script, Sim};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{Dev, Global};
use crate::dev_record;
use crate::failure::{Failure, Result};
use crate::output::{json_line, line, note};
use crate::style::{BOLD, DIM};

/// The database of the private server: it is there from the beginning, and it is ours alone.
const DATABASE: &str = "postgres";

pub(crate) async fn run(args: Dev, global: &Global) -> Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    note(format!("{DIM}starting Postgres …{DIM:#}"));
    let kept = args.data_dir.is_some();
    let server = start(args.data_dir).await?;
    let url = server.url(DATABASE);
    Posthouse::migrate(&url).await?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port.unwrap_or(0)));
    let sim = Sim::start_at(address, Script::default()).await.map_err(|error| {
        Failure::new(format!("--port: the simulated provider cannot listen on {address}: {error}"))
            .hint("choose another port, or leave it out for a free one")
    })?;
    let record = dev_record::record(&url).unwrap_or_else(|error| {
        note(format!("other commands will not find this database by themselves: {error}"));
        None
    });

    let running = Running { server: &server, url: &url, provider_url: sim.base_url(), kept };
    let told = if global.json { running.tell_json() } else { running.tell(record.is_some()) };
    if told.is_ok() {
        interrupts.next().await;
    }
    note(format!("{DIM}stopping …{DIM:#}"));
    drop(record);
    sim.shutdown().await;
    stop(server).await;
    told.map(|()| ExitCode::SUCCESS)
}

/// Starts a server: durable in a directory that is kept, else temporary and fast.
pub(crate) async fn start(data_dir: Option<PathBuf>) -> Result<PrivatePostgres> {
    let builder = match data_dir {
        Some(directory) => PrivatePostgres::builder().data_dir(directory),
        None => PrivatePostgres::builder().fsync(false),
    };
    let started = tokio::task::spawn_blocking(move || builder.start()).await;
    let started = started.map_err(|error| Failure::new(format!("starting Postgres: {error}")))?;
    started.map_err(|error| {
        let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
        Failure::new(format!("{error}{source}"))
    })
}

/// Stops it in order and removes what is temporary.
pub(crate) async fn stop(server: PrivatePostgres) {
    // Blocks for some moments. If it panics there is nothing left to be done about it.
    let _ = tokio::task::spawn_blocking(move || drop(server)).await;
}

/// Ctrl-C and SIGTERM.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    /// From here on they do not end the process by themselves.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for one of them; answers with the exit code that goes with it.
    pub(crate) async fn next(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => 130,
            _ = self.terminate.recv() => 143,
        }
    }
}

/// What there is to tell about it.
struct Running<'a> {
    server: &'a PrivatePostgres,
    url: &'a str,
    provider_url: String,
    kept: bool,
}

impl Running<'_> {
    fn tell_json(&self) -> Result<()> {
        json_line(&json!({
            "database_url": self.url,
            "provider_url": self.provider_url,
            "postgres_version": self.server.version().to_string(),
            "port": self.server.port(),
            "directory": self.server.directory(),
            "kept": self.kept,
        }))
    }

    fn tell(&self, recorded: bool) -> Result<()> {
        let Self { server, url, provider_url, kept } = self;
        let directory = server.directory().display();
        line(format!("{BOLD}PostgreSQL {} is up, with an empty queue in it.{BOLD:#}", server.version()))?;
        line(format!("\n  export DATABASE_URL='{url}'\n"))?;
        line(if recorded {
            "Other posthouse commands find it without that. In another terminal:"
        } else {
            "Another `posthouse dev` runs, which other commands find first; set DATABASE_URL for this one. In another terminal:"
        })?;
        line("\n  posthouse enqueue summarize '{\"text\":\"A posthouse was the stage on a mail road where …\"}'")?;
        line(format!("  posthouse work --provider-url {provider_url} --model sim"))?;
        line("  posthouse status\n")?;
        line(format!("{DIM}{provider_url} is a simulated provider: it takes any model, and costs nothing.{DIM:#}"))?;
        line(if *kept {
            format!("{DIM}The data stay in {directory} for the next time. Ctrl-C stops it.{DIM:#}")
        } else {
            format!("{DIM}All of it is gone at the end; keep it with --data-dir DIR. Ctrl-C stops it.{DIM:#}")
        })
    }
}
