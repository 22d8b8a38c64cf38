//! What tests need to cause trouble and to wait for its end: a faulty wire, programs to kill, conditions with a deadline.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// How long a test waits for what should happen at once; generous, since machines that test are busy.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// Waits until the condition holds; fails the test, naming what it waited for, when the time is over.
pub(crate) async fn wait_until(within: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !condition().await {
        assert!(Instant::now() < deadline, "waited {within:?} in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// What is wrong with a wire at the moment.
#[derive(Debug, Clone, Default)]
struct Faults {
    /// Grows to cut every connection that is open now.
    generation: u64,
    refuse: bool,
    stall: bool,
    stall_answers: bool,
    delay: Duration,
    cut: Option<Cut>,
    /// Sets off `stall_answers` when it comes from the client.
    stall_at: Option<Vec<u8>>,
}

/// When a connection is cut: at the first bytes from the client that contain the marker.
#[derive(Debug, Clone)]
struct Cut {
    marker: Vec<u8>,
    /// Whether the server still gets the bytes, and answers, before nobody gets the answer.
    after_answer: bool,
}

/// A TCP proxy in front of Postgres that can go wrong on demand.
pub(crate) struct FaultProxy {
    port: u16,
    faults: watch::Sender<Faults>,
    cuts: watch::Receiver<usize>,
    accepting: tokio::task::JoinHandle<()>,
}

impl FaultProxy {
    /// Starts a faultless proxy to the server of this URL.
    pub(crate) async fn start(url: &str) -> Self {
        let (_, server, _) = split_url(url);
        let server = server.to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (faults, seen) = watch::channel(Faults::default());
        let (cut, cuts) = watch::channel(0);
        let accepting = tokio::spawn({
            let faults = faults.clone();
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    if seen.borrow().refuse {
                        continue;
                    }
                    let wire = Wire { faults: faults.clone(), seen: seen.clone(), cuts: cut.clone() };
                    tokio::spawn(wire.run(client, server.clone()));
                }
            }
        });
        Self { port, faults, cuts, accepting }
    }

    /// The same URL, by way of the proxy.
    pub(crate) fn url(&self, url: &str) -> String {
        let (before, _, after) = split_url(url);
        format!("{before}127.0.0.1:{}{after}", self.port)
    }

    /// Lets the server have the first client bytes that contain the marker, waits for its whole answer, and cuts the
    /// connection instead of passing it on: what was asked is done, and the client does not know. Happens once.
    pub(crate) fn lose_answer_to(&self, marker: impl AsRef<[u8]>) {
        self.arm(marker.as_ref(), true);
    }

    /// Cuts the connection instead of forwarding the first client bytes that contain the marker: nothing is done, and
    /// the client does not know. Happens once.
    pub(crate) fn lose_request(&self, marker: impl AsRef<[u8]>) {
        self.arm(marker.as_ref(), false);
    }

    fn arm(&self, marker: &[u8], after_answer: bool) {
        self.faults.send_modify(|faults| faults.cut = Some(Cut { marker: marker.to_vec(), after_answer }));
    }

    /// How many connections a marker has cut so far.
    pub(crate) fn cuts(&self) -> usize {
        *self.cuts.borrow()
    }

    /// Cuts every open connection; new ones work.
    pub(crate) fn cut_all(&self) {
        self.faults.send_modify(|faults| faults.generation += 1);
    }

    /// Cuts every open connection and closes new ones at once.
    pub(crate) fn refuse(&self) {
        self.faults.send_modify(|faults| {
            faults.refuse = true;
            faults.generation += 1;
        });
    }

    /// Connections stay open and nothing comes through, as when a cable is pulled.
    pub(crate) fn stall(&self) {
        self.faults.send_modify(|faults| faults.stall = true);
    }

    /// What is asked comes through and takes effect, and no answer comes back.
    pub(crate) fn stall_answers(&self) {
        self.faults.send_modify(|faults| faults.stall_answers = true);
    }

    /// The same from the first client bytes on that contain the marker, whose answer does not come back either.
    pub(crate) fn stall_answers_from(&self, marker: impl AsRef<[u8]>) {
        self.faults.send_modify(|faults| faults.stall_at = Some(marker.as_ref().to_vec()));
    }

    /// Holds up each piece of data this long, in both directions.
    pub(crate) fn delay(&self, delay: Duration) {
        self.faults.send_modify(|faults| faults.delay = delay);
    }

    /// Ends all faults. What a stall held up comes through now.
    pub(crate) fn heal(&self) {
        self.faults.send_modify(|faults| *faults = Faults { generation: faults.generation, ..Faults::default() });
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.cut_all();
    }
}

/// One proxied connection.
struct Wire {
    faults: watch::Sender<Faults>,
    seen: watch::Receiver<Faults>,
    cuts: watch::Sender<usize>,
}

impl Wire {
    async fn run(mut self, client: TcpStream, server: String) {
        let generation = self.seen.borrow_and_update().generation;
        let mut ended = self.seen.clone();
        tokio::select! {
            _ = self.pump(client, server) => {}
            _ = ended.wait_for(|faults| faults.generation != generation) => {}
        }
    }

    async fn pump(&mut self, client: TcpStream, server: String) -> std::io::Result<()> {
        let server = TcpStream::connect(server).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        // The answer is read by the pump of answers; a switch tells it to swallow what comes.
        let (swallow, swallowing) = watch::channel(false);
        tokio::select! {
            done = self.requests(from_client, to_server, &swallow) => done,
            done = answers(from_server, to_client, self.seen.clone(), swallowing) => done,
        }
    }

    async fn requests(
        &self,
        mut from: OwnedReadHalf,
        mut to: OwnedWriteHalf,
        swallow: &watch::Sender<bool>,
    ) -> std::io::Result<()> {
        let mut buffer = vec![0; 64 * 1024];
        // A marker may come in two pieces.
        let mut recent: Vec<u8> = Vec::new();
        loop {
            let length = from.read(&mut buffer).await?;
            if length == 0 {
                return Ok(());
            }
            let bytes = &buffer[..length];
            pass(&mut self.seen.clone()).await;
            recent.extend_from_slice(bytes);
            if let Some(after_answer) = self.take_cut(&recent) {
                self.cuts.send_modify(|cuts| *cuts += 1);
                if after_answer {
                    swallow.send_replace(true);
                    to.write_all(bytes).await?;
                    // The pump of answers ends the connection.
                    swallow.closed().await;
                }
                return Ok(());
            }
            self.stall_at_marker(&recent);
            recent.drain(..recent.len().saturating_sub(1024));
            to.write_all(bytes).await?;
        }
    }

    fn stall_at_marker(&self, bytes: &[u8]) {
        self.faults.send_if_modified(|faults| {
            let hit = faults.stall_at.as_ref().is_some_and(|marker| contains(bytes, marker));
            if hit {
                faults.stall_at = None;
                faults.stall_answers = true;
            }
            hit
        });
    }

    /// Whether these bytes set off the armed cut, which is then no longer armed.
    fn take_cut(&self, bytes: &[u8]) -> Option<bool> {
        let mut taken = None;
        self.faults.send_if_modified(|faults| {
            let hit = faults.cut.as_ref().is_some_and(|cut| contains(bytes, &cut.marker));
            if hit {
                taken = faults.cut.take().map(|cut| cut.after_answer);
            }
            hit
        });
        taken
    }
}

/// Passes answers on; once swallowing, reads on until the server is ready for the next query, and ends.
async fn answers(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut seen: watch::Receiver<Faults>,
    swallowing: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    let mut recent: Vec<u8> = Vec::new();
    loop {
        let length = from.read(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        if *swallowing.borrow() {
            recent.extend_from_slice(&buffer[..length]);
            // ReadyForQuery: 'Z', a length of 5, the transaction's state.
            if contains(&recent, b"Z\0\0\0\x05") {
                return Ok(());
            }
            recent.drain(..recent.len().saturating_sub(16));
            continue;
        }
        pass(&mut seen).await;
        seen.wait_for(|faults| !faults.stall_answers).await.ok();
        to.write_all(&buffer[..length]).await?;
    }
}

/// Waits as long as the wire is to hold things up.
async fn pass(seen: &mut watch::Receiver<Faults>) {
    let delay = seen.borrow().delay;
    if !delay.is_zero() {
        tokio::time::sleep(delay).await;
    }
    seen.wait_for(|faults| !faults.stall).await.ok();
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// A URL in three parts, the middle one `host:port`.
fn split_url(url: &str) -> (&str, &str, &str) {
    let scheme = url.find("://").unwrap() + 3;
    let end = url[scheme..].find(['/', '?']).map_or(url.len(), |at| scheme + at);
    let host = url[..end].rfind('@').map_or(scheme, |at| at + 1);
    (&url[..host], &url[host..end], &url[end..])
}

/// A program that runs beside the test, to be killed, paused and read. It does not outlive the test.
pub(crate) struct Program {
    child: Child,
    output: Arc<Mutex<String>>,
    collectors: [JoinHandle<()>; 2],
}

impl Program {
    /// The `posthouse` binary, to be given its arguments.
    pub(crate) fn posthouse() -> Command {
        // target/<profile>/deps/it-<hash> and target/<profile>/posthouse
        let test = std::env::current_exe().unwrap();
        let binary: PathBuf = test.parent().unwrap().parent().unwrap().join("posthouse");
        assert!(binary.is_file(), "there is no {binary:?} yet; `cargo build -p posthouse-cli` makes it");
        Command::new(binary)
    }

    /// Starts it; both its outputs are collected.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = Arc::new(Mutex::new(String::new()));
        let collectors = [
            collect(child.stdout.take().unwrap(), output.clone()),
            collect(child.stderr.take().unwrap(), output.clone()),
        ];
        Self { child, output, collectors }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has printed so far, on either output.
    pub(crate) fn output(&self) -> String {
        self.output.lock().unwrap().clone()
    }

    /// Waits until it has printed this text.
    pub(crate) async fn printed(&self, text: &str, within: Duration) {
        let deadline = Instant::now() + within;
        while !self.output().contains(text) {
            assert!(Instant::now() < deadline, "no {text:?} within {within:?} in:\n{}", self.output());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// SIGKILL: it can do nothing about it.
    pub(crate) fn kill_9(&self) {
        self.signal(Signal::SIGKILL);
    }

    /// SIGTERM: it is asked to end.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// SIGSTOP: it stands still and does not know it.
    pub(crate) fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    /// SIGCONT: it goes on.
    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).unwrap()), signal).unwrap();
    }

    /// Waits for its end, and for what it printed last.
    pub(crate) async fn ended(&mut self, within: Duration) -> ExitStatus {
        let deadline = Instant::now() + within;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "still running after {within:?}:\n{}", self.output());
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        // Not for longer: children of its own may hold its outputs open.
        let deadline = Instant::now() + Duration::from_secs(1);
        while !self.collectors.iter().all(JoinHandle::is_finished) && Instant::now() < deadline {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        status
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        if std::thread::panicking() {
            eprintln!("output of process {}:\n{}", self.child.id(), self.output());
        }
    }
}

/// Reads one output to its end on a thread of its own.
fn collect(mut from: impl std::io::Read + Send + 'static, into: Arc<Mutex<String>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(length @ 1..) = from.read(&mut buffer) {
            into.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    })
}
