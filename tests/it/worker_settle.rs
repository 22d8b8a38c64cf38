//! Outcomes: whatever they hold and whatever Postgres thinks of them, each is recorded, and none keeps another from it.

use std::time::Duration;

use posthouse::{Context, JobError, NewJob, Outcome};
use serde_json::json;
use serde_json::value::RawValue;

use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::{Background, Log, database, enqueue, job_in, queue_at, worker_at};

#[tokio::test]
async fn one_row_that_postgres_refuses_does_not_hold_up_the_others() {
    let database = database().await;
    let queue = queue_at(database.url());
    // Something that nobody foresaw: a constraint on results.
    let admin = database.connect().await;
    admin
        .batch_execute(
            "create function public.refuse() returns trigger language plpgsql as $$
             begin raise exception 'no poison here'; end $$;
             create trigger refuse before insert on posthouse.archive for each row
             when (new.result = '\"poison\"') execute function public.refuse()",
        )
        .await
        .unwrap();
    let ids = enqueue(&queue, "k", 300).await;
    let (bad, log) = (ids[137], Log::default());
    let runs = log.clone();
    let worker =
        Background::start(worker_at(database.url()).concurrency(300).handle_kind("k", move |_, context: Context| {
            drop(runs.begin(context.job_id()));
            async move { Outcome::done(&if context.job_id() == bad { "poison" } else { "fine" }) }
        }));
    for id in ids.iter().filter(|id| **id != bad) {
        job_in(&queue, *id, "done").await;
    }
    let failed = job_in(&queue, bad, "failed").await;
    let error = failed.error.unwrap();
    assert!(error.contains("could not be recorded") && error.contains("no poison here"), "{error}");
    assert!(ids.iter().all(|id| log.runs_of(*id) == 1), "each ran once");
    let summary = worker.end().await;
    assert_eq!((summary.done, summary.failed), (299, 1));
}

#[tokio::test]
async fn odd_characters_and_huge_errors_are_recorded() {
    let database = database().await;
    let queue = queue_at(database.url());
    let worker = worker_at(database.url()).handle_kind("k", |payload: Box<RawValue>, _| async move {
        let case: serde_json::Value = serde_json::from_str(payload.get()).unwrap();
        let raw = |json: &str| Outcome::Done(RawValue::from_string(json.to_owned()).unwrap());
        match case["n"].as_i64().unwrap() {
            0 => Outcome::done(&json!({"a": "x\0y"})),
            1 => raw(r#"{"a":"\ud800"}"#),
            2 => raw("1e999999"),
            3 => Outcome::fail(JobError::new("nul", "an error with\0in it").with_detail(json!("\0"))),
            4 => Outcome::fail(JobError::new("huge", "x".repeat(50 << 20))),
            5 => Outcome::snooze(Duration::from_secs(3_600), "not\0now"),
            _ => Outcome::fail(JobError::new("cl\0ass", "")),
        }
    });
    let worker = Background::start(worker);
    let ids = enqueue(&queue, "k", 7).await;
    for id in &ids[..3] {
        job_in(&queue, *id, "done").await;
    }
    for id in [ids[3], ids[4], ids[6]] {
        let error = job_in(&queue, id, "failed").await.error.unwrap();
        assert!(error.len() <= 16 << 10, "{} bytes", error.len());
    }
    wait_until(SOON, "the snooze is recorded", async || queue.job(ids[5]).await.unwrap().unwrap().reason.is_some())
        .await;
    let nul = queue.job(ids[0]).await.unwrap().unwrap();
    assert_eq!(nul.result.unwrap().get(), r#"{"a": "x�y"}"#);
    assert!(nul.flags.unwrap().contains(&"cleaned".to_owned()), "it is flagged");
    let summary = worker.end().await;
    assert_eq!((summary.started, summary.lost), (7, 0), "nothing ran twice");
}

#[tokio::test]
async fn what_is_finished_while_postgres_is_away_is_kept_and_written() {
    let database = database().await;
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let (log, gate) = (Log::default(), std::sync::Arc::new(tokio::sync::Semaphore::new(0)));
    let (runs, pass) = (log.clone(), gate.clone());
    let worker = worker_at(&proxy.url(database.url())).lease(Duration::from_secs(60)).concurrency(50);
    let worker = Background::start(worker.handle_kind("k", move |_, context: Context| {
        let (run, pass) = (runs.begin(context.job_id()), pass.clone());
        async move {
            let _run = run;
            drop(pass.acquire().await);
            Outcome::done(&context.job_id())
        }
    }));
    let ids = enqueue(&queue, "k", 50).await;
    log.wait_for_open(50).await;
    proxy.refuse();
    gate.add_permits(50);
    log.wait_for_open(0).await;
    worker.says("connection to Postgres lost").await;
    assert_eq!(queue.health().await.unwrap()[0].running, 50, "nothing is written yet");
    proxy.heal();
    for id in ids {
        assert_eq!(job_in(&queue, id, "done").await.result.unwrap().get(), id.to_string());
        assert_eq!(log.runs_of(id), 1);
    }
    worker.says("connection to Postgres restored").await;
    assert_eq!(worker.end().await.done, 50);
}

#[tokio::test]
async fn endless_snoozing_ends() {
    let database = database().await;
    let queue = queue_at(database.url());
    let worker = worker_at(database.url()).max_deferral(Duration::from_millis(500)).until_empty(true);
    let id = queue.enqueue_job(NewJob::from_json("k", "{}").unwrap().max_attempts(1)).await.unwrap().id;
    let snoozes = |_, _| async { Outcome::snooze(Duration::from_millis(50), "still not") };
    let summary = Background::start(worker.handle_kind("k", snoozes)).ended().await;
    let job = queue.job(id).await.unwrap().unwrap();
    assert_eq!((job.state.as_str(), summary.failed), ("failed", 1), "{job:?}");
    assert!(summary.snoozed > 1, "{summary:?}");
}

#[tokio::test]
async fn cancelling_at_any_moment_leaves_one_answer() {
    const JOBS: usize = 300;
    let database = database().await;
    let queue = queue_at(database.url());
    let worker = worker_at(database.url()).concurrency(20).handle_kind("k", |_, context: Context| async move {
        tokio::time::sleep(Duration::from_millis(context.job_id().unsigned_abs() % 7)).await;
        Err::<(), _>(JobError::new("error", "never retried once it is cancelled"))
    });
    let worker = Background::start(worker.backoff("k", posthouse::retry::Backoff::default()));
    // More attempts than anything takes up: the waits are by chance, and none may fail for good before its turn comes.
    let new: Vec<NewJob> = (0..JOBS).map(|_| NewJob::from_json("k", "{}").unwrap().max_attempts(1_000)).collect();
    let ids: Vec<i64> = queue.enqueue_many(&new).await.unwrap().iter().map(|job| job.id).collect();
    let mut answers = Vec::new();
    for id in &ids {
        answers.push(queue.cancel(*id).await.unwrap());
        tokio::time::sleep(Duration::from_micros(fastrand::u64(0..3_000))).await;
    }
    for (id, answer) in ids.iter().zip(answers) {
        assert!(["cancelled", "running"].contains(&answer.as_str()), "{answer}");
        job_in(&queue, *id, "cancelled").await;
    }
    let summary = worker.end().await;
    assert_eq!(summary.lost, 0, "{summary:?}");
}
