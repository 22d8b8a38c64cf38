//! Requests and tokens per minute, by a clock that is made up: whatever claims, settles and refunds come, no rolling minute
//! holds more than the limit, and with enough to do the average is close to it.

use fastrand::Rng;
use serde_json::json;

use super::gates_support::Clock;
use super::support::{Claimed, Queue, Session, Worker};

const MINUTE: i64 = 60_000_000;

/// A request that was let through, and what it used in the end.
#[derive(Debug, Clone, Copy)]
struct Sent {
    at: i64,
    tokens: i64,
}

/// How a worker behaves.
struct Manner {
    minutes: i64,
    /// Of 100 jobs so many are given back without a request.
    released: u32,
    /// What the jobs use, in percent of what was reserved.
    used: std::ops::RangeInclusive<i64>,
    /// Whether outcomes say what was used.
    tells: bool,
}

/// The most that any window of this length holds, its right end excluded.
fn worst(sent: &[Sent], window: i64, what: impl Fn(&Sent) -> i64) -> i64 {
    let (mut sum, mut most, mut first) = (0, 0, 0);
    for one in sent {
        sum += what(one);
        while sent[first].at <= one.at - window {
            sum -= what(&sent[first]);
            first += 1;
        }
        most = most.max(sum);
    }
    most
}

/// What a minute held on average, from the first minute to the end.
fn average(sent: &[Sent], from: i64, until: i64, what: impl Fn(&Sent) -> i64) -> f64 {
    let all: i64 = sent.iter().filter(|one| one.at >= from + MINUTE && one.at < until).map(what).sum();
    all as f64 * MINUTE as f64 / (until - from - MINUTE) as f64
}

/// Work for so long: claims of any size whenever there may be something, outcomes at any time later. All that was sent.
async fn work(clock: &mut Clock<'_>, s: &Session, worker: &Worker, rng: &mut Rng, manner: &Manner) -> Vec<Sent> {
    let mut sent: Vec<Sent> = Vec::new();
    let mut under_way: Vec<(i64, Claimed, i64)> = Vec::new();
    let end = clock.now + manner.minutes * MINUTE;
    while clock.now < end {
        let jobs = worker.claim(s, rng.i32(1..20)).await;
        for job in jobs {
            let reserved: i32 = s.get(&format!("select reserved from posthouse.job where id = {}", job.id)).await;
            if rng.u32(0..100) >= manner.released {
                let used = i64::from(reserved) * rng.i64(manner.used.clone()) / 100;
                sent.push(Sent { at: clock.now, tokens: used });
                under_way.push((clock.now + rng.i64(0..15_000_000), job, used));
            } else {
                under_way.push((clock.now + rng.i64(0..3_000_000), job, -1));
            }
        }
        let next = s.next_due(worker.id).await;
        // As workers do: no longer than a second, a little late, and sooner when something ends.
        let mut until = clock.now + next.filter(|ms| *ms >= 0).map_or(1_000_000, |ms| (ms * 1_000).min(1_000_000));
        until += rng.i64(1_000..20_000);
        while let Some(at) = (0..under_way.len()).min_by_key(|n| under_way[*n].0).filter(|n| under_way[*n].0 < until) {
            let (due, job, used) = under_way.swap_remove(at);
            clock.pass_us((due - clock.now).max(0)).await;
            let outcome = match used {
                -1 => json!({"outcome": "release", "usage": {"requests": 0}}),
                _ if manner.tells => {
                    json!({"outcome": "done", "usage": {"input_tokens": used / 2, "output_tokens": used - used / 2}})
                }
                _ => json!({"outcome": "done"}),
            };
            s.end(worker.id, &[job], &outcome).await;
        }
        clock.pass_us((until - clock.now).max(0)).await;
    }
    sent
}

/// Two sizes of limits, by how a minute went: a beat, since leases are no longer than an hour.
async fn beat(s: &Session, worker: &Worker) {
    s.run(&format!("select posthouse.heartbeat('{}')", worker.id)).await;
}

#[tokio::test]
async fn requests_per_minute_hold_in_every_rolling_minute() {
    let (_queue, s) = Queue::with_session().await;
    let mut clock = Clock::new(&s).await;
    let mut rng = Rng::with_seed(7);
    for (limit, minutes) in [(1, 12), (7, 8), (60, 5), (600, 3)] {
        for released in [0, 30] {
            let gate = format!("g{limit}x{released}");
            s.set_gate(&format!("'{gate}', requests_per_minute => {limit}")).await;
            let worker = s.worker_of(&[&gate], &["k"], 3_600_000).await;
            s.enqueue_with(limit * (minutes + 2), &format!(r#"{{"queue": "{gate}", "gates": ["{gate}"]}}"#)).await;
            let from = clock.now;
            let manner = Manner { minutes, released, used: 100..=100, tells: false };
            let sent = work(&mut clock, &s, &worker, &mut rng, &manner).await;
            beat(&s, &worker).await;
            let most = worst(&sent, MINUTE + 1_000_000, |_| 1);
            let average = average(&sent, from, clock.now, |_| 1);
            println!(
                "figure: {limit} requests a minute, {released} % given back: worst 61 s {most}, average {average:.2}"
            );
            assert!(most <= limit, "{gate}: {most} in 61 seconds");
            // Whoever gives back late has kept a place meanwhile.
            let least = if released == 0 { 0.95 } else { 0.9 };
            assert!(average >= least * limit as f64, "{gate}: {average} a minute on average");
        }
    }
}

#[tokio::test]
async fn tokens_per_minute_hold_in_every_rolling_minute() {
    let (_queue, s) = Queue::with_session().await;
    let mut clock = Clock::new(&s).await;
    let mut rng = Rng::with_seed(8);
    // What the jobs reserve, what they use of it in percent, whether they say so, and how many are given back.
    for (name, limit, sizes, used, tells, released) in [
        ("equal", 1_000, 400..=400, 100..=100, false, 0),
        ("equal, given back", 1_000, 400..=400, 100..=100, false, 30),
        ("as large as the limit", 1_000, 1_000..=1_000, 100..=100, true, 0),
        ("small", 1_000, 1..=30, 100..=100, true, 0),
        ("of all sizes, less used", 10_000, 1..=5_000, 10..=100, true, 10),
        ("of all sizes, more used", 10_000, 1..=3_000, 80..=150, true, 0),
    ] {
        let gate = name.replace([' ', ','], "-");
        s.set_gate(&format!("'{gate}', tokens_per_minute => {limit}")).await;
        let worker = s.worker_of(&[&gate], &["k"], 3_600_000).await;
        let minutes = 8;
        let mut reserved = 0;
        let mut jobs = Vec::new();
        while reserved < limit * 40 {
            let tokens = rng.i64(sizes.clone());
            reserved += tokens;
            jobs.push(json!({"kind": "k", "queue": gate, "gates": [gate], "tokens": tokens}));
        }
        s.run(&format!("select posthouse.enqueue_many('{}')", json!(jobs))).await;
        let from = clock.now;
        let manner = Manner { minutes, released, used: used.clone(), tells };
        let sent = work(&mut clock, &s, &worker, &mut rng, &manner).await;
        beat(&s, &worker).await;
        let largest = sizes.end() * used.end().max(&100) / 100;
        let most = worst(&sent, MINUTE, |one| one.tokens);
        let average = average(&sent, from, clock.now, |one| one.tokens);
        println!(
            "figure: {limit} tokens a minute, {name}: worst minute {most}, average {average:.1}, largest {largest}"
        );
        // More than was reserved is known only when it was used: those under way at once can be as much above it.
        let above = if *used.end() > 100 { 3 * largest } else { largest };
        assert!(most <= limit + above, "{name}: {most} in a minute");
        assert!(average >= 0.95 * limit as f64, "{name}: {average} a minute on average");
        assert!(average <= 1.05 * limit as f64, "{name}: {average} a minute on average");
    }
}

#[tokio::test]
async fn large_jobs_are_not_starved_by_small_ones() {
    let (_queue, s) = Queue::with_session().await;
    let mut clock = Clock::new(&s).await;
    s.set_gate("'model:m', tokens_per_minute => 1000").await;
    s.enqueue_with(3_000, r#"{"tenant": "small", "gates": ["model:m"], "tokens": 10}"#).await;
    s.enqueue_with(20, r#"{"tenant": "large", "gates": ["model:m"], "tokens": 900}"#).await;
    let worker = s.worker(&["k"]).await;
    let mut large = Vec::new();
    let from = clock.now;
    while clock.now < from + 10 * MINUTE {
        let jobs = worker.claim(&s, 10).await;
        large.extend(jobs.iter().filter(|job| job.tenant == "large").map(|_| clock.now - from));
        s.done(worker.id, &jobs).await;
        let wait = s.next_due(worker.id).await.unwrap_or(1_000).clamp(1, 1_000);
        clock.pass(wait).await;
    }
    assert!(large.len() >= 5, "{large:?}");
    let mut before = 0;
    for at in large {
        assert!(at - before <= 2 * MINUTE, "a large one waited for {} s", (at - before) / 1_000_000);
        before = at;
    }
}

#[tokio::test]
async fn jobs_that_are_too_large_never_wait() {
    let (_queue, s) = Queue::with_session().await;
    let mut clock = Clock::new(&s).await;
    s.set_gate("'crm', tokens_per_minute => 1000").await;
    s.set_gate("'tenant:*', tokens_per_minute => 5000").await;
    for (arguments, gate) in [
        ("kind => 'k', gates => array['crm'], tokens => 1001", "crm"),
        ("kind => 'k', tenant => 'a', tokens => 5001", "tenant:*"),
    ] {
        let refusal = s.refused(&format!("select * from posthouse.enqueue({arguments})")).await;
        assert_eq!(refusal.code, "PH001");
        assert!(refusal.message.starts_with("tokens:") && refusal.message.contains(gate), "{}", refusal.message);
    }
    let many = r#"select posthouse.enqueue_many('[{"kind": "k"}, {"kind": "k", "gates": ["crm"], "tokens": 1001}]')"#;
    assert_eq!(s.refused(many).await.code, "PH001");
    assert_eq!(s.count("posthouse.job").await, 0);
    // Estimated: a quarter of the bytes and the longest answer.
    let fits = s.enqueue(r#"kind => 'k', gates => array['crm'], payload => '{"max_tokens": 900}'"#).await;
    let answer = s.enqueue(r#"kind => 'k', gates => array['crm'], payload => '{"max_tokens": 1200}'"#).await;
    let long = format!(
        "kind => 'k', gates => array['crm'], payload => '{{\"max_tokens\": 10, \"text\": \"{}\"}}'",
        "x".repeat(4_000)
    );
    let text = s.enqueue(&long).await;
    // The limit was lowered after its enqueue.
    let said = s.enqueue("kind => 'k', tenant => 'a', tokens => 4000").await;
    s.set_gate("'tenant:*', tokens_per_minute => 3000").await;
    let worker = s.worker(&["k"]).await;
    let jobs = worker.claim(&s, 10).await;
    assert_eq!(jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [fits]);
    for id in [answer, text, said] {
        let job = s.job(id).await;
        assert_eq!((job["state"].as_str(), job["reason"].as_str()), (Some("failed"), Some("too_large")), "{job}");
    }
    // Nobody else is charged for them, and the next one goes on.
    assert!(s.of_gate("crm", "tokens_last_minute").await <= 1_000);
    s.set_gate("'crm', tokens_per_minute => 100000").await;
    s.run("select posthouse.remove_gate('tenant:*')").await;
    clock.pass(60_000).await;
    let next = s.enqueue("kind => 'k', gates => array['crm'], tokens => 50000").await;
    assert_eq!(worker.claim(&s, 10).await.iter().map(|job| job.id).collect::<Vec<_>>(), [next]);
}

#[tokio::test]
async fn a_rate_that_is_raised_or_lowered_holds_at_once() {
    let (_queue, s) = Queue::with_session().await;
    let mut clock = Clock::new(&s).await;
    s.enqueue_with(500, r#"{"gates": ["crm"], "tokens": 100}"#).await;
    let worker = s.worker(&["k"]).await;
    for limits in ["requests_per_minute", "tokens_per_minute"] {
        let (few, many) = if limits.starts_with('r') { (1, 600) } else { (100, 60_000) };
        s.set_gate(&format!("'crm', {limits} => {few}")).await;
        assert_eq!(worker.claim(&s, 50).await.len(), 1);
        s.without_naps().await;
        assert!(worker.claim(&s, 50).await.is_empty());
        s.set_gate(&format!("'crm', {limits} => {many}")).await;
        assert_eq!(worker.claim(&s, 5).await.len(), 5, "{limits}");
        s.set_gate(&format!("'crm', {limits} => {few}")).await;
        for _ in 0..6 {
            assert!(worker.claim(&s, 50).await.is_empty(), "{limits}: a minute has had its share");
            clock.pass(10_000).await;
        }
        clock.pass(10_000).await;
        assert_eq!(worker.claim(&s, 50).await.len(), 1, "{limits}");
        clock.pass(100_000).await;
    }
}
