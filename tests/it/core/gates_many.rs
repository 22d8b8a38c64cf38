//! What claims and settles cost where ten thousand tenants have a default cap, 9,000 of them at it or closed, beside one tenant
//! without any gate; and that counts of gates which nobody can vacuum away cost nothing.

use serde_json::{Value, json};

use super::plans::{Cost, Watched, without_autovacuum};
use super::support::{Queue, Session, Worker};

const TENANTS: i64 = 10_000;

/// Processor time that a server process has used so far, in ms.
fn processor_ms(pid: i32) -> f64 {
    let times = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap();
    times.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e6
}

/// A lane for each tenant: every tenth has sixty jobs; of the others half run as many as they may and have some more, and half are
/// closed. Nobody has looked at them yet.
async fn ten_thousand_tenants(s: &Session, worker: &Worker) {
    s.set_gate("'tenant:*', max_running => 5").await;
    s.run(&format!(
        "insert into posthouse.lane (queue, priority, tenant, kind, ready_at, awake_until)
           select 'default', 0, 't' || n, 'k', '-infinity', '-infinity' from generate_series(1, {TENANTS}) n;
         with j as (
           insert into posthouse.job (lane_id, run_at, created_at, max_attempts, keyed)
             select l.id, now() - interval '1 hour' + n * interval '1 second', now(), 5, false
             from posthouse.lane l cross join lateral generate_series(1, case when substr(l.tenant, 2)::int % 10 = 0 then 60 else 8 end) n
             returning id)
         insert into posthouse.payload (id, payload) select j.id, '{{}}' from j;
         insert into posthouse.gate (name, closed_until, closed_at, closed_by)
           select l.tenant, 'infinity', now(), 'person' from (select 'tenant:t' || n as tenant from generate_series(1, {TENANTS}) n
           where n % 10 between 5 and 9) l;
         with full_ones as (
           update posthouse.job j set state = 'running', fence = 1, attempt = 1, worker = '{}', reserved = 0, started_at = now(),
             first_started_at = now()
           from (select j.id, l.tenant, row_number() over (partition by l.id order by j.run_at) as place
                 from posthouse.lane l join posthouse.job j on j.lane_id = l.id where substr(l.tenant, 2)::int % 10 between 1 and 4) x
           where x.id = j.id and x.place <= 5 returning j.id, x.tenant)
         insert into posthouse.gate_state (gate_id, member, seq, job_ids, fences)
           select (select g.id from posthouse.gate g where g.name = 'tenant:*'), f.tenant, 1, array_agg(f.id), array_agg(1) from full_ones f group by f.tenant",
        worker.id
    ))
    .await;
}

/// So many claims of a hundred jobs and their settles; the processor time of a claim and of a settle, in ms.
async fn turns(s: &Session, worker: &Worker, turns: u32) -> (f64, f64) {
    let (mut claims, mut settles) = (0.0, 0.0);
    for _ in 0..turns {
        let began = processor_ms(s.pid);
        let jobs = worker.claim(s, 100).await;
        let claimed = processor_ms(s.pid);
        assert_eq!(jobs.len(), 100);
        s.done(worker.id, &jobs).await;
        claims += claimed - began;
        settles += processor_ms(s.pid) - claimed;
    }
    (claims / f64::from(turns), settles / f64::from(turns))
}

/// What a claim of a hundred visits, and a settle of them.
async fn pages(watched: &Watched, s: &Session, worker: &Worker) -> (Cost, Cost) {
    let seq = worker.seq.replace(worker.seq.get() + 1);
    let claim = format!("select * from posthouse.claim('{}', {seq}, 100, {})", worker.id, worker.lane.get());
    let claimed = watched.cost(&claim).await;
    let jobs = s
        .rows(&format!(
            "select u.id, u.fence from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence)
             where c.worker = '{}' and c.seq = {seq}",
            worker.id
        ))
        .await;
    let outcomes: Value = jobs
        .iter()
        .map(|job| json!({"id": job.get::<_, i64>(0), "fence": job.get::<_, i32>(1), "outcome": "done"}))
        .collect();
    (claimed, watched.cost(&format!("select * from posthouse.settle('{}', '{outcomes}')", worker.id)).await)
}

#[tokio::test]
async fn nine_thousand_tenants_that_may_not_run_cost_next_to_nothing() {
    // One tenant, no gates.
    let (queue, s, worker) = Queue::with_worker().await;
    without_autovacuum(&s).await;
    s.enqueue_bulk("k", "one", 20_000).await;
    s.run("analyze").await;
    turns(&s, &worker, 10).await;
    let one = turns(&s, &worker, 60).await;
    let watched = Watched::new(&queue).await;
    pages(&watched, &s, &worker).await;
    let one_pages = pages(&watched, &s, &worker).await;
    let idle = s.worker_of(&["idle"], &["k"], 3_600_000).await;
    let nothing = |worker: &Worker| {
        let seq = worker.seq.replace(worker.seq.get() + 1);
        format!("select * from posthouse.claim('{}', {seq}, 100)", worker.id)
    };
    watched.cost(&nothing(&idle)).await;
    let one_nothing = watched.cost(&nothing(&idle)).await;

    let (queue, s, worker) = Queue::with_worker().await;
    without_autovacuum(&s).await;
    ten_thousand_tenants(&s, &worker).await;
    s.run("analyze").await;
    // Until all that may not run have been seen once, and sleep.
    let mut seen = 0;
    let awake = "posthouse.lane where blocked_by is null";
    while s.count(awake).await > TENANTS / 10 {
        turns(&s, &worker, 5).await;
        seen += 5;
        assert!(seen <= 60, "{} lanes are awake after {seen} claims", s.count(awake).await);
    }
    let many = turns(&s, &worker, 60).await;
    let watched = Watched::new(&queue).await;
    pages(&watched, &s, &worker).await;
    let many_pages = pages(&watched, &s, &worker).await;
    println!(
        "figure: 10,000 tenants, 9,000 at their cap or closed, after {seen} claims: claim of 100 {:.2} ms and {} pages, settle {:.2} ms and \
         {} pages; one tenant without gates: claim {:.2} ms and {} pages, settle {:.2} ms and {} pages",
        many.0, many_pages.0.pages, many.1, many_pages.1.pages, one.0, one_pages.0.pages, one.1, one_pages.1.pages
    );
    // Nothing to be had: only those that sleep are left.
    s.run("update posthouse.lane set ready_at = 'infinity' where blocked_by is null").await;
    watched.cost(&nothing(&worker)).await;
    let none = watched.cost(&nothing(&worker)).await;
    println!("figure: a claim that finds nothing: {} pages; with one tenant {}", none.pages, one_nothing.pages);
    // Dead entries of an index are passed over once more on some versions; to walk over all that sleep takes 600 pages.
    assert!(none.pages <= one_nothing.pages + 400, "{none:?}, {one_nothing:?} with one tenant");
    s.run("vacuum posthouse.lane").await;
    watched.cost(&nothing(&worker)).await;
    let vacuumed = watched.cost(&nothing(&worker)).await;
    println!("figure: the same without dead entries: {} pages", vacuumed.pages);
    assert!(vacuumed.pages <= one_nothing.pages + 10, "{vacuumed:?}, {one_nothing:?} with one tenant");
    assert!(many_pages.0.rows <= 4_000 && many_pages.1.rows <= 2_000, "{many_pages:?}");
    // A claim that looks up all five jobs that each of its tenants had listed reads 1,500 pages more than one that needs none.
    assert!(
        many_pages.0.pages <= 5 * one_pages.0.pages && many_pages.1.pages <= 4 * one_pages.1.pages,
        "{many_pages:?}, {one_pages:?} with one tenant"
    );
}

#[tokio::test]
async fn counts_that_cannot_be_vacuumed_do_not_slow_claims_down() {
    let (queue, s, worker) = Queue::with_worker().await;
    without_autovacuum(&s).await;
    s.set_gate("'crm', max_running => 150, requests_per_minute => 1000000, tokens_per_minute => 1000000000").await;
    s.set_gate("'tenant:*', max_running => 150").await;
    s.enqueue_with(20_000, r#"{"gates": ["crm"], "tokens": 10}"#).await;
    s.run("analyze").await;
    turns(&s, &worker, 5).await;
    let watched = Watched::new(&queue).await;
    pages(&watched, &s, &worker).await;
    let before = pages(&watched, &s, &worker).await;
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select count(*) from posthouse.worker").await;
    // As if sixty thousand claims and settles had been counted, which the sweep has forgotten but nobody may vacuum.
    s.run(
        "insert into posthouse.gate_state
           select x.gate_id, x.member, x.seq + n, x.job_ids, x.fences, x.seconds, x.requests, x.tokens, x.requests_at, x.tokens_at, x.month, x.day,
             x.spent_day, x.spent_month
           from (select distinct on (y.gate_id, y.member) y.* from posthouse.gate_state y order by y.gate_id, y.member, y.seq desc) x
           cross join lateral generate_series(1, 30000) n;
         select posthouse.fold()",
    )
    .await;
    assert!(s.count("posthouse.gate_state").await <= 4);
    // The first one may mark what is dead; and a minute of claims appends more.
    pages(&watched, &s, &worker).await;
    turns(&s, &worker, 30).await;
    let after = pages(&watched, &s, &worker).await;
    println!(
        "figure: 60,000 counts under a snapshot: claim {} pages, then {}; settle {} pages, then {}",
        before.0.pages, after.0.pages, before.1.pages, after.1.pages
    );
    assert!(after.0.pages <= before.0.pages * 3 / 2 + 100, "{:?}, {:?} before", after.0, before.0);
    assert!(after.1.pages <= before.1.pages * 3 / 2 + 100, "{:?}, {:?} before", after.1, before.1);
    holder.run("commit").await;
}
