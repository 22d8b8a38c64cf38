//! The arguments of `posthouse db`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::time;

pub(super) const LONG: &str = "Make, check and find the database schema.

Everything Posthouse has lives in the schema `posthouse` of the database.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse db migrate
  posthouse db status --json
  posthouse db doctor
  psql \"$(posthouse db url --show-password)\"";

#[derive(Debug, Subcommand)]
pub(crate) enum Db {
    /// Bring the schema up to date
    ///
    /// Applies the migrations that are missing, and renews functions and views. Safe to run from several processes at once and
    /// over and over, and while workers are at work. A schema newer than this binary is left alone.
    ///
    /// A lock on a table in use is waited for 50 milliseconds at most, then everybody else goes on and it is tried again later;
    /// stderr says who holds it.
    #[command(after_long_help = "EXAMPLES:
  posthouse db migrate
  posthouse db migrate --wait 1h
  posthouse db migrate --database-url postgres://owner@db.internal/app")]
    Migrate(DbMigrate),

    /// Show where the schema stands
    ///
    /// Shows the version of the schema, of this binary and of Postgres. Exit code 1 if this binary cannot work on it.
    #[command(after_long_help = "EXAMPLES:
  posthouse db status
  posthouse db status --json || posthouse db migrate")]
    Status,

    /// Find out what is wrong with the database, or soon will be
    ///
    /// Looks at settings, schema, partitions, indexes, jobs, sweeps, workers, the clock and poolers, and at what keeps dead rows from
    /// being removed: open and prepared transactions, replication slots, standbys. Says what was found, why it matters and what
    /// mends it; changes nothing. Exit code 1 if something is bad. Sees most as the owner of the schema with pg_read_all_stats.
    #[command(after_long_help = "EXAMPLES:
  posthouse db doctor
  posthouse db doctor --older-than 30s
  posthouse db doctor --json || page somebody")]
    Doctor(DbDoctor),

    /// Let the jobs of a copied database run here
    ///
    /// A database that was restored from a dump, or made from another as its template, does not let workers register: the jobs in it may
    /// run at the original too, and be paid for twice. This shows what is queued, asks, and lets them. Copies of files (base backups,
    /// snapshots of a disk) cannot be told from a failover: say so with --undo before workers are started on one.
    #[command(after_long_help = "EXAMPLES:
  posthouse db adopt --dry-run
  posthouse db adopt
  posthouse db adopt --yes --json
  posthouse db adopt --undo                     after a copy of files was made, before workers start")]
    Adopt(DbAdopt),

    /// Make roles with least rights, and let tenants log in to Postgres themselves
    ///
    /// Makes the roles posthouse_enqueue, posthouse_worker, posthouse_read and posthouse_operate, gives them what they need and nobody
    /// else anything, and turns on row level security: a login that is bound to a tenant enqueues for that tenant only and sees
    /// its jobs only. Needs the rights of the schema's owner, and to make roles. Safe to run over and over; `db migrate` keeps it up.
    ///
    /// A lock on a table in use is waited for 50 milliseconds at most, then everybody else goes on and it is tried again later;
    /// stderr says who holds it.
    #[command(after_long_help = "EXAMPLES:
  posthouse db isolate --dry-run
  posthouse db isolate
  posthouse db isolate --undo
  posthouse db isolate --dry-run | psql \"$SUPERUSER_URL\"    where the owner may not make roles

THEN, in psql:
  create role acme login password '...';
  grant posthouse_enqueue, posthouse_read to acme;
  select posthouse.bind_login('acme', 'acme');")]
    Isolate(DbIsolate),

    /// Print the URL of the database
    ///
    /// Prints the URL that all commands use: from --database-url, else from DATABASE_URL, else that of the running `posthouse dev`.
    #[command(after_long_help = "EXAMPLES:
  posthouse db url
  export DATABASE_URL=$(posthouse db url --show-password)
  psql \"$(posthouse db url --show-password)\"")]
    Url {
        /// Print the password as well
        #[arg(long)]
        show_password: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DbAdopt {
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
    /// Only show what is in it
    #[arg(long, conflicts_with = "yes")]
    pub(crate) dry_run: bool,
    /// Say that this database is a copy: no worker that starts runs jobs until it is adopted
    #[arg(long, conflicts_with_all = ["yes", "dry_run"])]
    pub(crate) undo: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DbIsolate {
    /// Print the statements and run none
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// The way back: rights, row level security and views as before; the roles stay, without rights
    #[arg(long)]
    pub(crate) undo: bool,
    /// Give up when a lock cannot be had for so long
    #[arg(long, value_name = "DURATION", value_parser = time::duration, default_value = "10m")]
    pub(crate) wait: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct DbMigrate {
    /// Give up when a lock cannot be had for so long
    #[arg(long, value_name = "DURATION", value_parser = time::duration, default_value = "10m")]
    pub(crate) wait: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct DbDoctor {
    /// Tell of transactions that hold back dead rows for longer; from twelve times that on they are bad [default: 5m]
    #[arg(long, value_name = "DURATION", value_parser = time::duration)]
    pub(crate) older_than: Option<Duration>,
    /// Tell of replication slots and standbys that hold back more transactions [default: 100000]
    #[arg(long, value_name = "N")]
    pub(crate) xids: Option<u32>,
    /// Tell of tables with more dead rows, if they have fewer live ones [default: 100000]
    #[arg(long, value_name = "N")]
    pub(crate) dead_rows: Option<u32>,
    /// Look at so many jobs of each sort one by one, the oldest first [default: 100000]
    #[arg(long, value_name = "N")]
    pub(crate) max_jobs: Option<u32>,
}
