//! Processes that fire schedules, killed again and again, several at once: each tick comes to exactly one job.

use std::time::Duration;

use super::support::number;
use crate::client::queue_database;
use crate::harness::{Program, SOON, wait_until};

fn sweeper(url: &str) -> Program {
    Program::start(Program::posthouse().args(["work", "--sweep-only", "--database-url", url]))
}

#[tokio::test]
async fn processes_killed_at_their_ticks_lose_none_and_double_none() {
    let database = queue_database().await;
    let client = database.connect().await;
    // Nobody can set a rule with seconds, but it is fired as others are.
    let set = "select posthouse.set_schedule('s' || n, '* * * * *', '{\"kind\": \"nobody-knows-it\"}', catch_up => 'all', catch_up_max => 1000)
               from generate_series(1, 3) n;
               update posthouse.schedule set cron = '* * * * * *'";
    client.batch_execute(set).await.unwrap();
    let fired = "select count(*) from posthouse.schedule_run";
    let mut steady = sweeper(database.url());
    for round in 0..6 {
        let before = number(&database, fired).await;
        let mut doomed = sweeper(database.url());
        wait_until(SOON, "ticks are fired", async || number(&database, fired).await > before + 3).await;
        // Now in the middle of a tick, now between two, now the one, now the other.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..1_000))).await;
        if round % 2 == 0 {
            std::mem::swap(&mut steady, &mut doomed);
        }
        doomed.kill_9();
        doomed.ended(SOON).await;
    }
    // All killed for a while, then somebody comes back.
    steady.kill_9();
    steady.ended(SOON).await;
    let last = number(&database, "select extract(epoch from clock_timestamp())::bigint").await;
    let _back = sweeper(database.url());
    let caught_up = format!("select count(*) from posthouse.schedule where extract(epoch from last_tick) >= {last}");
    wait_until(SOON, "all is made up for", async || number(&database, &caught_up).await == 3).await;
    let gaps = "select count(*) from (select tick - lag(tick) over (partition by schedule order by tick) as step from posthouse.schedule_run) s
                where step <> interval '1 second'";
    assert_eq!(number(&database, gaps).await, 0, "ticks lost");
    // In one look, since it goes on.
    let unequal = "select (select count(*) from posthouse.schedule_run) - (select count(*) from posthouse.job)
                   + (select count(*) - count(distinct job_id) from posthouse.schedule_run)";
    assert_eq!(number(&database, unequal).await, 0, "a job of its own for each tick, and no others");
    assert_eq!(number(&database, "select sum(missed)::bigint from posthouse.schedule").await, 0);
}
