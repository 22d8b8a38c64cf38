//! The rules of ARCHITECTURE.md that a reader relies on, checked on the text of the code.

mod circles;

use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the library, lower ones first: each imports only from those before it.
const LAYERS: &[&str] = &[
    "error",
    "retry",
    "outcome",
    "job",
    "pause",
    "lease",
    "metrics",
    "signal",
    "store",
    "trace",
    "client",
    "context",
    "admission",
    "handler",
    "event",
    "interrupt",
    "sweep",
    "worker",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every Rust file below a folder, with its path from the root of the project.
fn sources(folder: &str) -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    walk(&root().join(folder), &mut found);
    assert!(!found.is_empty(), "no sources in {folder}");
    let name = |p: &Path| p.strip_prefix(root()).unwrap().display().to_string();
    found.iter().map(|p| (name(p), fs::read_to_string(p).unwrap())).collect()
}

fn all_sources() -> Vec<(String, String)> {
    ["src", "crates/llm/src", "crates/cli/src", "bench/src"].into_iter().flat_map(sources).collect()
}

/// The part of a file that is not its unit tests.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap()
}

#[test]
fn sql_is_spoken_in_the_store_only() {
    let verbs = ["select ", "insert into ", "update posthouse", "delete from ", "create table ", "alter ", "with "];
    let mut found = Vec::new();
    for (path, text) in all_sources() {
        // The private Postgres and the test databases administer servers; they know nothing of jobs. The benchmark looks at
        // the tables from outside, as somebody who watches the server would.
        if ["src/store/", "src/private_postgres/", "src/testing.rs", "bench/src/"].iter().any(|p| path.starts_with(p)) {
            continue;
        }
        for line in without_tests(&text).lines().filter(|l| !l.trim_start().starts_with("//")) {
            let literals = line.split('"').skip(1).step_by(2).map(str::to_lowercase);
            for literal in literals {
                let speaks = verbs.iter().any(|v| literal.starts_with(v)) && literal.contains("posthouse.");
                if speaks {
                    found.push(format!("{path}: {}", line.trim()));
                }
            }
        }
    }
    assert!(found.is_empty(), "SQL outside of src/store:\n{}", found.join("\n"));
}

#[test]
fn arrows_point_down() {
    let mut found = Vec::new();
    for (path, text) in sources("src") {
        let module = path.trim_start_matches("src/").split(['/', '.']).next().unwrap();
        let Some(layer) = LAYERS.iter().position(|l| *l == module) else { continue };
        for above in &LAYERS[layer + 1..] {
            let imports =
                |l: &&str| l.contains(&format!("crate::{above}::")) || l.contains(&format!("crate::{above};"));
            for line in without_tests(&text).lines().filter(|l| !l.trim_start().starts_with("//")).filter(imports) {
                found.push(format!("{path} looks up to {above}: {}", line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_library_knows_no_http_and_no_provider() {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let package = manifest.split("[package]").nth(1).unwrap();
    for name in ["reqwest", "hyper", "axum", "posthouse-llm", "sqlx"] {
        let depends = package.lines().any(|l| l.starts_with(&format!("{name} ")) || l.starts_with(&format!("{name}=")));
        assert!(!depends || name == "sqlx", "the library depends on {name}");
    }
}

#[test]
fn files_stay_short_and_finished() {
    let mut found = Vec::new();
    for (path, text) in all_sources() {
        let lines = without_tests(&text).lines().count();
        if lines > 420 {
            found.push(format!("{path}: {lines} lines; split it by ideas"));
        }
        if !text.starts_with("//!") {
            found.push(format!("{path}: does not say what it is about"));
        }
        for mark in ["TODO", "FIXME", "XXX", "#[ignore", "todo!(", "unimplemented!("] {
            if text.contains(mark) {
                found.push(format!("{path}: {mark}"));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_sql_function_fixes_its_search_path() {
    for entry in fs::read_dir(root().join("sql/functions")).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        for function in text.split("create or replace function ").skip(1) {
            let head = function.split("as $$").next().unwrap();
            let name = head.split('(').next().unwrap();
            assert!(head.contains("set search_path = pg_catalog, pg_temp"), "{name} in {}", path.display());
        }
    }
}
