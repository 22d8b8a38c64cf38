//! Attempts counted by queue and kind.
//!
//! A worker serves queues and kinds that it knows from the start, so their counters are laid out then, one cell for each pair: to
//! count is to find the cell by two binary searches and add to it, without a lock. Only errors, whose classes handlers make
//! up, are counted in a map, and only so many of them by name. Threads have places of their own in a cell, since two that add to one
//! counter wait for each other's caches.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use crate::event::Event;
use crate::metrics::{Family, Histogram, OTHER, SampleValue, fold};
use crate::store::ClaimedJob;

/// Queues and kinds of one worker that are told apart, each: pairs of them are cells of some hundred bytes.
const MOST_NAMES: usize = 50;
/// Classes of errors that are told apart. They are few unless a handler puts something into them that does not belong there.
const MOST_CLASSES: usize = 50;

/// What attempts came to, by queue and kind.
pub(crate) struct Attempts {
    queues: Names,
    kinds: Names,
    /// Cells for each queue and kind, queue by queue: as many as there are places for threads.
    cells: Vec<Cell>,
    /// By cell and class.
    errors: Mutex<Errors>,
}

/// Threads that have places of their own; further ones share them.
const PLACES: usize = 4;
static NEXT_PLACE: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    static PLACE: usize = NEXT_PLACE.fetch_add(1, Ordering::Relaxed) % PLACES;
}

/// The counts of one queue and kind by one thread, or by some. On cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
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

impl Attempts {
    /// Lays out the cells.
    pub(crate) fn new(queues: Vec<String>, kinds: Vec<String>) -> Self {
        let (queues, kinds) = (Names::new(queues), Names::new(kinds));
        let cells = (0..queues.0.len() * kinds.0.len() * PLACES).map(|_| Cell::default()).collect();
        Self { queues, kinds, cells, errors: Mutex::default() }
    }

    /// Counts what an event says of an attempt. `ahead_us`: how far the clock by which jobs were enqueued is ahead of ours.
    pub(crate) fn count(&self, event: &Event<'_>, ahead_us: i64) {
        let (job, outcome) = match event {
            Event::Started { job } => return self.started(job, ahead_us),
            Event::Done { job } => (job, 0),
            Event::Retry { job, error, .. } => {
                self.error(job, &error.class);
                (job, 1)
            }
            Event::Snoozed { job, .. } => (job, 2),
            Event::Failed { job, error } => {
                self.error(job, error.map_or("unknown", |error| &error.class));
                (job, 3)
            }
            Event::Cancelled { job } => (job, 4),
            Event::Released { job } => (job, 5),
            Event::Lost { job } => (job, 6),
            _ => return,
        };
        add(&self.cell(job).outcomes[outcome], 1);
    }

    fn started(&self, job: &ClaimedJob, ahead_us: i64) {
        let cell = self.cell(job);
        add(&cell.started, 1);
        // Later claims say nothing about how long a job waited for its first.
        if job.fence == 1 {
            let now = match Duration::from_micros(ahead_us.unsigned_abs()) {
                offset if ahead_us < 0 => SystemTime::now() - offset,
                offset => SystemTime::now() + offset,
            };
            cell.wait.count(now.duration_since(job.enqueued_at).unwrap_or_default());
        }
    }

    /// A handler ran for so long, whatever it came to.
    pub(crate) fn ran(&self, job: &ClaimedJob, time: Duration) {
        self.cell(job).run.count(time);
    }

    fn place(&self, job: &ClaimedJob) -> usize {
        self.queues.place(&job.queue) * self.kinds.0.len() + self.kinds.place(&job.kind)
    }

    fn cell(&self, job: &ClaimedJob) -> &Cell {
        &self.cells[self.place(job) * PLACES + PLACE.with(|place| *place)]
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
    pub(crate) fn families(&self) -> Vec<Family> {
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
        for (place, cells) in self.cells.chunks(PLACES).enumerate() {
            let sum = |of: &dyn Fn(&Cell) -> u64| cells.iter().map(of).sum::<u64>() as f64;
            // Ended ones first, so that there are never more of them than were started.
            let ended = sum(&|cell| cell.run.total());
            let begun = sum(&|cell| cell.started.load(Ordering::Relaxed));
            if begun == 0.0 {
                continue;
            }
            let names = self.names(place);
            started.push(&names, SampleValue::Number(begun));
            running.push(&names, SampleValue::Number(begun - ended));
            for (at, outcome) in OUTCOMES.iter().enumerate() {
                let ended = sum(&|cell| cell.outcomes[at].load(Ordering::Relaxed));
                settled.push(&[names[0], names[1], ("outcome", outcome)], SampleValue::Number(ended));
            }
            wait.push(&names, all(cells, |cell| &cell.wait));
            run.push(&names, all(cells, |cell| &cell.run));
        }
        let counts = &self.errors.lock().unwrap_or_else(PoisonError::into_inner).counts;
        for ((place, class), n) in counts {
            let names = self.names(*place);
            errors.push(&[names[0], names[1], ("class", class)], SampleValue::Number(*n as f64));
        }
        vec![started, running, settled, errors, wait, run]
    }
}

/// One histogram of those of several cells.
fn all(cells: &[Cell], of: fn(&Cell) -> &Histogram) -> SampleValue {
    let mut sum = Histogram::default().value();
    cells.iter().for_each(|cell| sum.add(&of(cell).value(), false));
    sum
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[allow(clippy::cast_precision_loss)]
pub(crate) fn number(counter: &AtomicU64) -> f64 {
    counter.load(Ordering::Relaxed) as f64
}
