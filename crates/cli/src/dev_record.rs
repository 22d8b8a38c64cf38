//! How other commands find the database of a running `posthouse dev`: a file with its URL, locked for as long as it runs, so
//! that a file left behind by a killed one is not believed.

use std::env;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

/// The record of this process; forgotten when dropped.
#[derive(Debug)]
pub(crate) struct DevRecord(File);

/// Where the record is: `$XDG_STATE_HOME/posthouse/dev`, by default under `~/.local/state`.
fn path() -> Option<PathBuf> {
    let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    Some(state.join("posthouse/dev"))
}

/// Record the URL of this process's database. `None`: another `dev` that runs is recorded already, or there is no home.
pub(crate) fn record(url: &str) -> io::Result<Option<DevRecord>> {
    let Some(path) = path() else { return Ok(None) };
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    // The URL holds a password: nobody else may read it.
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    if file.try_lock().is_err() {
        return Ok(None);
    }
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(url.as_bytes())?;
    Ok(Some(DevRecord(file)))
}

/// The URL of the database of a `dev` that runs.
pub(crate) fn running() -> Option<String> {
    let mut file = File::open(path()?).ok()?;
    // Whoever can lock it has found a file that nobody holds any more.
    if file.try_lock_shared().is_ok() {
        return None;
    }
    let mut url = String::new();
    file.read_to_string(&mut url).ok()?;
    Some(url).filter(|url| !url.is_empty())
}

impl Drop for DevRecord {
    fn drop(&mut self) {
        // Closing the file unlocks it, which alone makes it void.
        let _ = self.0.set_len(0);
    }
}
