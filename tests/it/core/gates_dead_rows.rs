//! What claims and settles through gates read where statistics call the table of jobs empty, since all of its many rows are
//! dead, and somebody's snapshot keeps them there.

use serde_json::{Value, json};

use super::plans::{Cost, Watched, without_autovacuum};
use super::support::{Queue, Session, Worker};

/// What a claim of fifty costs, and a settle of them.
async fn turn(watched: &Watched, s: &Session, worker: &Worker) -> [(&'static str, Cost); 3] {
    let seq = worker.seq.replace(worker.seq.get() + 1);
    let claim = watched.cost(&format!("select * from posthouse.claim('{}', {seq}, 50)", worker.id)).await;
    let jobs = s
        .rows(&format!(
            "select u.id, u.fence from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence)
             where c.worker = '{}' and c.seq = {seq}",
            worker.id
        ))
        .await;
    assert_eq!(jobs.len(), 50);
    let outcomes: Value = jobs
        .iter()
        .map(|job| json!({"id": job.get::<_, i64>(0), "fence": job.get::<_, i32>(1), "outcome": "done"}))
        .collect();
    let settle = watched.cost(&format!("select * from posthouse.settle('{}', '{outcomes}')", worker.id)).await;
    let next_due = watched.cost(&format!("select posthouse.next_due('{}')", worker.id)).await;
    [("claim", claim), ("settle", settle), ("next_due", next_due)]
}

#[tokio::test]
async fn a_table_that_is_called_empty_is_not_read_from_end_to_end() {
    let (queue, s, worker) = Queue::with_worker().await;
    without_autovacuum(&s).await;
    s.set_gate("'crm', max_running => 100, requests_per_minute => 1000000, tokens_per_minute => 1000000000").await;
    s.set_gate("'tenant:*', max_running => 100").await;
    s.enqueue_with(500, r#"{"gates": ["crm"], "tokens": 10}"#).await;
    let watched = Watched::new(&queue).await;
    turn(&watched, &s, &worker).await;
    let before = turn(&watched, &s, &worker).await;
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select count(*) from posthouse.worker").await;
    // Nothing is left but dead rows when statistics are taken.
    s.run(
        "create temporary table put_by as select * from posthouse.job;
         delete from posthouse.job;
         with dead as (
           insert into posthouse.job (lane_id, run_at, created_at, max_attempts, keyed, state)
           select 0, now(), now(), 5, false, 'running' from generate_series(1, 50000) returning id)
         select count(*) from dead;
         delete from posthouse.job;
         analyze posthouse.job;
         insert into posthouse.job select * from put_by",
    )
    .await;
    assert_eq!(s.get::<f32>("select reltuples from pg_class where oid = 'posthouse.job'::regclass").await, 0.0);
    // A session that plans now.
    let watched = Watched::new(&queue).await;
    turn(&watched, &s, &worker).await;
    let after = turn(&watched, &s, &worker).await;
    for ((call, before), (_, after)) in before.iter().zip(&after) {
        assert!(
            after.pages <= before.pages * 2 + 100,
            "{call}: {} pages, {} before there were dead rows",
            after.pages,
            before.pages
        );
    }
    holder.run("commit").await;
}
