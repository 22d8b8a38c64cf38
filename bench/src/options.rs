//! What to measure.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use crate::sizes::{
    BATCH, FAIR_PACE, FAIR_SLOTS, FAIR_WORK, GATE, GATED_WORK, PACE, PROCESSES, SLOTS, STEADY_CALLS, STEADY_JOBS,
    Sizes, TASKS, WAIT, WAIT_SLOTS,
};

/// Something that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scenario {
    /// What the machine and Postgres can do at all: raw statements, no queue.
    Floor,
    /// One enqueue after the other.
    EnqueueSingle,
    /// Enqueues from many tasks at once, each waiting for its own answer.
    EnqueueConcurrent,
    /// Many jobs a call.
    EnqueueBulk,
    /// No-op jobs, one worker process.
    Drain,
    /// The same in a queue that keeps no history.
    DrainNoHistory,
    /// As the drain, with several worker processes.
    DrainMulti,
    /// Jobs that wait, on more and more worker processes.
    Scaling,
    /// From the call of an enqueue to the start of the handler, at an idle worker.
    Latency,
    /// Jobs that wait, all at once in one worker process.
    InFlight,
    /// The same with many more.
    InFlight10k,
    /// Calls of a model in flight, against the simulated provider.
    Llm,
    /// The jobs of one tenant beside the long line of another.
    Fair,
    /// Jobs behind a gate, beside as many slots without one.
    Gated,
    /// Payloads from small to large.
    LargePayload,
    /// Claims from many tenants of which few have work.
    Tenants,
    /// Tokens per minute, as a provider counts them.
    Rates,
    /// Claims from ever larger backlogs.
    Backlog,
    /// Claims and settles beside a large history, half of which is being deleted.
    Retention,
    /// A partition that is dropped while somebody reads its table.
    DropPartition,
    /// A steady load for minutes, while somebody else holds a snapshot.
    PinnedSnapshot,
}

impl Scenario {
    /// All of them, in the order in which they are measured.
    pub const ALL: [Self; 21] = [
        Self::Floor,
        Self::EnqueueSingle,
        Self::EnqueueConcurrent,
        Self::EnqueueBulk,
        Self::Drain,
        Self::DrainNoHistory,
        Self::DrainMulti,
        Self::Scaling,
        Self::Latency,
        Self::InFlight,
        Self::InFlight10k,
        Self::Llm,
        Self::Fair,
        Self::Gated,
        Self::LargePayload,
        Self::Tenants,
        Self::Rates,
        Self::Backlog,
        Self::Retention,
        Self::DropPartition,
        Self::PinnedSnapshot,
    ];

    /// Its name on the command line and in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::EnqueueSingle => "enqueue-single",
            Self::EnqueueConcurrent => "enqueue-concurrent",
            Self::EnqueueBulk => "enqueue-bulk",
            Self::Drain => "drain",
            Self::DrainNoHistory => "drain-no-history",
            Self::DrainMulti => "drain-multi",
            Self::Scaling => "scaling",
            Self::Latency => "latency",
            Self::InFlight => "in-flight",
            Self::InFlight10k => "in-flight-10k",
            Self::Llm => "llm",
            Self::Fair => "fair",
            Self::Gated => "gated",
            Self::Rates => "rates",
            Self::LargePayload => "large-payload",
            Self::Tenants => "tenants",
            Self::Backlog => "backlog",
            Self::Retention => "retention",
            Self::DropPartition => "drop-partition",
            Self::PinnedSnapshot => "pinned-snapshot",
        }
    }

    /// Whether it takes many minutes, and is left out unless it is asked for.
    #[must_use]
    pub fn is_long(self) -> bool {
        matches!(self, Self::Rates | Self::Backlog | Self::Retention | Self::DropPartition | Self::PinnedSnapshot)
    }

    /// Whether it begins with a part that does not count, and needs no round of warm-up.
    fn warms_up_itself(self) -> bool {
        self.is_long() || self == Self::Tenants
    }

    /// Whether some of its figures tell how they went over time, for a chart.
    #[must_use]
    pub fn has_courses(self) -> bool {
        matches!(self, Self::PinnedSnapshot)
    }

    /// What it does, in a sentence with its numbers.
    pub(crate) fn meaning(self, sizes: &Sizes) -> String {
        match self {
            Self::Floor => "raw statements without a queue; all other figures are compared with these".to_owned(),
            Self::EnqueueSingle => format!("{} enqueues, one after the other, on one connection", sizes.single),
            Self::EnqueueConcurrent => format!(
                "{} enqueues from {TASKS} tasks, each waiting for its own durable answer before its next",
                sizes.concurrent
            ),
            Self::EnqueueBulk => format!("{} jobs in calls of 10,000", sizes.bulk),
            Self::Drain => format!(
                "{} no-op jobs, one worker process with {SLOTS} slots and all else at its default; from its start until the \
                 last one is recorded as done",
                sizes.drain
            ),
            Self::DrainNoHistory => {
                format!("{} no-op jobs as in the drain, in a queue with retention zero", sizes.drain)
            }
            Self::DrainMulti => format!(
                "{} no-op jobs, {PROCESSES} worker processes like that of the drain, started at once",
                sizes.drain
            ),
            Self::Scaling => format!(
                "jobs of {} ms on 1, 2, 4 and 10 worker processes with {WAIT_SLOTS} slots and {} jobs each, started at once; \
                 linear is so many times the rate of one",
                WAIT.as_millis(),
                sizes.scaling
            ),
            Self::Latency => format!(
                "an idle worker, {} enqueues {} ms apart; from the enqueue call to the start of the handler",
                sizes.latency,
                PACE.as_millis()
            ),
            Self::InFlight | Self::InFlight10k => format!(
                "{} jobs of {} s at once in one worker process, until the last one is recorded as done",
                if self == Self::InFlight { sizes.in_flight } else { sizes.in_flight_10k },
                sizes.in_flight_time.as_secs_f64()
            ),
            Self::Llm => format!(
                "{} calls of a model at once in one worker process, by a simulated provider in another one that answers after \
                 {} s; memory is what the worker grew by",
                sizes.llm,
                sizes.llm_time.as_secs_f64()
            ),
            Self::Fair => format!(
                "{} enqueues of one tenant, {} ms apart, at one worker with {FAIR_SLOTS} slots and jobs of {} ms: first alone, \
                 then while another tenant has {} jobs queued; from the enqueue call to the start of the handler",
                sizes.fair,
                FAIR_PACE.as_millis(),
                FAIR_WORK.as_millis(),
                sizes.fair_backlog
            ),
            Self::Gated => sizes.gated_meaning(),
            Self::Rates => sizes.rates_meaning(),
            Self::Tenants => sizes.tenants_meaning(),
            Self::Backlog => sizes.backlog_meaning(),
            Self::Retention => sizes.retention_meaning(),
            Self::DropPartition => sizes.drop_meaning(),
            Self::LargePayload => format!(
                "payloads of 0.2, 1, 20 and 200 KB of words, up to {} MB of each, enqueued in bulk and worked off by one worker \
                 with {SLOTS} slots; WAL is all that the server wrote meanwhile",
                sizes.large_total / 1_000_000
            ),
            Self::PinnedSnapshot => sizes.pinned_meaning(),
        }
    }
}

/// What the scenarios do that look for growth.
impl Sizes {
    fn gated_meaning(&self) -> String {
        format!(
            "{} no-op jobs and {} of {} ms: by one worker with {GATE} slots, and by one with {SLOTS} slots behind a gate that lets \
             {GATE} run; then {} jobs of {} s behind it, on {PROCESSES} worker processes with {GATE} slots each, whose running \
             jobs are counted every 20 ms",
            self.gated_noop,
            self.gated,
            GATED_WORK.as_millis(),
            self.gated_long,
            self.gated_long_time.as_secs_f64()
        )
    }

    fn rates_meaning(&self) -> String {
        format!(
            "{} calls of 400 tokens on {PROCESSES} worker processes behind a gate of {} tokens a minute; a simulated provider \
             counts the tokens of every rolling minute and refuses nothing",
            self.rated, self.tokens_per_minute
        )
    }

    fn tenants_meaning(&self) -> String {
        format!(
            "{} claims of {BATCH} jobs and their settles from {} tenants of which {} have {BATCH} jobs each, in turn with \
             claims from one tenant that has as many; for each job taken another one comes in",
            self.claims_timed,
            self.tenants,
            self.tenants / 10
        )
    }

    fn backlog_meaning(&self) -> String {
        format!(
            "{} claims of {BATCH} jobs and their settles with {} jobs waiting, in one queue that is filled up in between; \
             for each job taken another one comes in",
            self.claims_timed,
            self.depths.map(|depth| depth.to_string()).join(", ")
        )
    }

    fn retention_meaning(&self) -> String {
        format!(
            "{} claims of {BATCH} jobs and their settles in a database without history; then, with {} archived jobs of another \
             queue that keeps them for 30 days, of which half have expired and are being deleted",
            self.claims_timed, self.archived
        )
    }

    fn drop_meaning(&self) -> String {
        format!(
            "claims and settles of {BATCH} jobs and single enqueues, one after the other, for {} s; then as long beside a partition of {} \
             jobs that have all expired, and a transaction that has read its table and stays open until the end",
            self.reader_time.as_secs_f64(),
            self.dropped
        )
    }

    fn pinned_meaning(&self) -> String {
        format!(
            "{} jobs a second in calls of {}, every tenth with a dedupe key, and one worker, for {} s each: with 1 tenant \
             and with 1,000 while one snapshot is held all the time, and with 1,000 while it moves; the first minute \
             against the last one",
            STEADY_CALLS * STEADY_JOBS,
            STEADY_JOBS,
            self.pinned_time.as_secs_f64()
        )
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Scenario {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|scenario| scenario.name() == text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("there is no such scenario; choose from {names}")
        })
    }
}

/// What a run is to be like.
#[derive(Debug, Clone)]
pub struct Options {
    /// A server to measure on, by the URL of one of its databases, whose user may create databases; connections are made
    /// without TLS. `None`: a private server, durable, which is gone afterwards.
    pub database_url: Option<String>,
    /// The scenarios to measure. Empty: all but the [long](Scenario::is_long) ones.
    pub only: Vec<Scenario>,
    /// The long ones too, if `only` is empty.
    pub all: bool,
    /// Measured rounds after the warm-up, at least 1. `None`: 3, and 1 of long scenarios.
    pub repeats: Option<u32>,
    /// Small numbers: says whether it works, not how fast it is.
    pub quick: bool,
    /// How long each run of [`PinnedSnapshot`](Scenario::PinnedSnapshot) takes. `None`: 10 minutes, or some seconds if `quick`.
    pub pinned_time: Option<Duration>,
}

impl Options {
    /// The chosen scenarios, each once, in the order in which they are measured.
    #[must_use]
    pub fn scenarios(&self) -> Vec<Scenario> {
        let chosen = |scenario: &Scenario| match &self.only[..] {
            [] => self.all || !scenario.is_long(),
            only => only.contains(scenario),
        };
        Scenario::ALL.into_iter().filter(chosen).collect()
    }

    /// The rounds in which a scenario is measured; 0 is the warm-up.
    pub(crate) fn rounds(&self, scenario: Scenario) -> RangeInclusive<u32> {
        let last = self.repeats.unwrap_or(if scenario.is_long() { 1 } else { 3 });
        u32::from(scenario.warms_up_itself())..=last
    }

    pub(crate) fn sizes(&self) -> Sizes {
        let sizes = if self.quick { Sizes::QUICK } else { Sizes::FULL };
        Sizes { pinned_time: self.pinned_time.unwrap_or(sizes.pinned_time), ..sizes }
    }
}
