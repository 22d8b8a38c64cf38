//! What metrics say about the whole fleet, as the sweep counted it last, and how much work a queue has for an autoscaler.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tokio_postgres::types::Type;

use super::connection::{Store, p};
use crate::error::Result;
use crate::metrics::{Family, FamilyKind, SampleValue};

/// What the sweep counted for the whole fleet: every process that asks hears the same.
#[derive(Debug, Clone)]
pub struct FleetMetrics {
    /// In the shape that Prometheus reads. Empty until a sweep has counted.
    pub families: Vec<Family>,
    /// How far the clock of Postgres is ahead of this machine's, in seconds; zero where the round trip does not let us tell.
    pub clock_ahead: f64,
    /// Since any part of the sweep ran last, anywhere. `None`: never.
    pub sweep_age: Option<Duration>,
}

use FamilyKind::{Counter, Gauge};

/// Name, kind, labels, help.
type Known = (&'static str, FamilyKind, &'static [&'static str], &'static str);

/// Every name that `posthouse.metrics` answers with. The same from every process, so that a dashboard takes their maximum.
const KNOWN: &[Known] = &[
    (
        "posthouse_queue_due_jobs",
        Gauge,
        &["queue"],
        "Queued jobs whose time has come, those behind a gate included; fleet-wide.",
    ),
    ("posthouse_queue_held_jobs", Gauge, &["queue"], "Due jobs that wait behind a gate; fleet-wide."),
    ("posthouse_queue_later_jobs", Gauge, &["queue"], "Queued jobs whose time has not come; fleet-wide."),
    ("posthouse_queue_running_jobs", Gauge, &["queue"], "Jobs under a lease; fleet-wide."),
    ("posthouse_queue_dead_letters", Gauge, &["queue"], "Dead letters that nobody has redriven or purged; fleet-wide."),
    (
        "posthouse_queue_ended_jobs_total",
        Counter,
        &["queue", "state"],
        "Jobs that were ever done or cancelled; fleet-wide, over all restarts.",
    ),
    (
        "posthouse_queue_oldest_due_age_seconds",
        Gauge,
        &["queue"],
        "For how long the oldest due job has waited that no closed gate holds back; 0 without one; fleet-wide.",
    ),
    ("posthouse_fleet_workers", Gauge, &["state"], "Registered workers, by whether their lease stands; fleet-wide."),
    ("posthouse_fleet_slots", Gauge, &[], "Jobs that all live workers together can run at once."),
    (
        "posthouse_gates_closed",
        Gauge,
        &["scope", "closed_by"],
        "Closed gates, by what they are for and who closed them.",
    ),
    (
        "posthouse_gate_room_ratio",
        Gauge,
        &["scope"],
        "Free share of the fullest gate with a limit of running jobs: 0 is full.",
    ),
    (
        "posthouse_schedule_missed_ticks_total",
        Counter,
        &["schedule"],
        "Ticks that no process saw in time and that were not made up for; fleet-wide, over all restarts.",
    ),
    (
        "posthouse_database_xmin_age_seconds",
        Gauge,
        &[],
        "Age of the oldest transaction that keeps dead rows from being vacuumed.",
    ),
    (
        "posthouse_database_xmin_age_transactions",
        Gauge,
        &[],
        "The same in transactions, replication slots and standbys included.",
    ),
    (
        "posthouse_database_connections",
        Gauge,
        &["owner"],
        "Client connections of the server, by whether they are Posthouse's.",
    ),
    ("posthouse_database_connections_max", Gauge, &[], "Connections that the server allows."),
    ("posthouse_table_live_rows", Gauge, &["table"], "Live rows, as Postgres estimates them; partitions together."),
    ("posthouse_table_dead_rows", Gauge, &["table"], "Dead rows that wait for vacuum, as Postgres estimates them."),
    ("posthouse_table_bytes", Gauge, &["table"], "Size with indexes and TOAST; partitions together."),
    (
        "posthouse_sweep_ran_timestamp_seconds",
        Gauge,
        &["part"],
        "When a part of the sweep ran last, anywhere; 0: never.",
    ),
    ("posthouse_sweep_duration_seconds", Gauge, &["part"], "What the last run of a part of the sweep took."),
    ("posthouse_sweep_runs_total", Counter, &["part"], "Runs of a part of the sweep; fleet-wide, over all restarts."),
    ("posthouse_sweep_failures_total", Counter, &["part"], "Those that failed; fleet-wide, over all restarts."),
    ("posthouse_sweep_failing", Gauge, &["part"], "1 if the last run of a part of the sweep failed, else 0."),
    (
        "posthouse_gauges_counted_timestamp_seconds",
        Gauge,
        &["part"],
        "When the fleet-wide gauges were counted that this process serves.",
    ),
    ("posthouse_gauges_duration_seconds", Gauge, &["part"], "What counting them took."),
];

const PREFIX: &str = "posthouse_";

impl Store {
    /// What metrics say about the whole fleet. Cheap: nothing is counted now.
    pub async fn fleet_metrics(&self) -> Result<FleetMetrics> {
        let (asked, before) = (Instant::now(), SystemTime::now());
        let rows = self.call("select name, labels, value from posthouse.metrics()", Vec::new()).await?;
        let round_trip = asked.elapsed();
        let mut families: Vec<Family> = KNOWN.iter().map(family).collect();
        let (mut clock, mut swept) = (None, 0_f64);
        for row in &rows {
            let (name, labels, value): (&str, Value, f64) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
            match name {
                "clock" => clock = Some(value),
                "sweep_ran_timestamp_seconds" => swept = swept.max(value),
                _ => {}
            }
            // A newer schema may know more: that is for newer binaries.
            let known = KNOWN.iter().position(|known| known.0.strip_prefix(PREFIX) == Some(name));
            if let Some(at) = known {
                let label = |name: &&'static str| (*name, labels[*name].as_str().unwrap_or_default());
                let labels: Vec<_> = KNOWN[at].2.iter().map(label).collect();
                families[at].push(&labels, SampleValue::Number(value));
            }
        }
        families.retain(|family| !family.samples.is_empty());
        let age = clock.filter(|_| swept > 0.0).map(|clock| (clock - swept).max(0.0));
        Ok(FleetMetrics {
            families,
            clock_ahead: clock.map_or(0.0, |clock| ahead(clock, before, round_trip)),
            sweep_age: age.and_then(|age| Duration::try_from_secs_f64(age).ok()),
        })
    }

    /// How many jobs of a queue need a slot now: those that run, and those that are due and not held back by a gate. Exact up to
    /// 10,000 due jobs; beyond that as counted last by the sweep.
    pub async fn backlog(&self, queue: &str) -> Result<i64> {
        let row = self.call_one("select posthouse.backlog($1)", vec![p(queue.to_owned(), Type::TEXT)]).await?;
        Ok(row.try_get(0)?)
    }
}

fn family((name, kind, _, help): &Known) -> Family {
    Family { name, help, kind: *kind, samples: Vec::new() }
}

/// The difference of two clocks, if it is more than what may be due to the time between question and answer.
fn ahead(clock: f64, before: SystemTime, round_trip: Duration) -> f64 {
    let half = round_trip.as_secs_f64() / 2.0;
    let ours = before.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64() + half;
    let difference = clock - ours;
    if difference.abs() <= half { 0.0 } else { difference }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_differ_only_if_the_round_trip_lets_us_tell() {
        let (now, ms) = (SystemTime::now(), Duration::from_millis);
        let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        assert!(ahead(seconds + 0.2, now, ms(300)).abs() < 1e-9);
        assert!((ahead(seconds + 2.0, now, ms(100)) - 1.95).abs() < 1e-3);
        assert!((ahead(seconds - 2.0, now, ms(100)) + 2.05).abs() < 1e-3);
    }

    #[test]
    fn names_are_told_apart_and_begin_as_they_should() {
        let mut names: Vec<_> = KNOWN.iter().map(|known| known.0).collect();
        assert!(names.iter().all(|name| name.starts_with(PREFIX)));
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
