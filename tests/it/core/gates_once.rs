//! A claim that shares out the room of gates in several rounds gives no job twice, and none of the room away.

use super::support::{Queue, ids};

/// The first lane is offered room and has nothing: what it gives back goes to the next one, which gave all that it might before.
#[tokio::test]
async fn room_that_a_lane_gives_back_brings_other_jobs_not_the_same() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_gate('shared', max_running => 3), posthouse.set_gate('tenant:*', max_running => 2)")
        .await;
    let empty = s.enqueue("kind => 'k', tenant => 'a', gates => array['shared']").await;
    let mut expected = Vec::new();
    for _ in 0..2 {
        expected.push(s.enqueue("kind => 'k', tenant => 'b', gates => array['shared']").await);
    }
    s.run(&format!("select posthouse.cancel({empty})")).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 10).await;
    let mut got = ids(&jobs);
    got.sort_unstable();
    assert_eq!(got, expected);
    let listed: i64 = s
        .get("select cardinality(job_ids)::bigint from posthouse.gate_state s join posthouse.gate g on g.id = s.gate_id where g.name = 'shared' order by s.seq desc limit 1")
        .await;
    assert_eq!(listed, 2, "each counts once");
}

/// A gate that a job asks for and its kind passes too is one gate.
#[tokio::test]
async fn a_gate_by_two_ways_counts_a_job_once() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_gate('crm', max_running => 4, requests_per_minute => 1000), posthouse.set_kind('k', '{crm}')").await;
    for _ in 0..6 {
        s.enqueue("kind => 'k', gates => array['crm']").await;
    }
    let worker = s.worker(&["k"]).await;
    let mut taken = 0;
    for _ in 0..6 {
        taken += worker.claim(&s, 1).await.len();
    }
    let requests: i64 = s.get("select requests_last_minute::bigint from posthouse.gates where name = 'crm'").await;
    assert_eq!((taken, requests), (4, 4));
}

/// Whatever brings jobs that run behind a gate, they count there.
#[tokio::test]
async fn jobs_that_come_behind_a_gate_while_they_run_count_there() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_gate('crm', max_running => 2), posthouse.set_gate('endpoint:p/x', max_running => 2)")
        .await;
    s.run(
        "select posthouse.set_gate('tenant:*', max_running => 2), posthouse.set_gate('tenant:big', max_running => 10)",
    )
    .await;
    s.run("select posthouse.set_kind('k', '{model:m}')").await;
    for (undo, change) in [
        ("select posthouse.set_kind('k', '{model:m}')", "select posthouse.set_kind('k', '{crm}')"),
        ("select posthouse.set_route('m', '{p/free}')", "select posthouse.set_route('m', '{p/x}')"),
        ("select posthouse.set_route('m', '{p/free}')", "select posthouse.set_gate('tenant:big')"),
        ("select posthouse.set_gate('tenant:big', max_running => 10)", "select posthouse.remove_gate('tenant:big')"),
    ] {
        s.run("select posthouse.set_kind('k', '{model:m}')").await;
        s.run(undo).await;
        for _ in 0..10 {
            s.enqueue("kind => 'k', tenant => 'big'").await;
        }
        let jobs = worker.claim(&s, 5).await;
        assert_eq!(jobs.len(), 5, "before {change}");
        s.run(change).await;
        assert_eq!(worker.claim(&s, 5).await.len(), 0, "after {change}");
        s.run("update posthouse.job set run_at = '-infinity' where state = 'queued'; select posthouse.cancel(id) from posthouse.job where state = 'queued'").await;
        s.done(worker.id, &jobs).await;
    }
}

/// What a job was said to need goes with it when it is run again.
#[tokio::test]
async fn a_job_that_is_run_again_needs_as_many_tokens_as_before() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_gate('crm', tokens_per_minute => 500)").await;
    let id = s.enqueue("kind => 'k', gates => array['crm'], tokens => 100").await;
    let jobs = worker.claim(&s, 1).await;
    s.end(worker.id, &jobs, &serde_json::json!({"outcome": "fail", "usage": {"requests": 0}})).await;
    s.run(&format!("select posthouse.redrive('{{{id}}}')")).await;
    s.run(&format!("select posthouse.cancel({id}); select posthouse.retry({id})")).await;
    assert_eq!(ids(&worker.claim(&s, 1).await), [id], "by an estimate it would be too large");
    assert_eq!(s.get::<i32>(&format!("select reserved from posthouse.job where id = {id}")).await, 100);
}
