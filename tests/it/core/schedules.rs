//! Schedules: one job a tick, whoever fires, whatever dies, and whatever the clock does; ticks missed are left or made up for as was
//! said; every option counts. Time passes as the tests like.

use std::time::{Duration, SystemTime};

use posthouse::store::{CatchUp, Database, Schedule, ScheduleChange, Store};
use posthouse::sweep::{Round, fire_schedules_at};
use posthouse::{NewJob, Posthouse};
use serde_json::{Value, json};

use super::support::{Queue, Session};

/// Where simulated time begins: a Friday.
const START: &str = "2027-01-01T00:00:00Z";

pub(super) fn at(text: &str) -> SystemTime {
    humantime::parse_rfc3339(text).unwrap()
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn minutes(n: u64) -> Duration {
    Duration::from_mins(n)
}

fn store(queue: &Queue) -> Store {
    Database::new(queue.url()).unwrap().store("leader")
}

fn job(kind: &str) -> NewJob {
    NewJob::from_json(kind, "{}").unwrap()
}

/// Let a schedule have been set at the start of simulated time. A rule with seconds cannot be set, but is fired as others.
async fn begin(session: &Session, name: &str, cron: &str, options: &str) {
    session.run(&format!("select posthouse.set_schedule('{name}', '* * * * *', '{{\"kind\": \"k\"}}'{options})")).await;
    session
        .run(&format!("update posthouse.schedule set cron = '{cron}', since = '{START}' where name = '{name}'"))
        .await;
}

async fn fire(store: &Store, now: SystemTime) -> Round {
    fire_schedules_at(store, now).await.unwrap()
}

/// The ticks fired of a schedule, as hour and minute.
async fn ticks(session: &Session, name: &str) -> Vec<String> {
    session
        .list(&format!("select to_char(tick at time zone 'UTC', 'DD HH24:MI') from posthouse.schedule_runs where schedule = '{name}' order by tick"))
        .await
}

async fn stands(session: &Session, name: &str) -> Value {
    session.get(&format!("select to_jsonb(s.*) from posthouse.schedules s where name = '{name}'")).await
}

#[tokio::test]
async fn every_option_of_a_job_counts_as_if_it_was_enqueued_by_hand() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    session.run("select posthouse.set_queue('reports', null)").await;
    let full = json!({
        "kind": "report", "payload": {"of": "yesterday", "n": 12_345_678_901_234_567_u64}, "queue": "reports", "tenant": "acme", "priority": -3,
        "max_attempts": 7, "timeout_ms": 90_000, "dedupe_key": "report", "dedupe_for_ms": 60_000, "gates": ["crm", "model:small"],
        "tokens": 1_234, "trace": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    });
    for job in
        [full, json!({"kind": "plain"}), json!({"kind": "llm.chat", "payload": {"model": "small", "messages": []}})]
    {
        let mut by_hand = job.clone();
        if !by_hand["dedupe_key"].is_null() {
            by_hand["dedupe_key"] = json!("by hand");
        }
        let by_hand: i64 = session.get(&format!("select id from posthouse.enqueue_many('[{by_hand}]')")).await;
        session.run(&format!("select posthouse.set_schedule('s', '* * * * *', '{job}')")).await;
        session
            .run(&format!("update posthouse.schedule set since = '{START}', next_at = null, planned_at = null"))
            .await;
        assert_eq!(fire(&store, at(START) + minutes(1)).await.jobs, 1);
        let scheduled: i64 = session.get("select last_job_id from posthouse.schedules").await;
        let whole = |id: i64| {
            format!(
                "select to_jsonb(j.*) - 'id' - 'run_at' - 'created_at' - 'lane_id' || (to_jsonb(l.*) - 'id' - 'ready_at' - 'awake_until' - 'naps')
                   || jsonb_build_object('payload', p.payload, 'trace', p.trace, 'window', (
                     select round(extract(epoch from d.expires_at - j.created_at)) from posthouse.dedupe d where d.job_id = j.id))
                 from posthouse.job j join posthouse.lane l on l.id = j.lane_id join posthouse.payload p on p.id = j.id where j.id = {id}"
            )
        };
        assert_eq!(session.get::<Value>(&whole(scheduled)).await, session.get::<Value>(&whole(by_hand)).await, "{job}");
        let due_now = format!("select run_at <= clock_timestamp() from posthouse.job where id = {scheduled}");
        assert!(session.get::<bool>(&due_now).await);
        session.run("delete from posthouse.schedule; delete from posthouse.schedule_run").await;
    }
    // What Rust declares arrives whole too.
    let client = Posthouse::new(Database::new(queue.url()).unwrap());
    let declared = NewJob::from_json("report", r#"{"n": 123456789012345678901234567890}"#).unwrap();
    let declared =
        declared.queue("reports").tenant("acme").priority(2).max_attempts(3).timeout(seconds(9)).gate("crm").tokens(5);
    let schedule =
        Schedule::new("s", "@daily", declared.clone().dedupe_key("k")).timezone("Asia/Tokyo").jitter(minutes(3));
    let schedule = schedule.catch_up(CatchUp::All).catch_up_most(4, minutes(2)).source("posthouse.toml");
    assert_eq!(client.set_schedule(&schedule).await.unwrap(), ScheduleChange::New);
    assert_eq!(client.set_schedule(&schedule).await.unwrap(), ScheduleChange::Same);
    let record = client.schedule("s").await.unwrap().unwrap();
    assert!(schedule.is_same(&record).unwrap(), "{record:?}");
    assert_eq!(
        session
            .get::<String>("select (job - 'payload')::text || (job -> 'payload')::text from posthouse.schedule")
            .await,
        "{\"kind\": \"report\", \"gates\": [\"crm\"], \"queue\": \"reports\", \"tenant\": \"acme\", \"tokens\": 5, \"priority\": 2, \
         \"dedupe_key\": \"k\", \"timeout_ms\": 9000.0, \"max_attempts\": 3}{\"n\": 123456789012345678901234567890}"
    );
    assert_eq!(
        (record.cron.as_str(), record.timezone.as_str(), record.catch_up),
        ("@daily", "Asia/Tokyo", CatchUp::All)
    );
    assert_eq!((record.catch_up_max, record.catch_up_over_ms, record.jitter_ms), (4, 120_000.0, 180_000.0));
    let refused = client.set_schedule(&Schedule::new("s", "@daily", declared.delay(seconds(1)))).await.unwrap_err();
    assert!(refused.to_string().contains("run_at and delay are for the schedule to say"), "{refused}");
}

#[tokio::test]
async fn what_cannot_be_is_refused_by_name() {
    let (queue, session) = Queue::with_session().await;
    for (arguments, expected) in [
        ("'', '@daily', '{\"kind\": \"k\"}'", "name: must not be empty"),
        ("'s', '* * * *', '{\"kind\": \"k\"}'", "cron: '* * * *' has not five fields"),
        ("'s', '0 * * * * *', '{\"kind\": \"k\"}'", "cron: '0 * * * * *' has not five fields"),
        ("'s', '* * * * $', '{\"kind\": \"k\"}'", "cron: '* * * * $' has a character that no field can have"),
        ("'s', null, '{\"kind\": \"k\"}'", "cron: "),
        ("'s', '@daily', null", "job: must be an object"),
        ("'s', '@daily', '[]'", "job: must be an object"),
        ("'s', '@daily', '{}'", "job: kind: must not be empty"),
        ("'s', '@daily', '{\"kind\": \"k\", \"delay_ms\": 1}'", "job: run_at and delay_ms are for the schedule"),
        ("'s', '@daily', '{\"kind\": \"k\", \"pri\": 1}'", "job: unknown field pri"),
        ("'s', '@daily', '{\"kind\": \"k\", \"priority\": \"high\"}'", "job: priority: "),
        (
            "'s', '@daily', jsonb_build_object('kind', 'k', 'payload', (select string_agg(md5(n::text), '') from generate_series(1, 80000) n))",
            "job: larger than 1 MiB",
        ),
        ("'s', '@daily', '{\"kind\": \"k\"}', 'Europe/Rom'", "timezone: there is no such time zone"),
        ("'s', '@daily', '{\"kind\": \"k\"}', null", "timezone: "),
        ("'s', '@daily', '{\"kind\": \"k\"}', catch_up => 'two'", "catch_up: 'two' is not skip, one or all"),
        ("'s', '@daily', '{\"kind\": \"k\"}', catch_up_max => 0", "catch_up_max: 0 is not between 1 and 1000"),
        ("'s', '@daily', '{\"kind\": \"k\"}', catch_up_over => '8 days'", "catch_up_over: must be"),
        ("'s', '@daily', '{\"kind\": \"k\"}', jitter => '-1 s'", "jitter: must be"),
    ] {
        let refusal = session.refused(&format!("select posthouse.set_schedule({arguments})")).await;
        assert_eq!(refusal.code, "PH001", "{arguments}: {}", refusal.message);
        assert!(refusal.message.starts_with(expected), "{arguments}: {}", refusal.message);
    }
    assert_eq!(session.count("posthouse.schedule").await, 0);
    for call in ["pause_schedule('s')", "resume_schedule('s')"] {
        let refusal = session.refused(&format!("select posthouse.{call}")).await;
        assert_eq!(
            (refusal.code.as_str(), refusal.message.as_str()),
            ("PH003", "schedule s: there is no such schedule")
        );
    }
    assert!(!session.get::<bool>("select posthouse.remove_schedule('s')").await);
    // Rust knows more of rules.
    let client = Posthouse::new(Database::new(queue.url()).unwrap());
    let refused = client.set_schedule(&Schedule::new("s", "0 0 30 2 *", job("k"))).await.unwrap_err();
    assert!(refused.is_invalid() && refused.to_string().contains("never due"), "{refused}");
}

#[tokio::test]
async fn a_rule_that_only_the_library_can_read_is_refused_when_it_is_looked_at() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    session.run("select posthouse.set_schedule('bad', '61 * * * *', '{\"kind\": \"k\"}')").await;
    session.run("select posthouse.set_schedule('good', '* * * * *', '{\"kind\": \"k\"}')").await;
    fire(&store, SystemTime::now()).await;
    let bad = stands(&session, "bad").await;
    assert!(bad["error"].as_str().unwrap().contains("out of bounds") && bad["next_at"].is_null(), "{bad}");
    assert!(stands(&session, "good").await["next_at"].is_string());
    assert_eq!(
        session.count("posthouse.alert_note where kind = 'schedule' and subject = 'bad' and not resolves").await,
        1
    );
    // It is not looked at again before somebody changes it.
    fire(&store, SystemTime::now() + minutes(60)).await;
    assert_eq!(session.count("posthouse.alert_note where kind = 'schedule' and not resolves").await, 1);
    session.run("select posthouse.set_schedule('bad', '1 * * * *', '{\"kind\": \"k\"}')").await;
    fire(&store, SystemTime::now()).await;
    let bad = stands(&session, "bad").await;
    assert!(bad["error"].is_null() && bad["next_at"].is_string(), "{bad}");
    assert_eq!(session.count("posthouse.alert_note where kind = 'schedule' and resolves").await, 1);
}

#[tokio::test]
async fn a_process_that_starts_again_and_again_sets_the_same_and_loses_no_tick() {
    let (queue, session) = Queue::with_session().await;
    begin(&session, "s", "*/10 * * * *", "").await;
    let set = "select posthouse.set_schedule('s', '*/10 * * * *', '{\"kind\": \"k\"}')";
    // Every three minutes, for forty.
    for minute in (0..=40).step_by(3) {
        assert_eq!(session.get::<String>(set).await, "same");
        fire(&store(&queue), at(START) + minutes(minute) + seconds(5)).await;
    }
    assert_eq!(ticks(&session, "s").await, ["01 00:10", "01 00:20", "01 00:30"]);
    assert_eq!(session.count("posthouse.job").await, 3);
    assert_eq!(stands(&session, "s").await["missed"], 0);
}

#[tokio::test]
async fn a_change_keeps_a_tick_that_is_due_and_begins_anew_after_it() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    let set = async |cron: &str, kind: &str| {
        let sql = format!("select posthouse.set_schedule('s', '{cron}', '{{\"kind\": \"{kind}\"}}')");
        session.get::<String>(&sql).await
    };
    assert_eq!(set("0 0 1 1 *", "a").await, "new");
    fire(&store, SystemTime::now()).await;
    let next = stands(&session, "s").await["next_at"].clone();
    assert!(next.is_string());
    // Another job, the same rule: the tick stays.
    assert_eq!(set("0 0 1 1 *", "b").await, "changed");
    assert_eq!(stands(&session, "s").await["next_at"], next);
    // Another rule: worked out anew.
    assert_eq!(set("0 0 2 1 *", "b").await, "changed");
    assert!(stands(&session, "s").await["next_at"].is_null());
    // A tick is due, and somebody changes rule and job before a sweep comes.
    session
        .run("update posthouse.schedule set next_at = date_trunc('second', clock_timestamp()) - interval '3 seconds'")
        .await;
    assert_eq!(set("0 0 3 1 *", "c").await, "changed");
    assert_eq!(fire(&store, SystemTime::now()).await.jobs, 1);
    assert_eq!(session.get::<String>("select kind from posthouse.jobs").await, "c");
    assert_eq!(
        session.get::<String>("select to_char(next_at at time zone 'UTC', 'MM-DD') from posthouse.schedule").await,
        "01-03"
    );
    // Worked out before the change: not fired.
    let (version, next): (i64, i64) = {
        let rows = session.rows("select version, extract(epoch from next_at)::bigint from posthouse.schedule").await;
        (rows[0].get(0), rows[0].get(1))
    };
    assert_eq!(set("0 0 3 1 *", "d").await, "changed");
    let fired: Option<Value> = session
        .get(&format!("select posthouse.fire_schedule('s', {version}, {next}, '{{{next}}}', 0, 0, {next} + 60)"))
        .await;
    assert_eq!(fired, None);
    assert_eq!(session.count("posthouse.job").await, 1);
}

#[tokio::test]
async fn ticks_that_nobody_saw_are_left_or_made_up_for_once_or_up_to_a_number() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    for n in 0..40 {
        begin(&session, &format!("one-{n:02}"), "* * * * *", "").await;
    }
    begin(&session, "skip", "* * * * *", ", catch_up => 'skip'").await;
    begin(&session, "skip-hourly", "30 * * * *", ", catch_up => 'skip'").await;
    begin(&session, "one-hourly", "30 * * * *", "").await;
    begin(&session, "all", "30 * * * *", ", catch_up => 'all', catch_up_max => 4, catch_up_over => '20 minutes'").await;
    fire(&store, at(START)).await;
    // Six hours later.
    let back = at(START) + minutes(360) + seconds(20);
    while fire(&store, back).await != Round::default() {}
    let sum = "select coalesce(sum(fired), 0)::text || ' fired, ' || coalesce(sum(missed), 0) || ' missed' from posthouse.schedules";
    for (which, expected) in [
        ("name like 'one-__'", "40 fired, 14360 missed"),
        ("name = 'skip'", "1 fired, 359 missed"),
        ("name = 'skip-hourly'", "0 fired, 6 missed"),
        ("name = 'one-hourly'", "1 fired, 5 missed"),
        ("name = 'all'", "4 fired, 2 missed"),
    ] {
        assert_eq!(session.get::<String>(&format!("{sum} where {which}")).await, expected, "{which}");
    }
    assert_eq!(ticks(&session, "one-00").await, ["01 06:00"]);
    assert_eq!(ticks(&session, "one-hourly").await, ["01 05:30"]);
    assert_eq!(ticks(&session, "all").await, ["01 02:30", "01 03:30", "01 04:30", "01 05:30"]);
    assert_eq!(session.count("posthouse.job").await, 40 + 1 + 1 + 4);
    // The first at once, the others spread.
    let dues: Vec<String> = session
        .list("select to_char(j.run_at at time zone 'UTC', 'HH24:MI:SS') from posthouse.schedule_runs r join posthouse.job j on j.id = r.job_id
               where r.schedule = 'all' order by r.tick")
        .await;
    assert_eq!(dues[1..], ["06:05:20", "06:10:20", "06:15:20"]);
    // And on time again.
    fire(&store, back + minutes(30)).await;
    assert_eq!(ticks(&session, "one-hourly").await, ["01 05:30", "01 06:30"]);
}

#[tokio::test]
async fn what_rests_misses_nothing() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    session.run("select posthouse.set_schedule('s', '* * * * *', '{\"kind\": \"k\"}', catch_up => 'all')").await;
    assert!(session.get::<bool>("select posthouse.pause_schedule('s', 'holidays')").await);
    assert!(!session.get::<bool>("select posthouse.pause_schedule('s', 'strike')").await);
    fire(&store, SystemTime::now() + minutes(600)).await;
    let resting = stands(&session, "s").await;
    assert_eq!(
        (&resting["paused_reason"], &resting["next_at"], &resting["fired"]),
        (&json!("strike"), &Value::Null, &json!(0))
    );
    assert!(session.get::<bool>("select posthouse.resume_schedule('s')").await);
    assert!(!session.get::<bool>("select posthouse.resume_schedule('s')").await);
    // Paused while a tick is due; resumed ten ticks later.
    session
        .run("update posthouse.schedule set next_at = date_trunc('minute', clock_timestamp()) - interval '10 minutes'")
        .await;
    session.run("select posthouse.pause_schedule('s'); select posthouse.resume_schedule('s')").await;
    fire(&store, SystemTime::now()).await;
    let going = stands(&session, "s").await;
    assert_eq!((&going["fired"], &going["missed"], &going["paused_reason"]), (&json!(0), &json!(0), &Value::Null));
    assert!(going["next_at"].is_string());
}

#[tokio::test]
async fn in_a_copy_that_nobody_has_adopted_nothing_fires() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    begin(&session, "s", "* * * * *", "").await;
    fire(&store, at(START)).await;
    session.run("select posthouse.disown()").await;
    fire(&store, at(START) + minutes(10)).await;
    assert_eq!(stands(&session, "s").await["fired"], json!(0));
    assert_eq!(session.count("posthouse.job").await, 0);
    session.run("select posthouse.adopt()").await;
    fire(&store, at(START) + minutes(10)).await;
    assert_eq!((&stands(&session, "s").await["fired"], session.count("posthouse.job").await), (&json!(1), 1));
}

#[tokio::test]
async fn jitter_follows_from_name_and_tick() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    begin(&session, "a", "* * * * *", ", jitter => '10 minutes', catch_up => 'all'").await;
    begin(&session, "b", "* * * * *", ", jitter => '10 minutes', catch_up => 'all'").await;
    // Due in the year of simulated time, or now: so that they wait, it is later.
    fire(&store, at(START) + minutes(1)).await;
    for n in 1..=50 {
        fire(&store, at(START) + minutes(n) + seconds(n % 3)).await;
    }
    let late = "select extract(epoch from j.run_at - r.tick)::float8 from posthouse.schedule_runs r join posthouse.job j on j.id = r.job_id where r.schedule = ";
    let (a, b): (Vec<f64>, Vec<f64>) = (
        session.list(&format!("{late}'a' order by tick")).await,
        session.list(&format!("{late}'b' order by tick")).await,
    );
    assert_eq!((a.len(), b.len()), (50, 50));
    assert!(a.iter().chain(&b).all(|late| (0.0..600.0).contains(late)), "{a:?} {b:?}");
    let spread = a.iter().fold((f64::MAX, f64::MIN), |(low, high), late| (low.min(*late), high.max(*late)));
    assert!(spread.0 < 120.0 && spread.1 > 480.0 && a != b, "{a:?} {b:?}");
    // The same whoever asks, at any time.
    let again: Vec<f64> = session
        .list("select extract(epoch from posthouse.jitter_of(s, extract(epoch from r.tick)::bigint))::float8
               from posthouse.schedule_run r join posthouse.schedule s on s.name = r.schedule where s.name = 'a' order by r.tick")
        .await;
    assert_eq!(a, again);
}

#[tokio::test]
async fn a_job_that_cannot_be_enqueued_is_told_and_comes_again() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    begin(&session, "fat", "*/5 * * * *", "").await;
    begin(&session, "slim", "*/5 * * * *", "").await;
    session
        .run("update posthouse.schedule set job = job || '{\"tokens\": 5000, \"gates\": [\"crm\"]}' where name = 'fat'")
        .await;
    session.run("select posthouse.set_gate('crm', tokens_per_minute => 1000)").await;
    let now = at(START) + minutes(5) + seconds(1);
    assert_eq!(fire(&store, now).await, Round { jobs: 1, missed: 0, more: false });
    let fat = stands(&session, "fat").await;
    assert!(fat["error"].as_str().unwrap().contains("more than gate 'crm' lets through") && fat["fired"] == 0, "{fat}");
    assert_eq!(session.count("posthouse.alert_note where kind = 'schedule' and subject = 'fat'").await, 1);
    // Not at once again.
    session.run("select posthouse.set_gate('crm', tokens_per_minute => 10000)").await;
    assert_eq!(fire(&store, now + seconds(9)).await.jobs, 0);
    assert_eq!(fire(&store, now + seconds(11)).await.jobs, 1);
    assert_eq!(ticks(&session, "fat").await, ["01 00:05"]);
    assert!(stands(&session, "fat").await["error"].is_null());
    assert_eq!(session.count("posthouse.alert_note where kind = 'schedule' and resolves").await, 1);
}

#[tokio::test]
async fn who_holds_a_dedupe_key_or_a_schedule_delays_no_other() {
    let (queue, session) = Queue::with_session().await;
    let (store, other) = (store(&queue), queue.session().await);
    for name in ["a-keyed", "b", "c-held"] {
        begin(&session, name, "*/5 * * * *", "").await;
    }
    session.run("update posthouse.schedule set job = job || '{\"dedupe_key\": \"x\"}' where name = 'a-keyed'").await;
    other.run("begin; select posthouse.enqueue(kind => 'k', dedupe_key => 'x')").await;
    other.run("update posthouse.schedule set job = job where name = 'c-held'").await;
    let now = at(START) + minutes(5) + seconds(1);
    let failed = fire_schedules_at(&store, now).await.unwrap_err();
    assert!(failed.to_string().contains("a-keyed"), "{failed}");
    assert_eq!(ticks(&session, "b").await, ["01 00:05"]);
    other.run("commit").await;
    // The key stands for the other's job.
    assert_eq!(fire(&store, now + seconds(2)).await.jobs, 1);
    let keyed: bool = session.get("select duplicate from posthouse.schedule_runs where schedule = 'a-keyed'").await;
    assert!(keyed);
    assert_eq!(ticks(&session, "c-held").await, ["01 00:05"]);
}

#[tokio::test]
async fn a_schedule_that_is_set_again_does_not_fire_the_same_tick_again() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    begin(&session, "s", "*/5 * * * *", "").await;
    let now = at(START) + minutes(5) + seconds(1);
    assert_eq!(fire(&store, now).await.jobs, 1);
    assert!(session.get::<bool>("select posthouse.remove_schedule('s')").await);
    fire(&store, now + minutes(5)).await;
    assert_eq!(session.count("posthouse.job").await, 1);
    begin(&session, "s", "*/5 * * * *", "").await;
    assert_eq!(fire(&store, now).await.jobs, 0);
    assert_eq!(fire(&store, now + minutes(5)).await.jobs, 1);
    assert_eq!(ticks(&session, "s").await, ["01 00:05", "01 00:10"]);
}

#[tokio::test]
async fn only_the_newest_ticks_are_kept() {
    let (queue, session) = Queue::with_session().await;
    let store = store(&queue);
    begin(&session, "s", "* * * * * *", ", catch_up => 'all', catch_up_max => 1000").await;
    for n in 1..=30 {
        fire(&store, at(START) + seconds(n * 50)).await;
    }
    assert_eq!(session.get::<i64>("select fired from posthouse.schedules").await, 1_500);
    let kept = session.count("posthouse.schedule_run").await;
    assert!((1_000..1_100).contains(&kept), "{kept}");
    assert_eq!(session.count("posthouse.schedule_run where tick > '2027-01-01 00:08:20+00'").await, 1_000);
}
