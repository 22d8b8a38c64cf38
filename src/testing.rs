//! A database per test, on a private Postgres that the tests start themselves.
//!
//! ```no_run
//! use posthouse::testing::TestDatabase;
//!
//! # const SCHEMA: &str = "create table letter (id bigint)";
//! # async fn migrate(url: &str) -> Result<(), tokio_postgres::Error> { Ok(()) }
//! # async fn test() {
//! let database = TestDatabase::new(SCHEMA, migrate).await;
//! let client = database.connect().await;
//! # }
//! ```
//!
//! **One server a run.** `cargo test` runs the tests of a binary in one process, which starts the server when the first
//! test asks for it. `cargo nextest` runs every test in a process of its own: the first of them starts the server under
//! a file lock, and it lives as long as the runner. Either way it ends with the run, however the run ends.
//!
//! **One template a schema.** The first test makes the schema in a template database, all others copy it.
//!
//! The environment chooses the server:
//!
//! | Variable | Meaning |
//! |---|---|
//! | `POSTHOUSE_TEST_URL` | a running server of yours, with the right to create databases; nothing is started |
//! | `POSTHOUSE_TEST_PG_BIN` | the directory of the programs to start |
//! | `POSTHOUSE_TEST_PG_MAJOR` | the major version to start, packaged if this machine has none |
//!
//! These helpers panic where other code would return an error: a test that has no database has failed.

use std::fmt::{Display, Write};
use std::fs::OpenOptions;
use std::io::{Read, Seek, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use tokio_postgres::{Client, NoTls};

use crate::private_postgres::{Builder, PrivatePostgres};

/// A server for tests.
#[derive(Debug)]
pub struct TestCluster {
    /// The URL of its database `postgres`, as a superuser or one who may create databases.
    admin_url: String,
    server: Option<PrivatePostgres>,
}

impl TestCluster {
    /// The server that all tests of this run share; started by the first who asks. Blocks meanwhile.
    ///
    /// # Panics
    ///
    /// When no server can be started; the message says what to do.
    #[must_use]
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<TestCluster> = OnceLock::new();
        SHARED.get_or_init(|| {
            let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
            match (variable("POSTHOUSE_TEST_URL"), variable("NEXTEST_RUN_ID")) {
                (Some(admin_url), _) => Self { admin_url, server: None },
                (None, Some(run)) => Self::of_run(&run),
                (None, None) => Self::start(builder()),
            }
        })
    }

    /// A server of your own, for tests that crash it or change its settings; see
    /// [`Builder::setting`](crate::private_postgres::Builder::setting). Blocks until it runs.
    ///
    /// # Panics
    ///
    /// When the server cannot be started.
    #[must_use]
    pub fn dedicated(settings: &[(&str, &str)]) -> Self {
        Self::start(settings.iter().fold(builder(), |builder, (name, value)| builder.setting(*name, *value)))
    }

    /// The server itself, to stop, kill and restart it.
    ///
    /// # Panics
    ///
    /// When this is the shared cluster, which other tests need.
    #[must_use]
    pub fn server(&self) -> &PrivatePostgres {
        let Some(server) = &self.server else { panic!("the shared cluster is not yours to stop; use a dedicated one") };
        server
    }

    /// The URL of a database of this server.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        with_database(&self.admin_url, database)
    }

    /// A new database with the schema that `migrate` makes. `schema` is the text of it (all SQL files, say): its hash
    /// names the template, so that a changed schema never meets an old template.
    ///
    /// # Panics
    ///
    /// When the server cannot be reached or `migrate` fails.
    pub async fn database<E: Display>(
        &self,
        schema: &str,
        migrate: impl AsyncFnOnce(&str) -> Result<(), E>,
    ) -> TestDatabase {
        let admin = connect(&self.admin_url).await;
        let template = self.template(&admin, schema, migrate).await;
        let name = format!("test_{}", uuid::Uuid::new_v4().simple());
        run(&admin, &format!("create database {name} template {template}")).await;
        TestDatabase { url: self.url(&name), admin_url: self.admin_url.clone(), name }
    }

    /// Makes the template unless it is there, while others who need it wait.
    async fn template<E: Display>(
        &self,
        admin: &Client,
        schema: &str,
        migrate: impl AsyncFnOnce(&str) -> Result<(), E>,
    ) -> String {
        let hash = Sha256::digest(schema.as_bytes());
        let name = hash[..8].iter().fold("posthouse_template_".to_owned(), |mut name, byte| {
            write!(name, "{byte:02x}").ok();
            name
        });
        run(admin, &format!("select pg_advisory_lock(hashtext('{name}'))")).await;
        let finished = format!("select from pg_database where datname = '{name}' and datistemplate");
        if admin.query_opt(&finished, &[]).await.unwrap_or_else(|e| fail("look for the template", &e)).is_none() {
            run(admin, &format!("drop database if exists {name} with (force)")).await;
            run(admin, &format!("create database {name}")).await;
            migrate(&self.url(&name)).await.unwrap_or_else(|e| fail("make the schema of the template", &e));
            // A database that somebody is connected to cannot be copied.
            run(admin, &format!("alter database {name} is_template true allow_connections false")).await;
            run(admin, &format!("select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'"))
                .await;
        }
        run(admin, &format!("select pg_advisory_unlock(hashtext('{name}'))")).await;
        name
    }

    fn start(builder: Builder) -> Self {
        let server = builder.start().unwrap_or_else(|e| fail("start a Postgres for the tests", &e));
        Self { admin_url: server.url("postgres"), server: Some(server) }
    }

    /// The server of a run whose tests are processes. A file named after the run holds its URL; who finds it empty, or
    /// the server gone, starts one while the others wait for the file's lock.
    fn of_run(run: &str) -> Self {
        let run: String = run.chars().filter(char::is_ascii_alphanumeric).collect();
        let path = std::env::temp_dir().join(format!("posthouse-test-{run}"));
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = open.unwrap_or_else(|e| fail("open the file of this test run", &e));
        file.lock().unwrap_or_else(|e| fail("lock the file of this test run", &e));
        let mut admin_url = String::new();
        file.read_to_string(&mut admin_url).unwrap_or_else(|e| fail("read the file of this test run", &e));
        if !answers(&admin_url) {
            let server = builder().also_remove(&path).start();
            let server = server.unwrap_or_else(|e| fail("start a Postgres for the tests", &e));
            admin_url = server.url("postgres");
            let written =
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(admin_url.as_bytes()));
            written.unwrap_or_else(|e| fail("write the file of this test run", &e));
            // The runner is what started this process.
            let runner = std::os::unix::process::parent_id();
            server.live_as_long_as(runner).unwrap_or_else(|e| fail("leave the server to the test run", &e));
        }
        Self { admin_url, server: None }
    }
}

/// A database of one test. Dropped at its end, unless the test panics: then it stays and its URL is printed.
#[derive(Debug)]
pub struct TestDatabase {
    url: String,
    admin_url: String,
    name: String,
}

impl TestDatabase {
    /// A database on the shared server; see [`TestCluster::database`].
    ///
    /// # Panics
    ///
    /// When there is no server or `migrate` fails.
    pub async fn new<E: Display>(schema: &str, migrate: impl AsyncFnOnce(&str) -> Result<(), E>) -> Self {
        let cluster = tokio::task::spawn_blocking(TestCluster::shared).await;
        let cluster = cluster.unwrap_or_else(|e| fail("start a Postgres for the tests", &e));
        cluster.database(schema, migrate).await
    }

    /// Its URL, with the password in it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A new connection to it, driven by a task of its own.
    ///
    /// # Panics
    ///
    /// When the server cannot be reached.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await
    }
}

impl Drop for TestDatabase {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("kept the database of the failed test: {}", self.url);
            eprintln!("(it ends with the run; with POSTHOUSE_TEST_URL it stays on your server)");
            return;
        }
        let (admin_url, name) = (self.admin_url.clone(), self.name.clone());
        // Where the test has taken its server down there is nothing to drop.
        apart(async move {
            let (admin, connection) = tokio_postgres::connect(&admin_url, NoTls).await?;
            tokio::spawn(connection);
            admin.batch_execute(&format!("drop database if exists {name} with (force)")).await
        });
    }
}

/// The server for tests: no flush to disk, since only the server is ever crashed, never the machine.
fn builder() -> Builder {
    let builder = PrivatePostgres::builder().fsync(false).setting("max_connections", "300");
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    match (variable("POSTHOUSE_TEST_PG_BIN"), variable("POSTHOUSE_TEST_PG_MAJOR")) {
        (Some(directory), _) => builder.bin_dir(PathBuf::from(directory)),
        (None, Some(major)) => match major.parse() {
            Ok(major) => builder.major(major),
            Err(error) => {
                panic!("POSTHOUSE_TEST_PG_MAJOR must be a number like 15, not {major:?}: {error}")
            }
        },
        (None, None) => builder,
    }
}

/// Runs a future from code that may or may not be inside a runtime; `None` when it fails.
fn apart<T: Send + 'static>(
    work: impl Future<Output = Result<T, tokio_postgres::Error>> + Send + 'static,
) -> Option<T> {
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        runtime.block_on(work).ok()
    });
    thread.join().ok().flatten()
}

fn answers(url: &str) -> bool {
    let url = url.to_owned();
    !url.is_empty() && apart(async move { tokio_postgres::connect(&url, NoTls).await.map(drop) }).is_some()
}

async fn connect(url: &str) -> Client {
    let connected = tokio_postgres::connect(url, NoTls).await;
    let (client, connection) = connected.unwrap_or_else(|e| fail("connect to the Postgres of the tests", &e));
    tokio::spawn(connection);
    client
}

async fn run(client: &Client, sql: &str) {
    client.batch_execute(sql).await.unwrap_or_else(|e| fail(sql, &e));
}

fn fail<T>(what: &str, error: &dyn Display) -> T {
    panic!("cannot {what}: {error}")
}

/// Replaces the database in a URL, keeping its parameters.
fn with_database(url: &str, database: &str) -> String {
    let (address, parameters) = url.split_once('?').map_or((url, None), |(address, rest)| (address, Some(rest)));
    let authority = address.find("://").map_or(0, |at| at + 3);
    let end = address[authority..].find('/').map_or(address.len(), |at| authority + at);
    let parameters = parameters.map(|rest| format!("?{rest}")).unwrap_or_default();
    format!("{}/{database}{parameters}", &address[..end])
}

#[cfg(test)]
mod tests {
    use super::with_database;

    #[test]
    fn replaces_the_database_of_a_url() {
        assert_eq!(with_database("postgres://a:b@h:1/x", "y"), "postgres://a:b@h:1/y");
        assert_eq!(with_database("postgres://h", "y"), "postgres://h/y");
        assert_eq!(with_database("postgres://h/x?sslmode=disable", "y"), "postgres://h/y?sslmode=disable");
        assert_eq!(with_database("postgres:///x?host=/run", "y"), "postgres:///y?host=/run");
    }
}
