//! The programs under `examples/` do what they say, run as a user would.

use std::process::Command;

use crate::client::queue_database;

/// What a program prints that ends well.
fn said(program: &str, url: &str) -> String {
    // target/<profile>/deps/it-… → target/<profile>/examples/quickstart; `./test.sh` builds it, as does `cargo test`.
    let this = std::env::current_exe().unwrap();
    let program = this.parent().unwrap().parent().unwrap().join("examples").join(program);
    let output = Command::new(&program).env("DATABASE_URL", url).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn quickstart_runs_twice() {
    let database = queue_database().await;
    for _ in 0..2 {
        let said = said("quickstart", database.url());
        assert!(said.contains("attempt 1 for acme") && said.contains("is done: HELLO"), "{said}");
        assert!(said.contains("is failed: there is nothing to shout"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn gates_puts_calls_off_and_counts_what_they_used() {
    let database = queue_database().await;
    let said = said("gates", database.url());
    assert!(said.contains("gate crm: not now") && said.contains("ticket 6 answered in attempt 1"), "{said}");
    assert!(said.contains("6 done") && said.contains("0 retried"), "{said}");
    assert!(said.contains("model:example: 720 tokens in the last minute"), "{said}");
}
