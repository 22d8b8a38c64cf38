//! What the tests of gates share: a clock that they set, limits, and what can be told of jobs after they ran.

use serde_json::{Value, json};
use uuid::Uuid;

use super::support::{Claimed, Queue, Session, Verdict, Worker};

/// Makes every function of the queue read a clock that a session sets; where it does not, the true one.
const MADE_UP_CLOCK: &str = "
    create function posthouse.made_up_now() returns timestamptz language sql volatile as
      $$ select coalesce(nullif(current_setting('test.now', true), '')::timestamptz, clock_timestamp()) $$;
    do $$
    declare f record;
    begin
      for f in select pg_get_functiondef(p.oid) as definition from pg_proc p
               where p.pronamespace = 'posthouse'::regnamespace and p.prokind = 'f' and p.proname <> 'made_up_now'
                 and p.prosrc like '%clock_timestamp()%'
      loop
        execute replace(f.definition, 'clock_timestamp()', 'posthouse.made_up_now()');
      end loop;
    end $$";

/// A clock of a test's own: in a queue that has one, this session's calls happen when it says.
pub(super) struct Clock<'s> {
    session: &'s Session,
    /// In microseconds since 1970.
    pub(super) now: i64,
}

impl<'s> Clock<'s> {
    /// The clock of a queue whose functions are made to read it, at noon of a Wednesday.
    pub(super) async fn new(session: &'s Session) -> Self {
        session.run(MADE_UP_CLOCK).await;
        let mut clock = Self { session, now: 1_900_065_600_000_000 };
        clock.pass(0).await;
        clock
    }

    /// So many milliseconds later.
    pub(super) async fn pass(&mut self, ms: i64) {
        self.pass_us(ms * 1_000).await;
    }

    pub(super) async fn pass_us(&mut self, us: i64) {
        self.now += us;
        let sql = format!(
            "select set_config('test.now', (timestamptz 'epoch' + {} * interval '1 microsecond')::text, false)",
            self.now
        );
        self.session.run(&sql).await;
    }
}

impl Queue {
    /// A queue, a session, and a worker of kind `k`.
    pub(super) async fn with_worker() -> (Self, Session, Worker) {
        let (queue, session) = Self::with_session().await;
        let worker = session.worker(&["k"]).await;
        (queue, session, worker)
    }
}

impl Session {
    /// Set a gate with these arguments, e.g. `'crm', max_running => 3`.
    pub(super) async fn set_gate(&self, arguments: &str) {
        self.run(&format!("select posthouse.set_gate({arguments})")).await;
    }

    /// As many jobs of kind `k` with these other fields.
    pub(super) async fn enqueue_with(&self, jobs: i64, fields: &str) {
        self.run(&format!(
            "select posthouse.enqueue_many(jobs) from (select jsonb_agg('{{\"kind\": \"k\"}}' || '{fields}'::jsonb) as jobs
               from generate_series(1, {jobs}) n group by n / 10000) b"
        ))
        .await;
    }

    /// Settle these jobs alike: the outcome's other fields.
    pub(super) async fn end(&self, worker: Uuid, jobs: &[Claimed], fields: &Value) -> Vec<Verdict> {
        let outcomes: Vec<Value> = jobs
            .iter()
            .map(|job| {
                let mut outcome = json!({"id": job.id, "fence": job.fence});
                outcome.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
                outcome
            })
            .collect();
        let verdicts = self.settle(worker, &json!(outcomes)).await;
        assert!(verdicts.iter().all(|verdict| verdict.1 == "applied"), "{verdicts:?}");
        verdicts
    }

    /// All jobs are done.
    pub(super) async fn done(&self, worker: Uuid, jobs: &[Claimed]) {
        self.end(worker, jobs, &json!({"outcome": "done"})).await;
    }

    /// Let lanes fall asleep at the next claim that finds nothing for them.
    pub(super) async fn without_naps(&self) {
        self.run("update posthouse.lane set awake_until = '-infinity'").await;
    }

    /// What a gate says of itself: `select {what} from posthouse.gates`.
    pub(super) async fn of_gate(&self, name: &str, what: &str) -> i64 {
        self.get(&format!("select coalesce(sum({what}), 0)::bigint from posthouse.gates where name = '{name}'")).await
    }

    /// `admit`: for how many milliseconds a call of this job has to wait.
    pub(super) async fn admit(&self, worker: Uuid, job: &Claimed, gates: &str, tokens: i64) -> Option<i64> {
        self.get(&format!("select posthouse.admit('{worker}', {}, {}, '{{{gates}}}', {tokens})", job.id, job.fence))
            .await
    }

    /// For how long a worker may sleep, as it is told, in milliseconds.
    pub(super) async fn next_due(&self, worker: Uuid) -> Option<i64> {
        self.get(&format!("select posthouse.next_due('{worker}')")).await
    }
}
