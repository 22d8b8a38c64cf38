//! What is counted, in the shape that Prometheus reads: families of samples with few labels. Pure: who counts hands over what
//! it has ([`Source`]), and a [`Metrics`] puts all of it together.
//!
//! Every name begins with `posthouse_`, every unit is a base unit, and no label holds anything of which there may be ever more:
//! no job, no tenant, no worker id. Names that come from outside are bounded by [`fold`].

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What further names are counted under once there are as many as are told apart.
pub const OTHER: &str = "other";

/// Upper bounds of the buckets of every histogram of durations, in seconds: from a job that does nothing to an agent's run of
/// hours.
pub const SECONDS: [f64; 19] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1_800.0, 3_600.0,
    14_400.0,
];

/// Everything that is counted under one name.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// Its name, such as `posthouse_claims_total`.
    pub name: &'static str,
    /// What it means, in a sentence.
    pub help: &'static str,
    /// How it behaves.
    pub kind: FamilyKind,
    /// The values, told apart by their labels.
    pub samples: Vec<Sample>,
}

/// How the values of a family behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FamilyKind {
    /// They only grow, from zero at the start of the process.
    Counter,
    /// They are as they are now.
    Gauge,
    /// They are counts by size.
    Histogram,
}

/// One value.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Names and values that tell it apart from the others of its family.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: SampleValue,
}

/// What a sample holds.
#[derive(Debug, Clone, PartialEq)]
pub enum SampleValue {
    /// A number.
    Number(f64),
    /// A histogram.
    Histogram {
        /// How many fell into each bucket of [`SECONDS`], and, last, how many were larger than all of them.
        counts: Vec<u64>,
        /// All of them added up, in seconds.
        sum: f64,
    },
}

impl Family {
    /// A counter.
    pub fn counter(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: FamilyKind::Counter, samples: Vec::new() }
    }

    /// A gauge.
    pub fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: FamilyKind::Gauge, samples: Vec::new() }
    }

    /// A histogram of durations.
    pub fn histogram(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: FamilyKind::Histogram, samples: Vec::new() }
    }

    /// The same with one more number.
    #[must_use]
    pub fn with(mut self, labels: &[(&'static str, &str)], value: f64) -> Self {
        self.push(labels, SampleValue::Number(value));
        self
    }

    /// Adds a value.
    pub fn push(&mut self, labels: &[(&'static str, &str)], value: SampleValue) {
        let labels = labels.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        self.samples.push(Sample { labels, value });
    }

    /// Takes the samples of the same family from another source; equal labels are added up, but of ages the oldest counts.
    fn take(&mut self, samples: Vec<Sample>) {
        let is_age = self.name.ends_with("_age_seconds");
        for sample in samples {
            match self.samples.iter_mut().find(|own| own.labels == sample.labels) {
                Some(own) => own.value.add(&sample.value, is_age),
                None => self.samples.push(sample),
            }
        }
    }
}

impl SampleValue {
    pub(crate) fn add(&mut self, other: &Self, is_age: bool) {
        match (self, other) {
            (Self::Number(own), Self::Number(more)) if is_age => *own = own.max(*more),
            (Self::Number(own), Self::Number(more)) => *own += more,
            (Self::Histogram { counts, sum }, Self::Histogram { counts: more, sum: more_sum }) => {
                counts.iter_mut().zip(more).for_each(|(own, more)| *own += more);
                *sum += more_sum;
            }
            // A family is of one kind.
            (Self::Number(_), Self::Histogram { .. }) | (Self::Histogram { .. }, Self::Number(_)) => {}
        }
    }
}

/// The text that Prometheus reads (exposition format 0.0.4). A family without samples is left out.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.samples.is_empty() {
            return Ok(());
        }
        let kind = match self.kind {
            FamilyKind::Counter => "counter",
            FamilyKind::Gauge => "gauge",
            FamilyKind::Histogram => "histogram",
        };
        writeln!(f, "# HELP {} {}\n# TYPE {} {kind}", self.name, self.help, self.name)?;
        for Sample { labels, value } in &self.samples {
            match value {
                SampleValue::Number(value) => writeln!(f, "{}{} {}", self.name, Labels(labels, None), Number(*value))?,
                SampleValue::Histogram { counts, sum } => {
                    let mut total = 0;
                    for (at, count) in counts.iter().enumerate() {
                        total += count;
                        let bound = SECONDS.get(at).copied().unwrap_or(f64::INFINITY);
                        writeln!(f, "{}_bucket{} {total}", self.name, Labels(labels, Some(bound)))?;
                    }
                    writeln!(f, "{}_sum{} {}", self.name, Labels(labels, None), Number(*sum))?;
                    writeln!(f, "{}_count{} {total}", self.name, Labels(labels, None))?;
                }
            }
        }
        Ok(())
    }
}

/// Labels in braces; with the upper bound of a bucket if it is one.
struct Labels<'a>(&'a [(&'static str, String)], Option<f64>);

impl fmt::Display for Labels<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = '{';
        for (name, value) in self.0 {
            write!(f, "{separator}{name}=\"")?;
            for letter in value.chars() {
                match letter {
                    '\\' => f.write_str("\\\\")?,
                    '"' => f.write_str("\\\"")?,
                    '\n' => f.write_str("\\n")?,
                    letter => f.write_char(letter)?,
                }
            }
            f.write_char('"')?;
            separator = ',';
        }
        if let Some(bound) = self.1 {
            write!(f, "{separator}le=\"{}\"", Number(bound))?;
            separator = ',';
        }
        if separator == ',' { f.write_char('}') } else { Ok(()) }
    }
}

/// A number as Prometheus writes it.
struct Number(f64);

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_infinite() {
            return f.write_str(if self.0 > 0.0 { "+Inf" } else { "-Inf" });
        }
        // NaN is written as that.
        write!(f, "{}", self.0)
    }
}

/// Something that counts.
pub trait Source: Send + Sync {
    /// What it has counted so far.
    fn families(&self) -> Vec<Family>;
}

/// All that a process counts: hand it every [`Source`], and print it. A cheap clone; all clones are the same.
///
/// ```
/// use posthouse::metrics::Metrics;
/// use posthouse::worker::Meter;
/// let (metrics, meter) = (Metrics::default(), Meter::default());
/// metrics.add(meter.clone());
/// // Worker::builder(queue).meter(&meter) … and, whenever somebody asks:
/// println!("{metrics}");
/// ```
#[derive(Clone, Default)]
pub struct Metrics {
    sources: Arc<Mutex<Vec<Box<dyn Source>>>>,
}

impl Metrics {
    /// Adds something that counts.
    pub fn add(&self, source: impl Source + 'static) {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(source));
    }

    /// What all of them have counted, by name. What several count under one name is one family.
    pub fn families(&self) -> Vec<Family> {
        let mut all: BTreeMap<&'static str, Family> = BTreeMap::new();
        for source in self.sources.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            for family in source.families() {
                match all.get_mut(family.name) {
                    Some(own) => own.take(family.samples),
                    None => {
                        all.insert(family.name, family);
                    }
                }
            }
        }
        all.into_values().collect()
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.families().iter().try_for_each(|family| family.fmt(f))
    }
}

/// Counts durations by size: two additions a time, no lock.
#[derive(Debug, Default)]
pub struct Histogram {
    counts: [AtomicU64; SECONDS.len() + 1],
    sum_us: AtomicU64,
}

impl Histogram {
    /// Counts a duration.
    pub fn count(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = SECONDS.partition_point(|bound| *bound < seconds);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// How many were counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// What was counted.
    #[allow(clippy::cast_precision_loss)]
    pub fn value(&self) -> SampleValue {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        SampleValue::Histogram { counts, sum: self.sum_us.load(Ordering::Relaxed) as f64 / 1e6 }
    }
}

/// The name to count under: itself while fewer than `most` names are told apart or it is among them, else [`OTHER`].
pub fn fold<'a, V>(known: &BTreeMap<String, V>, name: &'a str, most: usize) -> &'a str {
    if known.len() < most || known.contains_key(name) { name } else { OTHER }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Twice;

    impl Source for Twice {
        fn families(&self) -> Vec<Family> {
            let histogram = Histogram::default();
            histogram.count(Duration::from_millis(5));
            histogram.count(Duration::from_secs(100_000));
            let mut seconds = Family::histogram("posthouse_run_seconds", "How long.");
            seconds.push(&[("queue", "q")], histogram.value());
            vec![
                seconds,
                Family::counter("posthouse_b_total", "Of b.").with(&[("name", "a\"b\\c\nd"), ("n", "1")], 1.0),
                Family::gauge("posthouse_a", "Of a.").with(&[], 0.5),
                Family::gauge("posthouse_none", "Nothing."),
            ]
        }
    }

    #[test]
    fn it_is_written_as_prometheus_reads_it() {
        let metrics = Metrics::default();
        metrics.add(Twice);
        let text = metrics.to_string();
        assert!(text.starts_with(
            "# HELP posthouse_a Of a.\n# TYPE posthouse_a gauge\nposthouse_a 0.5\n# HELP posthouse_b_total"
        ));
        assert!(text.contains("posthouse_b_total{name=\"a\\\"b\\\\c\\nd\",n=\"1\"} 1\n"), "{text}");
        for line in [
            "posthouse_run_seconds_bucket{queue=\"q\",le=\"0.005\"} 1\n",
            "posthouse_run_seconds_bucket{queue=\"q\",le=\"14400\"} 1\n",
            "posthouse_run_seconds_bucket{queue=\"q\",le=\"+Inf\"} 2\n",
            "posthouse_run_seconds_sum{queue=\"q\"} 100000.005\n",
            "posthouse_run_seconds_count{queue=\"q\"} 2\n",
        ] {
            assert!(text.contains(line), "no {line} in {text}");
        }
        assert!(!text.contains("posthouse_none"));
    }

    #[test]
    fn what_two_sources_count_under_one_name_is_added_up() {
        let metrics = Metrics::default();
        metrics.add(Twice);
        metrics.add(Twice);
        let text = metrics.to_string();
        assert_eq!(text.matches("# TYPE posthouse_a gauge").count(), 1);
        assert!(text.contains("\nposthouse_a 1\n") && text.contains("_count{queue=\"q\"} 4\n"), "{text}");
    }

    #[test]
    fn names_beyond_the_bound_are_counted_together() {
        let known: BTreeMap<String, u64> = [("a".to_owned(), 1), ("b".to_owned(), 1)].into();
        assert_eq!((fold(&known, "a", 2), fold(&known, "c", 2), fold(&known, "c", 3)), ("a", OTHER, "c"));
    }
}
