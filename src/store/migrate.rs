//! What the schema is made of (numbered migrations, forward only, then the functions and views whole), and where a database
//! stands. [`super::apply`] brings it up to date.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Serialize;
use tokio_postgres::Client;

use super::connection::{Connected, connect};
use super::database::Database;
use super::surroundings::{LIMITED_TRIES, may_be_to_blame_for};
use crate::error::{Error, Result};

/// A step of the schema.
#[derive(Debug, Clone, Copy)]
pub struct Migration {
    /// Its number, from 1 without gaps.
    pub version: i32,
    /// What it is about.
    pub name: &'static str,
    /// A binary that does not know it must not run on a schema that has it.
    pub breaking: bool,
    pub(super) sql: &'static str,
}

const MIGRATIONS: &[Migration] = &[
    Migration { version: 1, name: "jobs", breaking: true, sql: include_str!("../../sql/migrations/0001_jobs.sql") },
    Migration { version: 2, name: "gates", breaking: false, sql: include_str!("../../sql/migrations/0002_gates.sql") },
    Migration { version: 3, name: "usage", breaking: false, sql: include_str!("../../sql/migrations/0003_usage.sql") },
    Migration {
        version: 4,
        name: "alerts",
        breaking: false,
        sql: include_str!("../../sql/migrations/0004_alerts.sql"),
    },
    Migration {
        version: 5,
        name: "isolation",
        breaking: false,
        sql: include_str!("../../sql/migrations/0005_isolation.sql"),
    },
    Migration {
        version: 6,
        name: "retention",
        breaking: false,
        sql: include_str!("../../sql/migrations/0006_retention.sql"),
    },
    Migration {
        version: 7,
        name: "operate",
        breaking: false,
        sql: include_str!("../../sql/migrations/0007_operate.sql"),
    },
    Migration {
        version: 8,
        name: "guards",
        breaking: false,
        sql: include_str!("../../sql/migrations/0008_guards.sql"),
    },
    Migration {
        version: 9,
        name: "schedules",
        breaking: false,
        sql: include_str!("../../sql/migrations/0009_schedules.sql"),
    },
    Migration {
        version: 10,
        name: "gauges",
        breaking: false,
        sql: include_str!("../../sql/migrations/0010_gauges.sql"),
    },
];

const FUNCTIONS: &[&str] = &[
    include_str!("../../sql/functions/00_common.sql"),
    include_str!("../../sql/functions/10_enqueue.sql"),
    include_str!("../../sql/functions/11_enqueue_plain.sql"),
    include_str!("../../sql/functions/12_dedupe.sql"),
    include_str!("../../sql/functions/13_depth.sql"),
    include_str!("../../sql/functions/14_origin.sql"),
    include_str!("../../sql/functions/15_gates.sql"),
    include_str!("../../sql/functions/16_admit.sql"),
    include_str!("../../sql/functions/20_claim.sql"),
    include_str!("../../sql/functions/30_settle.sql"),
    include_str!("../../sql/functions/35_usage.sql"),
    include_str!("../../sql/functions/37_settle_gates.sql"),
    include_str!("../../sql/functions/38_admit_calls.sql"),
    include_str!("../../sql/functions/40_lease.sql"),
    include_str!("../../sql/functions/50_operate.sql"),
    include_str!("../../sql/functions/51_filter.sql"),
    include_str!("../../sql/functions/52_dead_letters.sql"),
    include_str!("../../sql/functions/55_explain.sql"),
    include_str!("../../sql/functions/60_sweep.sql"),
    include_str!("../../sql/functions/70_retention.sql"),
    include_str!("../../sql/functions/71_partitions.sql"),
    include_str!("../../sql/functions/72_schedules.sql"),
    include_str!("../../sql/functions/73_expiry.sql"),
    include_str!("../../sql/functions/75_alerts.sql"),
    include_str!("../../sql/functions/77_doctor.sql"),
    include_str!("../../sql/functions/78_gauges.sql"),
    include_str!("../../sql/functions/80_isolation.sql"),
    include_str!("../../sql/views.sql"),
];

/// Migrations and functions that belong together: those of a binary.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schema {
    pub(super) migrations: &'static [Migration],
    pub(super) functions: &'static [&'static str],
}

/// The ones of this binary.
pub(super) const OURS: Schema = Schema { migrations: MIGRATIONS, functions: FUNCTIONS };

impl Schema {
    /// The newest migration; 0: there is none.
    pub(super) fn version(&self) -> i32 {
        self.migrations.last().map_or(0, |m| m.version)
    }

    pub(super) fn functions_checksum(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.functions.hash(&mut hasher);
        format!("{:016x}", hasher.finish())
    }
}

/// The oldest Postgres that will do.
const POSTGRES_MIN: i32 = 140_000;

/// Where a database stands.
#[derive(Debug, Clone, Serialize)]
pub struct SchemaStatus {
    /// The newest migration in the database; 0: there is no schema.
    pub version: i32,
    /// The newest migration this binary knows.
    pub known: i32,
    /// Migrations in the database that this binary does not know and that break it.
    pub breaking: Vec<String>,
    /// The functions and views in the database are those of this binary.
    pub functions_current: bool,
    /// The version of Postgres, such as 150018.
    pub server_version: i32,
    /// The encoding of the database, which must be UTF8: no other can hold whatever a model answers.
    pub encoding: String,
}

impl SchemaStatus {
    /// An error that says what to do if this binary cannot work on this schema.
    pub fn check(&self) -> Result<()> {
        if self.server_version < POSTGRES_MIN {
            return Err(Error::schema(format!(
                "Postgres {} is too old: Posthouse needs 14 or newer",
                self.server_version / 10_000
            )));
        }
        if self.encoding != "UTF8" {
            return Err(Error::schema(format!(
                "the database's encoding is {}, which cannot hold every answer of a model; use a database that was made with \
                 `create database NAME encoding 'UTF8' template template0`",
                self.encoding
            )));
        }
        if !self.breaking.is_empty() {
            return Err(Error::schema(format!(
                "the schema is newer than this binary and would break it (migration {}); install a newer posthouse",
                self.breaking.join(", ")
            )));
        }
        if self.version < self.known {
            let what = if self.version == 0 { "has no Posthouse schema yet" } else { "has an older schema" };
            return Err(Error::schema(format!("the database {what}; run `posthouse db migrate`")));
        }
        Ok(())
    }
}

/// Everything that makes the schema, in order, as SQL: for reading, and for databases that are migrated by hand.
pub fn schema_sql() -> String {
    let mut sql = String::from("create schema if not exists posthouse;\n");
    for part in MIGRATIONS.iter().map(|m| m.sql).chain(FUNCTIONS.iter().copied()) {
        sql.push_str(part);
        sql.push('\n');
    }
    sql
}

/// Everything happens under this lock; two at once would otherwise race even for `create schema if not exists`. The timeouts of the
/// role or database are meant for statements that serve somebody.
pub(super) const LOCK: &str =
    "set transaction isolation level read committed; set local search_path = pg_catalog, pg_temp; set local row_security = on;
set local statement_timeout = 0; set local idle_in_transaction_session_timeout = 0; set local lock_timeout = '60s';
select pg_advisory_xact_lock(1346912000, 0);";

/// Where a database stands.
pub async fn schema_status(database: &Database) -> Result<SchemaStatus> {
    let Connected { client, .. } = connect(&database.main, "status").await?;
    let mut tries = 1;
    loop {
        match status(&client, &OURS).await {
            // Only looks, so it can look again.
            Err(error) if tries < LIMITED_TRIES && may_be_to_blame_for(&error) => tries += 1,
            status => return status,
        }
    }
}

impl SchemaStatus {
    /// An error if a binary cannot even migrate this database.
    pub(super) fn check_newer(&self) -> Result<()> {
        Self { version: self.known, ..self.clone() }.check()
    }
}

/// The search path may be anything here.
pub(super) async fn status(client: &Client, schema: &Schema) -> Result<SchemaStatus> {
    let row = client
        .query_typed(
            "select pg_catalog.current_setting('server_version_num')::int, pg_catalog.to_regclass('posthouse.migration') is not null,
               pg_catalog.current_setting('server_encoding')",
            &[],
        )
        .await?;
    let row = row.first().ok_or_else(|| Error::schema("Postgres answered nothing"))?;
    let known = schema.version();
    let mut status = SchemaStatus {
        version: 0,
        known,
        breaking: Vec::new(),
        functions_current: false,
        server_version: row.try_get(0)?,
        encoding: row.try_get(2)?,
    };
    if !row.try_get::<_, bool>(1)? {
        return Ok(status);
    }
    for row in
        client.query_typed("select version, name, breaking from posthouse.migration order by version", &[]).await?
    {
        status.version = row.try_get(0)?;
        if status.version > known && row.try_get(2)? {
            status.breaking.push(format!("{} {}", status.version, row.try_get::<_, &str>(1)?));
        }
    }
    let sum = client
        .query_typed("select value from posthouse.meta where name operator(pg_catalog.=) 'functions'", &[])
        .await?;
    status.functions_current = match sum.first() {
        Some(row) => row.try_get::<_, &str>(0)? == schema.functions_checksum(),
        None => false,
    };
    Ok(status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn migrations_are_numbered_without_gaps_and_functions_are_named_once() {
        assert!(MIGRATIONS.iter().map(|m| m.version).eq(1..=OURS.version()), "{MIGRATIONS:?}");
        assert!(
            FUNCTIONS.iter().enumerate().all(|(n, file)| !FUNCTIONS[..n].contains(file)),
            "a file stands twice in FUNCTIONS"
        );
    }
}
