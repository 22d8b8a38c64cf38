//! While somebody else holds a snapshot: what calls visit does not grow with what was done meanwhile, and the floors that see to it
//! pass no job.

use fastrand::Rng;
use serde_json::{Value, json};

use super::gates_support::Clock;
use super::support::{Claimed, Queue, Session, Worker};
use crate::harness::{SOON, wait_until};

const TENANTS: i64 = 1_000;
/// Lanes that nobody holds fall asleep when they are found empty.
const TIRED: &str = "update posthouse.lane set awake_until = '-infinity', in_use_until = '-infinity'
    where id in (select id from posthouse.lane for update skip locked)";

/// A steady load of so many tenants by a clock of the test's own: each second two hundred jobs, every tenth with one of a hundred
/// keys that are used again and again, of other tenants than the second before.
struct Load<'s> {
    session: &'s Session,
    clock: Clock<'s>,
    worker: Worker,
    seconds: i64,
}

impl<'s> Load<'s> {
    async fn new(session: &'s Session) -> Self {
        let clock = Clock::new(session).await;
        let worker = session.worker_of(&["default"], &["k"], 3_600_000).await;
        Self { session, clock, worker, seconds: 0 }
    }

    /// One second: jobs are enqueued, claimed and settled, the worker's heart beats, and the floors rise.
    async fn second(&mut self) {
        let first = self.seconds * 200;
        self.seconds += 1;
        self.session
            .run(&format!(
                "select posthouse.enqueue_many((
                   select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't' || n % {TENANTS})
                     || case when n % 10 = 0 then jsonb_build_object('dedupe_key', 'key ' || n / 10 % 100) else '{{}}' end)
                   from generate_series({first}, {first} + 199) n))"
            ))
            .await;
        let jobs = self.worker.claim(self.session, 500).await;
        assert_eq!(jobs.len(), 200);
        self.session.done(self.worker.id, &jobs).await;
        assert!(self.worker.claim(self.session, 500).await.is_empty());
        let (id, seq) = (self.worker.id, self.worker.seq.get());
        self.session.run(&format!("select * from posthouse.heartbeat('{id}', {}, {seq}, 0, 0, 0)", seq - 1)).await;
        self.clock.pass(1_000).await;
        self.session.run("select posthouse.advance_floors()").await;
    }

    /// The pages that a call reads.
    async fn pages(&self, call: &str) -> i64 {
        let plan: Value =
            self.session.get(&format!("explain (analyze, buffers, timing off, format json) {call}")).await;
        let of = |field: &str| plan[0]["Plan"][field].as_i64().unwrap();
        of("Shared Hit Blocks") + of("Shared Read Blocks")
    }

    /// The pages of each call for a hundred jobs, which are done afterwards; and of a claim that finds nothing.
    async fn costs(&self) -> Vec<(&'static str, i64)> {
        let (s, id) = (self.session, self.worker.id);
        s.run(
            "select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't' || n * 10, 'dedupe_key', 'key ' || n))
               from generate_series(0, 99) n))"
        )
        .await;
        let seq = self.worker.seq.get();
        self.worker.seq.set(seq + 2);
        let claim = |seq: i64| format!("select * from posthouse.claim('{id}', {seq}, 500)");
        let mut costs = vec![("claim", self.pages(&claim(seq)).await)];
        costs.push(("claim that finds nothing", self.pages(&claim(seq + 1)).await));
        let held =
            "select count(*) || ', ' || sum(id) || ', ' || sum(fence) from posthouse.job where state = 'running'";
        let held: String = s.get(held).await;
        costs.push((
            "heartbeat",
            self.pages(&format!("select * from posthouse.heartbeat('{id}', {0}, {0}, {held})", seq + 1)).await,
        ));
        let jobs: Value = s
            .get("select json_agg(json_build_object('id', id, 'fence', fence, 'outcome', 'done')) from posthouse.job where state = 'running'")
            .await;
        assert_eq!(jobs.as_array().unwrap().len(), 100);
        costs.push(("settle", self.pages(&format!("select * from posthouse.settle('{id}', '{jobs}')")).await));
        s.run(&format!("select * from posthouse.heartbeat('{id}', {0}, {1}, 0, 0, 0)", seq + 1, seq + 2)).await;
        costs.push(("rescue of nobody", self.pages("select * from posthouse.rescue('[]')").await));
        costs
    }
}

#[tokio::test]
async fn a_thousand_tenants_under_a_snapshot_cost_the_same_after_forty_thousand_jobs() {
    let (queue, s) = Queue::with_session().await;
    s.run("select posthouse.make_partitions(1000000)").await;
    let mut load = Load::new(&s).await;
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select count(*) from posthouse.worker").await;
    for _ in 0..5 {
        load.second().await;
    }
    let before = load.costs().await;
    for _ in 0..200 {
        load.second().await;
    }
    let after = load.costs().await;
    for ((call, before), (_, after)) in before.iter().zip(&after) {
        println!("figure: a thousand tenants under a snapshot: {call}: {before} pages, then {after}");
    }
    for ((call, before), (_, after)) in before.iter().zip(&after) {
        assert!(*after <= before * 6 / 5 + 100, "{call}: {before} pages, then {after}");
    }
    // One look into the jobs of each lane that is awake, which are two pages deep here, and what was done since the floor.
    assert!(after[1].1 <= 3 * TENANTS, "{after:?}");
    // Nothing that grows with lanes and time: a floor a second for all of them, and no lane fell asleep that is in use.
    let floors: i64 = s.get("select max(seq) from posthouse.lane_floor").await;
    assert!(floors <= 210, "{floors}");
    assert_eq!(s.count("posthouse.lane where naps = 0 or ready_at = 'infinity'").await, 0);
    let rows: i64 = holder.get("select count(*) from posthouse.job").await;
    assert_eq!(rows, 0, "the snapshot was held all the while");
}

#[tokio::test]
async fn a_lane_that_is_not_in_use_falls_asleep_soon_and_one_that_is_does_not() {
    let (_queue, s) = Queue::with_session().await;
    let mut load = Load::new(&s).await;
    let asleep = "posthouse.lane where ready_at = 'infinity'";
    s.run("select posthouse.enqueue('k', tenant => 'once')").await;
    for second in 0..100 {
        if second % 3 == 0 {
            s.run("select posthouse.enqueue('k', tenant => 'often')").await;
        }
        let jobs = load.worker.claim(&s, 10).await;
        s.done(load.worker.id, &jobs).await;
        load.worker.claim(&s, 10).await;
        assert_eq!(s.count(asleep).await, i64::from(second > 10), "after {second} s");
        load.clock.pass(1_000).await;
    }
    assert_eq!(s.count("posthouse.lane where tenant = 'often' and naps = 2").await, 1, "it was kept awake for long");
    // Out of use, it sleeps when its time is over.
    load.clock.pass(900_000).await;
    load.worker.claim(&s, 10).await;
    assert_eq!(s.count(asleep).await, 2);
}

#[tokio::test]
async fn a_transaction_that_writes_late_sets_no_floor_back() {
    let (queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    for n in 0..20 {
        s.enqueue(&format!("kind => 'k', tenant => 't{n}'")).await;
    }
    let jobs = worker.claim(&s, 100).await;
    s.done(worker.id, &jobs).await;
    let late = queue.session().await;
    late.run("begin; select 1").await;
    // By its clock the floor goes past the transaction's beginning.
    s.run("select pg_sleep(0.2); select posthouse.advance_floors()").await;
    let floor = "select count(*) || ' ' || max(floor_at) from posthouse.lane_floor";
    let before: String = s.get(floor).await;
    late.run("select posthouse.enqueue('k', tenant => 't1')").await;
    s.run("select posthouse.advance_floors()").await;
    assert_eq!(s.get::<String>(floor).await, before);
    late.run("commit").await;
    assert_eq!(worker.claim(&s, 10).await.len(), 1);
}

/// Lanes that are behind have floors of their own, and go back to the common one when they have caught up.
#[tokio::test]
async fn only_lanes_that_are_behind_have_floors_of_their_own() {
    let (_queue, s) = Queue::with_session().await;
    let mut load = Load::new(&s).await;
    s.enqueue_bulk("k", "backlog", 10).await;
    let own = "posthouse.lane_floor f where f.lane_id > 0 and f.floor_at is not null
        and f.seq = (select max(x.seq) from posthouse.lane_floor x where x.lane_id = f.lane_id)";
    for second in 0..10 {
        s.enqueue_bulk("k", &format!("t{second}"), 1).await;
        s.run("update posthouse.lane set priority = case tenant when 'backlog' then 9 else 0 end").await;
        let jobs = load.worker.claim(&s, 1).await;
        s.done(load.worker.id, &jobs).await;
        load.clock.pass(1_000).await;
        s.run("select posthouse.advance_floors()").await;
    }
    assert_eq!(s.count(own).await, 1, "the backlog holds back nobody else");
    let lag: f64 =
        s.get("select extract(epoch from posthouse.made_up_now() - (posthouse.common_floor()).floor_at)::float8").await;
    assert!(lag < 2.0, "{lag}");
    assert_eq!(load.worker.claim(&s, 100).await.len(), 10);
    s.run("select posthouse.advance_floors()").await;
    assert_eq!(s.count(own).await, 0);
    assert!(!s.get::<bool>("select (posthouse.common_floor()).behind").await);
}

/// What happens in any order, in two sessions; each is a client that keeps its transactions open for as long as it likes.
struct Anything<'s> {
    rng: Rng,
    s: &'s Session,
    /// Enqueues in long transactions.
    other: &'s Session,
    open: bool,
    worker: Worker,
    running: Vec<Claimed>,
}

impl Anything<'_> {
    /// One of the things that can happen.
    async fn step(&mut self) {
        match self.rng.u8(0..14) {
            0..=2 => self.enqueue(self.s).await,
            3 | 4 => self.enqueue_in_long_transaction().await,
            5 | 6 => self.claim().await,
            7..=9 => self.settle().await,
            10 => self.s.run(TIRED).await,
            11 => self.open_or_close_a_gate().await,
            12 => {
                let priority = self.rng.i32(0..2);
                self.s.run(&format!("select posthouse.reprioritise_many('{{\"kind\": \"k\"}}', {priority})")).await;
            }
            _ => self.s.run("select posthouse.advance_floors()").await,
        }
    }

    async fn enqueue(&mut self, session: &Session) {
        let rng = &mut self.rng;
        let when = match rng.u8(0..4) {
            0 => ", run_at => clock_timestamp() - interval '1 hour'".to_owned(),
            1 => format!(", delay => interval '{} milliseconds'", rng.u16(0..200)),
            _ => String::new(),
        };
        session
            .enqueue(&format!("kind => 'k', tenant => 't{}', priority => {}{when}", rng.u8(0..4), rng.u8(0..2)))
            .await;
    }

    async fn enqueue_in_long_transaction(&mut self) {
        if self.open && self.rng.bool() {
            self.other.run("commit").await;
            self.open = false;
            return;
        }
        if !self.open {
            self.other.run("begin").await;
            self.open = true;
        }
        self.enqueue(self.other).await;
    }

    async fn claim(&mut self) {
        let most = self.rng.i32(1..8);
        let jobs = self.worker.claim(self.s, most).await;
        self.running.extend(jobs);
    }

    async fn settle(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let job = self.running.swap_remove(self.rng.usize(0..self.running.len()));
        let delay = self.rng.u16(0..100);
        let outcome = match self.rng.u8(0..6) {
            0 => json!({"outcome": "retry", "delay_ms": delay}),
            1 => json!({"outcome": "snooze", "delay_ms": delay}),
            2 => json!({"outcome": "release"}),
            _ => json!({"outcome": "done"}),
        };
        self.s.end(self.worker.id, &[job], &outcome).await;
    }

    async fn open_or_close_a_gate(&mut self) {
        let gate = format!("tenant:t{}", self.rng.u8(0..4));
        let call = if self.rng.bool() { "close_gate" } else { "open_gate" };
        self.s.run(&format!("select posthouse.{call}('{gate}')")).await;
    }

    /// Everything is committed and open: every job is claimed and done before long.
    async fn end(mut self) {
        if self.open {
            self.other.run("commit").await;
        }
        self.s.run("select posthouse.open_gate(g.name) from posthouse.gates g").await;
        wait_until(SOON, "every job is claimed", async || {
            self.s
                .run("select posthouse.advance_floors(), posthouse.rescue_stragglers(), posthouse.wake_missed()")
                .await;
            self.claim().await;
            let jobs = std::mem::take(&mut self.running);
            self.s.done(self.worker.id, &jobs).await;
            self.s.count("posthouse.job").await == 0
        })
        .await;
    }
}

/// A history of so many steps. The answer: how often jobs were seen behind the floor that a claim of them goes by.
async fn anything(bound: &str, seed: u64) -> i64 {
    let (queue, s) = Queue::with_session().await;
    s.cripple("advance_floors", "interval '30 seconds'", bound).await;
    let other = queue.session().await;
    let worker = s.worker(&["k"]).await;
    s.run("set lock_timeout = '3s'").await;
    let rng = Rng::with_seed(seed);
    let mut anything = Anything { rng, s: &s, other: &other, open: false, worker, running: Vec::new() };
    let mut behind = 0;
    for _ in 0..300 {
        anything.step().await;
        behind +=
            s.count("posthouse.job j where j.state = 'queued' and j.run_at < posthouse.floor_of(j.lane_id)").await;
    }
    anything.end().await;
    behind
}

#[tokio::test]
async fn no_floor_passes_a_job_whatever_happens() {
    for seed in 0..6 {
        assert_eq!(anything("interval '30 seconds'", seed).await, 0, "seed {seed}");
    }
}

#[tokio::test]
async fn jobs_that_commit_behind_a_floor_are_claimed_too() {
    let mut behind = 0;
    for seed in 0..4 {
        behind += anything("interval '0'", seed).await;
    }
    assert!(behind > 0, "open transactions hold no floor back, so some were behind");
}
