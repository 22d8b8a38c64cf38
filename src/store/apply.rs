//! Bring a schema up to date while the queue is at work.
//!
//! A new database is made in one transaction. In one that is in use each migration is a transaction of its own, and the functions and
//! views are renewed in the last, which books all of them: until then it counts as the older schema, whose binaries go on with their
//! functions. So a migration only adds; and `meta` remembers how far the tables are, should this process die in between.
//!
//! A strong lock is waited for 50 ms at most, since whoever comes later waits behind it. If that is too short, everything of this
//! step is undone, and it is tried again later. Meanwhile another connection looks who holds the lock.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, IsolationLevel, Row, Transaction};

use super::connection::connect;
use super::database::Database;
use super::migrate::{LOCK, Migration, OURS, Schema, status};
use crate::error::{Error, Result};
use crate::pause::Pause;

/// Longest wait for a lock, and so the longest time for which others wait because of a try: most transactions are shorter.
const LOCK_WAIT: &str = "set local lock_timeout = '50ms'";
/// Between two tries: at first, at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How often somebody looks who holds the lock.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Between two messages about the same wait.
const TELL_EVERY: Duration = Duration::from_secs(5);
/// For how long [`migrate`] tries.
const PATIENCE: Duration = Duration::from_secs(600);

/// Who holds a lock that a migration needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Blocker {
    /// Its process id in Postgres; 0: a prepared transaction.
    pub pid: i32,
    /// Its role. `None`: not known.
    pub user: Option<String>,
    /// The name that the program gave itself.
    pub application: Option<String>,
    /// What it does: `active`, `idle in transaction`, … `None`: this role may not see it.
    pub state: Option<String>,
    /// For how many seconds its transaction has been open.
    pub open_seconds: Option<i64>,
    /// The beginning of its newest statement.
    pub query: Option<String>,
    /// The table that it vacuums by itself: such a process is asked to make room.
    #[serde(skip)]
    vacuums: Option<String>,
}

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
        let (mut client, _task) = connect(&self.database.main, "migrate").await?;
        status(&client, &self.schema).await?.check_newer()?;
        // A connection more is a convenience.
        let watcher = connect(&self.database.main, "migrate-watch").await.ok();
        loop {
            match self.step(&mut client, watcher.as_ref().map(|(client, _)| client)).await? {
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
        let (began, mut told) = (Instant::now(), None::<Instant>);
        let mut pause = Pause::new(PAUSES.0, PAUSES.1);
        let mut vacuumed = Vec::new();
        loop {
            let at = At::default();
            let mut blockers = Vec::new();
            let tried = tokio::select! {
                tried = attempt(client, &self.schema, &vacuumed, &at) => tried,
                () = look(watcher, &at, &mut blockers) => Err(Error::schema("nobody looks any more")),
            };
            let error = match tried {
                Err(error) if is_in_the_way(&error) => error,
                tried => return tried,
            };
            let (step, waited) = (at.step(&self.schema), began.elapsed());
            if waited > self.patience {
                return Err(gave_up(&step, waited, &blockers, &error));
            }
            if told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
                told = Some(Instant::now());
                (self.tell)(&Progress::Waiting { step, waited, blockers: blockers.clone() });
            }
            vacuumed = blockers.into_iter().filter_map(|b| b.vacuums).collect();
            tokio::time::sleep(pause.next()).await;
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

/// Others are at fault: a lock timeout, a deadlock, a row of the catalogue that somebody else changed at the same moment.
fn is_in_the_way(error: &Error) -> bool {
    match error.sqlstate() {
        Some("XX000") => error.to_string().starts_with("tuple concurrently"),
        Some(code) => code == "55P03" || error.is_rolled_back(),
        None => false,
    }
}

fn gave_up(step: &str, waited: Duration, blockers: &[Blocker], error: &Error) -> Error {
    let who: Vec<_> = blockers.iter().map(ToString::to_string).collect();
    let who = if who.is_empty() { error.to_string() } else { format!("held by {}", who.join("; ")) };
    Error::schema(format!(
        "{step}: no lock within {} s ({who}). Nothing of this step was done, and what was done before fits older binaries: \
         end that transaction, or wait for its end, and migrate again",
        waited.as_secs()
    ))
}

impl std::fmt::Display for Blocker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.pid == 0 {
            return write!(f, "a prepared transaction (see pg_prepared_xacts)");
        }
        write!(f, "pid {}", self.pid)?;
        for known in [&self.user, &self.application, &self.state].into_iter().flatten().filter(|text| !text.is_empty())
        {
            write!(f, ", {known}")?;
        }
        if let Some(seconds) = self.open_seconds {
            write!(f, ", for {seconds} s")?;
        }
        match &self.query {
            Some(query) => write!(f, ": {query}"),
            None => Ok(()),
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
    let pid = transaction.query_typed("select pg_catalog.pg_backend_pid()", &[]).await?;
    at.pid.store(pid.first().map_or(Ok(0), |row| row.try_get(0))?, Ordering::Relaxed);
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

/// Autovacuum gives way to whoever has waited for a lock for `deadlock_timeout` (a second, as it comes), which is longer than a
/// strong lock may be waited for. This one stands in the way of nothing else, so it may take its time; and while it is held, no
/// autovacuum begins.
async fn make_room(transaction: &Transaction<'_>, vacuumed: &[String]) -> Result<()> {
    if !vacuumed.is_empty() {
        transaction.batch_execute("set local lock_timeout = '5s'").await?;
    }
    for table in vacuumed {
        transaction.batch_execute(&format!("lock table {table} in share update exclusive mode")).await?;
    }
    Ok(())
}

const BLOCKERS: &str = "select b.pid, a.usename::text, a.application_name, a.state, \
       extract(epoch from clock_timestamp() - a.xact_start)::bigint, left(a.query, 200), \
       (select format('posthouse.%I', c.relname) from pg_locks l join pg_class c on c.oid = l.relation \
        where l.pid = a.pid and a.backend_type = 'autovacuum worker' and c.relkind = 'r' \
          and c.relnamespace = to_regnamespace('posthouse') limit 1) \
     from unnest(pg_blocking_pids($1)) b(pid) left join pg_stat_activity a on a.pid = b.pid";

/// Looks who blocks the try, for as long as it lasts.
async fn look(watcher: Option<&Client>, at: &At, blockers: &mut Vec<Blocker>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(watcher) = watcher else { continue };
        let pid = at.pid.load(Ordering::Relaxed);
        let Ok(rows) = watcher.query_typed(BLOCKERS, &[(&pid, Type::INT4)]).await else { continue };
        let found: Vec<Blocker> = rows.iter().filter_map(|row| blocker(row).ok()).collect();
        if !found.is_empty() {
            *blockers = found;
        }
    }
}

fn blocker(row: &Row) -> Result<Blocker> {
    Ok(Blocker {
        pid: row.try_get(0)?,
        user: row.try_get(1)?,
        application: row.try_get(2)?,
        state: row.try_get(3)?,
        open_seconds: row.try_get(4)?,
        query: row.try_get(5)?,
        vacuums: row.try_get(6)?,
    })
}

#[cfg(all(test, feature = "testing"))]
mod tests;
