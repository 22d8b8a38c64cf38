//! Bring a schema up to date while the queue is at work.
//!
//! A new database is made in one transaction. In one that is in use each migration is a transaction of its own, and the functions and
//! views are renewed in the last, which books all of them: until then it counts as the older schema, whose binaries go on with their
//! functions. So a migration only adds; and `meta` remembers how far the tables are, should this process die in between.
//!
//! A strong lock is waited for 50 ms at most: see `locks`.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use super::connection::{Connected, connect};
use super::database::Database;
use super::locks::{Blocker, LOCK_WAIT, Tries, look, make_room, process_id};
use super::migrate::{LOCK, Migration, OURS, Schema, status};
use crate::error::{Error, Result};

/// For how long [`migrate`] tries.
const PATIENCE: Duration = Duration::from_secs(600);
/// What to do when patience is over.
const BEGIN_AGAIN: &str = "Nothing of this step was done, and what was done before fits older binaries: \
    end that transaction, or wait for its end, and migrate again";

/// What a migration does, told while it does it.
#[derive(Debug)]
pub enum Progress {
    /// A step could not get its locks: it was undone, and is tried again.
    Waiting {
        /// The step, for people: `migration 7 operate`, `functions and views`.
        step: String,
        /// For how long it has been tried.
        waited: Duration,
        /// Who held a lock.
        blockers: Vec<Blocker>,
    },
    /// The tables of a migration are there.
    Applied(Migration),
    /// Functions and views are renewed.
    Renewed,
}

/// Bring the schema up to date, and try for up to ten minutes where somebody holds a lock. Safe to run from several processes at
/// once, and over and over. Answers with the migrations that were applied now.
pub async fn migrate(database: &Database) -> Result<Vec<Migration>> {
    migrate_telling(database, PATIENCE, |_| ()).await
}

/// The same with a patience of your own, and with somebody who is told what happens.
pub async fn migrate_telling(
    database: &Database,
    patience: Duration,
    tell: impl FnMut(&Progress),
) -> Result<Vec<Migration>> {
    Run { database, schema: OURS, patience, tell }.run().await
}

/// What a try came to.
#[derive(Debug)]
enum Step {
    /// Tables: there is more to do.
    Tables(Migration),
    /// The end: these are booked now, and functions are renewed or not.
    Booked { migrations: Vec<Migration>, renewed: bool },
}

struct Run<'a, F> {
    database: &'a Database,
    schema: Schema,
    patience: Duration,
    tell: F,
}

impl<F: FnMut(&Progress)> Run<'_, F> {
    async fn run(mut self) -> Result<Vec<Migration>> {
        let Connected { mut client, .. } = connect(&self.database.main, "migrate").await?;
        status(&client, &self.schema).await?.check_newer()?;
        // A connection more is a convenience.
        let watcher = connect(&self.database.main, "migrate-watch").await.ok();
        loop {
            match self.step(&mut client, watcher.as_ref().map(|watcher| &watcher.client)).await? {
                Step::Tables(migration) => (self.tell)(&Progress::Applied(migration)),
                Step::Booked { migrations, renewed } => {
                    if renewed {
                        (self.tell)(&Progress::Renewed);
                    }
                    return Ok(migrations);
                }
            }
        }
    }

    /// One step, tried until it gets its locks or patience is over.
    async fn step(&mut self, client: &mut Client, watcher: Option<&Client>) -> Result<Step> {
        let mut tries = Tries::new(self.patience, BEGIN_AGAIN);
        loop {
            let at = At::default();
            let mut blockers = Vec::new();
            let tried = tokio::select! {
                tried = attempt(client, &self.schema, tries.vacuumed(), &at) => tried,
                () = look(watcher, &at.pid, &mut blockers) => Err(Error::schema("nobody looks any more")),
            };
            let error = match tried {
                Err(error) => error,
                tried => return tried,
            };
            let step = at.step(&self.schema);
            if let Some(waited) = tries.failed(&step, error, &blockers)? {
                (self.tell)(&Progress::Waiting { step, waited, blockers });
            }
            tries.pause().await;
        }
    }
}

/// How far a try is: the server process that works on it, and the migration it is at.
#[derive(Default)]
struct At {
    pid: AtomicI32,
    version: AtomicI32,
}

/// In place of a version: functions and views.
const RENEWAL: i32 = -1;

impl At {
    fn step(&self, schema: &Schema) -> String {
        let version = self.version.load(Ordering::Relaxed);
        match schema.migrations.iter().find(|m| m.version == version) {
            Some(migration) => format!("migration {} {}", migration.version, migration.name),
            None if version == RENEWAL => "functions and views".to_owned(),
            None => "the turn of another migration".to_owned(),
        }
    }
}

const BOOKS: &str = "create schema if not exists posthouse;
create table if not exists posthouse.migration (
  version int primary key, name text not null, breaking boolean not null, applied_at timestamptz not null default clock_timestamp());
create table if not exists posthouse.meta (name text primary key, value text not null);";

/// One try of one step. Whatever fails undoes all of it.
async fn attempt(client: &mut Client, schema: &Schema, vacuumed: &[String], at: &At) -> Result<Step> {
    let transaction = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    at.pid.store(process_id(&transaction).await?, Ordering::Relaxed);
    transaction.batch_execute(LOCK).await?;
    make_room(&transaction, vacuumed).await?;
    transaction.batch_execute(LOCK_WAIT).await?;
    transaction.batch_execute(BOOKS).await?;
    let before = status(transaction.client(), schema).await?;
    before.check_newer()?;
    let tables = tables_at(&transaction).await?.max(before.version);
    let mut missing = schema.migrations.iter().filter(|m| m.version > tables);
    if before.version > 0
        && let Some(migration) = missing.next()
    {
        apply(&transaction, migration, at).await?;
        remember(&transaction, "tables", &migration.version.to_string()).await?;
        transaction.commit().await?;
        return Ok(Step::Tables(*migration));
    }
    for migration in missing {
        apply(&transaction, migration, at).await?;
    }
    let migrations: Vec<Migration> = schema.migrations.iter().copied().filter(|m| m.version > before.version).collect();
    // A newer schema has newer functions: an older binary that may still run on it leaves them as they are.
    let renewed = tables <= schema.version() && (!before.functions_current || !migrations.is_empty());
    if renewed {
        at.version.store(RENEWAL, Ordering::Relaxed);
        renew(&transaction, schema, &migrations).await?;
    }
    transaction.commit().await?;
    Ok(Step::Booked { migrations, renewed })
}

async fn apply(transaction: &Transaction<'_>, migration: &Migration, at: &At) -> Result<()> {
    at.version.store(migration.version, Ordering::Relaxed);
    Ok(transaction.batch_execute(migration.sql).await?)
}

/// The functions and views whole, and the books.
async fn renew(transaction: &Transaction<'_>, schema: &Schema, migrations: &[Migration]) -> Result<()> {
    for part in schema.functions {
        transaction.batch_execute(part).await?;
    }
    transaction
        .batch_execute(
            "revoke all on all functions in schema posthouse from public;
             select posthouse.make_partitions(0);
             -- New functions run as their caller and new tables have no policies until this was called again.
             select posthouse.isolate() where posthouse.is_isolated();
             delete from posthouse.meta where name = 'tables';",
        )
        .await?;
    for Migration { version, name, breaking, .. } in migrations {
        transaction
            .query_typed(
                "insert into posthouse.migration (version, name, breaking) values ($1, $2, $3)",
                &[(version, Type::INT4), (name, Type::TEXT), (breaking, Type::BOOL)],
            )
            .await?;
    }
    remember(transaction, "functions", &schema.functions_checksum()).await
}

async fn remember(transaction: &Transaction<'_>, name: &str, value: &str) -> Result<()> {
    let sql = "insert into posthouse.meta values ($1, $2) on conflict (name) do update set value = excluded.value";
    transaction.query_typed(sql, &[(&name, Type::TEXT), (&value, Type::TEXT)]).await?;
    Ok(())
}

/// The migration whose tables are there though it is not booked yet; 0: there is none such.
async fn tables_at(transaction: &Transaction<'_>) -> Result<i32> {
    let rows = transaction.query_typed("select value::int from posthouse.meta where name = 'tables'", &[]).await?;
    Ok(rows.first().map_or(Ok(0), |row| row.try_get(0))?)
}

#[cfg(all(test, feature = "testing"))]
mod tests;
