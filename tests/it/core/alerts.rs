//! Alerts: what is raised, added up and told, what is not told again, and that nobody who raises one fails or waits.

use posthouse::store::AlertMessage;
use serde_json::{Value, json};
use tokio_postgres::AsyncMessage;

use super::support::{Queue, Session, Worker};
use crate::harness::{SOON, wait_until};

/// Sweep, whatever is due; the answer is what was told.
async fn sweep(s: &Session) -> Vec<AlertMessage> {
    s.run("update posthouse.sweep set ran_at = '-infinity'").await;
    serde_json::from_value(s.get::<Value>("select posthouse.tidy() -> 'alerts'").await).unwrap()
}

/// What was told, in short: kind, subject, how often since it was told last.
fn short(told: &[AlertMessage]) -> Vec<(&str, &str, i64)> {
    told.iter().map(|m| (m.kind.as_str(), m.data.subject.as_str(), m.data.new)).collect()
}

/// Let so many minutes pass for the alerts that there are.
async fn pass(s: &Session, minutes: i32) {
    s.run(&format!(
        "update posthouse.alert set told_at = told_at - interval '{minutes} minutes', last_at = last_at - interval '{minutes} minutes',
           raised_at = raised_at - interval '{minutes} minutes'"
    ))
    .await;
}

async fn raise(s: &Session, kind: &str, subject: &str) -> bool {
    s.get(&format!(
        "select posthouse.raise_alert('{kind}', '{subject}', 'something is wrong with {subject}', '{{\"a\": 1}}')"
    ))
    .await
}

/// Jobs of a kind that a worker claims and fails.
async fn fail(s: &Session, worker: &Worker, kind: &str, class: &str, jobs: i64) -> Vec<i64> {
    s.enqueue_bulk(kind, "t", jobs).await;
    let claimed = worker.claim(s, i32::try_from(jobs).unwrap()).await;
    assert_eq!(claimed.len(), usize::try_from(jobs).unwrap());
    let outcomes: Value = claimed
        .iter()
        .map(|j| json!({"id": j.id, "fence": j.fence, "outcome": "fail", "error": {"class": class, "message": "the secret payload"}}))
        .collect();
    s.settle(worker.id, &outcomes).await;
    claimed.iter().map(|job| job.id).collect()
}

#[tokio::test]
async fn what_is_raised_again_in_its_quiet_time_is_counted_and_told_once_when_it_is_over() {
    let (_queue, s) = Queue::with_session().await;
    for _ in 0..3 {
        assert!(raise(&s, "budget", "tenant:a").await);
    }
    assert!(raise(&s, "budget", "tenant:b").await);
    let told = sweep(&s).await;
    assert_eq!(short(&told), [("budget", "tenant:a", 3), ("budget", "tenant:b", 1)]);
    assert_eq!(
        (told[0].data.text.as_str(), &told[0].data.detail),
        ("something is wrong with tenant:a", &json!({"a": 1}))
    );
    assert!(sweep(&s).await.is_empty());
    raise(&s, "budget", "tenant:a").await;
    raise(&s, "budget", "tenant:a").await;
    assert!(sweep(&s).await.is_empty(), "it is quiet");
    pass(&s, 4).await;
    assert!(sweep(&s).await.is_empty(), "it is still quiet");
    // What came in the quiet time is told when it is over, though nothing more came.
    pass(&s, 2).await;
    let told = sweep(&s).await;
    assert_eq!(short(&told), [("budget", "tenant:a", 2)]);
    assert_eq!(told[0].data.count, 5);
    // Over, and again within the quiet time: it goes on, untold.
    s.run("select posthouse.resolve_alert('budget', 'tenant:a')").await;
    assert!(sweep(&s).await.is_empty());
    assert_eq!(s.count("posthouse.alerts where resolved_at is null").await, 1);
    raise(&s, "budget", "tenant:a").await;
    assert!(sweep(&s).await.is_empty());
    assert_eq!(
        s.get::<i64>("select count from posthouse.alerts where subject = 'tenant:a' and resolved_at is null").await,
        6
    );
    // After an hour without news it is over, and then a new one is another one.
    pass(&s, 61).await;
    assert_eq!(short(&sweep(&s).await), [("budget", "tenant:a", 1)]);
    pass(&s, 61).await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alerts where resolved_at is null").await, 0);
    raise(&s, "budget", "tenant:a").await;
    let told = sweep(&s).await;
    assert_eq!((short(&told), told[0].data.count), (vec![("budget", "tenant:a", 1)], 1));
    // 30 days later nothing is left.
    s.run("update posthouse.alert set resolved_at = clock_timestamp() - interval '31 days'").await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alert").await, 0);
}

#[tokio::test]
async fn raising_an_alert_neither_fails_nor_waits() {
    let (queue, s) = Queue::with_session().await;
    raise(&s, "budget", "tenant:a").await;
    sweep(&s).await;
    // Somebody holds the alert, its rule and a note of the same; it is raised all the same.
    let other = queue.session().await;
    other
        .run(
            "begin; select * from posthouse.alert for update; select * from posthouse.alert_rule for update;
              select posthouse.raise_alert('budget', 'tenant:a', 'from another transaction')",
        )
        .await;
    s.run("set lock_timeout = '2s'").await;
    assert!(raise(&s, "budget", "tenant:a").await);
    other.run("rollback").await;
    // Nothing that is given makes it fail, nor does a transaction that may not write.
    for arguments in
        ["null, null, null, null", "'', '', '', '[]'", "repeat('k', 9000), repeat('😀', 9000), repeat('x', 90000)"]
    {
        assert!(s.get::<bool>(&format!("select posthouse.raise_alert({arguments})")).await, "{arguments}");
    }
    s.run("begin read only").await;
    assert!(!s.get::<bool>("select posthouse.raise_alert('budget', 'a', 'b')").await);
    s.run("select posthouse.resolve_alert('budget', 'a')").await;
    assert_eq!(s.get::<i32>("select 1").await, 1, "the transaction goes on");
    s.run("rollback").await;
    // It is undone with the caller's transaction.
    s.run("begin; select posthouse.raise_alert('budget', 'undone', 'x'); rollback").await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alerts where subject = 'undone'").await, 0);
    assert_eq!(s.get::<i64>("select count from posthouse.alerts where subject = 'tenant:a'").await, 2);
}

#[tokio::test]
async fn a_notification_is_json_and_always_fits() {
    let (queue, s) = Queue::with_session().await;
    let (listener, heard) = queue
        .hearing(|message| match message {
            AsyncMessage::Notification(note) if note.channel() == "posthouse_alert" => Some(note.payload().to_owned()),
            _ => None,
        })
        .await;
    listener.batch_execute("listen posthouse_alert").await.unwrap();
    for text in ["repeat('\"', 5000)", "repeat(chr(1), 5000)", "repeat('😀', 5000)", "repeat(E'\\\\', 399)", "'short'"]
    {
        s.run(&format!(
            "select posthouse.raise_alert('k' || md5({text}), {text}, {text}, jsonb_build_object('a', repeat('\"', 900), 'b', '{{}}'::jsonb));
             select posthouse.raise_alert('l' || md5({text}), {text}, {text}, jsonb_build_object('a', repeat('x', 100000)))"
        ))
        .await;
    }
    let told = sweep(&s).await;
    assert_eq!(told.len(), 10);
    wait_until(SOON, "all are heard", async || heard.lock().unwrap().len() == 10).await;
    for (told, heard) in told.iter().zip(heard.lock().unwrap().iter()) {
        assert!(heard.len() < 8_000, "{} bytes", heard.len());
        assert_eq!(*told, serde_json::from_str(heard).unwrap());
        assert!(!told.data.text.chars().chain(told.data.subject.chars()).any(char::is_control));
    }
    assert!(told.iter().filter(|m| m.data.detail == json!({"truncated": true})).count() >= 5);
}

#[tokio::test]
async fn dead_letters_are_summed_by_queue_kind_and_class_without_what_they_hold() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a", "b"]).await;
    fail(&s, &worker, "a", "terminal", 300).await;
    let last = fail(&s, &worker, "a", "timeout", 2).await;
    fail(&s, &worker, "b", "terminal", 1).await;
    let told = sweep(&s).await;
    let mut shorts = short(&told);
    shorts.sort_unstable();
    assert_eq!(
        shorts,
        [
            ("dead_letter", "default/a/terminal", 300),
            ("dead_letter", "default/a/timeout", 2),
            ("dead_letter", "default/b/terminal", 1)
        ]
    );
    let timeout = told.iter().find(|m| m.data.subject.ends_with("timeout")).unwrap();
    assert_eq!(
        timeout.data.detail,
        json!({"queue": "default", "kind": "a", "class": "timeout", "job": last.iter().max()})
    );
    assert!(!serde_json::to_string(&told).unwrap().contains("secret"), "{told:?}");
    assert!(sweep(&s).await.is_empty());
    // Turned off, they are passed over, for good.
    s.run("select posthouse.set_alert('dead_letter', enabled => false)").await;
    fail(&s, &worker, "a", "odd", 3).await;
    assert!(sweep(&s).await.is_empty());
    s.run("select posthouse.set_alert('dead_letter', enabled => true)").await;
    fail(&s, &worker, "a", "odd", 1).await;
    assert_eq!(short(&sweep(&s).await), [("dead_letter", "default/a/odd", 1)]);
}

#[tokio::test]
async fn a_dead_letter_that_commits_late_is_counted_once() {
    let (queue, s) = Queue::with_session().await;
    let (late, worker) = (queue.session().await, s.worker(&["a"]).await);
    s.enqueue_bulk("a", "t", 2).await;
    let jobs = worker.claim(&s, 2).await;
    let outcome = |n: usize| json!([{"id": jobs[n].id, "fence": jobs[n].fence, "outcome": "fail"}]);
    late.run("begin").await;
    late.settle(worker.id, &outcome(0)).await;
    // Another one fails after it, and is seen before it.
    s.settle(worker.id, &outcome(1)).await;
    let first = sweep(&s).await;
    late.run("commit").await;
    let second = sweep(&s).await;
    s.run("update posthouse.alert set told_at = '-infinity'").await;
    let third = sweep(&s).await;
    assert_eq!([first, second, third].concat().iter().map(|m| m.data.new).sum::<i64>(), 2);
    // Without the look at open transactions one would be missed.
    s.run("update posthouse.alert set told_at = '-infinity'").await;
    s.cripple("fold_dead_letters", "least(end_at, posthouse.oldest_writer())", "end_at").await;
    s.enqueue_bulk("a", "t", 2).await;
    let jobs = worker.claim(&s, 2).await;
    let outcome = |n: usize| json!([{"id": jobs[n].id, "fence": jobs[n].fence, "outcome": "fail"}]);
    late.run("begin").await;
    late.settle(worker.id, &outcome(0)).await;
    s.settle(worker.id, &outcome(1)).await;
    assert_eq!(sweep(&s).await.len(), 1);
    late.run("commit").await;
    s.run("update posthouse.alert set told_at = '-infinity'").await;
    assert!(sweep(&s).await.is_empty());
}

#[tokio::test]
async fn a_kind_that_no_live_worker_serves_is_told_until_one_comes() {
    let (_queue, s) = Queue::with_session().await;
    let other = s.worker_of(&["default"], &["other"], 3_600_000).await;
    let gone = s.worker_of(&["default"], &["lonely"], 3_600_000).await;
    let job = s.enqueue("kind => 'lonely'").await;
    s.enqueue("kind => 'other'").await;
    s.enqueue("kind => 'later', delay => '1 hour'").await;
    let age = async |minutes: i32| {
        s.run(&format!(
            "update posthouse.job set run_at = run_at - interval '{minutes} minutes';
             update posthouse.lane set ready_at = ready_at - interval '{minutes} minutes'; delete from posthouse.lane_floor"
        ))
        .await;
    };
    age(2).await;
    assert!(sweep(&s).await.is_empty(), "there is a worker");
    s.expire(gone.id).await;
    let told = sweep(&s).await;
    assert_eq!(short(&told), [("no_worker", "default/lonely", 1)]);
    assert_eq!(
        told[0].data.detail.as_object().map(|d| (&d["queue"], &d["kind"], &d["job"])),
        Some((&json!("default"), &json!("lonely"), &json!(job)))
    );
    // It stays so: told again when it was quiet for long enough.
    assert!(sweep(&s).await.is_empty());
    pass(&s, 6).await;
    assert_eq!(short(&sweep(&s).await), [("no_worker", "default/lonely", 1)]);
    s.worker_of(&["default"], &["lonely"], 3_600_000).await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alerts where resolved_at is null").await, 0);
    // A job that is not due for long is not alarming yet.
    s.expire(other.id).await;
    s.run("update posthouse.job set run_at = clock_timestamp() - interval '50 seconds'").await;
    assert!(sweep(&s).await.is_empty());
}

#[tokio::test]
async fn a_queue_whose_oldest_due_job_waits_for_too_long_is_told() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker_of(&["default", "bulk", "off", "held"], &["k"], 3_600_000).await;
    for queue in ["default", "bulk", "off", "held"] {
        s.enqueue(&format!("kind => 'k', queue => '{queue}'")).await;
    }
    // What a closed gate holds back is not too old.
    s.run("select posthouse.close_gate('queue:held', clock_timestamp() + interval '1 hour', 'maintenance')").await;
    s.run(
        "select posthouse.set_alert('oldest_due', queue => 'bulk', after => '6 hours');
           select posthouse.set_alert('oldest_due', queue => 'off', enabled => false)",
    )
    .await;
    let age = async |minutes: i32| {
        s.run(&format!(
            "update posthouse.job set run_at = clock_timestamp() - interval '{minutes} minutes' where state = 'queued';
             update posthouse.lane set ready_at = clock_timestamp() - interval '{minutes} minutes' where blocked_by is null and ready_at < 'infinity';
             delete from posthouse.lane_floor"
        ))
        .await;
    };
    age(14).await;
    assert!(sweep(&s).await.is_empty());
    s.run(&format!("update posthouse.worker set queues = '{{held}}' where id = '{}'", worker.id)).await;
    assert!(worker.claim(&s, 1).await.is_empty(), "the gate is closed");
    s.run(&format!("update posthouse.worker set queues = '{{default,bulk,off,held}}' where id = '{}'", worker.id))
        .await;
    age(16).await;
    assert_eq!(short(&sweep(&s).await), [("oldest_due", "default", 1)]);
    let cure = "and g.closed_until > clock_timestamp()";
    s.cripple("watch_age", cure, "and false").await;
    assert_eq!(short(&sweep(&s).await), [("oldest_due", "held", 1)]);
    s.cripple("watch_age", "and false", cure).await;
    age(361).await;
    assert_eq!(short(&sweep(&s).await), [("oldest_due", "bulk", 1)]);
    s.run("select posthouse.set_alert('oldest_due', queue => 'bulk', after => '12 hours')").await;
    sweep(&s).await;
    assert_eq!(s.list::<String>("select subject from posthouse.alerts where resolved_at is null").await, ["default"]);
    // As for the others again.
    s.run("select posthouse.set_alert('oldest_due', queue => 'bulk', after => '0')").await;
    assert_eq!(s.count("posthouse.alert_rules where queue = 'bulk'").await, 0);
    pass(&s, 6).await;
    assert_eq!(sweep(&s).await.len(), 2);
    worker.claim(&s, 10).await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alerts where resolved_at is null").await, 0);
}

#[tokio::test]
async fn beyond_a_hundred_subjects_are_told_as_one() {
    let (_queue, s) = Queue::with_session().await;
    s.worker(&["served"]).await;
    s.run(
        "select posthouse.enqueue('kind' || n) from generate_series(1, 150) n;
           update posthouse.job set run_at = run_at - interval '2 minutes'; delete from posthouse.lane_floor",
    )
    .await;
    for n in 0..150 {
        raise(&s, "budget", &format!("tenant:{n}")).await;
    }
    // As many as are told at once, then the others.
    let mut told = sweep(&s).await;
    told.extend(sweep(&s).await);
    told.extend(sweep(&s).await);
    for kind in ["no_worker", "budget"] {
        assert_eq!(told.iter().filter(|m| m.kind == kind).count(), 101, "{kind}");
    }
    let more = |kind: &str| told.iter().find(|m| m.kind == kind && m.data.subject == "*").unwrap();
    assert_eq!(more("no_worker").data.text, "the same of 50 others");
    assert_eq!(more("budget").data.new, 50);
    s.run("select posthouse.register_worker(gen_random_uuid(), kinds => (select array_agg('kind' || n) from generate_series(1, 150) n))").await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alerts where kind = 'no_worker' and resolved_at is null").await, 0);
}

#[tokio::test]
async fn the_webhook_gets_a_job_a_message_and_none_about_its_own() {
    let (_queue, s) = Queue::with_session().await;
    raise(&s, "budget", "before").await;
    assert_eq!(sweep(&s).await.len(), 1);
    assert_eq!(s.count("posthouse.job").await, 0, "the webhook is off");
    s.run("select posthouse.set_webhook(true)").await;
    raise(&s, "budget", "a").await;
    raise(&s, "budget", "b").await;
    let told = sweep(&s).await;
    let jobs: Vec<Value> = s.list("select to_jsonb(j.*) from posthouse.jobs j order by id").await;
    for (job, message) in jobs.iter().zip(&told) {
        assert_eq!(
            (&job["queue"], &job["kind"], &job["tenant"]),
            (&json!("posthouse"), &json!("posthouse.webhook"), &json!("posthouse"))
        );
        assert_eq!(job["payload"]["body"], serde_json::to_value(message).unwrap());
        assert!(job["payload"]["webhook_id"].as_str().unwrap().starts_with("alert_"));
    }
    assert_eq!(jobs.len(), 2);
    assert_ne!(jobs[0]["payload"]["webhook_id"], jobs[1]["payload"]["webhook_id"]);
    // They fail, nobody serves their kind, they are old: all of that is told, and none of it by the webhook.
    let worker = s.worker_of(&["posthouse"], &["posthouse.webhook"], 3_600_000).await;
    let failing = worker.claim(&s, 1).await;
    s.settle(worker.id, &json!([{"id": failing[0].id, "fence": failing[0].fence, "outcome": "fail"}])).await;
    s.expire(worker.id).await;
    s.run("update posthouse.job set run_at = run_at - interval '1 hour'; update posthouse.lane set ready_at = ready_at - interval '1 hour';
           delete from posthouse.lane_floor").await;
    let told = sweep(&s).await;
    let mut shorts = short(&told);
    shorts.sort_unstable();
    assert_eq!(
        shorts,
        [
            ("dead_letter", "posthouse/posthouse.webhook/error", 1),
            ("no_worker", "posthouse/posthouse.webhook", 1),
            ("oldest_due", "posthouse", 1)
        ]
    );
    assert_eq!(s.count("posthouse.job").await, 1);
    // The same with the guard gone: it tells of itself.
    s.run("create or replace function posthouse.is_about_webhook(a posthouse.alert) returns boolean language sql as 'select false'").await;
    pass(&s, 6).await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.job").await, 3);
    // A test is told at once, again and again.
    let job: Option<i64> = s.get("select posthouse.test_alert()").await;
    assert_eq!(s.job(job.unwrap()).await["payload"]["body"]["type"], "test");
    s.run("select posthouse.set_webhook(false, 'it is gone')").await;
    assert_eq!(s.get::<Option<i64>>("select posthouse.test_alert()").await, None);
    assert_eq!(s.get::<String>("select reason from posthouse.webhook() where not enabled").await, "it is gone");
}

#[tokio::test]
async fn a_webhook_job_that_cannot_be_made_holds_up_no_other_alert() {
    let (_queue, s) = Queue::with_session().await;
    s.run(
        "select posthouse.set_webhook(true);
           create function posthouse.refuse() returns trigger language plpgsql as $$
             begin if new.payload::text like '%poison%' then raise 'no'; end if; return new; end $$;
           create trigger refuse before insert on posthouse.payload_0 for each row execute function posthouse.refuse()",
    )
    .await;
    for subject in ["poison", "other"] {
        raise(&s, "budget", subject).await;
    }
    assert_eq!(short(&sweep(&s).await), [("budget", "other", 1)]);
    s.run("drop trigger refuse on posthouse.payload_0").await;
    assert_eq!(short(&sweep(&s).await), [("budget", "poison", 1)]);
}

#[tokio::test]
async fn gates_raise_alerts_about_quota_and_budgets() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_route('m', array['p/m']); select posthouse.report_endpoint('p/m', 'quota', null, 'no credit left')").await;
    let told = sweep(&s).await;
    assert_eq!(told.iter().map(|m| m.kind.as_str()).collect::<Vec<_>>(), ["gate_quota"]);
    assert!(told[0].data.subject.contains("p/m"), "{told:?}");
    sweep(&s).await;
    pass(&s, 300).await;
    sweep(&s).await;
    assert_eq!(
        s.count("posthouse.alerts where resolved_at is null").await,
        1,
        "it is open for as long as the gate is closed"
    );
    s.run(&format!("select posthouse.open_gate('{}')", told[0].data.subject)).await;
    sweep(&s).await;
    assert_eq!(s.count("posthouse.alerts where resolved_at is null").await, 0);
    // A budget of which half, then all is spent.
    s.run("select posthouse.set_gate('tenant:t', money_per_day => 1.0, warn_at => 0.5)").await;
    let worker = s.worker(&["k"]).await;
    for (spent, expected) in [("0.4", 0), ("0.2", 1), ("0.1", 0)] {
        s.enqueue("kind => 'k', tenant => 't'").await;
        let job = worker.claim(&s, 1).await.remove(0);
        let usage = json!({"model": "m", "input_tokens": 1, "output_tokens": 1, "cost_usd": spent});
        s.settle(worker.id, &json!([{"id": job.id, "fence": job.fence, "outcome": "done", "usage": usage}])).await;
        let told = sweep(&s).await;
        assert_eq!(
            told.iter().filter(|m| m.kind == "budget" && m.data.subject == "tenant:t").count(),
            expected,
            "{told:?}"
        );
    }
}

#[tokio::test]
async fn what_cannot_be_set_is_refused_by_name() {
    let (_queue, s) = Queue::with_session().await;
    for (arguments, complaint) in [
        ("''", "kind: must not be empty"),
        ("'dead_letter', quiet => '-1 s'", "quiet: -00:00:01 is not between 0 and 30 days"),
        ("'dead_letter', quiet => '31 days'", "quiet: 31 days is not between 0 and 30 days"),
        ("'dead_letter', after => '1 hour'", "after: is for alerts of kind no_worker and oldest_due"),
        ("'oldest_due', after => '0'", "after: 00:00:00 is not between 1 second and 365 days"),
        ("'no_worker', after => '-1 hour'", "after: -01:00:00 is not between 1 second and 365 days"),
        (
            "'no_worker', queue => 'q', after => '1 hour'",
            "queue: only alerts of kind oldest_due can be set for one queue",
        ),
        ("'oldest_due', queue => 'q', quiet => '1 hour'", "quiet: is one for all queues"),
        ("'oldest_due', queue => ''", "queue: must not be empty"),
    ] {
        let refusal = s.refused(&format!("select posthouse.set_alert({arguments})")).await;
        assert_eq!((refusal.code.as_str(), refusal.message.as_str()), ("PH001", complaint));
    }
    s.run("select posthouse.set_alert('mine', enabled => false)").await;
    assert!(!raise(&s, "mine", "a").await);
    s.run("select posthouse.set_alert('mine', enabled => true, quiet => '1 hour')").await;
    assert!(raise(&s, "mine", "a").await);
    let rule = "select (enabled, quiet, after)::text from posthouse.alert_rules where kind = 'mine'";
    assert_eq!(s.get::<String>(rule).await, "(t,01:00:00,)");
}
