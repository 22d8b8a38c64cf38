//! The client: what enqueueing promises when futures are dropped, answers get lost and transactions belong to others.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use posthouse::store::{Action, Database, Selection, Settlement, Verdict};
use posthouse::{Job, NewJob, Outcome, Posthouse};
use serde::{Deserialize, Serialize};

use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::registered;

pub(crate) use crate::worker_support::database as queue_database;

/// Longer than any test.
const LEASE: Duration = Duration::from_secs(600);

#[derive(Serialize, Deserialize)]
struct Summarize {
    text: String,
}

impl Job for Summarize {
    const KIND: &'static str = "summarize";
    const MAX_ATTEMPTS: Option<u32> = Some(7);
}

fn job(n: usize) -> NewJob {
    NewJob::new("a", &serde_json::json!({ "n": n })).unwrap()
}

async fn count(client: &tokio_postgres::Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// Polls a future at most `polls` times, then drops it: it stops at whatever await it had reached.
async fn poll_at_most<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_typed_job_carries_its_limits_and_answers_for_duplicates() {
    let database = queue_database().await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    let enqueue = || queue.enqueue(Summarize { text: "…".into() }).tenant("acme").dedupe_key("hook-17");
    let first = enqueue().await.unwrap();
    assert!(!first.duplicate && first.state == "queued");
    let second = enqueue().await.unwrap();
    assert!(second.duplicate && second.id == first.id);
    let record = queue.job(first.id).await.unwrap().unwrap();
    assert_eq!((record.max_attempts, record.tenant.as_str(), record.kind.as_str()), (7, "acme", "summarize"));
    assert!(queue.job(999_999).await.unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn enqueues_at_the_same_time_share_commits_and_a_bad_one_spoils_nothing() {
    let database = queue_database().await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    let client = database.connect().await;
    let tasks: Vec<_> = (0..300)
        .map(|n| {
            let queue = queue.clone();
            let new = match n {
                50 => NewJob::from_json("a", r#"{"text":"a\u0000b"}"#).unwrap(),
                60 => job(n).queue(""),
                70 => job(n).max_attempts(0),
                _ => job(n),
            };
            tokio::spawn(async move { (n, queue.enqueue_job(new).await) })
        })
        .collect();
    for task in tasks {
        let (n, answer) = task.await.unwrap();
        match (n, answer) {
            (50, Err(error)) => assert!(error.is_invalid() && error.to_string().starts_with("payload:"), "{error}"),
            (60, Err(error)) => assert!(error.is_invalid() && error.to_string().contains("queue:"), "{error}"),
            (70, Err(error)) => assert!(error.is_invalid() && error.to_string().contains("max_attempts:"), "{error}"),
            (_, answer) => {
                // The answer is about this very job, not another of the batch.
                let id = answer.unwrap().id;
                let sql = format!("select (payload ->> 'n')::bigint from posthouse.payload where id = {id}");
                assert_eq!(count(&client, &sql).await, i64::try_from(n).unwrap());
            }
        }
    }
    assert_eq!(count(&client, "select count(*) from posthouse.job").await, 297);
    let commits = count(&client, "select count(distinct xmin::text) from posthouse.job").await;
    assert!(commits < 297, "{commits} commits for 297 jobs: nothing was gathered");
}

#[tokio::test(flavor = "multi_thread")]
async fn where_many_come_two_batches_are_on_their_way_and_nobody_overtakes_himself() {
    let database = queue_database().await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    let client = database.connect().await;
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let queue = queue.clone();
            tokio::spawn(async move {
                let mut ids = Vec::new();
                for n in 0..40 {
                    ids.push(queue.enqueue_job(job(task * 40 + n)).await.unwrap().id);
                }
                ids
            })
        })
        .collect();
    let mut all = Vec::new();
    for task in tasks {
        let ids = task.await.unwrap();
        assert!(ids.is_sorted(), "{ids:?}");
        all.extend(ids);
    }
    let sql =
        "select count(*) from unnest($1::bigint[]) with ordinality u(id, n) join posthouse.payload p on p.id = u.id
               where (p.payload ->> 'n')::bigint = u.n - 1";
    assert_eq!(client.query_one(sql, &[&all]).await.unwrap().get::<_, i64>(0), 64 * 40);
    assert_eq!(count(&client, "select count(*) from posthouse.job").await, 64 * 40);
    let connections = "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'posthouse/enqueue'";
    assert_eq!(count(&client, connections).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn where_there_is_but_one_connection_one_is_enough() {
    let database = queue_database().await;
    let client = database.connect().await;
    let role = format!("few_{}", uuid::Uuid::new_v4().simple());
    client
        .batch_execute(&format!(
            "create role {role} login password 'sesame' connection limit 1; grant usage on schema posthouse to {role};
             grant all on all tables in schema posthouse to {role}; grant all on all sequences in schema posthouse to {role};
             grant execute on all functions in schema posthouse to {role}"
        ))
        .await
        .unwrap();
    let (front, behind) = database.url().split_once('@').unwrap();
    assert!(front.starts_with("postgres://"));
    let queue = Posthouse::connect(&format!("postgres://{role}:sesame@{behind}")).await.unwrap();
    // Postgres counts the connection that looked at the schema until its session has ended.
    let sessions = format!("select count(*) from pg_stat_activity where usename = '{role}'");
    wait_until(SOON, "the first session has ended", async || count(&client, &sessions).await == 0).await;
    let tasks: Vec<_> = (0..64)
        .map(|task| {
            let queue = queue.clone();
            tokio::spawn(async move {
                for n in 0..10 {
                    queue.enqueue_job(job(task * 10 + n)).await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(count(&client, "select count(*) from posthouse.job").await, 640);
    drop(queue);
    client.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rehearsal_undoes_nothing_of_what_others_do_meanwhile() {
    let database = queue_database().await;
    let store = Database::new(database.url()).unwrap().store("shared");
    let client = database.connect().await;
    for n in 0..20 {
        store.enqueue(&job(n)).await.unwrap();
    }
    let rehearse = async {
        for _ in 0..30 {
            let selection = Selection { kind: Some("a".to_owned()), ..Selection::default() };
            let batch = store.rehearse_jobs(&selection, &Action::Cancel, 100, None).await.unwrap();
            assert!(batch.changed >= 20, "{batch:?}");
        }
    };
    let enqueue = async {
        let mut ids = Vec::new();
        for n in 20..320 {
            ids.push(store.enqueue(&job(n)).await.unwrap().id);
        }
        ids
    };
    let ((), ids) = tokio::join!(rehearse, enqueue);
    let sql = "select count(*) from posthouse.job where id = any($1)";
    assert_eq!(client.query_one(sql, &[&ids]).await.unwrap().get::<_, i64>(0), 300);
    assert_eq!(count(&client, "select count(*) from posthouse.job where state = 'queued'").await, 320);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_in_a_transaction_exists_if_and_only_if_that_commits() {
    let database = queue_database().await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    let mut client = database.connect().await;
    for commit in [false, true] {
        let transaction = client.transaction().await.unwrap();
        transaction.batch_execute("create table if not exists business (id int)").await.unwrap();
        let job = queue.enqueue(Summarize { text: "…".into() }).in_transaction(&transaction).await.unwrap();
        assert!(queue.job(job.id).await.unwrap().is_none(), "visible before its commit");
        if commit {
            transaction.commit().await.unwrap()
        } else {
            transaction.rollback().await.unwrap()
        }
        assert_eq!(queue.job(job.id).await.unwrap().is_some(), commit);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enqueue_dropped_at_any_await_leaves_nothing_open() {
    let database = queue_database().await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    let client = database.connect().await;
    let mut finished = 0;
    for polls in 1..40 {
        // A queue of its own each time, so that connecting is among the awaits.
        let fresh = Posthouse::new(Database::new(database.url()).unwrap());
        finished += i64::from(poll_at_most(polls, fresh.enqueue_job(job(polls)).into_future()).await.is_some());
        finished += i64::from(
            poll_at_most(polls, fresh.enqueue_job(job(polls).dedupe_key(polls.to_string())).into_future())
                .await
                .is_some(),
        );
        finished += i64::from(poll_at_most(polls, queue.enqueue_job(job(polls)).into_future()).await.is_some());
    }
    assert!(finished > 0, "no future was ever polled to its end");
    queue.enqueue_job(job(0)).await.unwrap();
    nothing_left_open(&client).await;
    let jobs = count(&client, "select count(*) from posthouse.job").await;
    assert!(jobs > finished && jobs <= 39 * 3 + 1, "{jobs} jobs, {finished} answers");
    assert_eq!(count(&client, "select count(*) from posthouse.payload").await, jobs, "half a job");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settle_dropped_at_any_await_is_written_whole_or_not_at_all_and_can_be_repeated() {
    let database = queue_database().await;
    for isolation in ["read committed", "serializable"] {
        let client = database.connect().await;
        let name = database.url().rsplit('/').next().unwrap().split('?').next().unwrap().to_owned();
        client
            .batch_execute(&format!("alter database {name} set default_transaction_isolation = '{isolation}'"))
            .await
            .unwrap();
        let queue = Posthouse::connect(database.url()).await.unwrap();
        let store = queue.database().store("test");
        let worker = registered(&store, LEASE, &["a"]).await;
        for polls in 1..30 {
            queue.enqueue_job(job(polls)).await.unwrap();
            let claimed = store.claim(worker, i64::try_from(polls).unwrap(), 10, 0).await.unwrap();
            let outcomes: Vec<_> =
                claimed.iter().map(|j| Settlement::new(j.id, j.fence, Outcome::done(&polls))).collect();
            assert_eq!(outcomes.len(), 1);
            let fresh = store.with_timeout(Duration::from_secs(30));
            let _ = poll_at_most(polls, fresh.settle(worker, &outcomes)).await;
            let again = store.settle(worker, &outcomes).await.unwrap();
            assert!(matches!(again[0].verdict, Verdict::Applied | Verdict::Already), "{again:?}");
            assert_eq!(again[0].state.as_deref(), Some("done"));
        }
        nothing_left_open(&client).await;
        assert_eq!(count(&client, "select count(*) from posthouse.job").await, 0);
    }
}

async fn nothing_left_open(client: &tokio_postgres::Client) {
    wait_until(SOON, "no transaction is open", async || {
        count(
            client,
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
             and (state like 'idle in transaction%' or state = 'active')",
        )
        .await
            == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_asked_again_and_changes_nothing() {
    let database = queue_database().await;
    let proxy = FaultProxy::start(database.url()).await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    queue.enqueue_many(&(0..5).map(job).collect::<Vec<_>>()).await.unwrap();
    let direct = queue.database().store("test");
    let worker = registered(&direct, LEASE, &["a"]).await;
    let store = Database::new(&proxy.url(database.url())).unwrap().store("cut");

    proxy.lose_answer_to("posthouse.claim");
    let error = store.claim(worker, 1, 3, 0).await.unwrap_err();
    assert!(error.is_disconnected() && error.is_transient(), "{error}");
    let claimed = store.claim(worker, 1, 3, 0).await.unwrap();
    assert_eq!(claimed.len(), 3);
    assert!(claimed.iter().all(|j| j.attempt == 1 && j.fence == 1), "charged twice: {claimed:?}");

    let outcomes: Vec<_> = claimed.iter().map(|j| Settlement::new(j.id, j.fence, Outcome::done(&1))).collect();
    proxy.lose_answer_to("posthouse.settle");
    assert!(store.settle(worker, &outcomes).await.unwrap_err().is_disconnected());
    let again = store.settle(worker, &outcomes).await.unwrap();
    assert!(again.iter().all(|s| s.verdict == Verdict::Already), "{again:?}");

    proxy.lose_request("posthouse.settle");
    let claimed = direct.claim(worker, 2, 10, 0).await.unwrap();
    let outcomes: Vec<_> = claimed.iter().map(|j| Settlement::new(j.id, j.fence, Outcome::done(&1))).collect();
    assert!(store.settle(worker, &outcomes).await.unwrap_err().is_disconnected());
    assert!(store.settle(worker, &outcomes).await.unwrap().iter().all(|s| s.verdict == Verdict::Applied));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_held_dedupe_key_delays_only_those_who_want_the_same() {
    let database = queue_database().await;
    let queue = Posthouse::connect(database.url()).await.unwrap();
    let mut client = database.connect().await;
    let transaction = client.transaction().await.unwrap();
    let held = queue.enqueue_job(job(1).dedupe_key("k")).in_transaction(&transaction).await.unwrap();
    let waiting = tokio::spawn({
        let queue = queue.clone();
        async move { queue.enqueue_job(job(2).dedupe_key("k")).await }
    });
    for n in 0..20 {
        let other = tokio::time::timeout(SOON, queue.enqueue_job(job(n).dedupe_key(format!("other-{n}")))).await;
        other.expect("delayed by somebody else's key").unwrap();
        tokio::time::timeout(SOON, queue.enqueue_job(job(n))).await.expect("delayed by a key").unwrap();
    }
    assert!(!waiting.is_finished());
    transaction.commit().await.unwrap();
    let duplicate = waiting.await.unwrap().unwrap();
    assert_eq!((duplicate.id, duplicate.duplicate), (held.id, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_down_is_told_from_one_that_is_far() {
    let database = queue_database().await;
    let nobody = "postgres://u:p@127.0.0.1:1/d";
    let error = Database::new(nobody).unwrap().store("test").ping().await.unwrap_err();
    assert!(error.is_server_down() && error.is_transient(), "{error:?}");
    let proxy = FaultProxy::start(database.url()).await;
    let store =
        Database::new(&proxy.url(database.url())).unwrap().store("test").with_timeout(Duration::from_millis(300));
    store.ping().await.unwrap();
    proxy.stall();
    let error = store.ping().await.unwrap_err();
    assert!(error.is_disconnected() && !error.is_server_down(), "{error:?}");
    proxy.heal();
    store.ping().await.unwrap();
}
