//! The arguments of the commands that run something: `work`, `demo`, `dev`.

use std::path::PathBuf;
use std::str::FromStr;

use crate::metrics::Listen;
use clap::Args;

/// Run a worker: claim jobs and run them
///
/// What it can run: the prompt kinds of posthouse.toml (`summarize` and `llm.chat` come with it), against the providers named
/// there or the one of --provider-url, and any program with --exec: it gets the payload on standard input, and the last JSON
/// on its standard output is the result. Only jobs of these kinds are claimed.
///
/// SIGTERM or Ctrl-C: it claims nothing more, waits for the grace period, gives unfinished jobs back uncharged, and ends with
/// exit code 0. The second one ends it at once.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse work
  posthouse work --config posthouse.toml --queue default --queue slow --concurrency 1000
  posthouse work --provider-url http://127.0.0.1:11434/v1 --model llama3.2
  posthouse work --exec resize='./resize.sh' --exec report='python3 report.py'
  posthouse work --metrics-listen 9464
  posthouse work --until-empty --json
  posthouse work --sweep-only                       housekeeping for workers that run with --no-sweep")]
pub(crate) struct Work {
    /// A queue to serve; may be repeated. Default: default
    #[arg(long = "queue", value_name = "QUEUE")]
    pub(crate) queues: Vec<String>,

    /// Jobs at once. Default: 100
    #[arg(long, value_name = "N")]
    pub(crate) concurrency: Option<u32>,

    /// Providers, models and prompt kinds. Default: ./posthouse.toml, if there is one
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Run jobs of a kind by a command of the shell; may be repeated
    #[arg(long = "exec", value_name = "KIND=COMMAND")]
    pub(crate) execs: Vec<ExecKind>,

    /// Delete the payload of a job of this kind when it is done or cancelled; may be repeated
    #[arg(long = "drop-payload", value_name = "KIND")]
    pub(crate) drop_payloads: Vec<String>,

    /// An OpenAI-compatible endpoint to use
    #[arg(long, value_name = "URL", help = "An OpenAI-compatible endpoint to use, such as https://api.openai.com/v1")]
    pub(crate) provider_url: Option<String>,

    /// The model to ask for at --provider-url
    #[arg(long, requires = "provider_url")]
    pub(crate) model: Option<String>,

    /// How long Postgres waits for a sign of life before it gives this worker's jobs to others, in ms. Default: 30000
    #[arg(long, value_name = "MS", env = "POSTHOUSE_LEASE_MS")]
    pub(crate) lease_ms: Option<u64>,

    /// How often to look for work when nothing woke the worker, in ms. Default: 1000
    #[arg(long, value_name = "MS")]
    pub(crate) poll_ms: Option<u64>,

    /// How long a shutdown waits for running jobs, in ms. Default: 25000
    #[arg(long, value_name = "MS")]
    pub(crate) grace_ms: Option<u64>,

    /// End when nothing is due, later or running any more
    #[arg(long)]
    pub(crate) until_empty: bool,

    /// Leave housekeeping (such as taking back the jobs of dead workers) to other processes; at least one must do it
    #[arg(long)]
    pub(crate) no_sweep: bool,

    /// Do nothing but housekeeping: claim no jobs, know no kinds
    #[arg(long, conflicts_with_all = ["queues", "concurrency", "config", "execs", "drop_payloads", "provider_url", "poll_ms", "grace_ms",
        "until_empty", "no_sweep", "no_listen"])]
    pub(crate) sweep_only: bool,

    /// Serve /metrics, /healthz and /readyz at PORT of this machine, or at ADDRESS:PORT. Default: not
    #[arg(long, value_name = "ADDRESS", env = "POSTHOUSE_METRICS_LISTEN")]
    pub(crate) metrics_listen: Option<Listen>,

    /// Where to listen for wake-ups, if a transaction-mode pooler stands before the database
    #[arg(long, value_name = "URL", env = "POSTHOUSE_LISTEN_URL", hide_env_values = true)]
    pub(crate) listen_url: Option<String>,

    /// Do not listen for wake-ups, only poll
    #[arg(long, conflicts_with = "listen_url")]
    pub(crate) no_listen: bool,
}

/// Set in the environment of a worker whose standard input is a pipe from the process it works for: it ends when that
/// process does, however that ends.
pub(crate) const STOP_AT_EOF: &str = "POSTHOUSE_STOP_AT_EOF";

/// `KIND=COMMAND`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExecKind {
    pub(crate) kind: String,
    pub(crate) command: String,
}

impl FromStr for ExecKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((kind, command)) if !kind.trim().is_empty() && !command.trim().is_empty() => {
                Ok(Self { kind: kind.trim().to_owned(), command: command.to_owned() })
            }
            _ => Err("write KIND=COMMAND, as in resize='./resize.sh --small'".to_owned()),
        }
    }
}

/// See all of it at work: Postgres, a provider in trouble, workers, real texts
///
/// Starts a private Postgres in a temporary folder and a simulated provider with visible trouble (a latency spike, rate limits,
/// a hang, one job that fails for good), puts in texts to be summarised, and runs several workers, one of which is killed in
/// the middle. At the end: a table of answers, what went wrong and how it was healed, and the check that every job has exactly
/// one final record. Everything is gone afterwards. Exit code 0 only if all is as it should be.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse demo
  posthouse demo notes/*.md
  posthouse demo --provider-url https://api.openai.com/v1 --model gpt-5-mini letter.txt
  posthouse demo --json | jq .answers")]
pub(crate) struct Demo {
    /// Texts to summarise. Default: documents that come with Posthouse
    #[arg(value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,

    /// Use this OpenAI-compatible endpoint instead of the simulated one; its key is read from OPENAI_API_KEY
    #[arg(long, value_name = "URL", requires = "model")]
    pub(crate) provider_url: Option<String>,

    /// The model to ask for at --provider-url
    #[arg(long, requires = "provider_url")]
    pub(crate) model: Option<String>,

    /// Worker processes
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) workers: u8,

    /// Show no progress, only the end
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// Start a Postgres and a simulated provider for development, and stay up
///
/// Other commands find its database by themselves while it runs, unless DATABASE_URL is set. Ctrl-C ends it.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse dev                                     empty, and gone at the end
  posthouse dev --data-dir ./dev-data               kept for the next time
  export DATABASE_URL=$(posthouse db url --show-password)")]
pub(crate) struct Dev {
    /// The port of the simulated provider. Default: a free one
    #[arg(long)]
    pub(crate) port: Option<u16>,

    /// Keep the database in this folder. Default: a temporary one
    #[arg(long, value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
}
