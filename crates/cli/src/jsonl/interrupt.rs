//! Ctrl-C and SIGTERM while lines are enqueued: noted, and acted upon where it is known how far it came.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::signal::unix::{SignalKind, signal};

use crate::failure::{Failure, Result};

/// Listens until the process ends.
pub(super) struct Interrupt {
    /// The exit code that goes with the signal; 0: none came.
    code: Arc<AtomicU8>,
}

impl Interrupt {
    /// From now on the first signal is noted; a second one ends the process at once.
    pub(super) fn listen() -> Result<Self> {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let code = Arc::new(AtomicU8::new(0));
        let noted = code.clone();
        tokio::spawn(async move {
            loop {
                let code = tokio::select! {
                    _ = interrupt.recv() => 130,
                    _ = terminate.recv() => 143,
                };
                if noted.swap(code, Ordering::Relaxed) != 0 {
                    std::process::exit(code.into());
                }
            }
        });
        Ok(Self { code })
    }

    /// The end, if a signal came: all lines up to `through` are dealt with, none after it.
    pub(super) fn check(&self, through: u64) -> Result<()> {
        match self.code.load(Ordering::Relaxed) {
            0 => Ok(()),
            code => Err(Failure::new(format!("interrupted after line {through}; nothing after it was enqueued"))
                .hint(format!("go on with `--skip {through}`"))
                .code(code)),
        }
    }
}
