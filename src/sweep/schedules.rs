//! Fires schedules: asks which are due, works out their ticks, and has Postgres enqueue a job for each.
//!
//! Nothing is remembered here, and nobody leads. Two processes may do it at once, and one may be killed anywhere: Postgres takes ticks
//! only from where the schedule stands, and moves it on in the transaction that enqueues.

use std::time::{Duration, SystemTime};

use crate::cron::Rule;
use crate::error::{Error, Result};
use crate::store::{CatchUp, DueSchedule, Firing, Store};

/// Where state changes are logged.
const EVENT: &str = "posthouse::event::schedule";
/// Schedules in one look.
const MOST: i32 = 100;
/// A tick that nobody saw for so long, in seconds, is a missed one.
const GRACE: i64 = 60;
/// Ticks counted in one go, so that a schedule that was away for years keeps no other from its turn.
const CHUNK: usize = 5_000;

/// What one look at the schedules did.
#[cfg_attr(not(feature = "testing"), expect(unreachable_pub, reason = "only tests are told"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Round {
    /// Jobs enqueued.
    pub jobs: usize,
    /// Ticks missed, and not made up for.
    pub missed: i64,
    /// Some are due yet.
    pub more: bool,
}

/// Fires what is due, as if it was `now`. One that fails keeps no other from its turn.
pub(super) async fn fire(store: &Store, now: Option<SystemTime>) -> Result<Round> {
    let due = store.due_schedules(MOST, now).await?;
    let is_full = i32::try_from(due.len()).is_ok_and(|n| n >= MOST);
    let mut round = Round::default();
    let (mut moved, mut failed) = (false, None);
    for schedule in &due {
        match fire_one(store, schedule, now, &mut round).await {
            Ok(is_moved) => moved |= is_moved,
            Err(error) if error.is_disconnected() => return Err(error),
            Err(error) => {
                tracing::debug!(schedule = schedule.name, %error, "schedule not fired; it comes again");
                failed = Some(Error::schema(format!("schedule {}: {error}", schedule.name)));
            }
        }
    }
    round.more |= is_full && moved;
    failed.map_or(Ok(round), Err)
}

/// Says whether the schedule has been moved on.
async fn fire_one(store: &Store, due: &DueSchedule, now: Option<SystemTime>, round: &mut Round) -> Result<bool> {
    let rule = match Rule::stored(&due.cron, &due.timezone) {
        Ok(rule) => rule,
        Err(error) => {
            tracing::warn!(schedule = due.name, %error, "schedule refused; set it anew");
            store.refuse_schedule(due, &error.to_string()).await?;
            return Ok(true);
        }
    };
    let firing = plan(|tick| rule.next(tick), due);
    let Some(fired) = store.fire_schedule(due, &firing, now).await? else { return Ok(false) };
    if let Some(error) = fired.error {
        tracing::warn!(schedule = due.name, error, "schedule could not enqueue; it tries again");
        return Ok(true);
    }
    for run in &fired.runs {
        let tick = utc(run.tick_s);
        if run.duplicate {
            tracing::info!(target: EVENT, event = "schedule_fired", schedule = due.name, %tick, job = run.job, duplicate = true,
                "schedule {} fired: job {} was there already", due.name, run.job);
        } else {
            tracing::info!(target: EVENT, event = "schedule_fired", schedule = due.name, %tick, job = run.job,
                "schedule {} fired: job {}", due.name, run.job);
        }
    }
    if firing.missed > 0 {
        tracing::warn!(target: EVENT, event = "schedule_missed", schedule = due.name, missed = firing.missed,
            "schedule {} missed {} ticks: no process swept", due.name, firing.missed);
    }
    round.jobs += fired.runs.iter().filter(|run| !run.duplicate).count();
    round.missed += firing.missed;
    round.more |= firing.then.is_some_and(|tick| tick <= due.now);
    Ok(true)
}

fn utc(second: i64) -> humantime::Rfc3339Timestamp {
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_secs(second.max(0).unsigned_abs()))
}

/// Which ticks are to be fired, and where the schedule stands then. `next` answers with the first tick after another.
fn plan(next: impl Fn(i64) -> Option<i64>, due: &DueSchedule) -> Firing {
    let mut then = due.next.or_else(|| next(due.base));
    let mut ticks = Vec::new();
    while let Some(tick) = then.filter(|tick| *tick <= due.now && ticks.len() < CHUNK) {
        ticks.push(tick);
        then = next(tick);
    }
    if then.is_some_and(|tick| tick <= due.now) {
        // More than can be counted at once. All but those that may have to be fired are missed, whatever comes after them.
        let kept = due.catch_up_max.max(usize::try_from(GRACE).unwrap_or(0)).min(CHUNK - 1);
        let missed = ticks.len() - kept;
        return Firing { missed: i64::try_from(missed).unwrap_or(0), then: Some(ticks[missed]), ..Firing::default() };
    }
    let gone = ticks.partition_point(|tick| due.now - tick >= GRACE);
    let late = match due.catch_up {
        CatchUp::Skip => 0,
        // One that is just in time makes up for the others too.
        CatchUp::One if gone < ticks.len() => 0,
        CatchUp::One => gone.min(1),
        CatchUp::All => gone.min(due.catch_up_max),
    };
    let missed = gone - late;
    Firing { ticks: ticks.split_off(missed), late, missed: i64::try_from(missed).unwrap_or(0), then }
}

/// Fires what would be due if it was `now`: for tests of schedules, in time that passes as they like.
#[cfg(feature = "testing")]
pub async fn fire_at(store: &Store, now: SystemTime) -> Result<Round> {
    fire(store, Some(now)).await
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60;
    const DAY: i64 = 86_400;

    fn every(period: i64) -> impl Fn(i64) -> Option<i64> {
        move |after| Some((after.div_euclid(period) + 1) * period)
    }

    fn due(catch_up: CatchUp, next: Option<i64>, base: i64, now: i64) -> DueSchedule {
        DueSchedule {
            name: "s".to_owned(),
            version: 1,
            cron: String::new(),
            timezone: String::new(),
            catch_up,
            catch_up_max: 3,
            next,
            base,
            now,
        }
    }

    fn firing(ticks: &[i64], late: usize, missed: i64, then: i64) -> Firing {
        Firing { ticks: ticks.to_vec(), late, missed, then: Some(then) }
    }

    #[test]
    fn a_new_one_begins_after_it_was_set() {
        for (base, now, expected) in [
            (0, 0, firing(&[], 0, 0, 60)),
            (59, 59, firing(&[], 0, 0, 60)),
            // Set just before a tick, seen just after it.
            (59, 61, firing(&[60], 0, 0, 120)),
            (60, 61, firing(&[], 0, 0, 120)),
        ] {
            assert_eq!(plan(every(MINUTE), &due(CatchUp::One, None, base, now)), expected, "{base} {now}");
        }
    }

    #[test]
    fn what_was_missed_is_left_or_made_up_for_once_or_up_to_a_number() {
        for (catch_up, now, expected) in [
            // In time: a minute late at most.
            (CatchUp::Skip, 600, firing(&[600], 0, 0, 660)),
            (CatchUp::Skip, 659, firing(&[600], 0, 0, 660)),
            (CatchUp::One, 659, firing(&[600], 0, 0, 660)),
            (CatchUp::All, 659, firing(&[600], 0, 0, 660)),
            // One is missed, the next in time.
            (CatchUp::Skip, 660, firing(&[660], 0, 1, 720)),
            (CatchUp::One, 660, firing(&[660], 0, 1, 720)),
            (CatchUp::All, 660, firing(&[600, 660], 1, 0, 720)),
            // Ten are, eleven with the last.
            (CatchUp::Skip, 1_205, firing(&[1_200], 0, 10, 1_260)),
            (CatchUp::One, 1_205, firing(&[1_200], 0, 10, 1_260)),
            (CatchUp::All, 1_205, firing(&[1_020, 1_080, 1_140, 1_200], 3, 7, 1_260)),
        ] {
            assert_eq!(plan(every(MINUTE), &due(catch_up, Some(600), 0, now)), expected, "{catch_up:?} at {now}");
        }
        // None in time: days went by.
        let now = 5 * DAY + 3_600;
        for (catch_up, expected) in [
            (CatchUp::Skip, firing(&[], 0, 5, 6 * DAY)),
            (CatchUp::One, firing(&[5 * DAY], 1, 4, 6 * DAY)),
            (CatchUp::All, firing(&[3 * DAY, 4 * DAY, 5 * DAY], 3, 2, 6 * DAY)),
        ] {
            assert_eq!(plan(every(DAY), &due(catch_up, Some(DAY), 0, now)), expected, "{catch_up:?}");
        }
    }

    #[test]
    fn years_are_counted_bit_by_bit_and_exactly() {
        for (catch_up, fired) in [(CatchUp::Skip, 1), (CatchUp::One, 1), (CatchUp::All, 4)] {
            let (mut at, mut ticks, mut missed, mut rounds) = (MINUTE, 0, 0, 0);
            let now = 400 * DAY;
            while at <= now {
                let step = plan(every(MINUTE), &due(catch_up, Some(at), 0, now));
                assert!(step.ticks.len() + usize::try_from(step.missed).unwrap_or(0) <= CHUNK);
                ticks += step.ticks.len();
                missed += step.missed;
                at = step.then.expect("there is always another minute");
                rounds += 1;
            }
            assert_eq!((ticks, missed + i64::try_from(ticks).unwrap_or(0)), (fired, 400 * 1_440), "{catch_up:?}");
            assert!(rounds < 130, "{rounds}");
        }
    }

    #[test]
    fn a_tick_that_was_due_when_the_rule_changed_is_fired_and_a_rule_may_end() {
        let step = plan(every(DAY), &due(CatchUp::One, Some(100), 0, 130));
        assert_eq!(step, firing(&[100], 0, 0, DAY));
        let last = plan(|after| (after < 100).then_some(100), &due(CatchUp::One, None, 0, 130));
        assert_eq!(last, Firing { ticks: vec![100], late: 0, missed: 0, then: None });
        assert_eq!(plan(|_| None, &due(CatchUp::One, None, 0, 130)), Firing::default());
    }
}
