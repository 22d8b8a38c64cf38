//! Notifications that do not come, connections that listen and break, and a reader that stands still.

use std::time::{Duration, Instant};

use posthouse::Outcome;
use tokio_postgres::Client;

use super::support::{Journal, assert_one_record_each, work};
use crate::client::queue_database;
use crate::harness::{FaultProxy, SOON, wait_until};
use crate::worker_support::{enqueue, queue_at, worker_at};

const HOUR: Duration = Duration::from_secs(3_600);

/// The sessions of workers in this database.
const SESSIONS: &str = "from pg_stat_activity where datname = current_database()
    and application_name ~ '^posthouse/(claim|settle|heartbeat|listen|sweep)$'";

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(&format!("select count(*) {sql}"), &[]).await.unwrap().get(0)
}

/// Enqueues by SQL, and waits until the job has started; answers with its id and how long that took.
async fn started_after(client: &Client, journal: &Journal, enqueue: &str) -> (i64, Duration) {
    let asked = Instant::now();
    let id: i64 = client.query_one(enqueue, &[]).await.unwrap().get(0);
    journal.wait_for("start", id, 1).await;
    (id, asked.elapsed())
}

#[tokio::test]
async fn fifty_listeners_cut_off_in_a_row_delay_no_job_and_leave_no_session() {
    let (database, journal) = (queue_database().await, Journal::new());
    let client = database.connect().await;
    let handler = format!("k={}", journal.command("true"));
    let _worker = work(database.url(), &journal, &["--poll-ms", "1000", "--lease-ms", "30000", "--exec", &handler]);
    let listening =
        format!("{SESSIONS} and application_name = 'posthouse/listen' and query like 'listen%' and state = 'idle'");
    // The listener is gone, and the job there, at one moment: no notification can arrive.
    let cut_off = format!(
        "with gone as materialized (select pg_terminate_backend(pid) {SESSIONS} and application_name = 'posthouse/listen')
         select e.id from (select count(*) from gone) g, lateral posthouse.enqueue('k', '{{}}') e"
    );
    let mut ids = Vec::new();
    for _ in 0..50 {
        wait_until(SOON, "the worker listens", async || count(&client, &listening).await == 1).await;
        let (id, delay) = started_after(&client, &journal, &cut_off).await;
        // A poll takes up to a second; the rest is for a busy machine.
        assert!(delay < Duration::from_secs(3), "job {id} started after {delay:?}");
        ids.push(id);
    }
    wait_until(SOON, "the worker listens", async || count(&client, &listening).await == 1).await;
    wait_until(SOON, "every job is done", async || count(&client, "from posthouse.job").await == 0).await;
    let sessions = count(&client, SESSIONS).await;
    assert!(sessions <= 5, "{sessions} sessions of one worker");
    journal.assert_each_ran_once(&ids);
    assert_one_record_each(&database, &ids).await;
}

#[tokio::test]
async fn without_a_listener_jobs_are_found_by_polling() {
    let (database, journal) = (queue_database().await, Journal::new());
    let client = database.connect().await;
    let handler = format!("k={}", journal.command("true"));
    // One that may not listen, and one whose address for it is wrong: nothing answers on that port.
    let nowhere = "postgres://nobody@127.0.0.1:1/nowhere";
    for how in [&["--no-listen"][..], &["--listen-url", nowhere]] {
        let worker = work(database.url(), &journal, &[how, &["--poll-ms", "500", "--exec", &handler]].concat());
        worker.printed("registered", SOON).await;
        for _ in 0..3 {
            let (id, delay) = started_after(&client, &journal, "select id from posthouse.enqueue('k', '{}')").await;
            assert!(delay < Duration::from_secs(3), "job {id} started after {delay:?}");
        }
        assert_eq!(count(&client, &format!("{SESSIONS} and application_name = 'posthouse/listen'")).await, 0);
    }
}

#[tokio::test]
async fn a_job_enqueued_while_the_listener_slowly_reconnects_is_not_slept_upon() {
    let (database, journal) = (queue_database().await, Journal::new());
    let client = database.connect().await;
    let proxy = FaultProxy::start(database.url()).await;
    let handler = format!("k={}", journal.command("true"));
    // Polling comes too late to help.
    let listen_url = proxy.url(database.url());
    let arguments = ["--poll-ms", "300000", "--lease-ms", "60000", "--listen-url", &listen_url, "--exec", &handler];
    let _worker = work(database.url(), &journal, &arguments);
    let listening =
        format!("{SESSIONS} and application_name = 'posthouse/listen' and query like 'listen%' and state = 'idle'");
    proxy.delay(Duration::from_millis(50));
    for n in 0..12 {
        wait_until(SOON, "the worker listens", async || count(&client, &listening).await == 1).await;
        proxy.cut_all();
        // Before it connects, while it does, before LISTEN, about then, after it.
        tokio::time::sleep(Duration::from_millis(75 * n)).await;
        let (id, delay) = started_after(&client, &journal, "select id from posthouse.enqueue('k', '{}')").await;
        assert!(delay < Duration::from_secs(10), "job {id} started after {delay:?}");
    }
}

#[tokio::test]
async fn a_runtime_that_stands_still_does_not_keep_postgres_from_cleaning_up() {
    let database = queue_database().await;
    let client = database.connect().await;
    let queue = queue_at(database.url());
    enqueue(&queue, "k", 1).await;
    // A runtime of its own, whose only thread the handler blocks for as long as the test looks.
    let (release, blocked) = std::sync::mpsc::channel::<()>();
    let (started, running) = std::sync::mpsc::channel::<()>();
    let (blocked, url) = (std::sync::Mutex::new(blocked), database.url().to_owned());
    let blocked = std::sync::Arc::new(blocked);
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let worker = worker_at(&url).lease(HOUR).heartbeat(HOUR / 2).until_empty(true);
        let worker = worker.handle_kind("k", move |_, _| {
            let (blocked, started) = (blocked.clone(), started.clone());
            async move {
                started.send(()).unwrap();
                blocked.lock().unwrap().recv_timeout(SOON * 2).ok();
                Outcome::done(&"let go")
            }
        });
        runtime.block_on(worker.run_until(std::future::pending())).unwrap()
    });
    tokio::task::spawn_blocking(move || running.recv_timeout(SOON).unwrap()).await.unwrap();
    let listening = format!("{SESSIONS} and application_name = 'posthouse/listen' and query like 'listen%'");
    wait_until(SOON, "the worker listens", async || count(&client, &listening).await == 1).await;
    // 60 MB: far more than the buffers between Postgres and a reader that does not read.
    let told = "select count(pg_notify('posthouse_wake', n || repeat('x', 3000))) from generate_series(1, 20000) n";
    client.query_one(told, &[]).await.unwrap();
    let all_told: std::time::SystemTime = client.query_one("select clock_timestamp()", &[]).await.unwrap().get(0);
    // It has read all of them when it hears what was said after them, which makes it send a heartbeat out of turn.
    let again = "select beat_at > $1, pg_notify('posthouse_cancel', id::text) from posthouse.worker";
    wait_until(SOON, "the worker has heard it all", async || {
        client.query_one(again, &[&all_told]).await.unwrap().get::<_, bool>(0)
    })
    .await;
    let pinned = format!("{SESSIONS} and (backend_xmin is not null or wait_event = 'ClientWrite')");
    wait_until(SOON, "no session of the worker holds a snapshot", async || count(&client, &pinned).await == 0).await;
    release.send(()).unwrap();
    let summary = tokio::task::spawn_blocking(move || worker.join().unwrap()).await.unwrap();
    assert_eq!(summary.done, 1);
}
