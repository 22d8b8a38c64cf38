//! Gates: what passes and what is held back, who closes and opens them, and what jobs give back.

use serde_json::json;

use super::gates_support::Clock;
use super::support::{Claimed, Queue, Session, Worker, ids};

#[tokio::test]
async fn as_many_run_as_may_whatever_the_claims_are() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.set_gate("'crm', max_running => 7").await;
    s.enqueue_with(30, r#"{"gates": ["crm"]}"#).await;
    let first = worker.claim(&s, 5).await;
    let second = worker.claim(&s, 5).await;
    assert_eq!((first.len(), second.len(), worker.claim(&s, 5).await.len()), (5, 2, 0));
    assert_eq!(s.of_gate("crm", "running").await, 7);
    s.done(worker.id, &first[..3]).await;
    assert_eq!((worker.claim(&s, 100).await.len(), worker.claim(&s, 100).await.len()), (3, 0));
    // Every way to end frees the place: here the job comes back, and may run again.
    for outcome in [
        json!({"outcome": "retry", "delay_ms": 0}),
        json!({"outcome": "snooze", "delay_ms": 0}),
        json!({"outcome": "release"}),
        json!({"outcome": "fail"}),
        json!({"outcome": "cancelled"}),
    ] {
        let jobs: Vec<_> = running(&s, &worker).await;
        s.end(worker.id, &jobs[..2], &outcome).await;
        assert_eq!((worker.claim(&s, 100).await.len(), worker.claim(&s, 100).await.len()), (2, 0), "{outcome}");
    }
}

/// What a worker runs.
async fn running(s: &Session, worker: &Worker) -> Vec<Claimed> {
    let jobs = s
        .rows(&format!(
            "select id, fence::bigint from posthouse.job where worker = '{}' and state = 'running'",
            worker.id
        ))
        .await;
    jobs.iter().map(|job| Claimed { id: job.get(0), fence: job.get(1), ..a_job() }).collect()
}

fn a_job() -> Claimed {
    Claimed {
        id: 0,
        fence: 0,
        attempt: 1,
        max_attempts: 5,
        kind: "k".to_owned(),
        queue: "default".to_owned(),
        tenant: "default".to_owned(),
        priority: 0,
        payload: json!({}),
        timeout_ms: None,
        lane: 0,
    }
}

#[tokio::test]
async fn a_job_passes_all_of_its_gates_or_holds_none() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.run("select posthouse.set_kind('k', array['model:m'])").await;
    for gate in ["'model:m', max_running => 5", "'tenant:*', max_running => 2", "'crm', max_running => 1"] {
        s.set_gate(gate).await;
    }
    for tenant in ["a", "b", "c"] {
        s.enqueue_with(3, &format!(r#"{{"tenant": "{tenant}", "gates": ["crm"]}}"#)).await;
        s.enqueue_with(5, &format!(r#"{{"tenant": "{tenant}"}}"#)).await;
    }
    let jobs = worker.claim(&s, 100).await;
    // Five by the model, one of them behind `crm`, no more than two of a tenant.
    assert_eq!(jobs.len(), 5);
    for tenant in ["a", "b", "c"] {
        assert!(jobs.iter().filter(|job| job.tenant == tenant).count() <= 2);
    }
    let behind: i64 = s
        .get("select count(*) from posthouse.job j join posthouse.lane l on l.id = j.lane_id where j.state = 'running' and l.gates <> '{}'")
        .await;
    assert!(behind <= 1);
    for (gate, most) in [("model:m", 5), ("crm", 1), ("tenant:*", 5)] {
        assert!(s.of_gate(gate, "running").await <= most, "{gate}");
    }
    // A job that one gate holds back has taken nothing of the others.
    s.run("select posthouse.close_gate('tenant:a')").await;
    s.done(worker.id, &jobs).await;
    let next = worker.claim(&s, 100).await;
    assert_eq!(next.len(), 4, "two of b and two of c: {next:?}");
    assert_eq!(s.of_gate("model:m", "running").await, 4);
}

#[tokio::test]
async fn every_tenant_has_the_default_cap_and_one_of_its_own_goes_before_it() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.set_gate("'tenant:*', max_running => 2").await;
    s.set_gate("'tenant:big', max_running => 4").await;
    // Closing a gate sets no limits: the default cap still holds when it is open again.
    s.run("select posthouse.close_gate('tenant:shut')").await;
    for tenant in ["big", "shut", "other", "new"] {
        s.enqueue_with(9, &format!(r#"{{"tenant": "{tenant}"}}"#)).await;
    }
    let jobs = worker.claim(&s, 100).await;
    let of = |jobs: &[Claimed], tenant: &str| jobs.iter().filter(|job| job.tenant == tenant).count();
    assert_eq!((of(&jobs, "big"), of(&jobs, "shut"), of(&jobs, "other"), of(&jobs, "new")), (4, 0, 2, 2));
    s.run("select posthouse.open_gate('tenant:shut')").await;
    let jobs = worker.claim(&s, 100).await;
    assert_eq!((jobs.len(), of(&jobs, "shut")), (2, 2));
    // Another own cap, and none: lanes that slept because of the old one are awake at once.
    s.without_naps().await;
    assert!(worker.claim(&s, 100).await.is_empty());
    s.set_gate("'tenant:new', max_running => 5").await;
    assert_eq!(worker.claim(&s, 100).await.len(), 3);
    s.without_naps().await;
    assert!(worker.claim(&s, 100).await.is_empty());
    assert!(s.get::<bool>("select posthouse.remove_gate('tenant:*')").await);
    let jobs = worker.claim(&s, 100).await;
    assert_eq!((of(&jobs, "shut"), of(&jobs, "other"), of(&jobs, "new"), of(&jobs, "big")), (7, 7, 0, 0));
}

#[tokio::test]
async fn a_gate_that_is_set_while_jobs_run_counts_them() {
    let (_queue, s, worker) = Queue::with_worker().await;
    let asking = s.worker(&["asks"]).await;
    s.enqueue_with(9, r#"{"gates": ["crm"]}"#).await;
    let jobs = worker.claim(&s, 4).await;
    s.enqueue("kind => 'asks'").await;
    s.enqueue("kind => 'asks'").await;
    let calls = asking.claim(&s, 2).await;
    s.set_gate("'crm', max_running => 6").await;
    assert_eq!(s.of_gate("crm", "running").await, 4);
    // Calls that were let in count as long as their job runs, also when limits are set again.
    assert_eq!(s.admit(asking.id, &calls[0], "crm", 0).await, Some(0));
    s.set_gate("'crm', max_running => 5").await;
    assert_eq!(s.of_gate("crm", "running").await, 5);
    assert!(worker.claim(&s, 9).await.is_empty());
    assert!(s.admit(asking.id, &calls[1], "crm", 0).await > Some(0));
    // The call of a job that is inside needs no second place.
    assert_eq!(s.admit(asking.id, &calls[0], "crm", 0).await, Some(0));
    s.done(worker.id, &jobs[..1]).await;
    assert_eq!(worker.claim(&s, 9).await.len(), 1);
    s.set_gate("'crm', max_running => 2").await;
    s.done(worker.id, &jobs[1..]).await;
    assert!(worker.claim(&s, 9).await.is_empty(), "one job and one call still run");
    s.done(asking.id, &calls[..1]).await;
    assert_eq!(worker.claim(&s, 9).await.len(), 1);
    assert_eq!(s.admit(asking.id, &calls[0], "crm", 0).await, None, "its attempt is over");
}

#[tokio::test]
async fn what_limits_cannot_be_is_refused_by_name() {
    let (_queue, s, _worker) = Queue::with_worker().await;
    for (arguments, named) in [
        ("'g', max_running => 0", "max_running"),
        ("'g', max_running => -1", "max_running"),
        ("'g', max_running => 2000000000", "max_running"),
        ("'g', requests_per_minute => 0", "requests_per_minute"),
        ("'g', requests_per_minute => -5", "requests_per_minute"),
        ("'g', requests_per_minute => 2000000000", "requests_per_minute"),
        ("'g', tokens_per_minute => 0", "tokens_per_minute"),
        ("'g', tokens_per_minute => -1", "tokens_per_minute"),
        ("'g', tokens_per_minute => 9000000000000000000", "tokens_per_minute"),
        ("'g', money_per_day => 0", "money_per_day"),
        ("'g', money_per_day => 'NaN'", "money_per_day"),
        ("'g', money_per_month => -1", "money_per_month"),
        ("'g', money_per_month => 'Infinity'", "money_per_month"),
        ("'g', when_spent => 'explode'", "when_spent"),
        ("'g', when_spent => null", "when_spent"),
        ("'g', when_spent => 'model:'", "when_spent"),
        ("'g', when_spent => 'model:*'", "when_spent"),
        ("'g', when_spent => E'model:a\\nb'", "when_spent"),
        ("'model:a', money_per_day => 1, when_spent => 'model:a'", "when_spent"),
        ("'g', money_per_day => 1, warn_at => 0", "warn_at"),
        ("'g', money_per_day => 1, warn_at => 1.5", "warn_at"),
        ("'g', warn_at => 0.5", "warn_at"),
        ("'', max_running => 1", "name"),
        ("null, max_running => 1", "name"),
        ("'tenant:', max_running => 1", "name"),
        ("'planet:mars', max_running => 1", "name"),
        ("'endpoint:*', max_running => 1", "name"),
        ("repeat('x', 201), max_running => 1", "name"),
    ] {
        let refusal = s.refused(&format!("select posthouse.set_gate({arguments})")).await;
        assert_eq!(refusal.code, "PH001", "{arguments}: {}", refusal.message);
        assert!(refusal.message.starts_with(&format!("{named}:")), "{arguments}: {}", refusal.message);
    }
    for (call, named) in [
        ("close_gate('g', now() - interval '1 second')", "until"),
        ("close_gate('g', null)", "until"),
        ("close_gate('planet:mars')", "name"),
        ("set_kind('k', array['tenant:a'])", "gates"),
        ("set_kind('k', array['model:*'])", "gates"),
        ("set_kind('k', '{}', 0)", "max_output_tokens"),
        ("set_route('m', '{}')", "endpoints"),
        ("report_endpoint('p/m', 'odd')", "verdict"),
        ("enqueue(kind => 'k', gates => array['queue:q'])", "gates"),
        ("enqueue(kind => 'k', tokens => 0)", "tokens"),
    ] {
        let refusal = s.refused(&format!("select posthouse.{call}")).await;
        assert_eq!(refusal.code, "PH001", "{call}: {}", refusal.message);
        assert!(refusal.message.starts_with(&format!("{named}:")), "{call}: {}", refusal.message);
    }
    assert_eq!(s.count("posthouse.gate").await, 0);
}

#[tokio::test]
async fn calls_about_gates_refuse_repeatable_read() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.set_gate("'crm', max_running => 1").await;
    s.enqueue_with(2, r#"{"gates": ["crm"]}"#).await;
    let jobs = worker.claim(&s, 1).await;
    let (id, job) = (worker.id, &jobs[0]);
    for call in [
        format!("claim('{id}', 7, 1)"),
        format!("settle('{id}', '[]')"),
        format!("admit('{id}', {}, {}, '{{crm}}')", job.id, job.fence),
        format!("admitted({}, {}, '{{crm}}', 1, 2)", job.id, job.fence),
        "set_gate('crm')".to_owned(),
        "close_gate('crm')".to_owned(),
        "open_gate('crm')".to_owned(),
        "remove_gate('crm')".to_owned(),
        "report_endpoint('p/m', 'ok')".to_owned(),
        format!("begin_probe('p/m', {})", job.id),
    ] {
        for level in ["repeatable read", "serializable"] {
            s.run(&format!("begin isolation level {level}")).await;
            assert_eq!(s.refused(&format!("select * from posthouse.{call}")).await.code, "PH002", "{call}");
            s.run("rollback").await;
        }
    }
    assert_eq!(s.of_gate("crm", "running").await, 1);
}

#[tokio::test]
async fn limits_and_closings_take_effect_at_the_next_claim() {
    let (_queue, s) = Queue::with_session().await;
    let mut clock = Clock::new(&s).await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_with(100, r#"{"gates": ["crm"]}"#).await;
    s.run("select posthouse.close_gate('crm', posthouse.made_up_now() + interval '1 hour', 'tea')").await;
    s.without_naps().await;
    assert!(worker.claim(&s, 2).await.is_empty());
    let (by, reason): (String, String) = {
        let rows = s.rows("select closed_by, closed_reason from posthouse.gates where name = 'crm'").await;
        (rows[0].get(0), rows[0].get(1))
    };
    assert_eq!((by.as_str(), reason.as_str()), ("person", "tea"));
    // Closed anew for a shorter time: the shorter one counts.
    s.run("select posthouse.close_gate('crm', posthouse.made_up_now() + interval '1 minute')").await;
    clock.pass(59_000).await;
    assert!(worker.claim(&s, 2).await.is_empty());
    clock.pass(1_500).await;
    assert_eq!(worker.claim(&s, 2).await.len(), 2);
    s.run("select posthouse.close_gate('crm')").await;
    clock.pass(3_000_000).await;
    s.run(&format!("select posthouse.heartbeat('{}')", worker.id)).await;
    s.without_naps().await;
    assert!(worker.claim(&s, 2).await.is_empty());
    assert!(s.get::<bool>("select posthouse.open_gate('crm')").await);
    assert!(!s.get::<bool>("select posthouse.open_gate('crm')").await);
    assert_eq!(worker.claim(&s, 2).await.len(), 2);
}

#[tokio::test]
async fn jobs_that_a_kind_or_route_no_longer_holds_back_go_on() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.run("select posthouse.set_kind('k', array['crm']); select posthouse.close_gate('crm')").await;
    s.enqueue("kind => 'k'").await;
    s.without_naps().await;
    assert!(worker.claim(&s, 1).await.is_empty());
    s.run("select posthouse.set_kind('k', '{}')").await;
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
    s.run("select posthouse.set_route('m', array['p/m']); select posthouse.report_endpoint('p/m', 'quota')").await;
    s.enqueue("kind => 'k', gates => array['model:m']").await;
    s.without_naps().await;
    assert!(worker.claim(&s, 1).await.is_empty());
    s.run("select posthouse.set_route('m', array['p/m', 'q/m'])").await;
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
}

#[tokio::test]
async fn a_lane_that_somebody_held_when_its_gate_was_taken_away_goes_on() {
    let (queue, s, worker) = Queue::with_worker().await;
    let other = queue.session().await;
    s.run("select posthouse.set_kind('k', array['crm']); select posthouse.close_gate('crm')").await;
    s.enqueue("kind => 'k'").await;
    s.without_naps().await;
    assert!(worker.claim(&s, 1).await.is_empty());
    other.run("begin; select from posthouse.lane for update").await;
    s.run("select posthouse.set_kind('k', '{}')").await;
    other.run("commit").await;
    assert!(worker.claim(&s, 1).await.is_empty());
    s.run("update posthouse.sweep set ran_at = '-infinity' where name = 'gates'; select posthouse.tidy()").await;
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
}

#[tokio::test]
async fn places_that_nobody_can_use_are_offered_to_others() {
    let (_queue, s, worker) = Queue::with_worker().await;
    let gone = s.worker_of(&["other"], &["k"], 60_000).await;
    s.set_gate("'crm', max_running => 1").await;
    for n in 0..5 {
        s.enqueue(&format!("kind => 'k', queue => 'other', tenant => 't{n}', gates => array['crm']")).await;
    }
    for n in 0..5 {
        s.enqueue(&format!("kind => 'k', tenant => 't{n}', gates => array['crm']")).await;
    }
    let jobs = worker.claim(&s, 1).await;
    s.without_naps().await;
    assert!(gone.claim(&s, 1).await.is_empty());
    assert!(worker.claim(&s, 1).await.is_empty());
    // The place goes to lanes that slept longest, whose workers are gone; a sweep or two later to those that are served.
    s.done(worker.id, &jobs).await;
    for _ in 0..3 {
        s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    }
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
}

#[tokio::test]
async fn the_places_of_a_dead_worker_are_free_again_and_what_it_reserved_is_spent() {
    let (_queue, s, worker) = Queue::with_worker().await;
    let dead = s.worker(&["k"]).await;
    s.set_gate("'crm', max_running => 3, requests_per_minute => 10000, tokens_per_minute => 100000000").await;
    s.enqueue_with(20, r#"{"gates": ["crm"], "tokens": 500}"#).await;
    let lost = dead.claim(&s, 100).await;
    assert_eq!(lost.len(), 3);
    s.without_naps().await;
    assert!(worker.claim(&s, 100).await.is_empty());
    s.expire(dead.id).await;
    assert_eq!(s.rescue(dead.id).await, 3);
    let again = worker.claim(&s, 100).await;
    assert_eq!(again.len(), 3);
    assert_eq!(s.of_gate("crm", "running").await, 3);
    // Of the lost attempts nobody knows whether they called: their reservations stay.
    assert_eq!(
        (s.of_gate("crm", "requests_last_minute").await, s.of_gate("crm", "tokens_last_minute").await),
        (6, 3_000)
    );
    // A late settle of a lost attempt changes nothing.
    let verdicts = s
        .settle(
            dead.id,
            &json!([{"id": lost[0].id, "fence": lost[0].fence, "outcome": "done", "usage": {"input_tokens": 1}}]),
        )
        .await;
    assert_eq!(verdicts[0].1, "lost");
    assert_eq!((s.of_gate("crm", "running").await, s.of_gate("crm", "tokens_last_minute").await), (3, 3_000));
}

#[tokio::test]
async fn jobs_give_back_what_they_did_not_use() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.set_gate("'crm', requests_per_minute => 10000, tokens_per_minute => 100000000").await;
    s.enqueue_with(1, r#"{"gates": ["crm"], "tokens": 500}"#).await;
    let mut known = (0, 0);
    for (outcome, requests, tokens) in [
        // Not called, so nothing was used.
        (json!({"outcome": "release", "usage": {"requests": 0}}), 0, 0),
        (json!({"outcome": "snooze", "delay_ms": 0}), 0, 0),
        (json!({"outcome": "retry", "delay_ms": 0, "usage": {"requests": 0}}), 0, 0),
        // Called: what it said, and what was reserved where it did not say, as a worker that stops in the middle of a call.
        (json!({"outcome": "release"}), 1, 500),
        (json!({"outcome": "snooze", "delay_ms": 0, "usage": {"requests": 1, "input_tokens": 0}}), 1, 0),
        (json!({"outcome": "retry", "delay_ms": 0}), 1, 500),
        (json!({"outcome": "retry", "delay_ms": 0, "usage": {"input_tokens": 100, "output_tokens": 20}}), 1, 120),
        (json!({"outcome": "retry", "delay_ms": 0, "usage": {"prompt_tokens": 700, "completion_tokens": 200}}), 1, 900),
        // What is no sane number counts as unknown.
        (json!({"outcome": "retry", "delay_ms": 0, "usage": {"input_tokens": -5, "requests": "many"}}), 1, 500),
        (json!({"outcome": "done", "usage": {"requests": 3, "input_tokens": 1500}}), 3, 1500),
    ] {
        s.run("update posthouse.job set max_attempts = 20").await;
        let jobs = worker.claim(&s, 1).await;
        assert_eq!(jobs.len(), 1, "{outcome}");
        s.end(worker.id, &jobs, &outcome).await;
        known = (known.0 + requests, known.1 + tokens);
        let counted = (s.of_gate("crm", "requests_last_minute").await, s.of_gate("crm", "tokens_last_minute").await);
        assert_eq!(counted, known, "{outcome}");
    }
}

#[tokio::test]
async fn a_snooze_for_a_closed_gate_keeps_its_place() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.run("select posthouse.set_route('m', array['p/m'])").await;
    s.enqueue_with(3, r#"{"gates": ["model:m"]}"#).await;
    let jobs = worker.claim(&s, 1).await;
    s.run("select posthouse.report_endpoint('p/m', 'refused', 60000)").await;
    let snooze = json!({"outcome": "snooze", "delay_ms": 60_000, "gate": "endpoint:p/m", "reason": "429"});
    s.end(worker.id, &jobs, &snooze).await;
    assert_eq!(s.job(jobs[0].id).await["attempt"], 0);
    assert!(worker.claim(&s, 3).await.is_empty());
    s.run("select posthouse.open_gate('endpoint:p/m')").await;
    assert_eq!(ids(&worker.claim(&s, 1).await), ids(&jobs), "first in line as before");
    // With the gate open it waits as it said.
    let jobs = running(&s, &worker).await;
    s.end(worker.id, &jobs, &snooze).await;
    assert_eq!(worker.claim(&s, 3).await.len(), 2);
}
