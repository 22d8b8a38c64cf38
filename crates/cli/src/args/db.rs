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
