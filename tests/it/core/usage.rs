//! Usage: every attempt's is added up, exactly, once, whatever became of it and whatever it says.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use posthouse::Posthouse;
use posthouse::store::{UsageBy, UsageFilter, UsageReport};
use serde_json::{Value, json};

use super::support::{Claimed, Queue, Session, Worker};

/// A worker of kind `k` in a queue, and as many claimed jobs of a tenant.
async fn claimed(s: &Session, queue: &str, tenant: &str, jobs: i32) -> (Worker, Vec<Claimed>) {
    for _ in 0..jobs {
        s.enqueue(&format!("kind => 'k', queue => '{queue}', tenant => '{tenant}'")).await;
    }
    let worker = s.worker_of(&[queue], &["k"], 3_600_000).await;
    let taken = worker.claim(s, jobs).await;
    assert_eq!(taken.len(), usize::try_from(jobs).unwrap());
    (worker, taken)
}

fn outcome(job: &Claimed, outcome: &str, usage: Value) -> Value {
    json!({"id": job.id, "fence": job.fence, "outcome": outcome, "delay_ms": 0, "error": "x", "usage": usage})
}

/// All usage together, as the view adds it up: attempts, requests, input, output, cached, cost, unpriced.
async fn total(s: &Session) -> String {
    s.get(
        "select format('%s attempts, %s requests, %s in, %s out, %s cached, %s dollars, %s unpriced', sum(attempts), sum(requests),
           sum(input_tokens), sum(output_tokens), sum(cached_tokens), coalesce(trim_scale(sum(cost_usd))::text, 'unknown'), sum(unpriced))
         from posthouse.usage_by_day",
    )
    .await
}

async fn report(queue: &Queue, filter: UsageFilter) -> UsageReport {
    Posthouse::connect(queue.url()).await.unwrap().usage(&filter).await.unwrap()
}

#[tokio::test]
async fn every_attempt_counts_once_whatever_became_of_it() {
    let (_queue, s) = Queue::with_session().await;
    let (worker, jobs) = claimed(&s, "default", "t", 8).await;
    let all = ["done", "retry", "snooze", "fail", "cancelled", "release", "explode", "done"];
    // Each counts for a binary digit of its own.
    let used = |n: usize| json!({"input_tokens": 1 << n, "output_tokens": 1000 << n, "cost_usd": format!("0.{:08}", 1 << n), "model": "m"});
    let outcomes = |fence: i64| {
        let outcomes = jobs.iter().zip(all).enumerate();
        Value::Array(
            outcomes.map(|(n, (job, o))| outcome(&Claimed { fence, ..job.clone() }, o, used(n))).collect::<Vec<_>>(),
        )
    };
    // Not those of strangers, nor of other attempts.
    let stranger = s.worker(&["k"]).await;
    s.settle(stranger.id, &outcomes(1)).await;
    s.settle(worker.id, &outcomes(2)).await;
    assert_eq!(s.count("posthouse.usage_by_day").await, 0);
    let verdicts = s.settle(worker.id, &outcomes(1)).await;
    assert!(verdicts.iter().all(|verdict| verdict.1 == "applied"), "{verdicts:?}");
    let once = "8 attempts, 8 requests, 255 in, 255000 out, 0 cached, 0.00000255 dollars, 0 unpriced";
    assert_eq!(total(&s).await, once);
    // The answer got lost, and it is sent again, by itself and with others that are not applied.
    for _ in 0..2 {
        let verdicts = s.settle(worker.id, &outcomes(1)).await;
        assert!(verdicts.iter().all(|verdict| verdict.1 == "already"), "{verdicts:?}");
    }
    assert_eq!(total(&s).await, once);
    // The next attempts of those that went back count by themselves.
    let again = worker.claim(&s, 10).await;
    assert_eq!(again.len(), 3);
    let outcomes: Vec<_> = again.iter().map(|job| outcome(job, "done", used(10))).collect();
    s.settle(worker.id, &json!(outcomes)).await;
    let twice = "11 attempts, 11 requests, 3327 in, 3327000 out, 0 cached, 0.00003327 dollars, 0 unpriced";
    assert_eq!(total(&s).await, twice);
    // What is added up stays as it is.
    assert!(s.get::<i64>("select posthouse.fold_usage()").await > 1);
    assert_eq!((total(&s).await.as_str(), s.count("posthouse.usage").await), (twice, 0));
    assert_eq!(s.get::<i64>("select posthouse.fold_usage()").await, 0);
}

#[tokio::test]
async fn a_job_that_was_asked_to_cancel_counts_too() {
    let (_queue, s) = Queue::with_session().await;
    let (worker, jobs) = claimed(&s, "default", "t", 3).await;
    for job in &jobs {
        s.run(&format!("select posthouse.cancel({})", job.id)).await;
    }
    let outcomes: Vec<_> = ["retry", "snooze", "release"]
        .iter()
        .zip(&jobs)
        .map(|(o, job)| outcome(job, o, json!({"input_tokens": 5, "requests": 2})))
        .collect();
    s.settle(worker.id, &json!(outcomes)).await;
    assert_eq!(s.count("posthouse.archive where state = 'cancelled'").await, 3);
    assert_eq!(total(&s).await, "3 attempts, 6 requests, 15 in, 0 out, 0 cached, unknown dollars, 3 unpriced");
}

#[tokio::test]
async fn who_asked_nobody_or_was_refused_is_not_unpriced() {
    let (_queue, s) = Queue::with_session().await;
    let (worker, jobs) = claimed(&s, "default", "t", 8).await;
    let used = [
        // Turned away at a closed gate: nothing to note, in a batch with others and alone.
        json!({"requests": 0, "input_tokens": null, "status": null}),
        json!({"requests": 0}),
        // Refused.
        json!({"requests": 1, "status": 429}),
        json!({"requests": 2, "status": 500, "input_tokens": null}),
        // Refused, and all the same there was something to be paid.
        json!({"requests": 1, "status": 400, "input_tokens": 7}),
        // Nobody knows: cut off, or a status that is none.
        json!({"requests": 1, "status": 200}),
        json!({"requests": 1, "status": "429"}),
        json!({"requests": 0, "cost_usd": "0.5"}),
    ];
    let outcomes: Vec<_> = jobs.iter().zip(&used).map(|(job, used)| outcome(job, "done", used.clone())).collect();
    s.settle(worker.id, &json!(outcomes[..1])).await;
    assert_eq!(s.count("posthouse.usage").await, 0);
    s.settle(worker.id, &json!(outcomes[1..])).await;
    assert_eq!(total(&s).await, "6 attempts, 6 requests, 7 in, 0 out, 0 cached, 0.5 dollars, 3 unpriced");
}

#[tokio::test]
async fn queues_without_history_have_usage_all_the_same() {
    let (queue, s) = Queue::with_session().await;
    s.run("select posthouse.set_queue('bare', '0')").await;
    // A worker of nothing but such queues, one of both kinds, one of the others.
    for (n, queues) in [&["bare"][..], &["bare", "kept"], &["kept"]].into_iter().enumerate() {
        for queue in queues {
            s.enqueue(&format!("kind => 'k', queue => '{queue}'")).await;
        }
        let worker = s.worker_of(queues, &["k"], 3_600_000).await;
        let jobs = worker.claim(&s, 10).await;
        assert_eq!(jobs.len(), queues.len());
        let used = json!({"input_tokens": 10_i64.pow(u32::try_from(n).unwrap()), "cost_usd": 1});
        let outcomes: Vec<_> = jobs.iter().map(|job| outcome(job, "done", used.clone())).collect();
        s.settle(worker.id, &json!(outcomes)).await;
        s.settle(worker.id, &json!(outcomes)).await;
    }
    let by_queue = report(&queue, UsageFilter { by: vec![UsageBy::Queue], ..UsageFilter::default() }).await;
    let rows: Vec<_> = by_queue.rows.iter().map(|row| (row.queue.as_deref(), row.input_tokens)).collect();
    assert_eq!(rows, [(Some("kept"), 110), (Some("bare"), 11)]);
    assert_eq!((by_queue.total.attempts, by_queue.total.cost_usd.as_deref()), (4, Some("4")));
}

#[tokio::test]
async fn a_settle_writes_a_row_for_each_tenant_and_model_and_none_without_usage() {
    let (_queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "a", 60).await;
    s.enqueue_bulk("k", "b", 40).await;
    let worker = s.worker(&["k"]).await;
    let mut jobs = worker.claim(&s, 100).await;
    jobs.sort_by_key(|job| job.id);
    let settle = async |part: &[Claimed], usage: &dyn Fn(&Claimed) -> Value| {
        let outcomes: Vec<_> = part.iter().map(|job| outcome(job, "done", usage(job))).collect();
        let verdicts = s.settle(worker.id, &json!(outcomes)).await;
        assert!(verdicts.iter().all(|verdict| verdict.1 == "applied"));
    };
    settle(&jobs[..20], &|_| Value::Null).await;
    assert_eq!(s.count("posthouse.usage").await, 0);
    settle(&jobs[20..40], &|_| json!({"input_tokens": 1, "model": "m"})).await;
    assert_eq!(s.count("posthouse.usage").await, 1);
    // Both tenants, one of them with two models; some tell nothing.
    settle(&jobs[40..], &|job| match (job.tenant.as_str(), job.id % 3) {
        (_, 0) => Value::Null,
        ("a", 1) => json!({"input_tokens": 1, "model": "m"}),
        _ => json!({"input_tokens": 1, "model": "n"}),
    })
    .await;
    assert_eq!(s.count("posthouse.usage").await, 4);
    assert_eq!(total(&s).await, "60 attempts, 60 requests, 60 in, 0 out, 0 cached, unknown dollars, 60 unpriced");
}

#[tokio::test]
async fn a_thousand_jobs_of_thirty_tenants_sum_exactly() {
    let (queue, s) = Queue::with_session().await;
    for tenant in 0..30 {
        s.enqueue_bulk("k", &format!("t{tenant}"), if tenant < 10 { 34 } else { 33 }).await;
    }
    let worker = s.worker(&["k"]).await;
    let (mut expected, mut jobs_done, mut dice) = (BTreeMap::new(), 0, 7_u64);
    let mut roll = |below: u64| {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (dice >> 33) % below
    };
    loop {
        let jobs = worker.claim(&s, 73).await;
        if jobs.is_empty() {
            break;
        }
        let mut outcomes = Vec::new();
        for job in &jobs {
            let (input, output, model) = (roll(100_000), roll(5_000), roll(3));
            // Dollars of twelve digits behind the point.
            let cost = u128::from(roll(1 << 31)) * u128::from(roll(1 << 20));
            let text = format!("{}.{:012}", cost / 10_u128.pow(12), cost % 10_u128.pow(12));
            let usage =
                json!({"input_tokens": input, "output_tokens": output, "cost_usd": text, "model": format!("m{model}")});
            outcomes.push(outcome(job, "done", usage));
            let sum: &mut (u64, u64, u128, i64) = expected.entry((job.tenant.clone(), model)).or_default();
            *sum = (sum.0 + input, sum.1 + output, sum.2 + cost, sum.3 + 1);
        }
        s.settle(worker.id, &json!(outcomes)).await;
        jobs_done += jobs.len();
        // Sometimes in the middle.
        if roll(4) == 0 {
            s.run("select posthouse.fold_usage(50)").await;
        }
    }
    assert_eq!(jobs_done, 1_000);
    for _ in 0..2 {
        let by = vec![UsageBy::Tenant, UsageBy::Model];
        let report = report(&queue, UsageFilter { by, ..UsageFilter::default() }).await;
        assert_eq!(report.rows.len(), expected.len());
        for row in &report.rows {
            let (tenant, model) = (row.tenant.clone().unwrap(), row.model.as_deref().unwrap()[1..].parse().unwrap());
            let (input, output, cost, attempts) = expected[&(tenant, model)];
            assert_eq!((row.input_tokens as u64, row.output_tokens as u64, row.attempts), (input, output, attempts));
            assert_eq!(row.cost_usd.as_deref().map(picodollars), Some(cost), "{row:?}");
        }
        let cost: u128 = expected.values().map(|sum| sum.2).sum();
        assert_eq!((report.total.attempts, report.total.unpriced), (1_000, 0));
        assert_eq!(report.total.cost_usd.as_deref().map(picodollars), Some(cost));
        s.run("select posthouse.fold_usage()").await;
        assert_eq!(s.count("posthouse.usage").await, 0);
    }
}

/// Decimal text of dollars in millionths of a millionth.
fn picodollars(text: &str) -> u128 {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    format!("{whole}{part:0<12}").parse().unwrap()
}

#[tokio::test]
async fn what_is_no_number_counts_as_unknown_and_fails_nothing() {
    let (_queue, s) = Queue::with_session().await;
    // Usage, and what is understood of it: input, output, cached, requests, cost.
    let cases = [
        (
            r#"{"input_tokens": 12, "output_tokens": 3.0, "cached_tokens": 4, "cost_usd": "0.00042"}"#,
            "(12,3,4,1,0.00042)",
        ),
        (r#"{"prompt_tokens": 1, "completion_tokens": 2, "cost_usd": 0.5}"#, "(1,2,,1,0.5)"),
        (r#"{"input_tokens": "5", "output_tokens": -1, "cost_usd": "NaN"}"#, "(,,,,)"),
        (r#"{"input_tokens": null, "output_tokens": true, "cost_usd": "1e-7"}"#, "(,,,,0.0000001)"),
        (
            r#"{"input_tokens": [1], "output_tokens": {"a": 1}, "cached_tokens": [], "requests": [], "cost_usd": ["1"]}"#,
            "(,,,,)",
        ),
        (r#"{"input_tokens": 1e30, "output_tokens": 1e400, "cost_usd": 1e-1000}"#, "(,,,,)"),
        (r#"{"input_tokens": 1000000000000, "output_tokens": 1000000000001}"#, "(1000000000000,,,1,)"),
        (r#"{"requests": 0, "input_tokens": 7, "cost_usd": 0}"#, "(7,,,0,0)"),
        (r#"{"requests": 3, "cost_usd": "1000000000"}"#, "(,,,3,1000000000)"),
        (r#"{"requests": -1, "cost_usd": "1000000000.1"}"#, "(,,,,)"),
        (r#"{"requests": 2e6, "cost_usd": "-0.1"}"#, "(,,,,)"),
        (r#"{"cost_usd": "Infinity"}"#, "(,,,,)"),
        (r#"{"cost_usd": "1e99"}"#, "(,,,,)"),
        (r#"{"cost_usd": "0x10"}"#, "(,,,,)"),
        (r#"{"cost_usd": " 1"}"#, "(,,,,)"),
        (r#"{"cost_usd": ""}"#, "(,,,,)"),
        (r#"{"cost_usd": "."}"#, "(,,,,)"),
        (r#"{"cost_usd": ".5"}"#, "(,,,,0.5)"),
        (r#"{"cost_usd": "1.2.3"}"#, "(,,,,)"),
        (r#"{"cost_usd": "\u0661"}"#, "(,,,,)"),
        (r#"{"cost_usd": "1e"}"#, "(,,,,)"),
        ("[1]", "(,,,,)"),
        ("5", "(,,,,)"),
        (r#""x""#, "(,,,,)"),
        ("false", "(,,,,)"),
        ("{}", "(,,,,)"),
    ];
    let (worker, jobs) = claimed(&s, "default", "t", i32::try_from(cases.len()).unwrap() * 2).await;
    for ((usage, expected), pair) in cases.iter().zip(jobs.chunks(2)) {
        let figures = "(f.input_tokens, f.output_tokens, f.cached_tokens, f.requests, f.cost)::text";
        let found: String =
            s.get(&format!("select {figures} from posthouse.usage_figures(array['{usage}'::jsonb]) f")).await;
        assert_eq!(&found, expected, "{usage}");
        // One by one it is understood in the same way.
        let agree = format!(
            "select (n.tokens, n.requests, n.cost) is not distinct from
               (coalesce(f.input_tokens + f.output_tokens, f.input_tokens, f.output_tokens), f.requests, f.cost)
             from posthouse.usage_figures(array['{usage}'::jsonb]) f, posthouse.usage_numbers('{usage}') n"
        );
        assert!(s.get::<bool>(&agree).await, "{usage}");
        for (job, outcome) in pair.iter().zip(["done", "fail"]) {
            let text =
                format!(r#"[{{"id": {}, "fence": {}, "outcome": "{outcome}", "usage": {usage}}}]"#, job.id, job.fence);
            let verdicts = s.settle_text(worker.id, &text).await.unwrap();
            assert_eq!(verdicts[0].1, "applied", "{usage}");
        }
    }
    assert_eq!(s.count("posthouse.archive").await + s.count("posthouse.dead_letter").await, jobs.len() as i64);
    s.run("select posthouse.fold_usage()").await;
    assert_eq!(
        total(&s).await,
        format!(
            "{} attempts, {} requests, {} in, 10 out, 8 cached, 2000000002.0008402 dollars, {} unpriced",
            jobs.len(),
            2 * (1 + 1 + 1 + 3),
            2 * (12 + 1 + 1_000_000_000_000_i64 + 7),
            jobs.len() - 2 * 6
        )
    );
}

#[tokio::test]
async fn a_usage_that_cannot_be_stored_and_a_name_too_long_count_too() {
    let (_queue, s) = Queue::with_session().await;
    let (worker, jobs) = claimed(&s, "default", "t", 3).await;
    let outcome = |n: usize, usage: &str| {
        format!(r#"{{"id": {}, "fence": {}, "outcome": "done", "usage": {usage}}}"#, jobs[n].id, jobs[n].fence)
    };
    let long = format!(r#"{{"input_tokens": 2, "model": "{}"}}"#, "m".repeat(201));
    let list = [
        outcome(0, r#"{"input_tokens": 1, "model": "a\u0000b", "note": 1e999999}"#),
        outcome(1, &long),
        outcome(2, r#"{"input_tokens": 4, "model": ["m"]}"#),
    ];
    let verdicts = s.settle_text(worker.id, &format!("[{}]", list.join(","))).await.unwrap();
    assert!(verdicts.iter().all(|verdict| verdict.1 == "applied"), "{verdicts:?}");
    assert!(total(&s).await.starts_with("3 attempts"), "{}", total(&s).await);
    let models: Vec<Option<String>> = s.list("select model from posthouse.usage_by_day order by model").await;
    assert!(models.iter().flatten().all(|model| model.len() <= 200), "{models:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn folding_while_others_settle_loses_nothing_and_counts_nothing_twice() {
    let (queue, s) = Queue::with_session().await;
    for tenant in ["a", "b", "c"] {
        s.enqueue_bulk("k", tenant, 600).await;
    }
    let over = AtomicBool::new(false);
    let fold = async || {
        let s = queue.session().await;
        let mut folded = 0;
        while !over.load(Ordering::SeqCst) {
            folded += s.get::<i64>("select posthouse.fold_usage(7)").await;
        }
        folded
    };
    let work = async || {
        let s = queue.session().await;
        let worker = s.worker(&["k"]).await;
        loop {
            let jobs = worker.claim(&s, 5).await;
            if jobs.is_empty() {
                break;
            }
            let outcomes: Vec<_> = jobs
                .iter()
                .map(|job| outcome(job, "done", json!({"input_tokens": job.id, "cost_usd": "0.001"})))
                .collect();
            s.settle(worker.id, &json!(outcomes)).await;
        }
    };
    let expected: i64 = s.get("select sum(id)::bigint from posthouse.job").await;
    let works = async {
        tokio::join!(work(), work(), work());
        over.store(true, Ordering::SeqCst);
    };
    let (first, second, ()) = tokio::join!(fold(), fold(), works);
    assert!(first + second > 0, "nothing was folded meanwhile");
    let all = format!("1800 attempts, 1800 requests, {expected} in, 0 out, 0 cached, 1.8 dollars, 0 unpriced");
    assert_eq!(total(&s).await, all);
    s.run("select posthouse.fold_usage()").await;
    assert_eq!((total(&s).await, s.count("posthouse.usage").await), (all, 0));
    assert_eq!(s.count("posthouse.usage_day").await, 3);
}

#[tokio::test]
async fn a_settle_costs_the_same_however_much_dead_usage_lies_around() {
    let (queue, s) = Queue::with_session().await;
    let lane = s.enqueue("kind => 'k'").await;
    let pages = async || {
        let record =
            format!("select posthouse.record_usage(array[{lane}::bigint], array['{{\"input_tokens\": 1}}'::jsonb])");
        let plan: Value = s.get(&format!("explain (analyze, buffers, timing off, format json) {record}")).await;
        plan[0]["Plan"]["Shared Hit Blocks"].as_u64().unwrap() + plan[0]["Plan"]["Shared Read Blocks"].as_u64().unwrap()
    };
    pages().await;
    let before = pages().await;
    // Somebody holds a snapshot, and nothing can be vacuumed.
    let holder = queue.session().await;
    holder.run("begin isolation level repeatable read; select 1 from posthouse.usage").await;
    for _ in 0..3 {
        s.run(&format!(
            "insert into posthouse.usage select {lane}, current_date, 'm', 1, 1, 1, 1, 1, 1, 0 from generate_series(1, 20000)"
        ))
        .await;
        assert!(s.get::<i64>("select posthouse.fold_usage()").await >= 20_000);
    }
    let after = pages().await;
    assert!(after <= before + 3, "{before} pages before, {after} after");
    // Rows of a day are written once a fold.
    assert_eq!(s.count("posthouse.usage_day where model = 'm' and attempts = 60000").await, 1);
}

#[tokio::test]
async fn the_sweep_adds_it_up() {
    let (_queue, s) = Queue::with_session().await;
    let (worker, jobs) = claimed(&s, "default", "t", 1).await;
    s.settle(worker.id, &json!([outcome(&jobs[0], "done", json!({"input_tokens": 3, "model": "m"}))])).await;
    s.run("select posthouse.tidy()").await;
    assert_eq!((s.count("posthouse.usage").await, s.count("posthouse.usage_day").await), (0, 1));
    let row: Value = s.get("select to_jsonb(u.*) - 'day' from posthouse.usage_by_day u").await;
    assert_eq!(
        row,
        json!({"tenant": "t", "queue": "default", "kind": "k", "model": "m", "attempts": 1, "requests": 1, "input_tokens": 3,
            "output_tokens": 0, "cached_tokens": 0, "cost_usd": null, "unpriced": 1})
    );
    // The day is that of UTC, whatever the session's zone: in one of these it is another one.
    for zone in ["Pacific/Kiritimati", "Etc/GMT+12"] {
        s.run(&format!("set timezone = '{zone}'")).await;
        let (worker, jobs) = claimed(&s, "default", "t", 1).await;
        s.settle(worker.id, &json!([outcome(&jobs[0], "done", json!({"input_tokens": 3, "model": "m"}))])).await;
    }
    let days = "select bool_and(day in ((at - interval '1 minute')::date, at::date)) and sum(attempts) = 3
        from posthouse.usage_by_day, (select clock_timestamp() at time zone 'UTC' as at) now";
    assert!(s.get::<bool>(days).await);
}

#[tokio::test]
async fn reports_are_told_apart_and_filtered_as_asked() {
    let (queue, s) = Queue::with_session().await;
    let mut used = Vec::new();
    for (tenant, day, cost) in
        [("a", "2026-01-30", "1.10"), ("a", "2026-01-31", "2"), ("b", "2026-02-01", "3.000000000000001")]
    {
        used.push(format!("('{day}'::date, '{tenant}', 'q', 'k', 'm', 2, 2, 10, 5, 1, {cost}, 0)"));
    }
    used.push("('2026-02-01', 'b', 'q', 'k', '', 1, 0, 0, 0, 0, null, 1)".to_owned());
    s.run(&format!("insert into posthouse.usage_day values {}", used.join(","))).await;
    let by = |by: &[UsageBy]| UsageFilter { by: by.to_vec(), ..UsageFilter::default() };
    let all = report(&queue, UsageFilter::default()).await;
    assert_eq!((all.rows.len(), &all.rows[0]), (1, &all.total));
    assert_eq!(all.total.cost_usd.as_deref(), Some("6.100000000000001"));
    assert_eq!((all.total.attempts, all.total.requests, all.total.unpriced), (7, 6, 1));
    let days = report(&queue, by(&[UsageBy::Day])).await;
    let costs: Vec<_> = days.rows.iter().map(|row| (row.day.as_deref().unwrap(), row.cost_usd.as_deref())).collect();
    assert_eq!(
        costs,
        [("2026-01-30", Some("1.1")), ("2026-01-31", Some("2")), ("2026-02-01", Some("3.000000000000001"))]
    );
    // The dearest first; what named no model has a row of its own.
    let models = report(&queue, by(&[UsageBy::Tenant, UsageBy::Model])).await;
    let names: Vec<_> = models.rows.iter().map(|row| (row.tenant.as_deref().unwrap(), row.model.as_deref())).collect();
    assert_eq!(names, [("a", Some("m")), ("b", Some("m")), ("b", None)]);
    let since = UsageFilter { since: Some("2026-01-31".to_owned()), until: Some("2026-01-31".to_owned()), ..by(&[]) };
    assert_eq!(report(&queue, since).await.total.cost_usd.as_deref(), Some("2"));
    let tenant = UsageFilter { tenant: Some("a".to_owned()), model: Some("m".to_owned()), ..by(&[UsageBy::Kind]) };
    assert_eq!(report(&queue, tenant).await.rows[0].input_tokens, 20);
    let nobody = UsageFilter { kind: Some("other".to_owned()), queue: Some("q".to_owned()), ..by(&[UsageBy::Day]) };
    let nobody = report(&queue, nobody).await;
    assert_eq!((nobody.rows.len(), nobody.total.attempts, nobody.total.cost_usd), (0, 0, None));
    let wrong = UsageFilter { since: Some("yonder".to_owned()), ..UsageFilter::default() };
    let error = Posthouse::connect(queue.url()).await.unwrap().usage(&wrong).await.unwrap_err();
    assert!(error.to_string().contains("yonder"), "{error}");
}
