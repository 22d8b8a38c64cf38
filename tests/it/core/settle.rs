//! Settle: every outcome, every verdict, and that nothing a handler returns keeps its outcome from being recorded.

use serde_json::{Value, json};

use super::support::{Claimed, Queue, Session, Worker, ids, said};

/// A session, a worker of kind `k`, and as many claimed jobs.
async fn claimed(jobs: i64) -> (Queue, Session, Worker, Vec<Claimed>) {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", jobs).await;
    let worker = s.worker(&["k"]).await;
    let taken = worker.claim(&s, i32::try_from(jobs).unwrap()).await;
    assert_eq!(taken.len() as i64, jobs);
    (queue, s, worker, taken)
}

fn outcome(job: &Claimed, mut fields: Value) -> Value {
    fields["id"] = json!(job.id);
    fields["fence"] = json!(job.fence);
    fields
}

fn error(message: &str) -> Value {
    json!({"class": "timeout", "message": message, "detail": {"status": 504}})
}

#[tokio::test]
async fn each_outcome_leads_to_its_state() {
    let (_queue, s, worker, jobs) = claimed(8).await;
    let outcomes = json!([
        outcome(&jobs[0], json!({"outcome": "done", "result": {"answer": 42}, "usage": {"tokens": 7}})),
        outcome(
            &jobs[1],
            json!({"outcome": "retry", "error": error("slow"), "usage": {"tokens": 1}, "delay_ms": 60000})
        ),
        outcome(&jobs[2], json!({"outcome": "snooze", "delay_ms": 60000, "reason": "429"})),
        outcome(&jobs[3], json!({"outcome": "fail", "error": error("401 Unauthorized")})),
        outcome(&jobs[4], json!({"outcome": "cancelled"})),
        outcome(&jobs[5], json!({"outcome": "release"})),
        outcome(&jobs[6], json!({"outcome": "explode"})),
        outcome(&jobs[7], json!({})),
    ]);
    let expected = ["done", "queued", "queued", "failed", "cancelled", "queued", "failed", "failed"];
    let verdicts = s.settle(worker.id, &outcomes).await;
    assert_eq!(verdicts.len(), 8);
    for (job, state) in jobs.iter().zip(expected) {
        assert!(verdicts.contains(&(Some(job.id), "applied".to_owned(), Some(state.to_owned()))), "{verdicts:?}");
        assert_eq!(s.state(job.id).await, state);
    }
    let job = s.job(jobs[0].id).await;
    assert_eq!(
        (&job["result"], &job["usage"], &job["flags"]),
        (&json!({"answer": 42}), &json!({"tokens": 7}), &Value::Null)
    );
    assert!(job["finished_at"].is_string() && job["started_at"].is_string() && job["attempt"] == 1);
    let job = s.job(jobs[1].id).await;
    assert_eq!((&job["attempt"], &job["error"], &job["reason"]), (&json!(1), &json!("slow"), &json!("slow")));
    let recorded = &job["errors"][0];
    for (field, value) in [
        ("class", json!("timeout")),
        ("detail", json!({"status": 504})),
        ("usage", json!({"tokens": 1})),
        ("attempt", json!(1)),
        ("fence", json!(1)),
        ("host", json!("box pid 7")),
    ] {
        assert_eq!(recorded[field], value, "{field}");
    }
    // A snooze and a release give the attempt back and leave no error.
    for (n, reason) in [(2, "429"), (5, "released")] {
        let job = s.job(jobs[n].id).await;
        assert_eq!((&job["attempt"], &job["errors"], &job["reason"]), (&json!(0), &Value::Null, &json!(reason)));
    }
    let job = s.job(jobs[3].id).await;
    assert_eq!(
        (&job["error"], &job["reason"], job["errors"].as_array().unwrap().len()),
        (&json!("401 Unauthorized"), &json!("timeout"), 1)
    );
    let error = s.job(jobs[6].id).await["error"].as_str().unwrap().to_owned();
    assert!(error.contains("unknown outcome 'explode'"), "{error}");
    // Nothing is left of jobs that are final.
    assert_eq!(s.count("posthouse.attempt").await, 1);
    assert_eq!(s.count("posthouse.job").await, 3);
    // What was deferred comes when it is due, what was released at once, with new fences.
    let again = worker.claim(&s, 10).await;
    assert_eq!((ids(&again), again[0].fence, again[0].attempt), (vec![jobs[5].id], 2, 1));
    s.run("update posthouse.job set run_at = clock_timestamp() where state = 'queued'").await;
    let mut again = worker.claim(&s, 10).await;
    again.sort_by_key(|job| job.id);
    assert_eq!(
        again.iter().map(|j| (j.id, j.fence, j.attempt)).collect::<Vec<_>>(),
        [(jobs[1].id, 2, 2), (jobs[2].id, 2, 1)]
    );
}

#[tokio::test]
async fn a_repeated_settle_says_already_and_a_stranger_lost() {
    let (_queue, s, worker, jobs) = claimed(7).await;
    let stranger = s.worker(&["k"]).await;
    let outcomes = |fence: i64| {
        let all = ["done", "retry", "snooze", "fail", "cancelled", "release"];
        json!(
            all.iter()
                .zip(&jobs)
                .map(|(o, j)| json!({"id": j.id, "fence": fence, "outcome": o, "delay_ms": 60000}))
                .collect::<Vec<_>>()
        )
    };
    // Another worker, an older fence, one that was never given.
    assert!(
        s.settle(stranger.id, &outcomes(1)).await.iter().all(|v| v.1 == "lost" && v.2.as_deref() == Some("running"))
    );
    for fence in [0, 2] {
        assert!(s.settle(worker.id, &outcomes(fence)).await.iter().all(|v| v.1 == "lost"));
    }
    let states = ["done", "queued", "queued", "failed", "cancelled", "queued"];
    assert_eq!(said(&s.settle(worker.id, &outcomes(1)).await), states.map(|state| ("applied", Some(state))));
    assert_eq!(said(&s.settle(worker.id, &outcomes(1)).await), states.map(|state| ("already", Some(state))));
    assert!(s.settle(stranger.id, &outcomes(1)).await.iter().all(|v| v.1 == "lost"));
    assert_eq!(s.count("posthouse.attempt").await, 1);
    assert_eq!(s.count("posthouse.archive").await + s.count("posthouse.dead_letter").await, 3);
    // Also once the retried job went on with somebody else.
    s.run("update posthouse.job set run_at = clock_timestamp() where state = 'queued'").await;
    assert_eq!(stranger.claim(&s, 10).await.len(), 3);
    let verdicts = s.settle(worker.id, &outcomes(1)).await;
    assert_eq!(said(&verdicts)[1], ("already", Some("running")));
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 4);
    // No such job.
    let verdicts = s
        .settle(
            worker.id,
            &json!([{"id": 999, "fence": 1, "outcome": "done"}, {"id": 998, "fence": 1, "outcome": "fail"}]),
        )
        .await;
    assert_eq!(said(&verdicts), [("lost", None), ("lost", None)]);
    assert!(s.settle(worker.id, &json!([])).await.is_empty());
    for outcomes in ["null", "'{}'", "'5'"] {
        let refusal = s.refused(&format!("select * from posthouse.settle('{}', {outcomes})", worker.id)).await;
        assert_eq!(refusal.code, "PH001");
    }
}

#[tokio::test]
async fn an_outcome_is_taken_from_a_worker_whose_lease_is_over_until_somebody_takes_the_job() {
    let (_queue, s, worker, jobs) = claimed(2).await;
    s.expire(worker.id).await;
    let verdicts = s.settle(worker.id, &json!([outcome(&jobs[0], json!({"outcome": "done"}))])).await;
    assert_eq!(said(&verdicts), [("applied", Some("done"))]);
    assert_eq!(s.rescue(worker.id).await, 1);
    let done = json!([outcome(&jobs[0], json!({"outcome": "done"})), outcome(&jobs[1], json!({"outcome": "done"}))]);
    assert_eq!(said(&s.settle(worker.id, &done).await), [("already", Some("done")), ("lost", Some("queued"))]);
    for late in ["retry", "snooze", "fail", "cancelled", "release"] {
        let verdicts = s.settle(worker.id, &json!([outcome(&jobs[1], json!({"outcome": late}))])).await;
        assert_eq!(said(&verdicts), [("lost", Some("queued"))], "{late}");
    }
    let other = s.worker(&["k"]).await;
    let again = other.claim(&s, 10).await;
    assert_eq!((again[0].id, again[0].fence, again[0].attempt), (jobs[1].id, 2, 2));
    assert_eq!(said(&s.settle(worker.id, &done).await)[1], ("lost", Some("running")));
    let progress = async |worker: &Worker, fence: i64| {
        s.get::<bool>(&format!("select posthouse.progress('{}', {}, {fence}, '{{\"at\": 1}}')", worker.id, jobs[1].id))
            .await
    };
    assert!(!progress(&worker, 1).await && !progress(&worker, 2).await && !progress(&other, 1).await);
    assert!(progress(&other, 2).await);
    assert_eq!(s.job(jobs[1].id).await["progress"], json!({"at": 1}));
}

#[tokio::test]
async fn outcomes_that_name_no_job_do_not_keep_others_from_being_recorded() {
    let (_queue, s, worker, jobs) = claimed(1).await;
    let outcomes = json!([{"fence": 1, "outcome": "done"}, {"id": jobs[0].id, "fence": 1, "outcome": "done"}, {"id": null, "fence": 1, "outcome": "done"}]);
    let verdicts = s.settle(worker.id, &outcomes).await;
    assert_eq!(said(&verdicts), [("invalid", None), ("applied", Some("done")), ("invalid", None)]);
}

#[tokio::test]
async fn one_bad_row_never_fails_the_rest() {
    let (_queue, s, worker, jobs) = claimed(12).await;
    let bad = [
        "null",
        "5",
        "\"x\"",
        "[]",
        "{}",
        r#"{"id": 1}"#,
        r#"{"id": null, "fence": 1, "outcome": "done"}"#,
        r#"{"id": "x", "fence": 1, "outcome": "done"}"#,
        r#"{"id": 1.5, "fence": 1, "outcome": "fail"}"#,
        r#"{"id": 1e30, "fence": 1, "outcome": "done"}"#,
        r#"{"id": -1, "fence": 1, "outcome": "done"}"#,
        r#"{"id": 1, "fence": 99999999999, "outcome": "done"}"#,
        r#"{"id": 9999999999999999999999, "fence": 1}"#,
        r#"{"id": [1], "fence": {}, "outcome": "done"}"#,
        r#"{"id": true, "fence": 1, "outcome": "retry"}"#,
        "1e999999",
        "\"\\u0000\"",
        r#"["\u0000", 1e999999]"#,
        r#"{"\u0000": 1e999999}"#,
    ];
    let odd = [
        r#""outcome": "retry", "delay_ms": 1e400, "error": "text only""#,
        r#""outcome": "retry", "delay_ms": 1e999999, "error": "overflows any numeric""#,
        r#""outcome": "snooze", "delay_ms": "soon", "reason": {"a": [1]}, "max_deferral_ms": "x""#,
        r#""outcome": "retry", "delay_ms": -5e300, "error": {"class": 5, "message": {"a": 1}, "detail": "\u0000"}"#,
        r#""outcome": "retry", "delay_ms": null, "error": null, "usage": null"#,
        r#""outcome": "fail", "error": [1, "\ud800"], "usage": 1e999999"#,
        r#""outcome": "done", "result": null, "usage": [], "flags": {"a": 1}"#,
        r#""outcome": "done", "flags": 5, "\ud800": 1, "unknown": 1e999999"#,
        r#""outcome": {"a": 1}"#,
        r#""outcome": null"#,
        r#""outcome": "done", "outcome": "done", "result": 1e400"#,
    ];
    let mut all: Vec<String> = bad.map(ToOwned::to_owned).to_vec();
    for (job, fields) in jobs.iter().zip(odd) {
        all.push(format!(r#"{{"id": {}, "fence": {}, {fields}}}"#, job.id, job.fence));
    }
    all.push(outcome(&jobs[11], json!({"outcome": "done", "result": "fine"})).to_string());
    let verdicts = s.settle_text(worker.id, &format!("[{}]", all.join(","))).await.unwrap();
    assert_eq!(verdicts.len(), all.len());
    let applied: Vec<_> = verdicts.iter().filter(|v| v.1 == "applied").filter_map(|v| v.0).collect();
    assert_eq!(applied.len(), 12, "{verdicts:?}");
    assert!(verdicts.iter().all(|v| ["applied", "invalid"].contains(&v.1.as_str())), "{verdicts:?}");
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 0);
    let states: Vec<Option<&str>> =
        jobs.iter().map(|j| verdicts.iter().find(|v| v.0 == Some(j.id)).unwrap().2.as_deref()).collect();
    let (queued, failed, done) = (Some("queued"), Some("failed"), Some("done"));
    assert_eq!(states, [queued, queued, queued, queued, queued, failed, done, done, failed, failed, done, done]);
    assert_eq!(s.job(jobs[11].id).await["result"], json!("fine"));
    // A number out of reach still defers by something sensible.
    let far = s.count("posthouse.job where run_at > clock_timestamp() + interval '11 years'").await;
    assert_eq!(far, 0);
}

#[tokio::test]
async fn what_cannot_be_stored_is_cleaned_and_flagged() {
    let (_queue, s, worker, jobs) = claimed(9).await;
    let results = [
        (r#"{"a": "x\u0000y"}"#, r#"{"a": "x�y"}"#),
        (r#""\ud800""#, "\"\u{FFFD}\""),
        (r#""\udc00\ud800\ud83d\udc0e\udc0e""#, "\"\u{FFFD}\u{FFFD}\u{1F40E}\u{FFFD}\""),
        // Text that only looks like an escape stays.
        (r#"["\\u0000", "\u0000"]"#, r#"["\\u0000", "�"]"#),
        (r#""\\\u0000\\\\u0000""#, r#""\\�\\\\u0000""#),
        (r#""\\ud800\udc00""#, "\"\\\\ud800\u{FFFD}\""),
        (r#"{"\u0000": {"\ud800": [null]}}"#, r#"{"�": {"�": [null]}}"#),
        (r#""\uD800\uDBFF\uDFFF""#, "\"\u{FFFD}\u{10FFFF}\""),
    ];
    let mut all: Vec<String> = jobs
        .iter()
        .zip(&results)
        .map(|(job, (result, _))| format!(r#"{{"id": {}, "fence": 1, "outcome": "done", "result": {result}}}"#, job.id))
        .collect();
    all.push(format!(r#"{{"id": {}, "fence": 1, "outcome": "retry", "delay_ms": 0, "error": {{"class": "e\u0000", "message": "bad \u0000 byte"}}}}"#, jobs[8].id));
    let verdicts = s.settle_text(worker.id, &format!("[{}]", all.join(","))).await.unwrap();
    assert!(verdicts.iter().all(|v| v.1 == "applied"), "{verdicts:?}");
    for (job, (sent, stored)) in jobs.iter().zip(&results) {
        let row = &s.rows(&format!("select result::text, flags from posthouse.jobs where id = {}", job.id)).await[0];
        assert_eq!(row.get::<_, &str>(0), *stored, "{sent}");
        assert_eq!(row.get::<_, Vec<String>>(1), ["cleaned"], "{sent}");
    }
    let job = s.job(jobs[8].id).await;
    assert_eq!((&job["error"], &job["errors"][0]["class"]), (&json!("bad \u{FFFD} byte"), &json!("e\u{FFFD}")));
}

#[tokio::test]
async fn how_a_session_reads_backslashes_does_not_matter() {
    let (_queue, s) = Queue::with_session().await;
    s.run("set standard_conforming_strings = off; set client_min_messages = error").await;
    s.enqueue_bulk("k", "t", 2).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 2).await;
    let outcomes =
        jobs.iter().map(|job| format!(r#"{{"id": {}, "fence": 1, "outcome": "done", "result": "\\\u0000"}}"#, job.id));
    let verdicts = s.settle_text(worker.id, &format!("[{}]", outcomes.collect::<Vec<_>>().join(","))).await.unwrap();
    assert_eq!(said(&verdicts), [("applied", Some("done")); 2]);
    assert_eq!(s.job(jobs[0].id).await["result"], json!("\\\u{FFFD}"));
}

#[tokio::test]
async fn what_is_too_big_is_cut_and_flagged() {
    let (_queue, s, worker, jobs) = claimed(6).await;
    let huge = |letter: &str, megabytes: usize| letter.repeat(megabytes << 20);
    let mut all = [
        format!(r#""outcome": "fail", "error": {{"class": "x", "message": "{}"}}"#, huge("é", 25)),
        format!(r#""outcome": "done", "result": "{}""#, huge("r", 40)),
        format!(
            r#""outcome": "retry", "delay_ms": 0, "error": {{"class": "{}", "message": "m", "detail": "{}"}}, "usage": "{}""#,
            huge("c", 1),
            huge("d", 2),
            huge("u", 2)
        ),
        format!(r#""outcome": "snooze", "reason": "{}""#, huge("s", 1)),
        format!(
            r#""outcome": "done", "result": {}1{}, "usage": {{"a": "{}"}}"#,
            "[".repeat(1000),
            "]".repeat(1000),
            huge("u", 1)
        ),
        r#""outcome": "done", "result": "small""#.to_owned(),
    ];
    for (fields, job) in all.iter_mut().zip(&jobs) {
        *fields = format!(r#"{{"id": {}, "fence": 1, {fields}}}"#, job.id);
    }
    let verdicts = s.settle_text(worker.id, &format!("[{}]", all.join(","))).await.unwrap();
    assert!(verdicts.iter().all(|v| v.1 == "applied"), "{:?}", said(&verdicts));
    let job = s.job(jobs[0].id).await;
    let text = job["error"].as_str().unwrap();
    assert!(
        text.len() < 17_000 && text.starts_with("éé") && text.ends_with("[cut: 52428800 bytes in all]"),
        "{} bytes",
        text.len()
    );
    let job = s.job(jobs[1].id).await;
    assert_eq!((&job["flags"], &job["result"]["posthouse_truncated"]), (&json!(["truncated"]), &json!(true)));
    assert!(job["result"]["head"].as_str().unwrap().starts_with("\"rrr"));
    let size: i64 = s.get("select max(pg_column_size(a.*))::bigint from posthouse.attempt a").await;
    assert!(size < 10_000, "{size}");
    let size: i64 =
        s.get(&format!("select pg_column_size(j.reason)::bigint from posthouse.job j where id = {}", jobs[3].id)).await;
    assert!(size < 600, "{size}");
    let row = &s
        .rows(&format!(
            "select length(result::text), usage -> 'posthouse_truncated' = 'true' from posthouse.jobs where id = {}",
            jobs[4].id
        ))
        .await[0];
    assert_eq!((row.get::<_, i32>(0), row.get::<_, bool>(1)), (2001, true));
    assert_eq!(s.job(jobs[5].id).await["result"], json!("small"));
    let refusal =
        s.refused(&format!("select posthouse.progress('{}', 1, 1, to_jsonb(repeat('x', 70000)))", worker.id)).await;
    assert_eq!((&*refusal.code, refusal.message.starts_with("progress:")), ("PH001", true));
}

#[tokio::test]
async fn twice_in_one_batch() {
    let (_queue, s, worker, jobs) = claimed(3).await;
    let done = |n: usize, fence: i64, result: &str| json!({"id": jobs[n].id, "fence": fence, "outcome": "done", "result": result});
    let verdicts = s
        .settle(
            worker.id,
            &json!([
                done(0, 1, "x"),
                done(0, 1, "x"),
                {"id": jobs[1].id, "fence": 1, "outcome": "fail"},
                {"id": jobs[1].id, "fence": 1, "outcome": "fail"},
                done(1, 1, "too late"),
                done(2, 0, "of an older attempt"),
                done(2, 1, "y"),
            ]),
        )
        .await;
    assert_eq!(verdicts.len(), 7);
    assert_eq!(said(&verdicts).iter().filter(|v| v.0 == "lost").collect::<Vec<_>>(), [&("lost", Some("done"))]);
    // A done goes before the others of its batch.
    assert_eq!(
        (s.state(jobs[0].id).await, s.state(jobs[1].id).await, s.state(jobs[2].id).await),
        ("done".into(), "done".into(), "done".into())
    );
    assert_eq!(s.job(jobs[2].id).await["result"], json!("y"));
    assert_eq!(s.count("posthouse.archive").await + s.count("posthouse.dead_letter").await, 3);
}

#[tokio::test]
async fn waits_grow_with_jitter_up_to_ten_minutes() {
    let (_queue, s) = Queue::with_session().await;
    for attempt in [-1, 0, 1, 2, 5, 9, 10, 30, 1000, i32::MAX] {
        let waits: Vec<f64> = s
            .list(&format!(
                "select extract(epoch from posthouse.backoff({attempt}))::float8 from generate_series(1, 200)"
            ))
            .await;
        let most = (2.0 * 2f64.powi(attempt.clamp(1, 31) - 1)).min(600.0);
        let (low, high) = waits.iter().fold((f64::MAX, 0f64), |(l, h), w| (l.min(*w), h.max(*w)));
        assert!(low >= 0.1 && high <= most, "attempt {attempt}: {low} to {high} of {most}");
        assert!(low < most * 0.2 && high > most * 0.8, "attempt {attempt}: no full jitter: {low} to {high} of {most}");
    }
    // Twenty failures: the wait is visible, never more than the cap, and can be cut short.
    let id = s.enqueue("kind => 'k', max_attempts => 21").await;
    let worker = s.worker(&["k"]).await;
    for attempt in 1..=20 {
        let jobs = worker.claim(&s, 1).await;
        assert_eq!((jobs[0].attempt, jobs[0].fence), (attempt, i64::from(attempt)));
        s.settle(worker.id, &json!([{"id": id, "fence": attempt, "outcome": "retry", "error": error("no")}])).await;
        let wait: f64 = s.get(&format!("select extract(epoch from (run_at)::timestamptz - clock_timestamp())::float8 from posthouse.jobs where id = {id}")).await;
        assert!(wait <= 600.0, "attempt {attempt}: {wait}");
        assert_eq!(s.get::<String>(&format!("select posthouse.retry({id})")).await, "queued");
    }
    let jobs = worker.claim(&s, 1).await;
    let verdicts =
        s.settle(worker.id, &json!([outcome(&jobs[0], json!({"outcome": "retry", "error": error("no")}))])).await;
    assert_eq!(said(&verdicts), [("applied", Some("failed"))]);
    let job = s.job(id).await;
    assert_eq!(
        (job["errors"].as_array().unwrap().len(), &job["attempt"], &job["error"]),
        (21, &json!(21), &json!("no"))
    );
}

#[tokio::test]
async fn a_snooze_costs_no_attempt_but_not_for_ever() {
    let (_queue, s) = Queue::with_session().await;
    let id = s.enqueue("kind => 'k', max_attempts => 1").await;
    let worker = s.worker(&["k"]).await;
    for fence in 1..=5 {
        let jobs = worker.claim(&s, 1).await;
        assert_eq!((jobs[0].attempt, jobs[0].fence), (1, fence));
        s.settle(worker.id, &json!([{"id": id, "fence": fence, "outcome": "snooze", "delay_ms": 0}])).await;
    }
    s.run("update posthouse.job set first_started_at = clock_timestamp() - interval '23 hours'").await;
    let settle = async |fence: i64, most: Value| {
        worker.claim(&s, 1).await;
        let snooze = json!([{"id": id, "fence": fence, "outcome": "snooze", "delay_ms": 0, "max_deferral_ms": most, "reason": "429 again"}]);
        s.settle(worker.id, &snooze).await.remove(0).2.unwrap()
    };
    assert_eq!(settle(6, Value::Null).await, "queued");
    assert_eq!(settle(7, json!(24 * 3_600_000)).await, "queued");
    assert_eq!(settle(8, json!(1e300)).await, "queued");
    assert_eq!(settle(9, json!(22 * 3_600_000)).await, "failed");
    let job = s.job(id).await;
    assert_eq!(job["reason"], json!("deferred_too_long"));
    assert!(job["error"].as_str().unwrap().contains("429 again"));
}

#[tokio::test]
async fn a_released_job_goes_to_the_front_of_the_line() {
    let (_queue, s, worker, jobs) = claimed(3).await;
    let later = [s.enqueue("kind => 'k', tenant => 't'").await, s.enqueue("kind => 'k', tenant => 't'").await];
    let fences: Vec<i64> = jobs.iter().map(|job| job.fence).collect();
    let verdicts: Vec<String> = s
        .list(&format!(
            "select verdict from posthouse.release('{}', '{{{},{}}}', '{{{},7}}')",
            worker.id, jobs[1].id, jobs[2].id, fences[1]
        ))
        .await;
    assert_eq!(verdicts, ["applied", "lost"]);
    // One whose cancel was asked for does not come back.
    s.get::<String>(&format!("select posthouse.cancel({})", jobs[0].id)).await;
    let verdicts: Vec<String> =
        s.list(&format!("select state from posthouse.release('{}', '{{{}}}', '{{1}}')", worker.id, jobs[0].id)).await;
    assert_eq!(verdicts, ["cancelled"]);
    assert_eq!(ids(&worker.claim(&s, 10).await), [jobs[1].id, later[0], later[1]]);
    assert!(
        s.list::<i64>(&format!("select id from posthouse.release('{}', '{{}}', '{{}}')", worker.id)).await.is_empty()
    );
}

#[tokio::test]
async fn ten_thousand_at_once() {
    let (_queue, s, worker, jobs) = claimed(10_000).await;
    let outcomes: Vec<Value> = jobs
        .iter()
        .rev()
        .map(|job| {
            let kind = if job.id % 10 == 0 { "retry" } else { "done" };
            outcome(job, json!({"outcome": kind, "result": job.id, "delay_ms": 1000}))
        })
        .collect();
    let verdicts = s.settle(worker.id, &json!(outcomes)).await;
    assert_eq!(verdicts.len(), 10_000);
    assert!(verdicts.iter().all(|v| v.1 == "applied"));
    assert_eq!(s.count("posthouse.archive where result = to_jsonb(id)").await, 9_000);
    assert_eq!(s.count("posthouse.job where state = 'queued'").await, 1_000);
}
