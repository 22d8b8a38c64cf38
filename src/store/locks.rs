//! Strong locks on tables in use. Each is waited for 50 ms at most, since whoever comes later waits behind it. If that is too short,
//! everything is undone, and it is tried again later. Meanwhile another connection looks who holds the lock.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Row, Transaction};

use crate::error::{Error, Result};
use crate::pause::Pause;

/// Longest wait for a lock, and so the longest time for which others wait because of a try: most transactions are shorter.
pub(super) const LOCK_WAIT: &str = "set local lock_timeout = '50ms'";
/// Between two tries: at first, at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// How often somebody looks who holds the lock.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Between two messages about the same wait.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// Who holds a lock that a migration, or what makes roles and rights, needs.
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

/// Tries of what needs locks that others hold.
pub(super) struct Tries {
    patience: Duration,
    began: Instant,
    told: Option<Instant>,
    pause: Pause,
    vacuumed: Vec<String>,
    advice: &'static str,
}

impl Tries {
    /// For so long. `advice`: what to do if that is not enough.
    pub(super) fn new(patience: Duration, advice: &'static str) -> Self {
        let pause = Pause::new(PAUSES.0, PAUSES.1);
        Self { patience, began: Instant::now(), told: None, pause, vacuumed: Vec::new(), advice }
    }

    /// The tables that autovacuum was at in the last try, for [`make_room`].
    pub(super) fn vacuumed(&self) -> &[String] {
        &self.vacuumed
    }

    /// A try failed. Errors if nobody else is at fault, or patience is over; else says for how long it has been tried, if that is to be told
    /// now.
    pub(super) fn failed(&mut self, step: &str, error: Error, blockers: &[Blocker]) -> Result<Option<Duration>> {
        let waited = self.began.elapsed();
        if !is_in_the_way(&error) {
            return Err(error);
        } else if waited > self.patience {
            let who: Vec<_> = blockers.iter().map(ToString::to_string).collect();
            let who = if who.is_empty() { error.to_string() } else { format!("held by {}", who.join("; ")) };
            let seconds = waited.as_secs();
            return Err(Error::schema(format!("{step}: no lock within {seconds} s ({who}). {}", self.advice)));
        }
        self.vacuumed = blockers.iter().filter_map(|blocker| blocker.vacuums.clone()).collect();
        let is_news = self.told.is_none_or(|told| told.elapsed() >= TELL_EVERY);
        if is_news {
            self.told = Some(Instant::now());
        }
        Ok(is_news.then_some(waited))
    }

    /// Before the next one.
    pub(super) async fn pause(&mut self) {
        tokio::time::sleep(self.pause.next()).await;
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

/// The server process of a transaction.
pub(super) async fn process_id(transaction: &Transaction<'_>) -> Result<i32> {
    let rows = transaction.query_typed("select pg_catalog.pg_backend_pid()", &[]).await?;
    Ok(rows.first().map_or(Ok(0), |row| row.try_get(0))?)
}

/// Autovacuum gives way to whoever has waited for a lock for `deadlock_timeout` (a second, as it comes), which is longer than a
/// strong lock may be waited for. This one stands in the way of nothing else, so it may take its time; and while it is held, no
/// autovacuum begins.
pub(super) async fn make_room(transaction: &Transaction<'_>, vacuumed: &[String]) -> Result<()> {
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

/// Looks who blocks a server process, until it is dropped.
pub(super) async fn look(watcher: Option<&Client>, pid: &AtomicI32, blockers: &mut Vec<Blocker>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(watcher) = watcher else { continue };
        let pid = pid.load(Ordering::Relaxed);
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
