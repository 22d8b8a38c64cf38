//! What a worker counts for metrics, and its vital signs: whether it is registered, beats, hears notifications.
//! What is told apart by queue and kind is in `attempts_meter`.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::metrics::{Family, Source};
use crate::store::ClaimedJob;
use crate::worker::attempts_meter::{Attempts, add, number};

/// Answers with the id that the worker is registered under and what is left of its lease; `None`: it is not registered.
pub(crate) type Present = Box<dyn Fn() -> Option<(Uuid, Duration)> + Send + Sync>;

/// The counters and vital signs of one worker: hand it to [`Builder::meter`](crate::worker::Builder::meter), and to a
/// [`Metrics`](crate::metrics::Metrics). A cheap clone; all clones are of the same worker.
#[derive(Clone, Default)]
pub struct Meter {
    inner: Arc<Inner>,
}

struct Inner {
    board: OnceLock<Board>,
    /// What all milliseconds count from.
    epoch: Instant,
    /// How far the database's clock is ahead of ours, in µs.
    clock_ahead_us: AtomicI64,
    rescued: AtomicU64,
    sweeps_failed: AtomicU64,
    swept_ms: AtomicU64,
}

impl Default for Inner {
    fn default() -> Self {
        let (board, epoch) = (OnceLock::new(), Instant::now());
        let (clock_ahead_us, rescued, sweeps_failed, swept_ms) = Default::default();
        Self { board, epoch, clock_ahead_us, rescued, sweeps_failed, swept_ms }
    }
}

impl Inner {
    /// Notes that something happened now.
    fn mark(&self, ms: &AtomicU64) {
        let now = u64::try_from(self.epoch.elapsed().as_millis()).unwrap_or(u64::MAX);
        ms.store(now.max(1), Ordering::Relaxed);
    }

    /// Since then; `None`: it never happened.
    fn since(&self, ms: &AtomicU64) -> Option<Duration> {
        let ms = Some(ms.load(Ordering::Relaxed)).filter(|ms| *ms > 0)?;
        Some(self.epoch.elapsed().saturating_sub(Duration::from_millis(ms)))
    }
}

/// Laid out when the worker starts.
struct Board {
    attempts: Attempts,
    claims: AtomicU64,
    claimed: AtomicU64,
    registrations: AtomicU64,
    leases_lost: AtomicU64,
    disconnects: AtomicU64,
    slots: u32,
    heartbeat: Duration,
    beaten_ms: AtomicU64,
    hearing: AtomicU8,
    present: Present,
    stop: CancellationToken,
}

/// Whether notifications are heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hearing {
    /// Not connected yet, or the connection broke: it is being made.
    Connecting,
    /// They are heard.
    Listening,
    /// There is no URL to listen on: the worker polls.
    Polling,
}

/// Signs of life of a worker.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Vitals {
    /// The id it is registered under. `None`: it is not, or not any more.
    pub worker: Option<Uuid>,
    /// How long its right to its jobs lasts without another heartbeat; zero: it is over.
    pub lease_remaining: Duration,
    /// Since Postgres answered the last heartbeat. `None`: it never did.
    pub heartbeat_age: Option<Duration>,
    /// How often it sends one.
    pub heartbeat_every: Duration,
    /// Whether notifications are heard.
    pub hearing: Hearing,
    /// It claims nothing more and waits for its handlers.
    pub stopping: bool,
}

impl Meter {
    /// How far the clock of Postgres is ahead of this machine's, in seconds (behind: below zero), measured by whoever asks Postgres
    /// for its time. Times from an enqueue to a start are counted by both clocks. Default: 0.
    #[allow(clippy::cast_possible_truncation)]
    pub fn set_clock_ahead(&self, seconds: f64) {
        self.inner.clock_ahead_us.store((seconds * 1e6) as i64, Ordering::Relaxed);
    }

    /// Signs of life. `None`: the worker has not started.
    pub fn vitals(&self) -> Option<Vitals> {
        let board = self.inner.board.get()?;
        let (worker, lease_remaining) = (board.present)().unzip();
        Some(Vitals {
            worker,
            lease_remaining: lease_remaining.unwrap_or_default(),
            heartbeat_age: self.inner.since(&board.beaten_ms),
            heartbeat_every: board.heartbeat,
            hearing: match board.hearing.load(Ordering::Relaxed) {
                0 => Hearing::Connecting,
                1 => Hearing::Listening,
                _ => Hearing::Polling,
            },
            stopping: board.stop.is_cancelled(),
        })
    }

    /// Lays out the counters. Errors if it is another worker's already.
    pub(crate) fn begin(
        &self,
        (queues, kinds): (Vec<String>, Vec<String>),
        (slots, heartbeat): (u32, Duration),
        present: Present,
        stop: CancellationToken,
    ) -> Result<()> {
        let board = Board {
            attempts: Attempts::new(queues, kinds),
            claims: AtomicU64::new(0),
            claimed: AtomicU64::new(0),
            registrations: AtomicU64::new(0),
            leases_lost: AtomicU64::new(0),
            disconnects: AtomicU64::new(0),
            slots,
            heartbeat,
            beaten_ms: AtomicU64::new(0),
            hearing: AtomicU8::new(0),
            present,
            stop,
        };
        let set = self.inner.board.set(board);
        set.map_err(|_| Error::config("meter: it belongs to another worker already; each needs one of its own"))
    }

    /// Since the sweep of this process did what was due. `None`: it never did, or this process does not sweep.
    pub fn sweep_age(&self) -> Option<Duration> {
        self.inner.since(&self.inner.swept_ms)
    }

    /// Counts an event. A worker that has this meter counts its own; this is for the events of a
    /// [`Sweeper`](crate::sweep::Sweeper).
    pub fn count(&self, event: &Event<'_>) {
        let inner = &self.inner;
        match event {
            Event::Rescued { jobs } => add(&inner.rescued, u64::from(jobs.unsigned_abs())),
            Event::SweepFailed { .. } => add(&inner.sweeps_failed, 1),
            Event::Swept { .. } => inner.mark(&inner.swept_ms),
            event => self.count_of_worker(event),
        }
    }

    fn count_of_worker(&self, event: &Event<'_>) {
        let inner = &self.inner;
        let Some(board) = inner.board.get() else { return };
        match event {
            Event::Registered { .. } => add(&board.registrations, 1),
            Event::LeaseLost { .. } => add(&board.leases_lost, 1),
            Event::ConnectionLost { .. } => add(&board.disconnects, 1),
            event => board.attempts.count(event, inner.clock_ahead_us.load(Ordering::Relaxed)),
        }
    }

    /// A handler ran for so long, whatever it came to.
    pub(crate) fn ran(&self, job: &ClaimedJob, time: Duration) {
        if let Some(board) = self.inner.board.get() {
            board.attempts.ran(job, time);
        }
    }

    /// A claim was answered with so many jobs.
    pub(crate) fn claimed(&self, jobs: usize) {
        if let Some(board) = self.inner.board.get() {
            add(&board.claims, 1);
            add(&board.claimed, jobs as u64);
        }
    }

    /// Postgres answered a registration or heartbeat.
    pub(crate) fn beaten(&self) {
        if let Some(board) = self.inner.board.get() {
            self.inner.mark(&board.beaten_ms);
        }
    }

    /// Whether notifications are heard now.
    pub(crate) fn hears(&self, hearing: Hearing) {
        if let Some(board) = self.inner.board.get() {
            board.hearing.store(hearing as u8, Ordering::Relaxed);
        }
    }
}

fn counter(name: &'static str, help: &'static str, counter: &AtomicU64) -> Family {
    Family::counter(name, help).with(&[], number(counter))
}

fn gauge(name: &'static str, help: &'static str, value: f64) -> Family {
    Family::gauge(name, help).with(&[], value)
}

impl Source for Meter {
    fn families(&self) -> Vec<Family> {
        let inner = &self.inner;
        let mut families = vec![
            counter(
                "posthouse_rescued_jobs_total",
                "Jobs that the sweep of this process took back from dead workers.",
                &inner.rescued,
            ),
            counter(
                "posthouse_process_sweep_failures_total",
                "Parts of the sweep that failed in this process.",
                &inner.sweeps_failed,
            ),
        ];
        families.extend(self.sweep_age().map(|age| {
            let help = "Since the sweep of this process did what was due.";
            gauge("posthouse_process_sweep_age_seconds", help, age.as_secs_f64())
        }));
        let (Some(board), Some(vitals)) = (inner.board.get(), self.vitals()) else { return families };
        families.extend(board.attempts.families());
        families.extend([
            counter("posthouse_claims_total", "Claims of this worker that were answered.", &board.claims),
            counter("posthouse_claimed_jobs_total", "Jobs that they brought.", &board.claimed),
            counter(
                "posthouse_worker_registrations_total",
                "Times this worker was registered: more than once after a lease was lost.",
                &board.registrations,
            ),
            counter(
                "posthouse_worker_leases_lost_total",
                "Leases that ended before this worker did; its handlers were stopped each time.",
                &board.leases_lost,
            ),
            counter("posthouse_worker_disconnects_total", "Times this worker lost Postgres.", &board.disconnects),
            gauge("posthouse_worker_slots", "Jobs that this worker runs at once at most.", f64::from(board.slots)),
            gauge(
                "posthouse_worker_registered",
                "1 while this worker is registered and has its lease, else 0.",
                f64::from(u8::from(!vitals.lease_remaining.is_zero())),
            ),
            gauge(
                "posthouse_worker_listening",
                "1 while this worker hears notifications, else 0: then it polls.",
                f64::from(u8::from(vitals.hearing == Hearing::Listening)),
            ),
        ]);
        families.extend(vitals.heartbeat_age.map(|age| {
            let help = "Since Postgres answered a heartbeat of this worker.";
            gauge("posthouse_worker_heartbeat_age_seconds", help, age.as_secs_f64())
        }));
        families
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("vitals", &self.vitals()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::SystemTime;

    use serde_json::value::RawValue;

    use super::*;
    use crate::metrics::Metrics;
    use crate::outcome::JobError;

    fn job(queue: &str, kind: &str, fence: i64, waited: Duration) -> ClaimedJob {
        ClaimedJob {
            id: 7,
            fence,
            attempt: 1,
            max_attempts: 5,
            kind: kind.into(),
            queue: queue.into(),
            tenant: "acme".into(),
            priority: 0,
            payload: RawValue::NULL.to_owned(),
            timeout: None,
            lane: 1,
            enqueued_at: SystemTime::now() - waited,
            trace: None,
            model: None,
        }
    }

    fn meter(queues: &[&str], kinds: &[&str]) -> Meter {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let meter = Meter::default();
        let beat = Duration::from_secs(5);
        meter.begin((names(queues), names(kinds)), (10, beat), Box::new(|| None), CancellationToken::new()).unwrap();
        meter
    }

    fn text(meter: &Meter) -> String {
        let metrics = Metrics::default();
        metrics.add(meter.clone());
        metrics.to_string()
    }

    #[test]
    fn each_queue_and_kind_has_counts_of_its_own_and_no_tenant_has() {
        let meter = meter(&["b", "a"], &["y", "x"]);
        let (one, other) = (job("a", "y", 1, Duration::from_secs(40)), job("b", "x", 2, Duration::from_secs(40)));
        for job in [&one, &other, &other] {
            meter.count(&Event::Started { job });
        }
        meter.count(&Event::Done { job: &one });
        meter.ran(&one, Duration::from_millis(20));
        meter.count(&Event::Retry { job: &other, delay: Duration::ZERO, error: &JobError::new("timeout", "slow") });
        meter.count(&Event::Failed { job: &other, error: None });
        let text = text(&meter);
        for line in [
            "posthouse_attempts_started_total{queue=\"a\",kind=\"y\"} 1\n",
            "posthouse_attempts_running{queue=\"a\",kind=\"y\"} 0\n",
            "posthouse_attempts_running{queue=\"b\",kind=\"x\"} 2\n",
            "posthouse_attempts_settled_total{queue=\"a\",kind=\"y\",outcome=\"done\"} 1\n",
            "posthouse_attempts_settled_total{queue=\"b\",kind=\"x\",outcome=\"retry\"} 1\n",
            "posthouse_attempt_errors_total{queue=\"b\",kind=\"x\",class=\"timeout\"} 1\n",
            "posthouse_attempt_errors_total{queue=\"b\",kind=\"x\",class=\"unknown\"} 1\n",
            "posthouse_job_wait_seconds_bucket{queue=\"a\",kind=\"y\",le=\"30\"} 0\n",
            "posthouse_job_wait_seconds_bucket{queue=\"a\",kind=\"y\",le=\"60\"} 1\n",
            // The second claim of a job says nothing about how long it waited for its first.
            "posthouse_job_wait_seconds_count{queue=\"b\",kind=\"x\"} 0\n",
            "posthouse_attempt_run_seconds_bucket{queue=\"a\",kind=\"y\",le=\"0.025\"} 1\n",
        ] {
            assert!(text.contains(line), "no {line} in {text}");
        }
        assert!(!text.contains("acme") && !text.contains("kind=\"x\",queue=\"a\""), "{text}");
    }

    #[test]
    fn waits_are_counted_by_the_clock_of_postgres() {
        let meter = meter(&["q"], &["k"]);
        meter.set_clock_ahead(-100.0);
        meter.count(&Event::Started { job: &job("q", "k", 1, Duration::from_secs(104)) });
        meter.set_clock_ahead(4.0);
        meter.count(&Event::Started { job: &job("q", "k", 1, Duration::ZERO) });
        // Whatever the clocks say, no wait is below zero.
        meter.set_clock_ahead(-4.0);
        meter.count(&Event::Started { job: &job("q", "k", 1, Duration::ZERO) });
        let text = text(&meter);
        for (bound, n) in [("0.005", 1), ("2.5", 1), ("5", 3)] {
            let line = format!("posthouse_job_wait_seconds_bucket{{queue=\"q\",kind=\"k\",le=\"{bound}\"}} {n}\n");
            assert!(text.contains(&line), "no {line} in {text}");
        }
    }

    #[test]
    fn names_and_classes_are_bounded() {
        let many: Vec<String> = (0..200).map(|n| format!("name{n:03}")).collect();
        let names: Vec<&str> = many.iter().map(String::as_str).collect();
        let meter = meter(&names, &names);
        for name in &names {
            let job = job(name, name, 1, Duration::ZERO);
            meter.count(&Event::Started { job: &job });
            meter.count(&Event::Failed { job: &job, error: Some(&JobError::new(format!("id {name}"), "odd")) });
        }
        let text = text(&meter);
        let lines = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
        assert_eq!(lines("posthouse_attempts_started_total{"), 51);
        assert!(text.contains("posthouse_attempts_started_total{queue=\"other\",kind=\"other\"} 150\n"), "{text}");
        assert_eq!(lines("posthouse_attempt_errors_total{"), 51);
        assert!(
            text.contains("posthouse_attempt_errors_total{queue=\"other\",kind=\"other\",class=\"other\"} 150\n"),
            "{text}"
        );
    }

    #[test]
    fn two_workers_do_not_share_one() {
        let meter = meter(&["q"], &["k"]);
        let again =
            meter.begin((Vec::new(), Vec::new()), (1, Duration::ZERO), Box::new(|| None), CancellationToken::new());
        assert!(again.unwrap_err().to_string().contains("another worker"));
    }
}
