//! Isolation: roles with least rights, and tenants who log in to Postgres themselves. The SQL does it; this runs it in one
//! transaction, as a migration runs, and tries again where somebody holds a lock.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::{Client, IsolationLevel};

use super::connection::{Connected, connect};
use super::database::Database;
use super::locks::{Blocker, LOCK_WAIT, Tries, look, make_room, process_id};
use super::migrate::{LOCK, schema_status};
use crate::error::{Error, Result};

/// What `isolate` did or would do, and what to know about the owner of the schema.
#[derive(Debug, Clone, Serialize)]
pub struct Isolation {
    /// Whether it was on before.
    pub was_on: bool,
    /// The statements, in order. All of them can be run again.
    pub statements: Vec<String>,
    /// The role that owns the schema, as which the functions run.
    pub owner: String,
    /// The owner is a superuser: then so is every function that a tenant calls.
    pub owner_is_superuser: bool,
    /// The owner sees since when transactions of other roles are open, so that claims skip dead rows sooner.
    pub owner_sees_transactions: bool,
    /// Logins that are bound to one tenant, and members of a role that is for all: whoever granted that made a mistake.
    pub overpowered: Vec<String>,
}

const LOOK: &str = "select r.rolname::text, r.rolsuper, pg_has_role(r.oid, 'pg_read_all_stats', 'usage'), \
    array(select t.login::text from posthouse.tenant_login t join pg_roles l on l.rolname = t.login where not t.every_tenant \
      and exists (select from pg_roles g where g.rolname in ('posthouse_worker', 'posthouse_operate', 'posthouse_views') \
        and pg_has_role(l.oid, g.oid, 'member')) order by 1) \
    from pg_class c join pg_roles r on r.oid = c.relowner where c.oid = 'posthouse.lane'::regclass";

/// For how long [`isolate`] tries.
const PATIENCE: Duration = Duration::from_secs(600);
/// What to do when patience is over.
const BEGIN_AGAIN: &str = "Nothing was changed: end that transaction, or wait for its end, and try again";

/// Turn isolation on (`undo`: off). With `dry_run` nothing is changed. Needs the rights of the schema's owner, and to make the roles where
/// they are not there yet. Locks on tables in use are waited for 50 ms at most, then everybody else goes on and it is tried again, for
/// ten minutes.
pub async fn isolate(database: &Database, undo: bool, dry_run: bool) -> Result<Isolation> {
    isolate_telling(database, undo, dry_run, PATIENCE, |_, _| ()).await
}

/// The same with a patience of your own, and with somebody who hears for how long it has been tried and who is in the way.
pub async fn isolate_telling(
    database: &Database,
    undo: bool,
    dry_run: bool,
    patience: Duration,
    mut tell: impl FnMut(Duration, &[Blocker]),
) -> Result<Isolation> {
    let schema = schema_status(database).await?;
    schema.check()?;
    if !schema.functions_current {
        return Err(Error::schema("functions and views are of another posthouse; run `posthouse db migrate` first"));
    }
    let Connected { mut client, .. } = connect(&database.main, "isolate").await?;
    // A connection more is a convenience.
    let watcher = connect(&database.main, "isolate-watch").await.ok();
    let mut tries = Tries::new(patience, BEGIN_AGAIN);
    loop {
        let (pid, mut blockers) = (AtomicI32::new(0), Vec::new());
        let tried = tokio::select! {
            tried = attempt(&mut client, undo, dry_run, tries.vacuumed(), &pid) => tried,
            () = look(watcher.as_ref().map(|watcher| &watcher.client), &pid, &mut blockers) => Err(Error::schema("nobody looks any more")),
        };
        let error = match tried {
            Err(error) => error,
            tried => return tried,
        };
        if let Some(waited) = tries.failed("isolation", error, &blockers)? {
            tell(waited, &blockers);
        }
        tries.pause().await;
    }
}

/// One try. Whatever fails undoes all of it.
async fn attempt(
    client: &mut Client,
    undo: bool,
    dry_run: bool,
    vacuumed: &[String],
    pid: &AtomicI32,
) -> Result<Isolation> {
    let transaction = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    pid.store(process_id(&transaction).await?, Ordering::Relaxed);
    transaction.batch_execute(LOCK).await?;
    make_room(&transaction, vacuumed).await?;
    transaction.batch_execute(LOCK_WAIT).await?;
    let was_on = transaction.query_typed("select posthouse.is_isolated()", &[]).await?;
    let run = if undo { "select posthouse.end_isolation($1)" } else { "select posthouse.isolate($1)" };
    let run = transaction.query_typed(run, &[(&dry_run, tokio_postgres::types::Type::BOOL)]).await?;
    let statements = run.iter().map(|row| row.try_get(0)).collect::<std::result::Result<_, _>>()?;
    let looked = transaction.query_typed(LOOK, &[]).await?;
    transaction.commit().await?;
    let (Some(was_on), Some(now)) = (was_on.first(), looked.first()) else {
        return Err(Error::schema("Postgres answered nothing"));
    };
    Ok(Isolation {
        was_on: was_on.try_get(0)?,
        statements,
        owner: now.try_get(0)?,
        owner_is_superuser: now.try_get(1)?,
        owner_sees_transactions: now.try_get(2)?,
        overpowered: now.try_get(3)?,
    })
}
