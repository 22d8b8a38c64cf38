//! The schema: made, checked, found.

use std::path::PathBuf;

use posthouse::testing::TestDatabase;
use serde_json::json;

use crate::support::{Queue, answer, posthouse};

#[tokio::test]
async fn a_new_database_is_migrated_by_several_at_once() {
    let database = TestDatabase::new("", async |_| Ok::<_, std::io::Error>(())).await;
    let command = |arguments: &[&str]| {
        let mut command = posthouse();
        command.args(arguments).args(["--database-url", database.url()]);
        command
    };
    answer(&mut command(&["status"]), None).failed(1, &["posthouse db migrate"]);
    let before = answer(&mut command(&["db", "status", "--json"]), None).failed(1, &["posthouse db migrate"]);
    assert_eq!(before.json()["version"], 0);
    let runs: Vec<_> = (0..4)
        .map(|_| {
            let mut migrate = command(&["db", "migrate", "--json"]);
            std::thread::spawn(move || answer(&mut migrate, None).fine().json())
        })
        .collect();
    let runs: Vec<_> = runs.into_iter().map(|run| run.join().unwrap()).collect();
    let applied: usize = runs.iter().map(|run| run["applied"].as_array().unwrap().len()).sum();
    let known = runs[0]["version"].as_u64().unwrap();
    assert_eq!(applied as u64, known, "{runs:?}");
    let again = answer(&mut command(&["db", "migrate"]), None).fine().stdout;
    assert_eq!(again, format!("the schema is up to date (version {known})\n"));
    // As after the migration by another binary of the same version.
    database.connect().await.batch_execute("update posthouse.meta set value = 'other'").await.unwrap();
    let renewed = answer(&mut command(&["db", "migrate"]), None).fine().stdout;
    assert_eq!(renewed, format!("functions and views renewed\nthe schema is up to date (version {known})\n"));
    let after = answer(&mut command(&["db", "status", "--json"]), None).fine().json();
    assert_eq!((&after["version"], &after["functions_current"]), (&json!(known), &json!(true)));
    assert!(answer(&mut command(&["db", "status"]), None).fine().stdout.contains("Postgres "));
}

#[tokio::test]
async fn a_migration_says_who_holds_it_up() {
    let database = TestDatabase::new("", async |_| Ok::<_, std::io::Error>(())).await;
    let migrate = |wait: &str| {
        let mut command = posthouse();
        command.args(["db", "migrate", "--wait", wait, "--database-url", database.url()]);
        command
    };
    answer(&mut migrate("10s"), None).fine();
    let reader = database.connect().await;
    for sql in [
        "update posthouse.meta set value = 'older' where name = 'functions'",
        "set application_name = 'report'; begin; select count(*) from posthouse.jobs",
    ] {
        reader.batch_execute(sql).await.unwrap();
    }
    let refused = answer(&mut migrate("1s"), None)
        .failed(1, &["functions and views", "report, idle in transaction", "trying again"]);
    assert!(refused.stderr.contains("no lock within"), "{refused:?}");
    let waiting = std::thread::spawn({
        let mut command = migrate("60s");
        move || answer(&mut command, None)
    });
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    reader.batch_execute("commit").await.unwrap();
    let done = waiting.join().unwrap().fine();
    assert!(done.stdout.contains("functions and views renewed"), "{done:?}");
}

#[tokio::test]
async fn the_doctor_tells_what_is_wrong_and_how_to_mend_it() {
    let queue = Queue::new().await;
    let said = queue.run(&["db", "doctor", "--older-than", "1h"]);
    // The servers of tests do not flush to disk.
    assert!(said.code == 1 && said.stdout.contains("BAD     durability: fsync is off"), "{said:?}");
    assert!(said.stdout.contains("fix   alter system set fsync = 'on'") && said.stdout.contains(" bad, "), "{said:?}");
    assert!(said.stdout.lines().any(|line| line.starts_with("fine ") && line.contains("indexes")), "{said:?}");
    let json = queue.run(&["db", "doctor", "--json"]).json();
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(json["bad"].as_u64().unwrap() as usize, findings.iter().filter(|f| f["severity"] == "bad").count());
    assert!(findings.iter().any(|f| f["check"] == "durability" && f["subject"] == "fsync"), "{json}");
    assert!(json["fine"].as_array().unwrap().iter().any(|check| check == "claims"), "{json}");
    // One that cannot be reached is no finding, but an error.
    let mut far = posthouse();
    far.args(["db", "doctor", "--database-url", "postgres://u@127.0.0.1:1/d"]);
    answer(&mut far, None).failed(1, &["no connection"]);
}

#[test]
fn the_url_hides_its_password_unless_asked() {
    let run = |arguments: &[&str]| {
        let mut command = posthouse();
        command.env("DATABASE_URL", "postgres://me:sesame@h:5432/d").args(arguments);
        answer(&mut command, None).fine()
    };
    assert_eq!(run(&["db", "url"]).stdout, "postgres://me:***@h:5432/d\n");
    assert_eq!(run(&["db", "url", "--show-password"]).stdout, "postgres://me:sesame@h:5432/d\n");
    assert_eq!(run(&["db", "url", "--json"]).json(), json!({ "url": "postgres://me:***@h:5432/d", "from": "given" }));
}

#[test]
fn the_database_of_a_running_dev_is_found_and_one_left_behind_is_not() {
    let state = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("state-{}", std::process::id()));
    let run = |arguments: &[&str]| answer(posthouse().env("XDG_STATE_HOME", &state).args(arguments), None);
    run(&["db", "url"]).failed(2, &["DATABASE_URL"]);
    std::fs::create_dir_all(state.join("posthouse")).unwrap();
    let record = state.join("posthouse/dev");
    std::fs::write(&record, "postgres://me:sesame@127.0.0.1:1/d").unwrap();
    run(&["db", "url"]).failed(2, &["DATABASE_URL"]);
    let held = std::fs::File::open(&record).unwrap();
    held.lock().unwrap();
    let found = run(&["db", "url", "--json"]).fine().json();
    assert_eq!(found, json!({ "url": "postgres://me:***@127.0.0.1:1/d", "from": "dev" }));
    // What is given comes first, as for all commands.
    let given =
        answer(posthouse().env("XDG_STATE_HOME", &state).args(["db", "url", "--database-url", "postgres://h/d"]), None);
    assert_eq!(given.fine().stdout, "postgres://h/d\n");
    // Other commands go there by themselves.
    run(&["status"]).failed(1, &["no connection"]);
    drop(held);
    run(&["status"]).failed(2, &["DATABASE_URL"]);
    std::fs::remove_dir_all(&state).unwrap();
}

#[tokio::test]
async fn isolation_is_told_turned_on_and_off_again() {
    let database = TestDatabase::new("", async |_| Ok::<_, std::io::Error>(())).await;
    let run = |url: &str, arguments: &[&str]| {
        answer(posthouse().args(["db", "isolate"]).args(arguments).args(["--database-url", url]), None)
    };
    run(database.url(), &[]).failed(1, &["posthouse db migrate"]);
    answer(posthouse().args(["db", "migrate", "--database-url", database.url()]), None).fine();
    let plan = run(database.url(), &["--dry-run"]).fine();
    assert!(plan.stdout.lines().all(|line| line.ends_with(';')), "{}", plan.stdout);
    assert!(plan.stdout.contains("alter table posthouse.job enable row level security"), "{}", plan.stdout);
    let told = run(database.url(), &["--dry-run", "--json"]).fine().json();
    assert_eq!((&told["dry_run"], &told["on"], &told["was_on"]), (&json!(true), &json!(false), &json!(false)));

    // The plan, run by hand, is all that it takes.
    let client = database.connect().await;
    client.batch_execute(&plan.stdout).await.unwrap();
    let on = run(database.url(), &["--json"]).fine().json();
    assert_eq!((&on["on"], &on["was_on"]), (&json!(true), &json!(true)));
    let on = run(database.url(), &[]).fine();
    assert!(on.stdout.contains("posthouse.bind_login") && on.stderr.contains("superuser"), "{on:?}");

    // Who only enqueues.
    let login = format!("cli_{}", std::process::id());
    client
        .batch_execute(&format!(
            "create role {login} login password 'sesame'; grant posthouse_enqueue to {login}; select posthouse.bind_login('{login}', 'acme')"
        ))
        .await
        .unwrap();
    let theirs = format!("postgres://{login}:sesame@{}", database.url().rsplit_once('@').unwrap().1);
    let enqueue = |tenant: &str| {
        answer(posthouse().args(["enqueue", "k", "{}", "--tenant", tenant, "--database-url", &theirs]), None)
    };
    enqueue("acme").fine();
    let refused = enqueue("bolt").failed(1, &["may enqueue for tenant acme only"]);
    assert!(!refused.stderr.contains("the user that owns it"), "{refused:?}");
    run(&theirs, &[]).failed(1, &["permission denied", "--dry-run | psql"]);

    assert_eq!(run(database.url(), &["--undo", "--json"]).fine().json()["on"], false);
    run(database.url(), &["--undo"]).fine();
    answer(posthouse().args(["enqueue", "k", "{}", "--database-url", &theirs]), None).failed(1, &["permission denied"]);
    client.batch_execute(&format!("drop role {login}")).await.unwrap();
}
