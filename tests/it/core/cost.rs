//! What a finished job costs the database: round trips, rows, index entries and bytes of WAL, counted from the wire and from
//! the log itself, against what is stated here and explained in `docs/benchmarks.md`.
//!
//! On a server of its own where nothing else writes: no autovacuum, no checkpoint, no images of whole pages.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use posthouse::store::{Database, Registration, Settlement, Store, schema_sql};
use posthouse::testing::{TestCluster, TestDatabase};
use posthouse::{NewJob, Outcome, Posthouse};
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_postgres::Client;
use uuid::Uuid;

use super::support::Queue;

/// Jobs that are enqueued, claimed and settled together.
const BATCH: u64 = 100;
/// How often the cycle of a job by itself is repeated, so that what happens once in a while counts a little.
const REPEATS: u64 = 20;

/// What each job writes, exactly: table or index, what, how often.
const A_JOB: [(&str, &str, u64); 10] = [
    // Enqueue.
    ("payload", "insert", 1),
    ("payload_pkey", "entry", 1),
    ("job", "insert", 1),
    ("job_ready", "entry", 1),
    // The claim locks the row, so that others go around it, and writes it anew, which takes an entry in the key again.
    ("job", "lock", 1),
    ("job", "update", 1),
    ("job_pkey", "entry", 2),
    // Settle.
    ("job", "delete", 1),
    ("archive", "insert", 1),
    ("archive_pkey", "entry", 1),
];

/// What each batch writes besides, exactly, however many jobs are in it.
const A_BATCH: [(&str, &str, u64); 7] = [
    ("worker", "lock", 1),
    ("claimed", "insert", 1),
    ("claimed", "confirm", 1),
    ("claimed_pkey", "entry", 1),
    ("tally", "insert", 1),
    ("usage", "insert", 1),
    ("", "commit", 3),
];

/// One enqueue, one claim, one settle.
const ROUND_TRIPS: u64 = 3;

/// What depends on the payload and on how the server compresses: Postgres' own method, or lz4.
struct Stated {
    /// Bytes of the payload, as JSON text.
    payload: usize,
    /// At most so many rows of the payload's TOAST table, each with an entry in its index: pglz, lz4.
    toast: [u64; 2],
    /// At most so many bytes of WAL a job in a batch of 100: pglz, lz4.
    batched: [u64; 2],
    /// At most so many bytes of WAL for a job by itself: pglz, lz4.
    alone: [u64; 2],
}

const STATED: [Stated; 4] = [
    Stated { payload: 200, toast: [0, 0], batched: [2_320, 2_320], alone: [2_895, 2_895] },
    Stated { payload: 1_000, toast: [0, 0], batched: [3_130, 3_130], alone: [3_705, 3_705] },
    Stated { payload: 20_000, toast: [5, 7], batched: [11_920, 14_985], alone: [12_480, 15_540] },
    Stated { payload: 200_000, toast: [43, 48], batched: [93_970, 103_900], alone: [94_670, 104_520] },
];

/// At most so many jobs of a batch whose new version finds no place on its page at the claim: the old one is locked once more.
const MOVED: u64 = 70;

/// Records besides: sequence, pages pruned, index pages split. At most so many in a batch of 100, or in 20 jobs one by one.
const OTHER_RECORDS: u64 = 12;

/// A wire to the server that counts how often it was the client's turn.
struct Wire {
    url: String,
    trips: Arc<AtomicU64>,
}

impl Wire {
    async fn to(url: &str) -> Self {
        let (user, address) = url.rsplit_once('@').unwrap();
        let (server, path) = address.split_once('/').unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("{user}@{}/{path}", listener.local_addr().unwrap());
        let (trips, server) = (Arc::new(AtomicU64::new(0)), server.to_owned());
        let counting = trips.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                let answered = Arc::new(AtomicBool::new(true));
                let (heard, counting) = (answered.clone(), counting.clone());
                tokio::spawn(pass(from_client, to_server, move || {
                    if heard.swap(false, Ordering::SeqCst) {
                        counting.fetch_add(1, Ordering::SeqCst);
                    }
                }));
                tokio::spawn(pass(from_server, to_client, move || answered.store(true, Ordering::SeqCst)));
            }
        });
        Self { url, trips }
    }
}

async fn pass(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin, see: impl Fn()) {
    let mut buffer = vec![0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        see();
        if to.write_all(&buffer[..read]).await.is_err() {
            break;
        }
    }
}

/// What was counted of some jobs.
#[derive(Debug, Default)]
struct Counted {
    trips: u64,
    statements: u64,
    wal_bytes: u64,
    /// Records, without those of commits.
    wal_records: u64,
    /// Table or index and what happened there, how often; `None` where the server cannot read its log.
    written: Option<BTreeMap<(String, String), u64>>,
}

/// A database, a worker in it, and someone who watches.
struct Ground {
    _database: TestDatabase,
    watcher: Client,
    store: Store,
    wire: Wire,
    worker: Uuid,
    seq: i64,
}

impl Ground {
    async fn new(cluster: &TestCluster) -> Self {
        let database = cluster.database(&schema_sql(), async |url: &str| Posthouse::migrate(url).await).await;
        let watcher = database.connect().await;
        let wire = Wire::to(database.url()).await;
        let store = Database::new(&wire.url).unwrap().store("cost");
        let worker = Uuid::new_v4();
        let registration = Registration {
            worker,
            lease: Duration::from_hours(1),
            queues: vec!["default".to_owned()],
            kinds: vec!["llm.chat".to_owned()],
            slots: 100,
            host: "test".to_owned(),
            pid: 1,
            version: "1".to_owned(),
        };
        store.register_worker(&registration).await.unwrap();
        watcher.batch_execute("create extension pg_stat_statements").await.unwrap();
        if can_read_log(&watcher).await {
            watcher.batch_execute("create extension pg_walinspect").await.unwrap();
        }
        let mut ground = Self { _database: database, watcher, store, wire, worker, seq: 1 };
        // The lane, the partitions and their first pages are made once.
        ground.cycle(200, BATCH).await;
        ground.cycle(200, 1).await;
        ground
    }

    /// So many jobs from enqueue to settle, together.
    async fn cycle(&mut self, payload: usize, jobs: u64) {
        let first = u64::try_from(self.seq).unwrap() * 1_000;
        let new: Vec<NewJob> = (first..first + jobs).map(|n| job(n, payload)).collect();
        match new.as_slice() {
            [one] => drop(self.store.enqueue(one).await.unwrap()),
            many => drop(self.store.enqueue_many(many).await.unwrap()),
        }
        let claimed = self.store.claim(self.worker, self.seq, u32::try_from(jobs).unwrap(), 0).await.unwrap();
        self.seq += 1;
        assert_eq!(claimed.len(), new.len());
        let outcomes: Vec<Settlement> = claimed.iter().map(|job| settled(job.id, job.fence)).collect();
        let answers = self.store.settle(self.worker, &outcomes).await.unwrap();
        assert!(answers.iter().all(|answer| answer.state.as_deref() == Some("done")), "{answers:?}");
    }

    async fn number(&self, sql: &str) -> u64 {
        let number: i64 = self.watcher.query_one(sql, &[]).await.unwrap().get(0);
        number.unsigned_abs()
    }

    /// Some cycles of jobs, counted.
    async fn count(&mut self, payload: usize, jobs: u64, cycles: u64) -> Counted {
        self.watcher.batch_execute("select pg_stat_statements_reset()").await.unwrap();
        let start = self.position().await;
        let trips = self.wire.trips.load(Ordering::SeqCst);
        for _ in 0..cycles {
            self.cycle(payload, jobs).await;
        }
        let trips = self.wire.trips.load(Ordering::SeqCst) - trips;
        let end = self.position().await;
        let ours = "from pg_stat_statements where query ~ 'posthouse[.](enqueue|claim|settle)'";
        Counted {
            trips,
            statements: self.number(&format!("select sum(calls)::bigint {ours}")).await,
            wal_bytes: self.number(&format!("select pg_wal_lsn_diff('{end}', '{start}')::bigint")).await,
            wal_records: self.number(&format!("select sum(wal_records)::bigint {ours}")).await,
            written: if can_read_log(&self.watcher).await { Some(self.read_log(&start, &end).await) } else { None },
        }
    }

    async fn position(&self) -> String {
        self.watcher.query_one("select pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0)
    }

    /// The records of the log in between, by what they were written for.
    async fn read_log(&self, start: &str, end: &str) -> BTreeMap<(String, String), u64> {
        let sql = format!(
            "select coalesce(case when c.relkind = 't' then 'toast of ' || t.relname when i.indexrelid is not null then 'toast index of ' || t.relname
                    else c.relname end, ''), w.resource_manager, w.record_type, count(*)
             from pg_get_wal_records_info('{start}', '{end}') w
             left join pg_class c on pg_relation_filenode(c.oid) = substring(w.block_ref from 'rel \\d+/\\d+/(\\d+)')::oid
             left join (pg_index i join pg_class tt on tt.oid = i.indrelid and tt.relkind = 't') on i.indexrelid = c.oid
             left join pg_class t on t.reltoastrelid in (c.oid, i.indrelid)
             group by 1, 2, 3"
        );
        let mut written = BTreeMap::new();
        for row in self.watcher.query(&sql, &[]).await.unwrap() {
            let (relation, manager, kind): (String, String, String) = (row.get(0), row.get(1), row.get(2));
            let count: i64 = row.get(3);
            // An insert that splits a page is in the record of the split.
            let what = match (manager.as_str(), kind.trim_end_matches("+INIT")) {
                ("Heap", "INSERT") => "insert",
                ("Heap", "UPDATE") => "update",
                ("Heap", "DELETE") => "delete",
                ("Heap", "LOCK") => "lock",
                ("Heap", "HEAP_CONFIRM") => "confirm",
                ("Btree", "INSERT_LEAF" | "INSERT_POST" | "SPLIT_L" | "SPLIT_R") => "entry",
                ("Transaction", "COMMIT") => "commit",
                // The server's own, now and then.
                ("Standby", _) => continue,
                _ => "other",
            };
            let relation = if what == "other" {
                format!("{relation} {manager} {kind}")
            } else {
                // All is in the first partition.
                relation.replacen("_0", "", 1)
            };
            *written.entry((relation, what.to_owned())).or_default() += count.unsigned_abs();
        }
        written
    }
}

async fn can_read_log(client: &Client) -> bool {
    let sql = "select current_setting('server_version_num')::int >= 150000";
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// A prompt of so many bytes, of a thousand words, so that it compresses as prose does, different for each number.
fn job(n: u64, bytes: usize) -> NewJob {
    let body = |text: &str| json!({"model": "m-large", "messages": [{"role": "user", "content": text}]}).to_string();
    NewJob::from_json("llm.chat", body(&words(n, bytes - body("").len()))).unwrap()
}

/// An answer of about a kilobyte, and what it used.
fn settled(id: i64, fence: i64) -> Settlement {
    let text = words(id.unsigned_abs() + 1_000_000, 880);
    let mut settlement =
        Settlement::new(id, fence, Outcome::done(&json!({"model": "m-large", "text": text, "finish_reason": "stop"})));
    let usage = json!({"prompt_tokens": 1234, "completion_tokens": 210, "total_tokens": 1444, "cost_usd": 0.00321});
    settlement.usage = Some(raw(&usage));
    settlement
}

fn raw(value: &serde_json::Value) -> Box<RawValue> {
    to_raw_value(value).unwrap()
}

fn words(n: u64, bytes: usize) -> String {
    const SYLLABLES: [&str; 32] = [
        "ter", "ing", "hor", "let", "man", "der", "sta", "rin", "pos", "ver", "con", "lan", "tri", "mor", "wea", "cha",
        "ger", "ton", "ble", "per", "sil", "dra", "kno", "fol", "est", "qui", "bra", "sun", "ort", "net", "hil", "wod",
    ];
    let mut text = String::new();
    let mut state = n.wrapping_mul(2_654_435_761);
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(SYLLABLES[(state >> 59) as usize]);
        text.push_str(SYLLABLES[(state >> 54 & 31) as usize]);
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

/// What so many cycles of so many jobs must write, with so many rows of TOAST.
fn expected(jobs: u64, cycles: u64, toasted: u64) -> BTreeMap<(String, String), u64> {
    let mut expected = BTreeMap::new();
    let mut add = |(relation, what, count): (&str, &str, u64)| {
        *expected.entry((relation.to_owned(), what.to_owned())).or_default() += count * cycles;
    };
    A_JOB.iter().for_each(|&(relation, what, count)| add((relation, what, count * jobs)));
    A_BATCH.iter().for_each(|&entry| add(entry));
    if toasted > 0 {
        expected.insert(toast_rows(), toasted);
        expected.insert(("toast index of payload".to_owned(), "entry".to_owned()), toasted);
    }
    expected
}

fn toast_rows() -> (String, String) {
    ("toast of payload".to_owned(), "insert".to_owned())
}

/// Compare with what is stated; the answer is what is wrong.
fn compare(counted: &Counted, (jobs, cycles, toast, wal): (u64, u64, u64, u64)) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut check = |holds: bool, complaint: String| {
        if !holds {
            wrong.push(complaint);
        }
    };
    let trips = ROUND_TRIPS * cycles;
    check(counted.trips == trips, format!("{} round trips, {trips} are stated", counted.trips));
    check(counted.statements == trips, format!("{} statements, {trips} are stated", counted.statements));
    let all = jobs * cycles;
    let each = counted.wal_bytes.div_ceil(all);
    check(each <= wal, format!("{each} bytes of WAL a job, {wal} are stated"));
    // How a text is cut into rows of TOAST depends on how well it was compressed.
    let toasted = counted.written.as_ref().map(|written| written.get(&toast_rows()).copied().unwrap_or_default());
    check(toasted <= Some(toast * all), format!("{toasted:?} rows of TOAST, {} are stated", toast * all));
    let expected = expected(jobs, cycles, toasted.unwrap_or(toast * all));
    let stated: u64 = expected.iter().filter(|((_, what), _)| what != "commit").map(|(_, count)| count).sum();
    // With many rows of TOAST their index splits now and then.
    let moved = if jobs == BATCH { MOVED } else { 0 };
    let (records, other) = (counted.wal_records, OTHER_RECORDS + moved + toast * all / 100);
    check(records <= stated + other, format!("{records} WAL records, {stated} and at most {other} others are stated"));
    let written = counted.written.iter().flatten().filter(|((_, what), _)| what != "other");
    let mut written: BTreeMap<_, _> = written.map(|(name, count)| (name.clone(), *count)).collect();
    if counted.written.is_some() {
        for (name, stated) in &expected {
            let is = written.remove(name).unwrap_or_default();
            let most = if (name.0.as_str(), name.1.as_str()) == ("job", "lock") { stated + moved } else { *stated };
            check((*stated..=most).contains(&is), format!("{} {}: {is}, {stated} are stated", name.0, name.1));
        }
        for ((relation, what), is) in written {
            check(false, format!("{relation} {what}: {is}, none are stated"));
        }
    }
    wrong
}

#[tokio::test]
async fn a_finished_job_costs_what_is_stated() {
    let cluster = tokio::task::spawn_blocking(|| {
        TestCluster::dedicated(&[
            ("shared_preload_libraries", "pg_stat_statements"),
            ("autovacuum", "off"),
            ("checkpoint_timeout", "1d"),
            ("max_wal_size", "8GB"),
            ("full_page_writes", "off"),
        ])
    });
    let cluster = cluster.await.unwrap();
    let mut wrong = Vec::new();
    for stated in &STATED {
        for (jobs, cycles, wal) in [(BATCH, 1, stated.batched), (1, REPEATS, stated.alone)] {
            let mut ground = Ground::new(&cluster).await;
            let lz4 =
                "select count(*) from pg_settings where name = 'default_toast_compression' and 'lz4' = any(enumvals)";
            let method = usize::try_from(ground.number(lz4).await).unwrap();
            let counted = ground.count(stated.payload, jobs, cycles).await;
            let name = format!("{} bytes, {jobs} together, {}", stated.payload, ["pglz", "lz4"][method]);
            let all = jobs * cycles;
            println!(
                "figure: {name}: {} round trips a batch; a job: {} bytes of WAL, {:.2} records",
                counted.trips / cycles,
                counted.wal_bytes / all,
                counted.wal_records as f64 / all as f64
            );
            for ((relation, what), count) in counted.written.iter().flatten() {
                println!("figure: {name}: {relation} {what}: {count}");
            }
            let problems = compare(&counted, (jobs, cycles, stated.toast[method], wal[method]));
            wrong.extend(problems.into_iter().map(|problem| format!("{name}: {problem}")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test]
async fn what_is_long_is_compressed_with_lz4_where_the_server_has_it() {
    let (_queue, s) = Queue::with_session().await;
    s.run("select posthouse.make_partitions(1)").await;
    let has: bool =
        s.get("select 'lz4' = any(enumvals) from pg_settings where name = 'default_toast_compression'").await;
    let columns: Vec<String> = s
        .list(
            "select c.relname || '.' || a.attname from pg_attribute a join pg_class c on c.oid = a.attrelid
             where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p') and a.attcompression = 'l'",
        )
        .await;
    for wanted in ["payload.payload", "payload_0.payload", "archive.result", "archive_0.result", "claimed.job_ids"] {
        assert_eq!(columns.iter().any(|column| column == wanted), has, "{wanted}: {columns:?}");
    }
}
