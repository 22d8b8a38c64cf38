//! Claim: what is taken, in which order, and never more than asked for.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::support::{Claimed, Queue, Session, Worker, ids};
use crate::harness::{SOON, wait_until};

fn tenants(jobs: &[Claimed]) -> BTreeMap<&str, usize> {
    let mut count = BTreeMap::new();
    for job in jobs {
        *count.entry(job.tenant.as_str()).or_default() += 1;
    }
    count
}

async fn finish(s: &Session, worker: &Worker, jobs: &[Claimed]) {
    let outcomes: Vec<Value> =
        jobs.iter().map(|job| json!({"id": job.id, "fence": job.fence, "outcome": "done"})).collect();
    assert!(s.settle(worker.id, &json!(outcomes)).await.iter().all(|v| v.1 == "applied"));
}

#[tokio::test]
async fn smaller_priorities_first_then_first_come() {
    let (_queue, s) = Queue::with_session().await;
    let mut expected = Vec::new();
    for (kind, priority) in
        [("a", 5), ("b", 0), ("a", 0), ("b", -2_147_483_648), ("a", 0), ("a", 2_147_483_647), ("b", 0)]
    {
        expected.push((priority, s.enqueue(&format!("kind => '{kind}', priority => {priority}")).await));
    }
    expected.sort_unstable();
    let worker = s.worker(&["a", "b"]).await;
    // One by one, then all at once: those of one claim start together, but smaller priorities come first in it too.
    let mut got = Vec::new();
    for max in [1, 1, 1, 100] {
        got.extend(worker.claim(&s, max).await.into_iter().map(|job| (job.priority, job.id)));
    }
    assert!(got.is_sorted_by_key(|(priority, _)| *priority), "{got:?}");
    got[3..].sort_unstable();
    assert_eq!(got, expected);
    assert!(worker.claim(&s, 100).await.is_empty());
    assert_eq!(s.count("posthouse.job where state = 'running' and attempt = 1 and fence = 1").await, 7);
}

#[tokio::test]
async fn first_come_first_served_within_a_tenant_across_kinds() {
    let (_queue, s) = Queue::with_session().await;
    let mut expected = Vec::new();
    for n in 0..60 {
        expected.push(s.enqueue(&format!("kind => 'k{}'", n % 3)).await);
    }
    let worker = s.worker(&["k0", "k1", "k2"]).await;
    let mut got = Vec::new();
    for max in [1, 2, 3, 5, 8, 13, 100] {
        let jobs = worker.claim(&s, max).await;
        let mut part = ids(&jobs);
        part.sort_unstable();
        got.extend(part);
    }
    assert_eq!(got, expected);
}

#[tokio::test]
async fn kinds_and_queues_of_others_are_left_alone() {
    let (_queue, s) = Queue::with_session().await;
    let mine = s.enqueue("kind => 'a', queue => 'q'").await;
    for other in ["kind => 'b', queue => 'q'", "kind => 'a', queue => 'q2'", "kind => 'A', queue => 'q'", "kind => 'a'"]
    {
        s.enqueue(other).await;
    }
    let worker = s.worker_of(&["q", "q"], &["a", "c"], 60_000).await;
    assert_eq!(ids(&worker.claim(&s, 100).await), [mine]);
    let nothing = s.worker_of(&["q"], &[], 60_000).await;
    assert!(nothing.claim(&s, 100).await.is_empty());
    assert_eq!(
        s.count("posthouse.job where state = 'queued' and attempt = 0 and fence = 0 and worker is null").await,
        4
    );
    let all = s.worker_of(&["q", "q2", "default"], &["a", "b", "A"], 60_000).await;
    assert_eq!(all.claim(&s, 100).await.len(), 4);
}

#[tokio::test]
async fn a_claim_is_full_before_it_goes_on_to_the_next_priority() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["a", "b"]).await;
    worker.seq.set(2);
    // Tenant A has a second lane and B one, both awake and empty.
    for lane in ["kind => 'b', tenant => 'A'", "kind => 'a', tenant => 'B'"] {
        let id = s.enqueue(lane).await;
        s.get::<String>(&format!("select posthouse.cancel({id})")).await;
    }
    s.enqueue_bulk("a", "A", 150).await;
    s.enqueue("kind => 'a', tenant => 'A', priority => 9").await;
    assert_eq!(worker.claim(&s, 100).await.iter().filter(|job| job.priority == 0).count(), 100);
    // Now the older of A's lanes takes its whole share, and the younger one has the rest.
    s.enqueue_bulk("b", "A", 200).await;
    s.enqueue("kind => 'a', tenant => 'B'").await;
    assert_eq!(worker.claim(&s, 100).await.iter().filter(|job| job.priority == 0).count(), 100);
}

#[tokio::test]
async fn tenants_get_equal_shares_and_what_some_leave_goes_to_others() {
    let (_queue, s) = Queue::with_session().await;
    for (tenant, jobs) in [("a", 50), ("b", 50), ("c", 2), ("d", 50)] {
        s.enqueue_bulk("k1", tenant, jobs / 2).await;
        s.enqueue_bulk("k2", tenant, jobs / 2).await;
    }
    let worker = s.worker(&["k1", "k2"]).await;
    let jobs = worker.claim(&s, 4).await;
    assert_eq!(tenants(&jobs), BTreeMap::from([("a", 1), ("b", 1), ("c", 1), ("d", 1)]));
    // c has one left; the other three share the rest.
    let jobs = worker.claim(&s, 40).await;
    let shares = tenants(&jobs);
    assert_eq!((jobs.len(), shares["c"]), (40, 1));
    assert!([shares["a"], shares["b"], shares["d"]].iter().all(|n| (12..=14).contains(n)), "{shares:?}");
    // One at a time, tenants take turns.
    let mut turns = Vec::new();
    for seq in [11, 12, 13, 14, 15, 16] {
        worker.seq.set(seq);
        turns.push(worker.claim(&s, 1).await.remove(0).tenant);
    }
    assert_eq!(turns[..3], turns[3..]);
    assert_eq!(turns[..3].iter().collect::<BTreeSet<_>>().len(), 3);
    assert_eq!(worker.claim(&s, 1000).await.len(), 152 - 50);
}

#[tokio::test]
async fn a_flood_of_one_tenant_does_not_starve_a_trickle_of_another() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "flood", 100_000).await;
    let worker = s.worker(&["k"]).await;
    for round in 0..20 {
        let drop = s.enqueue("kind => 'k', tenant => 'trickle'").await;
        let mut claims = 0;
        loop {
            claims += 1;
            let jobs = worker.claim(&s, 10).await;
            finish(&s, &worker, &jobs).await;
            if ids(&jobs).contains(&drop) {
                break;
            }
            assert!(claims < 2, "round {round}: not served by the second claim");
        }
    }
    // A flood that puts itself before everybody holds others up for nine claims of ten, not for ever.
    s.run("update posthouse.lane set priority = -2147483648 where tenant = 'flood'").await;
    let drop = s.enqueue("kind => 'k', tenant => 'trickle'").await;
    s.run(
        "update posthouse.job set run_at = run_at - interval '1 hour' where id = (select max(id) from posthouse.job)",
    )
    .await;
    let mut served = false;
    for _ in 0..10 {
        let jobs = worker.claim(&s, 10).await;
        served |= ids(&jobs).contains(&drop);
    }
    assert!(served);
}

#[tokio::test]
async fn every_tenth_claim_serves_the_oldest_first() {
    let (_queue, s) = Queue::with_session().await;
    let old = s.enqueue("kind => 'k', tenant => 'poor', priority => 9").await;
    s.enqueue_bulk("k", "rich", 50).await;
    let worker = s.worker(&["k"]).await;
    for seq in 1..=9 {
        assert_ne!(ids(&worker.claim(&s, 1).await), [old], "claim {seq}");
    }
    assert_eq!(ids(&worker.claim(&s, 1).await), [old]);
    // It takes a tenth of the claim, and the rest comes by priority.
    let old: Vec<i64> = [
        s.enqueue("kind => 'k', tenant => 'poor', priority => 9").await,
        s.enqueue("kind => 'k', tenant => 'poor', priority => 9").await,
    ]
    .into();
    s.run(&format!("update posthouse.job set run_at = run_at - interval '1 hour' where id = any(array{old:?})")).await;
    worker.seq.set(20);
    let jobs = worker.claim(&s, 20).await;
    assert_eq!((jobs.len(), tenants(&jobs)["poor"]), (20, 2));
    assert_eq!(ids(&jobs[..2]), old);
}

#[tokio::test]
async fn the_oldest_is_found_behind_more_lanes_than_a_window() {
    let (_queue, s) = Queue::with_session().await;
    // 400 tenants that never run dry, and behind their lanes the one with the oldest job of all.
    s.run(
        "select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't' || n % 400, 'priority', 9))
           from generate_series(1, 8000) n))",
    )
    .await;
    let old = s.enqueue("kind => 'k', tenant => 'poor', priority => 9").await;
    s.run(&format!("update posthouse.job set run_at = run_at - interval '1 hour' where id = {old}")).await;
    s.enqueue_bulk("k", "rich", 2_000).await;
    let worker = s.worker(&["k"]).await;
    for _ in 0..60 {
        worker.seq.set((worker.seq.get() / 10 + 1) * 10);
        if ids(&worker.claim(&s, 1).await) == [old] {
            return;
        }
    }
    panic!("sixty claims that serve the oldest first did not find it");
}

#[tokio::test]
async fn more_tenants_than_a_window_of_lanes() {
    let (_queue, s) = Queue::with_session().await;
    s.run(
        "select posthouse.enqueue_many((select jsonb_agg(jsonb_build_object('kind', 'k', 'tenant', 't' || n % 1000)) from generate_series(1, 2000) n))",
    )
    .await;
    let worker = s.worker(&["k"]).await;
    let mut seen = BTreeMap::<String, usize>::new();
    for _ in 0..10 {
        for job in worker.claim(&s, 100).await {
            *seen.entry(job.tenant).or_default() += 1;
        }
    }
    // A thousand jobs, one of each tenant, but for those that the tenth claim served first.
    let twice = seen.values().filter(|n| **n > 1).count();
    assert!(seen.len() >= 990 && twice <= 10, "{} tenants, {twice} of them twice", seen.len());
    let mut left = 1000;
    while left > 0 {
        let jobs = worker.claim(&s, 300).await;
        assert_eq!(jobs.len(), left.min(300));
        left -= jobs.len();
    }
}

#[tokio::test]
async fn twin_lanes_are_one_line() {
    let (queue, s) = Queue::with_session().await;
    let other = queue.session().await;
    let first = s.enqueue("kind => 'k'").await;
    // A sleeping lane that an open transaction is waking up: the other enqueue makes a twin.
    s.run("update posthouse.lane set ready_at = 'infinity'").await;
    s.run("begin").await;
    let second = s.enqueue("kind => 'k'").await;
    let third = other.enqueue("kind => 'k'").await;
    s.run("commit").await;
    assert_eq!(s.count("posthouse.lane").await, 2);
    let worker = s.worker(&["k"]).await;
    assert_eq!(ids(&worker.claim(&s, 10).await), [first, second, third].to_vec());
    assert_eq!(s.rows("select * from posthouse.queue_health").await.len(), 1);
}

#[tokio::test]
async fn twin_lanes_do_not_pile_up() {
    let (queue, s) = Queue::with_session().await;
    let others = [queue.session().await, queue.session().await, queue.session().await];
    for _ in 0..10 {
        s.run("update posthouse.lane set ready_at = 'infinity'").await;
        s.run("begin").await;
        s.enqueue("kind => 'k'").await;
        for other in &others {
            other.run("begin").await;
            other.enqueue("kind => 'k'").await;
        }
        for other in &others {
            other.run("commit").await;
        }
        s.run("commit").await;
    }
    // As many as there ever were open transactions at once, not as many as there ever were wake-ups.
    assert_eq!(s.count("posthouse.lane").await, 4);
}

#[tokio::test]
async fn the_same_claim_again_answers_with_the_same_jobs() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 30).await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim_as(&s, 1, 10).await.unwrap();
    assert_eq!(worker.claim_as(&s, 1, 10).await.unwrap(), jobs);
    assert_eq!(worker.claim_as(&s, 1, 3).await.unwrap(), jobs);
    let next = worker.claim_as(&s, 2, 10).await.unwrap();
    assert!(ids(&next).iter().all(|id| !ids(&jobs).contains(id)));
    // What was settled or given back meanwhile is not in it any more.
    finish(&s, &worker, &jobs[..2]).await;
    s.settle(worker.id, &json!([{"id": jobs[2].id, "fence": 1, "outcome": "release"}])).await;
    assert_eq!(worker.claim_as(&s, 1, 10).await.unwrap(), jobs[3..]);
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 17);
    // Another worker's numbers are its own.
    let other = s.worker(&["k"]).await;
    assert_eq!(ids(&other.claim_as(&s, 1, 1).await.unwrap()), [jobs[2].id]);
    // One that found nothing may find something when asked again.
    let late = s.worker(&["late"]).await;
    assert!(late.claim_as(&s, 1, 1).await.unwrap().is_empty());
    let id = s.enqueue("kind => 'late'").await;
    assert_eq!(ids(&late.claim_as(&s, 1, 1).await.unwrap()), [id]);
}

#[tokio::test]
async fn a_worker_that_is_over_claims_nothing() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 30).await;
    let nobody = Worker { id: uuid::Uuid::new_v4(), seq: 1.into(), lane: 0.into() };
    let expired = s.worker(&["k"]).await;
    s.expire(expired.id).await;
    let dead = s.worker(&["k"]).await;
    s.expire(dead.id).await;
    s.rescue(dead.id).await;
    let retired = s.worker(&["k"]).await;
    s.run(&format!("select posthouse.retire_worker('{}')", retired.id)).await;
    for worker in [&nobody, &expired, &dead, &retired] {
        let refusal = worker.claim_as(&s, 1, 1).await.unwrap_err();
        assert_eq!(refusal.code, "PH005", "{}", refusal.message);
        assert_eq!(s.beat(worker.id, (0, 1), &[], false).await, None);
    }
    assert_eq!(s.count("posthouse.job where state = 'queued'").await, 30);
    let refusal = s.refused(&format!("select posthouse.register_worker('{}')", dead.id)).await;
    assert_eq!(refusal.code, "PH001", "{}", refusal.message);
    for (arguments, field) in [
        ("lease_ms => 499", "lease_ms"),
        ("lease_ms => 3600001", "lease_ms"),
        ("lease_ms => null", "lease_ms"),
        ("queues => '{}'", "queues"),
        ("queues => null", "queues"),
        ("queues => array['']", "queues"),
        ("queues => array[null]", "queues"),
        ("kinds => array[E'\\n']", "kinds"),
        ("kinds => null", "kinds"),
        // Whoever lists workers would stumble over them.
        ("queues => '{{a,b},{c,d}}'", "queues"),
        ("kinds => '{{a,b},{c,d}}'", "kinds"),
        ("slots => null", "slots"),
        ("worker => null", "worker"),
        ("info => '{\"pid\": \"x\"}'", "info"),
    ] {
        let worker = if arguments.starts_with("worker") { "" } else { "worker => gen_random_uuid(), " };
        let refusal = s.refused(&format!("select posthouse.register_worker({worker}{arguments})")).await;
        assert_eq!(refusal.code, "PH001", "{arguments}: {}", refusal.message);
        assert!(refusal.message.starts_with(&format!("{field}:")), "{arguments}: {}", refusal.message);
    }
    // What is for people only is cut to what they can read.
    s.run("select posthouse.register_worker(gen_random_uuid(), info => jsonb_build_object('host', repeat('h', 9999), 'version', repeat('v', 9999)))").await;
    assert_eq!(s.get::<i32>("select max(length(host || version)) from posthouse.worker").await, 300);
    let worker = s.worker(&["k"]).await;
    for max in ["0", "-1", "10001", "null"] {
        let refusal = s.refused(&format!("select * from posthouse.claim('{}', 1, {max})", worker.id)).await;
        assert_eq!((&*refusal.code, refusal.message.starts_with("max_jobs:")), ("PH001", true), "{}", refusal.message);
    }
    let refusal = s.refused(&format!("select * from posthouse.claim('{}', null, 1)", worker.id)).await;
    assert_eq!((&*refusal.code, refusal.message.starts_with("seq:")), ("PH001", true), "{}", refusal.message);
}

#[tokio::test]
async fn what_an_open_claim_holds_is_passed_over_and_comes_first_once_that_is_rolled_back() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 20).await;
    let (first, second) = (s.worker(&["k"]).await, s.worker(&["k"]).await);
    s.run("begin").await;
    let mut held = ids(&first.claim(&s, 8).await);
    held.sort_unstable();
    let other = queue.session().await;
    let beside = ids(&second.claim(&other, 4).await);
    assert_eq!((held.len(), beside.len()), (8, 4));
    assert!(beside.iter().all(|id| !held.contains(id)), "{beside:?} of {held:?}");
    s.run("rollback").await;
    let mut next = second.claim(&other, 8).await;
    next.sort_unstable_by_key(|job| job.id);
    assert_eq!(ids(&next), held);
    assert!(next.iter().all(|job| (job.attempt, job.fence) == (1, 1)), "{next:?}");
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 12);
}

#[tokio::test]
async fn a_claim_that_was_given_up_takes_nothing_when_it_arrives_late() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 5).await;
    let worker = s.worker(&["k"]).await;
    worker.claim(&s, 1).await;
    // Claim 2 is under way when the worker gives it up and says so.
    let held = [(1, 1)];
    s.beat(worker.id, (2, 1), &held, false).await.unwrap();
    match worker.claim_as(&s, 2, 1).await {
        Ok(jobs) => assert!(jobs.is_empty(), "{jobs:?}"),
        Err(refusal) => assert_eq!(refusal.code, "PH001", "{}", refusal.message),
    }
    assert_eq!(s.count("posthouse.job where state = 'running'").await, 1);
    assert_eq!(worker.claim_as(&s, 3, 1).await.unwrap().len(), 1);
}

#[tokio::test]
async fn only_under_read_committed() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 5).await;
    let worker = s.worker(&["k"]).await;
    let id = worker.id;
    for level in ["repeatable read", "serializable"] {
        for call in [
            format!("claim('{id}', 1, 1)"),
            format!("settle('{id}', '[]')"),
            format!("heartbeat('{id}')"),
            "rescue('[]')".to_owned(),
            format!("retire_worker('{id}')"),
            "tidy()".to_owned(),
            format!("release('{id}', '{{}}', '{{}}')"),
        ] {
            s.run(&format!("begin isolation level {level}")).await;
            let refusal = s.refused(&format!("select * from posthouse.{call}")).await;
            assert_eq!(refusal.code, "PH002", "{call}: {}", refusal.message);
            s.run("rollback").await;
        }
    }
    // Our own client opens the right transaction whatever the database's default is.
    let database: String = s.get("select current_database()").await;
    s.run(&format!("alter database {database} set default_transaction_isolation = 'serializable'")).await;
    let store = posthouse::store::Database::new(_queue.url()).unwrap().store("test");
    assert_eq!(store.claim(id, 1, 5, 0).await.unwrap().len(), 5);
    assert!(store.heartbeat(id, &posthouse::store::Beat::default()).await.unwrap().is_some());
}

#[tokio::test]
async fn a_claim_that_sits_in_an_open_transaction_is_ended_by_the_server() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 5).await;
    let worker = s.worker(&["k"]).await;
    let before: String = s.get("show idle_in_transaction_session_timeout").await;
    s.run("begin").await;
    worker.claim(&s, 1).await;
    assert_eq!(s.get::<String>("show idle_in_transaction_session_timeout").await, "10s");
    s.run("commit").await;
    assert_eq!(s.get::<String>("show idle_in_transaction_session_timeout").await, before);
}

#[tokio::test]
async fn the_limit_holds_whatever_the_planner_does() {
    let (queue, s) = Queue::with_session().await;
    let database: String = s.get("select current_database()").await;
    for table in ["job", "lane", "claimed", "worker", "lane_floor"] {
        s.run(&format!("alter table posthouse.{table} set (autovacuum_enabled = off)")).await;
    }
    let mut sessions = Vec::new();
    for settings in [
        // What made others take more than they asked for: a nested loop around the locking subquery.
        "enable_hashjoin = off; set enable_mergejoin = off; set enable_material = off; set plan_cache_mode = force_generic_plan",
        "enable_hashjoin = off; set enable_mergejoin = off; set enable_material = off; set plan_cache_mode = force_custom_plan",
        "enable_nestloop = off",
        "enable_indexscan = off; set enable_indexonlyscan = off; set enable_sort = off",
        "enable_seqscan = off; set enable_bitmapscan = off; set enable_memoize = off",
        "enable_hashagg = off; set enable_material = off; set join_collapse_limit = 1",
        "plan_cache_mode = force_generic_plan; set enable_tidscan = off",
        "work_mem = '64kB'; set enable_mergejoin = off; set enable_hashjoin = off",
    ] {
        let session = queue.session().await;
        // memoize is not in every version.
        session.run(&format!("set {}", settings)).await;
        sessions.push(session);
    }
    // What it is about: with the first of these, a claim as it stands in many a tutorial takes everything.
    s.enqueue_bulk("k1", "a", 1_000).await;
    sessions[0].run("set enable_hashagg = off; set enable_sort = off; begin").await;
    let naive = "with taken as (update posthouse.job set state = 'running' where id in (
        select id from posthouse.job where state = 'queued' limit 10 for update skip locked) returning 1) select count(*) from taken";
    assert!(sessions[0].get::<i64>(naive).await > 10);
    sessions[0].run("rollback").await;
    for limit in [1, 10] {
        s.run("truncate posthouse.job, posthouse.claimed").await;
        for tenant in ["a", "b", "c"] {
            s.enqueue_bulk("k1", tenant, 300).await;
            s.enqueue_bulk("k2", tenant, 34 * i64::from(limit)).await;
        }
        let claims = sessions.iter().map(|session| async {
            let worker = s.worker(&["k1", "k2"]).await;
            let mut taken = 0;
            for _ in 0..200 {
                let jobs = worker.claim(session, limit).await;
                assert!(jobs.len() <= limit as usize, "{} jobs for a limit of {limit}", jobs.len());
                taken += jobs.len() as i64;
            }
            let running = s.count(&format!("posthouse.job where worker = '{}'", worker.id)).await;
            assert_eq!(running, taken, "rows changed and rows answered");
            let over = s.count(&format!("posthouse.claimed where cardinality(job_ids) > {limit}")).await;
            assert_eq!(over, 0);
            taken
        });
        let taken: i64 = join_all(claims).await.iter().sum();
        let jobs = 3 * (300 + 34 * i64::from(limit));
        assert_eq!(taken, jobs.min(1600 * i64::from(limit)));
    }
    let analysed = s
        .count(&format!(
            "pg_stat_user_tables where schemaname = 'posthouse' and last_analyze is not null and '{database}' <> ''"
        ))
        .await;
    assert_eq!(analysed, 0);
}

#[tokio::test]
async fn eight_connections_run_twenty_thousand_jobs_once_each() {
    let (queue, s) = Queue::with_session().await;
    for tenant in ["a", "b", "c", "d"] {
        s.enqueue_bulk("k1", tenant, 3_000).await;
        s.enqueue_bulk("k2", tenant, 2_000).await;
    }
    let mut sessions = Vec::new();
    for _ in 0..8 {
        sessions.push(queue.session().await);
    }
    let (queue, all) = (&queue, &s);
    let work = sessions.iter().enumerate().map(|(n, session)| async move {
        let worker = session.worker(&["k1", "k2"]).await;
        let settler = queue.session().await;
        let mut ran = Vec::new();
        loop {
            let max = [1, 7, 50, 200][(n + ran.len()) % 4];
            let jobs = worker.claim(session, max).await;
            if jobs.is_empty() && all.count("posthouse.job where state = 'queued'").await == 0 {
                return ran;
            }
            finish(&settler, &worker, &jobs).await;
            ran.extend(ids(&jobs));
        }
    });
    let ran = join_all(work).await;
    assert!(ran.iter().all(|jobs| !jobs.is_empty()));
    let once: BTreeSet<i64> = ran.iter().flatten().copied().collect();
    assert_eq!((ran.iter().map(Vec::len).sum::<usize>(), once.len()), (20_000, 20_000));
    assert_eq!(s.count("posthouse.archive where state = 'done' and attempt = 1 and fence = 1").await, 20_000);
    assert_eq!(s.count("posthouse.job").await, 0);
    let counted: (i64, i64) = {
        let row = &s
            .rows("select sum(done)::bigint, sum(due + later + running + failed)::bigint from posthouse.queue_health")
            .await[0];
        (row.get(0), row.get(1))
    };
    assert_eq!(counted, (20_000, 0));
}

#[tokio::test]
async fn says_when_to_look_again() {
    let (_queue, s) = Queue::with_session().await;
    let worker = s.worker(&["k"]).await;
    let next = async || s.get::<Option<i64>>(&format!("select posthouse.next_due('{}')", worker.id)).await;
    let empty = async || s.get::<bool>(&format!("select posthouse.is_empty('{}')", worker.id)).await;
    assert_eq!((next().await, empty().await), (None, true));
    s.enqueue("kind => 'other'").await;
    s.enqueue("kind => 'k', queue => 'other'").await;
    assert_eq!((next().await, empty().await), (None, true));
    s.enqueue("kind => 'k', delay => '1 hour'").await;
    let later = next().await.unwrap();
    assert!((3_590_000..=3_600_000).contains(&later), "{later}");
    s.enqueue("kind => 'k', delay => '10 minutes', tenant => 't'").await;
    let later = next().await.unwrap();
    assert!((590_000..=600_000).contains(&later), "{later}");
    s.enqueue("kind => 'k'").await;
    assert_eq!((next().await, empty().await), (Some(0), false));
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(jobs.len(), 1);
    assert!(next().await.unwrap() > 500_000);
    // A lane that sleeps until then says the same.
    s.run("update posthouse.lane set awake_until = '-infinity'").await;
    assert!(worker.claim(&s, 10).await.is_empty());
    assert!((500_000..=600_000).contains(&next().await.unwrap()));
    s.run("update posthouse.job set run_at = clock_timestamp() + interval '1 second' where state = 'queued'; update posthouse.lane set ready_at = clock_timestamp() + interval '1 second'").await;
    wait_until(SOON, "the job is due", async || next().await == Some(0)).await;
    s.run("delete from posthouse.job where state = 'queued'").await;
    assert_eq!((next().await, empty().await), (None, false));
    finish(&s, &worker, &jobs).await;
    assert!(empty().await);
}
