//! `bench` with workers in processes of their own, and with jobs of other shapes: every figure is there and can be true. How
//! fast it was is not looked at.

use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::processes::{Folder, Running, eventually, runs};
use crate::support::{answer, posthouse};

/// What a quick run says about these scenarios.
struct Report(Value);

impl Report {
    fn of(name: &str, scenarios: &str) -> Self {
        let temporary = Folder::new(name);
        let mut bench = posthouse();
        bench.args(["bench", "--quick", "--repeats", "1", "--json", "--only", scenarios]);
        let report = answer(bench.env("TMPDIR", temporary.path()), None).fine().json();
        temporary.is_left_empty();
        Self(report)
    }

    /// A figure of a scenario, which must be there.
    #[track_caller]
    fn figure(&self, scenario: &str, name: &str) -> &Value {
        let scenario = self.0["scenarios"].as_array().unwrap().iter().find(|s| s["name"] == scenario).unwrap();
        let figures = scenario["figures"].as_array().unwrap();
        figures.iter().find(|figure| figure["name"] == name).unwrap_or_else(|| panic!("no {name:?} in {figures:#?}"))
    }

    #[track_caller]
    fn median(&self, scenario: &str, name: &str) -> f64 {
        self.figure(scenario, name)["median"].as_f64().unwrap()
    }
}

#[test]
fn workers_are_measured_in_processes_of_their_own() {
    let report = Report::of("bench-processes", "floor,drain,drain-multi,in-flight,in-flight-10k");
    let done = report.figure("drain-multi", "done");
    assert_eq!(done["floor"]["figure"], "claimed and settled");
    assert_eq!(done["other"]["figure"], "drain: done");
    let ratio = done["median"].as_f64().unwrap() / report.median("drain", "done");
    assert!((done["other"]["ratio"].as_f64().unwrap() - ratio).abs() < 1e-9, "{done}");

    for scenario in ["in-flight", "in-flight-10k"] {
        let median = |name| report.median(scenario, name);
        // The jobs of a quick run take half a second; all at once, they take less than two after another.
        assert!((0.5..30.0).contains(&median("time")), "{scenario}: {}", median("time"));
        assert!((median("time over the jobs' own") - median("time") / 0.5).abs() < 1e-9, "{scenario}");
        assert!((1.0..=5.0).contains(&median("connections")), "{scenario}: {}", median("connections"));
        // A process needs some memory; this one is not the benchmark, but it is nothing small either.
        assert!((1.0..500.0).contains(&median("peak memory of the process")), "{scenario}");
    }
}

#[test]
fn more_workers_are_compared_with_one() {
    let report = Report::of("bench-scaling", "scaling");
    let rate = |workers: &str| report.median("scaling", &format!("done, {workers}"));
    // 20 slots and jobs of 100 ms: no worker does more than 200 jobs a second.
    assert!((1.0..=200.0).contains(&rate("1 worker")), "{}", rate("1 worker"));
    for (workers, number) in [("2 workers", 2.0), ("4 workers", 4.0), ("10 workers", 10.0)] {
        assert!((1.0..=200.0 * number).contains(&rate(workers)), "{workers}: {}", rate(workers));
        let linear = report.median("scaling", &format!("of linear, {workers}"));
        assert!((linear - rate(workers) / (number * rate("1 worker"))).abs() < 1e-9, "{workers}: {linear}");
    }
}

#[test]
fn calls_of_a_model_are_made_at_once() {
    let report = Report::of("bench-llm", "llm");
    let time = report.median("llm", "time");
    // 200 calls of half a second: one after another they would take longer than this.
    assert!((0.5..60.0).contains(&time), "{time}");
    assert!((report.median("llm", "time over the calls' own") - time / 0.5).abs() < 1e-9, "{time}");
    let memory = report.median("llm", "memory a call");
    assert!((1.0..1_000.0).contains(&memory), "{memory}");
}

#[test]
fn a_tenant_waits_alone_and_beside_a_backlog() {
    let report = Report::of("bench-fair", "fair");
    for percent in ["p50", "p99"] {
        let median = |name| report.median("fair", &format!("{name} {percent}"));
        let (alone, beside) = (median("wait alone"), median("wait beside a backlog"));
        // A line of 10,000 jobs takes ten seconds at the least; who stands at its end waits longer than this.
        assert!(0.0 < alone && alone < 10_000.0 && 0.0 < beside && beside < 10_000.0, "{percent}: {alone}, {beside}");
        assert!((median("times as long") - beside / alone).abs() < 1e-9, "{percent}");
    }
    assert!(report.median("fair", "wait alone p50") <= report.median("fair", "wait alone p99"));
}

#[test]
fn a_gate_is_measured_beside_slots_and_across_processes() {
    let report = Report::of("bench-gated", "gated,rates");
    let median = |name: &str| report.median("gated", name);
    for jobs in ["no-op", "50 ms"] {
        let (slots, gated) =
            (median(&format!("{jobs}: done by 40 slots")), median(&format!("{jobs}: done behind a gate of 40")));
        assert!((median(&format!("{jobs}: gate to slots")) - gated / slots).abs() < 1e-9, "{jobs}: {slots}, {gated}");
    }
    // What holds on any machine: never one too many, and no more than one request above the limit.
    assert!(median("4 processes: most at once, of 40") <= 40.0);
    let average = median("4 processes: at once on average, of 40");
    assert!(average > 20.0 && average <= 40.0, "{average}");
    let above = report.median("rates", "tokens in the worst minute, above the limit");
    assert!(above <= report.median("rates", "tokens of the largest request"), "{above}");
    assert!(report.median("rates", "tokens in the worst minute") > 0.0);
}

#[test]
fn payloads_of_every_size_are_counted_in_jobs_and_bytes() {
    let report = Report::of("bench-large", "large-payload");
    for (size, bytes) in [("0.2 KB", 200.0), ("1 KB", 1e3), ("20 KB", 2e4), ("200 KB", 2e5)] {
        for what in ["enqueued", "done"] {
            let median = |more: &str| report.median("large-payload", &format!("{size}: {what}{more}"));
            assert!(median("") > 0.0, "{size}, {what}");
            let megabytes = median("") * bytes / 1e6;
            assert!((median(", payload") / megabytes - 1.0).abs() < 1e-9, "{size}, {what}");
        }
        // What comes in is written at least once, if shorter; what is done costs a row or two, and not its payload again.
        let enqueued = report.median("large-payload", &format!("{size}: enqueued, WAL a job"));
        assert!((bytes / 10.0..bytes + 10_000.0).contains(&enqueued), "{size}: {enqueued}");
        assert!(report.median("large-payload", &format!("{size}: done, WAL a job")) > 100.0, "{size}");
    }
}

#[test]
fn no_worker_outlives_a_killed_benchmark() {
    let temporary = Folder::new("bench-killed");
    let (mut bench, parts) = with_a_worker(&temporary);
    bench.signal(Signal::SIGKILL);
    bench.ended();
    eventually("the worker ends", || !parts.iter().any(|pid| runs(*pid)));
    temporary.is_left_empty();
}

#[test]
fn a_benchmark_whose_worker_is_killed_comes_to_nothing() {
    let temporary = Folder::new("bench-worker-killed");
    let (mut bench, parts) = with_a_worker(&temporary);
    for part in parts {
        kill(Pid::from_raw(part), Signal::SIGKILL).ok();
    }
    assert_eq!(bench.ended().code(), Some(1));
    temporary.is_left_empty();
}

#[test]
fn a_part_that_is_told_nonsense_says_so() {
    let part = |input: &str| answer(posthouse().arg("bench-part"), Some(input.as_bytes()));
    part("{\"Sing\":1}\n").failed(1, &["bench-part: its input", "Sing", "posthouse bench"]);
    // Whom it was to work for is gone before it said anything.
    part("").fine();
}

/// A benchmark whose first worker, a process of its own, has been started.
fn with_a_worker(temporary: &Folder) -> (Running, Vec<i32>) {
    let mut bench = posthouse();
    bench.args(["bench", "--only", "in-flight"]).env("TMPDIR", temporary.path());
    let bench = Running::start(&mut bench);
    let mut parts = Vec::new();
    eventually("a worker is started", || {
        parts = parts_of(bench.pid());
        !parts.is_empty()
    });
    (bench, parts)
}

/// The processes that a benchmark has started as parts of itself.
fn parts_of(benchmark: u32) -> Vec<i32> {
    let all = Command::new("ps").args(["-eo", "pid=,ppid=,args="]).output().unwrap();
    let all = String::from_utf8_lossy(&all.stdout).into_owned();
    let part = |line: &str| {
        let [pid, parent, _, argument] = line.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        (parent == benchmark.to_string() && argument == "bench-part").then(|| pid.parse().unwrap())
    };
    all.lines().filter_map(part).collect()
}
