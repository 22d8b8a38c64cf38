//! The log of a worker: a line each state change, the names of the API, text for people and JSON for programs.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

use crate::processes::Folder;
use crate::support::{Answer, Queue, answer};

const WORK: [&str; 2] = ["work", "--until-empty"];

/// As in a container: nobody says which format, and nothing is a terminal.
fn piped(queue: &Queue, arguments: &[&str]) -> Command {
    let mut command = queue.command(arguments);
    command.env_remove("POSTHOUSE_LOG_FORMAT");
    command
}

/// Every line of an output, each of which must be an object.
#[track_caller]
fn objects(output: &str) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    let lines: Vec<Value> = output.lines().map(parse).collect();
    assert!(lines.iter().all(|line| line["at"].is_string() && line["level"].is_string()), "{lines:#?}");
    lines
}

fn events(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| line["event"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn where_there_is_no_terminal_each_line_is_an_object_with_the_names_of_the_api() {
    let (queue, folder) = (Queue::new().await, Folder::new("log-lines"));
    for kind in ["good", "bad", "flaky", "busy"] {
        queue.enqueue(&[kind, "{}", "--tenant", "acme"]);
    }
    let flaky = "flaky=test $POSTHOUSE_ATTEMPT = 2 || { echo no luck >&2; exit 1; }";
    let busy = format!("busy=test -e {0} || {{ touch {0}; echo '{{\"delay_ms\":300}}'; exit 75; }}", folder.file("b"));
    let execs = ["--exec", "good=true", "--exec", "bad=exit 65", "--exec", flaky, "--exec", &busy];
    let said = answer(&mut piped(&queue, &[&WORK[..], &execs].concat()), None).fine();
    let lines = objects(&said.stdout);
    let of = |event: &str, kind: &str| {
        let found = lines.iter().find(|line| line["event"] == event && line["kind"] == kind);
        found.unwrap_or_else(|| panic!("no {event} of {kind} in {lines:#?}"))
    };
    let worker = lines.iter().find(|line| line["event"] == "registered").unwrap()["worker"].clone();
    for (event, kind, level, more) in [
        ("done", "good", "debug", &[][..]),
        ("failed", "bad", "warn", &["class", "error"]),
        ("retry", "flaky", "info", &["class", "error", "delay_ms"]),
        ("done", "flaky", "debug", &[]),
        ("snoozed", "busy", "info", &["delay_ms", "reason"]),
    ] {
        let line = of(event, kind);
        let fields: BTreeMap<String, Value> = serde_json::from_value(line.clone()).unwrap();
        let mut expected = vec![
            "at",
            "attempt",
            "event",
            "fence",
            "job",
            "kind",
            "level",
            "max_attempts",
            "queue",
            "tenant",
            "took_ms",
            "worker",
        ];
        expected.extend(more);
        expected.sort_unstable();
        assert_eq!(fields.keys().map(String::as_str).collect::<Vec<_>>(), expected, "{line}");
        assert_eq!((&line["level"], &line["worker"]), (&level.into(), &worker), "{line}");
        assert_eq!((&line["queue"], &line["tenant"]), (&"default".into(), &"acme".into()));
        assert!(line["took_ms"].as_u64().unwrap() < 60_000 && line["job"].is_u64() | line["job"].is_i64(), "{line}");
    }
    let names = events(&lines);
    assert_eq!((names[0], names[names.len() - 1]), ("starting", "ended"));
    assert!(!names.contains(&"started"), "{names:?}");
}

#[tokio::test]
async fn a_filter_chooses_what_is_told_but_not_for_programs() {
    let queue = Queue::new().await;
    let run = |more: &[&str], filter: &str| {
        queue.enqueue(&["good", "{}"]);
        queue.enqueue(&["bad", "{}"]);
        let work = [&WORK[..], &["--exec", "good=true", "--exec", "bad=exit 65"], more].concat();
        let said = answer(piped(&queue, &work).env("POSTHOUSE_LOG", filter), None).fine();
        let names: Vec<String> =
            objects(&said.stdout).iter().map(|line| line["event"].as_str().unwrap().to_owned()).collect();
        (names, said.stderr)
    };
    assert_eq!(run(&[], "error,posthouse::event=warn").0, ["starting", "failed", "ended"]);
    assert_eq!(run(&[], "off").0, ["starting", "ended"]);
    let (mut names, _) = run(&["--json", "--concurrency", "1"], "off");
    names.sort_unstable();
    assert_eq!(names, ["done", "ended", "failed", "registered", "started", "started", "starting"]);
    let (names, _) = run(&[], "posthouse::event=trace");
    for name in ["claimed", "started", "done", "failed"] {
        assert!(names.iter().any(|told| told == name), "no {name} in {names:?}");
    }
    let unreadable = answer(piped(&queue, &["status"]).env("POSTHOUSE_LOG", "posthouse::event=loud"), None);
    unreadable.failed(2, &["POSTHOUSE_LOG", "error,posthouse::event::job=warn"]);
}

#[tokio::test]
async fn what_is_logged_beside_is_an_object_too_and_says_nothing_twice() {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "{}"]);
    let said = answer(
        piped(&queue, &[&WORK[..], &["--exec", "k=true"]].concat()).env("POSTHOUSE_LOG", "posthouse=trace"),
        None,
    );
    let Answer { stdout, stderr, .. } = said.fine();
    let beside = objects(&stderr);
    assert!(!beside.is_empty());
    for line in &beside {
        assert!(line["message"].is_string() && line["target"].as_str().unwrap().starts_with("posthouse"), "{line}");
        assert!(!line["target"].as_str().unwrap().starts_with("posthouse::event"), "{line}");
    }
    assert!(events(&objects(&stdout)).contains(&"done"));
}

#[tokio::test]
async fn what_a_worker_finds_when_it_starts_is_an_object_too() {
    let queue = Queue::new().await;
    queue.run(&["gate", "set", "crm", "--running", "2"]).fine();
    let folder = Folder::new("found");
    std::fs::write(folder.file("posthouse.toml"), "[gates.crm]\nmax_running = 3\n").unwrap();
    let config = folder.file("posthouse.toml");
    let said = answer(&mut piped(&queue, &[&WORK[..], &["--exec", "k=true", "--config", &config]].concat()), None);
    let found = objects(&said.fine().stderr);
    assert_eq!((found.len(), &found[0]["target"], &found[0]["level"]), (1, &"posthouse::setup".into(), &"warn".into()));
    assert!(
        found[0]["message"].as_str().unwrap().contains("for crm; they hold, until `posthouse gate apply"),
        "{found:?}"
    );
}

#[tokio::test]
async fn neither_payload_nor_answer_is_logged_even_if_everything_is() {
    let queue = Queue::new().await;
    queue.enqueue(&["good", "{\"word\": \"sesame-asked\"}"]);
    queue.enqueue(&["bad", "{\"word\": \"sesame-asked\"}", "--max-attempts", "1"]);
    let work = [
        "--exec",
        "good=echo '\"sesame-answered\"'",
        "--exec",
        "bad=echo '\"sesame-answered\"'; echo broke >&2; exit 1",
    ];
    for format in ["text", "json"] {
        let more = ["-vv", "--log-format", format];
        let said =
            answer(queue.command(&[&WORK[..], &work, &more].concat()).env("POSTHOUSE_LOG", "trace"), None).fine();
        assert!(!said.stdout.contains("sesame") && !said.stderr.contains("sesame"), "{said:?}");
    }
}

#[tokio::test]
async fn on_a_terminal_it_is_text() {
    let queue = Queue::new().await;
    queue.enqueue(&["k", "{}"]);
    // A terminal of its own, whose output comes back.
    let command = format!("'{}' work --until-empty --exec k=true", env!("CARGO_BIN_EXE_posthouse"));
    let mut terminal = piped(&queue, &[]);
    let environment: Vec<_> =
        terminal.get_envs().filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
    terminal = Command::new("script");
    terminal.args(["-qec", &command, "/dev/null"]).envs(environment).env_remove("POSTHOUSE_LOG_FORMAT");
    let said = answer(&mut terminal, None).fine().stdout;
    assert!(said.contains("job 1 done") && !said.contains("{\""), "{said}");
}

#[tokio::test]
async fn a_format_that_is_none_is_refused() {
    let queue = Queue::new().await;
    queue.run(&["status", "--log-format", "xml"]).failed(2, &["--log-format", "xml"]);
}
