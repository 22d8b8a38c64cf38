//! Running the binary, and making jobs end as a test needs them.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use posthouse::store::{Database, schema_sql};
use posthouse::testing::TestDatabase;
use posthouse::{Outcome, Posthouse, Worker};
use serde_json::Value;

/// The binary, with nothing in its environment that this machine happens to have.
pub(crate) fn posthouse() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_posthouse"));
    for variable in ["DATABASE_URL", "POSTHOUSE_LOG", "POSTHOUSE_LEASE_MS", "POSTHOUSE_LISTEN_URL", "XDG_STATE_HOME"] {
        command.env_remove(variable);
    }
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("OTEL_") || name.to_string_lossy().starts_with("TRACE") {
            command.env_remove(name);
        }
    }
    // As on a terminal.
    command.env("POSTHOUSE_LOG_FORMAT", "text");
    // No `dev` of this user is found.
    command.env("HOME", env!("CARGO_TARGET_TMPDIR"));
    command.stdin(Stdio::null());
    command
}

/// What a run said.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    /// Ends the test unless it went well.
    #[track_caller]
    pub(crate) fn fine(self) -> Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// Ends the test unless it failed with this code and these words on stderr.
    #[track_caller]
    pub(crate) fn failed(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "no {word:?} in {self:?}");
        }
        self
    }

    /// Its output, which must be one JSON value.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Runs a command to its end.
pub(crate) fn answer(command: &mut Command, stdin: Option<&[u8]>) -> Answer {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    if stdin.is_some() {
        command.stdin(Stdio::piped());
    }
    let mut child = command.spawn().unwrap();
    if let Some(bytes) = stdin {
        // It may end before it has read all of it.
        child.stdin.take().unwrap().write_all(bytes).ok();
    }
    let output = child.wait_with_output().unwrap();
    Answer {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A migrated database, and the binary on it.
pub(crate) struct Queue {
    database: TestDatabase,
}

impl Queue {
    pub(crate) async fn new() -> Self {
        Self { database: TestDatabase::new(&schema_sql(), async |url| Posthouse::migrate(url).await).await }
    }

    pub(crate) fn url(&self) -> &str {
        self.database.url()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = posthouse();
        command.env("DATABASE_URL", self.url()).args(arguments);
        command
    }

    pub(crate) fn run(&self, arguments: &[&str]) -> Answer {
        answer(&mut self.command(arguments), None)
    }

    pub(crate) fn run_with_stdin(&self, arguments: &[&str], stdin: impl AsRef<[u8]>) -> Answer {
        answer(&mut self.command(arguments), Some(stdin.as_ref()))
    }

    /// Runs a command as it was told to people, in a shell.
    pub(crate) fn paste(&self, line: &str) -> Answer {
        let folder = std::path::Path::new(env!("CARGO_BIN_EXE_posthouse")).parent().unwrap();
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
        answer(Command::new("sh").args(["-c", line]).env("DATABASE_URL", self.url()).env("PATH", path), None)
    }

    /// Enqueues a job; answers with its id.
    pub(crate) fn enqueue(&self, arguments: &[&str]) -> i64 {
        let arguments: Vec<_> = ["enqueue", "--json"].iter().chain(arguments).copied().collect();
        self.run(&arguments).fine().json()["id"].as_i64().unwrap()
    }

    /// The first column of what a query finds, which must be text.
    pub(crate) async fn texts(&self, query: &str) -> Vec<String> {
        let rows = self.database.connect().await.query(query, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Statements that no command makes.
    pub(crate) async fn sql(&self, statements: &str) {
        self.database.connect().await.batch_execute(statements).await.unwrap();
    }

    /// Lets every job of this kind that is there have this outcome.
    pub(crate) async fn work(&self, kind: &str, outcome: impl Fn() -> Outcome + Send + Sync + 'static) {
        self.work_on("default", kind, outcome).await;
    }

    /// The same in another queue.
    pub(crate) async fn work_on(&self, queue: &str, kind: &str, outcome: impl Fn() -> Outcome + Send + Sync + 'static) {
        let database = Database::new(self.url()).unwrap();
        let worker = Worker::builder(database).queues([queue]).until_empty(true).handle_kind(kind, move |_, _| {
            let outcome = outcome();
            async move { Ok::<_, std::io::Error>(outcome) }
        });
        let worked = worker.run_until(std::future::pending());
        tokio::time::timeout(Duration::from_secs(60), worked).await.expect("the jobs end").unwrap();
    }
}

/// A file for a test to read, made in the folder for temporary files of this build.
pub(crate) fn file(name: &str, content: impl AsRef<[u8]>) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    std::fs::write(&path, content).unwrap();
    path
}
