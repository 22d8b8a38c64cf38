//! The settings of a worker, and the check that refuses unsafe ones before anything starts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use crate::context::Context;
use crate::error::{Error, Result};
use crate::event::{Emit, Event};
use crate::handler::{Handler, Handlers};
use crate::job::Job;
use crate::outcome::IntoOutcome;
use crate::retry::Backoff;
use crate::store::Database;
use crate::worker::meter::Meter;

/// Builds a [`Worker`](crate::Worker): see the methods for defaults and limits. Ends with `run` or `run_until`.
#[must_use = "a worker does nothing until `run` or `run_until`"]
pub struct Builder {
    pub(crate) database: Database,
    pub(crate) handlers: Handlers,
    pub(crate) settings: Settings,
    pub(crate) on_event: Option<Emit>,
    pub(crate) meter: Option<Meter>,
    backoffs: Vec<(String, Backoff)>,
    /// The first mistake made while building, kept for `check` so that the chain of calls stays plain.
    mistake: Option<Error>,
}

/// The settings that are plain values.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) queues: Vec<String>,
    pub(crate) concurrency: u32,
    pub(crate) lease: Duration,
    pub(crate) heartbeat: Option<Duration>,
    pub(crate) poll: Duration,
    pub(crate) grace: Duration,
    pub(crate) sweep: bool,
    pub(crate) until_empty: bool,
    pub(crate) max_deferral: Option<Duration>,
}

/// Beyond this one process is the bottleneck whatever the setting; it bounds the list of held jobs in a heartbeat.
const MAX_CONCURRENCY: u32 = 100_000;
/// Below this a pause of the scheduler or one slow round trip ends leases. Under a second is for tests only.
const MIN_LEASE: Duration = Duration::from_millis(500);
/// A job of a worker that died waits for up to a lease; longer than an hour is a mistake.
const MAX_LEASE: Duration = Duration::from_secs(3_600);
/// Polling more often is a busy loop against the database.
const MIN_POLL: Duration = Duration::from_millis(10);
/// Polling is what finds work when a notification was lost.
const MAX_POLL: Duration = Duration::from_secs(300);
/// However long the lease is, cancelled and lost jobs should be noticed within seconds.
const MAX_DEFAULT_HEARTBEAT: Duration = Duration::from_secs(5);
/// The longest name of a queue or kind, in bytes.
const MAX_NAME: usize = 200;

impl Settings {
    fn new() -> Self {
        Self {
            queues: Vec::new(),
            concurrency: 100,
            lease: Duration::from_secs(30),
            heartbeat: None,
            poll: Duration::from_secs(1),
            grace: Duration::from_secs(25),
            sweep: true,
            until_empty: false,
            max_deferral: None,
        }
    }

    /// Time between heartbeats: a third of the lease, so that two in a row may fail, and at most 5 seconds.
    pub(crate) fn heartbeat(&self) -> Duration {
        self.heartbeat.unwrap_or_else(|| (self.lease / 3).min(MAX_DEFAULT_HEARTBEAT))
    }

    fn check(&self) -> Result<()> {
        let config = |message: String| Err(Error::config(message));
        if !(1..=MAX_CONCURRENCY).contains(&self.concurrency) {
            return config(format!(
                "concurrency: {} jobs at once is not possible; choose 1 to {MAX_CONCURRENCY}",
                self.concurrency
            ));
        }
        if !(MIN_LEASE..=MAX_LEASE).contains(&self.lease) {
            return config(format!("lease: {:?} is not safe; choose {MIN_LEASE:?} to {MAX_LEASE:?}", self.lease));
        }
        let heartbeat = self.heartbeat();
        if heartbeat.is_zero() || heartbeat > self.lease / 2 {
            return config(format!(
                "heartbeat: every {heartbeat:?} is not safe with a lease of {:?}; choose at most half of the lease, or leave it out",
                self.lease
            ));
        }
        if !(MIN_POLL..=MAX_POLL).contains(&self.poll) {
            return config(format!("poll: every {:?} is not sensible; choose {MIN_POLL:?} to {MAX_POLL:?}", self.poll));
        }
        for queue in &self.queues {
            check_name("queue", queue)?;
        }
        Ok(())
    }
}

fn check_name(field: &str, name: &str) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
        return Err(Error::config(format!(
            "{field}: {name:?} is no name; use 1 to {MAX_NAME} bytes, no control characters"
        )));
    }
    Ok(())
}

impl Builder {
    pub(crate) fn new(database: Database) -> Self {
        Self {
            database,
            handlers: Handlers::default(),
            settings: Settings::new(),
            on_event: None,
            meter: None,
            backoffs: Vec::new(),
            mistake: None,
        }
    }

    /// Adds a queue to serve. Default, if none is named: `default`.
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.settings.queues.push(queue.into());
        self
    }

    /// Adds queues to serve.
    pub fn queues<I: IntoIterator<Item: Into<String>>>(mut self, queues: I) -> Self {
        self.settings.queues.extend(queues.into_iter().map(Into::into));
        self
    }

    /// Jobs at once, 1 to 100,000. Default: 100. Handlers hold no connection, so for LLM calls thousands are fine; it is
    /// the handlers' memory and sockets that bound it.
    pub fn concurrency(mut self, jobs: u32) -> Self {
        self.settings.concurrency = jobs;
        self
    }

    /// How long Postgres waits for a sign of life before it gives this worker's jobs to others, 0.5 seconds (for tests) to an
    /// hour. Default: 30 seconds: long enough for a restart of Postgres behind a proxy, short enough that nobody waits long
    /// for the jobs of a dead worker. It does not bound how long a job may run.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// Time between heartbeats, at most half of the lease. Default: a third of it, at most 5 seconds.
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.settings.heartbeat = Some(interval);
        self
    }

    /// How often to look for work when nothing woke the worker, 10 ms to 5 minutes, shortened at random by up to half so
    /// that workers spread. Default: 1 second. It bounds the delay of a job whose notification was lost.
    pub fn poll(mut self, interval: Duration) -> Self {
        self.settings.poll = interval;
        self
    }

    /// How long a shutdown waits for handlers. Default: 25 seconds: with the time to write the last outcomes (at most 5
    /// more) it ends within the 30 seconds that Kubernetes and most supervisors allow.
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// Leaves housekeeping (rescuing the jobs of dead workers among it) to other workers. At least one must do it.
    pub fn no_sweep(mut self) -> Self {
        self.settings.sweep = false;
        self
    }

    /// End when nothing in the worker's queues and kinds is due, later or running any more, anywhere. Default: false.
    pub fn until_empty(mut self, until_empty: bool) -> Self {
        self.settings.until_empty = until_empty;
        self
    }

    /// How long after its first start a job may be snoozed again; later it becomes a dead letter. Default: 24 hours.
    pub fn max_deferral(mut self, longest: Duration) -> Self {
        self.settings.max_deferral = Some(longest);
        self
    }

    /// Calls `listener` for every [`Event`]. It runs inside the worker, so it must return quickly.
    pub fn on_event(mut self, listener: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.on_event = Some(Arc::new(listener));
        self
    }

    /// Counts for metrics in `meter`, and shows there whether the worker is well. Default: nothing is counted.
    pub fn meter(mut self, meter: &Meter) -> Self {
        self.meter = Some(meter.clone());
        self
    }

    /// The handler for a typed job: `|job: Summarize, ctx: Context| async move { … }`. It may return `()`, a `Result`, an
    /// [`Outcome`](crate::Outcome) or a `Result` of one.
    pub fn handle<J, F, Fut>(self, handler: F) -> Self
    where
        J: Job,
        F: Fn(J, Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoOutcome> + Send + 'static,
    {
        self.add(J::KIND.to_owned(), Handler::typed(handler))
    }

    /// The handler for a kind whose payload it reads itself, as JSON text.
    pub fn handle_kind<F, Fut>(self, kind: impl Into<String>, handler: F) -> Self
    where
        F: Fn(Box<RawValue>, Context) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: IntoOutcome> + Send + 'static,
    {
        self.add(kind.into(), Handler::raw(handler))
    }

    /// How long to wait after a failed attempt of a kind. Default: the [`Job`]'s own, or [`Backoff::default`].
    pub fn backoff(mut self, kind: impl Into<String>, backoff: Backoff) -> Self {
        self.backoffs.push((kind.into(), backoff));
        self
    }

    fn add(mut self, kind: String, handler: Handler) -> Self {
        let added = check_name("handle", &kind).and_then(|()| self.handlers.add(kind, handler));
        self.mistake = self.mistake.or(added.err());
        self
    }

    /// Refuses unsafe settings; fills in what was left out.
    pub(crate) fn check(mut self) -> Result<Self> {
        if let Some(mistake) = self.mistake.take() {
            return Err(mistake);
        }
        for (kind, backoff) in self.backoffs.drain(..) {
            self.handlers.set_backoff(&kind, backoff)?;
        }
        if self.handlers.kinds().is_empty() {
            return Err(Error::config(
                "handle: the worker has no handler and would claim nothing; add one with handle or handle_kind",
            ));
        }
        if self.settings.queues.is_empty() {
            self.settings.queues.push("default".to_owned());
        }
        self.settings.queues.sort_unstable();
        self.settings.queues.dedup();
        self.settings.check()?;
        Ok(self)
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("settings", &self.settings)
            .field("kinds", &self.handlers.kinds())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn builder() -> Builder {
        let database = Database::new("postgres://localhost/nowhere").unwrap();
        Builder::new(database).handle_kind("a", |_, _| async {})
    }

    fn refused(builder: Builder) -> String {
        builder.check().map(|_| ()).expect_err("it must be refused").to_string()
    }

    #[test]
    fn the_defaults_are_safe_and_serve_the_default_queue() {
        let checked = builder().check().unwrap();
        assert_eq!(checked.settings.queues, ["default"]);
        assert_eq!(checked.settings.heartbeat(), Duration::from_secs(5));
        let short = builder().lease(Duration::from_millis(900)).check().unwrap();
        assert_eq!(short.settings.heartbeat(), Duration::from_millis(300));
    }

    #[test]
    fn unsafe_settings_are_refused_by_name() {
        let ms = Duration::from_millis;
        let nothing = Builder::new(Database::new("postgres://localhost/nowhere").unwrap());
        for (builder, field) in [
            (nothing, "handle:"),
            (builder().concurrency(0), "concurrency:"),
            (builder().concurrency(100_001), "concurrency:"),
            (builder().lease(ms(499)), "lease:"),
            (builder().lease(Duration::MAX), "lease:"),
            (builder().heartbeat(ms(16_000)), "heartbeat:"),
            (builder().heartbeat(Duration::ZERO), "heartbeat:"),
            (builder().poll(Duration::ZERO), "poll:"),
            (builder().poll(ms(301_000)), "poll:"),
            (builder().queue(""), "queue:"),
            (builder().queue("a\nb"), "queue:"),
            (builder().handle_kind("a", |_, _| async {}), "two handlers"),
            (builder().handle_kind("x\0", |_, _| async {}), "handle:"),
            (builder().backoff("b", Backoff::default()), "backoff:"),
        ] {
            let error = refused(builder);
            assert!(error.contains(field), "{field} is not named in: {error}");
        }
    }
}
