//! What the crash tests share: worker processes, the journal that their handlers write, and the check that every job ended
//! exactly once.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use posthouse::store::JobRecord;
use posthouse::testing::{TestCluster, TestDatabase};
use posthouse::worker::{Builder, Event};
use posthouse::{Context, Posthouse};

use crate::harness::{Program, SOON, wait_until};
use crate::worker_support::worker_at;

/// For what takes a rescue, or many processes, on a busy machine.
pub(super) const LATER: Duration = Duration::from_secs(40);

/// A line of the journal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Note {
    /// `start`, `end`, or whatever a command notes.
    pub(super) what: String,
    pub(super) job: i64,
    pub(super) attempt: u32,
    /// The process id of the worker.
    pub(super) worker: u32,
    /// The process id of the command.
    pub(super) process: u32,
}

/// A file to which handlers append a line when they start and when they end, so that runs can be counted, and files that
/// they wait for.
pub(super) struct Journal {
    folder: tempfile::TempDir,
}

impl Journal {
    pub(super) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("journal")
    }

    /// A command that notes its start, does this, and notes its end. In it, `note WORD` writes a line, and `wait_for NAME`
    /// waits until the gate of this name is open.
    pub(super) fn command(&self, body: &str) -> String {
        let (file, folder) = (self.file().display().to_string(), self.folder.path().display().to_string());
        format!(
            "note() {{ echo \"$1 $POSTHOUSE_JOB_ID $POSTHOUSE_ATTEMPT $PPID $$\" >> '{file}'; }}; \
             wait_for() {{ while [ ! -e '{folder}'/\"$1\" ]; do sleep 0.05; done; }}; \
             note start; {body}; note end"
        )
    }

    /// Lets all go on who wait for this gate.
    pub(super) fn open(&self, gate: &str) {
        fs::write(self.folder.path().join(gate), "").unwrap();
    }

    /// Everything noted so far, in order.
    pub(super) fn notes(&self) -> Vec<Note> {
        let text = fs::read_to_string(self.file()).unwrap_or_default();
        // A line is written at once, but may be read half.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let parse = |line: &str| {
            let mut words = line.split(' ');
            let mut next = || words.next().unwrap_or_else(|| panic!("a torn line in the journal: {line:?}"));
            Note {
                what: next().to_owned(),
                job: next().parse().unwrap(),
                attempt: next().parse().unwrap(),
                worker: next().parse().unwrap(),
                process: next().parse().unwrap(),
            }
        };
        whole.lines().map(parse).collect()
    }

    /// The notes with this word, of one job or of all.
    pub(super) fn noted(&self, what: &str, job: impl Into<Option<i64>>) -> Vec<Note> {
        let job = job.into();
        self.notes().into_iter().filter(|n| n.what == what && job.is_none_or(|job| n.job == job)).collect()
    }

    /// Waits until there are so many notes with this word.
    pub(super) async fn wait_for(&self, what: &str, job: impl Into<Option<i64>>, count: usize) {
        let job = job.into();
        wait_until(LATER, &format!("{count} × {what:?} is noted"), async || self.noted(what, job).len() >= count).await;
    }

    /// How often each job was started.
    pub(super) fn runs(&self) -> BTreeMap<i64, usize> {
        self.noted("start", None).into_iter().fold(BTreeMap::new(), |mut runs, note| {
            *runs.entry(note.job).or_default() += 1;
            runs
        })
    }

    /// Fails unless each of these jobs, and no other, was started exactly once.
    pub(super) fn assert_each_ran_once(&self, ids: &[i64]) {
        let runs = self.runs();
        let odd: Vec<_> = runs.iter().filter(|(_, runs)| **runs != 1).collect();
        assert!(odd.is_empty(), "ran more than once (job, runs): {odd:?}");
        let (expected, ran) = (ids.iter().collect::<HashSet<_>>(), runs.keys().collect::<HashSet<_>>());
        assert_eq!(ran, expected, "all ran, and no others");
    }

    /// Waits until no process noted here runs any more.
    pub(super) async fn nothing_left_running(&self) {
        let processes: HashSet<u32> = self.notes().iter().map(|note| note.process).filter(|pid| *pid != 0).collect();
        wait_until(SOON, "no command is left running", async || !processes.iter().any(|pid| runs(*pid))).await;
    }
}

/// Whether a process runs; one that has ended and was not collected does not.
pub(super) fn runs(pid: u32) -> bool {
    let state = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap();
    let state = String::from_utf8_lossy(&state.stdout).trim().to_owned();
    !state.is_empty() && !state.starts_with('Z')
}

/// `posthouse work` with these arguments. Looks for work often.
pub(super) fn work(url: &str, journal: &Journal, arguments: &[&str]) -> Program {
    let mut command = Program::posthouse();
    command.arg("work").args(arguments).env("DATABASE_URL", url).current_dir(journal.folder.path());
    if !arguments.contains(&"--poll-ms") {
        command.args(["--poll-ms", "200"]);
    }
    // As on a terminal.
    command.env("POSTHOUSE_LOG_FORMAT", "text");
    for variable in ["POSTHOUSE_LEASE_MS", "POSTHOUSE_LISTEN_URL", "POSTHOUSE_LOG"] {
        command.env_remove(variable);
    }
    Program::start(&mut command)
}

/// Arguments for a worker that looks for work only when it is told to, and hears that by a wire of its own.
pub(super) fn only_when_told(database: &TestDatabase) -> [&str; 4] {
    ["--poll-ms", "300000", "--listen-url", database.url()]
}

/// Waits until the only worker has looked for work, found none, and gone to sleep.
pub(super) async fn falls_asleep(database: &TestDatabase) {
    let client = database.connect().await;
    let asleep = "select count(*) from pg_stat_activity where datname = current_database()
        and application_name = 'posthouse/claim' and state = 'idle' and query like '%next_due%'
        and state_change < clock_timestamp() - interval '300 milliseconds'";
    wait_until(SOON, "the worker is asleep", async || {
        client.query_one(asleep, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
}

/// Set in a child process: the database it works on, and the journal.
const CHILD_URL: &str = "POSTHOUSE_TEST_CHILD_URL";
const CHILD_JOURNAL: &str = "POSTHOUSE_TEST_CHILD_JOURNAL";

/// Runs the named test of this program as a process of its own, whose first act is [`became_worker`].
pub(super) fn child(test: &str, url: &str, journal: &Journal) -> Program {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    Program::start(command.env(CHILD_URL, url).env(CHILD_JOURNAL, journal.file()))
}

/// In a child process: is a worker with these settings until it is told to end, handling kind `k`. The handler notes start
/// and end of each run around this work. True: this was the child, and the test has nothing to do.
pub(super) async fn became_worker<F>(settings: impl FnOnce(Builder) -> Builder, work: fn(Context) -> F) -> bool
where
    F: Future<Output = ()> + Send + 'static,
{
    let (Ok(url), Ok(journal)) = (std::env::var(CHILD_URL), std::env::var(CHILD_JOURNAL)) else { return false };
    let journal = std::sync::Arc::new(OpenOptions::new().append(true).create(true).open(journal).unwrap());
    let worker = settings(worker_at(&url)).on_event(|event: &Event<'_>| {
        if !matches!(event, Event::Started { .. } | Event::Done { .. }) {
            println!("{event}");
        }
    });
    let worker = worker.handle_kind("k", move |_, context: Context| {
        let journal = journal.clone();
        async move {
            let line = format!("{} {} {} 0\n", context.job_id(), context.attempt(), std::process::id());
            (&*journal).write_all(format!("start {line}").as_bytes()).unwrap();
            work(context).await;
            (&*journal).write_all(format!("end {line}").as_bytes()).unwrap();
        }
    });
    let summary = worker.run().await.unwrap();
    println!("ended in good order: {summary:?}");
    true
}

/// A server of this test's own, that it may crash.
pub(super) async fn dedicated(settings: &'static [(&str, &str)]) -> std::sync::Arc<TestCluster> {
    tokio::task::spawn_blocking(move || TestCluster::dedicated(settings)).await.unwrap().into()
}

/// Kills the server like a crash.
pub(super) async fn crash(cluster: &std::sync::Arc<TestCluster>) {
    let cluster = cluster.clone();
    tokio::task::spawn_blocking(move || cluster.server().kill_immediate()).await.unwrap();
}

/// Starts it again.
pub(super) async fn restart(cluster: &std::sync::Arc<TestCluster>) {
    let cluster = cluster.clone();
    tokio::task::spawn_blocking(move || cluster.server().restart().unwrap()).await.unwrap();
}

/// One number from the database, on a connection of its own: servers come and go here.
pub(super) async fn number(database: &TestDatabase, sql: &str) -> i64 {
    database.connect().await.query_one(sql, &[]).await.unwrap().get(0)
}

/// Waits until no live job is left, neither due nor later nor running.
pub(super) async fn all_final(database: &TestDatabase) {
    let client = database.connect().await;
    let live = "select count(*) from posthouse.job";
    wait_until(LATER, "no live job is left", async || client.query_one(live, &[]).await.unwrap().get::<_, i64>(0) == 0)
        .await;
}

/// Fails unless each of these jobs has exactly one final record and nothing else is left of it.
pub(super) async fn assert_one_record_each(database: &TestDatabase, ids: &[i64]) {
    let sql = "select u.id from unnest($1::bigint[]) u(id)
        where (select count(*) from posthouse.archive a where a.id = u.id)
            + (select count(*) from posthouse.dead_letter d where d.id = u.id) <> 1
          or exists (select from posthouse.job j where j.id = u.id)
          or exists (select from posthouse.attempt a where a.job_id = u.id)";
    let odd = database.connect().await.query(sql, &[&ids]).await.unwrap();
    let odd: Vec<i64> = odd.iter().map(|row| row.get(0)).collect();
    assert!(odd.is_empty(), "without exactly one final record: {odd:?}");
}

/// Fails unless the job's attempt with this number ended since its worker, the process with this id, was lost, and says
/// so: host, process id, last heartbeat.
pub(super) async fn assert_worker_lost(queue: &Posthouse, job: &JobRecord, attempt: u32, pid: u32) {
    let workers = queue.workers().await.unwrap();
    let worker = workers.iter().find(|w| w.pid.unsigned_abs() == pid).expect("the dead worker is still listed");
    let errors = job.errors.as_ref().and_then(|errors| errors.as_array()).cloned().unwrap_or_default();
    let error = errors.iter().find(|e| e["attempt"] == attempt).unwrap_or_else(|| panic!("no error of it: {job:?}"));
    assert_eq!(error["class"], "worker_lost", "{error}");
    assert_eq!(error["worker"], worker.id.to_string(), "{error}");
    let said = error["error"].as_str().unwrap();
    let expected = format!("worker lost: {} pid {pid}, last heartbeat {}", worker.host, &worker.beat_at[..4]);
    assert!(said.starts_with(&expected) && !worker.host.is_empty(), "{said:?} is not {expected:?}…");
}
