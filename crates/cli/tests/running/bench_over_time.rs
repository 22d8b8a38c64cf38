//! `bench` with what is measured over time: the chart is drawn, and the report shows it.

use crate::processes::Folder;
use crate::support::{answer, posthouse};

#[test]
fn a_chart_is_drawn_beside_the_report() {
    let (folder, temporary) = (Folder::new("bench-plot"), Folder::new("bench-plot-temporary"));
    let (markdown, plot) = (folder.file("report.md"), folder.file("course.svg"));
    let mut bench = posthouse();
    bench.args(["bench", "--quick", "--only", "pinned-snapshot", "--json"]);
    bench.args(["--markdown", &markdown, "--plot", &plot]).env("TMPDIR", temporary.path());
    let report = answer(&mut bench, None).fine().json();
    let figures = report["scenarios"][0]["figures"].as_array().unwrap();
    let courses = figures.iter().filter_map(|figure| figure["courses"][0]["points"].as_array());
    assert_eq!(courses.filter(|points| !points.is_empty()).count(), 6, "{report}");
    // A long scenario is measured once unless somebody asks for more.
    assert_eq!(report["repeats"], 1);

    let drawn = std::fs::read_to_string(&plot).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.matches("<polyline").count() == 6, "{drawn}");
    let written = std::fs::read_to_string(&markdown).unwrap();
    assert!(written.ends_with("\n![Throughput and latency over time](<course.svg>)\n"), "{written}");
    assert!(written.contains("| pinned-snapshot | moving: dead rows after the vacuum | 0 |"), "{written}");
    temporary.is_left_empty();
}

#[test]
fn what_has_no_course_cannot_be_drawn() {
    let folder = Folder::new("bench-no-plot");
    let plot = folder.file("course.svg");
    for only in [&["--only", "drain,floor"][..], &[]] {
        let mut bench = posthouse();
        let refused = answer(bench.args(["bench", "--plot", &plot]).args(only), None);
        refused.failed(2, &["--plot", "over time", "--only", "pinned-snapshot"]);
    }
    assert!(!std::path::Path::new(&plot).exists());
    let mut bench = posthouse();
    answer(bench.args(["bench", "--all", "--only", "drain"]), None).failed(2, &["--all", "--only"]);
}
