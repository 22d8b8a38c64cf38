//! What is done to many jobs at once: chosen by a filter, in batches that can be cut off anywhere.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::plans::Watched;
use super::support::{Queue, Session, Worker, ids};

/// What a batch answered.
#[derive(Debug, PartialEq)]
pub(super) struct Step {
    pub(super) changed: i64,
    pub(super) busy: i64,
    pub(super) refused: Value,
    pub(super) next: Option<Value>,
}

/// One call of a function that changes many jobs.
pub(super) async fn step(s: &Session, call: &str) -> Step {
    let rows = s.rows(&format!("select changed, busy, refused, next from posthouse.{call}")).await;
    Step { changed: rows[0].get(0), busy: rows[0].get(1), refused: rows[0].get(2), next: rows[0].get(3) }
}

/// All batches of a call whose text holds `AFTER`; the answer is how many jobs were changed by each.
pub(super) async fn all_steps(s: &Session, call: &str) -> Vec<i64> {
    let mut changed = Vec::new();
    let mut after = "null".to_owned();
    loop {
        let step = step(s, &call.replace("AFTER", &after)).await;
        changed.push(step.changed);
        match step.next {
            Some(next) => after = format!("'{next}'"),
            None => return changed,
        }
        assert!(changed.len() < 1_000, "it does not come to an end: {call}");
    }
}

/// Let so many jobs that are there fail, with this class and text.
pub(super) async fn fail(s: &Session, worker: &Worker, jobs: i32, class: &str, message: &str) -> Vec<i64> {
    let taken = worker.claim(s, jobs).await;
    let outcomes: Vec<Value> = taken
        .iter()
        .map(
            |j| json!({"id": j.id, "fence": j.fence, "outcome": "fail", "error": {"class": class, "message": message}}),
        )
        .collect();
    s.settle(worker.id, &json!(outcomes)).await;
    ids(&taken)
}

async fn found(s: &Session, filter: &str) -> Vec<i64> {
    s.get(&format!("select ids from posthouse.find_jobs('{filter}')")).await
}

#[tokio::test]
async fn a_filter_that_says_nothing_or_nonsense_is_refused() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue("kind => 'k'").await;
    for (filter, words) in [
        ("{}", "names no condition"),
        (r#"{"all": false}"#, "names no condition"),
        (r#"{"queue": null}"#, "names no condition"),
        ("[]", "filter: must be a JSON object"),
        ("null", "filter: must be a JSON object"),
        (r#"{"que": "q"}"#, "filter: unknown field que"),
        (r#"{"queue": 7}"#, "filter: queue: must not be a JSON number"),
        (r#"{"ids": "1"}"#, "filter: ids"),
        (r#"{"ids": ["x"]}"#, "filter: ids"),
        (r#"{"ids": [1e400]}"#, "filter: ids"),
        (r#"{"state": "asleep"}"#, "filter: state: asleep"),
        (r#"{"state": ["queued", "done"]}"#, "filter: state: done"),
        (r#"{"created_since": "someday"}"#, "filter: created_since"),
        (r#"{"failed_before": 5}"#, "filter: failed_before"),
    ] {
        let refusal = s.refused(&format!("select * from posthouse.cancel_many('{filter}')")).await;
        assert!(refusal.code == "PH001" && refusal.message.contains(words), "{filter}: {refusal:?}");
    }
    for call in [
        "redrive()",
        "purge()",
        "purge_many('{}')",
        "retry_many('{}')",
        "reprioritise_many('{}', 1)",
        "redrive_many('{}')",
        "find_jobs('{}')",
        "cancel_many(null)",
        r#"cancel_many('{"all": true}', 0)"#,
        r#"cancel_many('{"all": true}', 10001)"#,
        r#"cancel_many('{"all": true}', null)"#,
        r#"cancel_many('{"all": true}', 1, '{"home": "lane"}')"#,
        r#"reprioritise_many('{"all": true}', null)"#,
    ] {
        let refusal = s.refused(&format!("select * from posthouse.{call}")).await;
        assert_eq!(refusal.code, "PH001", "{call}: {}", refusal.message);
    }
    assert_eq!(s.count("posthouse.job").await, 1);
}

#[tokio::test]
async fn every_condition_counts_wherever_a_job_lives() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["default", "q"], &["a", "b"], 3_600_000).await;
    let queued = s.enqueue("kind => 'a', queue => 'q', tenant => 't', delay => '1 hour'").await;
    let failed = s.enqueue("kind => 'a'").await;
    fail(&s, &worker, 1, "timeout", "No answer after 30 s").await;
    let retried = s.enqueue("kind => 'b'").await;
    let fence = worker.claim(&s, 1).await[0].fence;
    let error = json!({"class": "reset", "message": "connection reset"});
    s.settle(
        worker.id,
        &json!([{"id": retried, "fence": fence, "outcome": "retry", "delay_ms": 3_600_000, "error": error}]),
    )
    .await;
    let cancelled = s.enqueue("kind => 'b', tenant => 't'").await;
    s.get::<String>(&format!("select posthouse.cancel({cancelled})")).await;
    let done = s.enqueue("kind => 'a'").await;
    worker.claim(&s, 1).await;
    s.settle(worker.id, &json!([{"id": done, "fence": 1, "outcome": "done"}])).await;
    s.run("select posthouse.set_queue('bare', '0')").await;
    let buried = s.enqueue("kind => 'z', queue => 'bare'").await;
    s.get::<String>(&format!("select posthouse.cancel({buried})")).await;
    for (filter, expected) in [
        (r#"{"all": true}"#, vec![queued, failed, retried, cancelled, done, buried]),
        (r#"{"queue": "q"}"#, vec![queued]),
        (r#"{"queue": "bare"}"#, vec![buried]),
        (r#"{"kind": "b"}"#, vec![retried, cancelled]),
        (r#"{"tenant": "t", "kind": "a"}"#, vec![queued]),
        (r#"{"state": "failed"}"#, vec![failed]),
        (r#"{"state": ["done", "cancelled"]}"#, vec![cancelled, done, buried]),
        (r#"{"class": "timeout"}"#, vec![failed]),
        (r#"{"class": "reset"}"#, vec![retried]),
        (r#"{"error": "NO ANSWER"}"#, vec![failed]),
        (r#"{"error": "%"}"#, vec![]),
        (r#"{"failed_since": "-infinity"}"#, vec![failed, retried]),
        (r#"{"failed_before": "yesterday"}"#, vec![]),
        (r#"{"created_since": "yesterday"}"#, vec![queued, failed, retried, cancelled, done, buried]),
        (r#"{"created_before": "yesterday"}"#, vec![]),
    ] {
        let mut found = found(&s, filter).await;
        let mut next: Option<Value> = s.get(&format!("select next from posthouse.find_jobs('{filter}')")).await;
        while let Some(after) = next {
            let rows =
                s.rows(&format!("select ids, next from posthouse.find_jobs('{filter}', after => '{after}')")).await;
            found.extend(rows[0].get::<_, Vec<i64>>(0));
            next = rows[0].get(1);
        }
        found.sort_unstable();
        let mut expected = expected;
        expected.sort_unstable();
        assert_eq!(found, expected, "{filter}");
    }
    let some = format!(r#"{{"ids": [{failed}, {done}, {done}, 999], "kind": "a"}}"#);
    let pages = s.rows(&format!("select ids, next from posthouse.find_jobs('{some}', 1)")).await;
    assert_eq!(pages[0].get::<_, Vec<i64>>(0), [failed]);
}

#[tokio::test]
async fn small_batches_go_once_over_every_home() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 60).await;
    fail(&s, &worker, 20, "bad", "no").await;
    let jobs = worker.claim(&s, 15).await;
    let outcomes: Vec<Value> = jobs.iter().map(|j| json!({"id": j.id, "fence": 1, "outcome": "done"})).collect();
    s.settle(worker.id, &json!(outcomes)).await;
    // Ties in the time of failure, where pages end.
    s.run("update posthouse.dead_letter set failed_at = date_trunc('hour', failed_at)").await;
    for size in [1, 7, 20, 1_000] {
        let mut seen = Vec::new();
        let mut after = "null".to_owned();
        loop {
            let rows = s
                .rows(&format!(r#"select ids, next from posthouse.find_jobs('{{"all": true}}', {size}, {after})"#))
                .await;
            let page: Vec<i64> = rows[0].get(0);
            assert!(page.len() <= size, "{page:?}");
            seen.extend(page);
            match rows[0].get::<_, Option<Value>>(1) {
                Some(next) => after = format!("'{next}'"),
                None => break,
            }
        }
        assert_eq!((seen.len(), seen.iter().collect::<BTreeSet<_>>().len()), (60, 60), "pages of {size}");
    }
}

#[tokio::test]
async fn cancel_many_stops_what_is_live_and_nothing_else() {
    let (queue, s) = Queue::with_session().await;
    let (_listener, heard) = queue
        .hearing(|message| match message {
            tokio_postgres::AsyncMessage::Notification(told) => Some(format!("{} {}", told.channel(), told.payload())),
            _ => None,
        })
        .await;
    _listener.batch_execute("listen posthouse_cancel").await.unwrap();
    let worker = s.worker(&["k"]).await;
    s.enqueue_bulk("k", "t", 10).await;
    s.enqueue_bulk("k", "u", 3).await;
    s.run("update posthouse.job set keyed = false").await;
    let done = worker.claim(&s, 1).await[0].id;
    s.settle(worker.id, &json!([{"id": done, "fence": 1, "outcome": "done"}])).await;
    let running = worker.claim(&s, 3).await;
    let tenant = running[0].tenant.clone();
    let live = s.count("posthouse.job").await;
    let changed = all_steps(&s, r#"cancel_many('{"all": true}', 5, AFTER)"#).await;
    assert_eq!(changed.iter().sum::<i64>(), live, "{changed:?}");
    assert!(changed.len() >= 3, "{changed:?}");
    assert_eq!(s.count("posthouse.job").await, 3, "only those that run are live");
    assert_eq!(s.count("posthouse.job where cancel_asked").await, 3);
    assert_eq!(s.state(done).await, "done");
    // Once more changes nothing.
    assert_eq!(all_steps(&s, r#"cancel_many('{"all": true}', 100, AFTER)"#).await, [0]);
    let outcomes: Vec<Value> =
        running.iter().map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "retry", "error": "stopped"})).collect();
    s.settle(worker.id, &json!(outcomes)).await;
    assert_eq!(s.state(running[0].id).await, "cancelled", "of tenant {tenant}");
    crate::harness::wait_until(crate::harness::SOON, "its worker is told", async || {
        let told = heard.lock().unwrap().iter().filter(|text| text.contains(&worker.id.to_string())).count();
        _listener.simple_query("select 1").await.unwrap();
        told == 1 || told == 2 || told == 3
    })
    .await;
}

#[tokio::test]
async fn what_somebody_else_holds_is_left_out_and_counted() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    let worker = s.worker(&["k", "f"]).await;
    s.enqueue_bulk("k", "t", 5).await;
    let first: i64 = s.get("select min(id) from posthouse.job").await;
    s.enqueue_bulk("f", "t", 5).await;
    s.run("update posthouse.job set run_at = clock_timestamp() - interval '1 minute' where id > (select min(id) + 4 from posthouse.job)").await;
    let mut failing = Vec::new();
    for job in worker.claim(&s, 10).await {
        let outcome = if job.kind == "f" { "fail" } else { "release" };
        failing.push(json!({"id": job.id, "fence": job.fence, "outcome": outcome}));
    }
    s.settle(worker.id, &json!(failing)).await;
    let dead: i64 = s.get("select min(id) from posthouse.dead_letter").await;
    other
        .run(&format!(
            "begin; select from posthouse.job where id = {first} for update; select from posthouse.dead_letter where id = {dead} for update"
        ))
        .await;
    s.run("set lock_timeout = '5s'").await;
    let move_up = step(&s, r#"reprioritise_many('{"kind": "k"}', 3)"#).await;
    assert_eq!((move_up.changed, move_up.busy), (4, 1));
    let cancel = step(&s, r#"cancel_many('{"kind": "k"}')"#).await;
    assert_eq!((cancel.changed, cancel.busy, cancel.next), (4, 1, None));
    let redrive = step(&s, &format!(r#"redrive_many('{{"ids": [{dead}, {}]}}')"#, dead + 1)).await;
    assert_eq!((redrive.changed, redrive.busy), (1, 1));
    let purge = step(&s, r#"purge_many('{"kind": "f"}')"#).await;
    assert_eq!((purge.changed, purge.busy), (3, 1));
    let refusal = s.refused(&format!("select posthouse.retry({dead})")).await;
    assert_eq!((&*refusal.code, refusal.message.contains("somebody else")), ("PH004", true), "{refusal:?}");
    other.run("rollback").await;
    assert_eq!(step(&s, r#"cancel_many('{"kind": "k"}')"#).await.changed, 1);
    assert_eq!(step(&s, r#"purge_many('{"kind": "f"}')"#).await.changed, 1);
}

#[tokio::test]
async fn retry_many_brings_cancelled_jobs_back_only_when_they_are_asked_for() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let failed = s.enqueue("kind => 'k'").await;
    fail(&s, &worker, 1, "bad", "no").await;
    let done = s.enqueue("kind => 'k'").await;
    worker.claim(&s, 1).await;
    s.settle(worker.id, &json!([{"id": done, "fence": 1, "outcome": "done"}])).await;
    let later = s.enqueue("kind => 'k', delay => '1 hour'").await;
    let cancelled = s.enqueue("kind => 'k', payload => '{\"a\": 1}'").await;
    let bare = s.enqueue("kind => 'k'").await;
    s.run(&format!("select posthouse.cancel({cancelled}), posthouse.cancel({bare})")).await;
    s.run(&format!("delete from posthouse.payload where id = {bare}")).await;
    assert_eq!(all_steps(&s, r#"retry_many('{"kind": "k"}', after => AFTER)"#).await.iter().sum::<i64>(), 2);
    let mut jobs = ids(&worker.claim(&s, 10).await);
    jobs.sort_unstable();
    assert_eq!(jobs, [failed, later]);
    let mut refused = Vec::new();
    let mut after = "null".to_owned();
    loop {
        let step = step(
            &s,
            &format!(r#"retry_many('{{"state": "cancelled", "kind": "k"}}', after => {after}, asked_by => 'ann')"#),
        )
        .await;
        refused.extend(step.refused.as_array().unwrap().clone());
        match step.next {
            Some(next) => after = format!("'{next}'"),
            None => break,
        }
    }
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert_eq!(refused[0]["id"], json!(bare));
    assert!(refused[0]["error"].as_str().unwrap().contains("payload was dropped"), "{refused:?}");
    assert_eq!(ids(&worker.claim(&s, 10).await), [cancelled]);
    let noted: Vec<String> =
        s.list("select redriven_by || ' ' || state from posthouse.redrives where state = 'cancelled'").await;
    assert!(noted.len() == 1 && noted[0].ends_with(": ann cancelled"), "{noted:?}");
    let refusal = s.refused(&format!("select posthouse.retry({bare})")).await;
    assert_eq!((&*refusal.code, refusal.message.contains("payload was dropped")), ("PH004", true), "{refusal:?}");
}

#[tokio::test]
async fn reprioritised_jobs_are_claimed_in_their_new_order_and_none_is_lost_behind_a_floor() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k", "l"]).await;
    s.enqueue_bulk("k", "t", 10).await;
    let urgent = s.enqueue("kind => 'l', tenant => 't'").await;
    let running = worker.claim(&s, 1).await[0].id;
    // The lane with that priority is there, and has the common floor, which is far ahead of the jobs that come into it.
    let low = s.enqueue("kind => 'k', tenant => 't', priority => 5").await;
    s.get::<String>(&format!("select posthouse.cancel({low})")).await;
    s.run(
        "insert into posthouse.lane_floor (lane_id, floor_at, behind)
           select l.id, '-infinity', false from posthouse.lane l where l.priority = 0 union all select 0, clock_timestamp(), true",
    )
    .await;
    let changed = all_steps(&s, r#"reprioritise_many('{"kind": "k"}', 5, 4, AFTER)"#).await;
    assert_eq!(changed.iter().sum::<i64>(), 9, "{changed:?}");
    assert_eq!(
        all_steps(&s, r#"reprioritise_many('{"kind": "k"}', 5, 100, AFTER)"#).await,
        [0],
        "they have it already"
    );
    assert_eq!(s.job(running).await["priority"], json!(0), "one that runs keeps its own");
    let jobs = worker.claim(&s, 100).await;
    assert_eq!(jobs.len(), 10);
    assert_eq!((jobs[0].id, jobs[0].priority), (urgent, 0));
    let line: Vec<i64> = ids(&jobs)[1..].to_vec();
    let mut sorted = line.clone();
    sorted.sort_unstable();
    assert_eq!(line, sorted, "their order among themselves is kept");
}

#[tokio::test]
async fn purge_many_takes_final_jobs_only_and_all_that_is_of_them() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let kept = s.enqueue("kind => 'k', delay => '1 hour'").await;
    let key = "kind => 'k', dedupe_key => 'a', dedupe_for => '1 hour'";
    let keyed = s.enqueue(key).await;
    worker.claim(&s, 1).await;
    s.settle(worker.id, &json!([{"id": keyed, "fence": 1, "outcome": "done"}])).await;
    s.enqueue("kind => 'k'").await;
    fail(&s, &worker, 1, "bad", "no").await;
    s.run("select posthouse.redrive(kind => 'k')").await;
    fail(&s, &worker, 1, "bad", "no").await;
    s.enqueue("kind => 'k'").await;
    let running = worker.claim(&s, 1).await[0].id;
    assert_eq!(s.count("posthouse.redrives").await, 1);
    assert_eq!(
        all_steps(&s, r#"purge_many('{"kind": "k"}', after => AFTER)"#).await.iter().sum::<i64>(),
        1,
        "dead letters only"
    );
    assert_eq!((s.count("posthouse.redrives").await, s.count("posthouse.archive").await), (0, 1));
    assert!(s.enqueued(key).await.2, "the key is held by a job that is there");
    assert_eq!(
        all_steps(&s, r#"purge_many('{"state": ["done", "cancelled"]}', after => AFTER)"#).await.iter().sum::<i64>(),
        1
    );
    assert_eq!(s.count("posthouse.archive").await, 0);
    assert!(!s.enqueued(key).await.2, "and free when it is gone");
    let refusal = s.refused(r#"select * from posthouse.purge_many('{"state": "queued"}')"#).await;
    assert_eq!(refusal.code, "PH001");
    assert_eq!((s.state(kept).await, s.state(running).await), ("queued".to_owned(), "running".to_owned()));
    assert_eq!(s.count("posthouse.payload").await, 3);
    s.run("select posthouse.set_queue('bare', '0')").await;
    let buried = s.enqueue("kind => 'z', queue => 'bare'").await;
    s.get::<String>(&format!("select posthouse.cancel({buried})")).await;
    assert_eq!(
        all_steps(&s, r#"purge_many('{"queue": "bare", "state": "cancelled"}', after => AFTER)"#)
            .await
            .iter()
            .sum::<i64>(),
        1
    );
    assert_eq!((s.count("posthouse.tombstone").await, s.count("posthouse.payload").await), (0, 3));
}

#[tokio::test]
async fn jobs_that_are_enqueued_meanwhile_are_not_purged() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_queue('bare', '0')").await;
    let cancelled = async || {
        for queue in ["default", "default", "bare", "bare"] {
            let id = s.enqueue(&format!("kind => 'k', queue => '{queue}'")).await;
            assert_eq!(s.get::<String>(&format!("select posthouse.cancel({id})")).await, "cancelled");
        }
    };
    cancelled().await;
    let mut done = step(&s, r#"purge_many('{"state": "cancelled"}', 1)"#).await;
    assert_eq!(done.changed, 1);
    cancelled().await;
    let mut changed = done.changed;
    while let Some(next) = done.next {
        done = step(&s, &format!(r#"purge_many('{{"state": "cancelled"}}', 1, '{next}')"#)).await;
        changed += done.changed;
    }
    assert_eq!(changed, 4);
    assert_eq!((s.count("posthouse.archive").await, s.count("posthouse.tombstone").await), (2, 2));
}

#[tokio::test]
async fn a_batch_looks_at_a_bounded_number_of_jobs() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "many", 30_000).await;
    s.enqueue_bulk("k", "few", 3).await;
    let watched = Watched::new(&queue).await;
    let call = r#"select * from posthouse.find_jobs('{"tenant": "few"}', 500)"#;
    let cost = watched.cost(call).await;
    assert!(cost.rows <= 2_500, "{cost:?}");
    let named = r#"select * from posthouse.find_jobs('{"ids": [5, 7, 29999]}', 500)"#;
    let cost = watched.cost(named).await;
    assert!(cost.rows <= 10 && cost.pages < 100, "{cost:?}");
    assert_eq!(all_steps(&s, r#"cancel_many('{"tenant": "few"}', 500, AFTER)"#).await.iter().sum::<i64>(), 3);
}

/// Claims and settles in every way, until told so by the others' end.
async fn work(s: &Session, worker: &Worker, rounds: usize) {
    for round in 0..rounds {
        let outcomes: Vec<Value> = worker
            .claim(s, 40)
            .await
            .iter()
            .map(|job| {
                let outcome = ["done", "fail", "retry", "release"][(job.id as usize + round) % 4];
                json!({"id": job.id, "fence": job.fence, "outcome": outcome, "delay_ms": 0, "error": "no"})
            })
            .rev()
            .collect();
        s.settle(worker.id, &json!(outcomes)).await;
    }
}

#[tokio::test]
async fn whoever_works_meanwhile_is_not_locked_out_and_no_job_is_lost_or_doubled() {
    let (queue, s) = Queue::with_session().await;
    for tenant in ["a", "b", "c"] {
        s.enqueue_bulk("k", tenant, 400).await;
    }
    let calls = [
        r#"cancel_many('{"tenant": "c"}', 30, AFTER)"#,
        r#"reprioritise_many('{"tenant": "a"}', 2, 30, AFTER)"#,
        r#"reprioritise_many('{"all": true}', 0, 30, AFTER)"#,
        r#"redrive_many('{"all": true}', '{"priority": 1}', max_jobs => 30, after => AFTER)"#,
        r#"retry_many('{"all": true, "state": ["queued", "failed", "cancelled"]}', 30, AFTER)"#,
    ];
    let mut sessions = Vec::new();
    for call in calls {
        sessions.push((queue.session().await, call));
    }
    let operators = sessions.iter().map(|(s, call)| async move {
        for _ in 0..4 {
            all_steps(s, call).await;
        }
    });
    let mut crew = Vec::new();
    for _ in 0..3 {
        let session = queue.session().await;
        let worker = session.worker(&["k"]).await;
        crew.push((session, worker));
    }
    let workers = crew.iter().map(|(s, worker)| work(s, worker, 25));
    futures_util::future::join(futures_util::future::join_all(operators), futures_util::future::join_all(workers))
        .await;
    let homes: Vec<i64> = s.list("select count(*) from posthouse.jobs group by id having count(*) > 1").await;
    assert!(homes.is_empty(), "{} jobs have two homes", homes.len());
    assert_eq!((s.count("posthouse.jobs").await, s.count("posthouse.payload").await), (1_200, 1_200));
    // What is live can still be worked off.
    s.run("update posthouse.job set run_at = clock_timestamp(), cancel_asked = false where state = 'queued'").await;
    let (session, worker) = &crew[0];
    crate::harness::wait_until(crate::harness::SOON, "all jobs are final", async || {
        let jobs = worker.claim(session, 1_000).await;
        let done: Vec<Value> = jobs.iter().map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "done"})).collect();
        session.settle(worker.id, &json!(done)).await;
        s.run("update posthouse.sweep set ran_at = '-infinity' where name = 'stragglers'; select posthouse.tidy('stragglers')").await;
        s.count("posthouse.job").await == 0
    })
    .await;
}
