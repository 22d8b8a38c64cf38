//! Everything but LISTEN through a transaction-mode pooler, with other clients on the same few server connections.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use posthouse::store::{Beat, Database, Settlement, Verdict};
use posthouse::{NewJob, Outcome, Posthouse};

use crate::client::queue_database;
use crate::harness::{SOON, wait_until};
use crate::worker_support::registered;

/// A PgBouncer in transaction mode before a server, on a port of its own.
pub(crate) struct PgBouncer {
    child: Child,
    port: u16,
    _directory: tempfile::TempDir,
}

impl PgBouncer {
    pub(crate) fn start(url: &str) -> Self {
        let server: tokio_postgres::Config = url.parse().unwrap();
        let password = String::from_utf8(server.get_password().unwrap().to_vec()).unwrap();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let directory = tempfile::tempdir().unwrap();
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={} user={} password={password}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 100\n\
             unix_socket_dir =\nlog_connections = 0\nlog_disconnections = 0\n",
            server.get_ports()[0],
            server.get_user().unwrap(),
        );
        let file = directory.path().join("pgbouncer.ini");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(program());
        if nix::unistd::Uid::effective().is_root() {
            let user = nix::unistd::User::from_name("nobody").unwrap().unwrap();
            nix::unistd::chown(directory.path(), Some(user.uid), None).unwrap();
            nix::unistd::chown(&file, Some(user.uid), None).unwrap();
            command.args(["-u", "nobody"]);
        }
        let child = command
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("pgbouncer: install the package `pgbouncer` (./test.sh does so on Debian)");
        Self { child, port, _directory: directory }
    }

    pub(crate) fn url(&self, url: &str) -> String {
        let database = url.rsplit('/').next().unwrap();
        format!("postgres://anyone@127.0.0.1:{}/{database}", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> &'static str {
    // Debian keeps it where only root's PATH looks.
    if std::path::Path::new("/usr/sbin/pgbouncer").exists() { "/usr/sbin/pgbouncer" } else { "pgbouncer" }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_call_works_through_a_transaction_mode_pooler_among_noisy_neighbours() {
    let database = queue_database().await;
    let pooler = PgBouncer::start(database.url());
    let url = pooler.url(database.url());
    wait_until(SOON, "the pooler answers", async || Database::new(&url).unwrap().store("probe").ping().await.is_ok())
        .await;

    // Four clients that keep both server connections busy with other statements.
    let stop = Arc::new(AtomicBool::new(false));
    let noise: Vec<_> = (0..4)
        .map(|n: i32| {
            let store = Database::new(&url).unwrap().store("noise");
            let (stop, queue) = (stop.clone(), Posthouse::new(store.database().clone()));
            tokio::spawn(async move {
                let mut calls = 0;
                while !stop.load(Ordering::Relaxed) {
                    let job = queue.enqueue_job(NewJob::new("noise", &n).unwrap().queue("noise")).await.unwrap();
                    let record = queue.job(job.id).await.unwrap().unwrap();
                    assert_eq!(
                        (record.kind.as_str(), record.payload.unwrap().get()),
                        ("noise", n.to_string().as_str())
                    );
                    calls += 1;
                }
                calls
            })
        })
        .collect();

    let queue = Posthouse::connect(&url).await.unwrap();
    let store = queue.database().store("test");
    let worker = registered(&store, Duration::from_secs(600), &["a"]).await;
    for round in 1..=50 {
        let sent: Vec<_> = (0..4).map(|n| NewJob::new("a", &(round * 10 + n)).unwrap()).collect();
        let ids: Vec<i64> = queue.enqueue_many(&sent).await.unwrap().iter().map(|e| e.id).collect();
        let claimed = store.claim(worker, round, 10, 0).await.unwrap();
        assert_eq!(claimed.iter().map(|j| j.id).collect::<Vec<_>>(), ids);
        assert!(claimed.iter().zip(&sent).all(|(c, _)| c.payload.get().parse::<i64>().unwrap() / 10 == round));
        let held = claimed.iter().map(|j| (j.id, j.fence)).collect();
        let pulse =
            store.heartbeat(worker, &Beat { mark: round, oldest: round, held, with_list: false }).await.unwrap();
        assert!(!pulse.unwrap().mismatch);
        let outcomes: Vec<_> = claimed.iter().map(|j| Settlement::new(j.id, j.fence, Outcome::done(&round))).collect();
        assert!(store.settle(worker, &outcomes).await.unwrap().iter().all(|s| s.verdict == Verdict::Applied));
        store.tidy(None).await.unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    for task in noise {
        assert!(task.await.unwrap() > 0, "there was no noise");
    }
}
