//! The doctor: what is wrong with a database or soon will be, and what mends it. What can be seen from inside is looked for by
//! `posthouse.doctor_…()`; here is what takes a look from outside: the schema, the clock, a pooler between us and Postgres.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::Value;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::connection::{Connected, Parameter, Store, connect, p};
use super::database::Database;
use super::migrate::{SchemaStatus, schema_status};
use crate::error::{Error, Result};

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Jobs stand still or get lost, or soon will.
    Bad,
    /// It gets worse if nobody does anything.
    Warning,
    /// Worth to know.
    Note,
}

/// What the doctor found.
#[derive(Debug, Clone, Serialize)]
pub struct Finding {
    /// The check that found it, such as `autovacuum` or `horizon`.
    pub check: String,
    /// How bad it is.
    pub severity: Severity,
    /// What it is about: a setting, a table, a process. `None`: the whole.
    pub subject: Option<String>,
    /// What was found.
    pub what: String,
    /// Why it matters.
    pub why: String,
    /// A statement or command that mends it.
    pub fix: String,
    /// Figures for programs.
    pub detail: Option<Value>,
}

/// What the doctor found, the worst first, and what was looked at.
#[derive(Debug, Clone, Serialize)]
pub struct Diagnosis {
    /// The worst first.
    pub findings: Vec<Finding>,
    /// The checks that were made and found nothing.
    pub fine: Vec<&'static str>,
}

/// From when on the doctor complains.
#[derive(Debug, Clone)]
pub struct Examination {
    /// A transaction that holds back vacuum is told of when it is open for longer. Default: 5 minutes; it is bad from twelve times that on.
    pub older: Duration,
    /// A replication slot or a standby is told of when it holds back more transactions. Default: 100,000.
    pub xids: u32,
    /// Dead rows of a table are told of from here on. Default: 100,000.
    pub dead_rows: u32,
    /// Jobs of each sort that are looked at one by one, the oldest first. Default: 100,000.
    pub max_jobs: u32,
}

impl Default for Examination {
    fn default() -> Self {
        Self { older: Duration::from_secs(300), xids: 100_000, dead_rows: 100_000, max_jobs: 100_000 }
    }
}

/// A part of the examination may take that long: it looks at many jobs, and the server may be in trouble.
const PATIENCE: Duration = Duration::from_secs(120);
/// Clocks that differ by more are told of: times in logs and those that programs give to `run_at` would mislead.
const CLOCKS_APART: Duration = Duration::from_secs(2);

/// What is looked for by a look from outside.
const OUTSIDE: [&str; 3] = ["schema", "clock", "pooler"];

/// A part of the examination, and the checks that it makes.
type Part = (&'static str, Vec<Parameter>, &'static [&'static str]);

/// Workers alone refuse a copy, so somebody who only looks would not hear of it.
const COPY: &str = "select jsonb_build_object('name', 'copy', 'severity', 'bad', \
     'what', 'this database is a copy of another (' || o.reason || '), and nobody has adopted it', \
     'why', 'no worker that starts runs its jobs, since the other one may run them too', \
     'fix', 'posthouse db adopt -- shows what is queued in it, and asks') \
     from posthouse.origin() o where o.is_copy";

fn parts(examination: &Examination) -> [Part; 6] {
    let number = |n: u32| i32::try_from(n).unwrap_or(i32::MAX);
    [
        (
            "select to_jsonb(f) from posthouse.doctor_settings() f",
            Vec::new(),
            &["autovacuum", "durability", "isolation_level", "read_only", "timeouts", "connections", "extensions"],
        ),
        (
            "select to_jsonb(f) from posthouse.doctor_tables($1) f",
            vec![p(i64::from(examination.dead_rows), Type::INT8)],
            &["indexes", "partitions", "statistics", "dead_rows"],
        ),
        (
            "select to_jsonb(f) from posthouse.doctor_jobs($1) f",
            vec![p(number(examination.max_jobs), Type::INT4)],
            &["payloads", "claims", "homes", "ids"],
        ),
        ("select to_jsonb(f) from posthouse.doctor_workers() f", Vec::new(), &["sweeps", "workers"]),
        (COPY, Vec::new(), &["copy"]),
        (
            "select to_jsonb(f) from posthouse.doctor_horizon($1 * interval '1 second', $2) f",
            vec![p(examination.older.as_secs_f64(), Type::FLOAT8), p(number(examination.xids), Type::INT4)],
            &["horizon", "slots", "standbys", "rights"],
        ),
    ]
}

/// Examine a database. An error if it cannot be reached; whatever else is wrong with it is a finding.
pub async fn examine(database: &Database, examination: &Examination) -> Result<Diagnosis> {
    let status = schema_status(database).await?;
    let mut findings = Vec::new();
    let mut looked: Vec<&'static str> = OUTSIDE.to_vec();
    findings.extend(schema(&status));
    let Connected { client, .. } = connect(&database.main, "doctor").await?;
    findings.extend(clock(&client).await?);
    findings.extend(pooler(database).await?);
    if status.version > 0 {
        let store = database.store("doctor").with_timeout(PATIENCE);
        for (sql, parameters, checks) in parts(examination) {
            match look(&store, sql, parameters).await {
                Ok(found) => findings.extend(found),
                Err(error) => findings.push(unseen(checks, &error)),
            }
            looked.extend(checks);
        }
    }
    findings.sort_by(|a, b| (a.severity, &a.check).cmp(&(b.severity, &b.check)));
    let fine = looked.into_iter().filter(|check| !findings.iter().any(|f| f.is_about(check))).collect();
    Ok(Diagnosis { findings, fine })
}

impl Diagnosis {
    /// Whether something is bad.
    pub fn is_bad(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity == Severity::Bad)
    }
}

impl Finding {
    fn new(check: &str, severity: Severity, what: impl Into<String>, why: &str, fix: impl Into<String>) -> Self {
        let (check, why) = (check.to_owned(), why.to_owned());
        Self { check, severity, subject: None, what: what.into(), why, fix: fix.into(), detail: None }
    }

    /// One that says that several checks could not be made names them all.
    fn is_about(&self, check: &str) -> bool {
        self.check.split(", ").any(|own| own == check)
    }
}

/// Run a part.
async fn look(store: &Store, sql: &'static str, parameters: Vec<Parameter>) -> Result<Vec<Finding>> {
    let rows = store.call(sql, parameters).await?;
    rows.iter().map(|row| finding(row.try_get(0)?)).collect()
}

fn finding(value: Value) -> Result<Finding> {
    let text = |name: &str| value[name].as_str().map(str::to_owned);
    let required = |name: &str| text(name).ok_or_else(|| Error::schema(format!("the doctor said no {name}")));
    Ok(Finding {
        check: required("name")?,
        severity: match required("severity")?.as_str() {
            "bad" => Severity::Bad,
            "warning" => Severity::Warning,
            _ => Severity::Note,
        },
        subject: text("subject"),
        what: required("what")?,
        why: required("why")?,
        fix: required("fix")?,
        detail: value.get("detail").filter(|detail| !detail.is_null()).cloned(),
    })
}

fn unseen(checks: &[&str], error: &Error) -> Finding {
    let (fix, why) = match error.sqlstate() {
        Some("42501") => (
            "posthouse db doctor --database-url OWNER",
            "it takes the owner of the schema, or a member of posthouse_operate",
        ),
        Some("42883") => ("posthouse db migrate", "the functions in the database are older than this binary"),
        _ => ("posthouse db doctor", "what was not looked at may be wrong"),
    };
    Finding::new(&checks.join(", "), Severity::Warning, format!("not looked at: {error}"), why, fix)
}

fn schema(status: &SchemaStatus) -> Option<Finding> {
    const MIGRATE: &str = "posthouse db migrate";
    if let Err(error) = status.check() {
        let fix = if status.breaking.is_empty() { MIGRATE } else { "install the newest posthouse" };
        return Some(Finding::new("schema", Severity::Bad, error.to_string(), "this binary cannot work on it", fix));
    }
    if status.version > status.known {
        let what =
            format!("the schema is newer (version {}) than this binary (version {})", status.version, status.known);
        return Some(Finding::new(
            "schema",
            Severity::Note,
            what,
            "fine while a new version is being rolled out",
            "install the newest posthouse",
        ));
    }
    let what = "functions and views are of another posthouse than this binary";
    let why = "calls may be missing or do something else than this binary expects";
    (!status.functions_current).then(|| Finding::new("schema", Severity::Bad, what, why, MIGRATE))
}

/// Compare the clock of the server with ours.
async fn clock(client: &Client) -> Result<Option<Finding>> {
    let sent = SystemTime::now();
    let rows = client.query_typed("select pg_catalog.clock_timestamp()", &[]).await?;
    let answered = SystemTime::now();
    let Some(row) = rows.first() else { return Ok(None) };
    Ok(apart(sent, row.try_get(0)?, answered).map(|apart| {
        let what = format!("the clocks of Postgres and of this machine are {:.1} s apart", apart.as_secs_f64());
        let why = "the queue goes by the clock of Postgres alone and stays right; but times that programs give, as in run_at, and times in logs are off by that";
        Finding::new("clock", Severity::Warning, what, why, "timedatectl set-ntp true -- on both machines, or what keeps the time there")
    }))
}

/// By how much the clocks differ at least, whenever between asking and answer the server looked; `None`: not worth mentioning.
fn apart(sent: SystemTime, server: SystemTime, answered: SystemTime) -> Option<Duration> {
    let early = sent.duration_since(server).ok();
    let late = server.duration_since(answered).ok();
    early.or(late).filter(|apart| *apart > CLOCKS_APART)
}

/// Rounds of looking for a pooler: one that is busy may give each of us the same server connection several times by chance.
const ROUNDS: usize = 16;

/// Whether a pooler gives each transaction any server connection. Two connections that are open at the same time have different
/// processes of Postgres, and keep them, unless one stands between.
async fn pooler(database: &Database) -> Result<Option<Finding>> {
    let Connected { client: one, .. } = connect(&database.main, "doctor").await?;
    let Connected { client: other, .. } = connect(&database.main, "doctor").await?;
    let (first, mut second) = (pid(&one).await?, None);
    for _ in 0..ROUNDS {
        if let Err(error) = other.batch_execute("begin").await.map_err(Error::from) {
            let what = format!("a transaction cannot be begun: {error}");
            let fix = "pool_mode = transaction -- in the pooler";
            return Ok(Some(Finding::new("pooler", Severity::Bad, what, POOLER_OF_STATEMENTS, fix)));
        }
        // Nothing is asked of the other one meanwhile: this may be the only server connection there is.
        let held = pid(&other).await;
        other.batch_execute("rollback").await?;
        let (held, now) = (held?, pid(&one).await?);
        if held == first || now != first || second.is_some_and(|second| held != second) {
            let what = "a pooler in transaction mode stands between this machine and Postgres";
            let fix = match &database.listen {
                Some(listen) if listen.config == database.main.config => {
                    "POSTHOUSE_LISTEN_URL=postgres://… posthouse work"
                }
                _ => "posthouse work --no-listen",
            };
            return Ok(Some(Finding::new("pooler", Severity::Note, what, POOLER, fix)));
        }
        second = Some(held);
    }
    Ok(None)
}

const POOLER: &str = "everything works through it but LISTEN, by which workers hear of new jobs at once: give them a URL that leads to Postgres \
                      itself, or let them poll";
const POOLER_OF_STATEMENTS: &str =
    "a pooler in statement mode, or a server that is not Postgres, cannot keep a transaction together";

async fn pid(client: &Client) -> Result<i32> {
    let rows = client.query_typed("select pg_catalog.pg_backend_pid()", &[]).await?;
    rows.first().map_or_else(|| Err(Error::schema("Postgres answered nothing")), |row| Ok(row.try_get(0)?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn clocks_differ_by_what_the_round_trip_does_not_explain() {
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(apart(at(100), at(103), at(105)), None);
        assert_eq!(apart(at(100), at(102), at(100)), None);
        assert_eq!(apart(at(100), at(110), at(101)), Some(Duration::from_secs(9)));
        assert_eq!(apart(at(100), at(40), at(101)), Some(Duration::from_secs(60)));
    }

    #[test]
    fn the_schema_is_told_of_as_it_is() {
        let current = SchemaStatus {
            version: 7,
            known: 7,
            breaking: Vec::new(),
            functions_current: true,
            server_version: 150_000,
            encoding: "UTF8".to_owned(),
        };
        assert!(schema(&current).is_none());
        let older = schema(&SchemaStatus { version: 6, ..current.clone() }).unwrap();
        assert_eq!((older.severity, older.fix.as_str()), (Severity::Bad, "posthouse db migrate"));
        let other = schema(&SchemaStatus { functions_current: false, ..current.clone() }).unwrap();
        assert_eq!((other.severity, other.fix.as_str()), (Severity::Bad, "posthouse db migrate"));
        let newer = SchemaStatus { version: 8, functions_current: false, ..current.clone() };
        assert_eq!(schema(&newer).unwrap().severity, Severity::Note);
        let broken = schema(&SchemaStatus { breaking: vec!["8 x".to_owned()], ..newer }).unwrap();
        assert_eq!((broken.severity, broken.fix.as_str()), (Severity::Bad, "install the newest posthouse"));
        assert_eq!(schema(&SchemaStatus { encoding: "LATIN1".to_owned(), ..current }).unwrap().severity, Severity::Bad);
    }
}
