//! A worker and its gates: changed while it runs, and those that its configuration declares.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::processes::{Folder, Running, eventually};
use crate::support::{Queue, answer, posthouse};

fn state(queue: &Queue, id: i64) -> String {
    queue.run(&["job", "show", &id.to_string(), "--json"]).fine().json()["state"].as_str().unwrap().to_owned()
}

fn gate(queue: &Queue, name: &str) -> Value {
    let gates = queue.run(&["gate", "list", "--json"]).fine().json();
    gates.as_array().unwrap().iter().find(|gate| gate["name"] == name).unwrap().clone()
}

fn waits_for(queue: &Queue, id: i64) -> String {
    queue.run(&["job", "explain", &id.to_string()]).fine().stdout
}

/// Most programs at once, by the notes of their starts and ends.
fn most(notes: &str) -> i32 {
    let (mut now, mut most) = (0, 0);
    for note in notes.lines() {
        now += if note == "start" { 1 } else { -1 };
        most = most.max(now);
    }
    most
}

#[tokio::test]
async fn a_worker_heeds_a_gate_that_is_changed_while_it_runs() {
    let (queue, folder) = (Queue::new().await, Folder::new("gates"));
    let (notes, go) = (folder.file("notes"), folder.file("go"));
    queue.run(&["gate", "set", "crm", "--running", "1"]).fine();
    let jobs: Vec<i64> = (0..8).map(|_| queue.enqueue(&["k", "{}", "--gate", "crm"])).collect();
    let exec = format!("k=echo start >> {notes}; while ! test -e {go}; do sleep 0.05; done; echo end >> {notes}");
    let mut worker =
        queue.command(&["work", "--poll-ms", "100", "--concurrency", "20", "--exec", &exec, "--exec", "free=true"]);
    let worker = Running::start(&mut worker);
    eventually("one runs", || gate(&queue, "crm")["running"] == 1);
    // The worker has slots for all, and takes what no gate holds.
    let free = queue.enqueue(&["free", "{}"]);
    worker.line(&format!("job {free} done"));
    assert_eq!(gate(&queue, "crm")["running"], 1);
    assert!(waits_for(&queue, jobs[7]).contains("gate crm is full: 1 of 1 run"));
    queue.run(&["gate", "set", "crm", "--running", "3"]).fine();
    eventually("three run", || gate(&queue, "crm")["running"] == 3);
    queue.run(&["gate", "close", "crm", "--reason", "see the status page"]).fine();
    fs::write(&go, "").unwrap();
    eventually("those that ran go on to their end", || gate(&queue, "crm")["running"] == 0);
    let free = queue.enqueue(&["free", "{}"]);
    worker.line(&format!("job {free} done"));
    let states: Vec<String> = jobs.iter().map(|id| state(&queue, *id)).collect();
    assert_eq!(states.iter().filter(|state| *state == "done").count(), 3, "{states:?}");
    assert_eq!(states.iter().filter(|state| *state == "queued").count(), 5, "{states:?}");
    assert!(waits_for(&queue, jobs[7]).contains("closed by a person, until somebody opens it: see the status page"));
    queue.run(&["gate", "open", "crm"]).fine();
    eventually("all end", || jobs.iter().all(|id| state(&queue, *id) == "done"));
    let notes = fs::read_to_string(&notes).unwrap();
    assert_eq!((notes.lines().count(), most(&notes)), (16, 3), "{notes}");
}

#[tokio::test]
async fn a_worker_makes_its_models_kinds_and_gates_known_before_it_claims() {
    let (queue, folder) = (Queue::new().await, Folder::new("known"));
    let sim = Running::start(posthouse().args(["sim", "--json", "--latency", "200ms"]));
    let ready: Value = serde_json::from_str(&sim.line("base_url")).unwrap();
    let text = format!(
        "[providers.sim]\nbase_url = {}\n[models.small]\nprovider = \"sim\"\nmodel = \"up\"\nmax_output_tokens = 50\n\
         [gates.\"model:small\"]\nmax_running = 1\nmoney_per_day = 9.50\n",
        ready["base_url"]
    );
    let config = folder.file("posthouse.toml");
    fs::write(&config, text).unwrap();
    let jobs: Vec<i64> =
        (0..4).map(|i| queue.enqueue(&["summarize", &format!("{{\"text\":\"Text {i}.\"}}")])).collect();
    let work = ["work", "--config", &config, "--until-empty"];
    let said = queue.run(&work).fine();
    assert!(said.stdout.contains("ended: 4 done\n"), "{said:?}");
    assert_eq!(said.stderr, "");
    queue
        .sql(
            "do $$ begin
               assert (select endpoints from posthouse.route where model = 'small') = array['sim/up'];
               assert (select (gates, max_output_tokens) from posthouse.kind where name = 'summarize') = (array['model:small'], 50);
             end $$",
        )
        .await;
    // The limit held from the first job on: no attempt began before another one had ended.
    let mut spans: Vec<(String, String)> = jobs
        .iter()
        .map(|id| {
            let job = queue.run(&["job", "show", &id.to_string(), "--json"]).fine().json();
            (job["started_at"].as_str().unwrap().to_owned(), job["finished_at"].as_str().unwrap().to_owned())
        })
        .collect();
    spans.sort();
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{spans:#?}");
    assert_eq!(gate(&queue, "model:small")["money_per_day"], "9.5");
    // What somebody set since then stands, and the worker says so.
    queue.run(&["gate", "set", "model:small", "--running", "2"]).fine();
    let said = queue.run(&work).fine();
    assert!(
        said.stderr.contains(&format!("model:small; they hold, until `posthouse gate apply --config {config}`")),
        "{said:?}"
    );
    assert_eq!(gate(&queue, "model:small")["max_running"], 2);
    queue.run(&["gate", "apply", "--config", &config]).fine();
    assert_eq!(gate(&queue, "model:small")["max_running"], json!(1));
    // A limit that cannot be is named with its file, and nothing is run.
    fs::write(&config, fs::read_to_string(&config).unwrap() + "[gates.crm]\nmax_running = 0\n").unwrap();
    queue.run(&work).failed(1, &[&config, "gates.crm: max_running: 0 is not between 1 and 100000"]);
}

#[tokio::test]
async fn a_program_is_told_which_model_to_use_when_a_budget_is_spent() {
    let queue = Queue::new().await;
    let set = ["gate", "set", "tenant:default", "--money-per-day", "1", "--when-spent", "model:tiny"];
    queue.run(&set).fine();
    let work = ["work", "--until-empty", "--exec", "k=echo \"model ${POSTHOUSE_MODEL-its own}\""];
    let mut results = Vec::new();
    for spent in ["0.99", "1.00"] {
        queue
            .sql(&format!(
                "insert into posthouse.gate_state (gate_id, member, seq, day, month, spent_day, spent_month)
                 select id, '', (select coalesce(max(seq), 0) + 1 from posthouse.gate_state), (now() at time zone 'UTC')::date,
                   date_trunc('month', now() at time zone 'UTC')::date, {spent}, {spent}
                 from posthouse.gate where name = 'tenant:default'"
            ))
            .await;
        let id = queue.enqueue(&["k", "{}"]);
        queue.run(&work).fine();
        results.push(queue.run(&["job", "show", &id.to_string(), "--json"]).fine().json()["result"].clone());
    }
    assert_eq!(results, ["model its own", "model tiny"]);
    let status = queue.run(&["status"]).fine().stdout;
    assert!(status.contains("full tenant:default: spent 1 of 1 USD today, jobs use model tiny\n"), "{status}");
}

#[tokio::test]
async fn a_worker_that_may_not_set_gates_says_so_and_works() {
    let (queue, folder) = (Queue::new().await, Folder::new("may-not"));
    queue.run(&["db", "isolate"]).fine();
    let login = format!("gates_{}", std::process::id());
    queue.sql(&format!("create role {login} login password 'sesame' in role posthouse_worker")).await;
    let id = queue.enqueue(&["k", "{}"]);
    let config = folder.file("posthouse.toml");
    fs::write(&config, "[gates.crm]\nmax_running = 1\n").unwrap();
    let theirs = format!("postgres://{login}:sesame@{}", queue.url().rsplit_once('@').unwrap().1);
    let work = ["work", "--until-empty", "--exec", "k=true", "--config", &config, "--database-url", &theirs];
    let said = queue.run(&work).fine();
    assert!(said.stderr.contains(&format!("posthouse gate apply --config {config}")), "{said:?}");
    assert!(said.stdout.contains(&format!("job {id} done")), "{said:?}");
}

/// The blocks of a language in a page, one after the other.
fn blocks(page: &str, language: &str) -> String {
    page.split(&format!("```{language}\n")).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

#[tokio::test]
async fn the_guide_works_as_it_stands() {
    let (queue, folder) = (Queue::new().await, Folder::new("guide"));
    let page = include_str!("../../../../docs/gates.md");
    let sim = Running::start(posthouse().args(["sim", "--json"]));
    let ready: Value = serde_json::from_str(&sim.line("base_url")).unwrap();
    let script = blocks(page, "sh").replace("http://127.0.0.1:4010/v1", ready["base_url"].as_str().unwrap());
    assert!(script.contains("posthouse gate set"), "{script}");
    let of_queue = queue.command(&[]);
    let binaries = Path::new(of_queue.get_program()).parent().unwrap().display();
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &script]).current_dir(folder.path()).env("DATABASE_URL", queue.url());
    // As a person sees it, though no terminal is there.
    shell.env("PATH", format!("{binaries}:{}", std::env::var("PATH").unwrap())).env("POSTHOUSE_LOG_FORMAT", "text");
    let said = answer(&mut shell, None).fine().stdout;
    for line in [
        "gate model:small (new): 4 at once, 120 requests a minute, 20000 tokens a minute\n",
        "ended: 6 done\n",
        "job 7 queued: gate model:small is closed by a person: see the status page, until ",
        "\nclosed model:small: opens in ",
        "tenant acme goes on\n",
        "job 8 queued\n",
    ] {
        assert!(said.contains(line), "no {line:?} in {said}");
    }
    queue.sql(&blocks(page, "sql")).await;
    let config = folder.file("gates.toml");
    fs::write(&config, blocks(page, "toml")).unwrap();
    let applied = queue.run(&["gate", "apply", "--config", &config]).fine().stdout;
    assert!(applied.contains("gate tenant:* (changed): 5 at once\n"), "{applied}");
}
