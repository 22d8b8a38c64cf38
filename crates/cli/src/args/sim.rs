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
/// A fault is a name or a status from 400 to 599, with conditions, of which all must hold: match=TEXT (in the input), first=N (so
/// many times), from=N and to=N (numbers of requests), tries=N (of one input), after=1m and before=2m (since the start), rate=0.1
/// (by chance); and details: retry_after=1s or retry_after_ms=N (the wait it asks for; a 429 with before= asks for what is left),
/// latency=2s, first_token=1s, after_tokens=N, text=…
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

/// All that a script may say.
const SCRIPT: &str = r#"
latency = "100ms-2s"        # to the headers; a range: each time anew
first_token = "50ms"        # from the headers to the first token
tokens_per_second = 80.0    # default: all at once
input_tokens = 1000         # what usage says; default: about what was sent
output_tokens = 200
models = ["sim"]            # default: any
api_key = "secret"          # default: none is asked for
seed = 7                    # of the dice

[limit]                     # counted in every rolling minute
requests_per_minute = 60
tokens_per_minute = 10000
enforce = true              # 429 beyond it; false: answered, and counted in /sim/stats
headers = true              # x-ratelimit-* tell what is left
window = "60s"              # how long a minute is

[[step]]                    # the first step that fits a request decides
match = "foo"
first = 2
do = 429
retry_after = "1s"

[[step]]                    # an outage, from one minute after the start to two
after = "1m"
before = "2m"
do = 503
"#;

/// The end of the help text: every fault, a script, examples.
fn help() -> String {
    let mut help = String::from("FAULTS:\n");
    for (name, meaning) in Fault::ALL {
        let _ = writeln!(help, "  {name:<19} {meaning}");
    }
    let script =
        SCRIPT.trim_start().lines().map(|line| format!("  {line}").trim_end().to_owned() + "\n").collect::<String>();
    let _ = write!(
        help,
        "  400 to 599          That status, with the body that providers send with it.

SCRIPT:
{script}
EXAMPLES:
  posthouse sim
  posthouse sim --listen 127.0.0.1:8080 --latency 200ms-2s --rate-429 0.1 --seed 7
  posthouse sim --fault match=foo,first=2,do=429,retry_after=1s --fault hang
  posthouse sim --script trouble.toml",
    );
    help
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use clap::CommandFactory;
    use posthouse_llm::sim::Script;

    #[test]
    fn the_help_shows_a_script_that_works_and_every_field() {
        let script = Script::parse(SCRIPT).unwrap();
        assert!(script.steps.len() == 2 && script.limit.is_some());
        let help = crate::args::Cli::command().find_subcommand_mut("sim").unwrap().render_long_help().to_string();
        // A parser names the fields that it knows when it meets one that it does not.
        for (text, fields) in [("nosuch = 1", 10), ("[limit]\nnosuch = 1", 5), ("[[step]]\ndo = 429\nnosuch = 1", 15)] {
            let error = Script::parse(text).unwrap_err();
            let known: Vec<&str> =
                error.split_once("expected one of ").unwrap().1.split('`').skip(1).step_by(2).collect();
            assert!(known.len() >= fields, "{error}");
            for field in known {
                let is_there =
                    [format!("{field} = "), format!("{field}="), format!("[{field}]"), format!("[[{field}]]")];
                assert!(is_there.iter().any(|shown| help.contains(shown)), "{field} is not in the help");
            }
        }
    }
}
