//! The schedules of a posthouse.toml: set by `schedule apply` as they stand there, and by workers where they are not there yet.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::ExitCode;

use posthouse::store::{Schedule, ScheduleRecord, Store};
use posthouse_llm::config::schedules::Schedule as Section;
use posthouse_llm::{Config, ConfigError};
use serde_json::json;

use super::words::word;
use crate::args::{Global, ScheduleApply};
use crate::connect;
use crate::failure::{Failure, Result};
use crate::output;
use crate::style::{DIM, clean};

/// The file that is read when none is named.
const CONFIG: &str = "posthouse.toml";

/// Sets every schedule of the file.
pub(super) async fn run(args: &ScheduleApply, global: &Global) -> Result<ExitCode> {
    let file = args.config.as_deref().unwrap_or(Path::new(CONFIG));
    let config = Config::load(file).map_err(|error| Failure::new(error.to_string()))?;
    if config.schedules.is_empty() {
        return Err(Failure::new(format!("{} declares no schedules", file.display()))
            .hint("write them as in\n  [schedules.digest]\n  cron = \"30 7 * * MON-FRI\"\n  kind = \"digest\""));
    }
    let declared = sections(&config.schedules, file).map_err(|error| Failure::new(error.to_string()))?;
    let store = connect::store(global).await?;
    let mut answers = Vec::new();
    for schedule in &declared {
        let change = match args.dry_run {
            true => store.rehearse_schedule(schedule).await,
            false => store.set_schedule(schedule).await,
        };
        let change = change
            .map_err(|error| Failure::new(format!("{}: schedules.{}: {error}", file.display(), schedule.name())))?;
        if global.json {
            answers.push(json!({ "name": schedule.name(), "change": change }));
        } else {
            output::line(format_args!("schedule {} {DIM}({}){DIM:#}", clean(schedule.name()), word(change)))?;
        }
    }
    if args.dry_run {
        for record in store.schedules().await? {
            if config.schedules.contains_key(&record.name) {
                continue;
            }
            if global.json {
                answers.push(json!({ "name": record.name, "change": "not_in_file" }));
            } else {
                output::line(format_args!("schedule {} {DIM}(not in the file, stays){DIM:#}", clean(&record.name)))?;
            }
        }
    }
    if global.json {
        output::json(&answers)?;
    } else if args.dry_run {
        output::line("nothing was changed")?;
    }
    let declared = Declared::look(&store, &config.schedules, file).await?;
    declared.gone.iter().for_each(|name| output::note(gone(name, file)));
    Ok(ExitCode::SUCCESS)
}

/// By its name alone, since workers may read it from different folders.
fn source(file: &Path) -> String {
    file.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn sections(sections: &BTreeMap<String, Section>, file: &Path) -> std::result::Result<Vec<Schedule>, ConfigError> {
    let source = source(file);
    sections.iter().map(|(name, section)| section.declared(name, Some(&source))).collect()
}

/// Somebody took it out of the file; that removes nothing.
pub(crate) fn gone(name: &str, file: &Path) -> String {
    format!(
        "schedule {0} does not stand in {1} any more, and goes on; `posthouse schedule remove {0}` ends it",
        clean(name),
        clean(&file.display().to_string()),
    )
}

/// How the schedules of a file stand to those of the database.
#[derive(Default)]
pub(crate) struct Declared {
    /// Not there at all.
    pub(crate) missing: Vec<Schedule>,
    /// There, but not just so.
    pub(crate) different: Vec<String>,
    /// Declared by this file once, and not any more.
    pub(crate) gone: Vec<String>,
}

impl Declared {
    /// Compares them.
    pub(crate) async fn look(
        store: &Store,
        schedules: &BTreeMap<String, Section>,
        file: &Path,
    ) -> posthouse::Result<Self> {
        let source = source(file);
        let mut there: HashMap<String, ScheduleRecord> =
            store.schedules().await?.into_iter().map(|record| (record.name.clone(), record)).collect();
        let mut declared = Self::default();
        for schedule in sections(schedules, file).map_err(|error| posthouse::Error::invalid(error.to_string()))? {
            let name = schedule.name().to_owned();
            if there.remove(&name).is_none() {
                declared.missing.push(schedule);
            } else if let Some(whole) = store.schedule(&name).await?
                && !schedule.is_same(&whole)?
            {
                declared.different.push(name);
            }
        }
        let mut gone: Vec<String> = there
            .into_values()
            .filter(|record| record.source.as_deref() == Some(&source))
            .map(|record| record.name)
            .collect();
        gone.sort_unstable();
        declared.gone = gone;
        Ok(declared)
    }
}
