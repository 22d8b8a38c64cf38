//! A private Postgres: a server of our own, for development, demonstrations and tests.
//!
//! It is made from the PostgreSQL programs of this machine (or a packaged server where there are none), listens on
//! 127.0.0.1 only, on a free port, with a random password, and ends with the process that started it, however that
//! process ends. A server that somebody else started is never touched.
//!
//! ```no_run
//! use posthouse::private_postgres::PrivatePostgres;
//!
//! # fn main() -> Result<(), posthouse::private_postgres::Error> {
//! let server = PrivatePostgres::builder().fsync(false).start()?;
//! println!("PostgreSQL {} at {}", server.version(), server.url("postgres"));
//! # Ok(())
//! # }
//! ```
//!
//! All calls block, some for a second or two; inside async code use `tokio::task::spawn_blocking`.

mod binaries;
mod builder;
mod cluster;
mod error;
mod find;
mod guard;
pub mod packaged;
mod user;

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::Child;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use binaries::Binaries;
pub use binaries::Version;
pub use builder::Builder;
use cluster::Cluster;
pub use error::Error;
use guard::{Guard, Launch};

/// How long a server may take until it accepts connections, crash recovery included.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a server may take to stop before it is killed; a fast shutdown writes a checkpoint first.
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the start is tried when somebody took the port between our look and the server's.
const PORT_TRIES: u32 = 5;
/// How often the server's state is looked at while it starts or stops.
const POLL: Duration = Duration::from_millis(5);

/// A running private Postgres. Dropping it stops the server and removes its temporary directory; a watchdog does the
/// same when the process is killed.
pub struct PrivatePostgres {
    cluster: Cluster,
    binaries: Binaries,
    arguments: Vec<String>,
    password: String,
    port: u16,
    running: Mutex<Running>,
}

struct Running {
    server: Option<Child>,
    /// Taken only at the very end.
    guard: Option<Guard>,
}

impl Builder {
    /// Makes the cluster if there is none, starts the server and waits until it accepts connections.
    ///
    /// # Errors
    ///
    /// No usable programs, a directory that cannot be used, a server that does not start; the text says what to do.
    pub fn start(self) -> Result<PrivatePostgres, Error> {
        PrivatePostgres::start(self)
    }
}

impl PrivatePostgres {
    /// Starts with the defaults: durable, temporary, the newest server found.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::new()
    }

    fn start(builder: Builder) -> Result<Self, Error> {
        let arguments = builder.arguments()?;
        let cluster = Cluster::open(builder.data_dir.as_deref())?;
        let mut leftovers = builder.leftovers.clone();
        if cluster.temporary {
            leftovers.push(cluster.root.clone());
        }
        // A temporary server has nothing worth a checkpoint.
        let stop_signal = if cluster.temporary { "QUIT" } else { "INT" };
        let mut guard = Guard::new(stop_signal, &leftovers).map_err(Error::io("start a watchdog with `sh`"))?;
        let prepared = Self::prepare(&builder, &cluster, &mut guard);
        let (binaries, password) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                guard.finish();
                return Err(error);
            }
        };
        let running = Mutex::new(Running { server: None, guard: Some(guard) });
        let mut made = Self { cluster, binaries, arguments, password, port: 0, running };
        made.start_on_a_free_port()?;
        Ok(made)
    }

    fn prepare(builder: &Builder, cluster: &Cluster, guard: &mut Guard) -> Result<(Binaries, String), Error> {
        let made_by = cluster.made_by();
        let found = find::find(builder.bin_dir.as_deref(), made_by.or(builder.major));
        let binaries = match made_by {
            Some(made_by) => found.map_err(|error| Error::WrongVersion {
                directory: cluster.root.clone(),
                made_by,
                problem: error.to_string(),
            })?,
            None => found?,
        };
        cluster.check_reach(&binaries.directory)?;
        let password = match made_by {
            Some(_) => cluster.read_password()?,
            None => cluster.initialise(&binaries, guard)?,
        };
        Ok((binaries, password))
    }

    fn start_on_a_free_port(&mut self) -> Result<(), Error> {
        let mut tries = PORT_TRIES;
        loop {
            self.port = self.cluster.choose_port(tries == PORT_TRIES)?;
            tries -= 1;
            match self.launch(&mut self.lock()) {
                Err(Error::Start { log, .. }) if tries > 0 && log.contains("could not bind") => {}
                Err(error) => return Err(error),
                Ok(()) => return self.cluster.remember_port(self.port),
            }
        }
    }

    fn launch(&self, running: &mut Running) -> Result<(), Error> {
        let Some(guard) = running.guard.as_mut() else {
            return Ok(());
        };
        let mut arguments = vec![OsString::from("-D"), self.cluster.data().into_os_string()];
        arguments.extend(self.arguments.iter().map(OsString::from));
        // After everything a caller may have set: loopback only, no socket file whose path could be too long.
        let port = format!("port={}", self.port);
        for setting in ["listen_addresses=127.0.0.1", "unix_socket_directories=", &port] {
            arguments.extend(["-c".into(), setting.into()]);
        }
        let (output, log_start) = self.cluster.open_log()?;
        let program = self.binaries.directory.join("postgres");
        let launch = Launch {
            program: &program,
            arguments,
            directory: &self.cluster.root,
            user: self.cluster.user.as_ref(),
            output,
        };
        let server = guard.spawn(launch).map_err(Error::io(format!("run {program:?}")))?;
        let server = running.server.insert(server);
        let deadline = Instant::now() + START_TIMEOUT;
        let problem = loop {
            if self.cluster.is_ready(server.id()) {
                return Ok(());
            }
            match server.try_wait() {
                Ok(Some(status)) => break format!("ended while starting ({status})"),
                Ok(None) if Instant::now() < deadline => std::thread::sleep(POLL),
                Ok(None) => break format!("was not ready after {} s", START_TIMEOUT.as_secs()),
                Err(error) => break format!("cannot be watched: {error}"),
            }
        };
        end(running, Signal::SIGQUIT);
        let log = self.cluster.log_since(log_start);
        Err(Error::Start { directory: self.cluster.root.clone(), problem, log })
    }

    /// The URL of a database of this server, with the password in it. It does not have to exist yet; `postgres` does.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        let mut name = String::new();
        for byte in database.bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' | b'.' => name.push(char::from(byte)),
                other => name.push_str(&format!("%{other:02X}")),
            }
        }
        format!("postgres://{}:{}@127.0.0.1:{}/{name}", cluster::SUPERUSER, self.password, self.port)
    }

    /// The port on 127.0.0.1; it stays the same over [`restart`](Self::restart).
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The process id of the server, unless it is stopped.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.lock().server.as_ref().map(Child::id)
    }

    /// The version of the server.
    #[must_use]
    pub fn version(&self) -> Version {
        self.binaries.version
    }

    /// The directory of the server's programs.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.binaries.directory
    }

    /// The directory that holds the cluster (`data`), its log and its password.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.cluster.root
    }

    /// Stops the server like a crash (Postgres calls it an immediate shutdown): no checkpoint, every connection is cut,
    /// the next start recovers. The data stay.
    pub fn kill_immediate(&self) {
        end(&mut self.lock(), Signal::SIGQUIT);
    }

    /// Stops the server in order, cutting connections. The data stay.
    pub fn stop(&self) {
        end(&mut self.lock(), Signal::SIGINT);
    }

    /// Stops the server if it runs, and starts it again on the same port and data.
    ///
    /// # Errors
    ///
    /// [`Error::Start`] when the server does not come back.
    pub fn restart(&self) -> Result<(), Error> {
        let mut running = self.lock();
        end(&mut running, Signal::SIGINT);
        let mut tries = PORT_TRIES;
        loop {
            tries -= 1;
            match self.launch(&mut running) {
                // A connection of somebody else may use the number for a moment.
                Err(Error::Start { log, .. }) if tries > 0 && log.contains("could not bind") => {
                    std::thread::sleep(Duration::from_secs(1));
                }
                answer => return answer,
            }
        }
    }

    /// Lets the server live until the process `runner` ends, whatever becomes of us.
    #[cfg(feature = "testing")]
    pub(crate) fn live_as_long_as(self, runner: u32) -> Result<(), Error> {
        if let Some(guard) = self.lock().guard.as_mut() {
            guard.tie_to(runner).map_err(Error::io("tell the watchdog whom to wait for"))?;
        }
        // Neither stopped nor waited for: both are the watchdog's from here on.
        std::mem::forget(self);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for PrivatePostgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrivatePostgres")
            .field("version", &self.version())
            .field("port", &self.port)
            .field("directory", &self.cluster.root)
            .finish_non_exhaustive()
    }
}

impl Drop for PrivatePostgres {
    fn drop(&mut self) {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        end(&mut running, if self.cluster.temporary { Signal::SIGQUIT } else { Signal::SIGINT });
        if let Some(guard) = running.guard.take() {
            guard.finish();
        }
    }
}

/// Ends the server with a signal, and the hard way when it does not listen.
fn end(running: &mut Running, signal: Signal) {
    let Some(mut server) = running.server.take() else {
        return;
    };
    if let Ok(pid) = i32::try_from(server.id()) {
        kill(Pid::from_raw(pid), signal).ok();
    }
    let deadline = Instant::now() + STOP_TIMEOUT;
    while matches!(server.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            server.kill().ok();
            server.wait().ok();
        } else {
            std::thread::sleep(POLL);
        }
    }
    if let Some(guard) = running.guard.as_mut() {
        guard.forget_child();
    }
}
