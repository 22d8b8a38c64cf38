//! What is served: what this process counts, and what Postgres told last about the fleet.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use posthouse::metrics::{Family, Metrics, Source};
use posthouse::store::{Database, FleetMetrics};
use posthouse::worker::Meter;

/// What was answered so long ago is not served any more.
const STALE: Duration = Duration::from_secs(60);
/// Postgres does not answer if it has not for so long: one question every five seconds, and the time it may take.
const ANSWERS: Duration = Duration::from_secs(15);

/// What is served.
pub(super) struct Book {
    pub(super) metrics: Metrics,
    pub(super) meter: Meter,
    /// The process runs a worker; if not, it only sweeps.
    pub(super) works: bool,
    pub(super) fleet: Fleet,
    pub(super) database: Database,
}

impl Book {
    /// Nothing is counted yet.
    pub(super) fn new(works: bool, database: Database) -> Self {
        let book =
            Self { metrics: Metrics::default(), meter: Meter::default(), works, fleet: Fleet::default(), database };
        book.metrics.add(book.meter.clone());
        book.metrics.add(book.fleet.clone());
        book.metrics.add(Build);
        book
    }
}

/// What Postgres told last, and when.
#[derive(Clone, Default)]
pub(super) struct Fleet(Arc<Mutex<Option<(Instant, FleetMetrics)>>>);

impl Fleet {
    pub(super) fn keep(&self, fleet: FleetMetrics) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), fleet));
    }

    /// The newest answer of Postgres, if it is fresh, and how old it is.
    fn newest(&self) -> Option<(Duration, FleetMetrics)> {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, fleet) = told.as_ref()?;
        let age = at.elapsed();
        (age < STALE).then(|| (age, fleet.clone()))
    }

    /// Since anybody swept, as far as is known.
    pub(super) fn swept(&self) -> Option<Duration> {
        let (age, fleet) = self.newest()?;
        Some(fleet.sweep_age? + age)
    }
}

impl Source for Fleet {
    fn families(&self) -> Vec<Family> {
        let known = self.newest();
        let answers = known.as_ref().is_some_and(|(age, _)| *age < ANSWERS);
        let up =
            Family::gauge("posthouse_database_up", "1 if Postgres answered this process within 15 seconds, else 0.");
        let mut families = vec![up.with(&[], f64::from(u8::from(answers)))];
        if let Some((_, fleet)) = known {
            let help = "How far the clock of Postgres is ahead of this machine's; 0 where the difference is too small to tell.";
            families.push(Family::gauge("posthouse_clock_ahead_seconds", help).with(&[], fleet.clock_ahead));
            families.extend(fleet.families);
        }
        families
    }
}

/// Which program this is.
struct Build;

impl Source for Build {
    fn families(&self) -> Vec<Family> {
        let info = Family::gauge("posthouse_build_info", "Always 1; the label says which version this process is.");
        vec![info.with(&[("version", env!("CARGO_PKG_VERSION"))], 1.0)]
    }
}
