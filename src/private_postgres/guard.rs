//! Children that cannot outlive their owner, even when it is killed with -9.
//!
//! A destructor does not run in a killed process, so a second process has to do its work: the *watchdog*, a small
//! shell script that blocks on a pipe whose only write end is ours. The kernel closes that end with our process.
//! The pipe is close-on-exec, so no other child of ours holds it by accident.
//!
//! A child is started in two steps, so that there is no moment in which it runs and the watchdog does not know it:
//! first a shell that waits at a *gate* (one more pipe), then the watchdog is told its process id, then the gate
//! opens and the shell becomes the program.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use super::user::ServerUser;

const WATCHDOG: &str = include_str!("watchdog.sh");
const GATE: &str = r#"read -r go && exec "$0" "$@" </dev/null"#;

/// The watchdog of one server directory, and our end of its pipe.
#[derive(Debug)]
pub(super) struct Guard {
    watchdog: Child,
    pipe: ChildStdin,
}

/// A program to be run under the guard.
pub(super) struct Launch<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: Vec<OsString>,
    pub(super) directory: &'a Path,
    pub(super) user: Option<&'a ServerUser>,
    pub(super) output: std::fs::File,
}

impl Guard {
    /// Starts a watchdog that will send `stop_signal` (a name without SIG) and remove `leftovers`.
    pub(super) fn new(stop_signal: &str, leftovers: &[PathBuf]) -> io::Result<Self> {
        let mut watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "posthouse-watchdog", stop_signal])
            .args(leftovers)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A Ctrl-C on the terminal ends the owner, not the one who cleans up after it.
            .process_group(0)
            .spawn()?;
        let pipe = watchdog.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Self { watchdog, pipe })
    }

    /// Starts a program that the watchdog stops when we are gone.
    pub(super) fn spawn(&mut self, launch: Launch<'_>) -> io::Result<Child> {
        let mut command = Command::new("sh");
        command
            .args([OsStr::new("-c"), OsStr::new(GATE), launch.program.as_os_str()])
            .args(launch.arguments)
            .current_dir(launch.directory)
            .stdin(Stdio::piped())
            .stdout(launch.output.try_clone()?)
            .stderr(launch.output)
            // A Ctrl-C must not stop the server before its owner has written what it has to write.
            .process_group(0);
        clean_environment(&mut command);
        if let Some(user) = launch.user {
            // Dropping root this way also drops its supplementary groups.
            command.uid(user.uid).gid(user.gid);
        }
        let mut child = command.spawn()?;
        let told = writeln!(self.pipe, "watch {}", child.id());
        let opened = match child.stdin.take() {
            Some(mut gate) => told.and_then(|()| gate.write_all(b"go\n")),
            None => told.and(Err(io::ErrorKind::BrokenPipe.into())),
        };
        // With its gate closed the shell ends by itself.
        if let Err(error) = opened {
            child.wait()?;
            return Err(error);
        }
        Ok(child)
    }

    /// Tells the watchdog that the child has ended, so that it will never signal a later process of the same number.
    pub(super) fn forget_child(&mut self) {
        // A watchdog that somebody killed hears nothing; the owner's own clean-up still works.
        writeln!(self.pipe, "watch").ok();
    }

    /// Lets the server live on after us, until the process `runner` has ended.
    #[cfg(feature = "testing")]
    pub(super) fn tie_to(&mut self, runner: u32) -> io::Result<()> {
        writeln!(self.pipe, "tie {runner}")
    }

    /// Sets the watchdog off and waits until it has removed everything.
    pub(super) fn finish(mut self) {
        drop(self.pipe);
        self.watchdog.wait().ok();
    }
}

/// Postgres reads PGDATA, PGPORT and friends, the time zone and the locale from its environment; ours must not decide.
fn clean_environment(command: &mut Command) {
    command.env_clear().env("LC_ALL", "C").env("TZ", "UTC");
    for name in ["PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
}
