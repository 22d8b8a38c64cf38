//! `posthouse job wait`: until jobs are final.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use posthouse::store::{JobRecord, Reason, Store};
use tokio::time::{Instant, sleep, timeout_at};

use crate::args::{Global, JobWait};
use crate::failure::{Failure, Result};
use crate::output;
use crate::pretty;
use crate::style::{clean, clean_lines};

/// How often it looks: soon after short jobs, seldom while a long one runs.
const FIRST_LOOK: Duration = Duration::from_millis(50);
const LATER_LOOKS: Duration = Duration::from_secs(1);
/// A job that is still in line then is explained, since perhaps nobody serves it.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Waits, and prints each result as it comes; with --json all of them at the end, in the order of the ids.
pub(super) async fn wait(store: &Store, args: &JobWait, global: &Global) -> Result<ExitCode> {
    let (begin, mut finals) = (Instant::now(), BTreeMap::new());
    // Looks at least once, however short the time.
    let mut waited = look(store, &args.ids, &mut finals, global).await.map(|_| ());
    if waited.is_ok() {
        let waiting = until_final(store, &args.ids, &mut finals, global);
        waited = match args.timeout.and_then(|longest| begin.checked_add(longest)) {
            None => waiting.await,
            Some(end) => timeout_at(end, waiting).await.unwrap_or(Ok(())),
        };
    }
    if global.json {
        let jobs: Vec<_> = args.ids.iter().filter_map(|id| finals.get(id)).collect();
        output::json(&jobs)?;
    }
    waited?;
    let open: Vec<_> = args.ids.iter().filter(|id| !finals.contains_key(id)).map(ToString::to_string).collect();
    if !open.is_empty() {
        let first = &open[0];
        return Err(Failure::new(format!("the timeout is over and not final yet: job {}", open.join(", job ")))
            .hint(format!("`posthouse job explain {first}` says what it waits for")));
    }
    let all_done = finals.values().all(|job| job.state == "done");
    Ok(ExitCode::from(u8::from(!all_done)))
}

async fn until_final(store: &Store, ids: &[i64], finals: &mut BTreeMap<i64, JobRecord>, global: &Global) -> Result<()> {
    let mut pause = FIRST_LOOK;
    let begin = Instant::now();
    // Programs that read JSON look for themselves.
    let mut is_explained = global.json;
    while ids.iter().any(|id| !finals.contains_key(id)) {
        sleep(pause).await;
        pause = (pause * 2).min(LATER_LOOKS);
        let states = look(store, ids, finals, global).await?;
        if !is_explained && begin.elapsed() >= SILENCE_MAX {
            let queued = states.iter().find(|(_, state)| state == "queued");
            is_explained = queued.is_some();
            if let Some((id, _)) = queued {
                explain(store, *id).await;
            }
        }
    }
    Ok(())
}

/// Looks at those that were not final yet, keeps those that are, and answers with the states it saw.
async fn look(
    store: &Store,
    ids: &[i64],
    finals: &mut BTreeMap<i64, JobRecord>,
    global: &Global,
) -> Result<Vec<(i64, String)>> {
    let mut open = ids.to_vec();
    open.retain(|id| !finals.contains_key(id));
    open.sort_unstable();
    open.dedup();
    let states = store.states(&open).await?;
    for id in open {
        let Some((_, state)) = states.iter().find(|(found, _)| *found == id) else {
            return Err(Failure::new(format!("job {id}: there is no such job")));
        };
        if !matches!(state.as_str(), "done" | "failed" | "cancelled") {
            continue;
        }
        // Somebody may have retried it just now: then it is waited for again.
        if let Some(job) = store.job(id).await?.filter(JobRecord::is_final) {
            if !global.json {
                print(&job)?;
            }
            finals.insert(id, job);
        }
    }
    Ok(states)
}

/// Says on stderr what a job waits for. Who may not ask that waits all the same.
async fn explain(store: &Store, id: i64) {
    for Reason { state, reason, .. } in store.explain(id).await.unwrap_or_default() {
        output::note(format_args!("job {id} {}: {}", clean(&state), clean(&reason)));
    }
}

fn print(job: &JobRecord) -> Result<()> {
    output::line(format_args!("job {} {}", job.id, clean(&job.state)))?;
    match (&job.result, &job.error) {
        (Some(result), _) if job.state == "done" => output::line(clean_lines(&pretty::indent(result.get()))),
        (_, Some(error)) if job.state == "failed" => output::line(clean_lines(error)),
        _ => Ok(()),
    }
}
