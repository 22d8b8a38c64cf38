//! Gates, tenants and queues: limits set and cleared, closed and opened, and where they are seen.

use posthouse::Outcome;
use serde_json::{Value, json};

use crate::support::{Queue, file};

fn gate(queue: &Queue, name: &str) -> Value {
    let gates = queue.run(&["gate", "list", "--json"]).fine().json();
    gates.as_array().unwrap().iter().find(|gate| gate["name"] == name).cloned().unwrap_or(Value::Null)
}

#[tokio::test]
async fn limits_that_are_not_named_stay_and_none_clears_them() {
    let queue = Queue::new().await;
    assert!(queue.run(&["gate", "list"]).fine().stderr.contains("posthouse gate set model:NAME"));
    let name = "model:small";
    let said = queue.run(&["gate", "set", name, "--running", "40", "--tokens-per-minute", "90000"]).fine();
    assert_eq!(said.stdout, "gate model:small (new): 40 at once, 90000 tokens a minute\n");
    let said = queue.run(&["gate", "set", name, "--money-per-day", "12.50", "--warn-at", "0.8"]).fine();
    let limits = "40 at once, 90000 tokens a minute, 12.5 USD a day, then jobs wait, alert at 0.8";
    assert_eq!(said.stdout, format!("gate model:small: {limits}\n"));
    let set = [
        "gate",
        "set",
        name,
        "--running",
        "none",
        "--when-spent",
        "model:tiny",
        "--requests-per-minute",
        "7",
        "--json",
    ];
    let said = queue.run(&set).fine().json();
    assert_eq!(said, gate(&queue, name));
    for (field, expected) in [
        ("max_running", json!(null)),
        ("requests_per_minute", json!(7)),
        ("tokens_per_minute", json!(90_000)),
        ("money_per_day", json!("12.5")),
        ("when_spent", json!("model:tiny")),
        ("warn_at", json!("0.8")),
        ("closed_until", json!(null)),
    ] {
        assert_eq!(said[field], expected, "{field}");
    }
    let table = queue.run(&["gate", "list"]).fine().stdout;
    assert!(table.starts_with("GATE"), "{table}");
    let words: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(words, ["model:small", "0/7", "0/90000", "0/12.5"]);
    assert_eq!(
        table.lines().next().unwrap().split_whitespace().collect::<Vec<_>>(),
        ["GATE", "REQUESTS/MIN", "TOKENS/MIN", "USD/DAY"]
    );
    queue.run(&["gate", "close", name, "--reason", "a bill"]).fine();
    let table = queue.run(&["gate", "list"]).fine().stdout;
    assert!(table.ends_with("0/12.5\nclosed model:small: until somebody opens it: a bill\n"), "{table}");
    assert_eq!(queue.run(&["gate", "remove", name]).fine().stdout, "gate model:small is removed\n");
    queue.run(&["gate", "remove", name]).failed(1, &["model:small: there is no such gate", "posthouse gate list"]);
    assert_eq!(gate(&queue, name), json!(null));
}

#[tokio::test]
async fn nonsense_is_refused_by_name() {
    let queue = Queue::new().await;
    for (arguments, words) in [
        (&["x", "--running", "0"][..], &["max_running: 0 is not between 1 and 100000", "close the gate"][..]),
        (&["x", "--running", "-1"], &["--running", "whole number"]),
        (&["x", "--running", "100001"], &["max_running"]),
        (&["x", "--requests-per-minute", "1.5"], &["--requests-per-minute", "whole number"]),
        (&["x", "--tokens-per-minute", "99999999999999999999"], &["--tokens-per-minute"]),
        (&["x", "--tokens-per-minute", "0"], &["tokens_per_minute: 0"]),
        (&["x", "--money-per-day", "0"], &["money_per_day: 0 is not above 0"]),
        (&["x", "--money-per-month", "-3"], &["--money-per-month", "such as 12.50"]),
        (&["x", "--money-per-month", "NaN"], &["--money-per-month"]),
        (&["x", "--money-per-day", "5", "--warn-at", "1.1"], &["warn_at: 1.1"]),
        (&["x", "--warn-at", "0.5", "--running", "1"], &["warn_at: needs money_per_day"]),
        (&["x", "--when-spent", "panic"], &["when_spent: 'panic' is not hold, fail or model:NAME"]),
        (&["user:x", "--running", "1"], &["'user:x' is no gate's name", "tenant:T"]),
        (&["endpoint:*", "--running", "1"], &["no gate's name"]),
        (&["", "--running", "1"], &["name: must not be empty"]),
        (&["x"], &["--running"]),
    ] {
        let set = [&["gate", "set"][..], arguments].concat();
        queue.run(&set).failed(2, words);
    }
    assert_eq!(queue.run(&["gate", "list", "--json"]).fine().json(), json!([]));
    queue.run(&["gate", "close", "x", "--for", "0s"]).failed(2, &["--for", "leave it out"]);
    queue.run(&["gate", "close", "x", "--for", "1h", "--until", "tomorrow"]).failed(2, &["--for", "--until"]);
    queue.run(&["gate", "close", "x", "--until", "yesterday"]).failed(2, &["until: ", "is over"]);
    queue.run(&["gate", "close", "x", "--until", "soonish"]).failed(2, &["until: ", "soonish"]);
    queue.run(&["gate", "open", "x"]).failed(1, &["gate x: there is no such gate"]);
    queue.run(&["tenant", "set", "acme", "--weight", "0"]).failed(2, &["weight: 0 is not between 0.01 and 100"]);
    queue.run(&["tenant", "set", "acme", "--weight", "NaN"]).failed(2, &["weight: NaN"]);
    queue.run(&["tenant", "pause", ""]).failed(2, &["name: must not be empty"]);
    queue.run(&["enqueue", "k", "--gate", "queue:a"]).failed(2, &["gates: a job cannot ask for 'queue:a'"]);
    queue.run(&["gate", "set", "x", "--tokens-per-minute", "1000"]).fine();
    queue.run(&["enqueue", "k", "--gate", "x", "--tokens", "1001"]).failed(2, &["tokens", "1000"]);
}

#[tokio::test]
async fn a_closed_gate_holds_its_jobs_and_is_seen_everywhere() {
    let queue = Queue::new().await;
    let id = queue.enqueue(&["sync", "{}", "--gate", "crm"]).to_string();
    let close = ["gate", "close", "crm", "--for", "10m", "--reason", "see the status\u{1b}[31m page"];
    let said = queue.run(&close).fine();
    assert!(said.stdout.starts_with("gate crm is closed until 20"), "{said:?}");
    assert!(said.stdout.contains("(in ") && said.stdout.contains("`posthouse gate open crm`"), "{said:?}");
    assert!(said.stderr.contains("this gate is new"), "{said:?}");
    assert!(!queue.run(&close).fine().stderr.contains("is new"));
    let explained = queue.run(&["job", "explain", &id]).fine().stdout;
    assert!(explained.contains("gate crm is closed by a person: see the status"), "{explained}");
    assert!(explained.contains("(in 9m)") && !explained.contains('\u{1b}'), "{explained}");
    let status = queue.run(&["status"]).fine().stdout;
    assert!(status.contains("closed crm: opens in 9m: see the status"), "{status}");
    assert_eq!(queue.run(&["status", "--json"]).fine().json()["gates"][0]["closed_by"], "person");
    let opened = queue.run(&["gate", "open", "crm"]).fine().stdout;
    assert_eq!(opened, "gate crm is open\n");
    assert_eq!(queue.run(&["gate", "open", "crm"]).fine().stdout, "gate crm was open already\n");
    assert_eq!(queue.run(&["status", "--json"]).fine().json()["gates"], json!([]));
    queue.work("sync", || Outcome::done(&json!(1))).await;
    assert_eq!(queue.run(&["job", "show", &id, "--json"]).fine().json()["state"], "done");
}

#[tokio::test]
async fn tenants_and_queues_are_paused_and_resumed() {
    let queue = Queue::new().await;
    assert!(queue.run(&["tenant", "list"]).fine().stderr.contains("no tenants yet"));
    let held = queue.enqueue(&["k", "{}", "--tenant", "acme", "--queue", "mail"]).to_string();
    queue.enqueue(&["k", "{}", "--tenant", "zoo", "--queue", "mail"]);
    assert_eq!(queue.run(&["tenant", "set", "big", "--weight", "2.5"]).fine().stdout, "tenant big has weight 2.5\n");
    let paused = queue.run(&["tenant", "pause", "acme", "--reason", "complaints"]).fine();
    let expected = "tenant acme is paused until somebody resumes it; what runs goes on\n`posthouse tenant resume acme` ends that\n";
    assert_eq!((&*paused.stdout, &*paused.stderr), (expected, ""));
    let json = queue.run(&["queue", "pause", "mail", "--until", "2100-01-01 08:00 UTC", "--json"]).fine().json();
    assert_eq!(json["name"], "queue:mail");
    assert!(json["closed_until"].as_str().unwrap().starts_with("2100-01-01T08:00:00"), "{json}");
    queue.run(&["queue", "pause", "empty"]).fine();
    let tenants = queue.run(&["tenant", "list", "--json"]).fine().json();
    let row =
        |n: usize| (&tenants[n]["tenant"], &tenants[n]["weight"], &tenants[n]["due"], &tenants[n]["closed_until"]);
    assert_eq!(row(0), (&json!("acme"), &json!(1.0), &json!(1), &json!("infinity")));
    assert_eq!(row(1), (&json!("big"), &json!(2.5), &json!(0), &json!(null)));
    assert_eq!(row(2), (&json!("zoo"), &json!(1.0), &json!(1), &json!(null)));
    let text = queue.run(&["tenant", "list"]).fine().stdout;
    assert!(text.lines().nth(1).unwrap().ends_with("until somebody resumes it: complaints"), "{text}");
    let queues = queue.run(&["queue", "list", "--json"]).fine().json();
    let names: Vec<_> = queues.as_array().unwrap().iter().map(|queue| queue["queue"].as_str().unwrap()).collect();
    assert_eq!(names, ["empty", "mail"]);
    let text = queue.run(&["queue", "list"]).fine().stdout;
    assert!(text.lines().nth(2).unwrap().contains("opens in "), "{text}");
    let explained = queue.run(&["job", "explain", &held]).fine().stdout;
    for line in [
        "gate queue:mail is closed by a person, until 2100",
        "gate tenant:acme is closed by a person, until somebody opens it: complaints\n",
    ] {
        assert!(explained.contains(line), "{explained}");
    }
    assert_eq!(queue.run(&["tenant", "resume", "acme"]).fine().stdout, "tenant acme goes on\n");
    assert_eq!(queue.run(&["tenant", "resume", "acme"]).fine().stdout, "tenant acme was not paused\n");
    assert_eq!(
        queue.run(&["queue", "resume", "mail", "--json"]).fine().json(),
        json!({ "name": "queue:mail", "opened": true })
    );
    queue.work_on("mail", "k", || Outcome::done(&json!(1))).await;
    queue.run(&["tenant", "set", "big", "--weight", "1"]).fine();
    let tenants = queue.run(&["tenant", "list", "--json"]).fine().json();
    assert_eq!(tenants.as_array().unwrap().len(), 2, "{tenants}");
}

#[tokio::test]
async fn jobs_name_their_gates_and_tokens_one_by_one_and_in_bulk() {
    let queue = Queue::new().await;
    for gate in ["a", "b", "c"] {
        queue.run(&["gate", "set", gate, "--tokens-per-minute", "1000"]).fine();
        queue.run(&["gate", "close", gate]).fine();
    }
    let one = queue.enqueue(&["k", "{}", "--gate", "b", "--gate", "a", "--tokens", "700"]);
    let lines = "{\"kind\":\"k\"}\n{\"kind\":\"k\",\"gates\":[\"c\"],\"tokens\":5}\n{\"kind\":\"k\",\"gates\":[]}\n";
    queue.run_with_stdin(&["enqueue", "--jsonl", "-", "--gate", "a", "--tokens", "7"], lines).fine();
    for (id, held) in [(one, &["gate a", "gate b"][..]), (one + 1, &["gate a"]), (one + 2, &["gate c"]), (one + 3, &[])]
    {
        let reasons = queue.run(&["job", "explain", &id.to_string(), "--json"]).fine().json();
        let reasons: Vec<_> =
            reasons.as_array().unwrap().iter().map(|reason| reason["reason"].as_str().unwrap()).collect();
        let gates: Vec<_> =
            reasons.iter().filter_map(|reason| reason.split_once(" is closed")).map(|(gate, _)| gate).collect();
        assert_eq!(gates, held, "job {id}: {reasons:?}");
    }
    let too_many =
        queue.run_with_stdin(&["enqueue", "--jsonl", "-"], "{\"kind\":\"k\",\"gates\":[\"a\"],\"tokens\":1001}");
    too_many.failed(1, &["line 1: tokens: 1001 is more than gate 'a' lets through in a minute"]);
}

#[tokio::test]
async fn the_status_shows_the_worst_gates_first_and_how_many_more_there_are() {
    let queue = Queue::new().await;
    for (gate, limit) in [("crm", "2"), ("mail", "4"), ("idle", "9"), ("tenant:*", "1")] {
        queue.run(&["gate", "set", gate, "--running", limit]).fine();
    }
    queue.run(&["gate", "set", "daily", "--money-per-day", "0.5"]).fine();
    queue.run(&["gate", "set", "fast", "--requests-per-minute", "10"]).fine();
    queue.run(&["gate", "close", "endpoint:p/m"]).fine();
    queue
        .sql(
            "select posthouse.close_gate('tenant:t' || n) from generate_series(1, 150) n;
             select posthouse.register_worker('00000000-0000-0000-0000-000000000001', array['default'], array['k'], 99, 60000, '{}');
             select posthouse.enqueue('k', tenant => 'a' || n, gates => case when n <= 4 then array['mail'] else array['crm'] end)
             from generate_series(1, 6) n;
             select posthouse.claim('00000000-0000-0000-0000-000000000001', 1, 99);
             insert into posthouse.gate (name, max_running) values ('serial:q', 1);
             insert into posthouse.gate_state (gate_id, member, seq, job_ids, fences)
               select g.id, 'a1', 1, array[j.id], array[j.fence::int] from posthouse.gate g, posthouse.job j
               where g.name = 'serial:q' and j.state = 'running' limit 1;
             insert into posthouse.gate_state (gate_id, member, seq, day, spent_day)
               select g.id, '', 1000, (clock_timestamp() at time zone 'UTC')::date, 1 from posthouse.gate g where g.name = 'daily';
             insert into posthouse.gate_state (gate_id, member, seq, seconds, requests, tokens)
               select g.id, '', 1000, array[extract(epoch from clock_timestamp())::bigint], array[9], array[0]
               from posthouse.gate g where g.name = 'fast'",
        )
        .await;
    let status = queue.run(&["status", "--json"]).fine().json();
    let gates = status["gates"].as_array().unwrap();
    let names: Vec<&str> = gates.iter().map(|gate| gate["name"].as_str().unwrap()).collect();
    assert_eq!(names[..6], ["endpoint:p/m", "daily", "crm", "fast", "mail", "tenant:t1"]);
    assert_eq!((names.len(), &status["gates_total"]), (100, &json!(5 + 150 + 6)));
    let text = queue.run(&["status"]).fine().stdout;
    assert!(text.contains("\n… and 131 more; `posthouse gate list --json` has all\n"), "{text}");
    assert!(!text.contains("serial:q") && !text.contains("idle"), "{text}");
}

#[tokio::test]
async fn the_status_shows_what_is_full() {
    let queue = Queue::new().await;
    queue.run(&["gate", "set", "tenant:*", "--running", "1", "--requests-per-minute", "100"]).fine();
    queue.run(&["gate", "set", "crm", "--running", "5"]).fine();
    for _ in 0..2 {
        queue.enqueue(&["k", "{}", "--tenant", "acme", "--gate", "crm"]);
    }
    queue
        .sql(
            "select posthouse.register_worker('00000000-0000-0000-0000-000000000001', array['default'], array['k'], 10, 60000, '{}');
             select posthouse.claim('00000000-0000-0000-0000-000000000001', 1, 10)",
        )
        .await;
    let status = queue.run(&["status"]).fine().stdout;
    assert!(status.contains("\nfull tenant:* (acme): running 1/1, requests/min 1/100\n"), "{status}");
    assert!(!status.contains("crm"), "{status}");
    let explained = queue.run(&["job", "explain", "2"]).fine().stdout;
    assert_eq!(explained, "job 2 queued: gate tenant:* (acme) is full: 1 of 1 run\n");
    let table = queue.run(&["gate", "list"]).fine().stdout;
    let words: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[1..], [vec!["crm", "1/5"], vec!["tenant:*", "(acme)", "1/1", "1/100"]]);
}

#[tokio::test]
async fn a_file_declares_gates() {
    let queue = Queue::new().await;
    let text =
        "[gates.\"model:small\"]\nmax_running = 40\nmoney_per_day = \"12.50\"\n[gates.crm]\nrequests_per_minute = 7\n";
    let path = file("gates.toml", text);
    let config = path.to_str().unwrap();
    let apply = ["gate", "apply", "--config", config];
    queue.run(&["gate", "set", "model:small", "--running", "9", "--tokens-per-minute", "5"]).fine();
    queue.run(&["gate", "close", "model:small"]).fine();
    let said = queue.run(&apply).fine().stdout;
    assert_eq!(
        said,
        "gate crm (new): 7 requests a minute\ngate model:small (changed): 40 at once, 12.5 USD a day, then jobs wait\n"
    );
    // Exactly what stands there, and still closed.
    let small = gate(&queue, "model:small");
    assert_eq!((&small["max_running"], &small["tokens_per_minute"]), (&json!(40), &json!(null)));
    assert_eq!(small["closed_until"], "infinity");
    let again = queue.run(&[&apply[..], &["--json"]].concat()).fine().json();
    let same = |name: &str| json!({ "name": name, "changed": false, "new": false });
    assert_eq!(again, json!([same("crm"), same("model:small")]));
    for (text, code, words) in [
        ("[gates.crm]\nmax_running = 0\n", 1, &["gates.crm: max_running: 0 is not between"][..]),
        ("[gates.\"user:x\"]\n", 1, &["gates.user:x: no name for a gate"]),
        ("[gates.crm]\nrunning = 3\n", 1, &["unknown field `running`"]),
        ("[alerts]\nquiet_ms = 1\n", 1, &["declares no gates", "max_running = 40"]),
    ] {
        std::fs::write(&path, text).unwrap();
        queue.run(&apply).failed(code, &[&[config], words].concat());
    }
    queue.run(&["gate", "apply", "--config", "/no/such/file"]).failed(1, &["/no/such/file"]);
}
