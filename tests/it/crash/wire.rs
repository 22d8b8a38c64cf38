//! Wires that are cut at the worst moment, again and again, between several worker processes and Postgres.

use std::time::Duration;

use super::support::{Journal, all_final, assert_one_record_each, work};
use crate::client::queue_database;
use crate::harness::{FaultProxy, Program, SOON, wait_until};
use crate::worker_support::{enqueue, queue_at};

/// What may get lost: the answer to a call, after it has taken effect, or the call itself.
const CALLS: [(&str, bool); 6] = [
    ("posthouse.claim(", true),
    ("posthouse.settle", true),
    ("posthouse.claim(", true),
    ("posthouse.settle", false),
    ("posthouse.claim(", false),
    ("posthouse.heartbeat(", true),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_calls_lost_under_load_cost_no_attempt_and_no_second_run() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let handler = format!("k={}", journal.command("sleep 0.02"));
    let arguments = ["--lease-ms", "15000", "--concurrency", "3", "--exec", &handler];
    let mut wires: Vec<(FaultProxy, Program)> = Vec::new();
    for _ in 0..3 {
        let proxy = FaultProxy::start(database.url()).await;
        let worker = work(&proxy.url(database.url()), &journal, &arguments);
        wires.push((proxy, worker));
    }
    let mut ids = Vec::new();
    for round in 0..36 {
        let (marker, after_answer) = CALLS[round % CALLS.len()];
        let before: Vec<usize> = wires.iter().map(|(proxy, _)| proxy.cuts()).collect();
        for (proxy, _) in &wires {
            if after_answer { proxy.lose_answer_to(marker) } else { proxy.lose_request(marker) }
        }
        ids.extend(enqueue(&queue, "k", 9).await);
        if marker.contains("heartbeat") {
            // Not due so often; this is what comes between.
            wires.iter().for_each(|(proxy, _)| proxy.cut_all());
            continue;
        }
        wait_until(SOON, &format!("{marker} is lost on every wire"), async || {
            wires.iter().zip(&before).all(|((proxy, _), before)| proxy.cuts() > *before)
        })
        .await;
    }
    let cuts: usize = wires.iter().map(|(proxy, _)| proxy.cuts()).sum();
    assert!(cuts >= 90, "{cuts} calls lost");
    wires.iter().for_each(|(proxy, _)| proxy.heal());
    all_final(&database).await;
    journal.assert_each_ran_once(&ids);
    let client = database.connect().await;
    let charged = "select count(*) from posthouse.archive where attempt <> 1 or errors is not null";
    assert_eq!(client.query_one(charged, &[]).await.unwrap().get::<_, i64>(0), 0, "no attempt is charged");
    assert_one_record_each(&database, &ids).await;
    for (_, worker) in &wires {
        let said = worker.output();
        assert!(!said.contains("another worker may have it") && !said.contains("lost its lease"), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_wire_loses_no_lease() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let proxy = FaultProxy::start(database.url()).await;
    let handler = format!("k={}", journal.command("wait_for gate"));
    let arguments = ["--lease-ms", "3000", "--exec", &handler];
    let ids = enqueue(&queue, "k", 50).await;
    let slow = work(&proxy.url(database.url()), &journal, &arguments);
    journal.wait_for("start", None, 50).await;
    // A heartbeat takes 800 ms now. Another worker watches whether the lease runs out.
    proxy.delay(Duration::from_millis(400));
    let watcher = work(database.url(), &journal, &arguments);
    watcher.printed("registered", SOON).await;
    tokio::time::sleep(Duration::from_secs(8)).await;
    journal.open("gate");
    all_final(&database).await;
    journal.assert_each_ran_once(&ids);
    assert!(!slow.output().contains("lost its lease"), "{}", slow.output());
    assert_one_record_each(&database, &ids).await;
}
