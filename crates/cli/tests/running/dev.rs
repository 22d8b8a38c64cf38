//! `dev`: other commands find its database, and it ends in order.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::processes::{Folder, Running, eventually};
use crate::support::{answer, posthouse};

#[test]
fn other_commands_find_it_while_it_runs() {
    let folder = Folder::new("dev");
    let state = folder.file("state");
    let temporary = Folder::new("dev-temporary");
    let mut dev = posthouse();
    dev.args(["dev", "--json"]).env("XDG_STATE_HOME", &state).env("TMPDIR", temporary.path());
    let mut dev = Running::start(&mut dev);
    let told: Value = serde_json::from_str(&dev.line("database_url")).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = posthouse();
        answer(command.args(arguments).env("XDG_STATE_HOME", &state), None)
    };
    assert_eq!(run(&["db", "url", "--show-password"]).fine().stdout.trim(), told["database_url"].as_str().unwrap());
    run(&["enqueue", "summarize", r#"{"text":"It works. Really."}"#]).fine();
    let provider = told["provider_url"].as_str().unwrap();
    let said = run(&["work", "--until-empty", "--provider-url", provider, "--model", "sim"]).fine();
    assert!(said.stdout.contains("job 1 done"), "{said:?}");
    let job = run(&["job", "show", "1", "--json"]).fine().json();
    assert!(job["result"]["text"].as_str().unwrap().starts_with("It works. ["), "{job}");

    dev.signal(Signal::SIGINT);
    assert_eq!(dev.ended().code(), Some(0));
    temporary.is_left_empty();
    run(&["job", "list"]).failed(2, &["DATABASE_URL", "posthouse dev"]);
}

#[test]
fn a_directory_is_kept_for_the_next_time() {
    let folder = Folder::new("dev-kept");
    let start = || {
        let mut dev = posthouse();
        dev.args(["dev", "--json", "--data-dir", &folder.file("data")]).env("XDG_STATE_HOME", folder.file("state"));
        Running::start(&mut dev)
    };
    let list = || {
        let mut command = posthouse();
        answer(command.args(["job", "list", "--json"]).env("XDG_STATE_HOME", folder.file("state")), None)
    };
    let mut dev = start();
    dev.line("database_url");
    let mut enqueue = posthouse();
    answer(enqueue.args(["enqueue", "k", "{}"]).env("XDG_STATE_HOME", folder.file("state")), None).fine();
    dev.signal(Signal::SIGKILL);
    dev.ended();
    eventually("its Postgres ends", || crate::processes::processes_of(folder.path()).is_empty());
    list().failed(2, &["no database"]);

    let mut dev = start();
    dev.line("database_url");
    assert_eq!(list().fine().json()[0]["kind"], "k");
    dev.signal(Signal::SIGTERM);
    assert_eq!(dev.ended().code(), Some(0));
}
