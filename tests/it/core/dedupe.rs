//! What becomes of an enqueue whose dedupe key is held, under each policy, for each state of the job that holds it.

use serde_json::{Value, json};

use super::support::{Queue, Session, Worker};

/// What an enqueue answered: id, state, whether it is a duplicate, what the key led to.
type Answer = (i64, String, bool, Option<String>);

async fn enqueue(s: &Session, arguments: &str) -> Answer {
    let rows = s.rows(&format!("select id, state, duplicate, deduped from posthouse.enqueue({arguments})")).await;
    (rows[0].get(0), rows[0].get(1), rows[0].get(2), rows[0].get(3))
}

/// One with the key `k`, a payload and a policy.
async fn keyed(s: &Session, payload: i32, policy: &str) -> Answer {
    enqueue(s, &format!("kind => 'a', payload => '{payload}', dedupe_key => 'k', dedupe_policy => '{policy}'")).await
}

async fn many(s: &Session, jobs: &Value) -> Vec<Answer> {
    let sql = "select id, state, duplicate, deduped from posthouse.enqueue_many($1::jsonb) order by ordinal";
    let rows = s.client.query(sql, &[jobs]).await.unwrap();
    rows.iter().map(|r| (r.get(0), r.get(1), r.get(2), r.get(3))).collect()
}

fn answer(id: i64, state: &str, duplicate: bool, deduped: Option<&str>) -> Answer {
    (id, state.to_owned(), duplicate, deduped.map(str::to_owned))
}

/// Claim what is due and settle it, round after round, until nothing is; the payloads in the order in which they ran.
async fn drain(s: &Session, worker: &Worker) -> Vec<Value> {
    let mut ran = Vec::new();
    loop {
        let jobs = worker.claim(s, 100).await;
        if jobs.is_empty() {
            return ran;
        }
        for job in jobs {
            ran.push(job.payload);
            s.settle(worker.id, &json!([{"id": job.id, "fence": job.fence, "outcome": "done"}])).await;
        }
    }
}

async fn sweep(s: &Session) {
    s.run("update posthouse.sweep set ran_at = '-infinity'; select posthouse.tidy()").await;
}

#[tokio::test]
async fn while_the_holder_waits() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let (first, ..) = keyed(&s, 1, "keep").await;
    assert_eq!(keyed(&s, 2, "keep").await, answer(first, "queued", true, Some("kept")));
    assert_eq!(keyed(&s, 1, "same").await, answer(first, "queued", true, Some("kept")));
    for (policy, code) in [("reject", "PH008"), ("same", "PH009")] {
        let refusal = s
            .refused(&format!("select posthouse.enqueue('a', '2', dedupe_key => 'k', dedupe_policy => '{policy}')"))
            .await;
        assert_eq!(refusal.code, code, "{}", refusal.message);
        assert!(refusal.message.starts_with(&format!("dedupe_key: job {first} holds it")), "{}", refusal.message);
        assert!(refusal.message.contains("queued"), "{}", refusal.message);
    }
    assert_eq!(s.job(first).await["payload"], json!(1));
    assert_eq!(keyed(&s, 3, "replace").await, answer(first, "queued", true, Some("replaced")));
    assert_eq!(keyed(&s, 4, "rerun").await, answer(first, "queued", true, Some("replaced")));
    assert_eq!(s.count("posthouse.jobs").await, 1);
    assert_eq!(s.count("posthouse.payload").await, 1);
    assert_eq!(drain(&s, &worker).await, [json!(4)]);
    assert_eq!(s.count("posthouse.dedupe").await, 0);
}

#[tokio::test]
async fn while_the_holder_runs() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let (first, ..) = keyed(&s, 1, "keep").await;
    let running = worker.claim(&s, 1).await;
    for policy in ["keep", "replace"] {
        assert_eq!(keyed(&s, 2, policy).await, answer(first, "running", true, Some("kept")), "{policy}");
    }
    assert_eq!(keyed(&s, 1, "same").await, answer(first, "running", true, Some("kept")));
    assert!(
        s.refused("select posthouse.enqueue('a', dedupe_key => 'k', dedupe_policy => 'reject')")
            .await
            .message
            .contains("running")
    );
    // One more waits behind it, with what came last, whatever the policy it came with.
    let (next, state, duplicate, deduped) = keyed(&s, 2, "rerun").await;
    assert!(next != first);
    assert_eq!((&*state, duplicate, deduped.as_deref()), ("queued", false, Some("behind")));
    assert_eq!(keyed(&s, 3, "rerun").await, answer(next, "queued", true, Some("replaced")));
    assert_eq!(keyed(&s, 4, "replace").await, answer(next, "queued", true, Some("replaced")));
    assert_eq!(keyed(&s, 5, "keep").await, answer(first, "running", true, Some("kept")));
    let waits = s.job(next).await;
    assert_eq!(waits["run_at"], Value::Null, "no time that programs cannot read");
    let why: String = s.get(&format!("select reason from posthouse.explain({next})")).await;
    assert!(why.contains(&format!("job {first}")), "{why}");
    assert!(worker.claim(&s, 1).await.is_empty());
    s.settle(worker.id, &json!([{"id": first, "fence": running[0].fence, "outcome": "done"}])).await;
    assert_eq!(drain(&s, &worker).await, [json!(4)]);
    assert_eq!(s.count("posthouse.dedupe").await, 0);
    assert_eq!(s.state(next).await, "done");
}

#[tokio::test]
async fn the_one_behind_comes_however_the_first_one_ends() {
    let (queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    for end in [
        "done",
        "fail",
        "cancelled",
        "retry then done",
        "lost at its last attempt",
        "settled while the key is looked at",
    ] {
        let max_attempts = if end.starts_with("lost") { 1 } else { 5 };
        let first =
            s.enqueue(&format!("kind => 'a', payload => '1', dedupe_key => 'k', max_attempts => {max_attempts}")).await;
        let runs_on = s.worker(&["a"]).await;
        let fence = runs_on.claim(&s, 1).await[0].fence;
        let (next, ..) = keyed(&s, 2, "rerun").await;
        let settled =
            |outcome: &str, fence: i64| json!([{"id": first, "fence": fence, "outcome": outcome, "delay_ms": 0}]);
        match end {
            "retry then done" => {
                s.settle(runs_on.id, &settled("retry", fence)).await;
                // It is not over: nothing else of its key runs.
                let jobs = worker.claim(&s, 10).await;
                assert_eq!(jobs.len(), 1);
                assert_eq!(jobs[0].id, first);
                s.settle(worker.id, &settled("done", jobs[0].fence)).await;
            }
            "lost at its last attempt" => {
                s.expire(runs_on.id).await;
                assert_eq!(s.rescue(runs_on.id).await, 1);
                assert_eq!(s.state(first).await, "failed");
            }
            "settled while the key is looked at" => {
                let other = queue.session().await;
                other.run("begin; select from posthouse.dedupe for update").await;
                // Does not wait.
                s.settle(runs_on.id, &settled("done", fence)).await;
                assert_eq!(s.state(first).await, "done");
                other.run("commit").await;
                assert!(worker.claim(&s, 10).await.is_empty());
                sweep(&s).await;
            }
            outcome => {
                s.settle(runs_on.id, &settled(outcome, fence)).await;
            }
        }
        let jobs = worker.claim(&s, 10).await;
        assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [next], "{end}");
        // It holds the key now.
        assert_eq!(keyed(&s, 3, "keep").await, answer(next, "running", true, Some("kept")), "{end}");
        s.settle(worker.id, &json!([{"id": next, "fence": jobs[0].fence, "outcome": "done"}])).await;
        assert_eq!(s.count("posthouse.dedupe").await, 0, "{end}");
    }
}

#[tokio::test]
async fn the_one_behind_is_cancelled_retried_or_due_later() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let (first, ..) = keyed(&s, 1, "keep").await;
    let fence = worker.claim(&s, 1).await[0].fence;
    let (next, ..) = keyed(&s, 2, "rerun").await;
    assert_eq!(s.get::<String>(&format!("select posthouse.cancel({next})")).await, "cancelled");
    // Another takes its place.
    let (after, ..) =
        enqueue(&s, "kind => 'a', payload => '3', dedupe_key => 'k', dedupe_policy => 'rerun', delay => '1 hour'")
            .await;
    assert!(after != next);
    s.settle(worker.id, &json!([{"id": first, "fence": fence, "outcome": "done"}])).await;
    assert!(worker.claim(&s, 1).await.is_empty());
    let due: bool = s.get(&format!("select run_at between clock_timestamp() + interval '59 minutes' and clock_timestamp() + interval '1 hour' from posthouse.jobs where id = {after}")).await;
    assert!(due, "it waits for its own time after the other one's end");
    // Somebody lets the one behind run at once: no more than that is lost.
    s.get::<String>(&format!("select posthouse.retry({after})")).await;
    let fence = worker.claim(&s, 1).await[0].fence;
    let (behind, ..) = keyed(&s, 4, "rerun").await;
    s.get::<String>(&format!("select posthouse.retry({behind})")).await;
    let jobs = worker.claim(&s, 1).await;
    assert_eq!(jobs[0].id, behind);
    s.settle(worker.id, &json!([{"id": after, "fence": fence, "outcome": "done"}])).await;
    assert_eq!(keyed(&s, 5, "keep").await, answer(behind, "running", true, Some("kept")));
    // One that is cancelled when its turn would come leaves nothing behind.
    let (last, ..) = keyed(&s, 6, "rerun").await;
    s.get::<String>(&format!("select posthouse.cancel({last})")).await;
    s.settle(worker.id, &json!([{"id": behind, "fence": jobs[0].fence, "outcome": "done"}])).await;
    assert_eq!(s.count("posthouse.dedupe").await, 0);
    assert!(worker.claim(&s, 1).await.is_empty());
}

#[tokio::test]
async fn what_comes_last_is_run_last_also_while_the_holder_waits_for_another_attempt() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    for (key, policy) in [("k", "rerun"), ("l", "replace")] {
        let keyed = |payload: i32, policy: &str| {
            format!("kind => 'a', payload => '{payload}', dedupe_key => '{key}', dedupe_policy => '{policy}'")
        };
        let (first, ..) = enqueue(&s, &keyed(1, "rerun")).await;
        let fence = worker.claim(&s, 1).await[0].fence;
        let (behind, ..) = enqueue(&s, &keyed(2, "rerun")).await;
        s.settle(worker.id, &json!([{"id": first, "fence": fence, "outcome": "release"}])).await;
        let last = enqueue(&s, &keyed(3, policy)).await;
        assert_eq!(last, answer(behind, "queued", true, Some("replaced")));
        assert_eq!(drain(&s, &worker).await, [json!(1), json!(3)], "{policy}");
    }
    assert_eq!(s.count("posthouse.dedupe").await, 0);
}

#[tokio::test]
async fn one_behind_that_somebody_holds_is_waited_for() {
    let (queue, s) = Queue::with_session().await;
    let (open, late) = (queue.session().await, queue.session().await);
    let worker = s.worker(&["a"]).await;
    let (first, ..) = keyed(&s, 1, "rerun").await;
    let fence = worker.claim(&s, 1).await[0].fence;
    let (behind, ..) = keyed(&s, 2, "rerun").await;
    for (end, expected) in [("rollback", "replaced"), ("commit", "behind")] {
        open.run(&format!("begin; select posthouse.cancel({behind})")).await;
        let pid: i32 = late.get("select pg_backend_pid()").await;
        let asked = async { keyed(&late, 3, "rerun").await };
        let ends = async {
            s.wait_blocked(pid).await;
            open.run(end).await;
        };
        assert_eq!(tokio::join!(asked, ends).0.3.as_deref(), Some(expected), "{end}");
    }
    assert!(worker.claim(&s, 10).await.is_empty(), "one at a time");
    s.settle(worker.id, &json!([{"id": first, "fence": fence, "outcome": "done"}])).await;
    assert_eq!(drain(&s, &worker).await, [json!(3)]);
    assert_eq!(s.count("posthouse.job").await, 0);
}

#[tokio::test]
async fn a_job_that_is_replaced_is_as_if_enqueued_anew() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["default", "q2"], &["a"], 60_000).await;
    let first = s
        .enqueue("kind => 'a', payload => '1', dedupe_key => 'k', delay => '1 hour', max_attempts => 2, tokens => 5")
        .await;
    let (same, ..) = enqueue(
        &s,
        "kind => 'a', payload => '2', dedupe_key => 'k', dedupe_policy => 'replace', queue => 'q2', priority => -1, max_attempts => 7,
         timeout => '3 s', trace => '{\"traceparent\": \"00-1\"}'",
    )
    .await;
    assert_eq!(same, first);
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(
        (jobs[0].id, &*jobs[0].queue, jobs[0].priority, jobs[0].max_attempts, jobs[0].timeout_ms),
        (first, "q2", -1, 7, Some(3_000))
    );
    assert_eq!(jobs[0].payload, json!(2));
    // After attempts that failed: they are kept in the history, and counted from 0.
    s.settle(
        worker.id,
        &json!([{"id": first, "fence": 1, "outcome": "retry", "delay_ms": 3_600_000, "error": {"message": "no"}}]),
    )
    .await;
    assert_eq!(keyed(&s, 3, "replace").await.3.as_deref(), Some("replaced"));
    let jobs = worker.claim(&s, 10).await;
    assert_eq!((jobs[0].id, jobs[0].attempt, jobs[0].max_attempts), (first, 1, 5));
    assert!(jobs[0].fence > 1);
    assert_eq!(s.job(first).await["errors"].as_array().unwrap().len(), 1);
    let said = s.settle(worker.id, &json!([{"id": first, "fence": jobs[0].fence, "outcome": "done"}])).await;
    assert_eq!(said[0].1, "applied");
}

#[tokio::test]
async fn a_replaced_job_gives_up_its_place_among_those_that_run_one_at_a_time() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_serial_by('default', 'chat')").await;
    let worker = s.worker(&["a"]).await;
    let chat = |name: &str, more: &str| format!("kind => 'a', payload => '{{\"chat\": \"{name}\"}}'{more}");
    let first = s.enqueue(&chat("x", ", dedupe_key => 'k'")).await;
    let behind = s.enqueue(&chat("x", "")).await;
    let fence = worker.claim(&s, 1).await[0].fence;
    s.settle(worker.id, &json!([{"id": first, "fence": fence, "outcome": "retry", "delay_ms": 3_600_000}])).await;
    assert!(worker.claim(&s, 1).await.is_empty(), "it keeps its place until it is final");
    s.enqueue(&chat("y", ", dedupe_key => 'k', dedupe_policy => 'replace', delay => '1 hour'")).await;
    assert_eq!(worker.claim(&s, 1).await[0].id, behind);
}

#[tokio::test]
async fn windows_and_final_holders() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let window = |policy: &str, payload: i32| {
        format!(
            "kind => 'a', payload => '{payload}', dedupe_key => 'k', dedupe_policy => '{policy}', dedupe_for => '1 hour'"
        )
    };
    let (first, ..) = enqueue(&s, &window("same", 1)).await;
    drain(&s, &worker).await;
    for policy in ["keep", "replace", "same"] {
        assert_eq!(enqueue(&s, &window(policy, 1)).await, answer(first, "done", true, Some("kept")), "{policy}");
    }
    // Also when the payload is long gone.
    s.run("delete from posthouse.payload").await;
    assert_eq!(keyed(&s, 1, "same").await, answer(first, "done", true, Some("kept")));
    for (policy, code) in [("reject", "PH008"), ("same", "PH009")] {
        let refusal = s.refused(&format!("select posthouse.enqueue({})", window(policy, 2))).await;
        assert_eq!(refusal.code, code);
        assert!(refusal.message.contains("done"), "{}", refusal.message);
    }
    // Nothing runs: what is asked for once more runs at once, and has the key until it is final.
    let (second, _, duplicate, deduped) = keyed(&s, 3, "rerun").await;
    assert!(second != first && !duplicate && deduped.is_none());
    drain(&s, &worker).await;
    assert_eq!(s.count("posthouse.dedupe").await, 0);
    // A window behind which one waits ends with that one.
    let (third, ..) = enqueue(&s, &window("keep", 4)).await;
    let fence = worker.claim(&s, 1).await[0].fence;
    let (fourth, ..) = keyed(&s, 5, "rerun").await;
    s.settle(worker.id, &json!([{"id": third, "fence": fence, "outcome": "done"}])).await;
    assert_eq!(keyed(&s, 6, "keep").await, answer(fourth, "queued", true, Some("kept")));
    assert_eq!(drain(&s, &worker).await, [json!(5)]);
    // Each enqueue that replaces begins the window anew.
    let (fifth, ..) = enqueue(&s, &window("keep", 7)).await;
    s.run("update posthouse.dedupe set expires_at = clock_timestamp() + interval '1 minute'").await;
    assert_eq!(enqueue(&s, &window("replace", 8)).await.0, fifth);
    assert!(s.get::<bool>("select expires_at > clock_timestamp() + interval '59 minutes' from posthouse.dedupe").await);
}

#[tokio::test]
async fn payloads_as_keys() {
    let (_queue, s) = Queue::with_session().await;
    let by = |payload: &str| format!("kind => 'a', payload => '{payload}', dedupe_by_payload => true");
    let (first, ..) = enqueue(&s, &by(r#"{"a": 1.50, "b": ["x 1.50 \"2.0\"", 100, -0.0, 1e2]}"#)).await;
    for equal in [
        r#"{"b":["x 1.50 \"2.0\"",100.0,0,100.00],"a":1.5}"#,
        r#"{"a": 7, "b": ["\u0078 1.50 \"2.0\"", 1e2, -0, 100], "a": 15e-1}"#,
    ] {
        assert_eq!(enqueue(&s, &by(equal)).await, answer(first, "queued", true, Some("kept")), "{equal}");
        let batch =
            json!([{"kind": "a", "payload": serde_json::from_str::<Value>(equal).unwrap(), "dedupe_by_payload": true}]);
        assert_eq!(many(&s, &batch).await[0].0, first, "{equal}");
    }
    for other in
        [r#"{"a": 1.50, "b": ["x 1.5 \"2.0\"", 100, 0, 100]}"#, r#"{"a": "1.50"}"#, "{}", "[]", "null", "1", "10"]
    {
        assert!(!enqueue(&s, &by(other)).await.2, "{other}");
    }
    assert!(!enqueue(&s, "kind => 'b', payload => '{}', dedupe_by_payload => true").await.2, "of another kind");
    let (_, _, duplicate, _) = enqueue(&s, "kind => 'a', payload => '{}', dedupe_by_payload => false").await;
    assert!(!duplicate, "not asked for");
    let deep = format!("{}1.0{}", "[".repeat(1_000), "]".repeat(1_000));
    let flat = format!("[{}]", vec!["1.0"; 100_000].join(","));
    for payload in [deep, flat] {
        assert!(!enqueue(&s, &by(&payload)).await.2);
        assert!(enqueue(&s, &by(&payload.replace("1.0", "1"))).await.2);
    }
}

#[tokio::test]
async fn within_an_array() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let job = |key: &str, payload: i32, policy: &str| json!({"kind": "a", "payload": payload, "dedupe_key": key, "dedupe_policy": policy});
    let (held, ..) = keyed(&s, 0, "keep").await;
    let runs = s.enqueue("kind => 'a', payload => '0', dedupe_key => 'r'").await;
    // The first of them is the older one.
    let fence = {
        let jobs = worker.claim(&s, 1).await;
        assert_eq!(jobs[0].id, held);
        jobs[0].fence
    };
    let answers = many(
        &s,
        &json!([
            job("x", 1, "keep"),
            job("k", 2, "rerun"),
            job("x", 3, "replace"),
            job("r", 4, "replace"),
            job("x", 5, "keep"),
            job("k", 6, "rerun"),
            job("r", 7, "rerun"),
            job("x", 5, "rerun"),
            job("k", 8, "keep"),
            {"kind": "a", "payload": 9},
        ]),
    )
    .await;
    let (x, behind) = (answers[7].0, answers[5].0);
    for (n, expected) in [
        (0, answer(x, "queued", true, Some("replaced"))),
        (2, answer(x, "queued", true, Some("replaced"))),
        (4, answer(x, "queued", true, Some("kept"))),
        (7, answer(x, "queued", false, None)),
        (1, answer(behind, "queued", true, Some("replaced"))),
        (5, answer(behind, "queued", false, Some("behind"))),
        (8, answer(held, "running", true, Some("kept"))),
        (3, answer(runs, "queued", true, Some("replaced"))),
        (6, answer(runs, "queued", true, Some("replaced"))),
    ] {
        assert_eq!(answers[n], expected, "{n}");
    }
    assert!(!answers[9].2 && answers[9].3.is_none());
    let mut ran = drain(&s, &worker).await;
    ran.sort_by_key(Value::as_i64);
    assert_eq!(ran, [json!(5), json!(7), json!(9)]);
    s.settle(worker.id, &json!([{"id": held, "fence": fence, "outcome": "done"}])).await;
    assert_eq!(drain(&s, &worker).await, [json!(6)]);
    assert_eq!(s.count("posthouse.dedupe").await, 0);
    // All or nothing, and the job is named.
    for (second, code, named) in
        [(job("y", 2, "reject"), "PH008", "array"), (job("y", 2, "same"), "PH009", "job 1 of the array")]
    {
        let refusal =
            s.refused(&format!("select posthouse.enqueue_many('{}')", json!([job("y", 1, "keep"), second]))).await;
        assert_eq!(refusal.code, code, "{}", refusal.message);
        assert!(refusal.message.starts_with("dedupe_key:") && refusal.message.contains(named), "{}", refusal.message);
    }
    let twice = many(&s, &json!([job("y", 1, "same"), job("y", 1, "same")])).await;
    assert_eq!(twice[0].0, twice[1].0);
    // As a field may be written.
    let empty = json!({"kind": "b", "payload": null, "dedupe_key": "y", "dedupe_policy": "same"});
    let twice = many(&s, &json!([empty, empty])).await;
    assert_eq!(twice[0].0, twice[1].0, "no payload is an empty one");
    s.get::<String>(&format!("select posthouse.cancel({})", twice[0].0)).await;
    let same = json!({"kind": "b", "payload": 3, "dedupe_by_payload": "true"});
    let twice = many(&s, &json!([same, same])).await;
    assert_eq!(twice[0].0, twice[1].0);
    s.get::<String>(&format!("select posthouse.cancel({})", twice[0].0)).await;
    assert_eq!(s.count("posthouse.job").await, 1);
}

#[tokio::test]
async fn what_cannot_be_said_about_a_key() {
    let (_queue, s) = Queue::with_session().await;
    for (arguments, fields, says) in [
        ("dedupe_policy => 'keep'", r#""dedupe_policy": "keep""#, "dedupe_policy: needs"),
        (
            "dedupe_key => 'k', dedupe_policy => 'newest'",
            r#""dedupe_key": "k", "dedupe_policy": "newest""#,
            "dedupe_policy: 'newest'",
        ),
        (
            "dedupe_key => 'k', dedupe_by_payload => true",
            r#""dedupe_key": "k", "dedupe_by_payload": true"#,
            "dedupe_by_payload: ",
        ),
        (
            "dedupe_key => 'k', dedupe_policy => 'rerun', dedupe_for => '1 s'",
            r#""dedupe_key": "k", "dedupe_policy": "rerun", "dedupe_for_ms": 1000"#,
            "dedupe_for: ",
        ),
        (
            "dedupe_by_payload => true, dedupe_for => '0'",
            r#""dedupe_by_payload": true, "dedupe_for_ms": 0"#,
            "dedupe_for: ",
        ),
        ("dedupe_for => '1 s'", r#""dedupe_for_ms": 1000"#, "dedupe_for: needs"),
    ] {
        for sql in [
            format!("select posthouse.enqueue('a', {arguments})"),
            format!("select posthouse.enqueue_many('[{{\"kind\": \"a\"}}, {{\"kind\": \"a\", {fields}}}]')"),
        ] {
            let refusal = s.refused(&sql).await;
            assert_eq!(refusal.code, "PH001", "{sql}: {}", refusal.message);
            let message = refusal.message.strip_prefix("job 2 of the array: ").unwrap_or(&refusal.message);
            assert!(message.starts_with(says), "{sql}: {message}");
        }
    }
    let refusal = s.refused(r#"select posthouse.enqueue_many('[{"kind": "a", "dedupe_by_payload": "maybe"}]')"#).await;
    assert!(refusal.message.contains("job 1 of the array: dedupe_by_payload"), "{}", refusal.message);
}

#[tokio::test]
async fn an_orphan_holds_its_key_no_longer_than_its_lease() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a"]).await;
    let (first, ..) = keyed(&s, 1, "keep").await;
    let dying = s.worker(&["a"]).await;
    dying.claim(&s, 1).await;
    s.expire(dying.id).await;
    // Whatever is asked for, the answer names work that will be done.
    assert_eq!(keyed(&s, 1, "keep").await, answer(first, "running", true, Some("kept")));
    let (next, ..) = keyed(&s, 2, "rerun").await;
    assert_eq!(s.rescue(dying.id).await, 1);
    // It is in line again; what is asked for now comes after it.
    assert_eq!(keyed(&s, 3, "replace").await, answer(next, "queued", true, Some("replaced")));
    assert_eq!(drain(&s, &worker).await, [json!(1), json!(3)]);
    assert_eq!(s.state(first).await, "done");
    assert_eq!(s.state(next).await, "done");
    // One without a worker's row, or without a job at all.
    let (gone, ..) = keyed(&s, 4, "keep").await;
    s.run(&format!("delete from posthouse.job where id = {gone}")).await;
    let (new, _, duplicate, _) = keyed(&s, 5, "reject").await;
    assert!(!duplicate && new != gone);
    let dying = s.worker(&["a"]).await;
    dying.claim(&s, 1).await;
    let (next, ..) = keyed(&s, 6, "rerun").await;
    s.run(&format!("delete from posthouse.job where id = {new}")).await;
    sweep(&s).await;
    assert_eq!(drain(&s, &worker).await, [json!(6)]);
    assert_eq!(s.state(next).await, "done");
}
