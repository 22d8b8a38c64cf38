//! Jobs through a real queue and a real worker to the simulated provider and back.

use crate::{KEY, engine, until, within};
use posthouse::store::{Database, JobRecord};
use posthouse::testing::TestDatabase;
use posthouse::{NewJob, Posthouse, Worker};
use posthouse_llm::Engine;
use posthouse_llm::sim::{Script, Sim, expected_answer};
use std::time::Duration;

pub(crate) async fn database() -> TestDatabase {
    TestDatabase::new(&posthouse::store::schema_sql(), async |url: &str| Posthouse::migrate(url).await).await
}

fn script(lines: &[&str]) -> Script {
    Script { steps: lines.iter().map(|line| line.parse().unwrap()).collect(), ..Script::default() }
}

/// Enqueues, works until nothing is left, and returns the jobs in order.
async fn work(database: &TestDatabase, engine: &Engine, jobs: &[NewJob]) -> Vec<JobRecord> {
    let queue = Posthouse::new(Database::new(database.url()).unwrap());
    let ids: Vec<i64> = queue.enqueue_many(jobs).await.unwrap().iter().map(|job| job.id).collect();
    let worker =
        Worker::builder(Database::new(database.url()).unwrap()).poll(Duration::from_millis(50)).until_empty(true);
    within(engine.register(worker).run()).await.unwrap();
    let mut records = Vec::new();
    for id in ids {
        records.push(queue.job(id).await.unwrap().unwrap());
    }
    records
}

pub(crate) fn summarize(text: &str) -> NewJob {
    NewJob::from_json("summarize", serde_json::json!({ "text": text }).to_string()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_job_ends_as_its_class_says() {
    let database = database().await;
    let lines = [
        "match=busy,tries=1,do=429,retry_after_ms=100",
        "match=flaky,tries=1,do=500",
        "match=hopeless,do=401",
        "match=nul,do=nul",
    ];
    let sim = Sim::start(script(&lines)).await.unwrap();
    let engine = engine(&sim.base_url(), "", "");
    let texts = ["A plain one.", "A busy one.", "A flaky one.", "A hopeless one.", "A nul one."];
    let mut jobs: Vec<NewJob> = texts.iter().map(|text| summarize(text)).collect();
    jobs.push(NewJob::from_json("summarize", r#"{"txt":"x"}"#).unwrap());
    let records = work(&database, &engine, &jobs).await;

    let shown: Vec<String> = records.iter().map(|job| format!("{job:?}")).collect();
    let states: Vec<&str> = records.iter().map(|job| job.state.as_str()).collect();
    assert_eq!(states, ["done", "done", "done", "failed", "done", "failed"], "{shown:#?}");
    for (record, text) in records.iter().zip(texts).take(3) {
        let result = record.result.as_ref().unwrap();
        assert!(result.get().contains(&expected_answer(text)), "{result}");
    }
    let attempts: Vec<i32> = records.iter().map(|job| job.attempt).collect();
    assert_eq!(attempts, [1, 1, 2, 1, 1, 1], "only the flaky one is charged twice: {shown:#?}");
    assert!(shown[3].contains("401 Unauthorized: Incorrect API key provided"), "{}", shown[3]);
    assert!(shown[5].contains("kind summarize takes: text"), "{}", shown[5]);
    assert!(shown.iter().all(|shown| !shown.contains(KEY)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_job_closes_its_call() {
    let database = database().await;
    let sim = Sim::start(script(&["do=hang_mid"])).await.unwrap();
    let queue = Posthouse::new(Database::new(database.url()).unwrap());
    let job = queue.enqueue_job(summarize("Long.")).await.unwrap();
    let worker = Worker::builder(Database::new(database.url()).unwrap()).until_empty(true);
    let running = tokio::spawn(engine(&sim.base_url(), "", "").register(worker).run());
    until("the call is under way", || sim.stats().in_flight == 1).await;
    queue.cancel(job.id).await.unwrap();
    until("the call is gone", || sim.stats().in_flight == 0).await;
    within(running).await.unwrap().unwrap();
    assert_eq!(queue.job(job.id).await.unwrap().unwrap().state, "cancelled");
}
