//! `work --metrics-listen`: what Prometheus reads, checked by its own tool, and probes that tell the truth.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use posthouse::testing::TestDatabase;
use serde_json::Value;

use crate::line::Line;
use crate::processes::{Folder, Running, eventually};
use crate::support::{Queue, posthouse};

/// What an address answered: the status, the headers, the body.
pub(crate) struct Reply {
    pub(crate) status: u16,
    head: String,
    pub(crate) body: String,
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// Asks a server that said `metrics at URL`, or told it as JSON.
pub(crate) struct Page {
    address: String,
}

impl Page {
    pub(crate) fn of(worker: &Running) -> Self {
        let line = worker.line("/metrics");
        let url = line.split("http://").nth(1).unwrap();
        Self { address: url.split('/').next().unwrap().to_owned() }
    }

    pub(crate) fn ask(&self, request: &str) -> Reply {
        let mut connection = TcpStream::connect(&self.address).unwrap();
        connection.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        connection.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Reply { status, head: head.to_owned(), body: body.to_owned() }
    }

    pub(crate) fn get(&self, path: &str) -> Reply {
        self.ask(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"))
    }

    /// The samples, by name and labels.
    pub(crate) fn samples(&self) -> BTreeMap<String, f64> {
        let lines = self.get("/metrics").body;
        let samples = lines.lines().filter(|line| !line.starts_with('#'));
        samples
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(name, n)| (name.to_owned(), n.parse().unwrap()))
            .collect()
    }
}

/// Runs Prometheus' own tool; answers with what it said if it was not content.
pub(crate) fn promtool(arguments: &[&str], stdin: &str) -> Result<String, String> {
    let mut command = Command::new("promtool");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("promtool is here: install the package `prometheus`, as ./test.sh does");
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).ok();
    let output = child.wait_with_output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() { Ok(said) } else { Err(said) }
}

/// A worker with programs and prompt kinds, that has had jobs of every sort; its page shows everything there is to show.
pub(crate) async fn everything(queue: &Queue, folder: &Folder) -> (Running, Page, Running) {
    let sim = Running::start(posthouse().args(["sim", "--json", "--fault", "first=1,do=429,retry_after=1s"]));
    let ready: Value = serde_json::from_str(&sim.line("base_url")).unwrap();
    let config = folder.file("posthouse.toml");
    let text = format!(
        "[providers.sim]\nbase_url = {}\n[models.small]\nprovider = \"sim\"\nmodel = \"up\"\nprice = {{ input = \"1\", output = \"1\" }}\n\
         [gates.crm]\nmax_running = 4\n",
        ready["base_url"]
    );
    std::fs::write(&config, text).unwrap();
    queue.sql("update posthouse.sweep set every = '1 second' where name in ('gauges', 'counts')").await;
    queue.enqueue(&["good", "{}", "--tenant", "acme-corp"]);
    queue.enqueue(&["bad", "{}", "--max-attempts", "1"]);
    queue.enqueue(&["summarize", "{\"text\": \"a text\"}"]);
    queue.enqueue(&["good", "{}", "--delay", "2h", "--queue", "slow"]);
    queue.run(&["schedule", "set", "yearly", "@yearly", "good"]).fine();
    let work = [
        "work",
        "--config",
        &config,
        "--metrics-listen",
        "0",
        "--poll-ms",
        "100",
        "--queue",
        "default",
        "--queue",
        "slow",
    ];
    let mut command = queue.command(&work);
    command.args(["--exec", "good=echo 1", "--exec", "bad=echo wrong >&2; exit 65"]);
    let worker = Running::start(&mut command);
    let page = Page::of(&worker);
    eventually("all is counted", || {
        let samples = page.samples();
        let done = |kind: &str| {
            let name =
                format!("posthouse_attempts_settled_total{{queue=\"default\",kind=\"{kind}\",outcome=\"done\"}}");
            samples.get(&name).is_some_and(|n| *n >= 1.0)
        };
        let is_counted =
            samples.get("posthouse_queue_ended_jobs_total{queue=\"default\",state=\"done\"}") == Some(&2.0);
        done("good")
            && done("summarize")
            && is_counted
            && samples.contains_key("posthouse_schedule_missed_ticks_total{schedule=\"yearly\"}")
            && samples.contains_key("posthouse_worker_heartbeat_age_seconds")
    });
    (worker, page, sim)
}

#[tokio::test]
async fn prometheus_is_content_with_all_that_there_is() {
    let (queue, folder) = (Queue::new().await, Folder::new("metrics"));
    let (_worker, page, _sim) = everything(&queue, &folder).await;
    let reply = page.get("/metrics");
    assert!(reply.head.contains("content-type: text/plain; version=0.0.4"), "{}", reply.head);
    promtool(&["check", "metrics"], &reply.body).unwrap_or_else(|said| panic!("{said}\nabout\n{}", reply.body));
    let samples = page.samples();
    let at_least =
        |name: &str, n: f64| assert!(samples.get(name).is_some_and(|found| *found >= n), "{name} in {samples:#?}");
    for (name, n) in [
        ("posthouse_attempts_settled_total{queue=\"default\",kind=\"bad\",outcome=\"failed\"}", 1.0),
        ("posthouse_attempts_settled_total{queue=\"default\",kind=\"summarize\",outcome=\"snoozed\"}", 1.0),
        ("posthouse_job_wait_seconds_count{queue=\"default\",kind=\"good\"}", 1.0),
        ("posthouse_attempt_run_seconds_count{queue=\"default\",kind=\"good\"}", 1.0),
        ("posthouse_llm_rate_limited_total{endpoint=\"sim\",model=\"up\"}", 1.0),
        ("posthouse_llm_calls_total{endpoint=\"sim\",model=\"up\",class=\"ok\"}", 1.0),
        ("posthouse_llm_tokens_total{endpoint=\"sim\",model=\"up\",type=\"input\"}", 1.0),
        ("posthouse_queue_later_jobs{queue=\"slow\"}", 1.0),
        ("posthouse_queue_dead_letters{queue=\"default\"}", 1.0),
        ("posthouse_fleet_workers{state=\"live\"}", 1.0),
        ("posthouse_gate_room_ratio{scope=\"named\"}", 1.0),
        ("posthouse_database_connections{owner=\"posthouse\"}", 3.0),
        ("posthouse_sweep_runs_total{part=\"gauges\"}", 1.0),
        ("posthouse_database_up", 1.0),
        ("posthouse_worker_registered", 1.0),
        ("posthouse_process_sweep_age_seconds", 0.0),
    ] {
        at_least(name, n);
    }
    assert!(
        samples.keys().any(|name| name.starts_with("posthouse_attempt_errors_total{queue=\"default\",kind=\"bad\""))
    );
    assert!(!reply.body.contains("acme-corp"), "a tenant is a label:\n{}", reply.body);
    // All that is asked wrongly is answered with what would be right.
    assert_eq!((page.get("/nothing").status, page.get("/metrics?x=1").status), (404, 200));
    assert_eq!(page.ask("POST /metrics HTTP/1.1\r\n\r\n").status, 405);
    assert_eq!(page.ask(&format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(20_000))).status, 400);
    let head = page.ask("HEAD /metrics HTTP/1.1\r\n\r\n");
    assert_eq!((head.status, head.body.len()), (200, 0));
}

#[tokio::test]
async fn the_probes_tell_the_truth() {
    let (queue, folder) = (Queue::new().await, Folder::new("probes"));
    let (noted, go) = (folder.file("noted"), folder.file("go"));
    queue.enqueue(&["k", "{}"]);
    let exec = format!("k=touch {noted}; while ! test -e {go}; do sleep 0.05; done");
    let mut command = queue.command(&["work", "--metrics-listen", "0", "--lease-ms", "1500", "--grace-ms", "60000"]);
    let mut worker = Running::start(command.args(["--exec", &exec]));
    let page = Page::of(&worker);
    eventually("it is ready", || page.get("/readyz").status == 200);
    let ready = page.get("/readyz").json();
    assert_eq!((&ready["ready"], &ready["reason"]), (&Value::from(true), &Value::Null));
    assert_eq!(ready["checks"]["listener"]["detail"]["state"], "listening", "{ready}");
    assert!(ready["checks"]["registration"]["detail"]["worker"].is_string(), "{ready}");
    assert_eq!((page.get("/healthz").status, page.get("/healthz").json()["alive"].as_bool()), (200, Some(true)));
    // While it shuts down it is alive and not ready.
    eventually("the job runs", || std::path::Path::new(&noted).exists());
    worker.signal(Signal::SIGTERM);
    eventually("it is not ready any more", || page.get("/readyz").status == 503);
    let reason = page.get("/readyz").json()["reason"].as_str().unwrap().to_owned();
    assert!(reason.contains("registration: the worker shuts down"), "{reason}");
    assert_eq!(page.get("/healthz").status, 200);
    std::fs::write(&go, "").unwrap();
    assert_eq!(worker.ended().code(), Some(0));
}

#[tokio::test]
async fn a_database_that_is_away_is_told_and_does_not_keep_the_probes_waiting() {
    let mut command = posthouse();
    command.args(["work", "--metrics-listen", "0", "--exec", "k=true", "--database-url", "postgres://u@127.0.0.1:1/d"]);
    let worker = Running::start(&mut command);
    let page = Page::of(&worker);
    let reply = page.get("/readyz");
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["reason"], "database: no answer from Postgres yet", "{}", reply.body);
    assert_eq!(page.samples()["posthouse_database_up"], 0.0);
    assert_eq!(page.get("/healthz").status, 200);
}

#[tokio::test]
async fn an_outage_of_postgres_is_told_within_seconds_and_over_as_soon() {
    let queue = Queue::new().await;
    let line = Line::to(queue.url());
    let mut command = posthouse();
    command.args(["work", "--metrics-listen", "0", "--exec", "k=true", "--database-url", &line.url]);
    let worker = Running::start(&mut command);
    let page = Page::of(&worker);
    eventually("it is ready", || page.get("/readyz").status == 200);
    line.cut();
    eventually("it is not ready any more", || page.get("/readyz").status == 503);
    eventually("the database is the reason", || {
        page.get("/readyz").json()["reason"].as_str().unwrap().starts_with("database: no answer from Postgres for ")
    });
    // No lease is over so soon, and no heartbeat missed: nothing else is wrong but what comes from that.
    let checks = page.get("/readyz").json()["checks"].clone();
    assert!(checks["database"]["detail"]["answer_age_ms"].as_u64().unwrap() > 4_000, "{checks}");
    line.mend();
    eventually("it is ready again", || page.get("/readyz").status == 200);
}

#[tokio::test]
async fn a_sweeper_serves_them_too() {
    let queue = Queue::new().await;
    let sweeper = Running::start(&mut queue.command(&["work", "--sweep-only", "--metrics-listen", "0"]));
    let page = Page::of(&sweeper);
    eventually("it is ready", || page.get("/readyz").status == 200);
    let ready = page.get("/readyz").json();
    assert!(ready["checks"].get("registration").is_none(), "{ready}");
    let samples = page.samples();
    assert!(samples.contains_key("posthouse_process_sweep_age_seconds"), "{samples:#?}");
    assert!(!samples.contains_key("posthouse_worker_slots"), "{samples:#?}");
}

#[tokio::test]
async fn a_worker_beside_which_nobody_sweeps_is_not_ready() {
    let queue = Queue::new().await;
    let worker =
        Running::start(&mut queue.command(&["work", "--no-sweep", "--metrics-listen", "0", "--exec", "k=true"]));
    let page = Page::of(&worker);
    let reason = || page.get("/readyz").json()["reason"].as_str().unwrap_or_default().to_owned();
    eventually("only the sweep is missing", || reason() == "sweep: nobody has swept yet");
    let _sweeper = Running::start(&mut queue.command(&["work", "--sweep-only"]));
    eventually("it is ready", || page.get("/readyz").status == 200);
    let sweep = &page.get("/readyz").json()["checks"]["sweep"]["detail"];
    assert!(sweep["own_age_ms"].is_null() && sweep["fleet_age_ms"].is_number(), "{sweep}");
}

#[tokio::test]
async fn a_port_that_is_taken_or_none_is_refused() {
    let queue = Queue::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    queue.run(&["work", "--exec", "k=true", "--metrics-listen", &address]).failed(1, &["--metrics-listen", &address]);
    queue.run(&["work", "--exec", "k=true", "--metrics-listen", ":9464"]).failed(2, &["0.0.0.0:9464 for everybody"]);
    let bare = TestDatabase::new("no schema", async |_| Ok::<(), String>(())).await;
    let mut command = posthouse();
    command.args(["work", "--exec", "k=true", "--metrics-listen", "0", "--database-url", bare.url()]);
    crate::support::answer(&mut command, None).failed(1, &["no Posthouse schema yet"]);
}
