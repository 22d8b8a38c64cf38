//! Which database a command works on: `--database-url`, else `DATABASE_URL`, else the one of a running `posthouse dev`.

use std::io::{IsTerminal, Write};

use posthouse::store::{Database, Store, schema_status};

use crate::args::Global;
use crate::dev_record;
use crate::failure::{Failure, Result};

/// The URL of the database, or what to do if there is none.
pub(crate) fn url(global: &Global) -> Result<String> {
    if let Some(url) = global.database_url.as_deref().filter(|url| !url.trim().is_empty()) {
        return Ok(url.to_owned());
    }
    if let Some(url) = dev_record::running() {
        if std::io::stderr().is_terminal() {
            let _ = writeln!(std::io::stderr(), "using the database of the running `posthouse dev`");
        }
        return Ok(url);
    }
    Err(Failure::usage("no database: neither --database-url nor DATABASE_URL is set").hint(
        "export DATABASE_URL=postgres://user:password@host:5432/database\n\
         or start a Postgres for development with `posthouse dev`; other commands find it by themselves",
    ))
}

/// The database, without connecting.
pub(crate) fn database(global: &Global) -> Result<Database> {
    Ok(Database::new(&url(global)?)?)
}

/// A connection whose schema fits this binary.
pub(crate) async fn store(global: &Global) -> Result<Store> {
    let database = database(global)?;
    schema_status(&database).await?.check()?;
    Ok(database.store("cli"))
}
