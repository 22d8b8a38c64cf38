//! Starting parts of the benchmark as processes, and hearing what they say. `part` is the other side.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::error::{Error, Result};
use crate::part::{ARGUMENT, Ended, Ready, Said, Task, Work};

/// Processes that are not ready by then will not be.
const START: Duration = Duration::from_secs(60);
/// Work that has not ended by then will not.
const TOO_LONG: Duration = Duration::from_secs(600);

/// Processes that have begun nothing yet. Dropped: they are killed.
pub(crate) struct Crew {
    parts: Vec<(Child, ChildStdin)>,
    news: mpsc::UnboundedReceiver<(usize, Option<Said>)>,
    /// In the order of their tasks.
    pub(crate) ready: Vec<Ready>,
}

/// What workers have done together.
pub(crate) struct Worked {
    /// From the moment at which the first of them began until the last job was recorded.
    pub(crate) seconds: f64,
    pub(crate) workers: Vec<Ended>,
}

impl Crew {
    /// So many workers, all alike.
    pub(crate) async fn workers(number: u32, work: Work) -> Result<Self> {
        Self::start(&vec![Task::Work(work); number as usize]).await
    }

    /// Starts a process for each task, and waits until all are ready.
    pub(crate) async fn start(tasks: &[Task]) -> Result<Self> {
        let (tell, news) = mpsc::unbounded_channel();
        let mut crew = Self { parts: Vec::new(), news, ready: Vec::new() };
        for (number, task) in tasks.iter().enumerate() {
            let (part, output) = spawn(task).await.map_err(lost)?;
            crew.parts.push(part);
            tokio::spawn(listen(number, output, tell.clone()));
        }
        drop(tell);
        let mut ready = vec![None; tasks.len()];
        let all = async {
            while ready.iter().any(Option::is_none) {
                if let (number, Said::Ready(said)) = crew.next().await? {
                    ready[number] = Some(said);
                }
            }
            Ok::<_, Error>(())
        };
        timeout(START, all)
            .await
            .map_err(|_| Error::Stuck("a process of the benchmark does not get ready".to_owned()))??;
        crew.ready = ready.into_iter().flatten().collect();
        Ok(crew)
    }

    /// Lets them begin at once and work until so many jobs are done, by all of them together, and recorded.
    pub(crate) async fn work_off(mut self, jobs: u32) -> Result<Worked> {
        let ended = timeout(TOO_LONG, self.work(jobs)).await;
        let workers =
            ended.map_err(|_| Error::Stuck(format!("the jobs are not done after {} s", TOO_LONG.as_secs())))??;
        let done: u32 = workers.iter().map(|worker| worker.done).sum();
        if done != jobs {
            return Err(Error::Stuck(format!("{done} jobs were done where there were {jobs}")));
        }
        let began_at = workers.iter().map(|worker| worker.began_at).fold(f64::INFINITY, f64::min);
        let last_at = workers.iter().map(|worker| worker.last_at).fold(0.0, f64::max);
        Ok(Worked { seconds: last_at - began_at, workers })
    }

    async fn work(&mut self, jobs: u32) -> Result<Vec<Ended>> {
        for (_, input) in &mut self.parts {
            input.write_all(b"begin\n").await.map_err(lost)?;
        }
        let mut done = vec![0; self.parts.len()];
        while done.iter().sum::<u32>() < jobs {
            if let (number, Said::Done(jobs)) = self.next().await? {
                done[number] = jobs;
            }
        }
        let mut children = Vec::new();
        for (child, input) in self.parts.drain(..) {
            drop(input);
            children.push(child);
        }
        let mut ended = Vec::new();
        while ended.len() < children.len() {
            match self.news.recv().await {
                Some((_, Some(Said::Ended(worker)))) => ended.push(worker),
                Some(_) => {}
                None => return Err(Error::Stuck("a worker did not say what it had done".to_owned())),
            }
        }
        for mut child in children {
            child.wait().await.map_err(lost)?;
        }
        Ok(ended)
    }

    /// The next thing that one of them says.
    async fn next(&mut self) -> Result<(usize, Said)> {
        match self.news.recv().await {
            Some((number, Some(said))) => Ok((number, said)),
            Some((number, None)) => {
                let status = self.parts[number].0.wait().await.map_err(lost)?;
                Err(Error::Stuck(format!("a process of the benchmark ended too soon ({status}); it says why above")))
            }
            None => Err(Error::Stuck("a process of the benchmark says nothing any more".to_owned())),
        }
    }
}

fn lost(error: std::io::Error) -> Error {
    Error::Stuck(format!("a process of the benchmark: {error}"))
}

/// This very program. Its path may lead to another one by now, built while the benchmark runs; on Linux there is a name that does
/// not.
fn program() -> std::io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() }
}

async fn spawn(task: &Task) -> std::io::Result<((Child, ChildStdin), ChildStdout)> {
    let mut command = Command::new(program()?);
    command.arg(ARGUMENT).stdin(Stdio::piped()).stdout(Stdio::piped());
    // Ctrl-C is for the benchmark; its parts end when it says so.
    let mut child = command.process_group(0).kill_on_drop(true).spawn()?;
    let piped = || std::io::Error::other("it has no pipes");
    let mut input = child.stdin.take().ok_or_else(piped)?;
    let output = child.stdout.take().ok_or_else(piped)?;
    // The task says where the database is, with its password: not for the command line, which everybody sees.
    input.write_all(format!("{}\n", serde_json::to_string(task)?).as_bytes()).await?;
    Ok(((child, input), output))
}

/// Passes on what a part says; `None` at the end.
async fn listen(number: usize, output: ChildStdout, tell: mpsc::UnboundedSender<(usize, Option<Said>)>) {
    let mut lines = BufReader::new(output).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // Nobody listens any more when sending fails: the part is being killed.
        if let Ok(said) = serde_json::from_str(&line) {
            let _ = tell.send((number, Some(said)));
        }
    }
    let _ = tell.send((number, None));
}
