//! `examples/worker.py`, run for real, against jobs that another Python program enqueued in its own transactions.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::support::{Queue, Session};
use crate::harness::{Program, SOON, wait_until};

/// A Python with psycopg: `POSTHOUSE_TEST_PYTHON`, or one that is made under `target/`.
fn python() -> PathBuf {
    if let Some(named) = std::env::var_os("POSTHOUSE_TEST_PYTHON") {
        return named.into();
    }
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/python");
    let program = folder.join("bin/python");
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    // Tests that need it may run at the same time.
    std::fs::create_dir_all(folder.parent().unwrap()).unwrap();
    let lock = std::fs::File::create(folder.with_extension("lock")).unwrap();
    lock.lock().unwrap();
    if !Command::new(&program).args(["-c", "import psycopg"]).output().is_ok_and(|o| o.status.success()) {
        run(Command::new("python3").args(["-m", "venv"]).arg(&folder));
        run(Command::new(&program).args(["-m", "pip", "install", "--quiet", "psycopg[binary]==3.3.9"]));
    }
    program
}

fn example() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/worker.py")
}

fn start_worker(queue: &Queue, lease_ms: u32) -> Program {
    let mut command = Command::new(python());
    Program::start(
        command.arg(example()).env("DATABASE_URL", queue.url()).env("POSTHOUSE_LEASE_MS", lease_ms.to_string()),
    )
}

async fn becomes(s: &Session, id: i64, state: &str) -> Value {
    wait_until(SOON, &format!("job {id} is {state}"), async || s.state(id).await == state).await;
    s.job(id).await
}

#[test]
fn it_is_shorter_than_eighty_lines() {
    let text = std::fs::read_to_string(example()).unwrap();
    assert!(text.lines().count() < 80, "{} lines", text.lines().count());
}

#[tokio::test]
async fn a_worker_in_python_runs_what_python_enqueued() {
    let (queue, s) = Queue::with_session().await;
    let enqueue = r#"
import os, psycopg
from psycopg.types.json import Jsonb
ENQUEUE = "select id, duplicate from posthouse.enqueue(kind => %s, payload => %s, tenant => %s, dedupe_key => %s, max_attempts => %s)"
with psycopg.connect(os.environ["DATABASE_URL"]) as db:
    db.execute("create table letter (id int)")
    with db.transaction():
        db.execute("insert into letter values (1)")
        one = db.execute(ENQUEUE, ("shout", Jsonb({"text": "hello"}), "acme", "a", None)).fetchone()
        two = db.execute(ENQUEUE, ("shout", Jsonb({"text": "hello"}), "acme", "a", None)).fetchone()
        assert (two[0], two[1]) == (one[0], True)
    try:
        with db.transaction():
            db.execute(ENQUEUE, ("shout", Jsonb({"text": "never"}), "acme", None, None))
            raise KeyError
    except KeyError:
        pass
    db.execute(ENQUEUE, ("shout", Jsonb({}), "acme", None, 2))
    rows = db.execute("select id from posthouse.enqueue_many(%s)", (Jsonb([{"kind": "shout", "payload": {"text": f"text {n}"}} for n in range(50)]),)).fetchall()
    assert len(rows) == 50
"#;
    let output = Command::new(python()).args(["-c", enqueue]).env("DATABASE_URL", queue.url()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(s.count("posthouse.job").await, 52);
    let stranger = s.enqueue("kind => 'of another program'").await;
    let cut_short = s.enqueue(r#"kind => 'nap', payload => '{"seconds": 600}'"#).await;
    // Longer than a lease.
    let long = s.enqueue(r#"kind => 'nap', payload => '{"seconds": 3}'"#).await;
    let mut worker = start_worker(&queue, 2_000);
    wait_until(SOON, "all texts are shouted", async || s.count("posthouse.archive").await >= 51).await;
    let hello =
        s.count(r#"posthouse.jobs where tenant = 'acme' and state = 'done' and result = '{"text": "HELLO"}'"#).await;
    assert_eq!(hello, 1);
    assert_eq!(s.count("posthouse.jobs where kind = 'shout' and state = 'done' and result ->> 'text' = upper(payload ->> 'text') and attempt = 1").await, 51);
    assert_eq!(s.state(cut_short).await, "running");
    s.get::<String>(&format!("select posthouse.cancel({cut_short})")).await;
    becomes(&s, cut_short, "cancelled").await;
    let job = becomes(&s, long, "done").await;
    assert_eq!((&job["attempt"], &job["result"]), (&json!(1), &json!({"woken": false})));
    let failed: i64 = s.get("select id from posthouse.jobs where payload = '{}' and kind = 'shout'").await;
    let job = becomes(&s, failed, "failed").await;
    let classes: Vec<&str> = job["errors"].as_array().unwrap().iter().map(|e| e["class"].as_str().unwrap()).collect();
    assert_eq!(classes, ["KeyError", "KeyError"]);
    assert_eq!(s.state(stranger).await, "queued");
    // Claims that are over are forgotten, and nothing is taken back from a worker that is well.
    wait_until(SOON, "its claims are forgotten", async || s.count("posthouse.claimed").await == 0).await;
    assert_eq!(s.count("posthouse.attempt").await, 0);
    worker.terminate();
    assert!(worker.ended(SOON).await.success(), "{}", worker.output());
}

#[tokio::test]
async fn a_worker_in_python_gives_back_what_it_cannot_finish() {
    let (queue, s) = Queue::with_session().await;
    let short = s.enqueue(r#"kind => 'nap', payload => '{"seconds": 2}'"#).await;
    let long = s.enqueue(r#"kind => 'nap', payload => '{"seconds": 600}'"#).await;
    let mut worker = start_worker(&queue, 30_000);
    wait_until(SOON, "both run", async || s.count("posthouse.job where state = 'running'").await == 2).await;
    worker.terminate();
    assert!(worker.ended(SOON).await.success(), "{}", worker.output());
    assert_eq!(s.state(short).await, "done");
    let job = s.job(long).await;
    assert_eq!((&job["state"], &job["attempt"], &job["errors"]), (&json!("queued"), &json!(0), &Value::Null));
    assert_eq!(s.get::<String>("select state from posthouse.workers").await, "over");
}

#[tokio::test]
async fn a_worker_in_python_that_was_paused_past_its_lease_ends() {
    let (queue, s) = Queue::with_session().await;
    let id = s.enqueue(r#"kind => 'nap', payload => '{"seconds": 4}'"#).await;
    let mut worker = start_worker(&queue, 1_500);
    wait_until(SOON, "it runs", async || s.state(id).await == "running").await;
    let worker_id: uuid::Uuid = s.get("select id from posthouse.worker").await;
    worker.pause();
    wait_until(SOON, "its lease is over", async || s.get("select expired from posthouse.worker_beats()").await).await;
    assert_eq!(s.rescue(worker_id).await, 1);
    let other = s.worker(&["nap"]).await;
    assert_eq!(other.claim(&s, 1).await[0].attempt, 2);
    worker.resume();
    assert_eq!(worker.ended(SOON + Duration::from_secs(5)).await.code(), Some(70));
    let job = s.job(id).await;
    assert_eq!((&job["state"], &job["worker"]), (&json!("running"), &json!(other.id)));
}
