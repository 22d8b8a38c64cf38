//! A worker at its daily work: every outcome, every way to be woken, many jobs at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use posthouse::context::CancelReason;
use posthouse::error::Error;
use posthouse::metrics::{SampleValue, Source};
use posthouse::retry::Backoff;
use posthouse::store::Database;
use posthouse::worker::Meter;
use posthouse::{Context, Job, JobError, NewJob, Outcome, Worker};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::harness::{SOON, wait_until};
use crate::worker_support::{Background, Log, database, enqueue, job_in, queue_at, worker_at};

#[derive(Serialize, Deserialize)]
struct Case {
    what: String,
}

impl Job for Case {
    const KIND: &'static str = "case";
    const MAX_ATTEMPTS: Option<u32> = Some(2);
    const TIMEOUT: Option<Duration> = Some(Duration::from_millis(300));

    fn backoff() -> Backoff {
        Backoff { base: Duration::from_millis(10), cap: Duration::from_millis(10), floor: Duration::ZERO }
    }
}

async fn case(case: Case, context: Context) -> Result<Outcome, Error> {
    Ok(match case.what.as_str() {
        "done" => {
            context.usage(&json!({"tokens": 7}))?;
            Outcome::done(&json!({"answer": 42}))
        }
        "second" if context.attempt() == 1 => Outcome::retry(JobError::new("odd", "not the first time")),
        "second" => Outcome::done(&"now"),
        "error" => return Err(Error::invalid("always")),
        "fail" => Outcome::fail(JobError::new("terminal", "never").with_detail(json!({"status": 401}))),
        "snooze"
            if context.job_id() > 0
                && context.enqueued_at().elapsed().unwrap_or_default() < Duration::from_millis(300) =>
        {
            Outcome::snooze(Duration::from_millis(300), "not now")
        }
        "snooze" => Outcome::done(&context.attempt()),
        "cancel" => Outcome::Cancelled,
        "panic" => panic!("on purpose"),
        "hang" => std::future::pending().await,
        other => Outcome::fail(JobError::new("test", other)),
    })
}

#[tokio::test]
async fn every_outcome_is_recorded_as_what_it_is() {
    let database = database().await;
    let queue = queue_at(database.url());
    let mut ids = BTreeMap::new();
    for what in ["done", "second", "error", "fail", "snooze", "cancel", "panic", "hang"] {
        ids.insert(what, queue.enqueue(Case { what: what.to_owned() }).await.unwrap().id);
    }
    let misfit = NewJob::from_json("case", "[1]").unwrap().max_attempts(2);
    ids.insert("misfit", queue.enqueue_job(misfit).await.unwrap().id);
    let summary = Background::start(worker_at(database.url()).until_empty(true).handle(case)).ended().await;
    let expected = [
        ("done", "done", 1, None),
        ("second", "done", 2, Some("not the first time")),
        ("error", "failed", 2, Some("always")),
        ("fail", "failed", 1, Some("never")),
        ("snooze", "done", 1, None),
        ("cancel", "cancelled", 1, None),
        ("panic", "failed", 2, Some("on purpose")),
        ("hang", "failed", 2, Some("longer than its timeout")),
        ("misfit", "failed", 2, Some("does not fit kind `case`")),
    ];
    for (what, state, attempt, error) in expected {
        let job = queue.job(ids[what]).await.unwrap().unwrap();
        assert_eq!((job.state.as_str(), job.attempt), (state, attempt), "{what}: {job:?}");
        let said = job.error.unwrap_or_default();
        assert!(said.contains(error.unwrap_or_default()) && said.is_empty() == error.is_none(), "{what}: {said:?}");
    }
    let done = queue.job(ids["done"]).await.unwrap().unwrap();
    assert_eq!(done.result.unwrap().get(), r#"{"answer": 42}"#);
    assert_eq!(done.usage, Some(json!({"tokens": 7})));
    let classes = queue.job(ids["panic"]).await.unwrap().unwrap().errors.unwrap();
    assert_eq!(classes[0]["class"], "panic", "{classes}");
    assert_eq!(queue.job(ids["hang"]).await.unwrap().unwrap().errors.unwrap()[0]["class"], "timeout");
    assert_eq!(queue.job(ids["misfit"]).await.unwrap().unwrap().errors.unwrap()[0]["class"], "payload");
    let counted = (summary.done, summary.retried, summary.snoozed, summary.failed, summary.cancelled, summary.lost);
    assert_eq!(counted, (3, 5, 1, 5, 1, 0), "{summary:?}");
}

#[tokio::test]
async fn a_line_is_said_for_every_transition() {
    let database = database().await;
    let queue = queue_at(database.url());
    let done = queue.enqueue(Case { what: "done".into() }).await.unwrap().id;
    let error = queue.enqueue(Case { what: "error".into() }).await.unwrap().id;
    let backoff = Backoff { base: Duration::from_secs(4), cap: Duration::from_secs(4), floor: Duration::from_secs(4) };
    let worker = Background::start(worker_at(database.url()).handle(case).backoff("case", backoff));
    for line in [
        format!("job {done} started"),
        format!("job {done} done"),
        format!("job {error} retry in 4s: always"),
        "registered".to_owned(),
    ] {
        worker.says(&line).await;
    }
    worker.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_at_once_on_a_handful_of_connections() {
    const JOBS: usize = 2_000;
    let database = database().await;
    let queue = queue_at(database.url());
    enqueue(&queue, "wait", JOBS).await;
    let (running, gate) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Semaphore::new(0)));
    let (count, pass) = (running.clone(), gate.clone());
    let worker = Background::start(worker_at(database.url()).concurrency(2_000).handle_kind("wait", move |_, _| {
        let (count, pass) = (count.clone(), pass.clone());
        async move {
            count.fetch_add(1, Ordering::SeqCst);
            drop(pass.acquire().await);
        }
    }));
    wait_until(SOON, "all handlers run at once", async || running.load(Ordering::SeqCst) == JOBS).await;
    let look = database.connect().await;
    let sessions = "select count(*), count(*) filter (where state like 'idle in%' or backend_xmin is not null)
        from pg_stat_activity where datname = current_database() and application_name ~ '^posthouse/(claim|settle|heartbeat|listen|sweep)$'";
    wait_until(SOON, "no session of the worker holds a snapshot", async || {
        look.query_one(sessions, &[]).await.unwrap().get::<_, i64>(1) == 0
    })
    .await;
    let connections: i64 = look.query_one(sessions, &[]).await.unwrap().get(0);
    assert!((1..=5).contains(&connections), "{connections} connections");
    gate.add_permits(JOBS);
    wait_until(SOON, "all are done", async || {
        queue.health().await.unwrap().iter().map(|queue| queue.done).sum::<i64>() == JOBS as i64
    })
    .await;
    assert_eq!(worker.end().await.done, JOBS as u64);
}

/// Polls so rarely that only what the test is about can start a job in time.
fn sleepy(url: &str, log: &Log) -> posthouse::worker::Builder {
    let log = log.clone();
    Worker::builder(Database::new(url).unwrap()).poll(Duration::from_secs(300)).handle_kind(
        "k",
        move |_, context: Context| {
            drop(log.begin(context.job_id()));
            async {}
        },
    )
}

/// Waits until the worker has looked, found nothing, and gone to sleep.
async fn falls_asleep(database: &posthouse::testing::TestDatabase) {
    let look = database.connect().await;
    let asleep = "select count(*) from pg_stat_activity where datname = current_database()
        and application_name = 'posthouse/claim' and state = 'idle' and query like '%next_due%'
        and state_change < clock_timestamp() - interval '300 milliseconds'";
    wait_until(SOON, "the worker is asleep", async || look.query_one(asleep, &[]).await.unwrap().get::<_, i64>(0) == 1)
        .await;
}

#[tokio::test]
async fn a_notification_wakes_it() {
    let (database, log) = (database().await, Log::default());
    let worker = Background::start(sleepy(database.url(), &log));
    falls_asleep(&database).await;
    let queue = queue_at(database.url());
    let id = queue.enqueue_job(NewJob::from_json("k", "{}").unwrap()).await.unwrap().id;
    job_in(&queue, id, "done").await;
    worker.end().await;
}

#[tokio::test]
async fn it_does_not_claim_again_where_it_took_all() {
    let (database, log, meter) = (database().await, Log::default(), Meter::default());
    let worker = Background::start(sleepy(database.url(), &log).meter(&meter));
    let queue = queue_at(database.url());
    let claims = || {
        let counted = meter.families().into_iter().find(|family| family.name == "posthouse_claims_total").unwrap();
        counted.samples[0].value.clone()
    };
    falls_asleep(&database).await;
    let SampleValue::Number(before) = claims() else { panic!("no number") };
    for _ in 0..5 {
        let id = queue.enqueue_job(NewJob::from_json("k", "{}").unwrap()).await.unwrap().id;
        job_in(&queue, id, "done").await;
        falls_asleep(&database).await;
    }
    let SampleValue::Number(after) = claims() else { panic!("no number") };
    assert!((5.0..=7.0).contains(&(after - before)), "{} claims for five jobs", after - before);
    worker.end().await;
}

#[tokio::test]
async fn it_wakes_by_itself_when_a_job_is_due() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let later = NewJob::from_json("k", "{}").unwrap().delay(Duration::from_millis(1_500));
    let (id, enqueued) = (queue.enqueue_job(later).await.unwrap().id, Instant::now());
    let worker = Background::start(sleepy(database.url(), &log));
    job_in(&queue, id, "done").await;
    assert!(log.runs()[0].from.duration_since(enqueued) > Duration::from_millis(1_300), "it did not wait");
    worker.end().await;
}

#[tokio::test]
async fn what_was_said_while_nobody_listened_is_found() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let worker = Background::start(sleepy(database.url(), &log));
    falls_asleep(&database).await;
    let admin = database.connect().await;
    // The listener is gone, and the job committed, in one statement: no notification can arrive.
    admin
        .batch_execute(
            "begin; select pg_terminate_backend(pid) from pg_stat_activity
               where datname = current_database() and application_name = 'posthouse/listen';
             select posthouse.enqueue('k', '{}'); commit",
        )
        .await
        .unwrap();
    wait_until(SOON, "the job is run", async || log.runs().len() == 1).await;
    assert_eq!(queue.health().await.unwrap()[0].due, 0);
    worker.end().await;
}

#[tokio::test]
async fn kinds_without_a_handler_are_left_to_others() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let other = queue.enqueue_job(NewJob::from_json("unknown", "{}").unwrap()).await.unwrap().id;
    let elsewhere = queue.enqueue_job(NewJob::from_json("k", "{}").unwrap().queue("elsewhere")).await.unwrap().id;
    let own = queue.enqueue_job(NewJob::from_json("k", "{}").unwrap()).await.unwrap().id;
    let worker = Background::start(sleepy(database.url(), &log).until_empty(true));
    assert_eq!(worker.ended().await.started, 1);
    job_in(&queue, own, "done").await;
    for id in [other, elsewhere] {
        let job = queue.job(id).await.unwrap().unwrap();
        assert_eq!((job.state.as_str(), job.attempt), ("queued", 0));
    }
}

#[tokio::test]
async fn a_running_job_is_cancelled_within_moments() {
    let (database, log) = (database().await, Log::default());
    let queue = queue_at(database.url());
    let (id, deaf) = (enqueue(&queue, "polite", 1).await[0], enqueue(&queue, "deaf", 1).await[0]);
    let (one, two) = (log.clone(), log.clone());
    // A heartbeat every 15 s: it is the notification that brings the news.
    let worker = worker_at(database.url()).lease(Duration::from_secs(60)).heartbeat(Duration::from_secs(15));
    let worker = Background::start(
        worker
            .handle_kind("polite", move |_, context: Context| {
                let run = one.begin(context.job_id());
                async move {
                    let _run = run;
                    assert_eq!(context.cancelled().await, CancelReason::User);
                    Outcome::done(&"too late")
                }
            })
            .handle_kind("deaf", move |_, context: Context| {
                let run = two.begin(context.job_id());
                async move {
                    let _run = run;
                    std::future::pending::<()>().await;
                }
            }),
    );
    log.wait_for_open(2).await;
    let asked = Instant::now();
    assert_eq!(queue.cancel(id).await.unwrap(), "running");
    let job = job_in(&queue, id, "cancelled").await;
    assert!(asked.elapsed() < Duration::from_secs(5), "the news took {:?}", asked.elapsed());
    assert!(job.result.is_none_or(|result| result.get() == "null"), "a cancelled job has no result");
    assert_eq!(queue.cancel(deaf).await.unwrap(), "running");
    job_in(&queue, deaf, "cancelled").await;
    assert_eq!(log.open(), 0, "a deaf handler is dropped");
    assert_eq!(worker.end().await.cancelled, 2);
}

#[tokio::test]
async fn progress_is_seen_while_the_job_runs() {
    let database = database().await;
    let queue = queue_at(database.url());
    let id = enqueue(&queue, "k", 1).await[0];
    let gate = Arc::new(tokio::sync::Notify::new());
    let pass = gate.clone();
    let worker = Background::start(worker_at(database.url()).handle_kind(
        "k",
        move |payload: Box<RawValue>, context: Context| {
            let pass = pass.clone();
            async move {
                assert_eq!(payload.get(), r#"{"n": 0}"#);
                context.progress(&json!({"percent": 50})).await.unwrap();
                pass.notified().await;
            }
        },
    ));
    wait_until(SOON, "the progress is stored", async || {
        queue.job(id).await.unwrap().unwrap().progress == Some(json!({"percent": 50}))
    })
    .await;
    gate.notify_one();
    job_in(&queue, id, "done").await;
    worker.end().await;
}

#[tokio::test]
async fn it_does_not_start_where_it_cannot_work() {
    let bare = posthouse::testing::TestDatabase::new("select 1", async |_: &str| Ok::<(), Error>(())).await;
    let error = worker_at(bare.url()).handle(case).run_until(std::future::pending()).await.unwrap_err();
    assert!(error.is_schema_mismatch() && error.to_string().contains("posthouse db migrate"), "{error}");
    let database = database().await;
    let error = worker_at(database.url()).run_until(std::future::pending()).await.unwrap_err();
    assert!(error.to_string().starts_with("handle:"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_thousand_jobs_run_once_each_on_eight_workers() {
    const JOBS: usize = 20_000;
    let (database, runs) = (database().await, Arc::new(std::sync::Mutex::new(BTreeMap::<i64, u32>::new())));
    let queue = queue_at(database.url());
    enqueue(&queue, "k", JOBS).await;
    let workers: Vec<Background> = (0..8)
        .map(|_| {
            let runs = runs.clone();
            Background::start(worker_at(database.url()).until_empty(true).handle_kind(
                "k",
                move |_, context: Context| {
                    *runs.lock().unwrap().entry(context.job_id()).or_default() += 1;
                    async {}
                },
            ))
        })
        .collect();
    let mut done = 0;
    for worker in workers {
        let summary = worker.ended().await;
        assert_eq!(summary.lost, 0);
        done += summary.done;
    }
    assert_eq!(done, JOBS as u64);
    let runs = runs.lock().unwrap();
    assert_eq!(runs.len(), JOBS);
    assert!(runs.values().all(|runs| *runs == 1), "some job ran twice");
}
