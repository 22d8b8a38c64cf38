//! `demo`: all of it, and that nothing is left of it.

use std::collections::BTreeSet;

use nix::sys::signal::Signal;
use posthouse_llm::sim::{Delay, Fault, Script, Sim};
use serde_json::Value;

use crate::processes::{Folder, Running, processes_of};
use crate::support::{Answer, answer, posthouse};

fn demo(folder: &Folder, arguments: &[&str]) -> std::process::Command {
    let mut command = posthouse();
    command.arg("demo").args(arguments).env("TMPDIR", folder.path());
    for key in ["POSTHOUSE_API_KEY", "OPENAI_API_KEY"] {
        command.env_remove(key);
    }
    command
}

async fn run(folder: &Folder, arguments: &[&str]) -> Answer {
    let mut command = demo(folder, arguments);
    tokio::task::spawn_blocking(move || answer(&mut command, None)).await.unwrap()
}

#[tokio::test]
async fn everything_is_as_it_should_be() {
    let folder = Folder::new("demo");
    let told = run(&folder, &["--json"]).await.fine().json();
    let total = told["jobs"].as_u64().unwrap();
    assert!(total >= 24, "{told}");
    assert_eq!(
        (&told["done"], &told["failed"], &told["duplicates"]),
        (&(total - 1).into(), &1.into(), &0.into()),
        "{told}"
    );
    assert!(told["seconds"].as_f64().unwrap() > 1.0);
    let answers = told["answers"].as_array().unwrap();
    let ids: BTreeSet<i64> = answers.iter().map(|answer| answer["id"].as_i64().unwrap()).collect();
    assert_eq!(ids.len() as u64, total);
    for answer in answers.iter().filter(|answer| answer["state"] == "done") {
        let expected = posthouse_llm::sim::expected_answer(answer["input"].as_str().unwrap());
        assert_eq!(answer["answer"], expected.as_str());
    }
    let trouble: BTreeSet<&str> =
        told["trouble"].as_array().unwrap().iter().map(|t| t["what"].as_str().unwrap()).collect();
    let expected = ["cut answer", "dead letter", "hang", "latency spike", "lost worker", "rate limit"];
    assert_eq!(trouble, expected.into(), "{told}");
    assert!(!told["killed"]["jobs"].as_array().unwrap().is_empty());
    folder.is_left_empty();
}

#[tokio::test]
async fn with_a_real_endpoint_and_texts_of_ones_own() {
    let (folder, files) = (Folder::new("demo-real"), Folder::new("demo-files"));
    let text: Vec<String> =
        (0..12).map(|i| format!("Paragraph {i} of a letter. {}", "It goes on and on. ".repeat(8))).collect();
    std::fs::write(files.path().join("letter.txt"), text.join("\n\n")).unwrap();
    let slow = Delay::fixed(std::time::Duration::from_millis(300));
    let sim = Sim::start(Script { latency: slow, ..Script::default() }).await.unwrap();
    let told =
        run(&folder, &["--provider-url", &sim.base_url(), "--model", "m", &files.file("letter.txt")]).await.fine();
    for part in ["Paragraph 0 of a letter. [", "only the simulated provider can tell", "Yes. "] {
        assert!(told.stdout.contains(part), "no {part:?} in {}", told.stdout);
    }
    assert!(sim.stats().requests >= 12);

    let refuses = Sim::start(Script::from(Fault::Status(401))).await.unwrap();
    let told =
        run(&folder, &["--json", "--provider-url", &refuses.base_url(), "--model", "m", &files.file("letter.txt")])
            .await;
    assert_eq!(told.code, 1, "{told:?}");
    let told = told.json();
    assert_eq!((&told["done"], &told["ok"]), (&0.into(), &Value::Bool(false)));
    assert!(told["answers"][0]["error"].as_str().unwrap().starts_with("401 Unauthorized"), "{told}");
    folder.is_left_empty();
}

#[test]
fn interrupted_or_killed_it_leaves_nothing_behind() {
    for (signal, code) in [(Signal::SIGINT, Some(130)), (Signal::SIGTERM, Some(143)), (Signal::SIGKILL, None)] {
        let folder = Folder::new(&format!("demo-{signal}"));
        let mut running = Running::start(&mut demo(&folder, &[]));
        running.line("done by worker");
        assert!(processes_of(folder.path()).iter().any(|line| line.contains("work --json")));
        running.signal(signal);
        assert_eq!(running.ended().code(), code);
        folder.is_left_empty();
    }
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = Folder::new("demo-none");
    answer(&mut demo(&folder, &[&folder.file("none.txt")]), None).failed(2, &["none.txt", "No such file"]);
    std::fs::write(folder.path().join("empty.txt"), "\n\n").unwrap();
    answer(&mut demo(&folder, &[&folder.file("empty.txt")]), None).failed(2, &["no text"]);
}
