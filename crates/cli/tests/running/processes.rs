//! Processes that run while a test looks at them, and looking at what is left of them.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longer than anything takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until it holds.
#[track_caller]
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !holds() {
        assert!(Instant::now() < deadline, "it did not come to pass: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A running command, killed at the end of the test.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::spawn(command.stderr(Stdio::null()))
    }

    /// The same; what it says on stderr goes into a file.
    pub(crate) fn logging(command: &mut Command, log: File) -> Self {
        Self::spawn(command.stderr(log))
    }

    fn spawn(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let (tell, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        Self { child, lines }
    }

    /// The next line that contains this.
    #[track_caller]
    pub(crate) fn line(&self, part: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        let mut seen = Vec::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) if line.contains(part) => return line,
                Ok(line) => seen.push(line),
                Err(_) => panic!("no line with {part:?} in {seen:#?}"),
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid().try_into().unwrap()), signal).unwrap();
    }

    /// Sends a signal again and again until it ends.
    #[track_caller]
    pub(crate) fn ended_by(&mut self, signal: Signal) -> ExitStatus {
        eventually("the command ends", || {
            self.signal(signal);
            self.child.try_wait().unwrap().is_some()
        });
        self.child.wait().unwrap()
    }

    /// Waits for its end.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> ExitStatus {
        eventually("the command ends", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Whether a process runs; one that has ended and was not collected does not.
pub(crate) fn runs(pid: i32) -> bool {
    let state = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    let state = String::from_utf8_lossy(&state.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

/// The command lines of all processes that mention this folder.
pub(crate) fn processes_of(folder: &Path) -> Vec<String> {
    let all = Command::new("ps").args(["-eo", "args"]).output().unwrap();
    let all = String::from_utf8_lossy(&all.stdout);
    let folder = folder.display().to_string();
    all.lines().filter(|line| line.contains(&folder)).map(str::to_owned).collect()
}

/// A folder of a test's own that every user may enter, removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("posthouse-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// A path in it, as text.
    pub(crate) fn file(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// The process id that a program wrote into a file of it, as soon as it is there.
    #[track_caller]
    pub(crate) fn pid(&self, name: &str) -> i32 {
        let mut pid = None;
        eventually("a program writes its process id", || {
            let text = std::fs::read_to_string(self.0.join(name)).unwrap_or_default();
            pid = text.strip_suffix('\n').and_then(|text| text.parse().ok());
            pid.is_some()
        });
        pid.unwrap()
    }

    /// Waits until nothing is in it and no process has to do with it.
    #[track_caller]
    pub(crate) fn is_left_empty(&self) {
        eventually("no process and no file is left", || {
            processes_of(&self.0).is_empty() && std::fs::read_dir(&self.0).unwrap().next().is_none()
        });
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}
