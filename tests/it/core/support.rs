//! A database with the schema, sessions that speak SQL, and a worker that is nothing but its calls.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use futures_util::stream::poll_fn;
use posthouse::Posthouse;
use posthouse::store::schema_sql;
use posthouse::testing::TestDatabase;
use serde_json::Value;
use tokio_postgres::types::FromSqlOwned;
use tokio_postgres::{AsyncMessage, Client, NoTls, Row};
use uuid::Uuid;

use crate::harness::{SOON, wait_until};

/// A database of the test's own.
pub(super) struct Queue {
    database: TestDatabase,
}

/// One connection.
pub(super) struct Session {
    pub(super) client: Client,
    pub(super) pid: i32,
}

/// What Postgres said when it refused.
#[derive(Debug, PartialEq)]
pub(super) struct Refusal {
    pub(super) code: String,
    pub(super) message: String,
    pub(super) hint: Option<String>,
}

/// A worker: its id, the number of its next claim, and its place among the lanes.
pub(super) struct Worker {
    pub(super) id: Uuid,
    pub(super) seq: Cell<i64>,
    pub(super) lane: Cell<i64>,
}

/// A claimed job.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Claimed {
    pub(super) id: i64,
    pub(super) fence: i64,
    pub(super) attempt: i32,
    pub(super) max_attempts: i32,
    pub(super) kind: String,
    pub(super) queue: String,
    pub(super) tenant: String,
    pub(super) priority: i32,
    pub(super) payload: Value,
    pub(super) timeout_ms: Option<i64>,
    pub(super) lane: i64,
}

/// What a heartbeat answered.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pulse {
    pub(super) mismatch: bool,
    pub(super) cancel: Vec<i64>,
    pub(super) lost: Vec<i64>,
    pub(super) released: i32,
}

/// What a settle answered about one outcome.
pub(super) type Verdict = (Option<i64>, String, Option<String>);

impl Queue {
    pub(super) async fn new() -> Self {
        let database = TestDatabase::new(&schema_sql(), async |url: &str| Posthouse::migrate(url).await).await;
        Self { database }
    }

    pub(super) fn url(&self) -> &str {
        self.database.url()
    }

    pub(super) async fn session(&self) -> Session {
        let client = self.database.connect().await;
        let pid = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
        Session { client, pid }
    }

    /// A connection, and what this picks from all that the server says beside answers.
    pub(super) async fn hearing(&self, pick: fn(AsyncMessage) -> Option<String>) -> (Client, Arc<Mutex<Vec<String>>>) {
        let (client, mut connection) = tokio_postgres::connect(self.url(), NoTls).await.unwrap();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let hearing = heard.clone();
        tokio::spawn(async move {
            let mut messages = poll_fn(move |cx| connection.poll_message(cx));
            while let Some(Ok(message)) = messages.next().await {
                hearing.lock().unwrap().extend(pick(message));
            }
        });
        (client, heard)
    }

    /// A queue and a session in it.
    pub(super) async fn with_session() -> (Self, Session) {
        let queue = Self::new().await;
        let session = queue.session().await;
        (queue, session)
    }
}

impl Session {
    pub(super) async fn run(&self, sql: &str) {
        if let Err(error) = self.client.batch_execute(sql).await {
            panic!("{error:?} in: {sql:.300}");
        }
    }

    pub(super) async fn rows(&self, sql: &str) -> Vec<Row> {
        match self.client.query(sql, &[]).await {
            Ok(rows) => rows,
            Err(error) => panic!("{error:?} in: {sql:.300}"),
        }
    }

    /// The only value of the only row.
    pub(super) async fn get<T: FromSqlOwned>(&self, sql: &str) -> T {
        let rows = self.rows(sql).await;
        assert_eq!(rows.len(), 1, "rows of: {sql:.300}");
        rows[0].get(0)
    }

    /// The first column.
    pub(super) async fn list<T: FromSqlOwned>(&self, sql: &str) -> Vec<T> {
        self.rows(sql).await.iter().map(|row| row.get(0)).collect()
    }

    pub(super) async fn count(&self, from: &str) -> i64 {
        self.get(&format!("select count(*) from {from}")).await
    }

    /// The error of a statement that must not work.
    pub(super) async fn refused(&self, sql: &str) -> Refusal {
        match self.client.query(sql, &[]).await {
            Ok(_) => panic!("not refused: {sql:.300}"),
            Err(error) => refusal(&error),
        }
    }

    /// Enqueue with these arguments, e.g. `kind => 'a', delay => '1 hour'`; the answer is the id.
    pub(super) async fn enqueue(&self, arguments: &str) -> i64 {
        self.get(&format!("select id from posthouse.enqueue({arguments})")).await
    }

    /// Enqueue; the answer is the id, the state, and whether it is a duplicate.
    pub(super) async fn enqueued(&self, arguments: &str) -> (i64, String, bool) {
        let rows = self.rows(&format!("select * from posthouse.enqueue({arguments})")).await;
        (rows[0].get(0), rows[0].get(1), rows[0].get(2))
    }

    /// As many jobs of a kind and tenant, quickly.
    pub(super) async fn enqueue_bulk(&self, kind: &str, tenant: &str, jobs: i64) {
        self.run(&format!(
            "select posthouse.enqueue_many(jobs) from (select jsonb_agg(jsonb_build_object('kind', '{kind}', 'tenant', '{tenant}')) as jobs
               from generate_series(1, {jobs}) n group by n / 10000) b"
        ))
        .await;
    }

    /// A worker of queue `default` for these kinds.
    pub(super) async fn worker(&self, kinds: &[&str]) -> Worker {
        self.worker_of(&["default"], kinds, 3_600_000).await
    }

    pub(super) async fn worker_of(&self, queues: &[&str], kinds: &[&str], lease_ms: i64) -> Worker {
        let id = Uuid::new_v4();
        self.client
            .query(
                "select posthouse.register_worker($1, $2, $3, 10, $4, '{\"host\": \"box\", \"pid\": 7}')",
                &[&id, &queues, &kinds, &lease_ms],
            )
            .await
            .unwrap();
        Worker { id, seq: Cell::new(1), lane: Cell::new(0) }
    }

    /// Let a worker's lease be over by the clock of the database.
    pub(super) async fn expire(&self, worker: Uuid) {
        self.run(&format!(
            "update posthouse.worker set expires_at = clock_timestamp() - interval '1 second', lease_ms = 1 where id = '{worker}'"
        ))
        .await;
    }

    /// Rescue with this worker as suspect; the answer is the jobs moved.
    pub(super) async fn rescue(&self, worker: Uuid) -> i32 {
        self.get(&format!(
            "select jobs from posthouse.rescue((select jsonb_agg(jsonb_build_object('worker', id, 'beat_at', beat_at))
               from posthouse.worker where id = '{worker}'))"
        ))
        .await
    }

    pub(super) async fn settle(&self, worker: Uuid, outcomes: &Value) -> Vec<Verdict> {
        self.settle_text(worker, &outcomes.to_string()).await.unwrap()
    }

    /// Settle with outcomes that serde_json would not write.
    pub(super) async fn settle_text(
        &self,
        worker: Uuid,
        outcomes: &str,
    ) -> Result<Vec<Verdict>, tokio_postgres::Error> {
        let rows = self
            .client
            .query("select id, verdict, state from posthouse.settle($1, $2::text::json)", &[&worker, &outcomes])
            .await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect())
    }

    /// A heartbeat that says what it holds, with the list or only its sums; `None`: over.
    pub(super) async fn beat(
        &self,
        worker: Uuid,
        (mark, oldest): (i64, i64),
        held: &[(i64, i64)],
        with_list: bool,
    ) -> Option<Pulse> {
        let (ids, fences): (Vec<i64>, Vec<i64>) = held.iter().copied().unzip();
        let list =
            if with_list { format!("'{{{}}}', '{{{}}}'", join(&ids), join(&fences)) } else { "null, null".to_owned() };
        let rows = self
            .rows(&format!(
                "select mismatch, cancel, lost, released from posthouse.heartbeat('{worker}', {mark}, {oldest}, {}, {}, {}, {list})",
                held.len(),
                ids.iter().sum::<i64>(),
                fences.iter().sum::<i64>(),
            ))
            .await;
        rows.first().map(|row| Pulse {
            mismatch: row.get(0),
            cancel: row.get(1),
            lost: row.get(2),
            released: row.get(3),
        })
    }

    /// A job as the view shows it.
    pub(super) async fn job(&self, id: i64) -> Value {
        self.get(&format!("select to_jsonb(j.*) from posthouse.jobs j where j.id = {id}")).await
    }

    pub(super) async fn state(&self, id: i64) -> String {
        self.get::<Option<String>>(&format!("select posthouse.state_of({id})")).await.unwrap_or_default()
    }

    /// Take the cure out of a function, to see the harm that it prevents.
    pub(super) async fn cripple(&self, function: &str, cure: &str, without: &str) {
        let definition: String = self
            .get(&format!("select pg_get_functiondef(oid) from pg_proc where proname = '{function}' and pronamespace = 'posthouse'::regnamespace"))
            .await;
        assert!(definition.contains(cure), "{function} does not contain {cure:?} any more:\n{definition}");
        self.run(&definition.replace(cure, without)).await;
    }

    /// Wait until another session waits for a lock.
    pub(super) async fn wait_blocked(&self, pid: i32) {
        let sql = format!("select cardinality(pg_blocking_pids({pid})) > 0");
        wait_until(SOON, "the other session is blocked", async || self.get::<bool>(&sql).await).await;
    }
}

impl Worker {
    /// Claim with the next number.
    pub(super) async fn claim(&self, session: &Session, max_jobs: i32) -> Vec<Claimed> {
        let jobs = self.claim_as(session, self.seq.get(), max_jobs).await.unwrap();
        self.seq.set(self.seq.get() + 1);
        if let Some(last) = jobs.last() {
            self.lane.set(last.lane);
        }
        jobs
    }

    /// Claim with a number of the caller's.
    pub(super) async fn claim_as(&self, session: &Session, seq: i64, max_jobs: i32) -> Result<Vec<Claimed>, Refusal> {
        let rows = session
            .client
            .query(
                "select id, fence, attempt, max_attempts, kind, queue, tenant, priority, payload, timeout_ms, lane
                 from posthouse.claim($1, $2, $3, $4)",
                &[&self.id, &seq, &max_jobs, &self.lane.get()],
            )
            .await
            .map_err(|error| refusal(&error))?;
        Ok(rows.iter().map(claimed).collect())
    }
}

fn claimed(row: &Row) -> Claimed {
    Claimed {
        id: row.get(0),
        fence: row.get(1),
        attempt: row.get(2),
        max_attempts: row.get(3),
        kind: row.get(4),
        queue: row.get(5),
        tenant: row.get(6),
        priority: row.get(7),
        payload: row.get(8),
        timeout_ms: row.get(9),
        lane: row.get(10),
    }
}

pub(super) fn refusal(error: &tokio_postgres::Error) -> Refusal {
    match error.as_db_error() {
        Some(error) => Refusal {
            code: error.code().code().to_owned(),
            message: error.message().to_owned(),
            hint: error.hint().map(str::to_owned),
        },
        None => panic!("not an error of Postgres: {error:?}"),
    }
}

/// The ids of claimed jobs.
pub(super) fn ids(jobs: &[Claimed]) -> Vec<i64> {
    jobs.iter().map(|job| job.id).collect()
}

/// Ids and fences, as heartbeats send them.
pub(super) fn held(jobs: &[Claimed]) -> Vec<(i64, i64)> {
    jobs.iter().map(|job| (job.id, job.fence)).collect()
}

/// A verdict without its id.
pub(super) fn said(verdicts: &[Verdict]) -> Vec<(&str, Option<&str>)> {
    verdicts.iter().map(|(_, verdict, state)| (verdict.as_str(), state.as_deref())).collect()
}

fn join(numbers: &[i64]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}
