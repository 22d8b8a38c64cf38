//! Do something to all jobs that are chosen: in batches, showing how far it is; or only say which they are.

use std::process::ExitCode;
use std::time::SystemTime;

use indicatif::{ProgressBar, ProgressStyle};
use posthouse::store::{Action, Batch, JobRecord, Refused, Selection, Store};
use serde_json::{Map, Value, json};

use crate::args::{CreatedChoice, DeadChoice, DeadConditions, ErrorChoice, Global, JobChoice, Moment, Scope};
use crate::failure::{Failure, Result};
use crate::output::{self, Grid, age, cell};
use crate::style::clean;

/// Jobs in one transaction: a few at a time hold up nobody.
const BATCH: u32 = 500;
/// Jobs that are counted at once.
const COUNTED: u32 = 10_000;
/// Jobs that a dry run shows, and reasons for refusals that are told.
const SHOWN: usize = 10;
/// Jobs on which a dry run tries what can be refused: it writes as much as the real run would.
const TRIED: u64 = 1_000;
/// How often it begins again for those that somebody else was busy with.
const ROUNDS: u32 = 3;

/// What a command does to many jobs.
pub(crate) struct Deed {
    pub(crate) action: Action,
    /// The states that it is meant for, where no other was asked for.
    pub(crate) states: &'static [&'static str],
    /// What has become of them: `cancelled`, `redriven`, …
    pub(crate) done: &'static str,
}

/// What was typed as a selection. Ages count back from `now`, the database's clock.
pub(crate) fn jobs(choice: &JobChoice, now: SystemTime) -> Selection {
    let CreatedChoice { created_since, created_before } = &choice.created;
    let selection = Selection {
        ids: ids(&choice.ids),
        states: choice.states.clone(),
        created_since: time(created_since.as_ref(), now),
        created_before: time(created_before.as_ref(), now),
        failed_since: time(choice.failed_since.as_ref(), now),
        failed_before: time(choice.failed_before.as_ref(), now),
        all: choice.scope.all,
        ..Selection::default()
    };
    with_names(selection, &choice.filter, &choice.error)
}

/// The same for dead letters.
pub(crate) fn dead(choice: &DeadChoice, now: SystemTime) -> Selection {
    Selection { ids: ids(&choice.ids), all: choice.scope.all, ..conditions(&choice.conditions, now) }
}

/// The same for conditions on dead letters.
pub(crate) fn conditions(conditions: &DeadConditions, now: SystemTime) -> Selection {
    let selection = Selection {
        failed_since: time(conditions.since.as_ref(), now),
        failed_before: time(conditions.before.as_ref(), now),
        ..Selection::default()
    };
    with_names(selection, &conditions.filter, &conditions.error)
}

fn with_names(selection: Selection, filter: &crate::args::Filter, error: &ErrorChoice) -> Selection {
    Selection {
        queue: filter.queue.clone(),
        kind: filter.kind.clone(),
        tenant: filter.tenant.clone(),
        class: error.class.clone(),
        error: error.error.clone(),
        ..selection
    }
}

fn ids(ids: &[i64]) -> Option<Vec<i64>> {
    Some(ids.to_vec()).filter(|ids| !ids.is_empty())
}

fn time(moment: Option<&Moment>, now: SystemTime) -> Option<String> {
    moment.map(|moment| match moment {
        Moment::At(text) => text.clone(),
        Moment::Ago(age) => match now.checked_sub(*age).filter(|then| *then >= SystemTime::UNIX_EPOCH) {
            Some(then) => humantime::format_rfc3339_micros(then).to_string(),
            None => "-infinity".to_owned(),
        },
    })
}

/// Refuses what would mean every job by chance. `options` are those that would say which.
pub(crate) fn check(selection: &Selection, what: &str, options: &str) -> Result<()> {
    if selection.is_empty() && !selection.all {
        return Err(
            Failure::usage(format!("which {what} is not said")).hint(format!("name them by {options}, or take --all"))
        );
    }
    Ok(())
}

/// Who runs this command, as far as the machine knows.
pub(crate) fn who() -> Option<String> {
    ["USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok()).filter(|name| !name.is_empty())
}

/// Who names ids is told which of them are in none of the states that a command is for, and what that means.
pub(crate) async fn tell_strangers(store: &Store, selection: &Selection, states: &[&str], means: &str) -> Result<()> {
    let Some(ids) = &selection.ids else { return Ok(()) };
    let found = store.states(ids).await?;
    for id in ids {
        match found.iter().find(|(found, _)| found == id) {
            Some((_, state)) if states.contains(&state.as_str()) => {}
            Some((_, state)) => output::note(format_args!("job {id} is {} and {means}", clean(state))),
            None => output::note(format_args!("job {id}: there is no such job")),
        }
    }
    Ok(())
}

/// How many there are, and the first ones.
pub(crate) async fn find(store: &Store, selection: &Selection) -> Result<(u64, Vec<i64>)> {
    let mut count = 0;
    let mut first = Vec::new();
    let mut next = None;
    loop {
        let (ids, then) = store.find_jobs(selection, COUNTED, next).await?;
        count += ids.len() as u64;
        first.extend(ids.into_iter().take(SHOWN - first.len()));
        next = then;
        if next.is_none() {
            return Ok((count, first));
        }
    }
}

/// What a dry run found by trying it.
#[derive(Default)]
struct Tried {
    /// How many jobs it was tried on.
    count: u64,
    refused: Vec<Refused>,
}

/// Tries it on the first jobs, and undoes it.
async fn try_first(store: &Store, selection: &Selection, action: &Action, count: u64) -> Result<Tried> {
    let mut tried = Tried { count: count.min(TRIED), ..Tried::default() };
    let mut looked_at = 0;
    let mut next = None;
    while looked_at < tried.count {
        let most = u32::try_from(tried.count - looked_at).unwrap_or(BATCH).min(BATCH);
        let batch = store.rehearse_jobs(selection, action, most, next).await?;
        looked_at += u64::try_from(batch.changed + batch.busy).unwrap_or(0) + batch.refused.len() as u64;
        tried.refused.extend(batch.refused);
        next = batch.next;
        if next.is_none() {
            break;
        }
    }
    Ok(tried)
}

/// Says which jobs it would be and which of them would be refused, and changes none.
async fn rehearse(store: &Store, selection: &Selection, deed: &Deed, global: &Global) -> Result<ExitCode> {
    let done = deed.done;
    let (count, first) = find(store, selection).await?;
    let tried = match &deed.action {
        action @ (Action::Redrive { .. } | Action::Retry { .. }) => try_first(store, selection, action, count).await?,
        Action::Cancel | Action::Purge | Action::Reprioritise { .. } => Tried { count, ..Tried::default() },
    };
    let refused = tried.refused.len() as u64;
    let sample = store.sample(&first).await?;
    if global.json {
        let mut answer =
            json!({ done: 0, format!("would_be_{done}"): count.saturating_sub(refused), "sample": sample });
        if refused > 0 {
            answer["would_be_refused"] = serde_json::to_value(&tried.refused)?;
        }
        if tried.count < count {
            answer["tried"] = tried.count.into();
        }
        output::json(&answer)?;
        return Ok(ExitCode::SUCCESS);
    }
    table(&sample, store.clock().await?)?;
    if count > sample.len() as u64 {
        output::line(format_args!("… and {} more", count - sample.len() as u64))?;
    }
    for refused in tried.refused.iter().take(SHOWN) {
        output::line(format_args!("job {} would be refused: {}", refused.id, clean(&refused.error)))?;
    }
    if tried.refused.len() > SHOWN {
        output::line(format_args!("… and {} more would be refused", tried.refused.len() - SHOWN))?;
    }
    if tried.count < count {
        output::line(format_args!("tried on the first {} of {count} only", tried.count))?;
    }
    let refusals = if refused > 0 { format!(", {refused} refused") } else { String::new() };
    output::line(format_args!("{} would be {done}{refusals}; nothing was changed", count.saturating_sub(refused)))?;
    Ok(ExitCode::SUCCESS)
}

fn table(jobs: &[JobRecord], now: SystemTime) -> Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let mut grid = Grid::new(&["id", "state", "kind", "queue", "tenant", "age", "note"]).right(&[0]);
    for job in jobs {
        grid.row(vec![
            cell(job.id.to_string()),
            output::state(&job.state),
            cell(&job.kind),
            cell(&job.queue),
            cell(&job.tenant),
            cell(age(&job.created_at, now)),
            cell(job.error.as_deref().or(job.reason.as_deref()).unwrap_or_default()),
        ]);
    }
    grid.print()
}

/// Does it, or, for a dry run, says what it would do. With ids the exit code is 1 if one of them was not changed.
pub(crate) async fn run(
    store: &Store,
    mut selection: Selection,
    scope: &Scope,
    deed: Deed,
    global: &Global,
) -> Result<ExitCode> {
    if selection.states.is_empty() {
        selection.states = deed.states.iter().map(ToString::to_string).collect();
    }
    if scope.dry_run {
        return rehearse(store, &selection, &deed, global).await;
    }
    let (total, _) = find(store, &selection).await?;
    // The template is constant and sound.
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ({eta} left)");
    let bar = ProgressBar::new(total).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let bar = bar.with_message(deed.done);
    let mut sum = Batch::default();
    for _ in 0..ROUNDS {
        let mut next = None;
        sum.busy = 0;
        loop {
            let batch = store.change_jobs(&selection, &deed.action, BATCH, next.take()).await?;
            sum.changed += batch.changed;
            sum.busy += batch.busy;
            sum.refused.extend(batch.refused);
            bar.inc(u64::try_from(batch.changed).unwrap_or(0));
            next = batch.next;
            if next.is_none() {
                break;
            }
        }
        if sum.busy == 0 || !again(&deed.action) {
            break;
        }
    }
    bar.finish_and_clear();
    report(&sum, &deed, global)?;
    let named = selection.ids.as_ref().map_or(0, |ids| {
        let mut ids = ids.clone();
        ids.sort_unstable();
        ids.dedup();
        ids.len()
    });
    let short = sum.changed < i64::try_from(named).unwrap_or(i64::MAX);
    Ok(ExitCode::from(u8::from(short || sum.busy > 0 || !sum.refused.is_empty())))
}

/// The same for what cannot be undone: without ids it must be said that it is meant.
pub(crate) async fn run_if_meant(
    store: &Store,
    mut selection: Selection,
    scope: &Scope,
    is_meant: bool,
    what: &str,
    deed: Deed,
    global: &Global,
) -> Result<ExitCode> {
    if selection.states.is_empty() {
        selection.states = deed.states.iter().map(ToString::to_string).collect();
    }
    if selection.ids.is_none() && !is_meant && !scope.dry_run {
        let (count, _) = find(store, &selection).await?;
        if count == 0 {
            report(&Batch::default(), &deed, global)?;
            return Ok(ExitCode::SUCCESS);
        }
        if global.json {
            output::json(&json!({ "purged": 0, "would_purge": count }))?;
        }
        return Err(Failure::new(format!("nothing purged: this would remove {count} {what} for good"))
            .hint("look at them with --dry-run; add --yes to remove them"));
    }
    run(store, selection, scope, deed, global).await
}

/// Whether doing it once more hits only those that were left out: a job that was redriven may have failed again since.
fn again(action: &Action) -> bool {
    !matches!(action, Action::Redrive { .. } | Action::Retry { .. })
}

fn report(sum: &Batch, deed: &Deed, global: &Global) -> Result<()> {
    if global.json {
        let mut answer = Map::new();
        answer.insert(deed.done.to_owned(), sum.changed.into());
        if sum.busy > 0 {
            answer.insert("busy".to_owned(), sum.busy.into());
        }
        if !sum.refused.is_empty() {
            answer.insert("refused".to_owned(), serde_json::to_value(&sum.refused)?);
        }
        return output::json(&Value::Object(answer));
    }
    output::line(format_args!("{} {}", sum.changed, deed.done))?;
    for refused in sum.refused.iter().take(SHOWN) {
        output::note(format_args!("job {}: {}", refused.id, clean(&refused.error)));
    }
    if sum.refused.len() > SHOWN {
        output::note(format_args!("… and {} more were refused", sum.refused.len() - SHOWN));
    }
    if sum.busy > 0 {
        output::note(format_args!("{} were left out, since somebody else was at them; run it again", sum.busy));
    }
    Ok(())
}
