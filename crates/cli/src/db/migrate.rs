//! `posthouse db migrate`: brings the schema up to date, and says on stderr who holds it up.

use std::process::ExitCode;
use std::time::Duration;

use posthouse::store::{Blocker, Progress, migrate_telling, schema_status};
use serde_json::json;

use crate::args::{DbMigrate, Global};
use crate::failure::Result;
use crate::style::{GOOD, clean};
use crate::{connect, output};

/// Runs the command.
pub(super) async fn run(args: DbMigrate, global: &Global) -> Result<ExitCode> {
    let database = connect::database(global)?;
    let before = schema_status(&database).await?;
    let mut renewed = false;
    let applied = migrate_telling(&database, args.wait, |progress| {
        renewed |= matches!(progress, Progress::Renewed) && before.version > 0;
        tell(progress);
    })
    .await?;
    let version = schema_status(&database).await?.version;
    if global.json {
        let applied: Vec<_> = applied.iter().map(|m| json!({ "version": m.version, "name": m.name })).collect();
        output::json(&json!({ "applied": applied, "version": version, "functions_renewed": renewed }))?;
        return Ok(ExitCode::SUCCESS);
    }
    for migration in &applied {
        output::line(format_args!("migration {} {} {GOOD}applied{GOOD:#}", migration.version, migration.name))?;
    }
    if renewed {
        output::line(format_args!("functions and views {GOOD}renewed{GOOD:#}"))?;
    }
    output::line(format_args!("the schema is up to date (version {version})"))?;
    Ok(ExitCode::SUCCESS)
}

fn tell(progress: &Progress) {
    if let Progress::Waiting { step, waited, blockers } = progress {
        tell_waiting(step, *waited, blockers);
    }
}

/// Says who is in the way.
pub(super) fn tell_waiting(step: &str, waited: Duration, blockers: &[Blocker]) {
    let who: Vec<_> = blockers.iter().map(|blocker| clean(&blocker.to_string())).collect();
    let who = if who.is_empty() { "somebody who is gone again".to_owned() } else { who.join("; ") };
    output::note(format_args!("{step} waits for a lock since {}, held by {who}; trying again", output::short(waited)));
}
