//! `posthouse db`: make, check and find the schema.

mod adopt;
mod doctor;
mod migrate;

use std::process::ExitCode;

use posthouse::store::{Blocker, Isolation, isolate_telling, schema_status};
use serde_json::json;

use crate::args::{Db, DbIsolate, Global};
use crate::failure::{Failure, Result};
use crate::output;
use crate::style::{BAD, GOOD, clean};
use crate::{connect, dev_record};

/// Runs the subcommand.
pub(crate) async fn run(command: Db, global: &Global) -> Result<ExitCode> {
    match command {
        Db::Migrate(args) => migrate::run(args, global).await,
        Db::Status => status(global).await,
        Db::Doctor(args) => doctor::run(args, global).await,
        Db::Adopt(args) => adopt::run(&args, global).await,
        Db::Isolate(args) => apart(&args, global).await,
        Db::Url { show_password } => url(show_password, global),
    }
}

async fn status(global: &Global) -> Result<ExitCode> {
    let status = schema_status(&connect::database(global)?).await?;
    if global.json {
        output::json(&status)?;
    } else {
        let (major, minor) = (status.server_version / 10_000, status.server_version % 10_000);
        let functions = if status.functions_current {
            format!("{GOOD}those of this binary{GOOD:#}")
        } else {
            format!("{BAD}not those of this binary{BAD:#}")
        };
        output::line(format_args!("schema     version {} (this binary knows {})", status.version, status.known))?;
        output::line(format_args!("functions  {functions}"))?;
        output::line(format_args!("Postgres   {major}.{minor}"))?;
    }
    status.check()?;
    if !status.functions_current {
        output::note("functions and views are of another posthouse; `posthouse db migrate` renews them");
    }
    Ok(ExitCode::SUCCESS)
}

async fn apart(args: &DbIsolate, global: &Global) -> Result<ExitCode> {
    let DbIsolate { dry_run, undo, wait } = *args;
    let tell = |waited, blockers: &[Blocker]| migrate::tell_waiting("isolation", waited, blockers);
    let done = isolate_telling(&connect::database(global)?, undo, dry_run, wait, tell).await;
    let done = done.map_err(|error| match error.sqlstate() {
        Some("42501") => Failure::from(error).hint(format!(
            "it takes the owner of the schema, who may make roles (or who made them), or a superuser; this does the same:\n\
             posthouse db isolate{} --dry-run | psql -1 -v ON_ERROR_STOP=1 SUPERUSER_URL",
            if undo { " --undo" } else { "" }
        )),
        _ => error.into(),
    })?;
    if global.json {
        let mut answer = serde_json::to_value(&done)?;
        answer["dry_run"] = json!(dry_run);
        answer["on"] = json!(if dry_run { done.was_on } else { !undo });
        output::json(&answer)?;
    } else if dry_run {
        for statement in &done.statements {
            output::line(format_args!("{};", clean(statement)))?;
        }
    } else if undo {
        output::line("isolation is off: the roles have no rights any more, everything else is as before")?;
    } else {
        output::line(format_args!(
            "isolation is {GOOD}on{GOOD:#}: grant posthouse_enqueue, posthouse_worker, posthouse_read or posthouse_operate to logins,"
        ))?;
        output::line("and say to which tenant each belongs: select posthouse.bind_login('LOGIN', 'TENANT')")?;
    }
    if !undo {
        warn(&done);
    }
    Ok(ExitCode::SUCCESS)
}

/// What the administrator should know.
fn warn(done: &Isolation) {
    let owner = clean(&done.owner);
    if done.owner_is_superuser {
        output::note(format_args!(
            "the schema belongs to {owner}, a superuser, and its functions run with his rights; one that is none is safer: see docs/isolation.md"
        ));
    }
    if !done.owner_sees_transactions {
        output::note(format_args!(
            "{owner} does not see how long other roles' transactions are open; `grant pg_read_all_stats to {owner}` keeps claims fast while they are"
        ));
    }
    for login in &done.overpowered {
        output::note(format_args!(
            "{} is bound to one tenant, but is a member of posthouse_worker or posthouse_operate, which are for all of them",
            clean(login)
        ));
    }
}

/// The URL that all other commands use.
fn url(show_password: bool, global: &Global) -> Result<ExitCode> {
    let url = connect::url(global)?;
    let from = if dev_record::running().as_ref() == Some(&url) { "dev" } else { "given" };
    let url = if show_password { url } else { hide_password(&url) };
    if global.json {
        output::json(&json!({ "url": url, "from": from }))?;
    } else {
        output::line(clean(&url))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The URL or key-value string with stars for each password in it.
fn hide_password(url: &str) -> String {
    let mut hidden = url.to_owned();
    if let Some(start) = url.find("://").map(|at| at + 3) {
        // As the driver reads it: name and password end at the first @, whatever is before it.
        let end = url[start..].find('?').map_or(url.len(), |at| start + at);
        if let Some((user, _)) = url[start..end].split_once('@')
            && let Some((name, _)) = user.split_once(':')
        {
            hidden = format!("{}{name}:***{}", &url[..start], &url[start + user.len()..]);
        }
    }
    // As a parameter: `?password=…`, `password=…`, also `sslpassword=…`.
    let mut from = 0;
    while let Some(at) = hidden[from..].find("password=").map(|at| from + at + "password=".len()) {
        let value = &hidden[at..];
        let length = match value.strip_prefix('\'') {
            Some(quoted) => quoted.find('\'').map_or(value.len(), |end| end + 2),
            None => value.find(['&', ' ']).unwrap_or(value.len()),
        };
        hidden.replace_range(at..at + length, "***");
        from = at;
    }
    hidden
}

#[cfg(test)]
mod tests {
    use super::hide_password;

    #[test]
    fn passwords_are_hidden_wherever_they_stand() {
        for (url, hidden) in [
            ("postgres://u:p@h:5432/d", "postgres://u:***@h:5432/d"),
            ("postgres://u:p%40@h/d?sslmode=require", "postgres://u:***@h/d?sslmode=require"),
            ("postgres://u:p/w:x@h/d?a=b@c", "postgres://u:***@h/d?a=b@c"),
            ("postgres://u@h/d", "postgres://u@h/d"),
            ("postgres://h/d?password=p&user=u", "postgres://h/d?password=***&user=u"),
            ("host=h password=p user=u", "host=h password=*** user=u"),
            ("host=h password='a b' user=u", "host=h password=*** user=u"),
            ("postgres:///d", "postgres:///d"),
        ] {
            assert_eq!(hide_password(url), hidden);
        }
    }
}
