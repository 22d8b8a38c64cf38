//! The doctor finds what is wrong: each check is provoked, and where the fix is a statement that a test can run, it is run and helps.
//! What holds back vacuum is in `doctor_horizon`.

use std::time::{Duration, Instant};

use posthouse::store::{Database, Diagnosis, Examination, Finding, Severity, examine};
use posthouse::testing::{TestCluster, TestDatabase};

use super::support::{Queue, Session};
use crate::harness::{SOON, wait_until};
use crate::pooler::PgBouncer;
use crate::worker_support::{Background, database_on, worker_at};

pub(super) async fn diagnose(url: &str, examination: &Examination) -> Diagnosis {
    examine(&Database::new(url).unwrap(), examination).await.unwrap()
}

/// What a check finds.
pub(super) async fn found(url: &str, check: &str) -> Vec<Finding> {
    let mut diagnosis = diagnose(url, &Examination::default()).await;
    let fine = diagnosis.fine.contains(&check);
    diagnosis.findings.retain(|f| f.check == check);
    assert_eq!(fine, diagnosis.findings.is_empty(), "{check}: {diagnosis:?}");
    diagnosis.findings
}

/// The only thing that a check finds; it must say these words.
pub(super) async fn finds(url: &str, check: &str, severity: Severity, words: &str) -> Finding {
    let findings = found(url, check).await;
    let found: Vec<_> = findings.iter().filter(|f| f.what.contains(words)).collect();
    assert_eq!(found.len(), 1, "{check}, {words}: {findings:#?}");
    assert_eq!(found[0].severity, severity, "{findings:#?}");
    assert!(!found[0].why.is_empty() && !found[0].fix.is_empty(), "{findings:#?}");
    found[0].clone()
}

/// A fix, without the words behind it.
fn statement(finding: &Finding) -> &str {
    finding.fix.split(" -- ").next().unwrap()
}

async fn name(s: &Session) -> String {
    s.get("select current_database()::text").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_healthy_queue_has_nothing_bad() {
    let sound = [
        ("fsync", "on"),
        ("full_page_writes", "on"),
        ("synchronous_commit", "on"),
        ("idle_in_transaction_session_timeout", "10min"),
    ];
    let cluster = tokio::task::spawn_blocking(move || TestCluster::dedicated(&sound)).await.unwrap();
    let database = database_on(&cluster).await;
    let worker =
        Background::start(worker_at(database.url()).handle_kind("k", async |_, _| posthouse::Outcome::done(&1)));
    let late = "select coalesce(string_agg(name, ', '), '') from posthouse.sweeps where late";
    let client = database.connect().await;
    let mut missing: String;
    let deadline = Instant::now() + SOON * 2;
    while {
        missing = client.query_one(late, &[]).await.unwrap().get(0);
        !missing.is_empty()
    } {
        assert!(Instant::now() < deadline, "not swept: {missing}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let diagnosis = diagnose(database.url(), &Examination::default()).await;
    worker.end().await;
    // Nice to have, and not on every server.
    let wrong: Vec<_> = diagnosis.findings.iter().filter(|f| f.check != "extensions").collect();
    assert!(wrong.is_empty() && !diagnosis.is_bad(), "{wrong:#?}");
    assert!(diagnosis.fine.len() >= 20, "{:?}", diagnosis.fine);
    // The same by SQL, for programs in any language.
    let rows = client
        .query("select name from posthouse.doctor() where severity <> 'note' and name <> 'sweeps'", &[])
        .await
        .unwrap();
    assert!(rows.is_empty(), "{rows:?}");
}

#[tokio::test]
async fn settings_of_a_server_that_lose_jobs_or_never_clean_up_are_bad() {
    let unsound = [
        ("fsync", "off"),
        ("full_page_writes", "off"),
        ("synchronous_commit", "off"),
        ("autovacuum", "off"),
        ("track_counts", "off"),
    ];
    let cluster = tokio::task::spawn_blocking(move || TestCluster::dedicated(&unsound)).await.unwrap();
    let database = database_on(&cluster).await;
    let url = database.url();
    finds(url, "autovacuum", Severity::Bad, "autovacuum is off").await;
    finds(url, "autovacuum", Severity::Bad, "track_counts is off").await;
    finds(url, "durability", Severity::Bad, "fsync is off").await;
    finds(url, "durability", Severity::Bad, "full_page_writes is off").await;
    let found = finds(url, "durability", Severity::Warning, "synchronous_commit is off").await;
    assert!(found.fix.starts_with("alter system set synchronous_commit = 'on'"), "{found:?}");
}

#[tokio::test]
async fn settings_are_mended_where_they_were_made() {
    let (queue, s) = Queue::with_session().await;
    let name = name(&s).await;
    for (check, setting, value) in [
        ("isolation_level", "default_transaction_isolation", "serializable"),
        ("read_only", "default_transaction_read_only", "on"),
        ("timeouts", "statement_timeout", "1s"),
        ("timeouts", "lock_timeout", "1s"),
        ("timeouts", "idle_in_transaction_session_timeout", "0"),
        ("durability", "synchronous_commit", "off"),
    ] {
        s.run(&format!("alter database {name} set {setting} = '{value}'")).await;
        let severity = match check {
            "durability" => Severity::Warning,
            "read_only" => Severity::Bad,
            _ => Severity::Note,
        };
        let finding = finds(queue.url(), check, severity, &format!("{setting} is ")).await;
        assert!(finding.fix.starts_with(&format!("alter database {name} set {setting}")), "{finding:?}");
        s.run(statement(&finding)).await;
        let still = found(queue.url(), check).await;
        assert!(!still.iter().any(|f| f.subject.as_deref() == Some(setting)), "{still:#?}");
    }
    s.run("alter table posthouse.job set (autovacuum_enabled = false); alter table posthouse.archive_0 set (toast.autovacuum_enabled = off)").await;
    let job = finds(queue.url(), "autovacuum", Severity::Bad, "turned off for posthouse.job").await;
    let archive = finds(queue.url(), "autovacuum", Severity::Bad, "turned off for posthouse.archive_0").await;
    s.run(&format!("{}; {}", job.fix, archive.fix)).await;
    assert!(found(queue.url(), "autovacuum").await.is_empty());
    s.run(&format!("alter database {name} connection limit 4")).await;
    finds(queue.url(), "connections", Severity::Bad, "more connections").await;
    s.run(&format!("alter database {name} connection limit 10")).await;
    finds(queue.url(), "connections", Severity::Warning, "more connections").await;
    s.run(&format!("alter database {name} connection limit -1")).await;
}

#[tokio::test]
async fn an_index_that_is_not_valid_is_found() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 2).await;
    let refused = s.refused("create unique index concurrently broken on posthouse.job (lane_id)").await;
    assert_eq!(refused.code, "23505");
    let finding =
        finds(queue.url(), "indexes", Severity::Bad, "index posthouse.broken of posthouse.job is not valid").await;
    s.run("delete from posthouse.payload; delete from posthouse.job").await;
    s.run(statement(&finding)).await;
    assert!(found(queue.url(), "indexes").await.is_empty());
}

#[tokio::test]
async fn partitions_that_lack_or_hang_are_found() {
    let (queue, s) = Queue::with_session().await;
    let url = queue.url();
    s.run("select setval('posthouse.job_id_seq', 50000000)").await;
    let finding = finds(url, "partitions", Severity::Warning, "no partition for the next job, 50000001").await;
    s.run(statement(&finding)).await;
    assert!(found(url, "partitions").await.is_empty());

    // Somebody detaches by hand, and is cancelled while he waits for a reader.
    let (reader, watcher) = (queue.session().await, queue.session().await);
    reader.run("begin; select from posthouse.archive").await;
    let pid = s.pid;
    let detach = tokio::spawn(async move {
        let refused =
            s.refused("alter table posthouse.archive detach partition posthouse.archive_0 concurrently").await;
        (s, refused)
    });
    watcher.wait_blocked(pid).await;
    watcher.run(&format!("select pg_cancel_backend({pid})")).await;
    let (s, refused) = detach.await.unwrap();
    assert_eq!(refused.code, "57014");
    reader.run("commit").await;
    let finding =
        finds(url, "partitions", Severity::Warning, "posthouse.archive_0 from posthouse.archive was begun").await;
    s.run(statement(&finding)).await;
    assert!(found(url, "partitions").await.is_empty());

    s.run(
        "do $$ begin for n in 1 .. 201 loop
           execute format('create table posthouse.far_%s partition of posthouse.archive for values from (%s) to (%s)', n, n + 1e12::bigint, n + 1 + 1e12::bigint);
         end loop; end $$",
    )
    .await;
    finds(url, "partitions", Severity::Warning, "posthouse.archive has 2").await;
    s.run("update pg_class set reltuples = 2e6 where oid = 'posthouse.far_1'::regclass; update pg_class set reltuples = -1 where oid = 'posthouse.archive'::regclass").await;
    let finding = finds(url, "statistics", Severity::Warning, "posthouse.archive has never been analysed").await;
    s.run(statement(&finding)).await;
    assert!(found(url, "statistics").await.is_empty());
}

#[tokio::test]
async fn dead_rows_that_pile_up_are_found() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 500).await;
    s.run("delete from posthouse.job").await;
    let examination = Examination { dead_rows: 400, ..Examination::default() };
    wait_until(SOON, "the dead rows of job are found", async || {
        // Older versions send what they counted with a later statement.
        s.run("select 1").await;
        let diagnosis = diagnose(queue.url(), &examination).await;
        diagnosis.findings.iter().any(|f| {
            f.check == "dead_rows" && f.subject.as_deref() == Some("posthouse.job") && f.what.contains("500 dead rows")
        })
    })
    .await;
    assert!(found(queue.url(), "dead_rows").await.is_empty(), "few dead rows are no news");
}

#[tokio::test]
async fn jobs_that_are_not_whole_are_found() {
    let (queue, s) = Queue::with_session().await;
    let url = queue.url();
    let (bare, unclaimed, twice) = (s.enqueue("'k'").await, s.enqueue("'k'").await, s.enqueue("'other'").await);
    let dead = s.enqueue("'other'").await;
    s.run(&format!("delete from posthouse.payload where id = {bare}")).await;
    let finding = finds(url, "payloads", Severity::Bad, &format!("1 live jobs have no payload: {bare}")).await;
    s.run(statement(&finding)).await;
    assert!(found(url, "payloads").await.is_empty());

    let worker = s.worker(&["k"]).await;
    assert_eq!(worker.claim(&s, 10).await.len(), 1);
    assert!(found(url, "claims").await.is_empty());
    s.run("delete from posthouse.claimed").await;
    let finding =
        finds(url, "claims", Severity::Bad, &format!("1 jobs are running and no claim names them: {unclaimed}")).await;
    s.run(statement(&finding)).await;
    assert_eq!((s.state(unclaimed).await.as_str(), found(url, "claims").await.len()), ("queued", 0));

    let archive = |from: &str, id: i64| {
        format!(
            "insert into posthouse.archive (id, lane_id, created_at, finished_at, fence, attempt, max_attempts, state)
             select id, lane_id, created_at, now(), fence, attempt, max_attempts, 'done' from posthouse.{from} where id = {id}"
        )
    };
    s.run(&archive("job", twice)).await;
    let finding =
        finds(url, "homes", Severity::Bad, &format!("1 jobs have ended and are live all the same: {twice}")).await;
    s.run(statement(&finding)).await;
    assert_eq!((s.state(twice).await.as_str(), found(url, "homes").await.len()), ("done", 0));
    let other = s.worker(&["other"]).await;
    assert_eq!(other.claim(&s, 10).await[0].id, dead);
    s.settle(other.id, &serde_json::json!([{"id": dead, "fence": 1, "outcome": "fail", "error": "x"}])).await;
    s.run(&archive("dead_letter", dead)).await;
    let finding =
        finds(url, "homes", Severity::Bad, &format!("1 dead letters have ended another way as well: {dead}")).await;
    s.run(statement(&finding)).await;
    assert!(found(url, "homes").await.is_empty());

    s.run("select setval('posthouse.job_id_seq', 1)").await;
    let finding = finds(url, "ids", Severity::Bad, &format!("there is a job {dead}, and the next one will be 2")).await;
    s.run(statement(&finding)).await;
    assert!(found(url, "ids").await.is_empty());

    s.enqueue_bulk("k", "t", 5).await;
    let diagnosis = diagnose(url, &Examination { max_jobs: 3, ..Examination::default() }).await;
    assert!(diagnosis.findings.iter().any(|f| f.what == "only the 3 oldest live jobs were looked at"), "{diagnosis:?}");
}

#[tokio::test]
async fn sweeps_that_fail_and_workers_that_lack_are_found() {
    let (queue, s) = Queue::with_session().await;
    let url = queue.url();
    s.enqueue("'k'").await;
    finds(url, "sweeps", Severity::Warning, "everything: not swept lately, since no worker is there").await;
    finds(url, "workers", Severity::Warning, "jobs are due and there is no live worker").await;
    s.run("update posthouse.sweep set ran_at = clock_timestamp(), failing_since = clock_timestamp(), failures = 3, error = 'disk full' where name = 'folds'").await;
    finds(url, "sweeps", Severity::Bad, "the sweep folds has been failing since").await;
    let (worker, other) = (s.worker(&["k"]).await, s.worker(&["k"]).await);
    let late = finds(url, "sweeps", Severity::Bad, "not swept lately, though workers are there").await;
    assert!(!late.what.contains("folds,"), "{late:?}");
    s.run(&format!("update posthouse.worker set version = '0.0.9' where id = '{}'", worker.id)).await;
    finds(url, "workers", Severity::Note, "workers of several versions are at work: 0.0.9, unknown").await;
    s.expire(other.id).await;
    s.run("update posthouse.worker set expires_at = clock_timestamp() - interval '3 minutes' where lease_ms = 1").await;
    // A server that has just started gives everybody the time of a lease.
    s.cripple("lease_end", "pg_postmaster_start_time()", "'-infinity'::timestamptz").await;
    finds(url, "workers", Severity::Warning, "1 workers have been silent").await;
}

#[tokio::test]
async fn a_schema_that_is_not_that_of_the_binary_is_told_of() {
    let empty = TestDatabase::new("select 1", async |_: &str| Ok::<(), posthouse::Error>(())).await;
    let diagnosis = diagnose(empty.url(), &Examination::default()).await;
    assert!(diagnosis.is_bad() && diagnosis.findings[0].fix == "posthouse db migrate", "{diagnosis:?}");
    let (queue, s) = Queue::with_session().await;
    assert!(found(queue.url(), "schema").await.is_empty());
    s.run("update posthouse.meta set value = 'older' where name = 'functions'; drop function posthouse.doctor(interval); drop function posthouse.doctor_workers()").await;
    finds(queue.url(), "schema", Severity::Bad, "of another posthouse").await;
    let diagnosis = diagnose(queue.url(), &Examination::default()).await;
    let unseen = diagnosis.findings.iter().find(|f| f.check == "sweeps, workers").expect("told of");
    assert!(
        unseen.severity == Severity::Warning
            && unseen.fix == "posthouse db migrate"
            && unseen.what.contains("not looked at"),
        "{unseen:?}"
    );
    assert!(!diagnosis.fine.contains(&"sweeps") && diagnosis.fine.contains(&"indexes"), "{:?}", diagnosis.fine);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_in_between_is_noticed() {
    let queue = Queue::new().await;
    assert!(found(queue.url(), "pooler").await.is_empty());
    let pooler = PgBouncer::start(queue.url());
    let url = pooler.url(queue.url());
    wait_until(SOON, "the pooler answers", async || Database::new(&url).unwrap().store("probe").ping().await.is_ok())
        .await;
    let finding = finds(&url, "pooler", Severity::Note, "a pooler in transaction mode").await;
    assert!(finding.fix.contains("POSTHOUSE_LISTEN_URL"), "{finding:?}");
    // Others keep it busy, so that server connections change hands.
    let busy: Vec<_> = (0..3)
        .map(|_| {
            let store = Database::new(&url).unwrap().store("noise");
            tokio::spawn(async move {
                loop {
                    store.ping().await.unwrap();
                }
            })
        })
        .collect();
    for _ in 0..5 {
        finds(&url, "pooler", Severity::Note, "a pooler in transaction mode").await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    busy.iter().for_each(tokio::task::JoinHandle::abort);
}
