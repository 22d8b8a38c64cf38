//! Isolation: roles with least rights, and tenants who log in to Postgres themselves. The SQL does it; this runs it in one
//! transaction, as a migration runs.

use serde::Serialize;

use super::connection::connect;
use super::database::Database;
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

/// Turn isolation on (`undo`: off). With `dry_run` nothing is changed. Needs the rights of the schema's owner, and to make
/// the roles where they are not there yet.
pub async fn isolate(database: &Database, undo: bool, dry_run: bool) -> Result<Isolation> {
    let schema = schema_status(database).await?;
    schema.check()?;
    if !schema.functions_current {
        return Err(Error::schema("functions and views are of another posthouse; run `posthouse db migrate` first"));
    }
    let (mut client, _task) = connect(&database.main, "isolate").await?;
    let transaction = client.transaction().await?;
    transaction.batch_execute(LOCK).await?;
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
