//! The arguments of `posthouse enqueue`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use posthouse::job::DedupePolicy;

/// Put jobs into a queue
///
/// One job: its kind, and its payload as JSON text, from a file with @FILE, or from standard input with `-`. The answer names
/// the job's id; with a dedupe key that a job holds already, it names that job and says `duplicate`, or what --dedupe-policy
/// asks for: see docs/dedupe.md.
///
/// Many jobs: `--jsonl FILE` reads a JSON object a line, with the fields kind, payload, queue, tenant, priority, delay_ms,
/// run_at, max_attempts, timeout_ms, gates, tokens, dedupe_key, dedupe_by_payload, dedupe_policy and dedupe_for_ms; all but kind may be
/// left out. Options on the command line are the defaults for lines that do not say. Lines go in batches, each all or nothing. At a line that is refused it stops, says
/// which one, and how to go on from there.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse enqueue summarize '{\"text\":\"Postgres is …\"}'
  posthouse enqueue summarize @letter.json --tenant acme --priority 5
  jq -n '{text: \"…\"}' | posthouse enqueue summarize - --dedupe-key letter-17
  posthouse enqueue reindex '{\"doc\":7}' --dedupe-by-payload --dedupe-policy rerun
  posthouse enqueue report '{}' --run-at '2027-01-31 08:00 Europe/Rome' --timeout 10m
  posthouse enqueue sync '{\"id\":7}' --gate crm --tokens 3000
  posthouse enqueue --jsonl jobs.jsonl
  zcat jobs.jsonl.gz | posthouse enqueue --jsonl - --keep-going")]
pub(crate) struct Enqueue {
    /// What runs the job
    #[arg(required_unless_present = "jsonl")]
    pub(crate) kind: Option<String>,

    /// The payload: JSON text, @FILE, or - for standard input. Default: {}
    #[arg(allow_negative_numbers = true)]
    pub(crate) payload: Option<String>,

    /// The queue. Default: default
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Whose job it is. Default: default
    #[arg(long)]
    pub(crate) tenant: Option<String>,

    /// Smaller runs first. Default: 0
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub(crate) priority: Option<i32>,

    /// Not before this long from now, such as 30s or 5m
    #[arg(long, allow_hyphen_values = true, value_name = "DURATION", value_parser = super::time::duration, conflicts_with = "run_at")]
    pub(crate) delay: Option<Duration>,

    /// Not before this time, in any form that Postgres reads, such as '2027-01-31 08:00 Europe/Rome' or 'tomorrow'
    #[arg(long, allow_hyphen_values = true, value_name = "TIME")]
    pub(crate) run_at: Option<String>,

    /// Attempts before the job becomes a dead letter. Default: 5
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<u32>,

    /// The longest that one attempt may take. Default: no limit
    #[arg(long, allow_hyphen_values = true, value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) timeout: Option<Duration>,

    /// A gate that it passes besides those of its queue, tenant and kind: model:NAME, or a name without a colon; may be repeated
    #[arg(long = "gate", value_name = "NAME")]
    pub(crate) gates: Vec<String>,

    /// The tokens that it is expected to use, prompt and answer together. Default: estimated, where a gate counts them
    #[arg(long, value_name = "N")]
    pub(crate) tokens: Option<u32>,

    /// While a job of this tenant and kind holds this key, answer with that job instead of a new one
    #[arg(long, value_name = "KEY", conflicts_with = "jsonl", group = "key")]
    pub(crate) dedupe_key: Option<String>,

    /// The key is a hash of the payload: jobs with equal payloads are the same job
    #[arg(long, conflicts_with = "dedupe_key", group = "key")]
    pub(crate) dedupe_by_payload: bool,

    /// What becomes of it if a job holds the key: keep (that one stands for it, the default), reject, replace (the job that waits gets its
    /// payload and times), rerun (one more runs after the one that runs), same (keep, but refuse another payload)
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    pub(crate) dedupe_policy: Option<DedupePolicy>,

    /// How long the key stands. Default: until the job is final
    #[arg(long, allow_hyphen_values = true, value_name = "DURATION", value_parser = super::time::duration, requires = "key")]
    pub(crate) dedupe_for: Option<Duration>,

    /// Enqueue a job a line from this file, or - for standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["kind", "payload"])]
    pub(crate) jsonl: Option<PathBuf>,

    /// Begin after this many lines of the file
    #[arg(
        long,
        value_name = "LINES",
        requires = "jsonl",
        conflicts_with = "kind",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub(crate) skip: u64,

    /// Report every bad line and go on, instead of stopping at the first
    #[arg(long, requires = "jsonl", conflicts_with = "kind")]
    pub(crate) keep_going: bool,
}

/// A policy by its name.
fn policy(text: &str) -> Result<DedupePolicy, String> {
    text.parse().map_err(|error: posthouse::Error| error.to_string())
}
