//! What is measured over time, at sizes that say only whether it works.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use posthouse_bench::options::{Options, Scenario};
use posthouse_bench::plot::svg;
use posthouse_bench::report::Report;

/// On private servers: tests that count the databases of the tests' own server run at the same time.
async fn measured(only: &[Scenario]) -> Report {
    let options =
        Options { database_url: None, only: only.to_vec(), all: false, repeats: None, quick: true, pinned_time: None };
    posthouse_bench::run(options, std::future::pending(), |_| ()).await.unwrap().unwrap()
}

fn medians(report: &Report) -> BTreeMap<&str, f64> {
    let figures = report.scenarios.iter().flat_map(|scenario| &scenario.figures);
    figures.map(|figure| (&*figure.name, figure.median)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_is_deleted_and_a_partition_dropped_beside_the_work() {
    let report = measured(&[Scenario::Retention, Scenario::DropPartition]).await;
    let figures = medians(&report);
    assert!(figures["rows deleted meanwhile"] + figures["partitions dropped meanwhile"] > 0.0, "{figures:?}");
    for name in ["claim p99, with history to without history", "settle p99, beside the drop to alone"] {
        assert!(figures[name] > 0.0, "{figures:?}");
    }
    let gone = figures["gone after the reader's end"];
    assert!(gone > 0.0 && gone < 30.0, "{gone}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_keeps_dead_rows_until_it_is_released() {
    let report = measured(&[Scenario::PinnedSnapshot]).await;
    let figures = medians(&report);
    for run in ["1 tenant", "1,000 tenants", "moving"] {
        let figure = |name: &str| figures[&*format!("{run}: {name}")];
        assert!(figure("throughput") > 100.0, "{run}: {figures:?}");
        for name in ["latency p50", "latency p99"] {
            let (first, last) = (figure(&format!("{name} at first")), figure(&format!("{name} at last")));
            assert!(first > 0.0 && (figure(&format!("{name}, last to first")) - last / first).abs() < 1e-9, "{name}");
        }
        // Each job was claimed and deleted at least.
        assert!(run == "moving" || figure("dead rows at the end") >= figure("throughput") * 4.0, "{run}: {figures:?}");
        assert_eq!(figure("dead rows after the vacuum"), 0.0, "{run}");
        // Where the server's installation can count statements.
        if let Some(claim) = figures.get(&*format!("{run}: mean claim at last")) {
            let buffers =
                ["buffers a claim at last", "buffers a settle at first", "buffers of all statements, per job at last"];
            assert!(*claim > 0.0 && figure("all statements, per job at last") > 0.0, "{figures:?}");
            assert!(buffers.iter().all(|name| figure(name) >= 1.0), "{figures:?}");
        }
    }

    let courses: Vec<_> = report.scenarios[0].figures.iter().flat_map(|figure| &figure.courses).collect();
    let kinds: Vec<_> = courses.iter().map(|course| (course.of, &*course.line)).collect();
    let runs = ["1 tenant", "1,000 tenants", "moving"];
    assert_eq!(kinds, runs.map(|run| [("throughput", run), ("latency p99", run)]).concat());
    assert!(courses.iter().all(|course| !course.points.is_empty() && course.points.iter().all(|p| p.1 >= 0.0)));
    let drawn = svg(&report).unwrap();
    assert_eq!(drawn.matches("<polyline").count(), 6, "{drawn}");
    assert!(report.markdown(Some("course.svg")).contains("(<course.svg>)"));
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_are_timed_at_every_depth_and_from_many_tenants() {
    let report = measured(&[Scenario::Backlog, Scenario::Tenants]).await;
    let figures = medians(&report);
    for depth in ["1000", "2000", "4000", "8000"] {
        let claim = |percent: &str| figures[&*format!("claim {percent} at {depth} jobs")];
        assert!(0.0 < claim("p50") && claim("p50") <= claim("p99"), "{depth}: {figures:?}");
        // Where the server's installation can count them.
        let buffers = figures.get(&*format!("buffers a claim at {depth} jobs"));
        assert!(buffers.is_none_or(|buffers| *buffers >= 100.0), "{depth}: {figures:?}");
    }
    let ratio = figures["claim p99 at 8000 jobs"] / figures["claim p99 at 1000 jobs"];
    assert!((figures["claim p99, largest to smallest"] - ratio).abs() < 1e-9, "{figures:?}");
    for when in ["others just ran empty", "others at rest"] {
        assert!(figures[&*format!("{when}: claim p99, many tenants to one")] > 0.0, "{figures:?}");
    }
    let awake = figures["others at rest: not yet"];
    assert!((0.0..10.0).contains(&awake), "{figures:?}");
    // Two that are not measured over time.
    assert_eq!(svg(&report), None);
}

#[test]
fn long_scenarios_are_left_out_unless_they_are_asked_for() {
    let options = |only: &[Scenario], all| Options {
        database_url: None,
        only: only.to_vec(),
        all,
        repeats: None,
        quick: false,
        pinned_time: None,
    };
    assert!(options(&[], false).scenarios().iter().all(|scenario| !scenario.is_long()));
    assert_eq!(options(&[], true).scenarios(), Scenario::ALL);
    assert_eq!(options(&[Scenario::Backlog], false).scenarios(), [Scenario::Backlog]);
}
