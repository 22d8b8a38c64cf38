//! The driver speaks the harness's protocol: what each sub-command prints, and what a worker leaves behind.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use posthouse::Posthouse;
use posthouse::store::schema_sql;
use posthouse::testing::TestDatabase;
use serde_json::Value;

/// A worker that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn driver(url: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peers-driver"));
    command.env("DATABASE_URL", url).args(arguments);
    command
}

/// The one line that a sub-command prints, as JSON; null if there is none.
fn said(url: &str, arguments: &[&str]) -> Value {
    let output = driver(url, arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    if output.stdout.is_empty() { Value::Null } else { serde_json::from_slice(&output.stdout).unwrap() }
}

#[tokio::test]
async fn every_job_is_enqueued_run_once_and_counted() {
    let database = TestDatabase::new(&schema_sql(), async |url| Posthouse::migrate(url).await).await;
    let url = database.url();
    assert_eq!(said(url, &["setup"]), Value::Null);
    for (arguments, jobs) in [
        (&["enqueue_single", "20"][..], 20),
        (&["enqueue_bulk", "30"], 30),
        (&["paced", "1000", "40", "1"], 40),
        (&["paced", "1000", "60", "20"], 60),
    ] {
        let said = said(url, arguments);
        assert_eq!(said["n"], jobs, "{arguments:?}");
        assert!(said["secs"].as_f64().unwrap() > 0.0, "{arguments:?}");
    }

    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut worker = driver(url, &["work", "best"]);
    worker.env("HANDLER", "stamp").env("MAXN", "50").env("OUT", &out).stdout(Stdio::piped());
    let mut worker = Running(worker.spawn().unwrap());
    let mut lines = BufReader::new(worker.0.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    let first: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    assert!(first["ev"] == "start" && first["t"].as_f64().unwrap() > 1e9, "{first}");
    // Lines come until the process ends; were a job missing, the runner's deadline would end the test.
    assert!(lines.any(|line| line == r#"{"c":150}"#));
    let told = Command::new("kill").arg(worker.0.id().to_string()).status().unwrap();
    assert!(told.success() && worker.0.wait().unwrap().success());
    // Numbers below 20 came in four times, then three, two, and one from 40 on.
    let counts: Vec<u8> = [4, 3, 2].iter().zip([20, 10, 10]).flat_map(|(runs, jobs)| vec![*runs; jobs]).collect();
    assert_eq!(std::fs::read(out.with_extension("counts")).unwrap(), [counts, vec![1; 10]].concat());
    let stamps = std::fs::read_to_string(out.with_extension("lat")).unwrap();
    assert_eq!(stamps.lines().filter(|line| line.split(' ').count() == 2).count(), 150);
}

#[tokio::test]
async fn a_worker_without_history_sets_the_queue_before_it_starts() {
    let database = TestDatabase::new(&schema_sql(), async |url| Posthouse::migrate(url).await).await;
    let url = database.url();
    let mut worker = Running(driver(url, &["work", "nohistory"]).stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(worker.0.stdout.take().unwrap()).lines();
    assert!(lines.next().unwrap().unwrap().contains("start"));
    let queues = Posthouse::connect(url).await.unwrap().queues().await.unwrap();
    assert_eq!((&*queues[0].queue, queues[0].retention_ms), ("default", Some(0)));
}

#[test]
fn what_cannot_be_run_is_refused() {
    for arguments in [&["enqueue_bulk", "0"][..], &["work", "fast"], &["paced", "1"], &[]] {
        let output = driver("postgres://127.0.0.1:1/nowhere", arguments).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("usage: DATABASE_URL"), "{arguments:?}: {output:?}");
    }
}
