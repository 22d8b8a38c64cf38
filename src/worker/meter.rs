//! What a worker counts for metrics, and its vital signs: whether it is registered, beats, hears notifications.
//!
//! A worker serves queues and kinds that it knows from the start, so their counters are laid out then, one cell for each pair: to
//! count is to find the cell by two binary searches and add to it, without a lock. Only errors, whose classes handlers make
//! up, are counted in a map, and only so many of them by name.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::event::Event;
use crate::metrics::{Family, Histogram, OTHER, SampleValue, Source, fold};
use crate::store::ClaimedJob;
use crate::worker::shared::Incarnation;

/// Queues and kinds of one worker that are told apart, each: pairs of them are cells of some hundred bytes.
const MOST_NAMES: usize = 50;
/// Classes of errors that are told apart. They are few unless a handler puts something into them that does not belong there.
const MOST_CLASSES: usize = 50;

/// The counters and vital signs of one worker: hand it to [`Builder::meter`](crate::worker::Builder::meter), and to a
/// [`Metrics`](crate::metrics::Metrics). A cheap clone; all clones are of the same worker.
#[derive(Clone, Default)]
pub struct Meter {
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    board: OnceLock<Board>,
    /// How far the database's clock is ahead of ours, in µs.
    clock_ahead_us: AtomicI64,
}

/// Laid out when the worker starts.
struct Board {
    queues: Names,
    kinds: Names,
    /// A cell for each queue and kind, queue by queue.
    cells: Vec<Cell>,
    /// By cell and class.
    errors: Mutex<Errors>,
    claims: AtomicU64,
    claimed: AtomicU64,
    registrations: AtomicU64,
    leases_lost: AtomicU64,
    disconnects: AtomicU64,
    slots: u32,
    heartbeat: Duration,
    /// What the milliseconds below count from.
    epoch: Instant,
    beaten_ms: AtomicU64,
    hearing: AtomicU8,
    incarnation: watch::Receiver<Option<Arc<Incarnation>>>,
    stop: CancellationToken,
}

/// The counts of one queue and kind.
#[derive(Default)]
struct Cell {
    started: AtomicU64,
    outcomes: [AtomicU64; OUTCOMES.len()],
    wait: Histogram,
    run: Histogram,
}

#[derive(Default)]
struct Errors {
    /// Every class that is told apart.
    classes: BTreeMap<String, ()>,
    counts: BTreeMap<(usize, String), u64>,
}

/// What becomes of attempts, in the order of the counters.
const OUTCOMES: [&str; 7] = ["done", "retry", "snoozed", "failed", "cancelled", "released", "lost"];

/// Names in order; beyond [`MOST_NAMES`] one for all the others.
struct Names(Vec<String>);

impl Names {
    fn new(mut names: Vec<String>) -> Self {
        names.sort_unstable();
        if names.len() > MOST_NAMES {
            names.truncate(MOST_NAMES);
            names.push(OTHER.to_owned());
        }
        Self(names)
    }

    fn place(&self, name: &str) -> usize {
        let known = &self.0[..self.0.len().min(MOST_NAMES)];
        known.binary_search_by(|known| known.as_str().cmp(name)).unwrap_or(self.0.len() - 1)
    }
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
        let incarnation = board.incarnation.borrow().clone().filter(|incarnation| !incarnation.over.is_cancelled());
        let beaten = board.beaten_ms.load(Ordering::Relaxed);
        Some(Vitals {
            worker: incarnation.as_ref().map(|incarnation| incarnation.worker),
            lease_remaining: incarnation.map_or(Duration::ZERO, |i| i.lease.remaining(Instant::now())),
            heartbeat_age: (beaten > 0).then(|| (board.epoch + Duration::from_millis(beaten)).elapsed()),
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
        incarnation: watch::Receiver<Option<Arc<Incarnation>>>,
        stop: CancellationToken,
    ) -> Result<()> {
        let (queues, kinds) = (Names::new(queues), Names::new(kinds));
        let cells = (0..queues.0.len() * kinds.0.len()).map(|_| Cell::default()).collect();
        let board = Board {
            queues,
            kinds,
            cells,
            errors: Mutex::default(),
            claims: AtomicU64::new(0),
            claimed: AtomicU64::new(0),
            registrations: AtomicU64::new(0),
            leases_lost: AtomicU64::new(0),
            disconnects: AtomicU64::new(0),
            slots,
            heartbeat,
            epoch: Instant::now(),
            beaten_ms: AtomicU64::new(0),
            hearing: AtomicU8::new(0),
            incarnation,
            stop,
        };
        let set = self.inner.board.set(board);
        set.map_err(|_| Error::config("meter: it belongs to another worker already; each needs one of its own"))
    }

    /// Counts a transition.
    pub(crate) fn count(&self, event: &Event<'_>) {
        let Some(board) = self.inner.board.get() else { return };
        let (job, outcome) = match event {
            Event::Started { job } => return self.started(board, job),
            Event::Done { job } => (job, 0),
            Event::Retry { job, error, .. } => {
                board.error(job, &error.class);
                (job, 1)
            }
            Event::Snoozed { job, .. } => (job, 2),
            Event::Failed { job, error } => {
                board.error(job, error.map_or("unknown", |error| &error.class));
                (job, 3)
            }
            Event::Cancelled { job } => (job, 4),
            Event::Released { job } => (job, 5),
            Event::Lost { job } => (job, 6),
            Event::Registered { .. } => return add(&board.registrations, 1),
            Event::LeaseLost { .. } => return add(&board.leases_lost, 1),
            Event::ConnectionLost { .. } => return add(&board.disconnects, 1),
            _ => return,
        };
        add(&board.cell(job).outcomes[outcome], 1);
    }

    fn started(&self, board: &Board, job: &ClaimedJob) {
        let cell = board.cell(job);
        add(&cell.started, 1);
        // Later claims say nothing about how long a job waited for its first.
        if job.fence == 1 {
            let ahead = self.inner.clock_ahead_us.load(Ordering::Relaxed);
            let now = match Duration::from_micros(ahead.unsigned_abs()) {
                offset if ahead < 0 => SystemTime::now() - offset,
                offset => SystemTime::now() + offset,
            };
            cell.wait.count(now.duration_since(job.enqueued_at).unwrap_or_default());
        }
    }

    /// A handler ran for so long, whatever it came to.
    pub(crate) fn ran(&self, job: &ClaimedJob, time: Duration) {
        if let Some(board) = self.inner.board.get() {
            board.cell(job).run.count(time);
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
            let ms = u64::try_from(board.epoch.elapsed().as_millis()).unwrap_or(u64::MAX);
            board.beaten_ms.store(ms.max(1), Ordering::Relaxed);
        }
    }

    /// Whether notifications are heard now.
    pub(crate) fn hears(&self, hearing: Hearing) {
        if let Some(board) = self.inner.board.get() {
            board.hearing.store(hearing as u8, Ordering::Relaxed);
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[allow(clippy::cast_precision_loss)]
fn number(counter: &AtomicU64) -> f64 {
    counter.load(Ordering::Relaxed) as f64
}

impl Board {
    fn place(&self, job: &ClaimedJob) -> usize {
        self.queues.place(&job.queue) * self.kinds.0.len() + self.kinds.place(&job.kind)
    }

    fn cell(&self, job: &ClaimedJob) -> &Cell {
        &self.cells[self.place(job)]
    }

    fn error(&self, job: &ClaimedJob, class: &str) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        let class = fold(&errors.classes, class, MOST_CLASSES).to_owned();
        if !errors.classes.contains_key(&class) {
            errors.classes.insert(class.clone(), ());
        }
        *errors.counts.entry((self.place(job), class)).or_default() += 1;
    }

    /// The labels of a cell.
    fn names(&self, cell: usize) -> [(&'static str, &str); 2] {
        let kinds = self.kinds.0.len();
        [("queue", &self.queues.0[cell / kinds]), ("kind", &self.kinds.0[cell % kinds])]
    }

    /// What is told apart by queue and kind; only cells in which something happened.
    #[allow(clippy::cast_precision_loss)]
    fn by_kind(&self) -> Vec<Family> {
        let mut started = Family::counter("posthouse_attempts_started_total", "Attempts that this worker has started.");
        let mut running =
            Family::gauge("posthouse_attempts_running", "Attempts whose handler runs in this worker now.");
        let mut settled = Family::counter(
            "posthouse_attempts_settled_total",
            "Attempts that ended, by what became of them; recorded, but for those that were lost.",
        );
        let mut errors = Family::counter(
            "posthouse_attempt_errors_total",
            "Attempts that ended with an error, by its class; another attempt may follow.",
        );
        let mut wait = Family::histogram(
            "posthouse_job_wait_seconds",
            "From the enqueue of a job, its delay included, to its first start in this worker.",
        );
        let mut run = Family::histogram(
            "posthouse_attempt_run_seconds",
            "From the start of an attempt to the end of its handler.",
        );
        for (place, cell) in self.cells.iter().enumerate().filter(|(_, cell)| number(&cell.started) > 0.0) {
            let names = self.names(place);
            // Ended ones first, so that there are never more of them than were started.
            let ended = cell.run.total() as f64;
            started.push(&names, SampleValue::Number(number(&cell.started)));
            running.push(&names, SampleValue::Number(number(&cell.started) - ended));
            for (outcome, counter) in OUTCOMES.iter().zip(&cell.outcomes) {
                settled.push(&[names[0], names[1], ("outcome", outcome)], SampleValue::Number(number(counter)));
            }
            wait.push(&names, cell.wait.value());
            run.push(&names, cell.run.value());
        }
        let counts = &self.errors.lock().unwrap_or_else(PoisonError::into_inner).counts;
        for ((place, class), n) in counts {
            let names = self.names(*place);
            errors.push(&[names[0], names[1], ("class", class)], SampleValue::Number(*n as f64));
        }
        vec![started, running, settled, errors, wait, run]
    }
}

impl Source for Meter {
    fn families(&self) -> Vec<Family> {
        let (Some(board), Some(vitals)) = (self.inner.board.get(), self.vitals()) else { return Vec::new() };
        let counter = |name, help, counter: &AtomicU64| Family::counter(name, help).with(&[], number(counter));
        let gauge = |name, help, value: f64| Family::gauge(name, help).with(&[], value);
        let mut families = board.by_kind();
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
        let (meter, incarnation) = (Meter::default(), watch::Sender::new(None));
        let beat = Duration::from_secs(5);
        meter
            .begin((names(queues), names(kinds)), (10, beat), incarnation.subscribe(), CancellationToken::new())
            .unwrap();
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
        let again = meter.begin(
            (Vec::new(), Vec::new()),
            (1, Duration::ZERO),
            watch::Sender::new(None).subscribe(),
            CancellationToken::new(),
        );
        assert!(again.unwrap_err().to_string().contains("another worker"));
    }
}
