//! Schedules while all that can go wrong does: leaders that die at every tick, several at once, clocks that jump. Each tick of a schedule
//! comes to exactly one job.

use std::time::{Duration, SystemTime};

use posthouse::store::{Database, Store};
use posthouse::sweep::fire_schedules_at;

use super::schedules::at;
use super::support::{Queue, Session};

const START: &str = "2027-01-01T00:00:00Z";

fn leader(queue: &Queue) -> Store {
    Database::new(queue.url()).unwrap().store("leader")
}

/// So many schedules, due at every second, that lose nothing. Nobody can set such a one, but it is fired as others are.
async fn every_second(session: &Session, schedules: u32) {
    session
        .run(&format!(
            "select posthouse.set_schedule('s' || n, '* * * * *', jsonb_build_object('kind', 'k', 'payload', n), catch_up => 'all', catch_up_max => 100)
             from generate_series(1, {schedules}) n;
             update posthouse.schedule set cron = '* * * * * *', since = '{START}'"
        ))
        .await;
}

/// Every tick of the first `seconds` has one run, and every run a job of its own; there are no other jobs.
async fn exactly_once(session: &Session, schedules: i64, seconds: i64) {
    let lost: Vec<String> = session
        .list(&format!(
            "select n || ' at ' || t from generate_series(1, {schedules}) n
             cross join generate_series(timestamptz '{START}' + interval '1 second', timestamptz '{START}' + interval '1 second' * {seconds}, '1 second') t
             where not exists (select from posthouse.schedule_run r where r.schedule = 's' || n and r.tick = t)"
        ))
        .await;
    assert_eq!(lost, Vec::<String>::new(), "lost");
    assert_eq!(session.count("posthouse.schedule_run").await, schedules * seconds, "ticks");
    assert_eq!(session.count("posthouse.job").await, schedules * seconds, "jobs");
    let own = "select count(distinct r.job_id) from posthouse.schedule_run r join posthouse.job j on j.id = r.job_id
               join posthouse.payload p on p.id = j.id where 's' || (p.payload #>> '{}') = r.schedule";
    assert_eq!(session.get::<i64>(own).await, schedules * seconds, "a job of its own for each tick");
    assert_eq!(
        session.get::<i64>("select sum(fired)::bigint from posthouse.schedules").await,
        schedules * seconds,
        "fired"
    );
    assert_eq!(session.get::<i64>("select sum(missed)::bigint from posthouse.schedules").await, 0, "missed");
}

/// At each of a thousand ticks three leaders, of whom two die at a moment of their own: the process, or its session in Postgres.
#[tokio::test]
async fn leaders_that_die_at_every_tick_lose_none_and_double_none() {
    const TICKS: u64 = 1_000;
    let (queue, session) = Queue::with_session().await;
    every_second(&session, 10).await;
    let mut random = fastrand::Rng::with_seed(17);
    let mut killed = 0;
    let mut leaders: Vec<Store> = (0..3).map(|_| leader(&queue)).collect();
    for tick in 1..=TICKS {
        let now = at(START) + Duration::from_secs(tick) + Duration::from_millis(random.u64(0..900));
        let tasks: Vec<_> = leaders
            .iter()
            .cloned()
            .map(|store| tokio::spawn(async move { fire_schedules_at(&store, now).await.map(drop) }))
            .collect();
        let survivor = random.usize(0..4);
        for (n, task) in tasks.into_iter().enumerate() {
            if n == survivor {
                task.await.unwrap().ok();
                continue;
            }
            tokio::time::sleep(Duration::from_micros(random.u64(0..8_000))).await;
            if n % 2 == 0 {
                // The process is gone: whatever it has sent is on its way.
                task.abort();
                leaders[n] = leader(&queue);
            } else {
                session
                    .run("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'posthouse/leader' and datname = current_database()
                          order by random() limit 1")
                    .await;
                task.await.unwrap().ok();
            }
            killed += 1;
        }
    }
    // The last of them comes again.
    while fire_schedules_at(&leader(&queue), at(START) + Duration::from_secs(TICKS)).await.is_err() {}
    assert!(killed > 2 * TICKS, "{killed}");
    exactly_once(&session, 10, TICKS.cast_signed()).await;
}

/// What the clock of the database says when it is so many minutes after the start in truth: ahead by an hour, behind by half of one,
/// ahead by eight, and then by a minute or two.
fn jumping(minute: u64) -> SystemTime {
    let truth = at(START) + Duration::from_mins(minute) + Duration::from_secs(2);
    match minute {
        20..25 => truth + Duration::from_mins(60),
        50..60 => truth - Duration::from_mins(30),
        80 => truth + Duration::from_hours(8),
        81 | 82 => truth - Duration::from_secs(90),
        84 => truth + Duration::from_mins(3),
        _ => truth,
    }
}

#[tokio::test]
async fn a_clock_that_jumps_back_and_forth_drops_no_tick_and_doubles_none() {
    let (queue, session) = Queue::with_session().await;
    for (name, options) in [("all", ", catch_up_max => 1000"), ("one", ""), ("skip", "")] {
        session
            .run(&format!("select posthouse.set_schedule('{name}', '* * * * *', '{{\"kind\": \"{name}\"}}', catch_up => '{name}'{options})"))
            .await;
    }
    session.run(&format!("update posthouse.schedule set since = '{START}'")).await;
    let (one, other) = (leader(&queue), leader(&queue));
    for minute in 0..=120 {
        let now = jumping(minute);
        // Two at once, and again until there is nothing left.
        let (a, b) = tokio::join!(fire_schedules_at(&one, now), fire_schedules_at(&other, now));
        let mut more = a.unwrap().more | b.unwrap().more;
        while more {
            more = fire_schedules_at(&one, now).await.unwrap().more;
        }
    }
    let lost = |name: &str, but: &str| {
        format!(
            "select to_char(t at time zone 'UTC', 'HH24:MI') from generate_series(timestamptz '{START}' + interval '1 minute', timestamptz '{START}' + interval '2 hours', '1 minute') t
             where not exists (select from posthouse.schedule_run r where r.schedule = '{name}' and r.tick = t) {but}"
        )
    };
    assert_eq!(session.list::<String>(&lost("all", "")).await, Vec::<String>::new());
    // Those that came and went while the clock was wrong, and no other: nobody can have seen them in time.
    for name in ["one", "skip"] {
        let lost: Vec<String> = session.list(&lost(name, "")).await;
        assert!(
            lost.iter().all(|tick| ("00:20".."00:26").contains(&tick.as_str())
                || ("00:50".."01:00").contains(&tick.as_str())
                || ("01:20".."01:26").contains(&tick.as_str())),
            "{name}: {lost:?}"
        );
    }
    for name in ["all", "one", "skip"] {
        let (runs, jobs) = (
            session.count(&format!("posthouse.schedule_run where schedule = '{name}'")).await,
            session.count(&format!("posthouse.jobs where kind = '{name}'")).await,
        );
        assert_eq!(runs, jobs, "{name}");
    }
}

/// What was swept by a clock that was ahead would else not come again before that time.
#[tokio::test]
async fn a_clock_set_back_stops_no_part_of_the_sweep() {
    let (_queue, session) = Queue::with_session().await;
    session.run("update posthouse.sweep set ran_at = clock_timestamp() + interval '1 day'").await;
    let due: Vec<String> = session.list("select posthouse.due_sweeps() order by 1").await;
    assert_eq!(due, session.list::<String>("select name from posthouse.sweep order by 1").await);
    assert!(session.get::<bool>("select posthouse.begin_sweep('schedules')").await);
    assert!(!session.get::<bool>("select posthouse.begin_sweep('schedules')").await, "only once");
}
