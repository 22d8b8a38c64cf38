//! Who keeps the gates of endpoints, and what it is told and asked: the joint between this process and where they are.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

/// Why the gates could not be asked.
pub type GateError = Box<dyn std::error::Error + Send + Sync>;
/// The answer of gates that may be elsewhere.
pub type Told<'a, T> = Pin<Box<dyn Future<Output = Result<T, GateError>> + Send + 'a>>;

/// Where it is kept which endpoints are closed. An endpoint is named `PROVIDER/MODEL`.
pub trait EndpointGates: Send + Sync + fmt::Debug {
    /// The endpoints that are closed, and those whose time is over but that nobody has tried since.
    fn closures(&self) -> Told<'_, Vec<Closure>>;

    /// Notes what an endpoint answered. Returns for how long it is closed now; `None`: it is open.
    fn report<'a>(&'a self, report: Report<'a>) -> Told<'a, Option<Duration>>;

    /// Asks to be the one that tries an endpoint whose time is over, for a job. True: go on, it is open or this job tries it.
    fn begin_probe<'a>(&'a self, endpoint: &'a str, job: i64) -> Told<'a, bool>;

    /// The try ended without an answer (the job was cancelled): somebody else may try. Gates that let a try lapse by themselves
    /// need not do anything, which is the default.
    fn give_up_probe(&self, endpoint: &str, job: i64) {
        let _ = (endpoint, job);
    }
}

/// A closed endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closure {
    /// `PROVIDER/MODEL`.
    pub endpoint: String,
    /// From now. Zero: the time is over, and one probe may go.
    pub closed_for: Duration,
    /// What the provider said, or what somebody who closed it did.
    pub reason: String,
    /// `provider`, `quota`, `breaker` or `person`.
    pub closed_by: String,
}

/// What an endpoint answered.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// `PROVIDER/MODEL`.
    pub endpoint: &'a str,
    /// What it means.
    pub finding: Finding,
    /// How long it asked us to wait. `None`: a pause that grows with every answer of this sort in a row.
    pub wait: Option<Duration>,
    /// What it said, in a sentence without secrets.
    pub reason: &'a str,
    /// How long ago the request was sent: a thousand that were under way when the endpoint closed are one refusal.
    pub age: Duration,
}

/// What an answer means for those who come after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Finding {
    /// It takes calls.
    Ok,
    /// Not now.
    Refused,
    /// The account is empty: closed until somebody opens it.
    Quota,
    /// It failed too often in a row.
    Broken,
}

impl Finding {
    /// The word for it in SQL.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Quota => "quota",
            Self::Broken => "broken",
        }
    }

    /// Who has closed it, in the words of the view `gates`.
    pub(crate) fn closed_by(self) -> &'static str {
        match self {
            Self::Ok => "",
            Self::Refused => "provider",
            Self::Quota => "quota",
            Self::Broken => "breaker",
        }
    }
}

/// Up to a quarter more, at most five seconds, so that those who wait do not come back as one. Never less than asked.
pub(crate) fn spread(wait: Duration) -> Duration {
    wait.saturating_add((wait / 4).min(Duration::from_secs(5)).mul_f64(fastrand::f64()))
}
