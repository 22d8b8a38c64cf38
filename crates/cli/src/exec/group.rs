//! A program and everything it started, ended together: SIGTERM first, SIGKILL after a short grace.
//!
//! Each program leads a process group of its own. Dropping a [`Group`] ends the group, so that an attempt whose future
//! is dropped (timeout, lost lease, shutdown) leaves nothing running. What takes longer than a signal is done by one
//! thread for all groups. A second process, the watchdog, ends them when this process is killed: it waits at a pipe
//! whose other end the kernel closes with us.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child as StdChild, Command as StdCommand, Stdio};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::process::{Child, Command};

/// From SIGTERM to SIGKILL: time to remove a temporary file, short enough that a restart does not wait for it.
pub(super) const GRACE: Duration = Duration::from_secs(2);
/// How often a group that was told to end is looked at.
const POLL: Duration = Duration::from_millis(10);

const WATCHDOG: &str = include_str!("watchdog.sh");

/// A running program and its process group.
pub(super) struct Group {
    id: Pid,
    /// Taken when the group is handed over to be ended.
    child: Option<Child>,
}

impl Group {
    /// Starts a program at the head of a new group. When this returns the watchdog knows of it.
    pub(super) fn spawn(command: &mut Command) -> io::Result<Self> {
        let child = command.process_group(0).spawn()?;
        let id = child.id().and_then(|id| i32::try_from(id).ok()).ok_or(io::ErrorKind::InvalidData)?;
        tell_watchdog('+', id);
        Ok(Self { id: Pid::from_raw(id), child: Some(child) })
    }

    /// The group's number, which is the program's.
    pub(super) fn id(&self) -> Pid {
        self.id
    }

    /// The program itself.
    pub(super) fn child(&mut self) -> io::Result<&mut Child> {
        self.child.as_mut().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Asks all of a group to end.
pub(super) fn terminate(group: Pid) {
    // An error means that nobody is left.
    killpg(group, Signal::SIGTERM).ok();
}

impl Drop for Group {
    fn drop(&mut self) {
        // An error means that nobody is left.
        match killpg(self.id, Signal::SIGTERM) {
            Ok(()) => ENDINGS.add(Ending { id: self.id, child: self.child.take(), by: Instant::now() + GRACE }),
            Err(_) => tell_watchdog('-', self.id.as_raw()),
        }
    }
}

/// A group that was told to end.
struct Ending {
    id: Pid,
    child: Option<Child>,
    by: Instant,
}

impl Ending {
    /// Looks after it once; true when nobody is left of it.
    fn is_over(&mut self) -> bool {
        // A program that has ended but was not collected would count as one of the group.
        if self.child.as_mut().is_some_and(|child| !matches!(child.try_wait(), Ok(None))) {
            self.child = None;
        }
        let signal = if Instant::now() >= self.by { Some(Signal::SIGKILL) } else { None };
        let over = killpg(self.id, signal).is_err();
        if over {
            tell_watchdog('-', self.id.as_raw());
        }
        over
    }
}

/// All groups that were told to end, and the thread that looks after them.
#[derive(Default)]
struct Endings {
    list: Mutex<List>,
    changed: Condvar,
}

#[derive(Default)]
struct List {
    endings: Vec<Ending>,
    thread_runs: bool,
}

static ENDINGS: LazyLock<Endings> = LazyLock::new(Endings::default);

impl Endings {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, mut ending: Ending) {
        let mut list = self.lock();
        if !list.thread_runs {
            let thread = std::thread::Builder::new().name("posthouse-endings".to_owned());
            list.thread_runs = thread.spawn(|| ENDINGS.look_after()).is_ok();
        }
        if list.thread_runs {
            list.endings.push(ending);
            self.changed.notify_all();
        } else {
            // Out of threads: no grace, but an end.
            ending.by = Instant::now();
            ending.is_over();
        }
    }

    fn look_after(&self) {
        let mut list = self.lock();
        loop {
            list.endings.retain_mut(|ending| !ending.is_over());
            list = if list.endings.is_empty() {
                self.changed.notify_all();
                self.changed.wait(list).unwrap_or_else(PoisonError::into_inner)
            } else {
                self.changed.wait_timeout(list, POLL).unwrap_or_else(PoisonError::into_inner).0
            };
        }
    }
}

/// Waits until all programs that were told to end have ended: at most the grace and a moment. To be called before the
/// process exits, which would end the thread that looks after them.
pub(crate) fn wait_for_endings() {
    let deadline = Instant::now() + GRACE + Duration::from_millis(500);
    let mut list = ENDINGS.lock();
    while !list.endings.is_empty() && Instant::now() < deadline {
        list = ENDINGS.changed.wait_timeout(list, POLL).unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// The watchdog, started with the first program. `None`: it could not be started, and programs outlive a killed worker.
static WATCHER: LazyLock<Mutex<Option<StdChild>>> = LazyLock::new(|| {
    let watchdog = StdCommand::new("sh")
        .args(["-c", WATCHDOG, "posthouse-watchdog"])
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        // What ends our own group must not end the one who cleans up.
        .process_group(0)
        .spawn();
    if let Err(error) = &watchdog {
        tracing::warn!(%error, "no watchdog: programs go on if this worker is killed");
    }
    Mutex::new(watchdog.ok())
});

fn tell_watchdog(sign: char, group: i32) {
    let mut watcher = WATCHER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pipe) = watcher.as_mut().and_then(|watchdog| watchdog.stdin.as_mut()) {
        // A watchdog that somebody killed hears nothing; everything else works without it.
        writeln!(pipe, "{sign} {group}").ok();
    }
}
