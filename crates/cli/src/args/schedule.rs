//! The arguments of `posthouse schedule`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use posthouse::job::DedupePolicy;
use posthouse::store;

pub(super) const LONG: &str = "Set schedules: cron rules that enqueue a job at each of their ticks.

All that a schedule knows is in the database. Any running worker fires it, also one that does not know the kind, or a process of \
`posthouse work --sweep-only`; each tick comes to exactly one job, whoever fires it, and however often processes start, die or overlap.";

pub(super) const EXAMPLES: &str = "EXAMPLES:
  posthouse schedule next '30 7 * * MON-FRI' --timezone Europe/Rome
  posthouse schedule set digest '30 7 * * MON-FRI' digest '{\"of\":\"yesterday\"}' --timezone Europe/Rome
  posthouse schedule list
  posthouse schedule show digest
  posthouse schedule pause digest --reason 'holidays'
  posthouse schedule resume digest";

#[derive(Debug, Subcommand)]
pub(crate) enum Schedule {
    /// List schedules: when they are due next, their last tick and its job
    ///
    /// Next times are by the clocks of each schedule's time zone. A schedule that enqueues nothing says why.
    #[command(after_long_help = "EXAMPLES:
  posthouse schedule list
  posthouse schedule list --json | jq -r '.[] | select(.missed > 0) | [.name, .missed] | @tsv'")]
    List,

    /// Show one schedule: its job, its next ticks and its last ones with their jobs
    ///
    /// Of the ticks that were fired the newest thousand are kept.
    #[command(after_long_help = "EXAMPLES:
  posthouse schedule show digest
  posthouse schedule show digest --json | jq '.runs[0].job_id'")]
    Show {
        /// The schedule
        name: String,
    },
    Set(Box<ScheduleSet>),

    /// Let a schedule rest
    ///
    /// Ticks in that time are no missed ones, and nothing is made up for. Jobs that it has enqueued are not touched.
    #[command(after_long_help = "EXAMPLES:
  posthouse schedule pause digest --reason 'holidays'")]
    Pause {
        /// The schedule
        name: String,
        /// Why, for those who ask
        #[arg(long, value_name = "TEXT")]
        reason: Option<String>,
    },

    /// Let a schedule go on, from its next tick
    ///
    /// What fell due while it rested is not made up for.
    #[command(after_long_help = "EXAMPLES:
  posthouse schedule resume digest")]
    Resume {
        /// The schedule
        name: String,
    },

    /// Remove a schedule
    ///
    /// Its jobs stay. One that stands in a posthouse.toml comes again with the next worker that reads the file.
    #[command(after_long_help = "EXAMPLES:
  posthouse schedule remove digest")]
    Remove {
        /// The schedule
        name: String,
    },

    /// Show when a rule would be due; nothing is set, no database needed
    ///
    /// When clocks change, a rule that names its minutes and hours runs once: at the end of the gap if its time is skipped, the
    /// first time if it comes twice. One with * in minute or hour runs at every moment that matches.
    #[command(after_long_help = "EXAMPLES:
  posthouse schedule next '0 0 29 2 *'
  posthouse schedule next '30 2 * * *' --timezone Europe/Rome --after 2027-03-27T00:00:00Z --count 3")]
    Next {
        /// Minute, hour, day of the month, month and day of the week, or a nickname such as @daily
        #[arg(value_name = "CRON", allow_hyphen_values = true)]
        cron: String,
        /// By whose clocks: the name of a time zone
        #[arg(long, default_value = "UTC", value_name = "NAME")]
        timezone: String,
        /// So many
        #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000))]
        count: u32,
        /// After this time, such as 2027-03-27T00:00:00Z. Default: now
        #[arg(long, value_name = "TIME", value_parser = moment)]
        after: Option<std::time::SystemTime>,
    },
    Apply(ScheduleApply),
}

/// Set a schedule: make it, or change it
///
/// It is set as a whole: options that are left out are as by default. Setting it as it is changes nothing, its next tick neither. A rested
/// one goes on resting. A tick that is due already when its rule changes is still fired.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse schedule set digest '30 7 * * MON-FRI' digest '{\"of\":\"yesterday\"}' --timezone Europe/Rome
  posthouse schedule set inbox '*/5 * * * *' read-inbox --tenant acme --dedupe-key inbox --jitter 1m
  posthouse schedule set billing @monthly bill @bill.json --catch-up all --catch-up-max 3")]
pub(crate) struct ScheduleSet {
    /// Its name
    pub(crate) name: String,
    /// Minute, hour, day of the month, month and day of the week, or @hourly, @daily, @weekly, @monthly, @yearly
    #[arg(value_name = "CRON", allow_hyphen_values = true)]
    pub(crate) cron: String,
    /// What runs its jobs
    pub(crate) kind: String,
    /// Their payload: JSON text, @FILE, or - for standard input. Default: {}
    #[arg(allow_negative_numbers = true)]
    pub(crate) payload: Option<String>,

    /// By whose clocks: the name of a time zone, such as Europe/Rome
    #[arg(long, default_value = "UTC", value_name = "NAME")]
    pub(crate) timezone: String,
    /// What becomes of ticks that no process saw within a minute
    #[arg(long, value_enum, default_value_t = CatchUp::One)]
    pub(crate) catch_up: CatchUp,
    /// With --catch-up all: make up for so many ticks at most, the newest
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub(crate) catch_up_max: u32,
    /// With --catch-up all: spread their jobs over so long
    #[arg(long, default_value = "10m", value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) catch_up_over: Duration,
    /// Let jobs be due so much later at most, each as its tick decides
    #[arg(long, default_value = "0s", value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) jitter: Duration,

    /// Their queue. Default: default
    #[arg(long)]
    pub(crate) queue: Option<String>,
    /// Whose they are. Default: default
    #[arg(long)]
    pub(crate) tenant: Option<String>,
    /// Smaller runs first. Default: 0
    #[arg(long, allow_negative_numbers = true, value_name = "N")]
    pub(crate) priority: Option<i32>,
    /// Attempts before a job becomes a dead letter. Default: 5
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<u32>,
    /// The longest that one attempt may take. Default: no limit
    #[arg(long, value_name = "DURATION", value_parser = super::time::duration)]
    pub(crate) timeout: Option<Duration>,
    /// A gate that they pass besides those of their queue, tenant and kind; may be repeated
    #[arg(long = "gate", value_name = "NAME")]
    pub(crate) gates: Vec<String>,
    /// The tokens that one is expected to use. Default: estimated, where a gate counts them
    #[arg(long, value_name = "N")]
    pub(crate) tokens: Option<u32>,
    /// While a job holds this key, a tick enqueues no other: so one run does not overtake the one before
    #[arg(long, value_name = "KEY")]
    pub(crate) dedupe_key: Option<String>,
    /// What becomes of a tick whose key is held, as in `posthouse enqueue`
    #[arg(long, value_name = "POLICY", value_parser = policy, requires = "dedupe_key")]
    pub(crate) dedupe_policy: Option<DedupePolicy>,
    /// How long the key stands. Default: until the job is final
    #[arg(long, value_name = "DURATION", value_parser = super::time::duration, requires = "dedupe_key")]
    pub(crate) dedupe_for: Option<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CatchUp {
    /// They are counted, no more
    Skip,
    /// One job makes up for all of them
    One,
    /// Each is made up for, up to --catch-up-max
    All,
}

impl From<CatchUp> for store::CatchUp {
    fn from(typed: CatchUp) -> Self {
        match typed {
            CatchUp::Skip => Self::Skip,
            CatchUp::One => Self::One,
            CatchUp::All => Self::All,
        }
    }
}

/// Set the schedules that a posthouse.toml declares
///
/// Each schedule of its sections [schedules.NAME] is set just as it stands there. Those that do not stand there stay as they are; of one
/// that a file of this name declared before you are told. `posthouse work` sets only those that are not there at all.
#[derive(Debug, Args)]
#[command(after_long_help = "EXAMPLES:
  posthouse schedule apply
  posthouse schedule apply --dry-run
  posthouse schedule apply --config posthouse.toml --json

IN THE FILE:
  [schedules.digest]
  cron = \"30 7 * * MON-FRI\"
  timezone = \"Europe/Rome\"
  kind = \"digest\"
  payload = { of = \"yesterday\" }
  tenant = \"acme\"
  timeout_ms = 600_000
  jitter_ms = 60_000
  catch_up = \"all\"")]
pub(crate) struct ScheduleApply {
    /// The file. Default: ./posthouse.toml
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Set nothing: say which would be new, changed or as they are, and which do not stand in the file
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// A policy by its name.
fn policy(text: &str) -> Result<DedupePolicy, String> {
    text.parse().map_err(|error: posthouse::Error| error.to_string())
}

fn moment(text: &str) -> Result<std::time::SystemTime, String> {
    humantime::parse_rfc3339_weak(text).map_err(|error| format!("{error}; write it like 2027-03-27T00:00:00Z"))
}
