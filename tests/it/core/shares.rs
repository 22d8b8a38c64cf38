//! Fairness between tenants: by weights, by tokens, whatever the backlog and the size of a batch.

use std::collections::BTreeMap;

use serde_json::json;

use super::support::{Claimed, Queue, Session, Worker};

/// Jobs of each tenant.
fn by_tenant(jobs: &[Claimed]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for job in jobs {
        *counts.entry(job.tenant.clone()).or_default() += 1;
    }
    counts
}

/// Claim so many times, settle at once, and count.
async fn claim_often(s: &Session, worker: &Worker, claims: usize, batch: i32) -> BTreeMap<String, usize> {
    let mut all = Vec::new();
    for _ in 0..claims {
        let jobs = worker.claim(s, batch).await;
        s.done(worker.id, &jobs).await;
        all.extend(jobs);
    }
    by_tenant(&all)
}

/// The share of a tenant lies between these.
#[track_caller]
fn assert_share(counts: &BTreeMap<String, usize>, tenant: &str, from: f64, to: f64) {
    let total: usize = counts.values().sum();
    let share = f64::from(u32::try_from(counts[tenant]).unwrap()) / f64::from(u32::try_from(total).unwrap());
    assert!((from..=to).contains(&share), "{tenant} got {share:.3}: {counts:?}");
}

#[tokio::test]
async fn a_tenant_with_three_times_the_weight_gets_three_times_the_jobs() {
    for batch in [1, 2, 5, 100] {
        let (_queue, s, worker) = Queue::with_worker().await;
        for tenant in ["heavy", "light"] {
            s.enqueue_with(3_000, &format!(r#"{{"tenant": "{tenant}"}}"#)).await;
        }
        s.run("select posthouse.set_tenant('heavy', 3)").await;
        let claims = if batch == 100 { 20 } else { 400 };
        let counts = claim_often(&s, &worker, claims, batch).await;
        let slack = if batch == 100 { 0.02 } else { 0.08 };
        assert_share(&counts, "heavy", 0.75 - slack, 0.75 + slack);
        // As before.
        s.run("select posthouse.set_tenant('heavy', 1)").await;
        let counts = claim_often(&s, &worker, 100, batch.min(20)).await;
        assert_share(&counts, "heavy", 0.44, 0.56);
    }
}

#[tokio::test]
async fn weights_count_for_tenants_with_many_lanes_and_what_they_leave_goes_to_others() {
    let (_queue, s, _worker) = Queue::with_worker().await;
    let worker = s.worker(&["a", "b", "c"]).await;
    for kind in ["a", "b", "c"] {
        s.enqueue_bulk(kind, "heavy", 400).await;
        s.enqueue_bulk(kind, "light", 400).await;
    }
    s.run("select posthouse.set_tenant('heavy', 3)").await;
    for (claims, batch) in [(300, 1), (10, 40)] {
        let counts = claim_often(&s, &worker, claims, batch).await;
        assert_share(&counts, "heavy", 0.66, 0.84);
    }
    // A third one that has little to do leaves its share.
    s.enqueue_bulk("a", "rare", 5).await;
    s.run("select posthouse.set_tenant('rare', 100)").await;
    let jobs = worker.claim(&s, 100).await;
    assert_eq!((jobs.len(), by_tenant(&jobs)["rare"]), (100, 5));
    for wrong in ["0", "101", "null", "'NaN'"] {
        assert_eq!(s.refused(&format!("select posthouse.set_tenant('rare', {wrong})")).await.code, "PH001");
    }
}

#[tokio::test]
async fn a_queue_that_is_fair_by_tokens_gives_large_jobs_their_share_of_tokens() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.run("select posthouse.set_fair_by('default', 'tokens')").await;
    for tenant in ["books", "pings"] {
        s.enqueue_with(4_000, &format!(r#"{{"tenant": "{tenant}"}}"#)).await;
    }
    let mut tokens = BTreeMap::<String, u64>::new();
    for round in 0..34 {
        let jobs = worker.claim(&s, 100).await;
        assert_eq!(jobs.len(), 100, "round {round}");
        let outcomes: Vec<_> = jobs
            .iter()
            .map(|job| {
                let used = if job.tenant == "books" { 2_000 } else { 100 };
                if round >= 4 {
                    *tokens.entry(job.tenant.clone()).or_default() += used;
                }
                json!({"id": job.id, "fence": job.fence, "outcome": "done", "usage": {"input_tokens": used, "output_tokens": 0}})
            })
            .collect();
        s.settle(worker.id, &json!(outcomes)).await;
        if round < 4 {
            s.run("select posthouse.fold_usage(); select posthouse.make_shares()").await;
        }
    }
    let ratio = tokens["books"] as f64 / tokens["pings"] as f64;
    assert!((0.7..1.4).contains(&ratio), "{tokens:?}");
    // By jobs again.
    s.run("select posthouse.set_fair_by('default', 'jobs')").await;
    s.enqueue_with(1_000, r#"{"tenant": "books"}"#).await;
    s.enqueue_with(1_000, r#"{"tenant": "pings"}"#).await;
    assert_share(&claim_often(&s, &worker, 5, 100).await, "books", 0.45, 0.55);
    for wrong in ["'money'", "null", "''"] {
        assert_eq!(s.refused(&format!("select posthouse.set_fair_by('default', {wrong})")).await.code, "PH001");
    }
}

#[tokio::test]
async fn a_backlog_of_one_tenant_does_not_delay_another() {
    let (_queue, s, worker) = Queue::with_worker().await;
    s.enqueue_with(100_000, r#"{"tenant": "a"}"#).await;
    for batch in [1, 10, 100] {
        for _ in 0..10 {
            let id = s.enqueue("kind => 'k', tenant => 'b'").await;
            let mut claims = 0;
            loop {
                claims += 1;
                let jobs = worker.claim(&s, batch).await;
                s.done(worker.id, &jobs).await;
                if jobs.iter().any(|job| job.id == id) {
                    break;
                }
                assert!(claims < 3, "batch of {batch}: not among the first {claims} claims");
            }
        }
    }
}
