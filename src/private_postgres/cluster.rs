//! The directory of a private cluster: who owns it, what is in it, and what its files tell.
//!
//! ```text
//! root/            0700, owned by the server's user
//!   data/          the cluster
//!   password       of the superuser, 0600
//!   port           of the last run
//!   postgres.log
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, chown};
use std::path::{Path, PathBuf};

use super::Error;
use super::binaries::Binaries;
use super::guard::{Guard, Launch};
use super::user::ServerUser;

/// The only user of a new cluster.
pub(super) const SUPERUSER: &str = "posthouse";
/// Below the numbers that systems hand out for outgoing connections, so that a restart finds its port free.
const PORTS: std::ops::RangeInclusive<u16> = 15_500..=32_000;
/// How much of a log an error shows.
const LOG_SHOWN_BYTES: u64 = 4_096;

#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) root: PathBuf,
    pub(super) temporary: bool,
    pub(super) user: Option<ServerUser>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The watchdog has removed it, unless there is none yet, or somebody killed it.
        if self.temporary {
            fs::remove_dir_all(&self.root).ok();
        }
    }
}

/// What a start that was killed may leave behind, and what a new disk has.
const NOT_IN_THE_WAY: [&str; 5] = ["password", "data.new", "postgres.log", "port", "lost+found"];

impl Cluster {
    /// Makes or opens the directory: the given one, or a new temporary one.
    pub(super) fn open(directory: Option<&Path>) -> Result<Self, Error> {
        let user = ServerUser::choose()?;
        let temporary = directory.is_none();
        let root = match directory {
            Some(directory) => std::path::absolute(directory).map_err(Error::io(format!("use {directory:?}")))?,
            None => std::env::temp_dir().join(format!("posthouse-pg-{}", uuid::Uuid::new_v4().simple())),
        };
        let cluster = Self { root, temporary, user };
        if let Some(parent) = cluster.root.parent() {
            cluster.check_reach(parent)?;
            fs::create_dir_all(parent).map_err(Error::io(format!("create {parent:?}")))?;
        }
        match fs::DirBuilder::new().mode(0o700).create(&cluster.root) {
            Ok(()) => cluster.give_away(&cluster.root)?,
            Err(error) if error.kind() == ErrorKind::AlreadyExists && !temporary => {}
            Err(error) => return Err(Error::io(format!("create {:?}", cluster.root))(error)),
        }
        // One that was there before may belong to somebody else.
        cluster.check_reach(&cluster.root)?;
        cluster.check_free()?;
        Ok(cluster)
    }

    /// Refuses a directory that holds files of others: a cluster made among them could replace some.
    fn check_free(&self) -> Result<(), Error> {
        if self.made_by().is_some() {
            return Ok(());
        }
        let cannot = || Error::io(format!("read {:?}", self.root));
        for entry in fs::read_dir(&self.root).map_err(cannot())? {
            let name = entry.map_err(cannot())?.file_name();
            if !NOT_IN_THE_WAY.iter().any(|ours| name == **ours) {
                return Err(Error::Occupied { directory: self.root.clone(), found: name.into() });
            }
        }
        Ok(())
    }

    pub(super) fn data(&self) -> PathBuf {
        self.root.join("data")
    }

    /// Refuses a path that the server's user cannot reach, before a program says so in its own words.
    pub(super) fn check_reach(&self, wanted: &Path) -> Result<(), Error> {
        let Some(user) = &self.user else {
            return Ok(());
        };
        match user.first_closed_directory(wanted) {
            None => Ok(()),
            Some(closed) => {
                Err(Error::ClosedDirectory { user: user.name.clone(), closed, wanted: wanted.to_path_buf() })
            }
        }
    }

    /// The major version that made the cluster, if there is one.
    pub(super) fn made_by(&self) -> Option<u32> {
        fs::read_to_string(self.data().join("PG_VERSION")).ok()?.trim().parse().ok()
    }

    /// Makes the cluster, with a new password.
    pub(super) fn initialise(&self, binaries: &Binaries, guard: &mut Guard) -> Result<String, Error> {
        let password = uuid::Uuid::new_v4().simple().to_string();
        let file = self.root.join("password");
        fs::remove_file(&file).ok();
        let mut writer = OpenOptions::new();
        let written = writer.write(true).create_new(true).mode(0o600).open(&file);
        written
            .and_then(|mut file| std::io::Write::write_all(&mut file, password.as_bytes()))
            .map_err(Error::io(format!("write {file:?}")))?;
        self.give_away(&file)?;
        // Made beside its place and renamed when whole: a killed initdb leaves a directory that looks finished.
        let half_made = self.root.join("data.new");
        if half_made.exists() {
            fs::remove_dir_all(&half_made).map_err(Error::io(format!("remove {half_made:?}")))?;
        }
        fs::create_dir(&half_made).map_err(Error::io(format!("create {half_made:?}")))?;
        self.give_away(&half_made)?;
        let program = binaries.directory.join("initdb");
        let (output, log_start) = self.open_log()?;
        let launch = Launch {
            program: &program,
            arguments: vec![
                "--no-sync".into(),
                "--no-instructions".into(),
                "--encoding=UTF8".into(),
                "--locale=C".into(),
                "--auth=scram-sha-256".into(),
                format!("--username={SUPERUSER}").into(),
                "--pwfile".into(),
                file.clone().into_os_string(),
                "--pgdata".into(),
                half_made.clone().into_os_string(),
            ],
            directory: &self.root,
            user: self.user.as_ref(),
            output,
        };
        let status = guard.spawn(launch).and_then(|mut child| child.wait());
        guard.forget_child();
        if !status.map_err(Error::io(format!("run {program:?}")))?.success() {
            return Err(Error::Initdb { program, directory: self.root.clone(), log: self.log_since(log_start) });
        }
        fs::rename(&half_made, self.data()).map_err(Error::io(format!("rename {half_made:?} to data")))?;
        Ok(password)
    }

    pub(super) fn read_password(&self) -> Result<String, Error> {
        let file = self.root.join("password");
        let text = fs::read_to_string(&file).map_err(Error::io(format!("read the password in {file:?}")))?;
        Ok(text.trim().to_owned())
    }

    /// The port of the last run if it is wanted and free, else any free one.
    pub(super) fn choose_port(&self, last_first: bool) -> Result<u16, Error> {
        let last = fs::read_to_string(self.root.join("port")).ok().and_then(|text| text.trim().parse().ok());
        let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        if let Some(port) = last.filter(|_| last_first).filter(is_free) {
            return Ok(port);
        }
        (0..1_000)
            .map(|_| fastrand::u16(PORTS))
            .find(is_free)
            .ok_or_else(|| Error::io("find a free port on 127.0.0.1")(ErrorKind::AddrInUse.into()))
    }

    pub(super) fn remember_port(&self, port: u16) -> Result<(), Error> {
        let file = self.root.join("port");
        fs::write(&file, port.to_string()).map_err(Error::io(format!("write {file:?}")))
    }

    /// Whether the server with this process id accepts connections; it says so on line 8 of its lock file.
    pub(super) fn is_ready(&self, server: u32) -> bool {
        let text = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
        let mut lines = text.lines();
        let pid = lines.next().and_then(|line| line.trim().parse().ok());
        pid == Some(server) && lines.nth(6).is_some_and(|line| line.trim() == "ready")
    }

    /// The log, and where in it the next run begins.
    pub(super) fn open_log(&self) -> Result<(File, u64), Error> {
        let path = self.root.join("postgres.log");
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path);
        let file = file.map_err(Error::io(format!("write {path:?}")))?;
        let start = file.metadata().map(|metadata| metadata.len()).unwrap_or(0);
        Ok((file, start))
    }

    /// The end of the log, from `start` on.
    pub(super) fn log_since(&self, start: u64) -> String {
        let read = || {
            let mut file = File::open(self.root.join("postgres.log"))?;
            let end = file.metadata()?.len();
            file.seek(SeekFrom::Start(start.max(end.saturating_sub(LOG_SHOWN_BYTES))))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            Ok::<_, std::io::Error>(String::from_utf8_lossy(&bytes).trim_end().to_owned())
        };
        read().unwrap_or_default()
    }

    fn give_away(&self, path: &Path) -> Result<(), Error> {
        let Some(user) = &self.user else {
            return Ok(());
        };
        chown(path, Some(user.uid), Some(user.gid)).map_err(Error::io(format!("give {path:?} to {}", user.name)))
    }
}
