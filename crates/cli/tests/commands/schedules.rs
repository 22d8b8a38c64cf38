//! Schedules: set, shown, rested, removed; declared in a file; rules tried out without a database.

use serde_json::{Value, json};

use crate::support::{Queue, answer, file, posthouse};

/// Lets a tick be due just now, and a process fire it.
async fn fire(queue: &Queue, name: &str) {
    queue
        .sql(&format!("update posthouse.schedule set next_at = date_trunc('second', clock_timestamp()) - interval '1 second' where name = '{name}'"))
        .await;
    let database = posthouse::store::Database::new(queue.url()).unwrap();
    posthouse::sweep::fire_schedules_at(&database.store("test"), std::time::SystemTime::now()).await.unwrap();
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn a_rule_can_be_tried_out_without_a_database() {
    let next = |arguments: &[&str]| answer(posthouse().args(["schedule", "next"]).args(arguments), None);
    let said = next(&["30 2 * * *", "--timezone", "Europe/Rome", "--after", "2027-03-27T00:00:00Z", "--count", "3"]);
    assert_eq!(said.fine().stdout, "2027-03-27 02:30 +01:00\n2027-03-28 03:00 +02:00\n2027-03-29 02:30 +02:00\n");
    let said = next(&["0 0 29 2 *", "--after", "2027-12-31T00:00:00Z", "--count", "2", "--json"]).fine().json();
    assert_eq!(said[1], json!({"at": "2032-02-29T00:00:00Z", "local": "2032-02-29 00:00 +00:00"}));
    next(&["0 0 30 2 *"]).failed(2, &["'0 0 30 2 *' is never due"]);
    next(&["* * 0 * *"]).failed(2, &["day of the month: '0'", "allowed are 1 to 31"]);
    next(&["* * * * *", "--timezone", "Mars"]).failed(2, &["there is no time zone 'Mars'"]);
}

const SET: [&str; 10] = [
    "schedule",
    "set",
    "digest",
    "0 0 1 1 *",
    "digest",
    r#"{"of":"yesterday"}"#,
    "--timezone",
    "Europe/Rome",
    "--tenant",
    "acme",
];

#[tokio::test]
async fn what_is_set_arrives_whole_and_may_be_set_again() {
    let queue = Queue::new().await;
    let said = queue.run(&SET).fine().stdout;
    assert!(said.starts_with("schedule digest (new): next at 20") && said.ends_with("-01-01 00:00 +01:00\n"), "{said}");
    assert!(queue.run(&SET).fine().stdout.starts_with("schedule digest (as it was): next at "));
    let job = "--queue q --priority -2 --max-attempts 3 --timeout 5m --gate crm --tokens 70 --dedupe-key d";
    let rest = "--jitter 0s --catch-up all --catch-up-max 3 --json";
    let more: Vec<&str> = SET.into_iter().chain(job.split(' ')).chain(rest.split(' ')).collect();
    let record = queue.run(&more).fine().json();
    assert_eq!(
        record["job"],
        json!({"kind": "digest", "payload": {"of": "yesterday"}, "tenant": "acme", "queue": "q", "priority": -2, "max_attempts": 3,
               "timeout_ms": 300_000.0, "gates": ["crm"], "tokens": 70, "dedupe_key": "d"})
    );
    let (catch_up, most, timezone) = (&record["catch_up"], &record["catch_up_max"], &record["timezone"]);
    assert_eq!((catch_up, most, timezone), (&json!("all"), &json!(3), &json!("Europe/Rome")));
    for (arguments, word) in [
        (&["s", "0 0 30 2 *", "k"][..], "never due"),
        (&["s", "61 * * * *", "k"], "minute: '61'"),
        (&["s", "@daily", "k", "{"], "not valid JSON"),
        (&["s", "@daily", "k", "--timezone", "Europe/Rom"], "no time zone 'Europe/Rom'"),
        (&["s", "@daily", "k", "--jitter", "8d"], "jitter: must be between"),
        (&["s", "@daily", "k", "--jitter", "99999999999y"], "jitter: must be between"),
        (&["s", "@daily", "k", "--catch-up-max", "0"], "catch_up_max: 0"),
        (&["", "@daily", "k"], "name: must not be empty"),
        (&["s", "@daily", ""], "kind: must not be empty"),
    ] {
        let arguments: Vec<_> = ["schedule", "set"].iter().chain(arguments).copied().collect();
        queue.run(&arguments).failed(2, &[word]);
    }
}

#[tokio::test]
async fn next_ticks_and_the_last_with_its_job_are_shown() {
    let queue = Queue::new().await;
    assert!(queue.run(&["schedule", "list"]).fine().stderr.contains("posthouse schedule set NAME CRON KIND"));
    queue.run(&SET).fine();
    fire(&queue, "digest").await;
    let table = queue.run(&["schedule", "list"]).fine().stdout;
    let lines: Vec<&str> = table.lines().collect();
    let header = ["SCHEDULE", "CRON", "TIMEZONE", "KIND", "NEXT", "IN", "LAST", "JOB", "STATE", "MISSED"];
    assert_eq!(words(lines[0]), header);
    assert!(lines[1].contains("0 0 1 1 *") && lines[1].contains("+01:00") && lines[1].contains("queued"), "{table}");
    let listed = queue.run(&["schedule", "list", "--json"]).fine().json();
    assert_eq!(listed[0]["job"].get("payload"), None, "{listed}");
    assert_eq!((listed[0]["upcoming"].as_array().unwrap().len(), &listed[0]["last_job_state"]), (5, &json!("queued")));
    let shown = queue.run(&["schedule", "show", "digest", "--json"]).fine().json();
    assert_eq!(shown["runs"][0]["job_id"], listed[0]["last_job_id"]);
    let (state, of) = (&shown["runs"][0]["state"], &shown["job"]["payload"]["of"]);
    assert_eq!((state, of), (&json!("queued"), &json!("yesterday")));
    let shown = queue.run(&["schedule", "show", "digest"]).fine().stdout;
    assert!(
        shown.contains("cron       0 0 1 1 * (Europe/Rome)") && shown.contains("fired      1, missed 0"),
        "{shown}"
    );
}

#[tokio::test]
async fn a_schedule_rests_goes_on_and_is_removed() {
    let queue = Queue::new().await;
    queue.run(&SET).fine();
    let said = queue.run(&["schedule", "pause", "digest", "--reason", "holidays"]).fine().stdout;
    assert_eq!(said, "schedule digest rests; `posthouse schedule resume digest` lets it go on\n");
    assert!(queue.run(&["schedule", "show", "digest"]).fine().stdout.contains(": holidays"));
    assert!(queue.run(&["schedule", "list"]).fine().stdout.contains("rests"));
    for (command, expected) in [
        ("resume", "schedule digest goes on\n"),
        ("resume", "schedule digest did not rest\n"),
        ("remove", "schedule digest is removed; its jobs stay\n"),
    ] {
        assert_eq!(queue.run(&["schedule", command, "digest"]).fine().stdout, expected);
    }
    let words = ["schedule digest: there is no such schedule", "posthouse schedule list"];
    for command in ["show", "pause", "resume", "remove"] {
        queue.run(&["schedule", command, "digest"]).failed(1, &words);
    }
}

#[tokio::test]
async fn a_file_declares_schedules_and_removes_none() {
    let queue = Queue::new().await;
    let both = "[schedules.a]\ncron = '@daily'\nkind = 'k'\npayload = { n = 1 }\n[schedules.b]\ncron = '@hourly'\nkind = 'k'\n";
    let config = file("schedules.toml", both);
    let path = config.to_str().unwrap();
    let apply = ["schedule", "apply", "--config", path];
    assert_eq!(queue.run(&apply).fine().stdout, "schedule a (new)\nschedule b (new)\n");
    fire(&queue, "a").await;
    let next = queue.texts("select next_at::text from posthouse.schedule order by name").await;
    assert_eq!(queue.run(&apply).fine().stdout, "schedule a (as it was)\nschedule b (as it was)\n");
    assert_eq!(queue.texts("select next_at::text from posthouse.schedule order by name").await, next);
    // Taken out of the file, and another changed.
    std::fs::write(&config, "[schedules.a]\ncron = '@weekly'\nkind = 'k'\n").unwrap();
    let mut work = queue.command(&["work", "--exec", "k=true", "--until-empty", "--config", path]);
    let said = answer(&mut work, None).fine();
    assert!(
        said.stderr.contains("the database has other schedules than") && said.stderr.contains(" for a; they hold"),
        "{said:?}"
    );
    assert!(
        said.stderr.contains("schedule b does not stand in")
            && said.stderr.contains("`posthouse schedule remove b` ends it"),
        "{said:?}"
    );
    assert_eq!(queue.texts("select cron from posthouse.schedule order by name").await, ["@daily", "@hourly"]);
    queue.run(&["schedule", "set", "by-hand", "@yearly", "k"]).fine();
    let dry = [&apply[..], &["--dry-run"]].concat();
    let said = queue.run(&dry).fine();
    let others = "schedule b (not in the file, stays)\nschedule by-hand (not in the file, stays)\n";
    assert_eq!(said.stdout, format!("schedule a (changed)\n{others}nothing was changed\n"));
    assert!(said.stderr.contains("`posthouse schedule remove b` ends it"), "{said:?}");
    let said = queue.run(&[&dry[..], &["--json"]].concat()).fine().json();
    assert_eq!(said[0], json!({"name": "a", "change": "changed"}));
    assert_eq!(said[2], json!({"name": "by-hand", "change": "not_in_file"}));
    queue.run(&["schedule", "remove", "by-hand"]).fine();
    assert_eq!(queue.texts("select cron from posthouse.schedule order by name").await, ["@daily", "@hourly"]);
    let said = queue.run(&apply).fine();
    assert_eq!(said.stdout, "schedule a (changed)\n");
    assert!(said.stderr.contains("schedule b does not stand in"), "{said:?}");
    // A worker sets what is not there at all.
    queue.run(&["schedule", "remove", "a"]).fine();
    answer(&mut queue.command(&["work", "--exec", "k=true", "--until-empty", "--config", path]), None).fine();
    assert_eq!(queue.texts("select cron from posthouse.schedule order by name").await, ["@weekly", "@hourly"]);
    let declared: Value = queue.run(&["schedule", "show", "a", "--json"]).fine().json();
    assert!(declared["source"].as_str().unwrap().ends_with("schedules.toml"), "{declared}");
    std::fs::write(&config, "[schedules.a]\ncron = '@weekly'\nkind = ''\n").unwrap();
    queue.run(&apply).failed(1, &["schedules.a: job: kind: must not be empty"]);
    queue.run(&dry).failed(1, &["schedules.a: job: kind: must not be empty"]);
    std::fs::write(&config, "[schedules.a]\ncron = '60 * * * *'\nkind = 'k'\n").unwrap();
    queue.run(&apply).failed(1, &["schedules.a.cron: minute: '60'"]);
}
