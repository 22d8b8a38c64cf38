//! What a private Postgres is to be like, before it is started.

use std::path::PathBuf;

use super::Error;

/// What a private Postgres is to be like; see [`PrivatePostgres::builder`](super::PrivatePostgres::builder).
#[derive(Debug, Clone)]
pub struct Builder {
    fsync: bool,
    settings: Vec<(String, String)>,
    pub(super) data_dir: Option<PathBuf>,
    pub(super) bin_dir: Option<PathBuf>,
    pub(super) major: Option<u32>,
    pub(super) leftovers: Vec<PathBuf>,
}

impl Builder {
    pub(super) fn new() -> Self {
        Self { fsync: true, settings: Vec::new(), data_dir: None, bin_dir: None, major: None, leftovers: Vec::new() }
    }

    /// Whether commits survive a crash of the machine (default: yes). Without, a crash of Postgres alone still loses
    /// nothing, and everything is faster.
    #[must_use]
    pub fn fsync(mut self, fsync: bool) -> Self {
        self.fsync = fsync;
        self
    }

    /// A setting of `postgresql.conf`, e.g. `("shared_buffers", "256MB")`; the last one of a name wins. Address, port
    /// and sockets cannot be set.
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.settings.push((name.into(), value.into()));
        self
    }

    /// Keeps the data in this directory, which is made if need be, and uses it again next time, with the same password
    /// and, when it is free, the same port. Default: a temporary directory that is removed at the end.
    #[must_use]
    pub fn data_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.data_dir = Some(directory.into());
        self
    }

    /// The directory with `postgres` and `initdb`. Default: `POSTHOUSE_PG_BIN`, then PATH, then the usual directories
    /// of Debian, Fedora, Alpine and Homebrew, newest first, then a packaged server.
    #[must_use]
    pub fn bin_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.bin_dir = Some(directory.into());
        self
    }

    /// A server of this major version only, from this machine or else packaged. Default: the first one found.
    #[must_use]
    pub fn major(mut self, major: u32) -> Self {
        self.major = Some(major);
        self
    }

    /// A file to be removed together with the server.
    #[cfg(feature = "testing")]
    pub(crate) fn also_remove(mut self, file: impl Into<PathBuf>) -> Self {
        self.leftovers.push(file.into());
        self
    }

    /// The settings as `-c name=value` arguments.
    pub(super) fn arguments(&self) -> Result<Vec<String>, Error> {
        let speed = [("fsync", "off"), ("full_page_writes", "off")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let mut arguments = Vec::new();
        for (name, value) in speed.iter().filter(|_| !self.fsync).chain(&self.settings) {
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '.') {
                return Err(Error::BadSetting { name: name.clone() });
            }
            arguments.extend(["-c".to_owned(), format!("{name}={value}")]);
        }
        Ok(arguments)
    }
}
