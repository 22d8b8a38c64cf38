//! How much of everything is measured: in full, quickly, and to warm up.

use std::time::Duration;

/// Tasks that enqueue at once.
pub(crate) const TASKS: u32 = 64;
/// Jobs at once of a worker whose jobs do nothing: enough that claims and settles come in large batches.
pub(crate) const SLOTS: u32 = 1_000;
/// Worker processes where it is several.
pub(crate) const PROCESSES: u32 = 4;
/// What a job takes where more and more workers are measured.
pub(crate) const WAIT: Duration = Duration::from_millis(100);
/// Jobs at once of each of those workers.
pub(crate) const WAIT_SLOTS: u32 = 20;
/// Time between two enqueues of the tenant that waits.
pub(crate) const FAIR_PACE: Duration = Duration::from_millis(50);
/// What every job takes there.
pub(crate) const FAIR_WORK: Duration = Duration::from_millis(20);
/// Jobs at once there.
pub(crate) const FAIR_SLOTS: u32 = 20;
/// Jobs at once behind the gate.
pub(crate) const GATE: u32 = 40;
/// What those jobs take that are not no-op.
pub(crate) const GATED_WORK: Duration = Duration::from_millis(50);
/// Time between two enqueues where latency is measured: the worker is idle again.
pub(crate) const PACE: Duration = Duration::from_millis(20);

/// Jobs of a claim where claims are timed.
pub(crate) const BATCH: u32 = 100;
/// Calls a second of a steady load.
pub(crate) const STEADY_CALLS: u32 = 50;
/// Jobs of each of them.
pub(crate) const STEADY_JOBS: u32 = 20;

/// How much of everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    /// How long raw commits are counted.
    pub(crate) commit_time: Duration,
    /// Rows of the raw claims and settles.
    pub(crate) claims: u32,
    pub(crate) copies: u32,
    pub(crate) notifies: u32,
    pub(crate) single: u32,
    /// Over all tasks together.
    pub(crate) concurrent: u32,
    pub(crate) bulk: u32,
    pub(crate) drain: u32,
    /// Jobs a worker.
    pub(crate) scaling: u32,
    pub(crate) latency: u32,
    pub(crate) in_flight: u32,
    pub(crate) in_flight_10k: u32,
    pub(crate) in_flight_time: Duration,
    pub(crate) llm: u32,
    pub(crate) llm_time: Duration,
    /// Jobs of the tenant that waits.
    pub(crate) fair: u32,
    /// Jobs of the other one; more than are done meanwhile.
    pub(crate) fair_backlog: u32,
    /// No-op jobs behind the gate, and those that take a moment.
    pub(crate) gated_noop: u32,
    pub(crate) gated: u32,
    /// Jobs behind the gate on several processes, and what they take.
    pub(crate) gated_long: u32,
    pub(crate) gated_long_time: Duration,
    /// Calls behind a gate that counts tokens, and its limit.
    pub(crate) rated: u32,
    pub(crate) tokens_per_minute: u32,
    /// Bytes of payloads of each size; small ones are fewer.
    pub(crate) large_total: u32,
    /// Claims whose time counts.
    pub(crate) claims_timed: u32,
    /// A tenth of them has work.
    pub(crate) tenants: u32,
    /// Jobs that wait while claims are timed, from few to many.
    pub(crate) depths: [u32; 4],
    /// Rows of history beside which claims are timed, and of the partition that is dropped.
    pub(crate) archived: u32,
    pub(crate) dropped: u32,
    /// How long somebody reads meanwhile.
    pub(crate) reader_time: Duration,
    /// Of each of the runs with a snapshot.
    pub(crate) pinned_time: Duration,
}

impl Sizes {
    pub(crate) const FULL: Self = Self {
        commit_time: Duration::from_secs(2),
        claims: 100_000,
        copies: 200_000,
        notifies: 500,
        single: 5_000,
        concurrent: 64_000,
        bulk: 200_000,
        drain: 100_000,
        scaling: 1_000,
        latency: 500,
        in_flight: 2_000,
        in_flight_10k: 10_000,
        in_flight_time: Duration::from_secs(5),
        llm: 2_000,
        llm_time: Duration::from_secs(2),
        fair: 200,
        fair_backlog: 100_000,
        gated_noop: 20_000,
        gated: 8_000,
        gated_long: 600,
        gated_long_time: Duration::from_secs(1),
        rated: 50,
        tokens_per_minute: 6_000,
        large_total: 80_000_000,
        claims_timed: 300,
        tenants: 10_000,
        depths: [10_000, 100_000, 1_000_000, 10_000_000],
        archived: 20_000_000,
        dropped: 10_000_000,
        reader_time: Duration::from_secs(120),
        pinned_time: Duration::from_secs(600),
    };

    pub(crate) const QUICK: Self = Self {
        commit_time: Duration::from_millis(200),
        claims: 5_000,
        copies: 10_000,
        notifies: 100,
        single: 300,
        concurrent: 6_400,
        bulk: 20_000,
        drain: 3_000,
        scaling: 60,
        latency: 50,
        in_flight: 500,
        in_flight_10k: 1_000,
        in_flight_time: Duration::from_millis(500),
        llm: 200,
        llm_time: Duration::from_millis(500),
        fair: 20,
        fair_backlog: 10_000,
        gated_noop: 1_000,
        gated: 400,
        gated_long: 400,
        gated_long_time: Duration::from_millis(100),
        rated: 10,
        tokens_per_minute: 60_000,
        large_total: 2_000_000,
        claims_timed: 30,
        tenants: 100,
        depths: [1_000, 2_000, 4_000, 8_000],
        archived: 30_000,
        dropped: 20_000,
        reader_time: Duration::from_secs(3),
        pinned_time: Duration::from_secs(4),
    };

    /// A tenth of it: code is in memory, connections have been made once, the disk has woken up.
    pub(crate) fn warm_up(self) -> Self {
        Self {
            commit_time: self.commit_time / 10,
            claims: self.claims / 10,
            copies: self.copies / 10,
            notifies: self.notifies / 10,
            single: self.single / 10,
            concurrent: self.concurrent / 10,
            bulk: self.bulk / 10,
            drain: self.drain / 10,
            scaling: self.scaling / 10,
            latency: self.latency / 10,
            in_flight: self.in_flight / 10,
            in_flight_10k: self.in_flight_10k / 10,
            in_flight_time: self.in_flight_time / 10,
            llm: self.llm / 10,
            llm_time: self.llm_time / 10,
            fair: self.fair / 10,
            fair_backlog: self.fair_backlog,
            gated_noop: self.gated_noop / 10,
            gated: self.gated / 10,
            gated_long: self.gated_long / 3,
            large_total: self.large_total / 10,
            ..self
        }
    }
}
