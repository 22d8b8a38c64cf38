//! Dead letters: listed by what they have in common, put back into line with changes and at a rate, and what is remembered of that.

use serde_json::{Value, json};

use super::bulk::{all_steps, fail, step};
use super::plans::Watched;
use super::support::{Queue, Session, ids};

async fn listed(s: &Session, filter: &str, rest: &str) -> Vec<i64> {
    s.list(&format!("select id from posthouse.dead_letters('{filter}'{rest})")).await
}

/// As many dead letters as if they had failed one a second, over 100 tenants and 5 classes, one of them rare.
async fn many(s: &Session, letters: i64) {
    s.run(&format!(
        "insert into posthouse.lane (queue, priority, tenant, kind, ready_at, awake_until)
           select 'q' || n % 2, 0, 't' || n, 'k' || n % 4, 'infinity', '-infinity' from generate_series(1, 100) n;
         insert into posthouse.dead_letter (id, lane_id, created_at, failed_at, fence, attempt, max_attempts, class, error, errors)
           select n, 1 + n % 99, now() - interval '100 days', now() - interval '90 days' + n * interval '1 second', 1, 1, 5,
             case when n % 20000 = 7 then 'rare' else 'c' || n % 4 end, 'error number ' || n, '[]'
           from generate_series(1, {letters}) n;
         insert into posthouse.dead_letter (id, lane_id, created_at, failed_at, fence, attempt, max_attempts, class, error, errors)
           select {letters} + n, 100, now() - interval '100 days', now() - interval '95 days' + n * interval '1 second', 1, 1, 5, 'c1', 'old', '[]'
           from generate_series(1, 30) n"
    ))
    .await;
}

#[tokio::test]
async fn a_page_of_dead_letters_costs_the_same_however_many_there_are() {
    let (queue, s) = Queue::with_session().await;
    super::plans::without_autovacuum(&s).await;
    many(&s, 200_000).await;
    let watched = Watched::new(&queue).await;
    for (filter, first) in [
        (r#"{"all": true}"#, 200_000),
        (r#"{"class": "c3"}"#, 199_999),
        (r#"{"class": "rare"}"#, 180_007),
        (r#"{"tenant": "t100"}"#, 200_030),
        (r#"{"tenant": "t100", "class": "c1"}"#, 200_030),
        (r#"{"queue": "q0", "kind": "k2", "class": "rare"}"#, 180_007),
        (r#"{"tenant": "nobody"}"#, 0),
        (r#"{"failed_before": "2001-01-01"}"#, 0),
    ] {
        let cost = watched.cost(&format!("select * from posthouse.dead_letters('{filter}')")).await;
        // The newest 2,000, then 20 of each of 300 lanes and classes.
        assert!(cost.rows <= 8_500, "{filter}: {cost:?}");
        let newest = listed(&s, filter, "").await.first().copied();
        assert_eq!(newest.unwrap_or(0), first, "{filter}");
    }
    // The same as somebody finds who looks at all of them, page by page.
    for condition in ["d.class = 'rare'", "l.tenant = 't100'", "l.kind = 'k3' and d.class = 'c2'"] {
        let filter = match condition {
            "d.class = 'rare'" => r#"{"class": "rare"}"#,
            "l.tenant = 't100'" => r#"{"tenant": "t100"}"#,
            _ => r#"{"kind": "k3", "class": "c2"}"#,
        };
        let expected: Vec<i64> = s
            .list(&format!(
                "select d.id from posthouse.dead_letter d join posthouse.lane l on l.id = d.lane_id where {condition} order by d.failed_at desc, d.id desc limit 40"
            ))
            .await;
        let mut found = Vec::new();
        let mut behind = String::new();
        while found.len() < expected.len() {
            let page = listed(&s, filter, &format!(", 7{behind}")).await;
            let Some(last) = page.last() else { break };
            behind = format!(", (select failed_at from posthouse.dead_letter where id = {last}), {last}");
            found.extend(page);
        }
        found.truncate(40);
        assert_eq!(found, expected, "{condition}");
    }
    // A search in texts reads no more than the time that is asked for.
    let filter = r#"{"error": "NUMBER 150007", "failed_since": "FROM", "failed_before": "TO"}"#;
    let at = |n: i64| format!("(select (now() - interval '90 days' + {n} * interval '1 second')::text)");
    let since: String = s.get(&format!("select {}", at(149_000))).await;
    let before: String = s.get(&format!("select {}", at(151_000))).await;
    let filter = filter.replace("FROM", &since).replace("TO", &before);
    let cost = watched.cost(&format!("select * from posthouse.dead_letters('{filter}')")).await;
    assert!(cost.rows <= 2_500, "{cost:?}");
    assert_eq!(listed(&s, &filter, "").await, [150_007]);
}

#[tokio::test]
async fn a_changed_dead_letter_goes_where_its_change_says_and_nothing_is_forgotten() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_serial_by('line', 'user')").await;
    let worker = s.worker_of(&["default", "line"], &["llm.chat"], 3_600_000).await;
    let payload =
        r#"{"model": "big", "user": "ann", "messages": [{"role": "user", "content": "x"}], "seed": 9007199254740993}"#;
    let id = s
        .enqueue(&format!("kind => 'llm.chat', payload => '{payload}', gates => '{{crm}}', timeout => '1 minute'"))
        .await;
    fail(&s, &worker, 1, "context_length", "too long").await;
    let changes = r#"{"model": "small", "max_attempts": 2, "timeout_ms": 5000, "queue": "line", "priority": -4,
      "set": [{"path": ["messages", "0", "content"], "value": "y"}, {"path": ["seed"], "value": 12345678901234567890}]}"#;
    let done =
        step(&s, &format!(r#"redrive_many('{{"class": "context_length"}}', '{changes}', asked_by => 'ann')"#)).await;
    assert_eq!((done.changed, done.busy, &done.refused), (1, 0, &json!([])));
    let lane: String = s
        .get("select concat_ws(' ', l.queue, l.priority, l.gates, l.serial) from posthouse.job j join posthouse.lane l on l.id = j.lane_id")
        .await;
    assert_eq!(lane, "line -4 {crm,model:small} ann");
    let job = worker.claim(&s, 1).await;
    assert_eq!((job[0].attempt, job[0].max_attempts, job[0].timeout_ms, job[0].fence), (1, 2, Some(5_000), 2));
    let now: String = s.get("select payload::text from posthouse.payload").await;
    assert!(
        now.contains("12345678901234567890") && now.contains(r#""content": "y""#) && now.contains("small"),
        "{now}"
    );
    let note = s.rows(&format!("select number, redriven_by, state, attempt, class, error, changes, payload::text from posthouse.redrives where job_id = {id}")).await;
    let note = &note[0];
    assert_eq!((note.get::<_, i32>(0), note.get::<_, &str>(2), note.get::<_, i32>(3)), (1, "failed", 1));
    assert!(note.get::<_, &str>(1).ends_with(": ann"));
    assert_eq!((note.get::<_, &str>(4), note.get::<_, &str>(5)), ("context_length", "too long"));
    let expected = json!({
        "model": {"from": "big", "to": "small"}, "queue": {"from": "default", "to": "line"}, "priority": {"from": 0, "to": -4},
        "max_attempts": {"from": 5, "to": 2}, "timeout_ms": {"from": 60_000, "to": 5_000}, "payload": ["messages.0.content", "seed"]});
    assert_eq!(note.get::<_, Value>(6), expected);
    assert!(note.get::<_, &str>(7).contains("9007199254740993"), "the payload that was is kept, to the last digit");
    // Fails again, is redriven unchanged, and shows every attempt.
    s.settle(
        worker.id,
        &json!([{"id": id, "fence": 2, "outcome": "fail", "error": {"class": "other", "message": "no"}}]),
    )
    .await;
    assert_eq!(step(&s, r#"redrive_many('{"class": "other"}')"#).await.changed, 1);
    let job = s.job(id).await;
    let classes: Vec<&str> = job["errors"].as_array().unwrap().iter().map(|e| e["class"].as_str().unwrap()).collect();
    assert_eq!((classes, &job["max_attempts"]), (vec!["context_length", "other"], &json!(2)));
    let notes: Vec<String> = s
        .list(
            "select number || ' ' || changes::text || ' ' || (payload is null) from posthouse.redrives order by number",
        )
        .await;
    assert_eq!(notes[1], "2 {} true");
}

#[tokio::test]
async fn changes_that_cannot_be_made_are_refused_or_leave_a_letter_as_it_is() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let plain = s.enqueue(r#"kind => 'k', payload => '{"a": {"b": 1}, "list": [1, 2]}'"#).await;
    let text = s.enqueue(r#"kind => 'k', payload => '"text"'"#).await;
    let gone = s.enqueue("kind => 'k'").await;
    fail(&s, &worker, 3, "bad", "no").await;
    s.run(&format!("delete from posthouse.payload where id = {gone}")).await;
    for (changes, words) in [
        ("[]", "must be a JSON object"),
        (r#"{"modle": "x"}"#, "unknown field modle"),
        (r#"{"model": ""}"#, "model"),
        (r#"{"model": 5}"#, "model"),
        (r#"{"max_attempts": 0}"#, "max_attempts: 0"),
        (r#"{"max_attempts": "many"}"#, "max_attempts"),
        (r#"{"max_attempts": null}"#, "max_attempts"),
        (r#"{"timeout_ms": 0}"#, "timeout_ms: 0"),
        (r#"{"priority": 1.5}"#, "priority: 1.5"),
        (r#"{"priority": null}"#, "priority"),
        (r#"{"queue": ""}"#, "queue"),
        (r#"{"queue": null}"#, "queue"),
        (r#"{"set": {}}"#, "set: must be a list"),
        (r#"{"set": [{"path": [], "value": 1}]}"#, "set: must be a list"),
        (r#"{"set": [{"path": ["a"]}]}"#, "set: must be a list"),
        (r#"{"set": [], "payload": 1}"#, "one of them"),
        (r#"{"payload": 1}"#, "to one job only"),
    ] {
        let refusal =
            s.refused(&format!(r#"select * from posthouse.redrive_many('{{"all": true}}', '{changes}')"#)).await;
        assert!(refusal.code == "PH001" && refusal.message.contains(words), "{changes}: {refusal:?}");
    }
    for rate in ["0", "-1", "1e9", "'nan'", "'infinity'"] {
        let refusal =
            s.refused(&format!(r#"select * from posthouse.redrive_many('{{"all": true}}', rate => {rate})"#)).await;
        assert!(refusal.code == "PH001" && refusal.message.contains("rate"), "{rate}: {refusal:?}");
    }
    assert_eq!(s.count("posthouse.dead_letter").await, 3);
    for path in [r#"["a", "x", "y"]"#, r#"["list", "3"]"#, r#"["list", "last"]"#, r#"["a", "b", "c"]"#] {
        let done =
            step(&s, &format!(r#"redrive_many('{{"all": true}}', '{{"set": [{{"path": {path}, "value": 1}}]}}')"#))
                .await;
        assert_eq!((done.changed, done.busy), (0, 0), "{path}");
        let why: Vec<&str> = done.refused.as_array().unwrap().iter().map(|r| r["error"].as_str().unwrap()).collect();
        assert!(why.len() == 3 && why[0].contains("no such place") && why[2].contains("payload is gone"), "{why:?}");
    }
    let done = step(&s, r#"redrive_many('{"all": true}', '{"model": "m"}')"#).await;
    assert_eq!((done.changed, done.refused.as_array().unwrap().len()), (0, 3), "no payload names a model");
    let done = step(&s, r#"redrive_many('{"all": true}', '{"set": [{"path": ["list", "2"], "value": 3}, {"path": ["new"], "value": null}]}')"#).await;
    assert_eq!(done.changed, 1);
    let payload: Value = s.get(&format!("select payload from posthouse.payload where id = {plain}")).await;
    assert_eq!(payload, json!({"a": {"b": 1}, "list": [1, 2, 3], "new": null}));
    let done = step(&s, &format!(r#"redrive_many('{{"ids": [{text}]}}', '{{"payload": {{"whole": true}}}}')"#)).await;
    assert_eq!(done.changed, 1);
    assert_eq!(s.job(text).await["payload"], json!({"whole": true}));
    let refusal = s.refused(&format!("select posthouse.retry({gone})")).await;
    assert_eq!((&*refusal.code, refusal.message.contains("payload is gone")), ("PH004", true), "{refusal:?}");
}

#[tokio::test]
async fn a_rate_spreads_all_batches_and_what_is_cut_off_is_done_by_the_next_run() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 25).await;
    fail(&s, &worker, 25, "bad", "no").await;
    let call = r#"redrive_many('{"kind": "k"}', rate => 0.5, max_jobs => 10, after => AFTER)"#;
    let first = step(&s, &call.replace("AFTER", "null")).await;
    assert_eq!(first.changed, 10);
    // The second batch never commits.
    s.run("begin").await;
    assert_eq!(step(&s, &call.replace("AFTER", &format!("'{}'", first.next.clone().unwrap()))).await.changed, 10);
    s.run("rollback").await;
    assert_eq!(s.count("posthouse.dead_letter").await, 15);
    // Its caller goes on where it was; another one that began anew would find the same fifteen.
    let second = step(&s, &call.replace("AFTER", &format!("'{}'", first.next.unwrap()))).await;
    let third = step(&s, &call.replace("AFTER", &format!("'{}'", second.next.unwrap()))).await;
    assert_eq!((second.changed, third.changed), (10, 5));
    let apart: Vec<f64> = s
        .list("select extract(epoch from run_at - lag(run_at) over (order by run_at, id))::float8 from posthouse.job order by run_at offset 1")
        .await;
    assert_eq!(apart.len(), 24);
    assert!(apart.iter().all(|seconds| (seconds - 2.0).abs() < 0.1), "{apart:?}");
    assert_eq!(all_steps(&s, call).await, [0], "done is done");
    assert_eq!(ids(&worker.claim(&s, 100).await).len(), 1, "one is due, the others follow");
    s.run("update posthouse.job set run_at = run_at - interval '10 seconds' where state = 'queued'").await;
    assert_eq!(ids(&worker.claim(&s, 100).await).len(), 5);
}

#[tokio::test]
async fn those_that_fail_again_meanwhile_are_left_alone() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 6).await;
    fail(&s, &worker, 6, "bad", "no").await;
    let mut after = "null".to_owned();
    let mut changed = 0;
    for _ in 0..20 {
        let done = step(&s, &format!(r#"redrive_many('{{"kind": "k"}}', max_jobs => 2, after => {after})"#)).await;
        changed += done.changed;
        fail(&s, &worker, 10, "bad", "again").await;
        match done.next {
            Some(next) => after = format!("'{next}'"),
            None => break,
        }
    }
    assert_eq!((changed, s.count("posthouse.redrives where number > 1").await), (6, 0));
    assert_eq!(s.count("posthouse.dead_letter").await, 6);
}

#[tokio::test]
async fn two_who_redrive_the_same_do_it_once() {
    let (queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 2_000).await;
    fail(&s, &worker, 2_000, "bad", "no").await;
    let call = r#"redrive_many('{"kind": "k"}', max_jobs => 50, after => AFTER)"#;
    let sessions = [queue.session().await, queue.session().await, queue.session().await];
    let sums = futures_util::future::join_all(sessions.iter().map(|s| all_steps(s, call))).await;
    let sum: i64 = sums.iter().flatten().sum();
    // What one was busy with while all others looked is left to one more run.
    let rest: i64 = all_steps(&s, call).await.iter().sum();
    assert_eq!(sum + rest, 2_000, "{sums:?}");
    assert_eq!((s.count("posthouse.job").await, s.count("posthouse.dead_letter").await), (2_000, 0));
    assert_eq!((s.count("posthouse.redrives").await, s.count("posthouse.redrives where number > 1").await), (2_000, 0));
}

#[tokio::test]
async fn what_was_done_to_a_job_is_forgotten_when_the_job_is() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 10).await;
    let dead = fail(&s, &worker, 10, "bad", "no").await;
    s.run("select posthouse.redrive(kind => 'k')").await;
    let jobs = worker.claim(&s, 5).await;
    let outcomes: Vec<Value> = jobs.iter().map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "done"})).collect();
    s.settle(worker.id, &json!(outcomes)).await;
    s.run(&format!("delete from posthouse.archive where id = {}", jobs[0].id)).await;
    let sweep =
        "update posthouse.sweep set ran_at = '-infinity' where name = 'redrives'; select posthouse.tidy('redrives')";
    for _ in 0..3 {
        s.run(sweep).await;
        assert_eq!(s.count("posthouse.redrives").await, 9);
    }
    let failures: i64 = s.get("select failures from posthouse.sweep where name = 'redrives'").await;
    assert_eq!((failures, dead.len()), (0, 10));
    s.run("delete from posthouse.archive").await;
    s.run(sweep).await;
    s.run(sweep).await;
    assert_eq!(s.count("posthouse.redrives").await, 5);
}
