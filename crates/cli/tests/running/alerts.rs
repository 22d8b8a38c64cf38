//! Alerts through a real worker: each kind of them in its log and at a receiver, signed, retried, and never about itself.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use posthouse::store::Database;
use posthouse::{Context, Outcome, Worker};
use serde_json::{Value, json};

use crate::processes::{Folder, Running, eventually};
use crate::receiver::{Answer, Receiver};
use crate::support::{Queue, answer};

/// 24 bytes, as in the specification.
const OLD: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const NEW: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
/// What must be seen nowhere: the secrets without their prefix, and the secret in the address.
const SECRETS: [&str; 3] = ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "C2FVsBQIhrscChlQIMV", "hidden-in-the-url"];

/// A queue, a worker with a webhook, and all that it says.
struct Scene {
    queue: Queue,
    folder: Folder,
    receiver: Receiver,
    worker: Option<Running>,
}

impl Scene {
    async fn new(name: &str, answers: &[Answer]) -> Self {
        let (queue, folder, receiver) = (Queue::new().await, Folder::new(name), Receiver::start(answers));
        std::fs::write(folder.file("secrets"), format!("{NEW}\n{OLD}\n")).unwrap();
        let config = format!(
            "[alerts]\nwebhook_url = \"http://127.0.0.1:{}/hook?key=hidden-in-the-url\"\nsecret_file = \"secrets\"\n\
             timeout_ms = 500\noldest_due_ms = 1000\nno_worker_ms = 1000\n",
            receiver.port()
        );
        std::fs::write(folder.file("posthouse.toml"), config).unwrap();
        Self { queue, folder, receiver, worker: None }
    }

    /// Starts the worker and waits until alerts go to the webhook.
    fn work(&mut self, more: &[&str]) {
        let config = self.folder.file("posthouse.toml");
        let arguments = [&["work", "--config", &config, "--poll-ms", "100"], more].concat();
        let log = File::create(self.folder.file("log")).unwrap();
        self.worker = Some(Running::logging(&mut self.queue.command(&arguments), log));
        eventually("the webhook is on", || self.listed()["webhook"]["enabled"] == true);
    }

    fn listed(&self) -> Value {
        self.queue.run(&["alert", "list", "--all", "--json"]).fine().json()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.file("log")).unwrap()
    }

    fn job(&self, id: i64) -> Value {
        self.queue.run(&["job", "show", &id.to_string(), "--json"]).fine().json()
    }

    fn test_alert(&self) -> i64 {
        self.queue.run(&["alert", "test", "--json"]).fine().json()["webhook_job"].as_i64().unwrap()
    }

    /// Nothing secret is in any row of any table, nor in the log.
    async fn keeps_its_secrets(&self) {
        let tables = "select c.oid::regclass::text from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind = 'r'";
        for table in self.queue.texts(tables).await {
            for row in self.queue.texts(&format!("select t::text from {table} t")).await {
                assert!(!SECRETS.iter().any(|secret| row.contains(secret)), "in {table}: {row}");
            }
        }
        let log = self.log();
        assert!(!SECRETS.iter().any(|secret| log.contains(secret)), "{log}");
    }
}

/// A job that says that it cost two dollars.
async fn spend(queue: &Queue) {
    queue.enqueue(&["paid", "{}", "--queue", "paid"]);
    let worker = Worker::builder(Database::new(queue.url()).unwrap()).queue("paid").no_sweep().until_empty(true);
    let worker = worker.handle_kind("paid", |_, context: Context| async move {
        context.usage(&json!({"model": "m", "input_tokens": 1, "output_tokens": 1, "cost_usd": "2"})).unwrap();
        Outcome::done(&"paid")
    });
    tokio::time::timeout(Duration::from_secs(60), worker.run_until(std::future::pending())).await.unwrap().unwrap();
}

#[tokio::test]
async fn each_kind_of_alert_is_logged_and_delivered() {
    let mut scene = Scene::new("alerts", &[]).await;
    scene
        .queue
        .sql(
            "select posthouse.set_gate('queue:slow', max_running => 1);
                     select posthouse.set_gate('queue:paid', money_per_day => 1)",
        )
        .await;
    let (slow, bad) = ("slow=sleep 600", "bad=echo hush hush >&2; exit 65");
    scene.work(&["--queue", "default", "--queue", "slow", "--exec", slow, "--exec", bad]);
    for job in [["bad", "default"], ["bad", "default"], ["nobody", "default"], ["slow", "slow"], ["slow", "slow"]] {
        scene.queue.enqueue(&[job[0], "{\"text\": \"private\"}", "--queue", job[1]]);
    }
    scene.queue.sql("select posthouse.report_endpoint('p/m', 'quota', null, 'no credit left')").await;
    spend(&scene.queue).await;
    let kinds = ["budget", "dead_letter", "gate_quota", "no_worker", "oldest_due"];
    let mut told: Vec<String> = Vec::new();
    for _ in 0..600 {
        // Not every ten seconds, as outside of tests.
        scene.queue.sql("update posthouse.sweep set ran_at = '-infinity' where name in ('watch', 'alerts')").await;
        // Jobs that nobody serves get old, too.
        let messages = scene.receiver.deliveries().into_iter().map(|delivery| delivery.json());
        let messages = messages.filter(|m| m["type"] != "oldest_due" || m["data"]["subject"] == "slow");
        told = messages.map(|m| m["type"].as_str().unwrap().to_owned()).collect();
        told.sort_unstable();
        told.dedup();
        if told == kinds {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(told, kinds, "log: {}", scene.log());
    let rules = scene.listed()["rules"].clone();
    let after = |kind: &str| {
        rules.as_array().unwrap().iter().find(|rule| rule["kind"] == kind).map(|rule| rule["after_ms"].clone())
    };
    assert_eq!(
        [after("oldest_due"), after("no_worker"), after("budget")],
        [Some(json!(1_000)), Some(json!(1_000)), Some(Value::Null)]
    );
    let deliveries = scene.receiver.deliveries();
    for delivery in &deliveries {
        assert_eq!(delivery.line, "POST /hook?key=hidden-in-the-url HTTP/1.1");
        assert_eq!(delivery.header("content-type"), "application/json");
        assert!(delivery.is_signed_with(OLD) && delivery.is_signed_with(NEW), "{delivery:?}");
        assert!(!delivery.is_signed_with("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"));
        assert!(!delivery.body.contains("private") && !delivery.body.contains("hush"), "{delivery:?}");
    }
    let of = |kind: &str| deliveries.iter().map(|d| d.json()).find(|m| m["type"] == kind).unwrap();
    assert_eq!(of("no_worker")["data"]["detail"]["kind"], "nobody");
    assert_eq!(of("dead_letter")["data"]["subject"].as_str().unwrap().split('/').next(), Some("default"));
    assert!(of("gate_quota")["data"]["subject"].as_str().unwrap().contains("p/m"));
    assert!(of("budget")["data"]["subject"].as_str().unwrap().contains("queue:paid"));
    // One line each in the log, and in the status of the whole.
    let (log, status) = (scene.log(), scene.queue.run(&["status"]).fine().stdout);
    for kind in kinds {
        let lines: Vec<&str> =
            log.lines().filter(|line| line.contains("posthouse::alert") && line.contains(kind)).collect();
        assert!(!lines.is_empty() && lines[0].contains("alert: ") && lines[0].contains("subject="), "{kind}: {log}");
        assert!(status.lines().any(|line| line.starts_with(&format!("alert {kind}: "))), "{kind}: {status}");
    }
    scene.keeps_its_secrets().await;
}

#[tokio::test]
async fn a_delivery_is_tried_again_under_the_same_id_until_it_is_taken() {
    let answers = [
        Answer::Status("500 Internal Server Error\r\n"),
        Answer::Status("302 Found\r\nlocation: /elsewhere\r\n"),
        Answer::Silence,
        Answer::Closed,
        Answer::Status("429 Too Many Requests\r\nretry-after: 1000\r\n"),
        Answer::Status("299 Odd\r\n"),
    ];
    let mut scene = Scene::new("retries", &answers).await;
    scene.work(&[]);
    let id = scene.test_alert();
    for tries in 1..answers.len() {
        eventually("the attempt is recorded", || {
            let job = scene.job(id);
            job["state"] == "queued" && job["errors"].as_array().is_some_and(|errors| errors.len() == tries)
        });
        let wait =
            format!("select extract(epoch from run_at - clock_timestamp())::text from posthouse.jobs where id = {id}");
        let wait: f64 = scene.queue.texts(&wait).await[0].parse().unwrap();
        let expected = [5.0, 30.0, 120.0, 600.0, 1_800.0][tries - 1];
        assert!(wait > expected * 0.89 - 3.0 && wait < expected * 1.11, "{wait} after attempt {tries}");
        scene.queue.run(&["job", "retry", &id.to_string()]).fine();
    }
    eventually("it is delivered", || scene.job(id)["state"] == "done");
    let job = scene.job(id);
    assert_eq!((&job["result"], &job["attempt"]), (&json!({"status": 299}), &json!(6)));
    let port = scene.receiver.port();
    let errors: Vec<&str> = job["errors"].as_array().unwrap().iter().map(|e| e["error"].as_str().unwrap()).collect();
    for (error, expected) in errors.iter().zip([
        "answered 500 Internal Server Error",
        "answered 302 Found; redirects are not followed: set alerts.webhook_url",
        "did not answer within 500ms",
        "could not be asked: ",
        "answered 429 Too Many Requests",
    ]) {
        assert!(error.starts_with(&format!("127.0.0.1:{port} {expected}")), "{error}");
    }
    let deliveries = scene.receiver.deliveries();
    assert_eq!(deliveries.len(), 6, "no redirect is followed");
    for delivery in &deliveries {
        assert_eq!(delivery.header("webhook-id"), deliveries[0].header("webhook-id"));
        assert_eq!((&delivery.body, &delivery.line), (&deliveries[0].body, &deliveries[0].line));
        assert!(delivery.is_signed_with(OLD));
    }
    // Another alert is another message.
    let other = scene.test_alert();
    eventually("it is delivered", || scene.job(other)["state"] == "done");
    assert_ne!(scene.receiver.deliveries()[6].header("webhook-id"), deliveries[0].header("webhook-id"));
    scene.keeps_its_secrets().await;
}

#[tokio::test]
async fn a_receiver_that_is_gone_is_left_alone_and_told_of_elsewhere() {
    let mut scene = Scene::new("gone", &[Answer::Status("410 Gone\r\n")]).await;
    scene.work(&[]);
    let id = scene.test_alert();
    eventually("the job has failed", || scene.job(id)["state"] == "failed");
    let listed = scene.listed();
    assert_eq!(listed["webhook"]["enabled"], false);
    assert!(
        listed["webhook"]["reason"].as_str().unwrap().contains("answered 410 Gone; the webhook is off until"),
        "{listed}"
    );
    // The dead letter is an alert, and not for the webhook, not even when that is on again.
    scene.queue.run(&["alert", "set", "--webhook", "on"]).fine();
    eventually("it is told", || {
        scene.listed()["alerts"]
            .as_array()
            .unwrap()
            .iter()
            .any(|alert| alert["subject"] == "posthouse/posthouse.webhook/webhook_gone" && alert["told_at"].is_string())
    });
    assert_eq!(
        scene
            .queue
            .run(&["job", "list", "--kind", "posthouse.webhook", "--json"])
            .fine()
            .json()
            .as_array()
            .unwrap()
            .len(),
        1
    );
    // What somebody else puts into the line is not signed, nor sent.
    let forged = scene.queue.enqueue(&[
        "posthouse.webhook",
        "{\"webhook_id\": \"x\", \"body\": {}}",
        "--queue",
        "posthouse",
        "--tenant",
        "evil",
    ]);
    eventually("it has failed", || scene.job(forged)["state"] == "failed");
    let odd = scene.queue.enqueue(&[
        "posthouse.webhook",
        "{\"webhook_id\": \"a\\nb\", \"body\": {}}",
        "--queue",
        "posthouse",
        "--tenant",
        "posthouse",
    ]);
    eventually("it has failed", || scene.job(odd)["state"] == "failed");
    assert!(scene.job(odd)["error"].as_str().unwrap().contains("cannot be a header"));
    assert_eq!(scene.receiver.deliveries().len(), 1);
    // A worker that starts anew is told anew where the webhook is.
    scene.queue.run(&["alert", "set", "--webhook", "off"]).fine();
    scene.work(&[]);
    let again = scene.test_alert();
    eventually("it is delivered", || scene.job(again)["state"] == "done");
}

#[tokio::test]
async fn mistakes_in_the_configuration_are_named_and_secrets_not_shown() {
    let (queue, folder) = (Queue::new().await, Folder::new("mistakes"));
    let work = |alerts: &str, secret: Option<&str>| {
        let config = folder.file("posthouse.toml");
        std::fs::write(&config, format!("[alerts]\n{alerts}\n")).unwrap();
        let mut command: Command = queue.command(&["work", "--until-empty", "--config", &config]);
        if let Some(secret) = secret {
            command.env("HOOK_SECRET", secret);
        }
        answer(&mut command, None)
    };
    let url = "webhook_url = \"https://h/hook\"\n";
    for (alerts, secret, words) in [
        (
            format!("{url}secret_env = \"HOOK_SECRET\""),
            None,
            "alerts.secret_env: the environment variable HOOK_SECRET is not set",
        ),
        (
            format!("{url}secret_env = \"HOOK_SECRET\""),
            Some("whsec_c2hvcnQ="),
            "alerts.secret_env: secret 1 is none: it must be whsec_",
        ),
        (format!("{url}secret_file = \"none\""), None, "alerts.secret_file: cannot read"),
        (url.to_owned(), None, "alerts.secret_env: missing: alerts are signed"),
        (
            "webhook_url = \"h/c2hvcnQ=\"\nsecret_env = \"HOOK_SECRET\"".to_owned(),
            Some(OLD),
            "alerts.webhook_url: not an address",
        ),
        ("oldest_due_ms = 5".to_owned(), None, "alerts.oldest_due_ms: must be from 1000"),
    ] {
        let said = work(&alerts, secret).failed(1, &[words]);
        assert!(!said.stderr.contains("c2hvcnQ"), "{said:?}");
    }
    // Without a webhook and without kinds there is nothing to do.
    work("quiet_ms = 1000", None).failed(2, &["no kind of job"]);
    // With one it works, ends, and what it says is set.
    let config =
        format!("{url}secret_env = \"HOOK_SECRET\"\nkinds = [\"budget\"]\nquiet_ms = 60000\nno_worker_ms = 2000");
    let said = work(&config, Some(OLD)).fine();
    assert!(said.stdout.contains("queues default, posthouse; kind posthouse.webhook"), "{said:?}");
}
