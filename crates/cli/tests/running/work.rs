//! `work` with programs: its lines, and that no program outlives its attempt.

use std::process::Command;

use nix::sys::signal::Signal;
use posthouse::testing::TestDatabase;
use serde_json::Value;

use crate::processes::{Folder, Running, eventually, processes_of, runs};
use crate::support::{Queue, answer, posthouse};

fn job(queue: &Queue, id: i64) -> Value {
    queue.run(&["job", "show", &id.to_string(), "--json"]).fine().json()
}

#[tokio::test]
async fn it_tells_a_line_a_transition() {
    let (queue, folder) = (Queue::new().await, Folder::new("lines"));
    for (kind, payload) in [("sum", "[1,2]"), ("bad", "{}"), ("flaky", "{}"), ("busy", "{}")] {
        queue.enqueue(&[kind, payload]);
    }
    let flaky =
        format!("flaky=test $POSTHOUSE_ATTEMPT = 2 || {{ echo no luck >&2; exit 1; }}; cat > {}", folder.file("f"));
    let busy = format!("busy=test -e {0} || {{ touch {0}; echo '{{\"delay_ms\":300}}'; exit 75; }}", folder.file("b"));
    let (sum, bad) = ("sum=tr -d '[] ' | tr , +", "bad=echo wrong >&2; exit 65");
    let said =
        queue.run(&["work", "--until-empty", "--exec", sum, "--exec", bad, "--exec", &flaky, "--exec", &busy]).fine();
    let lines: Vec<&str> = said.stdout.lines().collect();
    assert!(
        lines[0].contains("queue default; kinds bad, busy, flaky, sum; up to 100 at once; lease 30s"),
        "{lines:#?}"
    );
    let has = |line: &str| assert!(lines.iter().any(|l| l.starts_with(line)), "no {line:?} in {lines:#?}");
    for line in [
        "job 1 done",
        "job 2 failed: exit status 65: wrong",
        "job 3 retry in ",
        "job 3 done",
        "job 4 snoozed for 300ms: exit status 75: not now",
        "job 4 done",
        "ended: 3 done, 1 failed, 1 retried, 1 snoozed",
    ] {
        has(line);
    }
    assert_eq!(job(&queue, 1)["result"], "1+2");
    assert_eq!((&job(&queue, 3)["attempt"], &job(&queue, 4)["attempt"]), (&Value::from(2), &Value::from(1)));
}

#[tokio::test]
async fn a_process_that_only_sweeps_takes_jobs_back_from_the_dead_and_claims_none() {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "{}"]);
    let work = &["work", "--exec", "k=sleep 60", "--no-sweep", "--lease-ms", "1000"];
    let mut dies = Running::start(&mut queue.command(work));
    eventually("the job is claimed", || job(&queue, 1)["state"] == "running");
    let mut sweeps = Running::start(&mut queue.command(&["work", "--sweep-only"]));
    sweeps.line("does housekeeping only");
    dies.signal(Signal::SIGKILL);
    dies.ended();
    sweeps.line("1 job of a dead worker rescued");
    assert_eq!((&job(&queue, 1)["state"], &job(&queue, 1)["attempt"]), (&Value::from("queued"), &Value::from(1)));
    assert!(sweeps.ended_by(Signal::SIGTERM).success());
    let workers = queue.run(&["status", "--json"]).fine().json();
    assert_eq!(workers["workers"].as_array().map(|live| live.iter().filter(|w| w["state"] == "live").count()), Some(0));
}

#[tokio::test]
async fn a_sweeper_that_should_also_work_is_refused() {
    let queue = Queue::new().await;
    for also in [&["--exec", "k=true"][..], &["--no-sweep"], &["--queue", "q"], &["--until-empty"]] {
        let refused = queue.run(&[&["work", "--sweep-only"], also].concat());
        assert_eq!(refused.code, 2, "{also:?}: {}", refused.stderr);
    }
}

#[tokio::test]
async fn for_programs_each_line_is_an_object() {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "{}"]);
    let said =
        queue.run(&["work", "--until-empty", "--json", "--lease-ms", "5000", "--exec", "k=echo '{\"a\":1}'"]).fine();
    let events: Vec<Value> = said.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["starting", "registered", "started", "done", "ended"]);
    assert_eq!((&events[0]["lease_ms"], &events[3]["job"]), (&Value::from(5_000), &Value::from(1)));
}

#[tokio::test]
async fn the_lease_can_come_from_the_environment() {
    let queue = Queue::new().await;
    let mut command = queue.command(&["work", "--until-empty", "--exec", "k=true"]);
    let said = answer(command.env("POSTHOUSE_LEASE_MS", "1500"), None).fine();
    assert!(said.stdout.contains("lease 1s 500ms"), "{said:?}");
    answer(command.env("POSTHOUSE_LEASE_MS", "5"), None).failed(2, &["lease: 5ms is not safe"]);
}

#[tokio::test]
async fn a_worker_that_could_do_nothing_says_what_to_do() {
    let queue = Queue::new().await;
    queue.run(&["work"]).failed(2, &["no kind of job", "--exec KIND=", "--provider-url", "posthouse.toml"]);
    queue.run(&["work", "--provider-url", "http://127.0.0.1:1/v1"]).failed(2, &["--model NAME"]);
    queue.run(&["work", "--exec", "k=true", "--exec", "k=false"]).failed(2, &["--exec k", "keep one"]);
    let bare = TestDatabase::new("no schema", async |_| Ok::<(), String>(())).await;
    let mut command = posthouse();
    command.args(["work", "--exec", "k=true", "--database-url", bare.url()]);
    answer(&mut command, None).failed(1, &["no Posthouse schema yet", "posthouse db migrate"]);
}

#[tokio::test]
async fn a_program_does_not_learn_the_database_from_the_command_line() {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "{}"]);
    let mut command = posthouse();
    command.args([
        "work",
        "--until-empty",
        "--exec",
        "k=echo \"${DATABASE_URL-unset} $POSTHOUSE_KIND\"",
        "--database-url",
        queue.url(),
    ]);
    answer(&mut command, None).fine();
    assert_eq!(job(&queue, 1)["result"], "unset k");
}

/// A program that starts another one, both noting their process ids, and does not end.
fn endless(folder: &Folder, name: &str) -> String {
    let (child, shell) = (folder.file(&format!("{name}-child")), folder.file(&format!("{name}-shell")));
    format!("k=sleep 600 & echo $! > {child}; echo $$ > {shell}; wait")
}

/// Waits until both processes of `endless` run; answers with their ids.
fn pids(folder: &Folder, name: &str) -> [i32; 2] {
    ["child", "shell"].map(|who| folder.pid(&format!("{name}-{who}")))
}

fn end(pids: [i32; 2]) {
    eventually("the program and what it started end", || !pids.iter().any(|pid| runs(*pid)));
}

fn worker(queue: &Queue, exec: &str, more: &[&str]) -> Command {
    let mut command = queue.command(&["work", "--lease-ms", "1000", "--poll-ms", "100", "--exec", exec]);
    command.args(more);
    command
}

#[tokio::test]
async fn told_to_end_it_gives_the_job_back_uncharged() {
    let (queue, folder) = (Queue::new().await, Folder::new("term"));
    queue.enqueue(&["k", "{}"]);
    let mut running = Running::start(&mut worker(&queue, &endless(&folder, "a"), &["--grace-ms", "200"]));
    let programs = pids(&folder, "a");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.ended().code(), Some(0));
    running.line("job 1 released");
    end(programs);
    let job = job(&queue, 1);
    assert_eq!((&job["state"], &job["attempt"]), (&Value::from("queued"), &Value::from(0)));
}

#[tokio::test]
async fn told_to_end_while_a_job_waits_for_its_time_it_does_not_say_that_there_is_none() {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "{}", "--delay", "2h"]);
    let mut running = Running::start(&mut worker(&queue, "k=true", &["--until-empty", "-v"]));
    running.line("registered");
    running.signal(Signal::SIGTERM);
    assert_eq!(running.ended().code(), Some(0));
    running.line("ended: no job was run");
}

#[tokio::test]
async fn killed_or_told_twice_it_leaves_no_program_behind() {
    let (queue, folder) = (Queue::new().await, Folder::new("kill"));
    for (name, signal) in [("a", Signal::SIGKILL), ("b", Signal::SIGTERM)] {
        queue.enqueue(&["k", "{}"]);
        let mut running = Running::start(&mut worker(&queue, &endless(&folder, name), &["--concurrency", "1"]));
        let programs = pids(&folder, name);
        assert!(!running.ended_by(signal).success());
        end(programs);
    }
}

#[tokio::test]
async fn a_timeout_a_cancel_and_a_lost_lease_end_the_program() {
    let (queue, folder) = (Queue::new().await, Folder::new("lost"));
    queue.enqueue(&["k", "{}", "--timeout", "500ms", "--max-attempts", "1"]);
    let timed = Running::start(&mut worker(&queue, &endless(&folder, "timeout"), &["--until-empty"]));
    let programs = pids(&folder, "timeout");
    timed.line("job 1 failed: the attempt took longer");
    end(programs);

    queue.enqueue(&["k", "{}"]);
    let cancelled = Running::start(&mut worker(&queue, &endless(&folder, "cancel"), &["--until-empty"]));
    let programs = pids(&folder, "cancel");
    queue.run(&["job", "cancel", "2"]).fine();
    cancelled.line("job 2 cancelled");
    end(programs);

    queue.enqueue(&["k", "{}"]);
    let frozen = Running::start(&mut worker(&queue, &endless(&folder, "lease"), &[]));
    let programs = pids(&folder, "lease");
    frozen.signal(Signal::SIGSTOP);
    let other = Running::start(&mut worker(&queue, "k=echo 2", &["--until-empty"]));
    other.line("job 3 done");
    assert!(runs(programs[0]), "the frozen worker cannot have ended it");
    frozen.signal(Signal::SIGCONT);
    frozen.line("lost");
    end(programs);
    assert_eq!(job(&queue, 3)["result"], 2);
}

#[tokio::test]
async fn killed_while_it_starts_programs_it_leaves_none_behind() {
    let (queue, folder) = (Queue::new().await, Folder::new("start"));
    let exec = format!("k=echo >> {}; sleep 600; sleep 600", folder.file("started"));
    for round in 0..5 {
        for _ in 0..20 {
            queue.enqueue(&["k", "{}", "--max-attempts", "100"]);
        }
        std::fs::remove_file(folder.path().join("started")).ok();
        let mut running = Running::start(&mut worker(&queue, &exec, &["--concurrency", "20"]));
        // Each round a little later in the middle of it.
        eventually("programs start", || {
            std::fs::read(folder.path().join("started")).is_ok_and(|notes| notes.len() > 4 * round)
        });
        assert!(!running.ended_by(Signal::SIGKILL).success());
        eventually("no program is left", || processes_of(folder.path()).is_empty());
    }
}
