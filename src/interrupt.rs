//! SIGTERM and SIGINT: the first asks for an orderly end, the second ends the process at once. Heard on a thread of its
//! own, so that handlers which block the runtime cannot keep a process from ending.

use std::thread;
use std::time::{Duration, Instant};

use tokio_util::sync::{CancellationToken, DropGuard};

use crate::error::{Error, Result};

/// The same signal within this time of the first one is that one once more: `timeout` signals its child and then the whole
/// group, and wrappers pass on a Ctrl-C that the terminal sent to everybody. A person's second one comes later.
const ECHO: Duration = Duration::from_millis(250);

/// Cancelled by the first signal.
pub(crate) struct Interrupt {
    pub(crate) first: CancellationToken,
    /// Ends the thread.
    _done: DropGuard,
}

/// Starts to listen. From then on the signals no longer end the process by themselves.
pub(crate) fn interrupt() -> Result<Interrupt> {
    let cannot = |error: std::io::Error| Error::config(format!("signals: cannot be handled: {error}"));
    let (first, done) = (CancellationToken::new(), CancellationToken::new());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(cannot)?;
    let mut signals = {
        let _inside = runtime.enter();
        Signals::new().map_err(cannot)?
    };
    let (tell, end) = (first.clone(), done.clone());
    let work = move || {
        runtime.block_on(end.run_until_cancelled(async {
            let (first, asked) = (signals.next().await, Instant::now());
            tracing::info!("asked to end: no new jobs; a second signal ends at once");
            tell.cancel();
            let mut code = signals.next().await;
            while code == first && asked.elapsed() < ECHO {
                code = signals.next().await;
            }
            tracing::warn!("asked to end again: ending at once; unfinished jobs are rescued by other workers");
            std::process::exit(code)
        }));
    };
    thread::Builder::new().name("posthouse-signals".to_owned()).spawn(work).map_err(cannot)?;
    Ok(Interrupt { first, _done: done.drop_guard() })
}

#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for a signal; answers with the exit code that goes with it, 128 and its number.
    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => 143,
            _ = self.interrupt.recv() => 130,
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) -> i32 {
        match tokio::signal::ctrl_c().await {
            Ok(()) => 130,
            Err(_) => std::future::pending().await,
        }
    }
}
