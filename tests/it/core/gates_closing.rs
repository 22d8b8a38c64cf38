//! Gates that close: by what providers answer, with one probe after it and the rest paced; and by budgets that are spent.

use serde_json::{Value, json};

use super::gates_support::Clock;
use super::support::{Claimed, Queue, Session, Worker, ids};

const SECOND: i64 = 1_000;

/// A queue whose kind `k` asks model `m` at one endpoint.
async fn asking<'s>(s: &'s Session) -> (Clock<'s>, Worker) {
    let clock = Clock::new(s).await;
    s.run("select posthouse.set_kind('k', array['model:m']); select posthouse.set_route('m', array['p/m'])").await;
    let worker = s.worker(&["k"]).await;
    (clock, worker)
}

/// What the endpoint answered; the answer is for how long it is closed.
async fn report(s: &Session, arguments: &str) -> Option<i64> {
    s.get(&format!("select posthouse.report_endpoint('p/m', {arguments})")).await
}

#[tokio::test]
async fn a_refusal_closes_for_all_then_one_probe_goes_and_the_rest_follow_paced() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, worker) = asking(&s).await;
    let other = s.worker(&["k"]).await;
    s.enqueue_with(1_000, "{}").await;
    let first = worker.claim(&s, 5).await;
    assert_eq!(first.len(), 5);
    clock.pass(200).await;
    assert_eq!(report(&s, "'refused', 600000, '429', 200").await, Some(600_000));
    // Those under way when it closed count once, and cannot open it.
    clock.pass(100).await;
    assert!(report(&s, "'refused', 600000, '429', 300").await >= Some(599_000));
    assert!(report(&s, "'ok', null, null, 300").await > Some(590_000));
    let reason = json!({"outcome": "snooze", "delay_ms": 600_000, "gate": "endpoint:p/m", "usage": {"requests": 1}});
    s.end(worker.id, &first, &reason).await;
    for minute in 0..9 {
        s.without_naps().await;
        assert!(worker.claim(&s, 50).await.is_empty() && other.claim(&s, 50).await.is_empty(), "minute {minute}");
        clock.pass(60 * SECOND).await;
    }
    clock.pass(61 * SECOND).await;
    // One probe in the whole fleet, until it has answered.
    let probe = worker.claim(&s, 50).await;
    assert_eq!(ids(&probe), [first[0].id], "the oldest one, uncharged");
    assert_eq!(probe[0].attempt, 1);
    assert!(other.claim(&s, 50).await.is_empty() && worker.claim(&s, 50).await.is_empty());
    assert!(s.get::<bool>(&format!("select posthouse.begin_probe('p/m', {})", probe[0].id)).await);
    assert!(!s.get::<bool>(&format!("select posthouse.begin_probe('p/m', {})", first[1].id)).await);
    clock.pass(5 * SECOND).await;
    assert!(other.claim(&s, 50).await.is_empty());
    assert_eq!(report(&s, "'refused', 60000, '429', 5000").await, Some(60_000));
    s.end(worker.id, &probe, &reason).await;
    clock.pass(59 * SECOND).await;
    assert!(other.claim(&s, 50).await.is_empty());
    clock.pass(2 * SECOND).await;
    let probe = other.claim(&s, 50).await;
    assert_eq!(probe.len(), 1);
    assert_eq!(report(&s, "'ok', null, null, 0").await, None);
    // For ten seconds at most ten a second, and a second's worth at once; then as fast as anybody likes.
    let mut followed = 0;
    for tenth in 0..100 {
        followed += worker.claim(&s, 50).await.len() + other.claim(&s, 50).await.len();
        assert!(followed <= 12 + tenth, "{followed} after {tenth} tenths of a second");
        clock.pass(100).await;
    }
    assert!(followed >= 90, "{followed}");
    assert_eq!(worker.claim(&s, 200).await.len(), 200);
}

#[tokio::test]
async fn a_probe_that_is_never_heard_of_again_gives_way_to_another() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, worker) = asking(&s).await;
    s.enqueue_with(9, "{}").await;
    report(&s, "'refused', 1000").await;
    clock.pass(1_100).await;
    assert_eq!(worker.claim(&s, 5).await.len(), 1);
    for _ in 0..5 {
        clock.pass(11 * SECOND).await;
        assert!(worker.claim(&s, 5).await.is_empty());
    }
    clock.pass(6 * SECOND).await;
    assert_eq!(worker.claim(&s, 5).await.len(), 1);
    // Calls that are admitted one by one go the same way.
    let calls = s.worker(&["asks"]).await;
    s.enqueue("kind => 'asks'").await;
    s.enqueue("kind => 'asks'").await;
    let jobs = calls.claim(&s, 2).await;
    assert!(s.admit(calls.id, &jobs[0], "model:m", 0).await > Some(0));
    clock.pass(61 * SECOND).await;
    assert_eq!(s.admit(calls.id, &jobs[0], "model:m", 0).await, Some(0));
    assert!(s.admit(calls.id, &jobs[1], "model:m", 0).await > Some(0));
    assert!(worker.claim(&s, 5).await.is_empty());
    assert_eq!(s.admit(calls.id, &jobs[0], "model:m", 0).await, Some(0), "it is its own probe");
}

#[tokio::test]
async fn an_empty_account_closes_until_a_person_opens_it() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, worker) = asking(&s).await;
    s.enqueue_with(9, "{}").await;
    let jobs = worker.claim(&s, 2).await;
    report(&s, "'quota', null, 'insufficient_quota', 100").await;
    // A wait that others were told does not open it.
    assert!(report(&s, "'refused', 1000, '429', 50").await > Some(86_400_000));
    assert!(report(&s, "'ok', null, null, 0").await > Some(86_400_000));
    s.end(worker.id, &jobs, &json!({"outcome": "snooze", "delay_ms": 0, "gate": "endpoint:p/m"})).await;
    clock.pass(3_000 * SECOND).await;
    s.without_naps().await;
    assert!(worker.claim(&s, 9).await.is_empty());
    assert_eq!(s.count("posthouse.alert_note where kind = 'gate_quota'").await, 1);
    assert!(s.get::<bool>("select posthouse.open_gate('endpoint:p/m')").await);
    assert_eq!(ids(&worker.claim(&s, 2).await), ids(&jobs), "they kept their place");
}

#[tokio::test]
async fn the_breaker_closes_for_longer_each_time_and_opens_by_a_probe() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, worker) = asking(&s).await;
    s.enqueue_with(20, "{}").await;
    let mut before = 0;
    for time in 0..6 {
        let closed = report(&s, "'broken', null, '5 of 5 failed', 0").await.unwrap();
        assert!(closed > before || closed == 300 * SECOND, "time {time}: {closed} after {before}");
        before = closed;
        assert!(worker.claim(&s, 5).await.is_empty());
        clock.pass(closed + 100).await;
        assert_eq!(worker.claim(&s, 5).await.len(), 1, "time {time}");
    }
    assert_eq!(report(&s, "'ok', null, null, 0").await, None);
    clock.pass(11 * SECOND).await;
    assert_eq!(worker.claim(&s, 5).await.len(), 5);
    assert_eq!(report(&s, "'broken', null, 'again', 0").await, Some(10 * SECOND), "its strikes are forgotten");
}

#[tokio::test]
async fn refusals_do_not_lengthen_the_pause_of_a_broken_endpoint_nor_the_other_way_round() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, _worker) = asking(&s).await;
    for _ in 0..6 {
        assert_eq!(report(&s, "'refused', 1000, '429', 0").await, Some(SECOND));
        clock.pass(1_100).await;
    }
    assert_eq!(report(&s, "'broken', null, 'its probe failed', 0").await, Some(10 * SECOND));
    clock.pass(10 * SECOND + 100).await;
    assert_eq!(report(&s, "'broken', null, 'its probe failed', 0").await, Some(20 * SECOND));
    clock.pass(20 * SECOND + 100).await;
    assert_eq!(report(&s, "'refused', null, '429', 0").await, Some(SECOND));
}

#[tokio::test]
async fn a_model_is_closed_while_all_its_endpoints_are() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, worker) = asking(&s).await;
    s.run("select posthouse.set_route('m', array['p/m', 'q/m'])").await;
    s.enqueue_with(9, "{}").await;
    report(&s, "'refused', 60000").await;
    assert_eq!(worker.claim(&s, 1).await.len(), 1, "the other one is open");
    s.run("select posthouse.report_endpoint('q/m', 'refused', 30000)").await;
    s.without_naps().await;
    assert!(worker.claim(&s, 5).await.is_empty());
    clock.pass(31 * SECOND).await;
    assert_eq!(worker.claim(&s, 5).await.len(), 1, "a probe of the one that opens first");
    s.run("select posthouse.report_endpoint('q/m', 'ok')").await;
    clock.pass(11 * SECOND).await;
    assert_eq!(worker.claim(&s, 5).await.len(), 5);
}

/// Run one job that costs so much.
async fn spend(s: &Session, worker: &Worker, cost: &str) -> Vec<Claimed> {
    let jobs = worker.claim(s, 1).await;
    s.end(worker.id, &jobs, &json!({"outcome": "done", "usage": {"cost_usd": cost, "requests": 1}})).await;
    jobs
}

#[tokio::test]
async fn a_spent_budget_holds_jobs_until_the_next_day_or_month() {
    let (_queue, s) = Queue::with_session().await;
    let (mut clock, worker) = asking(&s).await;
    s.set_gate("'tenant:default', money_per_day => 1, money_per_month => 1.6, warn_at => 0.8").await;
    s.enqueue_with(9, "{}").await;
    assert_eq!(spend(&s, &worker, "0.7").await.len(), 1);
    let alerts = async || s.count("posthouse.alert_note where kind = 'budget'").await;
    assert_eq!(alerts().await, 0);
    assert_eq!(spend(&s, &worker, "0.1").await.len(), 1);
    assert_eq!(alerts().await, 1, "four fifths");
    assert_eq!(spend(&s, &worker, "0.199999999").await.len(), 1);
    assert_eq!(spend(&s, &worker, "0.000000001").await.len(), 1, "exact decimals: one billionth was left");
    s.without_naps().await;
    assert!(spend(&s, &worker, "1").await.is_empty());
    // Noon to midnight, in beats.
    for _ in 0..24 {
        assert!(worker.claim(&s, 1).await.is_empty());
        clock.pass(1_800 * SECOND - 1).await;
        s.run(&format!("select posthouse.heartbeat('{}')", worker.id)).await;
    }
    clock.pass(SECOND).await;
    // Lanes of tenants that sleep for long are woken by the sweep.
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
    assert_eq!(spend(&s, &worker, "0.6").await.len(), 1);
    s.without_naps().await;
    assert!(worker.claim(&s, 1).await.is_empty(), "the month's is spent too");
    let until: bool = s
        .get(
            "select bool_and(posthouse.gates_open_at(l.id) = date_trunc('month', posthouse.made_up_now() at time zone 'UTC') at time zone 'UTC'
               + interval '1 month') from posthouse.lane l",
        )
        .await;
    assert!(until, "until the first of the next month");
    s.set_gate("'tenant:default', money_per_day => 5, money_per_month => 10").await;
    assert_eq!(worker.claim(&s, 9).await.len(), 4, "more was allowed");
}

#[tokio::test]
async fn a_spent_budget_fails_jobs_or_gives_them_another_model() {
    let (_queue, s) = Queue::with_session().await;
    let (_clock, worker) = asking(&s).await;
    s.set_gate("'model:m', money_per_day => 1, when_spent => 'model:small'").await;
    s.enqueue_with(9, "{}").await;
    spend(&s, &worker, "1").await;
    let models = async |max: i32| -> Vec<Option<String>> {
        let seq = worker.seq.replace(worker.seq.get() + 1);
        s.list(&format!("select model from posthouse.claim('{}', {seq}, {max})", worker.id)).await
    };
    let small = Some("small".to_owned());
    // Whatever limits that one has: none, only how many run, others.
    assert_eq!(models(1).await, std::slice::from_ref(&small));
    s.set_gate("'model:small', max_running => 3").await;
    assert_eq!(models(9).await, [small.clone(), small.clone()], "what runs already counts there");
    s.set_gate("'model:small', max_running => 4, requests_per_minute => 100").await;
    assert_eq!(models(9).await, std::slice::from_ref(&small));
    s.set_gate("'model:m', money_per_day => 1, when_spent => 'fail'").await;
    assert!(models(9).await.is_empty());
    let failed: Vec<Value> = s.list("select to_jsonb(j.*) from posthouse.jobs j where j.state = 'failed'").await;
    assert_eq!(failed.len(), 4);
    for job in failed {
        assert_eq!(job["reason"], "budget");
        assert!(job["error"].as_str().unwrap().contains("model:m"), "{job}");
    }
}
