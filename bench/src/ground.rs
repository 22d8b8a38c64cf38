//! Where it is measured: a server, and a fresh database with the queue's schema for every measurement.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use posthouse::Posthouse;
use posthouse::private_postgres::PrivatePostgres;
use tokio_postgres::{Client, NoTls};

use crate::error::{Error, Result};

/// The private server's settings; all others are the defaults of Postgres, fsync and synchronous_commit among them.
const PRIVATE: [(&str, &str); 2] = [("shared_buffers", "512MB"), ("max_wal_size", "4GB")];
/// Lets statements be counted where a scenario asks for it; nothing is counted elsewhere. Not every installation has it.
const COUNTING: [(&str, &str); 2] =
    [("shared_preload_libraries", "pg_stat_statements"), ("pg_stat_statements.track", "none")];
/// The settings that a report tells.
const TOLD: [&str; 7] = [
    "autovacuum",
    "fsync",
    "full_page_writes",
    "max_wal_size",
    "shared_buffers",
    "synchronous_commit",
    "wal_compression",
];

/// The server. [`clear`](Self::clear) leaves it as it was found.
pub(crate) struct Ground {
    admin: Client,
    admin_url: String,
    server: Option<PrivatePostgres>,
    /// Names of what it makes begin with this.
    prefix: String,
    made: Mutex<Vec<String>>,
    count: AtomicU32,
}

/// A database for one measurement.
pub(crate) struct Scratch {
    pub(crate) name: String,
    pub(crate) url: String,
}

impl Ground {
    pub(crate) async fn new(database_url: Option<&str>) -> Result<Self> {
        let (admin_url, server) = match database_url {
            Some(url) => (url.to_owned(), None),
            None => {
                let server = start().await?;
                (server.url("postgres"), Some(server))
            }
        };
        let admin = connect(&admin_url).await?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        let ground = Self {
            admin,
            admin_url,
            server,
            prefix: format!("posthouse_bench_{now}_{}", std::process::id()),
            made: Mutex::default(),
            count: AtomicU32::new(0),
        };
        let prepared = ground.prepare().await;
        match prepared {
            Ok(()) => Ok(ground),
            Err(error) => {
                ground.clear().await;
                Err(error)
            }
        }
    }

    /// Makes the database that all others are copied from.
    async fn prepare(&self) -> Result<()> {
        let name = self.template();
        self.create(&name, "").await?;
        Ok(Posthouse::migrate(&with_database(&self.admin_url, &name)).await?)
    }

    fn template(&self) -> String {
        format!("{}_template", self.prefix)
    }

    /// A new database with the schema in it.
    pub(crate) async fn scratch(&self) -> Result<Scratch> {
        let name = format!("{}_{}", self.prefix, self.count.fetch_add(1, Ordering::Relaxed));
        self.create(&name, &format!("template {}", self.template())).await?;
        let url = with_database(&self.admin_url, &name);
        Ok(Scratch { name, url })
    }

    async fn create(&self, name: &str, how: &str) -> Result<()> {
        self.made().push(name.to_owned());
        Ok(self.admin.batch_execute(&format!("create database {name} {how}")).await?)
    }

    pub(crate) async fn drop_database(&self, name: &str) -> Result<()> {
        self.admin.batch_execute(&format!("drop database if exists {name} with (force)")).await?;
        self.made().retain(|made| made != name);
        Ok(())
    }

    /// One setting of the server.
    pub(crate) async fn setting(&self, name: &str) -> Result<String> {
        Ok(self.admin.query_one("select current_setting($1)", &[&name]).await?.get(0))
    }

    /// The settings that matter for the figures.
    pub(crate) async fn settings(&self) -> Result<BTreeMap<String, String>> {
        let mut settings = BTreeMap::new();
        for name in TOLD {
            settings.insert(name.to_owned(), self.setting(name).await?);
        }
        Ok(settings)
    }

    /// Drops every database that was made, and stops the private server.
    pub(crate) async fn clear(self) {
        if let Some(server) = self.server {
            // All of it goes with the server. Stopping blocks for some moments; a panic there changes nothing here.
            let _ = tokio::task::spawn_blocking(move || drop(server)).await;
            return;
        }
        let made = std::mem::take(&mut *self.made());
        for name in made {
            // The measurement is what counts; a server that is away cannot be tidied.
            let _ = self.drop_database(&name).await;
        }
    }

    fn made(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.made.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

async fn start() -> Result<PrivatePostgres> {
    let started = tokio::task::spawn_blocking(|| {
        let with = |settings: &[(&str, &str)]| {
            settings.iter().fold(PrivatePostgres::builder(), |builder, (name, value)| builder.setting(*name, *value))
        };
        with(&[PRIVATE, COUNTING].concat()).start().or_else(|_| with(&PRIVATE).start())
    });
    Ok(started.await.map_err(|error| Error::Stuck(format!("starting Postgres: {error}")))??)
}

/// A plain connection, driven by a task until its client is dropped.
pub(crate) async fn connect(url: &str) -> Result<Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// The same server, another database.
fn with_database(url: &str, database: &str) -> String {
    let Some(authority) = url.find("://").map(|at| at + 3) else {
        // A key-value string: the last one of a name wins.
        return format!("{url} dbname={database}");
    };
    let (address, parameters) = url.split_at(url.find('?').unwrap_or(url.len()));
    let end = address[authority..].find('/').map_or(address.len(), |at| authority + at);
    format!("{}/{database}{parameters}", &address[..end])
}

#[cfg(test)]
mod tests {
    use super::with_database;

    #[test]
    fn the_database_of_a_url_is_replaced() {
        assert_eq!(with_database("postgres://a:b@h:1/x", "y"), "postgres://a:b@h:1/y");
        assert_eq!(with_database("postgres://h", "y"), "postgres://h/y");
        assert_eq!(with_database("postgres://h/x?sslmode=disable", "y"), "postgres://h/y?sslmode=disable");
        assert_eq!(with_database("host=h dbname=x", "y"), "host=h dbname=x dbname=y");
    }
}
