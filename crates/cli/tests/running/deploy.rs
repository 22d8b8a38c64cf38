//! What `deploy/` holds: rules and dashboard ask for metrics that there are, in a language that Prometheus reads; the unit, the
//! manifest and the image agree with the program.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::metrics::{everything, promtool};
use crate::processes::Folder;
use crate::support::{Queue, posthouse};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn deploy(file: &str) -> String {
    fs::read_to_string(root().join("deploy").join(file)).unwrap()
}

/// The queries of all panels, with what Grafana puts in.
fn dashboard_queries() -> Vec<String> {
    let dashboard: Value = serde_json::from_str(&deploy("grafana/posthouse.json")).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let queries = targets.map(|target| target["expr"].as_str().unwrap().replace("$queue", ".*"));
    queries.map(|query| query.replace("$__rate_interval", "5m")).collect()
}

/// Names of ours in a text; those of histograms without their suffix.
fn names(text: &str) -> BTreeSet<String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words
        .filter(|word| word.starts_with("posthouse_"))
        .map(|word| word.trim_end_matches("_bucket").to_owned())
        .collect()
}

#[tokio::test]
async fn rules_and_dashboard_ask_for_metrics_that_there_are() {
    let (queue, folder) = (Queue::new().await, Folder::new("deploy"));
    let (_worker, page, _sim) = everything(&queue, &folder).await;
    let page = page.get("/metrics").body;
    let served: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .map(|line| line.split(' ').next().unwrap().to_owned())
        .collect();
    let asked = [
        names(&dashboard_queries().join("\n")),
        names(&deploy("prometheus/alerts.yml")),
        names(&deploy("prometheus/alerts_test.yml")),
        names(&deploy("kubernetes/keda-prometheus.yaml")),
    ];
    for asked in asked {
        assert!(!asked.is_empty());
        let unknown: Vec<_> = asked.difference(&served).collect();
        assert!(unknown.is_empty(), "nobody serves {unknown:?}; served are {served:#?}");
    }
    // What is served is told in the guide, each name.
    let guide = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let untold: Vec<_> = served.difference(&names(&guide)).cloned().collect();
    assert!(untold.is_empty(), "docs/metrics.md does not tell {untold:?}");
}

#[test]
fn prometheus_reads_the_rules_and_the_queries_of_the_dashboard() {
    let folder = root().join("deploy/prometheus");
    let file = |name: &str| folder.join(name).display().to_string();
    promtool(&["check", "rules", &file("alerts.yml")], "").unwrap();
    promtool(&["test", "rules", &file("alerts_test.yml")], "").unwrap();
    // Every rule is tried.
    let tests = deploy("prometheus/alerts_test.yml");
    for rule in deploy("prometheus/alerts.yml").lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        assert!(tests.contains(&format!("alertname=\"{rule}\", alertstate")), "no test of {rule}");
    }
    let queries = dashboard_queries();
    assert!(queries.len() > 30);
    let rule = |(at, query): (usize, &String)| {
        format!("- record: query:{at}\n    expr: {}\n", serde_json::to_string(query).unwrap())
    };
    let rules: Vec<String> = queries.iter().enumerate().map(rule).collect();
    let made = Folder::new("queries");
    let path = made.file("queries.yml");
    fs::write(&path, format!("groups:\n- name: dashboard\n  rules:\n  {}", rules.join("  "))).unwrap();
    promtool(&["check", "rules", &path], "").unwrap();
}

/// The number behind a word, in the lines of a file that are no comments.
fn number_after(text: &str, word: &str) -> u64 {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let rest = lines
        .filter_map(|line| line.split_once(word))
        .map(|(_, rest)| rest)
        .next()
        .unwrap_or_else(|| panic!("no {word}"));
    let digits = rest.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    digits.split(|letter: char| !letter.is_ascii_digit()).next().unwrap().parse().unwrap()
}

#[test]
fn the_unit_and_the_manifest_leave_a_worker_the_time_that_it_takes() {
    let (unit, manifest) = (deploy("systemd/posthouse-worker.service"), deploy("kubernetes/worker.yaml"));
    for (text, limit) in [(&unit, "TimeoutStopSec="), (&manifest, "terminationGracePeriodSeconds:")] {
        let (grace_ms, limit) = (number_after(text, "--grace-ms"), number_after(text, limit));
        assert!(grace_ms + 5_000 < limit * 1_000, "{grace_ms} ms and {limit} s");
    }
    // Their options are options of the program.
    for text in [unit, manifest, deploy("Dockerfile")] {
        let words = text.split([' ', '"', ',', '[', ']']).filter(|word| word.starts_with("--") && word.len() > 2);
        let help = String::from_utf8(posthouse().args(["work", "--help"]).output().unwrap().stdout).unwrap();
        for option in
            words.filter(|word| !["--", "--release", "--locked", "--package", "--bin", "--yes"].contains(word))
        {
            let is_dockers = ["--mount", "--from", "--no-install"].iter().any(|start| option.starts_with(start));
            assert!(is_dockers || help.contains(option), "{option} is no option of work");
        }
    }
}

#[test]
fn systemd_reads_the_unit() {
    let unit =
        deploy("systemd/posthouse-worker.service").replace("/usr/local/bin/posthouse", env!("CARGO_BIN_EXE_posthouse"));
    let folder = Folder::new("unit");
    let path = folder.file("posthouse-worker.service");
    fs::write(&path, unit).unwrap();
    match Command::new("systemd-analyze").args(["verify", "--man=no", &path]).output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && !said.contains("posthouse-worker.service:"), "{said}");
        }
        // There is no systemd on other systems, where nobody uses the unit either.
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
    }
}

#[test]
fn the_image_is_given_all_that_the_build_needs() {
    let (docker, ignore) = (deploy("Dockerfile"), deploy("Dockerfile.dockerignore"));
    let copied: Vec<&str> = docker
        .lines()
        .filter_map(|line| line.strip_prefix("COPY "))
        .filter(|line| !line.starts_with("--from"))
        .flat_map(|line| line.rsplit_once(' ').unwrap().0.split(' '))
        .collect();
    for path in &copied {
        assert!(root().join(path).exists(), "{path} is not there");
        let is_let_in = ignore.lines().any(|line| line == format!("!{path}"))
            || (path.ends_with(".md") && ignore.contains("!*.md"));
        assert!(is_let_in, "{path} is kept out by Dockerfile.dockerignore");
    }
    // The members of the workspace.
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = manifest.split("members = [").nth(1).unwrap().split(']').next().unwrap();
    for path in members.split('"').filter(|path| path.contains(|c: char| c.is_alphabetic())) {
        let top = path.split('/').next().unwrap();
        assert!(copied.contains(&top), "{top} is not copied");
    }
    assert!(docker.contains("--package posthouse-cli --bin posthouse"));
}
