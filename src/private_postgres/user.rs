//! Who the server runs as: ourselves, or an unprivileged user when we are root, since Postgres refuses root.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{User, geteuid};

use super::Error;

/// The unprivileged user that a server started by root runs as.
#[derive(Debug, Clone)]
pub(super) struct ServerUser {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl ServerUser {
    /// `None` when we are not root; else `postgres`, or `nobody` where there is no such user.
    pub(super) fn choose() -> Result<Option<Self>, Error> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        for name in ["postgres", "nobody"] {
            if let Ok(Some(user)) = User::from_name(name)
                && !user.uid.is_root()
            {
                return Ok(Some(Self { name: user.name, uid: user.uid.as_raw(), gid: user.gid.as_raw() }));
            }
        }
        Err(Error::NoServerUser)
    }

    /// The outermost directory on the way to `path` that this user may not enter.
    pub(super) fn first_closed_directory(&self, path: &Path) -> Option<PathBuf> {
        let mut directories: Vec<&Path> = path.ancestors().filter(|p| !p.as_os_str().is_empty()).collect();
        directories.reverse();
        directories.into_iter().find(|directory| self.may_not_enter(directory)).map(Path::to_path_buf)
    }

    fn may_not_enter(&self, directory: &Path) -> bool {
        let Ok(metadata) = std::fs::metadata(directory) else {
            return false;
        };
        let bit = if metadata.uid() == self.uid {
            0o100
        } else if metadata.gid() == self.gid {
            0o010
        } else {
            0o001
        };
        metadata.is_dir() && metadata.mode() & bit == 0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn names_the_directory_that_is_closed() {
        let base = std::env::temp_dir().join(format!("posthouse-user-{}", uuid::Uuid::new_v4().simple()));
        let inner = base.join("open");
        std::fs::create_dir_all(&inner).unwrap();
        let stranger = ServerUser { name: "stranger".into(), uid: 987_654, gid: 987_654 };
        std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(stranger.first_closed_directory(&inner), None);
        std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(stranger.first_closed_directory(&inner), Some(base.clone()));
        std::fs::remove_dir_all(&base).unwrap();
    }
}
