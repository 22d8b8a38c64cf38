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
