//! The arguments of `posthouse db`.

use clap::Subcommand;

pub(super) const LONG: &str = "Make, check and find the database schema.

Everything Posthouse has lives in the schema `posthouse` of the database.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse db migrate
  posthouse db status --json
  psql \"$(posthouse db url --show-password)\"";

#[derive(Debug, Subcommand)]
pub(crate) enum Db {
    /// Bring the schema up to date
    ///
    /// Applies the migrations that are missing, and renews functions and views. Safe to run from several processes at once and
    /// over and over. A schema newer than this binary is left alone.
    #[command(after_long_help = "EXAMPLES:
  posthouse db migrate
  posthouse db migrate --database-url postgres://owner@db.internal/app")]
    Migrate,

    /// Show where the schema stands
    ///
    /// Shows the version of the schema, of this binary and of Postgres. Exit code 1 if this binary cannot work on it.
    #[command(after_long_help = "EXAMPLES:
  posthouse db status
  posthouse db status --json || posthouse db migrate")]
    Status,

    /// Make roles with least rights, and let tenants log in to Postgres themselves
    ///
    /// Makes the roles posthouse_enqueue, posthouse_worker, posthouse_read and posthouse_operate, gives them what they need and nobody
    /// else anything, and turns on row level security: a login that is bound to a tenant enqueues for that tenant only and sees
    /// its jobs only. Needs the rights of the schema's owner, and to make roles. Safe to run over and over; `db migrate` keeps it up.
    #[command(after_long_help = "EXAMPLES:
  posthouse db isolate --dry-run
  posthouse db isolate
  posthouse db isolate --undo
  posthouse db isolate --dry-run | psql \"$SUPERUSER_URL\"    where the owner may not make roles

THEN, in psql:
  create role acme login password '...';
  grant posthouse_enqueue, posthouse_read to acme;
  select posthouse.bind_login('acme', 'acme');")]
    Isolate {
        /// Print the statements and run none
        #[arg(long)]
        dry_run: bool,
        /// The way back: rights, row level security and views as before; the roles stay, without rights
        #[arg(long)]
        undo: bool,
    },

    /// Print the URL of the database
    ///
    /// Prints the URL of the running `posthouse dev`, if there is one, else the one from --database-url or DATABASE_URL.
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
