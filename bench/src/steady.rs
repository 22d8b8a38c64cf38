//! A steady load: calls at a fixed pace, each with a few jobs, and how long each job waited for its handler.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use posthouse::{NewJob, Posthouse};

use crate::error::Result;
use crate::figure::Course;
use crate::ground::Scratch;
use crate::jobs::Noop;
use crate::sizes::{STEADY_CALLS, STEADY_JOBS};

/// One job of so many carries a dedupe key.
const KEYED: u32 = 10;
/// So many keys, used again and again: each again after ten seconds.
const KEYS: u32 = 1_000;
/// A chart has about so many points.
const POINTS: f64 = 120.0;

/// When jobs were enqueued and started.
#[derive(Clone, Default)]
pub(crate) struct Waits(Arc<Mutex<Seen>>);

#[derive(Default)]
struct Seen {
    called: Vec<Instant>,
    started: Vec<Start>,
}

#[derive(Clone, Copy)]
struct Start {
    called: Instant,
    started: Instant,
}

impl Waits {
    /// A job's handler starts now.
    pub(crate) fn start(&self, job: &Noop) {
        let started = Instant::now();
        let mut seen = self.seen();
        let called = seen.called[(job.n / STEADY_JOBS) as usize];
        seen.started.push(Start { called, started });
    }

    fn call(&self, at: Instant) {
        self.seen().called.push(at);
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From call to start in ms, of the calls in this time.
    pub(crate) fn milliseconds(&self, from: Instant, time: Duration) -> Vec<f64> {
        let seen = self.seen();
        let within = seen.started.iter().filter(|s| s.called >= from && s.called < from + time);
        within.map(|s| (s.started - s.called).as_secs_f64() * 1e3).collect()
    }

    /// Handlers started in this time.
    pub(crate) fn started(&self, from: Instant, time: Duration) -> usize {
        self.seen().started.iter().filter(|s| s.started >= from && s.started < from + time).count()
    }

    /// Started handlers a second, over this time.
    pub(crate) fn throughput(&self, from: Instant, time: Duration, line: &str) -> Course {
        let step = step(time);
        let points = steps(time, step);
        let points = points.map(|n| (at(n, step), at_most(self.started(from + step * n, step)) / step.as_secs_f64()));
        Course { of: "throughput", unit: "jobs/s", line: line.to_owned(), points: points.collect() }
    }

    /// The time from call to start that 99 of 100 jobs did not exceed, over this time.
    pub(crate) fn p99(&self, from: Instant, time: Duration, line: &str) -> Course {
        let step = step(time);
        let points = steps(time, step).filter_map(|n| {
            let mut waits = self.milliseconds(from + step * n, step);
            waits.sort_by(f64::total_cmp);
            Some((at(n, step), *waits.get(waits.len() * 99 / 100)?))
        });
        Course { of: "latency p99", unit: "ms", line: line.to_owned(), points: points.collect() }
    }
}

/// The time that one point of a chart stands for.
fn step(time: Duration) -> Duration {
    let seconds = [1_u32, 2, 5, 10, 30, 60].into_iter().find(|s| time.as_secs_f64() / f64::from(*s) <= POINTS);
    Duration::from_secs(seconds.unwrap_or(300).into()).min(time)
}

fn steps(time: Duration, step: Duration) -> impl Iterator<Item = u32> {
    (0..).take_while(move |n| step * (n + 1) <= time)
}

/// The middle of a step, in seconds.
fn at(n: u32, step: Duration) -> f64 {
    (f64::from(n) + 0.5) * step.as_secs_f64()
}

/// Counts of jobs are far below what would not fit.
fn at_most(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Enqueues for so long, for so many tenants in turn. Answers with the number of jobs that are there because of it: less
/// than were asked for where a key was still in use.
pub(crate) async fn enqueue(scratch: &Scratch, waits: &Waits, tenants: u32, time: Duration) -> Result<usize> {
    let queue = Posthouse::connect(&scratch.url).await?;
    let start = Instant::now();
    let mut enqueued = 0;
    for call in 0.. {
        let due = start + Duration::from_secs(1) * call / STEADY_CALLS;
        if due >= start + time {
            break;
        }
        let jobs = (call * STEADY_JOBS..(call + 1) * STEADY_JOBS)
            .map(|n| job(n, tenants))
            .collect::<posthouse::Result<Vec<_>>>()?;
        // A call that comes late, since the one before took long, is counted from when it should have come.
        let at = if due > Instant::now() {
            tokio::time::sleep_until(due.into()).await;
            Instant::now()
        } else {
            due
        };
        waits.call(at);
        enqueued += queue.enqueue_many(&jobs).await?.iter().filter(|answer| !answer.duplicate).count();
    }
    Ok(enqueued)
}

fn job(n: u32, tenants: u32) -> posthouse::Result<NewJob> {
    let job = NewJob::of(&Noop { n })?.tenant(format!("tenant-{}", n % tenants));
    Ok(if n.is_multiple_of(KEYED) { job.dedupe_key(format!("key-{}", n / KEYED % KEYS)) } else { job })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_a_point_for_each_whole_step() {
        let seconds = Duration::from_secs;
        assert_eq!([4, 120, 600, 3_600].map(|time| step(seconds(time))), [1, 1, 5, 30].map(seconds));
        assert_eq!(steps(seconds(600), seconds(5)).count(), 120);
        assert_eq!(step(Duration::from_millis(300)), Duration::from_millis(300));
    }

    #[test]
    fn what_waited_is_counted_by_its_call_and_what_started_by_its_start() {
        let (waits, from, second) = (Waits::default(), Instant::now(), Duration::from_secs(1));
        let start = |called, started| Start { called: from + called, started: from + started };
        waits.seen().started =
            vec![start(second / 2, second * 3 / 4), start(second * 3 / 4, second * 2), start(second, second * 2)];
        assert_eq!(waits.milliseconds(from, second), [250.0, 1250.0]);
        assert_eq!(waits.started(from, second), 1);
        assert_eq!(waits.throughput(from, second * 3, "all").points, [(0.5, 1.0), (1.5, 0.0), (2.5, 2.0)]);
        assert_eq!(waits.p99(from, second * 2, "all").points, [(0.5, 1250.0), (1.5, 1000.0)]);
    }
}
