//! Which gate holds a job back, and until when: what posthouse.explain says of gates.

use serde_json::json;

use super::support::{Queue, Session};

/// Reasons with the seconds until they end.
async fn explain(s: &Session, id: i64) -> Vec<(String, Option<f64>)> {
    s.rows(&format!(
        "select reason, extract(epoch from until - clock_timestamp())::float8 from posthouse.explain({id}) where state = 'queued'"
    ))
    .await
    .iter()
    .map(|r| (r.get(0), r.get(1)))
    .collect()
}

/// The only reason.
#[track_caller]
fn only(reasons: &[(String, Option<f64>)]) -> (&str, Option<f64>) {
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    (&reasons[0].0, reasons[0].1)
}

#[tokio::test]
async fn a_closed_gate_is_named_with_who_why_and_until_when() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_kind('k', array['model:m']); select posthouse.set_route('m', array['p/x'])").await;
    let id = s.enqueue("kind => 'k', tenant => 'acme'").await;
    let reasons = explain(&s, id).await;
    assert_eq!(only(&reasons), ("waits for a free slot: 0 jobs of its tenant and kind are before it", None));
    s.run("select posthouse.close_gate('tenant:acme', clock_timestamp() + interval '1 hour', 'complaints')").await;
    let reasons = explain(&s, id).await;
    let (reason, until) = only(&reasons);
    assert_eq!(reason, "gate tenant:acme is closed by a person: complaints");
    assert!(until.is_some_and(|until| (3_590.0..3_601.0).contains(&until)), "{until:?}");
    assert!(worker.claim(&s, 1).await.is_empty());
    // All that hold it back, and for ever.
    s.run("select posthouse.close_gate('queue:default')").await;
    let reasons = explain(&s, id).await;
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert_eq!(reasons[1], ("gate queue:default is closed by a person, until somebody opens it".to_owned(), None));
    s.run("select posthouse.open_gate('tenant:acme'); select posthouse.open_gate('queue:default')").await;
    // One that is not due yet is told what will hold it then.
    let later = s.enqueue("kind => 'k', tenant => 'acme', delay => '1 hour'").await;
    s.get::<i64>("select posthouse.report_endpoint('p/x', 'quota', null, 'insufficient_quota')").await;
    for (id, before) in [(id, 0), (later, 1)] {
        let reasons = explain(&s, id).await;
        let expected =
            "gate endpoint:p/x is closed since its account is empty, until somebody opens it: insufficient_quota";
        assert_eq!((reasons.len(), &*reasons[before].0), (before + 1, expected), "{reasons:?}");
    }
    // Open again: the provider says for how long not.
    s.run("select posthouse.open_gate('endpoint:p/x')").await;
    s.get::<i64>("select posthouse.report_endpoint('p/x', 'refused', 60000, '429')").await;
    let reasons = explain(&s, id).await;
    let (reason, until) = only(&reasons);
    assert_eq!(reason, "gate endpoint:p/x is closed by its provider: 429");
    assert!(until.is_some_and(|until| (50.0..61.0).contains(&until)), "{until:?}");
    // Its time is over, and somebody tries it.
    s.run(
        "update posthouse.gate set closed_until = clock_timestamp() - interval '1 second' where name = 'endpoint:p/x'",
    )
    .await;
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
    let next = s.enqueue("kind => 'k'").await;
    let reasons = explain(&s, next).await;
    let (reason, until) = only(&reasons);
    assert_eq!(reason, format!("gate endpoint:p/x was closed: 429; job {id} tries it first"));
    assert!(until.is_some_and(|until| (50.0..61.0).contains(&until)), "{until:?}");
}

#[tokio::test]
async fn a_full_gate_is_named_with_what_passes() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_gate('tenant:*', max_running => 2)").await;
    s.enqueue_bulk("k", "acme", 3).await;
    let jobs = worker.claim(&s, 3).await;
    assert_eq!(jobs.len(), 2);
    let last: i64 = s.get("select max(id) from posthouse.job").await;
    let reasons = explain(&s, last).await;
    assert_eq!(only(&reasons), ("gate tenant:* (acme) is full: 2 of 2 run", None));
    let done: Vec<_> = jobs.iter().map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "done"})).collect();
    s.settle(worker.id, &json!(done)).await;
    assert!(only(&explain(&s, last).await).0.starts_with("waits for a free slot"));
    // Nobody serves it either.
    s.run("select posthouse.close_gate('crm')").await;
    let other = s.enqueue("kind => 'other', gates => array['crm']").await;
    let reasons = explain(&s, other).await;
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert_eq!(reasons[0].0, "gate crm is closed by a person, until somebody opens it");
    assert_eq!(reasons[1].0, "no live worker serves kind other on queue \"default\"");
}

#[tokio::test]
async fn a_rate_says_when_it_lets_through_again() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_gate('crm', requests_per_minute => 1, tokens_per_minute => 1000)").await;
    s.run("select posthouse.enqueue('k', gates => array['crm'], tokens => 400) from generate_series(1, 2)").await;
    let jobs = worker.claim(&s, 2).await;
    assert_eq!(jobs.len(), 1);
    let reasons = explain(&s, jobs[0].id + 1).await;
    let (reason, until) = only(&reasons);
    assert_eq!(reason, "gate crm is at its rate: 1 of 1 requests, 400 of 1000 tokens in the last minute");
    assert!(until.is_some_and(|until| (50.0..63.0).contains(&until)), "{until:?}");
}

#[tokio::test]
async fn a_budget_that_is_spent_says_until_when_and_what_then() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_gate('tenant:t', money_per_day => 1.5)").await;
    let id = s.enqueue("kind => 'k', tenant => 't'").await;
    let fence = worker.claim(&s, 1).await[0].fence;
    let usage = json!({"cost_usd": "2.25", "requests": 1});
    s.settle(worker.id, &json!([{"id": id, "fence": fence, "outcome": "done", "usage": usage}])).await;
    let next = s.enqueue("kind => 'k', tenant => 't'").await;
    let reasons = explain(&s, next).await;
    let (reason, until) = only(&reasons);
    assert_eq!(reason, "the budget of gate tenant:t is spent: 2.25 of 1.5 for today");
    let midnight: f64 = s
        .get(
            "select extract(epoch from (date_trunc('day', clock_timestamp() at time zone 'UTC') + interval '1 day') at time zone 'UTC'
               - clock_timestamp())::float8",
        )
        .await;
    assert!(until.is_some_and(|until| (until - midnight).abs() < 5.0), "{until:?} {midnight}");
    assert!(worker.claim(&s, 1).await.is_empty());
    s.run("select posthouse.set_gate('tenant:t', money_per_month => 2, when_spent => 'fail')").await;
    let reasons = explain(&s, next).await;
    assert_eq!(
        only(&reasons).0,
        "the budget of gate tenant:t is spent: 2.25 of 2 for this month; its jobs fail when they are claimed"
    );
    // With another model it goes on, and passes that one's gates.
    s.run(
        "select posthouse.set_gate('tenant:t', money_per_month => 2, when_spent => 'model:tiny');
         select posthouse.close_gate('model:tiny', 'infinity', 'no more')",
    )
    .await;
    let reasons = explain(&s, next).await;
    assert_eq!(only(&reasons).0, "gate model:tiny is closed by a person, until somebody opens it: no more");
    s.run("select posthouse.open_gate('model:tiny')").await;
    assert!(only(&explain(&s, next).await).0.starts_with("waits for a free slot"));
    assert_eq!(worker.claim(&s, 1).await.len(), 1);
}

#[tokio::test]
async fn of_jobs_that_run_one_at_a_time_the_one_before_is_named() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.run("select posthouse.set_serial_by('default', 'chat')").await;
    let [first, second] = [1, 2].map(|n| format!("kind => 'k', payload => '{{\"chat\": \"c-17\", \"n\": {n}}}'"));
    let (first, second) = (s.enqueue(&first).await, s.enqueue(&second).await);
    let expected = format!("job {first}, which shares its value \"c-17\", runs first");
    assert_eq!(only(&explain(&s, second).await), (&*expected, None));
    assert!(only(&explain(&s, first).await).0.starts_with("waits for a free slot"));
    let jobs = worker.claim(&s, 2).await;
    assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [first]);
    let reasons = explain(&s, second).await;
    assert_eq!(only(&reasons), (&*expected, None));
    s.settle(worker.id, &json!([{"id": first, "fence": jobs[0].fence, "outcome": "retry", "delay_ms": 60000}])).await;
    assert_eq!(only(&explain(&s, second).await).0, expected);
    s.get::<String>(&format!("select posthouse.cancel({first})")).await;
    assert!(only(&explain(&s, second).await).0.starts_with("waits for a free slot"));
}

/// The statements that the library tells gates by, on each version of Postgres.
#[tokio::test]
async fn gates_are_told_whole_with_amounts_to_the_last_digit() {
    let (queue, s) = Queue::with_session().await;
    let store = posthouse::store::Database::new(queue.url()).unwrap().store("test");
    s.run("select posthouse.set_gate('tenant:*', max_running => 1), posthouse.set_gate('crm', money_per_day => 0.10)")
        .await;
    s.run("select posthouse.set_gate('tenant:acme', money_per_month => 7), posthouse.close_gate('tenant:acme')").await;
    s.enqueue("kind => 'k', gates => array['crm']").await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 1).await;
    assert_eq!(jobs.len(), 1);
    let names: Vec<String> = store.gates().await.unwrap().into_iter().map(|gate| gate.name).collect();
    assert_eq!(names, ["crm", "tenant:*", "tenant:acme"]);
    let crm = store.gate("crm").await.unwrap().unwrap();
    assert_eq!(crm.money_per_day.as_deref(), Some("0.10"));
    assert!(store.gate("none").await.unwrap().is_none());
    let acme = store.gates_of_each("tenant:").await.unwrap();
    assert_eq!(acme.iter().map(|gate| gate.name.as_str()).collect::<Vec<_>>(), ["tenant:acme"]);
    let (worst, all) = store.closed_or_full_gates(10).await.unwrap();
    let worst: Vec<_> = worst.iter().map(|gate| (gate.name.as_str(), gate.member.as_deref())).collect();
    assert_eq!((worst, all), (vec![("tenant:acme", None), ("tenant:*", Some("default"))], 2));
    let limits = store.gate_limits(&["crm".to_owned(), "none".to_owned()]).await.unwrap();
    assert_eq!(limits.len(), 1);
}
