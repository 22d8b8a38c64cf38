//! What the hot functions read: rows and pages, counted, whatever lies around them and whatever the planner believes.
//!
//! Every statement inside the functions reports its plan (auto_explain, nested, to the client); a top-level EXPLAIN counts
//! the pages of the whole call.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio_postgres::{AsyncMessage, Client};

use super::support::{Queue, Session, Worker};

/// A session that hears the plan of every statement that runs inside a function.
pub(super) struct Watched {
    client: Client,
    heard: Arc<Mutex<Vec<String>>>,
}

/// What a call cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    /// Pages read, hit or not.
    pub(super) pages: u64,
    /// Rows that the busiest node of any plan looked at.
    pub(super) rows: u64,
}

impl Watched {
    pub(super) async fn new(queue: &Queue) -> Self {
        let (client, heard) = queue
            .hearing(|message| match message {
                AsyncMessage::Notice(notice) => Some(notice.message().to_owned()),
                _ => None,
            })
            .await;
        client
            .batch_execute(
                "load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
                 set auto_explain.log_analyze = on; set auto_explain.log_timing = off; set auto_explain.log_format = json;
                 set client_min_messages = log",
            )
            .await
            .unwrap();
        Self { client, heard }
    }

    /// Run a call and look at every plan in it: no sequential scan of a big table.
    pub(super) async fn cost(&self, call: &str) -> Cost {
        self.heard.lock().unwrap().clear();
        let explain = format!("explain (analyze, buffers, timing off, format json) {call}");
        let plan: Value = self.client.query_one(&explain, &[]).await.unwrap().get(0);
        let top = &plan[0]["Plan"];
        let mut cost = Cost { pages: number(top, "Shared Hit Blocks") + number(top, "Shared Read Blocks"), rows: 0 };
        let heard = std::mem::take(&mut *self.heard.lock().unwrap());
        let plans: Vec<Value> = heard
            .iter()
            .filter_map(|text| text.split_once("plan:\n"))
            .map(|(_, plan)| serde_json::from_str(plan).unwrap())
            .collect();
        assert!(!plans.is_empty(), "no plans were heard of {call}");
        for plan in &plans {
            visit(&plan["Plan"], &mut |node| {
                let table = node["Relation Name"].as_str().unwrap_or_default();
                let big = [
                    "job",
                    "payload",
                    "archive",
                    "tombstone",
                    "burial",
                    "attempt",
                    "dedupe",
                    "dead_letter",
                    "claimed",
                    "lane",
                    "gate_state",
                ];
                let scanned = node["Node Type"] == "Seq Scan" && big.iter().any(|name| table.starts_with(name));
                assert!(!scanned, "sequential scan of {table} in {call}: {}", plan["Query Text"]);
                let loops = number(node, "Actual Loops");
                let looked = [
                    "Actual Rows",
                    "Rows Removed by Filter",
                    "Rows Removed by Join Filter",
                    "Rows Removed by Index Recheck",
                ];
                let rows = loops * looked.iter().map(|field| number(node, field)).sum::<u64>();
                cost.rows = cost.rows.max(rows);
            });
        }
        cost
    }
}

fn number(node: &Value, field: &str) -> u64 {
    // Averages over loops are fractions in newer versions.
    node[field].as_f64().unwrap_or_default().ceil() as u64
}

fn visit(node: &Value, see: &mut impl FnMut(&Value)) {
    see(node);
    for child in node["Plans"].as_array().into_iter().flatten() {
        visit(child, see);
    }
}

/// No statistics but those that a test makes itself.
pub(super) async fn without_autovacuum(s: &Session) {
    let tables: Vec<String> = s
        .list("select c.oid::regclass::text from pg_class c where relnamespace = 'posthouse'::regnamespace and relkind = 'r'")
        .await;
    for table in tables {
        s.run(&format!("alter table {table} set (autovacuum_enabled = off)")).await;
    }
}

async fn empty(s: &Session) {
    for table in
        ["job", "payload", "archive", "tombstone", "burial", "dead_letter", "attempt", "dedupe", "claimed", "lane"]
    {
        s.run(&format!("delete from posthouse.{table}")).await;
    }
}

/// Jobs of these tenants, put into the tables directly: so many done, so many queued.
async fn load(s: &Session, archived: i64, queued: i64, tenants: i64) {
    let all = archived + queued;
    s.run(&format!(
        "insert into posthouse.lane (queue, priority, tenant, kind, ready_at, awake_until)
           select 'default', 0, 't' || n, 'k', '-infinity', clock_timestamp() + interval '1 hour' from generate_series(1, {tenants}) n;
         insert into posthouse.payload (id, payload) select n, '{{\"text\": \"hello\"}}' from generate_series(1, {all}) n;
         insert into posthouse.archive (id, lane_id, created_at, finished_at, worker, fence, attempt, max_attempts, state, result)
           select n, 1, now(), now(), gen_random_uuid(), 1, 1, 5, 'done', '\"fine\"' from generate_series(1, {archived}) n;
         insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, keyed)
           select n, l.ids[1 + n % cardinality(l.ids)], now() - interval '1 hour' + (n % 3600) * interval '1 second', now(), 5, n % 2 = 0
           from generate_series({archived} + 1, {all}) n, (select array_agg(id) as ids from posthouse.lane) l;
         insert into posthouse.dedupe select 't', 'k', 'key' || n, n, null from generate_series({archived} + 1, {all}) n where n % 2 = 0;
         select setval('posthouse.job_id_seq', {all})"
    ))
    .await;
}

/// One of each hot call, on this session: claim and settle of a hundred, heartbeats with and without lists, rescue of a
/// hundred, enqueue of one and of a hundred with keys. The worker goes on from call to call.
async fn round(watched: &Watched, s: &Session, worker: &Worker) -> Vec<(&'static str, Cost)> {
    let (id, seq) = (worker.id, worker.seq.get());
    worker.seq.set(seq + 2);
    let mut costs = vec![("claim", watched.cost(&format!("select * from posthouse.claim('{id}', {seq}, 100)")).await)];
    // A second claim that stays in flight, for what the heartbeats look at.
    costs
        .push(("claim again", watched.cost(&format!("select * from posthouse.claim('{id}', {}, 100)", seq + 1)).await));
    let of = |seq: i64| {
        format!(
            "from posthouse.claimed c, unnest(c.job_ids, c.fences) with ordinality u(id, fence, n) where c.worker = '{id}' and c.seq = {seq}"
        )
    };
    let outcomes: String = s
        .get(&format!(
            "select coalesce(json_agg(json_build_object('id', u.id, 'fence', u.fence, 'outcome',
               (array['done', 'done', 'done', 'done', 'done', 'done', 'retry', 'snooze', 'fail', 'cancelled'])[1 + n % 10], 'delay_ms', 3600000)), '[]')::text {}",
            of(seq)
        ))
        .await;
    costs.push(("settle", watched.cost(&format!("select * from posthouse.settle('{id}', '{outcomes}')")).await));
    costs.push(("settle again", watched.cost(&format!("select * from posthouse.settle('{id}', '{outcomes}')")).await));
    let held: String = s
        .get(&format!(
            "select count(*) || ', ' || coalesce(sum(u.id), 0) || ', ' || coalesce(sum(u.fence), 0) {}",
            of(seq + 1)
        ))
        .await;
    let beat = format!("select * from posthouse.heartbeat('{id}', {0}, {0}, {held})", seq + 1);
    costs.push(("heartbeat", watched.cost(&beat).await));
    // Half of them are held, the other half goes back.
    let list: String = s
        .get(&format!(
            "select quote_literal(coalesce(array_agg(u.id), '{{}}')) || '::bigint[], ' || quote_literal(coalesce(array_agg(u.fence), '{{}}')) || '::bigint[]' {} and u.n % 2 = 0",
            of(seq + 1)
        ))
        .await;
    costs.push((
        "heartbeat with list",
        watched.cost(&format!("select * from posthouse.heartbeat('{id}', {0}, {0}, 0, 0, 0, {list})", seq + 1)).await,
    ));
    // The next round begins with empty hands.
    s.rows(&format!(
        "select * from posthouse.settle('{id}', (select coalesce(json_agg(json_build_object('id', j.id, 'fence', j.fence, 'outcome', 'done')), '[]')
           from posthouse.job j where j.worker = '{id}' and j.state = 'running'))"
    ))
    .await;
    let dying = s.worker(&["k"]).await;
    dying.claim(s, 100).await;
    s.expire(dying.id).await;
    let suspects = format!("[{{\"worker\": \"{}\", \"beat_at\": \"2000-01-01\"}}]", dying.id);
    s.run(&format!("update posthouse.worker set beat_at = '2000-01-01' where id = '{}'", dying.id)).await;
    costs.push(("rescue", watched.cost(&format!("select * from posthouse.rescue('{suspects}')")).await));
    costs.push(("rescue of nobody", watched.cost("select * from posthouse.rescue('[]')").await));
    costs.push((
        "enqueue",
        watched
            .cost(&format!(
                "select * from posthouse.enqueue(kind => 'k', tenant => 't1', dedupe_key => 'new {id} {seq}')"
            ))
            .await,
    ));
    let many = format!(
        "select * from posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't1', 'dedupe_key', '{id} {seq}' || n)) from generate_series(1, 100) n))"
    );
    costs.push(("enqueue_many", watched.cost(&many).await));
    for (call, jobs) in [("enqueue", 1), ("enqueue_many", 100)] {
        let plain =
            format!("select posthouse.enqueue_plain('k', 'default', 't1', 0, array_fill('1'::jsonb, array[{jobs}]))");
        costs.push((call, watched.cost(&plain).await));
    }
    costs
}

/// A call about a hundred jobs reads at most so many pages, some twice what was measured, and no node of any plan looks at
/// more rows than a window of lanes or the jobs of the worker.
fn check(what: &str, costs: &[(&'static str, Cost)]) {
    for (call, cost) in costs {
        println!("figure: {what}: {call}: {} pages, {} rows", cost.pages, cost.rows);
    }
    for (call, cost) in costs {
        let pages = match *call {
            "rescue of nobody" => 200,
            "enqueue" => 600,
            "claim" | "claim again" | "rescue" => 10_000,
            _ => 8_000,
        };
        assert!(cost.pages <= pages, "{what}: {call}: {} pages", cost.pages);
        assert!(cost.rows <= 2_000, "{what}: {call}: {} rows", cost.rows);
    }
}

async fn a_million_jobs(tenants: i64) {
    let (queue, s) = Queue::with_session().await;
    // Beforehand, since new partitions and settings would make sessions forget their plans.
    s.run("select posthouse.make_partitions(3000000)").await;
    without_autovacuum(&s).await;
    s.run("analyze").await;
    // Plans made on an empty database, and used often enough to be kept.
    let old = Watched::new(&queue).await;
    let worker = s.worker(&["k"]).await;
    for _ in 0..7 {
        round(&old, &s, &worker).await;
    }
    empty(&s).await;
    load(&s, 1_000_000, 200_000, tenants).await;
    check("plans made when empty", &round(&old, &s, &worker).await);
    for _ in 0..6 {
        round(&old, &s, &worker).await;
    }
    check("plans made when empty, later", &round(&old, &s, &worker).await);
    // A new session, statistics from when everything was empty.
    let new = Watched::new(&queue).await;
    let worker = s.worker(&["k"]).await;
    check("stale statistics", &round(&new, &s, &worker).await);
    s.run("analyze").await;
    let analysed = Watched::new(&queue).await;
    check("analysed", &round(&analysed, &s, &worker).await);
    check("plans made when empty, analysed since", &round(&old, &s, &worker).await);
}

#[tokio::test]
async fn a_million_archived_and_two_hundred_thousand_queued() {
    a_million_jobs(1).await;
}

#[tokio::test]
async fn a_million_jobs_of_a_thousand_tenants() {
    a_million_jobs(1_000).await;
}

/// Three hundred thousand jobs were done while somebody held a snapshot: their dead rows, index entries, claims and
/// heartbeats cannot be vacuumed away. The answer: what calls cost before, then, and after a sweep.
async fn dead_rows(tenants: i64) -> [Vec<(&'static str, Cost)>; 3] {
    let (queue, s) = Queue::with_session().await;
    s.run("select posthouse.make_partitions(3000000)").await;
    without_autovacuum(&s).await;
    load(&s, 0, 310_000, tenants).await;
    // The lanes' oldest jobs are those that will be done.
    s.run("update posthouse.job set run_at = now() - interval '1 minute' where id > 300000").await;
    s.run("vacuum posthouse.job").await;
    let watched = Watched::new(&queue).await;
    let worker = s.worker(&["k"]).await;
    let idle = s.worker(&["k"]).await;
    let before = round(&watched, &s, &worker).await;
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select count(*) from posthouse.worker").await;
    s.run(&format!(
        "insert into posthouse.claimed select '{}', n, now(), array[n], array[1] from generate_series(1, 3000) n;
         update posthouse.job set state = 'running', fence = 1 where id <= 300000 and state = 'queued';
         delete from posthouse.job where id <= 300000;
         delete from posthouse.claimed where worker = '{}';
         do $$ begin for n in 1..300 loop perform posthouse.heartbeat('{}', n, n + 1); end loop; end $$",
        idle.id, idle.id, idle.id
    ))
    .await;
    let between = round(&watched, &s, &worker).await;
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    let after = round(&watched, &s, &worker).await;
    // The snapshot was held all the while.
    let kept: i64 = holder.get("select count(*) from posthouse.job where id <= 300000").await;
    assert!(kept > 290_000, "{kept}");
    [before, between, after]
}

async fn dead_rows_cost_nothing_after_a_sweep(tenants: i64) {
    let [before, between, after] = dead_rows(tenants).await;
    for (n, (call, cost)) in after.iter().enumerate() {
        println!(
            "figure: {tenants} tenants, dead rows: {call}: {} pages before, {} with dead rows, {} after a sweep",
            before[n].1.pages, between[n].1.pages, cost.pages
        );
    }
    for (n, (call, cost)) in after.iter().enumerate() {
        let bound = before[n].1.pages * 3 + 300;
        assert!(cost.pages <= bound, "{call}: {} pages, {} before", cost.pages, before[n].1.pages);
    }
    // Without the sweep's floors the claim walks over the dead: the harm is real.
    assert!(between[0].1.pages > 3 * before[0].1.pages + 300, "{} pages", between[0].1.pages);
}

#[tokio::test]
async fn dead_rows_of_one_tenant() {
    dead_rows_cost_nothing_after_a_sweep(1).await;
}

#[tokio::test]
async fn dead_rows_of_a_thousand_tenants() {
    dead_rows_cost_nothing_after_a_sweep(1_000).await;
}

/// A hundred keys are used sixty times each while somebody holds a snapshot, and statistics call their table empty. What a
/// settle that gives them up costs before, and then.
#[tokio::test]
async fn keys_that_are_used_again_and_again() {
    let (queue, s) = Queue::with_session().await;
    without_autovacuum(&s).await;
    let worker = s.worker(&["k"]).await;
    let enqueue = "select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'dedupe_key', n::text)) from generate_series(1, 100) n))";
    let settle = async || {
        s.run(enqueue).await;
        let jobs = worker.claim(&s, 100).await;
        let outcomes: Vec<_> =
            jobs.iter().map(|j| serde_json::json!({"id": j.id, "fence": j.fence, "outcome": "done"})).collect();
        assert_eq!(outcomes.len(), 100);
        format!("select * from posthouse.settle('{}', '{}')", worker.id, Value::from(outcomes))
    };
    let before = Watched::new(&queue).await.cost(&settle().await).await;
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select count(*) from posthouse.worker").await;
    for _ in 0..60 {
        s.run(&settle().await).await;
    }
    s.run("analyze posthouse.dedupe").await;
    let after = Watched::new(&queue).await.cost(&settle().await).await;
    println!("figure: keys used again: settle: {} pages before, {} after", before.pages, after.pages);
    assert_eq!(s.count("posthouse.dedupe").await, 0);
    assert!(after.pages <= before.pages * 3 / 2 + 100, "{} pages, {} before", after.pages, before.pages);
}

/// Nine thousand tenants come before the hundred whose jobs a worker can run: their jobs are of kinds that it does not know,
/// are not due yet, or were all taken. The answer: what a claim costs, and what the next one costs.
async fn behind_others(others: &str) -> (Cost, Cost) {
    let (queue, s) = Queue::with_session().await;
    without_autovacuum(&s).await;
    s.run(&format!(
        "with blocked as (
           insert into posthouse.lane (queue, priority, tenant, kind, ready_at, awake_until)
           select 'default', n % 3, 'blocked' || n, {others}, clock_timestamp() + interval '1 hour' from generate_series(1, 9000) n returning id, ready_at)
         insert into posthouse.job (lane_id, run_at, created_at, max_attempts, keyed)
         select id, greatest(ready_at, now()), now(), 5, false from blocked where ready_at > '-infinity' or '{0}' = 'unserved'",
        if others.contains("unserved") { "unserved" } else { "" }
    ))
    .await;
    for tenant in 0..100 {
        s.enqueue_bulk("k", &format!("t{tenant}"), 5).await;
    }
    let worker = s.worker(&["k"]).await;
    let watched = Watched::new(&queue).await;
    let claim = async |seq: i64| {
        let cost = watched.cost(&format!("select * from posthouse.claim('{}', {seq}, 100)", worker.id)).await;
        assert_eq!(s.count(&format!("posthouse.job where worker = '{}'", worker.id)).await, 100 * seq);
        cost
    };
    (claim(1).await, claim(2).await)
}

#[tokio::test]
async fn tenants_that_cannot_run_do_not_slow_a_claim_down() {
    let (free, _) = behind_others("'k', 'infinity'").await;
    // Lanes that nobody here serves or that are not due are passed by in the index; empty ones that are still awake are looked
    // into, until they fall asleep.
    for (what, others, times) in [
        ("kinds of others", "'unserved', '-infinity'", 2),
        ("not due", "'k', clock_timestamp() + interval '1 hour'", 2),
        ("empty", "'k', '-infinity'", 6),
    ] {
        let (first, next) = behind_others(others).await;
        println!(
            "figure: 9000 tenants, {what}: {} pages, then {}; {} without them",
            first.pages, next.pages, free.pages
        );
        assert!(first.pages.max(next.pages) <= times * free.pages, "{what}: {first:?}, {next:?}, {free:?} without");
    }
}

/// The calls that differ where no history is kept, on this session: settles of a hundred jobs, all of such a queue and of both
/// sorts, and the sweep of a hundred.
async fn round_without_history(watched: &Watched, s: &Session) -> Vec<(&'static str, Cost)> {
    let mut costs = Vec::new();
    for (queues, names) in [
        (&["bare"][..], ["settle without history", "settle without history again"]),
        (&["bare", "default"][..], ["settle of both sorts", "settle of both sorts again"]),
    ] {
        for queue in queues {
            s.run(&format!(
                "select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't' || n, 'queue', '{queue}'))
                   from generate_series(1, 100) n))"
            ))
            .await;
        }
        let worker = s.worker_of(queues, &["k"], 3_600_000).await;
        let jobs = worker.claim(s, 100).await;
        assert_eq!(jobs.len(), 100);
        let outcomes: Value = jobs
            .iter()
            .map(|job| json!({"id": job.id, "fence": job.fence, "outcome": if job.id % 10 == 0 { "cancelled" } else { "done" }}))
            .collect();
        for name in names {
            costs.push((
                name,
                watched.cost(&format!("select * from posthouse.settle('{}', '{outcomes}')", worker.id)).await,
            ));
        }
        s.run(&format!("update posthouse.worker set dead_at = clock_timestamp() where id = '{}'", worker.id)).await;
        s.run("select posthouse.rescue('[]')").await;
    }
    costs.push(("forget", watched.cost("select posthouse.forget(100)").await));
    costs
}

/// So many jobs that left tombstones, a hundred a settle, from half an hour ago until now.
async fn bury(s: &Session, jobs: i64) {
    s.run(&format!(
        "insert into posthouse.payload (id, payload) select 2000000 + n, '{{\"text\": \"hello\"}}' from generate_series(1, {jobs}) n;
         insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, fence, attempt, max_attempts, state)
           select 2000000 + n, 1, now(), now() - interval '30 minutes' * (1 - n / {jobs}.0), gen_random_uuid(), 1, 1, 5, 'done'
           from generate_series(1, {jobs}) n;
         insert into posthouse.burial (buried_at, jobs, job_ids)
           select max(t.finished_at), count(*), array_agg(t.id) from posthouse.tombstone t group by t.id / 100"
    ))
    .await;
}

#[tokio::test]
async fn three_hundred_thousand_jobs_without_history() {
    let (queue, s) = Queue::with_session().await;
    s.run("select posthouse.make_partitions(3000000), posthouse.set_queue('bare', '0')").await;
    without_autovacuum(&s).await;
    s.run("analyze").await;
    let old = Watched::new(&queue).await;
    for _ in 0..7 {
        round_without_history(&old, &s).await;
    }
    empty(&s).await;
    load(&s, 300_000, 100_000, 100).await;
    bury(&s, 300_000).await;
    check("plans made when empty", &round_without_history(&old, &s).await);
    let new = Watched::new(&queue).await;
    check("stale statistics", &round_without_history(&new, &s).await);
    s.run("analyze").await;
    let analysed = Watched::new(&queue).await;
    check("analysed", &round_without_history(&analysed, &s).await);
    check("plans made when empty, analysed since", &round_without_history(&old, &s).await);
}

/// Pages that a sweep of a hundred jobs reads before 200,000 others were swept while somebody holds a snapshot, and after.
async fn sweep_of_dead_tombstones(with_floor: bool) -> (Cost, Cost) {
    let (queue, s) = Queue::with_session().await;
    s.run("select posthouse.make_partitions(3000000)").await;
    without_autovacuum(&s).await;
    if !with_floor {
        s.cripple("forget", "b.buried_at >= start_at", "true").await;
    }
    bury(&s, 300_000).await;
    let watched = Watched::new(&queue).await;
    watched.cost("select posthouse.forget(100)").await;
    let before = watched.cost("select posthouse.forget(100)").await;
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select count(*) from posthouse.worker").await;
    for _ in 0..19 {
        assert_eq!(s.get::<i32>("select posthouse.forget(10000)").await, 10_000);
    }
    let after = watched.cost("select posthouse.forget(100)").await;
    let kept: i64 = holder.get("select count(*) from posthouse.burial").await;
    assert_eq!(kept, 2_998, "the snapshot was held all the while");
    (before, after)
}

#[tokio::test]
async fn dead_tombstones_do_not_slow_the_sweep_down() {
    let (before, after) = sweep_of_dead_tombstones(true).await;
    println!("figure: sweep of a hundred tombstones: {} pages, then {}", before.pages, after.pages);
    assert!(after.pages <= before.pages + 50, "{before:?}, {after:?}");
    // Without the floor it walks over all that it swept before, nine rows a page.
    let (_, walked) = sweep_of_dead_tombstones(false).await;
    assert!(walked.pages > after.pages + 150, "{walked:?}, {after:?} with a floor");
}
