//! What a worker tells the database before it claims anything, so that no job slips past its gates: how models are asked, which
//! gates kinds pass, and the gates and schedules of posthouse.toml that are not there yet.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use posthouse::store::{Database, Store, schema_status};
use posthouse_llm::config::gates::Gate;
use posthouse_llm::config::schedules::Schedule;
use posthouse_llm::{Config, Engine};

use crate::args::Global;
use crate::failure::{Failure, Result};
use crate::gate::Declared;
use crate::log;
use crate::schedule;
use crate::style::clean;

/// Between two tries to tell a database that is away.
const AGAIN: Duration = Duration::from_secs(1);

/// What there is to tell.
pub(super) struct Known {
    engine: Option<Engine>,
    gates: BTreeMap<String, Gate>,
    schedules: BTreeMap<String, Schedule>,
    /// Where gates and schedules stand.
    file: PathBuf,
}

impl Known {
    /// Of the engine, and of the file that is its configuration.
    pub(super) fn load(engine: Option<Engine>, file: Option<PathBuf>) -> Result<Self> {
        let config = match &file {
            Some(file) => Config::load(file).map_err(|error| Failure::new(error.to_string()))?,
            None => Config::default(),
        };
        Ok(Self { engine, gates: config.gates, schedules: config.schedules, file: file.unwrap_or_default() })
    }

    /// Tells it, for as long as it takes: a database that is away is waited for, as the worker itself does. Answers with the engine,
    /// whose endpoints are from then on open and closed for the whole fleet.
    pub(super) async fn tell(self, database: &Database, global: &Global) -> Result<Option<Engine>> {
        if self.engine.is_none() && self.gates.is_empty() && self.schedules.is_empty() {
            return Ok(None);
        }
        let store = database.store("setup");
        let mut is_waiting = false;
        loop {
            let refusal = match self.tell_now(database, &store, global).await {
                Ok(engine) => return Ok(engine),
                Err(refusal) => refusal,
            };
            if !refusal.error.is_transient() {
                return Err(self.failure(refusal));
            }
            if !is_waiting {
                log::say(global, format_args!("waiting for Postgres: {}", clean(&refusal.error.to_string())));
                is_waiting = true;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    async fn tell_now(&self, database: &Database, store: &Store, global: &Global) -> Result<Option<Engine>, Refusal> {
        let plain = Refusal::plain;
        schema_status(database).await.map_err(plain)?.check().map_err(plain)?;
        let engine = match &self.engine {
            Some(engine) => Some(engine.clone().share(database).await.map_err(plain)?),
            None => None,
        };
        match self.set_gates(store, global).await {
            // A role for workers only, as `db isolate` makes it.
            Err(Refusal { error, .. }) if error.sqlstate() == Some("42501") => log::say(
                global,
                format_args!(
                    "this worker's login may not set the gates of {0}; somebody who may does, with `posthouse gate apply --config {0}`",
                    clean(&self.file.display().to_string()),
                ),
            ),
            set => set?,
        }
        match self.set_schedules(store, global).await {
            Err(Refusal { error, .. }) if error.sqlstate() == Some("42501") => log::say(
                global,
                format_args!(
                    "this worker's login may not set the schedules of {0}; somebody who may does, with `posthouse schedule apply --config {0}`",
                    clean(&self.file.display().to_string()),
                ),
            ),
            set => set?,
        }
        Ok(engine)
    }

    async fn set_gates(&self, store: &Store, global: &Global) -> Result<(), Refusal> {
        let declared = Declared::look(store, &self.gates).await.map_err(Refusal::plain)?;
        for name in &declared.missing {
            let set = store.set_gate(name, &self.gates[name].limits()).await;
            set.map_err(|error| Refusal { key: Some(format!("gates.{name}")), error })?;
        }
        if !declared.different.is_empty() {
            log::say(
                global,
                format_args!(
                    "the database has other limits than {} for {}; they hold, until `posthouse gate apply --config {0}`",
                    clean(&self.file.display().to_string()),
                    clean(&declared.different.join(", ")),
                ),
            );
        }
        Ok(())
    }

    async fn set_schedules(&self, store: &Store, global: &Global) -> Result<(), Refusal> {
        if self.file.as_os_str().is_empty() {
            return Ok(());
        }
        let declared = schedule::Declared::look(store, &self.schedules, &self.file).await.map_err(Refusal::plain)?;
        for schedule in &declared.missing {
            let set = store.set_schedule(schedule).await;
            set.map_err(|error| Refusal { key: Some(format!("schedules.{}", schedule.name())), error })?;
        }
        if !declared.different.is_empty() {
            log::say(
                global,
                format_args!(
                    "the database has other schedules than {} for {}; they hold, until `posthouse schedule apply --config {0}`",
                    clean(&self.file.display().to_string()),
                    clean(&declared.different.join(", ")),
                ),
            );
        }
        declared.gone.iter().for_each(|name| log::say(global, schedule::gone(name, &self.file)));
        Ok(())
    }

    fn failure(&self, refusal: Refusal) -> Failure {
        let Refusal { key, error } = refusal;
        match key {
            Some(key) if error.is_invalid() => Failure::new(format!("{}: {key}: {error}", self.file.display())),
            _ => error.into(),
        }
    }
}

/// What the database did not take.
struct Refusal {
    /// The key of the file that it is about.
    key: Option<String>,
    error: posthouse::Error,
}

impl Refusal {
    fn plain(error: posthouse::Error) -> Self {
        Self { key: None, error }
    }
}
