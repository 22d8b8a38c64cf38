//! Programs that print what no database can hold: the job reaches its end all the same, and is not run again for it.

use posthouse::Outcome;

use super::support::{Journal, all_final, assert_one_record_each, work};
use crate::client::queue_database;
use crate::worker_support::{Background, enqueue, queue_at, worker_at};

/// What a program prints, the state that its job must reach, and what result or error must then contain.
const CASES: [(&str, &str, &str, &str); 10] = [
    ("nul-in-json", r#"printf '{"a":"x\\u0000y"}'"#, "done", "x\u{fffd}y"),
    ("nul", r"printf 'a\000b'", "done", "a\u{fffd}b"),
    ("lone-surrogate", r#"printf '{"a":"x\\ud800y"}'"#, "done", "x\u{fffd}y"),
    ("not-utf-8", r"printf 'a\377\376b'", "done", "a\u{fffd}\u{fffd}b"),
    ("huge-number", "printf 1e999999", "done", "1e999999"),
    ("nul-in-error", r"printf 'it broke\000here' >&2; exit 64", "failed", "exit status 64: it broke"),
    ("not-utf-8-error", r"printf 'it broke \377\376' >&2; exit 65", "failed", "exit status 65: it broke"),
    ("surrogate-error", r"printf 'it broke \\ud800 \355\240\200' >&2; exit 64", "failed", "it broke \\ud800"),
    ("50-mb-error", "head -c 52428800 /dev/zero | tr '\\000' e >&2; echo the end >&2; exit 64", "failed", "the end"),
    ("50-mb-result", "printf '\"'; head -c 52428800 /dev/zero | tr '\\000' r; printf 'the end\"'", "done", "the end"),
];

#[tokio::test]
async fn of_a_program_is_recorded_and_the_job_not_run_again() {
    let (database, journal) = (queue_database().await, Journal::new());
    let queue = queue_at(database.url());
    let mut arguments = vec!["--lease-ms".to_owned(), "10000".to_owned()];
    let mut ids = Vec::new();
    for (kind, prints, _, _) in CASES {
        arguments.extend(["--exec".to_owned(), format!("{kind}={}", journal.command(prints))]);
        ids.extend(enqueue(&queue, kind, 1).await);
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let worker = work(database.url(), &journal, &arguments);
    all_final(&database).await;
    for ((kind, _, state, contains), id) in CASES.iter().zip(&ids) {
        let job = queue.job(*id).await.unwrap().unwrap();
        let said = job.result.as_ref().map(|result| result.get().to_owned()).or(job.error).unwrap_or_default();
        assert_eq!((&*job.state, job.attempt), (*state, 1), "{kind}: {}", said.get(..200).unwrap_or(&said));
        assert!(said.contains(contains), "{kind}: {contains:?} is not in {}", said.get(..200).unwrap_or(&said));
    }
    journal.assert_each_ran_once(&ids);
    assert!(!worker.output().contains("lost"), "{}", worker.output());
    assert_one_record_each(&database, &ids).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_of_fifty_megabytes_is_cut_flagged_and_recorded() {
    let database = queue_database().await;
    let queue = queue_at(database.url());
    let ids = enqueue(&queue, "k", 2).await;
    let small = ids[1];
    let worker = worker_at(database.url()).handle_kind("k", move |_, context: posthouse::Context| async move {
        if context.job_id() == small { Outcome::done(&"small") } else { Outcome::done(&"r".repeat(50 << 20)) }
    });
    let worker = Background::start(worker);
    all_final(&database).await;
    let client = database.connect().await;
    let look = "select state::text, attempt, pg_column_size(result)::bigint, octet_length(result::text)::bigint, coalesce(flags, '{}') from posthouse.archive where id = $1";
    let row = client.query_one(look, &[&ids[0]]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i32>(1)), ("done", 1));
    assert!((1..=32 << 20).contains(&row.get::<_, i64>(3)), "{} bytes", row.get::<_, i64>(3));
    assert!(row.get::<_, Vec<String>>(4).contains(&"truncated".to_owned()), "it is flagged");
    let row = client.query_one(look, &[&small]).await.unwrap();
    assert_eq!((row.get::<_, &str>(0), row.get::<_, i32>(1)), ("done", 1));
    assert_one_record_each(&database, &ids).await;
    let summary = worker.end().await;
    assert_eq!((summary.started, summary.done, summary.lost), (2, 2, 0), "nothing ran twice");
}
