//! The arguments of `bench`.

use std::path::PathBuf;

use clap::Args;
use posthouse_bench::options::Scenario;

/// Measure how fast the queue is on this machine, beside raw Postgres
///
/// Starts a private Postgres, durable, and measures in it, in rounds; a warm-up comes first and does not count. With
/// --database-url on the command line it measures on that server instead, in databases that it makes and drops; the
/// variable DATABASE_URL is not looked at, so that no server is put under load by mistake.
///
/// Figures are medians over the rounds, with the lowest and highest, and with their ratio to the floor of the same rounds:
/// raw commits, claims, COPY and NOTIFY without a queue. Ratios compare across machines, figures do not.
#[derive(Debug, Args)]
#[command(after_long_help = "SCENARIOS:
  floor               raw statements without a queue; without it there are no ratios
  enqueue-single      one enqueue after the other
  enqueue-concurrent  enqueues from 64 tasks at once, each waiting for its own answer
  enqueue-bulk        many jobs a call
  drain               no-op jobs, one worker process
  drain-multi         the same, four worker processes
  scaling             jobs that wait, on 1 to 10 worker processes
  latency             from the enqueue call to the start of the handler, at an idle worker
  in-flight           jobs that wait, all at once in one worker process: time, memory, connections
  in-flight-10k       the same with 10,000 jobs
  llm                 calls of a model, all at once in one worker process, by the simulated provider
  fair                how long one tenant waits while another has a long line
  gated               jobs behind a gate that lets 40 run, beside 40 slots without one; how full it keeps them
  large-payload       payloads of 0.2 to 200 KB: rates, and WAL a job
  tenants             claims from 10,000 tenants of which 1,000 have work

LONG SCENARIOS, only if they are named, or with --all:
  rates               tokens per minute behind a gate, as a simulated provider counts them; needs some minutes
  backlog             claims from 10,000 to 10 million waiting jobs; needs some minutes and 10 GB
  retention           claims and settles beside 20 million archived jobs, half of which are being deleted; needs 10 GB
  drop-partition      enqueues and settles while a partition of 10 million jobs is dropped under a reader's eyes
  pinned-snapshot     a steady load for 10 minutes, three times, while somebody else holds a snapshot; needs half an hour

EXAMPLES:
  posthouse bench                                   all that is not long; takes some minutes
  posthouse bench --quick                           does it work here? A minute or two
  posthouse bench --only floor,drain --repeats 5
  posthouse bench --markdown report.md
  posthouse bench --only pinned-snapshot --minutes 2 --plot course.svg
  posthouse bench --json --database-url postgres://postgres@db.example/postgres")]
pub(crate) struct Bench {
    /// Only these scenarios, such as floor,drain
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub(crate) only: Vec<Scenario>,

    /// The long scenarios too
    #[arg(long, conflicts_with = "only")]
    pub(crate) all: bool,

    /// Rounds that count [default: 3, and 1 of the long scenarios]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeats: Option<u32>,

    /// Small numbers: shows that it works, not how fast it is
    #[arg(long)]
    pub(crate) quick: bool,

    /// Minutes of each run of pinned-snapshot [default: 10]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub(crate) minutes: Option<u64>,

    /// Also write a report with settings, versions and machine
    #[arg(long, value_name = "FILE")]
    pub(crate) markdown: Option<PathBuf>,

    /// Also draw throughput and latency over time, as SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
}
