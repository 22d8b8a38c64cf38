//! `bench`: it runs, and its reports have the right shape. How fast it was is not looked at.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use posthouse::Posthouse;
use posthouse::store::schema_sql;
use posthouse::testing::TestDatabase;
use serde_json::Value;

use crate::processes::{Folder, Running};
use crate::support::{answer, posthouse};

#[test]
fn a_quick_run_measures_the_floor_and_what_stands_on_it() {
    let folder = Folder::new("bench");
    let temporary = Folder::new("bench-temporary");
    let markdown = folder.file("report.md");
    let mut bench = posthouse();
    bench.args(["bench", "--quick", "--repeats", "2", "--only", "drain,floor,enqueue-single", "--json"]);
    // Nobody's server is put under load because of a variable.
    bench.env("DATABASE_URL", "postgres://127.0.0.1:1/nowhere").env("TMPDIR", temporary.path());
    let said = answer(bench.args(["--markdown", &markdown]), None).fine();
    for round in ["warm-up: floor", "round 1 of 2: enqueue-single", "round 2 of 2: drain"] {
        assert!(said.stderr.contains(round), "{said:?}");
    }
    let report = said.json();
    let expected = [
        ("floor", "commits, 1 client", None),
        ("floor", "commits, 16 clients", None),
        ("floor", "claimed and settled", None),
        ("floor", "copied", None),
        ("floor", "copied into the queue's tables", None),
        ("floor", "notify p50", None),
        ("floor", "notify p95", None),
        ("floor", "notify p99", None),
        ("enqueue-single", "enqueued", Some("commits, 1 client")),
        ("drain", "done", Some("claimed and settled")),
    ];
    let figures = figures(&report);
    assert_eq!(figures.iter().map(|f| (f.0, f.1)).collect::<Vec<_>>(), expected.map(|e| (e.0, e.1)));
    for ((_, name, figure), (_, _, floor)) in figures.iter().zip(expected) {
        let number = |field: &str| figure[field].as_f64().unwrap();
        assert_eq!(figure["values"].as_array().unwrap().len(), 2, "{name}");
        assert!(
            0.0 < number("min") && number("min") <= number("median") && number("median") <= number("max"),
            "{figure}"
        );
        assert_eq!(figure["floor"]["figure"].as_str(), floor, "{name}");
        assert_eq!(figure["floor"]["ratio"].as_f64().is_some_and(|ratio| ratio > 0.0), floor.is_some(), "{name}");
    }
    assert_eq!(report["server_settings"]["fsync"], "on");
    assert_eq!(
        (&report["quick"], &report["private_server"], &report["repeats"]),
        (&true.into(), &true.into(), &2.into())
    );

    let written = std::fs::read_to_string(&markdown).unwrap();
    let rows: Vec<&str> = written.lines().filter(|line| line.starts_with("| drain | done | ")).collect();
    assert!(rows.len() == 1 && rows[0].contains(" of claimed and settled |"), "{written}");
    assert!(written.contains("- Mind: small numbers"), "{written}");
    temporary.is_left_empty();
}

#[tokio::test]
async fn a_given_server_is_left_as_it_was() {
    let database = TestDatabase::new(&schema_sql(), async |url| Posthouse::migrate(url).await).await;
    let run = |only: &str| {
        let mut bench = posthouse();
        bench.args(["bench", "--quick", "--repeats", "1", "--only", only, "--json", "--database-url", database.url()]);
        answer(&mut bench, None)
    };
    let report = run("latency,in-flight").fine().json();
    assert_eq!(report["private_server"], false);
    let figures: BTreeMap<_, _> = figures(&report).into_iter().map(|(_, name, figure)| (name, figure)).collect();
    assert!(
        ["latency p50", "latency p99", "p50 until the enqueue was answered", "time", "connections"]
            .iter()
            .all(|name| figures.contains_key(name))
    );
    assert!(figures["connections"]["median"].as_f64().unwrap() >= 1.0, "{report}");
    // Without the floor in the same run there is nothing to compare with.
    assert!(figures.values().all(|figure| figure["floor"].is_null()), "{report}");

    run("enqueue-concurrent,enqueue-bulk").fine();
    run("drane").failed(2, &["drane", "no such scenario", "enqueue-bulk"]);
    let client = database.connect().await;
    let of_its_own = async || {
        let databases = "select count(*) from pg_database where datname like 'posthouse_bench%'";
        client.query_one(databases, &[]).await.unwrap().get::<_, i64>(0)
    };
    assert_eq!(of_its_own().await, 0);

    let mut bench = posthouse();
    let mut bench = Running::start(bench.args(["bench", "--only", "drain", "--database-url", database.url()]));
    let deadline = Instant::now() + Duration::from_secs(60);
    while of_its_own().await < 2 {
        assert!(Instant::now() < deadline, "it never begins");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    bench.signal(Signal::SIGINT);
    assert_eq!(bench.ended().code(), Some(130));
    assert_eq!(of_its_own().await, 0);

    let jobs = client.query_one("select count(*) from posthouse.jobs", &[]).await.unwrap();
    assert_eq!(jobs.get::<_, i64>(0), 0, "the jobs were not in databases of the benchmark's own");
}

/// Scenario, name and values of each figure, in order.
fn figures(report: &Value) -> Vec<(&str, &str, &Value)> {
    let scenarios = report["scenarios"].as_array().unwrap().iter();
    let figures = scenarios.flat_map(|s| s["figures"].as_array().unwrap().iter().map(|f| (&s["name"], f)));
    figures.map(|(scenario, f)| (scenario.as_str().unwrap(), f["name"].as_str().unwrap(), f)).collect()
}
