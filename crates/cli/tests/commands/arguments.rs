//! What is said without a database: help, mistakes, completions.

use crate::support::{answer, file, posthouse};

fn run(arguments: &[&str]) -> crate::support::Answer {
    answer(posthouse().args(arguments), None)
}

#[test]
fn help_is_fine_and_a_mistake_is_not() {
    let help = run(&["--help"]).fine();
    for command in [
        "demo",
        "dev",
        "db",
        "enqueue",
        "work",
        "status",
        "job",
        "dead",
        "queue",
        "tenant",
        "gate",
        "sim",
        "completions",
    ] {
        assert!(help.stdout.contains(&format!("\n  {command} ")), "{command} in {}", help.stdout);
    }
    assert!(help.stdout.contains("EXAMPLES:"));
    assert!(run(&["--version"]).fine().stdout.starts_with("posthouse "));
    run(&[]).failed(2, &["Usage: posthouse"]);
    run(&["enqeue"]).failed(2, &["'enqeue'", "'enqueue'"]);
    run(&["job", "list", "--state", "dead"]).failed(2, &["--state", "failed"]);
    run(&["job", "show", "one"]).failed(2, &["<ID>", "'one'", "a whole number, such as 42"]);
    run(&["job", "list", "--limit", "0"]).failed(2, &["--limit <N>", "0 is not in 1.."]);
    run(&["schedule", "next", "@daily", "--count", "0"]).failed(2, &["--count <N>", "0 is not in 1..=1000"]);
    run(&["work", "--exec", "resize"]).failed(2, &["--exec", "KIND=COMMAND"]);
}

#[test]
fn without_a_database_it_says_where_to_name_one() {
    for url in [None, Some(""), Some("  ")] {
        let mut command = posthouse();
        command.arg("status").envs(url.map(|url| ("DATABASE_URL", url)));
        answer(&mut command, None).failed(2, &["DATABASE_URL", "--database-url", "posthouse dev"]);
    }
}

#[test]
fn a_bad_url_says_what_one_looks_like_and_tells_no_password() {
    let bad = run(&["status", "--database-url", "postgres://u:sesame@h:port/d"])
        .failed(2, &["postgres://user:password@host"]);
    assert!(!bad.stderr.contains("sesame"), "{bad:?}");
}

#[test]
fn settings_that_are_not_safe_are_wrong_arguments() {
    let work = ["work", "--exec", "k=true", "--database-url", "postgres://u@127.0.0.1:1/d"];
    for (wrong, named) in [
        ("--lease-ms=499", "lease"),
        ("--concurrency=0", "concurrency"),
        ("--poll-ms=1", "poll"),
        ("--queue=", "queue"),
    ] {
        run(&[&work[..], &[wrong]].concat()).failed(2, &[named]);
    }
}

#[test]
fn a_server_that_is_not_there_is_named_as_the_reason() {
    // Port 1 of this machine: nothing listens there.
    run(&["status", "--database-url", "postgres://u@127.0.0.1:1/d"])
        .failed(1, &["no connection to Postgres at 127.0.0.1:1: ", "posthouse dev"]);
}

#[test]
fn a_payload_that_is_no_json_is_named_before_anything_is_connected() {
    let url = ["--database-url", "postgres://u@127.0.0.1:1/d"];
    let bad = run(&[&["enqueue", "summarize", "{text: hi}"], &url[..]].concat());
    bad.failed(2, &["PAYLOAD", "at line 1 column 2", "posthouse enqueue summarize '{\"text\":"]);
    run(&[&["enqueue", "k", "@/no/such/file"], &url[..]].concat()).failed(1, &["/no/such/file", "PAYLOAD"]);
    run(&[&["enqueue", "k", "@"], &url[..]].concat()).failed(2, &["PAYLOAD @", "the name of a file is missing"]);
    run(&[&["enqueue", "--jsonl", "/no/such/file"], &url[..]].concat()).failed(1, &["cannot read /no/such/file"]);
    run(&["enqueue"]).failed(2, &["<KIND>"]);
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let script = run(&["completions", shell]).fine().stdout;
        for word in ["enqueue", "redrive", "tenant", "pause", "tokens-per-minute", "apply"] {
            assert!(script.contains(word), "{shell}, {word}: {script}");
        }
    }
    run(&["completions", "tcsh"]).failed(2, &["tcsh", "bash"]);
}

#[test]
fn a_mistake_in_the_configuration_names_file_and_key_and_shows_no_key() {
    let path = file("mistakes.toml", "");
    let file_name = path.to_str().unwrap();
    let provider = "[providers.p]\nbase_url = \"http://127.0.0.1:1/v1\"\n";
    let model = "[models.m]\nprovider = \"p\"\n";
    for (text, words) in [
        (format!("{provider}api_key_env = \"0a1b2c3d\"\n{model}"), "providers.p.api_key_env: no environment variable"),
        (format!("{provider}{model}timeouts = {{ attempt_ms = -1 }}"), "line 5, attempt_ms: invalid value"),
        (format!("{provider}{model}[kinds.k]\nuser = \"{{{{ text | nosuch }}}}\""), "kinds.k.user: not a template"),
    ] {
        std::fs::write(&path, text).unwrap();
        let bad = run(&["work", "--config", file_name, "--database-url", "postgres://u@127.0.0.1:1/d"]);
        let bad = bad.failed(1, &[&format!("error: {file_name}: {words}")]);
        assert!(!bad.stderr.contains("0a1b2c3d"), "{bad:?}");
    }
}
