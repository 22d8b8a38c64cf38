//! The arguments of `sim`, and the faults that can be typed.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use posthouse_llm::sim::{Delay, Fault, Step};

/// Run a simulated provider that behaves as badly as told
///
/// A real HTTP server that speaks the OpenAI chat completions API and answers with something derived from the input. A script or
/// --fault makes it slow, refuse, hang, cut its answers. GET /sim/stats tells what it was asked.
///
/// A fault is a name or a status from 400 to 599, with conditions: match=TEXT (in the input), first=N (so many times), from=N and
/// to=N (numbers of requests), tries=N (of one input), rate=0.1 (by chance); and details: retry_after=1s, latency=2s,
/// after_tokens=N, text=…
#[derive(Debug, Args)]
#[command(after_long_help = help())]
pub(crate) struct Sim {
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:0", hide_default_value = true)]
    #[arg(help = "Where to listen. Default: a free port of 127.0.0.1")]
    pub(crate) listen: SocketAddr,

    /// A script, TOML or JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,

    /// Misbehave: NAME or NAME=VALUE pairs like match=foo,first=2,do=429,retry_after=1s; may be repeated, the first that fits
    /// decides, before the ones of the script
    #[arg(long = "fault", value_name = "SPEC", value_parser = fault)]
    pub(crate) faults: Vec<Step>,

    /// Start of the dice
    #[arg(long)]
    pub(crate) seed: Option<u64>,

    /// Time to the headers, such as 200ms or 100ms-2s
    #[arg(long, value_name = "TIME")]
    pub(crate) latency: Option<Delay>,

    /// Time from the headers to the first token
    #[arg(long, value_name = "TIME")]
    pub(crate) first_token: Option<Delay>,

    /// Speed of the answers. Default: all at once
    #[arg(long, value_name = "N")]
    pub(crate) tokens_per_second: Option<f64>,

    /// Refuse with 429 this share of the requests, from 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) rate_429: Option<f64>,

    /// Fail with 500 this share of the requests, from 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) rate_500: Option<f64>,

    /// Hang at this share of the requests, from 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = share)]
    pub(crate) rate_hang: Option<f64>,
}

/// A fault of the command line: a bare name, or NAME=VALUE pairs.
fn fault(text: &str) -> Result<Step, String> {
    if text.contains('=') { text.parse() } else { text.parse().map(Step::always) }
}

/// A share of requests, from 0 to 1.
fn share(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "a share, from 0 to 1".to_owned())
}

/// The end of the help text: every fault, a script, examples.
fn help() -> String {
    let mut help = String::from("FAULTS:\n");
    for (name, meaning) in Fault::ALL {
        let _ = writeln!(help, "  {name:<19} {meaning}");
    }
    help.push_str(
        "  400 to 599          That status, with the body that providers send with it.

SCRIPT:
  latency = \"100ms-2s\"
  [[step]]                    # the first step that fits a request decides
  match = \"foo\"
  first = 2
  do = 429
  retry_after = \"1s\"

EXAMPLES:
  posthouse sim
  posthouse sim --listen 127.0.0.1:8080 --latency 200ms-2s --rate-429 0.1 --seed 7
  posthouse sim --fault match=foo,first=2,do=429,retry_after=1s --fault hang
  posthouse sim --script trouble.toml",
    );
    help
}
