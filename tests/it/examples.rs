//! The programs under `examples/` do what they say, run as a user would.

use std::process::Command;

use crate::client::queue_database;

#[tokio::test(flavor = "multi_thread")]
async fn quickstart_runs_twice() {
    let database = queue_database().await;
    // target/<profile>/deps/it-… → target/<profile>/examples/quickstart; `./test.sh` builds it, as does `cargo test`.
    let this = std::env::current_exe().unwrap();
    let program = this.parent().unwrap().parent().unwrap().join("examples/quickstart");
    for _ in 0..2 {
        let output = Command::new(&program).env("DATABASE_URL", database.url()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains("attempt 1 for acme") && said.contains("is done: HELLO"), "{said}");
        assert!(said.contains("is failed: there is nothing to shout"), "{said}");
    }
}
