//! Schedules: what is declared, how it stands, and the ticks that a sweep fires.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::types::{Json, Type};

use super::connection::{LONGEST_MS, Parameter, Store, p};
use super::enqueue::Wire;
use crate::cron::Rule;
use crate::error::{Error, Result};
use crate::job::NewJob;

/// What becomes of ticks that nobody saw within a minute, since no process was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CatchUp {
    /// They are counted as missed, no more.
    Skip,
    /// One job makes up for all of them; the others are counted as missed. Default.
    #[default]
    One,
    /// Each is made up for, up to a number.
    All,
}

impl CatchUp {
    /// The word for it: `skip`, `one` or `all`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Skip => "skip",
            Self::One => "one",
            Self::All => "all",
        }
    }
}

/// A schedule as it is declared: a cron rule, and the job that is enqueued at each of its ticks.
///
/// ```
/// use posthouse::NewJob;
/// use posthouse::store::Schedule;
/// let report = NewJob::from_json("report", r#"{"of": "yesterday"}"#)?.tenant("acme").timeout(std::time::Duration::from_secs(600));
/// let schedule = Schedule::new("nightly-report", "30 2 * * *", report).timezone("Europe/Rome");
/// # Ok::<(), posthouse::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Schedule {
    name: String,
    cron: String,
    timezone: String,
    job: NewJob,
    catch_up: CatchUp,
    catch_up_max: u32,
    catch_up_over: Duration,
    jitter: Duration,
    source: Option<String>,
}

impl Schedule {
    /// A schedule of this name. The rule has five fields (minute, hour, day of the month, month, day of the week), or is a nickname such
    /// as `@daily`. All that is set for the job counts, but for when it is due.
    pub fn new(name: impl Into<String>, cron: impl Into<String>, job: NewJob) -> Self {
        Self {
            name: name.into(),
            cron: cron.into(),
            timezone: "UTC".to_owned(),
            job,
            catch_up: CatchUp::One,
            catch_up_max: 10,
            catch_up_over: Duration::from_secs(600),
            jitter: Duration::ZERO,
            source: None,
        }
    }

    /// By whose clocks: the name of a time zone. Default: `UTC`.
    #[must_use]
    pub fn timezone(mut self, timezone: impl Into<String>) -> Self {
        self.timezone = timezone.into();
        self
    }

    /// What becomes of missed ticks. Default: [`CatchUp::One`].
    #[must_use]
    pub fn catch_up(mut self, catch_up: CatchUp) -> Self {
        self.catch_up = catch_up;
        self
    }

    /// With [`CatchUp::All`]: make up for so many ticks at most, the newest, 1 to 1,000, and spread their jobs over so long, up to 7 days.
    /// Default: 10, over 10 minutes.
    #[must_use]
    pub fn catch_up_most(mut self, most: u32, over: Duration) -> Self {
        self.catch_up_max = most;
        self.catch_up_over = over;
        self
    }

    /// Let jobs be due so much later at most, up to 7 days: each by an amount that follows from the schedule's name and the tick.
    /// Default: none.
    #[must_use]
    pub fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// The file that declares it, so that somebody can be told when it no longer does. Default: none.
    #[must_use]
    pub fn source(mut self, source: impl Into<String>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its rule. An error names the field that is wrong.
    pub fn rule(&self) -> Result<Rule> {
        Rule::parse(&self.cron, &self.timezone)
    }

    fn job_json(&self) -> Result<Box<RawValue>> {
        if self.job.run_at.is_some() || self.job.delay.is_some() {
            return Err(Error::invalid("job: run_at and delay are for the schedule to say; see jitter"));
        }
        Ok(serde_json::value::to_raw_value(&Wire::new(&self.job))?)
    }

    /// What sets it. Errors if its rule cannot be read.
    fn parameters(&self) -> Result<Vec<Parameter>> {
        self.rule()?;
        let ms = |span: Duration| p((span.as_secs_f64() * 1e3).min(LONGEST_MS), Type::FLOAT8);
        Ok(vec![
            p(self.name.clone(), Type::TEXT),
            p(self.cron.clone(), Type::TEXT),
            p(Json(self.job_json()?), Type::JSONB),
            p(self.timezone.clone(), Type::TEXT),
            p(self.catch_up.as_str(), Type::TEXT),
            p(i32::try_from(self.catch_up_max).unwrap_or(i32::MAX), Type::INT4),
            ms(self.catch_up_over),
            ms(self.jitter),
            p(self.source.clone(), Type::TEXT),
        ])
    }

    /// Whether the database has it just so.
    pub fn is_same(&self, there: &ScheduleRecord) -> Result<bool> {
        let ms = |span: Duration| span.as_secs_f64() * 1e3;
        Ok(self.cron == there.cron
            && self.timezone == there.timezone
            && serde_json::from_str::<Value>(self.job_json()?.get())? == there.job
            && self.catch_up == there.catch_up
            && i64::from(self.catch_up_max) == i64::from(there.catch_up_max)
            && self.source == there.source
            && (ms(self.catch_up_over) - there.catch_up_over_ms).abs() < 1.0
            && (ms(self.jitter) - there.jitter_ms).abs() < 1.0)
    }
}

/// What setting a schedule came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleChange {
    /// There was none of this name.
    New,
    /// It was another one.
    Changed,
    /// It was set just so.
    Same,
}

impl ScheduleChange {
    fn of(word: &str) -> Self {
        match word {
            "new" => Self::New,
            "same" => Self::Same,
            _ => Self::Changed,
        }
    }
}

const SET: &str = "select posthouse.set_schedule($1, $2, $3, $4, $5, $6, $7 * interval '1 millisecond', $8 * interval '1 millisecond', $9)";

/// A schedule as the view `posthouse.schedules` shows it. Times are as Postgres writes them in JSON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScheduleRecord {
    /// Its name.
    pub name: String,
    /// Its rule.
    pub cron: String,
    /// By whose clocks.
    pub timezone: String,
    /// The kind of its jobs.
    pub kind: String,
    /// Their queue.
    pub queue: String,
    /// Whose they are.
    pub tenant: String,
    /// The job, as `posthouse.enqueue_many` takes it. In lists without its payload.
    pub job: Value,
    /// What becomes of missed ticks.
    pub catch_up: CatchUp,
    /// With `all`: of so many at most.
    pub catch_up_max: i32,
    /// With `all`: spread over so long, in milliseconds.
    pub catch_up_over_ms: f64,
    /// Its jobs are due so much later at most, in milliseconds.
    pub jitter_ms: f64,
    /// The file that declares it. `None`: it was set by hand.
    pub source: Option<String>,
    /// When it was changed last.
    pub changed_at: String,
    /// Since when it rests. `None`: it does not.
    pub paused_at: Option<String>,
    /// Why it rests.
    pub paused_reason: Option<String>,
    /// Its next tick. `None`: it rests, its rule is not worked out yet (that takes a second), or there is none.
    pub next_at: Option<String>,
    /// Ticks fired so far.
    pub fired: i64,
    /// Ticks missed so far, and not made up for.
    pub missed: i64,
    /// The tick fired last. `None`: none was.
    pub last_tick: Option<String>,
    /// When that was.
    pub last_fired_at: Option<String>,
    /// Its job.
    pub last_job_id: Option<i64>,
    /// Why it enqueues nothing at the moment.
    pub error: Option<String>,
    /// When that was seen last.
    pub error_at: Option<String>,
}

/// A tick that was fired.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScheduleRun {
    /// The schedule.
    pub schedule: String,
    /// The tick, as Postgres writes times in JSON.
    pub tick: String,
    /// Its job.
    pub job_id: i64,
    /// That job was there already, and held the dedupe key.
    pub duplicate: bool,
    /// When it was fired.
    pub fired_at: String,
}

/// A schedule that is due, or whose next tick is not worked out. Times in seconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DueSchedule {
    pub(crate) name: String,
    pub(crate) version: i64,
    pub(crate) cron: String,
    pub(crate) timezone: String,
    pub(crate) catch_up: CatchUp,
    pub(crate) catch_up_max: usize,
    /// The tick that is due. `None`: it is the first after `base`.
    pub(crate) next: Option<i64>,
    pub(crate) base: i64,
    pub(crate) now: i64,
}

/// What is to be fired of a schedule that is due.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Firing {
    /// In order. The first `late` of them are made up for.
    pub(crate) ticks: Vec<i64>,
    pub(crate) late: usize,
    /// Other ticks that were due.
    pub(crate) missed: i64,
    /// `None`: there is none.
    pub(crate) then: Option<i64>,
}

/// What firing came to.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Fired {
    #[serde(default)]
    pub(crate) runs: Vec<FiredRun>,
    /// Why it could not enqueue.
    pub(crate) error: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
pub(crate) struct FiredRun {
    pub(crate) tick_s: i64,
    pub(crate) job: i64,
    pub(crate) duplicate: bool,
}

const RECORD: &str = "select to_jsonb(s.*) - 'catch_up_over' - 'jitter' || jsonb_build_object(
    'catch_up_over_ms', extract(epoch from s.catch_up_over) * 1000, 'jitter_ms', extract(epoch from s.jitter) * 1000)
  from posthouse.schedules s where s.name = $1";

const LIST: &str = "select to_jsonb(s.*) - 'catch_up_over' - 'jitter' || jsonb_build_object('job', s.job - 'payload',
    'catch_up_over_ms', extract(epoch from s.catch_up_over) * 1000, 'jitter_ms', extract(epoch from s.jitter) * 1000)
  from posthouse.schedules s order by s.name";

fn json<T: for<'a> Deserialize<'a>>(row: &Row) -> Result<T> {
    Ok(row.try_get::<_, Json<T>>(0)?.0)
}

/// A moment that tests set in place of the database's clock.
fn at(at: Option<SystemTime>) -> Parameter {
    let since = at.map(|at| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64());
    p(since, Type::FLOAT8)
}

impl Store {
    /// Set a schedule: make it, or change it. What is set already may be set again at any time; nothing changes then, the next tick
    /// either. A tick that is due when a rule changes is still fired.
    pub async fn set_schedule(&self, schedule: &Schedule) -> Result<ScheduleChange> {
        Ok(ScheduleChange::of(self.call_one(SET, schedule.parameters()?).await?.try_get(0)?))
    }

    /// What setting it would come to; nothing is set.
    pub async fn rehearse_schedule(&self, schedule: &Schedule) -> Result<ScheduleChange> {
        Ok(ScheduleChange::of(self.call_one_undone(SET, schedule.parameters()?).await?.try_get(0)?))
    }

    /// Every schedule, by name, without the payloads of its jobs.
    pub async fn schedules(&self) -> Result<Vec<ScheduleRecord>> {
        self.call(LIST, Vec::new()).await?.iter().map(json).collect()
    }

    /// One schedule, whole. `None`: there is none of this name.
    pub async fn schedule(&self, name: &str) -> Result<Option<ScheduleRecord>> {
        self.call(RECORD, vec![p(name.to_owned(), Type::TEXT)]).await?.first().map(json).transpose()
    }

    /// The ticks that were fired of a schedule, the newest first, at most `limit`. The newest thousand are kept.
    pub async fn schedule_runs(&self, name: &str, limit: u32) -> Result<Vec<ScheduleRun>> {
        let sql =
            "select to_jsonb(r.*) from posthouse.schedule_runs r where r.schedule = $1 order by r.tick desc limit $2";
        let parameters = vec![p(name.to_owned(), Type::TEXT), p(i64::from(limit), Type::INT8)];
        self.call(sql, parameters).await?.iter().map(json).collect()
    }

    /// Let a schedule rest, and say why. Ticks in that time are no missed ones. `false`: it rested already.
    pub async fn pause_schedule(&self, name: &str, reason: Option<&str>) -> Result<bool> {
        let parameters = vec![p(name.to_owned(), Type::TEXT), p(reason.map(str::to_owned), Type::TEXT)];
        Ok(self.call_one("select posthouse.pause_schedule($1, $2)", parameters).await?.try_get(0)?)
    }

    /// Let a schedule go on, from its next tick. `false`: it did not rest.
    pub async fn resume_schedule(&self, name: &str) -> Result<bool> {
        let parameters = vec![p(name.to_owned(), Type::TEXT)];
        Ok(self.call_one("select posthouse.resume_schedule($1)", parameters).await?.try_get(0)?)
    }

    /// Remove a schedule; its jobs stay. `false`: there is none of this name.
    pub async fn remove_schedule(&self, name: &str) -> Result<bool> {
        let parameters = vec![p(name.to_owned(), Type::TEXT)];
        Ok(self.call_one("select posthouse.remove_schedule($1)", parameters).await?.try_get(0)?)
    }

    /// Schedules that are due, at most `most`; as if it was `now`.
    pub(crate) async fn due_schedules(&self, most: i32, now: Option<SystemTime>) -> Result<Vec<DueSchedule>> {
        let sql = "select name, version, cron, timezone, catch_up, catch_up_max, next_s, base_s, now_s \
                   from posthouse.due_schedules($1, to_timestamp($2))";
        let rows = self.call(sql, vec![p(most, Type::INT4), at(now)]).await?;
        rows.iter()
            .map(|row| {
                Ok(DueSchedule {
                    name: row.try_get(0)?,
                    version: row.try_get(1)?,
                    cron: row.try_get(2)?,
                    timezone: row.try_get(3)?,
                    catch_up: match row.try_get(4)? {
                        "skip" => CatchUp::Skip,
                        "all" => CatchUp::All,
                        _ => CatchUp::One,
                    },
                    catch_up_max: usize::try_from(row.try_get::<_, i32>(5)?).unwrap_or(0),
                    next: row.try_get(6)?,
                    base: row.try_get::<_, Option<_>>(7)?.unwrap_or(0),
                    now: row.try_get(8)?,
                })
            })
            .collect()
    }

    /// Enqueue a job for each tick and move the schedule on. `None`: somebody else has done it, or it was changed.
    pub(crate) async fn fire_schedule(
        &self,
        due: &DueSchedule,
        firing: &Firing,
        now: Option<SystemTime>,
    ) -> Result<Option<Fired>> {
        let sql = "select posthouse.fire_schedule($1, $2, $3, $4, $5, $6, $7, to_timestamp($8))";
        let parameters = vec![
            p(due.name.clone(), Type::TEXT),
            p(due.version, Type::INT8),
            p(due.next, Type::INT8),
            p(firing.ticks.clone(), Type::INT8_ARRAY),
            p(i32::try_from(firing.late).unwrap_or(i32::MAX), Type::INT4),
            p(firing.missed, Type::INT8),
            p(firing.then, Type::INT8),
            at(now),
        ];
        Ok(self.call_one(sql, parameters).await?.try_get::<_, Option<Json<Fired>>>(0)?.map(|fired| fired.0))
    }

    /// Note that the rule of a schedule cannot be read. It comes again when somebody changes it.
    pub(crate) async fn refuse_schedule(&self, due: &DueSchedule, error: &str) -> Result<()> {
        let parameters =
            vec![p(due.name.clone(), Type::TEXT), p(due.version, Type::INT8), p(error.to_owned(), Type::TEXT)];
        self.call_one("select posthouse.refuse_schedule($1, $2, $3, true)", parameters).await.map(|_| ())
    }
}
