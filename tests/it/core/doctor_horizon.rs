//! The doctor names what holds back vacuum: open transactions, prepared ones, replication slots, the feedback of standbys; and says
//! what it could not see.

use std::time::Duration;

use posthouse::store::{Examination, Finding, Severity};
use posthouse::testing::TestCluster;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::Client;

use super::doctor::{diagnose, finds};
use super::support::Queue;
use crate::harness::{SOON, wait_until};
use crate::worker_support::database_on;

/// Everything is old.
const AT_ONCE: Examination = Examination { older: Duration::ZERO, xids: 1, dead_rows: 100_000, max_jobs: 100 };

/// What a check finds about a subject, when it does.
async fn awaited(url: &str, check: &str, subject: &str) -> Finding {
    let mut found = None;
    wait_until(SOON, &format!("{check} finds {subject}"), async || {
        let diagnosis = diagnose(url, &AT_ONCE).await;
        found = diagnosis.findings.into_iter().find(|f| f.check == check && f.subject.as_deref() == Some(subject));
        found.is_some()
    })
    .await;
    found.unwrap()
}

async fn finds_nothing(url: &str, check: &str) {
    wait_until(SOON, &format!("{check} finds nothing"), async || {
        diagnose(url, &AT_ONCE).await.findings.iter().all(|f| f.check != check)
    })
    .await;
}

/// A fix, without the words behind it.
fn statement(finding: &Finding) -> &str {
    finding.fix.split(" -- ").next().unwrap()
}

#[tokio::test]
async fn a_forgotten_transaction_is_named_with_all_that_is_known() {
    let (queue, s) = Queue::with_session().await;
    s.enqueue_bulk("k", "t", 10).await;
    let forgotten = queue.session().await;
    forgotten
        .run("set application_name = 'notebook'; begin isolation level repeatable read; select 17 from posthouse.job")
        .await;
    let subject = format!("pid {}", forgotten.pid);
    let finding = awaited(queue.url(), "horizon", &subject).await;
    assert_eq!(finding.severity, Severity::Bad);
    for words in ["notebook", "idle in transaction", "select 17 from posthouse.job"] {
        assert!(finding.what.contains(words), "{words}: {finding:?}");
    }
    assert!(finding.why.contains("dead rows and ") && finding.why.contains("on disk"), "{finding:?}");
    let detail = finding.detail.as_ref().unwrap();
    assert_eq!((&detail["pid"], &detail["application"]), (&forgotten.pid.into(), &"notebook".into()));
    assert!(detail["seconds"].as_i64().is_some() && detail["xids"].as_i64().is_some(), "{detail}");
    // Not old enough to be told of, as it comes.
    let diagnosis = diagnose(queue.url(), &Examination::default()).await;
    assert!(diagnosis.fine.contains(&"horizon"), "{diagnosis:?}");
    // One that reads nothing at the moment and wrote nothing holds back nothing.
    let harmless = queue.session().await;
    harmless.run("begin; select 1").await;
    let harmless = format!("pid {}", harmless.pid);
    let diagnosis = diagnose(queue.url(), &AT_ONCE).await;
    assert!(!diagnosis.findings.iter().any(|f| f.subject.as_deref() == Some(&harmless)), "{diagnosis:?}");
    // One that wrote does. The fix ends it, and sets a limit for its role, which a test leaves alone.
    s.run(statement(&finding).split(';').next().unwrap()).await;
    finds_nothing(queue.url(), "horizon").await;
    let writer = queue.session().await;
    writer.run("begin; select txid_current()").await;
    awaited(queue.url(), "horizon", &format!("pid {}", writer.pid)).await;
}

#[tokio::test]
async fn what_a_plain_role_cannot_see_is_said() {
    let (queue, s) = Queue::with_session().await;
    let role = format!("plain_{}", uuid::Uuid::new_v4().simple());
    s.run(&format!(
        "create role {role} login password 'sesame'; grant usage on schema posthouse to {role};
         grant select on all tables in schema posthouse to {role}; grant select on all sequences in schema posthouse to {role};
         grant execute on all functions in schema posthouse to {role}"
    ))
    .await;
    let url = format!("postgres://{role}:sesame@{}", queue.url().rsplit_once('@').unwrap().1);
    let finding = finds(&url, "rights", Severity::Note, "may not look into").await;
    s.run(&finding.fix).await;
    let diagnosis = diagnose(&url, &Examination::default()).await;
    assert!(diagnosis.fine.contains(&"rights"), "{diagnosis:?}");
    // Without rights on the schema nothing can be looked at there, and that is said as well.
    s.run(&format!("revoke execute on all functions in schema posthouse from {role}")).await;
    let diagnosis = diagnose(&url, &Examination::default()).await;
    let unseen: Vec<_> = diagnosis.findings.iter().filter(|f| f.what.contains("not looked at")).collect();
    assert!(unseen.len() == 6 && unseen.iter().all(|f| f.why.contains("posthouse_operate")), "{diagnosis:?}");
    s.run(&format!("drop owned by {role}; drop role {role}")).await;
}

#[tokio::test]
async fn prepared_transactions_slots_and_standbys_are_named() {
    let settings = [("wal_level", "logical"), ("max_prepared_transactions", "5")];
    let cluster = tokio::task::spawn_blocking(move || TestCluster::dedicated(&settings)).await.unwrap();
    let database = database_on(&cluster).await;
    let (url, client) = (database.url(), database.connect().await);
    let run = async |sql: &str| client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{e:?} in: {sql}"));

    run("begin; update posthouse.queue set name = name; select txid_current(); prepare transaction 'it''s lost'").await;
    let finding = awaited(url, "horizon", "prepared it's lost").await;
    assert!(
        finding.what.contains("prepared transaction 'it''s lost'") && finding.why.contains("survives restarts"),
        "{finding:?}"
    );
    run(statement(&finding)).await;
    finds_nothing(url, "horizon").await;

    run("select pg_create_physical_replication_slot('backup', true); select pg_switch_wal()").await;
    let finding = awaited(url, "slots", "slot backup").await;
    assert!(
        finding.severity == Severity::Bad && finding.what.contains("used by nobody") && finding.what.contains("of WAL"),
        "{finding:?}"
    );
    run(statement(&finding).split(';').next().unwrap()).await;
    run("select pg_create_logical_replication_slot('feed', 'pgoutput')").await;
    run("select txid_current()").await;
    let finding = awaited(url, "slots", "slot feed").await;
    assert!(finding.what.contains("holds back the catalogues of the last"), "{finding:?}");
    run(statement(&finding).split(';').next().unwrap()).await;
    finds_nothing(url, "slots").await;

    let standby = Standby::start(url, &client, None).await;
    let finding = awaited(url, "standbys", "standby faraway").await;
    assert!(finding.what.contains("by its feedback") && finding.why.contains("dead rows"), "{finding:?}");
    drop(standby);
    finds_nothing(url, "standbys").await;
    // With a slot of its own it goes on holding back when it is away.
    run("select pg_create_physical_replication_slot('faraway')").await;
    let standby = Standby::start(url, &client, Some("faraway")).await;
    let finding = awaited(url, "slots", "slot faraway").await;
    assert!(
        finding.what.contains("holds back the rows of the last") && finding.what.contains("in use by pid"),
        "{finding:?}"
    );
    assert_eq!(finding.severity, Severity::Warning);
    drop(standby);
    wait_until(SOON, "nobody uses the slot", async || {
        awaited(url, "slots", "slot faraway").await.what.contains("used by nobody")
    })
    .await;
}

/// A standby, as far as its server can tell: it asks for the WAL, and says from which transaction on it needs the rows.
struct Standby {
    _stream: TcpStream,
}

impl Standby {
    async fn start(url: &str, client: &Client, slot: Option<&str>) -> Self {
        let one = async |sql: &str| client.query_one(sql, &[]).await.unwrap().get::<_, String>(0);
        // It knows no password.
        let hba = one("select current_setting('hba_file')").await;
        std::fs::write(hba, "host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n").unwrap();
        client.batch_execute("select pg_reload_conf()").await.unwrap();
        let rules = "select (count(*) = 2 and bool_and(auth_method = 'trust'))::text from pg_hba_file_rules";
        wait_until(SOON, "the rules are read", async || one(rules).await == "true").await;
        let config: tokio_postgres::Config = url.parse().unwrap();
        let (port, user) = (config.get_ports()[0], config.get_user().unwrap());
        let startup = format!("user\0{user}\0replication\0true\0application_name\0faraway\0\0");
        let mut hello = 196_608_u32.to_be_bytes().to_vec();
        hello.extend(startup.as_bytes());
        let mut stream = loop {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            stream.write_all(&[&(hello.len() as u32 + 4).to_be_bytes()[..], &hello].concat()).await.unwrap();
            // The rules may not have come to every process of the server yet.
            if until(&mut stream, b'Z').await {
                break stream;
            }
        };
        // Beyond what is flushed nothing is sent, but an error.
        let lsn = one("select pg_current_wal_flush_lsn()::text").await;
        let slot = slot.map(|slot| format!("SLOT {slot} ")).unwrap_or_default();
        send(&mut stream, b'Q', format!("START_REPLICATION {slot}PHYSICAL {lsn}\0").as_bytes()).await;
        assert!(until(&mut stream, b'W').await, "replication does not start");
        let xmin: u32 = one("select txid_snapshot_xmin(txid_current_snapshot())::text").await.parse().unwrap();
        let mut feedback = vec![b'h'];
        feedback.extend([0; 8]);
        feedback.extend(xmin.to_be_bytes());
        feedback.extend([0; 12]);
        send(&mut stream, b'd', &feedback).await;
        for _ in 0..3 {
            client.batch_execute("select txid_current()").await.unwrap();
        }
        Self { _stream: stream }
    }
}

async fn send(stream: &mut TcpStream, kind: u8, body: &[u8]) {
    let mut message = vec![kind];
    message.extend((body.len() as u32 + 4).to_be_bytes());
    message.extend(body);
    stream.write_all(&message).await.unwrap();
}

/// Reads messages until one of this kind. False: an error came, or the end.
async fn until(stream: &mut TcpStream, kind: u8) -> bool {
    loop {
        let Ok(next) = stream.read_u8().await else { return false };
        let length = stream.read_u32().await.unwrap();
        let mut body = vec![0; length as usize - 4];
        stream.read_exact(&mut body).await.unwrap();
        match next {
            _ if next == kind => return true,
            b'E' => return false,
            _ => {}
        }
    }
}
