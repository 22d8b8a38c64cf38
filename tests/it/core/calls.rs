//! Which outside call of an attempt is the same as an earlier one that may have had an effect: what idempotency keys are made of.

use serde_json::{Value, json};

use super::support::{Queue, Session, Worker};

/// What names the earlier call; `None`: there is none.
async fn seed(s: &Session, worker: &Worker, id: i64, fence: i64) -> Option<String> {
    s.get(&format!("select posthouse.call_seed('{}', {id}, {fence})", worker.id)).await
}

#[tokio::test]
async fn only_an_end_that_says_nothing_leaves_a_doubt() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let error = |class: &str, detail: Value| json!({"class": class, "message": "no", "detail": detail});
    let retry = |error: Value| json!({"outcome": "retry", "delay_ms": 0, "error": error});
    for (outcome, doubt) in [
        (retry(error("transient", json!({"status": 500}))), false),
        (retry(error("ambiguous", Value::Null)), true),
        (retry(error("timeout", Value::Null)), true),
        (retry(error("incomplete", json!({"perhaps_billed": true}))), true),
        (retry(error("incomplete", json!({"perhaps_billed": false}))), false),
        (retry(json!("a text")), false),
        (json!({"outcome": "snooze", "delay_ms": 0}), false),
        (json!({"outcome": "release"}), true),
    ] {
        let id = s.enqueue("kind => 'a'").await;
        let first = worker.claim(&s, 1).await[0].fence;
        assert_eq!(seed(&s, &worker, id, first).await, None);
        let settled = |outcome: &Value, fence: i64| {
            let mut outcome = outcome.clone();
            outcome["id"] = json!(id);
            outcome["fence"] = json!(fence);
            json!([outcome])
        };
        s.settle(worker.id, &settled(&outcome, first)).await;
        let second = worker.claim(&s, 1).await[0].fence;
        let expected = doubt.then(|| format!("{}/{first}", worker.id));
        assert_eq!(seed(&s, &worker, id, second).await, expected, "{outcome}");
        // It stays the same call for as long as nobody knows.
        s.settle(worker.id, &settled(&json!({"outcome": "release"}), second)).await;
        let third = worker.claim(&s, 1).await[0].fence;
        let expected = expected.unwrap_or_else(|| format!("{}/{second}", worker.id));
        assert_eq!(seed(&s, &worker, id, third).await, Some(expected), "{outcome}");
        assert_eq!(seed(&s, &worker, id, second).await, None, "an attempt that is over");
        s.settle(worker.id, &settled(&retry(error("transient", Value::Null)), third)).await;
        let fourth = worker.claim(&s, 1).await[0].fence;
        assert_eq!(seed(&s, &worker, id, fourth).await, None, "{outcome}");
        s.settle(worker.id, &settled(&json!({"outcome": "done"}), fourth)).await;
    }
}

#[tokio::test]
async fn a_lost_worker_leaves_a_doubt_and_somebody_who_hurries_takes_none_away() {
    let (_queue, s) = Queue::with_session().await;
    let (dying, worker) = (s.worker(&["a"]).await, s.worker(&["a"]).await);
    let id = s.enqueue("kind => 'a'").await;
    let fence = dying.claim(&s, 1).await[0].fence;
    s.expire(dying.id).await;
    assert_eq!(s.rescue(dying.id).await, 1);
    s.run("update posthouse.job set run_at = clock_timestamp() + interval '1 hour'").await;
    s.get::<String>(&format!("select posthouse.retry({id})")).await;
    let second = worker.claim(&s, 1).await[0].fence;
    assert_eq!(seed(&s, &worker, id, second).await, Some(format!("{}/{fence}", dying.id)));
    // What was claimed and never begun leaves none.
    let other = s.enqueue("kind => 'a'").await;
    let fence = worker.claim(&s, 1).await[0].fence;
    s.beat(worker.id, (2, 1), &[(id, second)], true).await;
    let next = s.worker(&["a"]).await;
    let jobs = next.claim(&s, 1).await;
    assert_eq!(jobs[0].id, other);
    assert!(jobs[0].fence > fence);
    assert_eq!(seed(&s, &next, other, jobs[0].fence).await, None);
}
