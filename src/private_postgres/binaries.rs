//! A directory with the programs `postgres` and `initdb`, looked at: whether it is whole, and which version it holds.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest major version that Posthouse works with.
pub(super) const OLDEST_MAJOR: u32 = 14;

/// The version of a server, as `postgres --version` says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The major version, e.g. 15.
    pub major: u32,
    /// The minor version, e.g. 18; 0 for betas and release candidates.
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl Version {
    /// Reads `postgres (PostgreSQL) 15.18 (Debian 15.18-1)`, and `… 19beta2`.
    fn parse(line: &str) -> Option<Self> {
        let word = line.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
        let mut numbers = word.splitn(2, '.');
        let digits = |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse().ok();
        let major = digits(numbers.next()?)?;
        Some(Self { major, minor: numbers.next().and_then(digits).unwrap_or(0) })
    }
}

/// A directory that holds a server of a known version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binaries {
    pub(super) directory: PathBuf,
    pub(super) version: Version,
}

impl Binaries {
    /// Looks at one directory; a package's root is fine too.
    pub(super) fn at(directory: &Path) -> Result<Self, String> {
        let inner = [directory.to_path_buf(), directory.join("bin"), directory.join("pginstall/bin")];
        let found = inner.into_iter().find(|d| d.join("postgres").is_file() && d.join("initdb").is_file());
        let directory = found.ok_or("it lacks `postgres` or `initdb`")?;
        version_of(&directory.join("initdb"))?;
        let version = version_of(&directory.join("postgres"))?;
        if version.major < OLDEST_MAJOR {
            return Err(format!("it is PostgreSQL {version}"));
        }
        // Absolute, since the programs are run in another directory; and the real one, where the other programs are,
        // when PATH only held links.
        let real = directory.join("postgres").canonicalize().ok();
        let real = real.as_deref().and_then(Path::parent);
        let directory = match real.filter(|d| d.join("initdb").is_file()) {
            Some(real) => real.to_path_buf(),
            None => std::path::absolute(&directory).unwrap_or(directory),
        };
        Ok(Self { directory, version })
    }
}

/// Asks a program for its version, which also shows that it finds its libraries.
fn version_of(program: &Path) -> Result<Version, String> {
    let answer = Command::new(program).arg("--version").output();
    let answer = answer.map_err(|error| format!("{program:?} cannot be run: {error}"))?;
    let line = String::from_utf8_lossy(&answer.stdout);
    Version::parse(&line).filter(|_| answer.status.success()).ok_or_else(|| {
        let complaint = String::from_utf8_lossy(&answer.stderr);
        format!("{program:?} does not tell its version: {}{}", line.trim(), complaint.trim())
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn reads_versions() {
        let read = |line| Version::parse(line).map(|v| (v.major, v.minor));
        assert_eq!(read("postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"), Some((15, 18)));
        assert_eq!(read("postgres (PostgreSQL) 19beta2"), Some((19, 0)));
        assert_eq!(read("postgres"), None);
    }

    #[test]
    fn follows_links_to_the_real_directory() {
        let base = std::env::temp_dir().join(format!("posthouse-links-{}", uuid::Uuid::new_v4().simple()));
        let (real, links) = (base.join("real"), base.join("links"));
        for directory in [&real, &links] {
            std::fs::create_dir_all(directory).unwrap();
        }
        for program in ["postgres", "initdb"] {
            let script = "#!/bin/sh\necho 'postgres (PostgreSQL) 17.2'\n";
            std::fs::write(real.join(program), script).unwrap();
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(real.join(program), mode).unwrap();
            std::os::unix::fs::symlink(real.join(program), links.join(program)).unwrap();
        }
        let found = Binaries::at(&links).unwrap();
        let expected = real.canonicalize().unwrap();
        std::fs::remove_dir_all(&base).unwrap();
        assert_eq!((found.version.major, found.directory), (17, expected));
    }

    #[test]
    fn a_directory_without_a_server_is_named() {
        let problem = Binaries::at(Path::new("/")).unwrap_err();
        assert!(problem.contains("lacks `postgres`"), "{problem}");
    }
}
