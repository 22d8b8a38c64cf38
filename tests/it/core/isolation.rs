//! Isolation: every function, view and table is decided on; tenants who log in to Postgres see and touch their own only,
//! whatever they try; each role can do what it is for. Roles belong to the whole server, so logins have names of their own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::poll_fn;
use posthouse::store::{Database, GateLimits, Isolation, JobFilter, Selection, isolate, isolate_telling, migrate};
use posthouse::testing::TestDatabase;
use posthouse::{JobError, NewJob, Outcome, Posthouse};
use serde_json::{Value, json};
use tokio_postgres::error::DbError;
use tokio_postgres::{AsyncMessage, NoTls};

use super::support::Session;
use crate::harness::{SOON, wait_until};
use crate::worker_support::{Background, worker_at};

/// Functions for the owner alone, by file. A new one belongs here, or into `posthouse.rights()` and the table of docs/isolation.md.
const INTERNAL: &[&str] = &[
    // 00_common
    "check_name check_isolation cap_text clean_json backoff hold_lane naps wake_lane lane_for common_floor floor_of notify_queue is_alone notify_lanes",
    // 10_enqueue, 12_dedupe, 13_depth, 14_origin
    "check_job survey take_keys parse_jobs check_jobs check_tokens asked_gates canonical_json payload_hash payload_key check_dedupe follow_up
     follow_missed take_held_key take_key_of_batch replace_held refuse_held replace_job mark_behind is_limited mark_limited count_waiting
     count_depths note_depth check_depth depth_of origin_now copy_reason check_origin",
    // 15_gates, 16_admit, 37_settle_gates, 38_admit_calls
    "estimate_tokens check_gate hold_gates check_gates gates_of gates_named wake_lanes wake_blocked wake_endpoint count_running below_at block_lanes pass_on book_gates counted free_gates gate_room gated_jobs
     gates_open_at hold_counts is_held_back look_at_gates models_instead settle_gates take_gated take_gated_part make_shares wake_gate wake_missed weigh_lanes
     serial_value serial_next serial_held first_due free_serial serial_waits is_probed pass_on counts_attempt true_up with_spent",
    // 20_claim
    "lane_quotas take_jobs claimed_jobs next_priority oldest_lane claim_level keep_awake rest_lane",
    // 30_settle
    "storable_value storable cap_json free_keys gather_errors settle_done attempt_job archive_job record_error bury_job requeue_job settle_other
     number_of settled_before done_outcomes done_behind_gates is_attempt bare_jobs drop_payloads",
    // 35_usage
    "usage_figures usage_numbers record_usage fold_usage",
    // 40_lease
    "take_back lost_text take_back_claim",
    // 50_operate, 51_filter, 52_dead_letters, 55_explain
    "revive_cancelled pick_jobs who_asks note_redriven check_changes change_payload changed_lane redrive_batch move_dead dead_filter forget_redrives held_by",
    // 60_sweep, 70_retention
    "due_in is_due take_sweep sweep_part oldest_writer advance_floors rescue_stragglers fold settle_unrecorded forget",
    // 70_retention, 71_partitions, 73_expiry
    "shortest_retention cut_slices survey_slice delete_expired is_open visit_slice survey_slices expire partition_of make_range make_partitions house bring_home
     partitions_ahead is_over holders lasting_holders spare_payloads detach_range drop_detached finish_detaches analyze_parents",
    // 72_schedules
    "check_schedule refuse_unknown_schedule jitter_of",
    // 75_alerts
    "alert_text fold_alert quiet_of is_about_webhook tell_alert fold_dead_letters tell_alerts hold_alerts watch_workers oldest_due_job watch_age watch",
    // 77_doctor
    "doctor_setting doctor_ids",
    // 78_gauges
    "queue_labels sample_percent count_queues running_by_queue oldest_by_queue gauge_fleet gauge_database count_gauges",
    // 80_isolation
    "is_isolated rights is_trusted refuse_stranger check_enqueue check_job_login bind_login unbind_login row_rule role_list isolation_steps
     isolation_end_steps run_steps isolate end_isolation",
];

const ROLES: [&str; 4] = ["enqueue", "worker", "read", "operate"];

/// A database where isolation is on, and who logs in to it.
struct World {
    database: TestDatabase,
    /// A superuser.
    admin: Session,
    /// Sets the logins of this test apart from those of others.
    mark: String,
    /// Who owns the schema: a superuser or a plain role.
    owner_url: String,
}

impl World {
    /// The schema, owned by a superuser or by a plain role; isolation is off.
    async fn open(plain_owner: bool) -> Self {
        let database = TestDatabase::new("select 1", async |_: &str| Ok::<(), posthouse::Error>(())).await;
        let admin = session(database.url()).await;
        let mark = uuid::Uuid::new_v4().simple().to_string();
        let mut world = Self { owner_url: database.url().to_owned(), database, admin, mark };
        if plain_owner {
            world.login("owner", &[], "").await;
            let name: String = world.admin.get("select current_database()::text").await;
            world.admin.run(&format!("alter database {name} owner to {}", world.name("owner"))).await;
            world.owner_url = world.url("owner");
        }
        Posthouse::migrate(&world.owner_url).await.unwrap();
        world
    }

    /// The same with isolation on, and a login of each sort.
    async fn new(plain_owner: bool) -> Self {
        let world = Self::open(plain_owner).await;
        world.isolate(false).await;
        let tenant = ["posthouse_enqueue", "posthouse_read"];
        world.login("acme", &tenant, "'acme'").await;
        world.login("bolt", &tenant, "'bolt'").await;
        world.login("nobody", &tenant, "").await;
        world.login("backend", &tenant, "every_tenant => true").await;
        world.login("workers", &["posthouse_worker"], "").await;
        world.login("people", &["posthouse_operate"], "").await;
        world
    }

    async fn isolate(&self, undo: bool) -> Isolation {
        isolate(&Database::new(self.database.url()).unwrap(), undo, false).await.unwrap()
    }

    fn name(&self, login: &str) -> String {
        format!("{login}_{}", self.mark)
    }

    async fn login(&self, login: &str, roles: &[&str], binding: &str) {
        let name = self.name(login);
        self.admin.run(&format!("create role {name} login password 'sesame'")).await;
        for role in roles {
            self.admin.run(&format!("grant {role} to {name}")).await;
        }
        if !binding.is_empty() {
            self.admin.run(&format!("select posthouse.bind_login('{name}', {binding})")).await;
        }
    }

    fn url(&self, login: &str) -> String {
        let (_, server) = self.database.url().rsplit_once('@').unwrap();
        format!("postgres://{}:sesame@{server}", self.name(login))
    }

    async fn session(&self, login: &str) -> Session {
        session(&self.url(login)).await
    }

    /// Remove what belongs to the server and not to the database.
    async fn end(self) {
        let roles: Vec<String> =
            self.admin.list(&format!("select rolname::text from pg_roles where rolname like '%{}'", self.mark)).await;
        for role in roles {
            self.admin
                .run(&format!("reassign owned by {role} to current_user; drop owned by {role}; drop role {role}"))
                .await;
        }
    }

    /// Jobs of a tenant in every home, each with his secret in all that can hold one. The answer is their ids by what they became.
    async fn fill(&self, tenant: &str) -> BTreeMap<&'static str, i64> {
        let (people, backend, workers) =
            (self.session("people").await, self.session("backend").await, self.session("workers").await);
        people.run("select posthouse.set_queue('bare', '0')").await;
        let mut ids = BTreeMap::new();
        for (what, queue) in [
            ("done", "q"),
            ("cancelled", "q"),
            ("failed", "q"),
            ("retried", "q"),
            ("running", "q"),
            ("tombstone", "bare"),
        ] {
            let arguments = format!(
                "kind => 'k', queue => '{queue}', tenant => '{tenant}', payload => '\"{tenant}-secret\"', dedupe_key => '{what}'"
            );
            ids.insert(what, backend.enqueue(&arguments).await);
        }
        let worker = workers.worker_of(&["q", "bare"], &["k"], 600_000).await;
        let claimed = worker.claim(&workers, 100).await;
        assert_eq!(claimed.len(), ids.len(), "{claimed:?}");
        let secret = format!("{tenant}-secret");
        for job in &claimed {
            let (what, _) = ids.iter().find(|(_, id)| **id == job.id).unwrap();
            let own = json!({ "id": job.id, "fence": job.fence, "usage": { "model": secret, "input_tokens": 7 } });
            let outcome = match *what {
                "running" => {
                    let progress = format!(
                        "select posthouse.progress('{}', {}, {}, '\"{secret}\"')",
                        worker.id, job.id, job.fence
                    );
                    assert!(workers.get::<bool>(&progress).await);
                    continue;
                }
                "failed" => {
                    json!({ "outcome": "fail", "error": { "class": "c", "message": secret, "detail": secret } })
                }
                "retried" => {
                    json!({ "outcome": "retry", "delay_ms": 3_600_000, "error": { "class": "c", "message": secret } })
                }
                "cancelled" => json!({ "outcome": "cancelled", "result": secret }),
                _ => json!({ "outcome": "done", "result": secret }),
            };
            let mut whole = own.as_object().unwrap().clone();
            whole.extend(outcome.as_object().unwrap().clone());
            let verdicts = workers.settle(worker.id, &json!([whole])).await;
            assert_eq!(verdicts[0].1, "applied", "{verdicts:?}");
        }
        let waiting =
            format!("kind => 'k', queue => 'q', tenant => '{tenant}', payload => '\"{secret}\"', delay => '1 hour'");
        ids.insert("queued", backend.enqueue(&waiting).await);
        ids
    }
}

async fn session(url: &str) -> Session {
    hearing(url).await.0
}

/// A session, and all that the server says beside answers.
async fn hearing(url: &str) -> (Session, Arc<Mutex<Vec<String>>>) {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hears = heard.clone();
    tokio::spawn(async move {
        let mut messages = poll_fn(move |cx| connection.poll_message(cx));
        while let Some(Ok(message)) = messages.next().await {
            hears.lock().unwrap().extend(match message {
                AsyncMessage::Notice(notice) => Some(notice.message().to_owned()),
                AsyncMessage::Notification(n) => Some(format!("{}: {}", n.channel(), n.payload())),
                _ => None,
            });
        }
    });
    let pid = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    (Session { client, pid }, heard)
}

impl Session {
    /// Everything that Postgres says when it refuses.
    async fn error(&self, sql: &str) -> DbError {
        match self.client.query(sql, &[]).await {
            Ok(rows) => panic!("not refused, {} rows: {sql:.300}", rows.len()),
            Err(error) => error.as_db_error().unwrap_or_else(|| panic!("{error:?}")).clone(),
        }
    }

    /// What of schema posthouse a role of this server may call (functions) or select (tables and views).
    async fn may(&self, role: &str) -> BTreeSet<String> {
        let sql = format!(
            "select p.proname::text from pg_catalog.pg_proc p where p.pronamespace = 'posthouse'::regnamespace and has_function_privilege('{role}', p.oid, 'execute')
             union all
             select c.relname::text from pg_catalog.pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p', 'v')
               and has_table_privilege('{role}', c.oid, 'select')"
        );
        self.list::<String>(&sql).await.into_iter().collect()
    }
}

/// The table of docs/isolation.md: who may use what.
fn documented() -> BTreeMap<String, BTreeSet<&'static str>> {
    let docs = include_str!("../../../docs/isolation.md");
    let mut rights = BTreeMap::new();
    for line in docs.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let roles: BTreeSet<_> =
            ROLES.iter().zip(&cells[2..]).filter(|(_, cell)| **cell == "yes").map(|(role, _)| *role).collect();
        for name in cells[1].split(", ") {
            let before = rights.insert(name.trim_matches('`').to_owned(), roles.clone());
            assert!(before.is_none(), "{name} stands twice in docs/isolation.md");
        }
    }
    rights
}

#[tokio::test]
async fn everything_is_decided_on_and_each_role_has_what_is_on_its_list() {
    let world = World::new(true).await;
    let s = &world.admin;
    let functions: BTreeSet<String> = s
        .list("select proname::text from pg_proc where pronamespace = 'posthouse'::regnamespace")
        .await
        .into_iter()
        .collect();
    let views: BTreeSet<String> = s
        .list("select relname::text from pg_class where relnamespace = 'posthouse'::regnamespace and relkind in ('v', 'm')")
        .await
        .into_iter()
        .collect();
    let documented = documented();
    let internal: BTreeSet<&str> = INTERNAL.iter().flat_map(|names| names.split_whitespace()).collect();
    let undecided: Vec<_> = functions
        .iter()
        .chain(&views)
        .filter(|name| documented.contains_key(*name) == internal.contains(name.as_str()))
        .collect();
    assert!(
        undecided.is_empty(),
        "nobody decided who may use {undecided:?}: put each either into posthouse.rights() (sql/functions/80_isolation.sql) and the table \
         of docs/isolation.md, or, if it is for the owner alone, into INTERNAL of this test (functions only)"
    );
    for role in ROLES {
        let listed: BTreeSet<String> = s
            .list(&format!("select name from posthouse.rights() where '{role}' = any(roles)"))
            .await
            .into_iter()
            .collect();
        let told: BTreeSet<String> =
            documented.iter().filter(|(_, roles)| roles.contains(role)).map(|(name, _)| name.clone()).collect();
        assert_eq!(listed, told, "posthouse.rights() and docs/isolation.md disagree about {role}");
        let may = s.may(&format!("posthouse_{role}")).await;
        let unlisted: Vec<_> = may.difference(&listed).collect();
        assert!(unlisted.is_empty(), "{role} may use {unlisted:?}");
        // Some of the list may belong to a later schema.
        let missing: Vec<_> =
            listed.difference(&may).filter(|name| functions.contains(*name) || views.contains(*name)).collect();
        assert!(missing.is_empty(), "{role} may not use {missing:?}");
        let more: Vec<String> = s
            .list(&format!(
                "select c.oid::regclass::text from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
                   and (c.relkind <> 'S' and has_table_privilege('posthouse_{role}', c.oid, 'insert, update, delete, truncate, references, trigger')
                        or case when c.relkind = 'S' then has_sequence_privilege('posthouse_{role}', c.oid, 'usage, select, update') end)"
            ))
            .await;
        assert!(more.is_empty(), "{role} may write {more:?}");
        assert!(
            !s.get::<bool>(&format!("select has_schema_privilege('posthouse_{role}', 'posthouse', 'create')")).await
        );
    }
    // A login without a role may use nothing, and every table is under row level security.
    world.login("stranger", &[], "").await;
    assert!(s.may(&world.name("stranger")).await.is_empty());
    let open: Vec<String> = s
        .list(
            "select c.oid::regclass::text from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p')
             and not (c.relrowsecurity and (c.relforcerowsecurity or c.relispartition))",
        )
        .await;
    assert!(open.is_empty(), "{open:?}");
    // Functions that run as their owner, whose caller is not asked who he is, are on the lists of roles for all tenants only.
    let unasked: Vec<String> = s
        .list(
            "select p.proname::text from pg_proc p join posthouse.rights() r on r.name = p.proname and r.runs = 'owner'
             where p.pronamespace = 'posthouse'::regnamespace and p.prosrc !~ 'session_user|own_tenant' and r.roles && array['enqueue', 'read']",
        )
        .await;
    assert!(unasked.is_empty(), "{unasked:?} run as the owner for any tenant, and do not ask whose session it is");
    world.end().await;
}

/// What a tenant's session must not learn, and how it tries.
struct Siege<'a> {
    world: &'a World,
    tenant: Session,
    heard: Arc<Mutex<Vec<String>>>,
    theirs: &'a BTreeMap<&'static str, i64>,
}

impl Siege<'_> {
    /// Every way to read every view and table that there is, and to have its rows seen by a function of one's own that claims
    /// to cost nothing.
    async fn reads(&self) {
        let s = &self.tenant;
        s.run(
            "create function pg_temp.leak(value text) returns boolean cost 0.0000000001 language plpgsql as
             $$ begin raise notice 'leaked %', value; return true; end $$;
             create function pg_temp.trip(value text) returns boolean cost 0.0000000001 language plpgsql as
             $$ begin return 1 / (case when value like '%bolt%' then 0 else 1 end) = 1; end $$",
        )
        .await;
        let readable: Vec<(String, String)> = s
            .rows(
                "select c.relname::text, a.attname::text from pg_catalog.pg_class c join pg_catalog.pg_attribute a on a.attrelid = c.oid
                 where c.relnamespace = 'posthouse'::regnamespace and a.attnum > 0 and not a.attisdropped and has_table_privilege(c.oid, 'select')",
            )
            .await
            .iter()
            .map(|row| (row.get(0), row.get(1)))
            .collect();
        let tables: BTreeSet<&String> = readable.iter().map(|(table, _)| table).collect();
        for view in ["jobs", "queue_health", "workers", "job", "dead_letter"] {
            assert!(tables.contains(&view.to_owned()), "{view} is not tried");
        }
        let ids: BTreeSet<i64> = self.theirs.values().copied().collect();
        for table in tables {
            for row in s.list::<Value>(&format!("select to_jsonb(x) from posthouse.{table} x")).await {
                assert!(!row.to_string().contains("bolt"), "{table}: {row}");
                for id in ["id", "job_id"] {
                    let shown = row.get(id).and_then(Value::as_i64);
                    assert!(table.as_str() == "lane" || shown.is_none_or(|id| !ids.contains(&id)), "{table}: {row}");
                }
            }
        }
        for (table, column) in &readable {
            for sql in [
                format!("select count(*) from posthouse.{table} x where pg_temp.leak(x.{column}::text)"),
                format!("select count(*) from posthouse.{table} x where pg_temp.trip(x.{column}::text)"),
                format!(
                    "select 1 from posthouse.{table} x where pg_temp.leak(x.{column}::text) order by pg_temp.trip(x.{column}::text) limit 3"
                ),
                format!(
                    "select pg_temp.leak(max(x.{column}::text)) from posthouse.{table} x group by x.{column}::text having pg_temp.trip(x.{column}::text)"
                ),
                format!(
                    "select count(*) from posthouse.{table} x join posthouse.{table} y on pg_temp.leak(x.{column}::text || y.{column}::text)"
                ),
            ] {
                s.rows(&sql).await;
            }
        }
        let heard = self.heard.lock().unwrap();
        assert!(
            heard.iter().any(|text| text.contains("leaked") && text.contains("acme-secret")),
            "the function was not called"
        );
        let leaked: Vec<_> = heard.iter().filter(|text| text.contains("bolt")).collect();
        assert!(leaked.is_empty(), "{leaked:?}");
    }

    /// Every function that the tenant may call, with what belongs to somebody else.
    #[expect(clippy::too_many_lines, reason = "one function, one way to abuse it")]
    async fn calls(&self) {
        let s = &self.tenant;
        let worker: String = self
            .world
            .admin
            .get("select worker::text from posthouse.job where state = 'running' order by id desc limit 1")
            .await;
        let mine = s.may(&self.world.name("acme")).await;
        let functions: Vec<String> = s
            .list("select proname::text from pg_catalog.pg_proc where pronamespace = 'posthouse'::regnamespace and has_function_privilege(oid, 'execute')")
            .await;
        for function in functions {
            assert!(mine.contains(&function));
            match function.as_str() {
                "cancel" | "explain" => {
                    for id in self.theirs.values() {
                        // Word for word what is said of a job that does not exist, and nothing is locked.
                        s.run("begin; savepoint before").await;
                        let theirs = s.error(&format!("select posthouse.{function}({id})")).await;
                        s.run("rollback to before").await;
                        self.world
                            .admin
                            .run(&format!("begin; select from posthouse.job where id = {id} for update nowait; commit"))
                            .await;
                        let none = s.error(&format!("select posthouse.{function}(123456789)")).await;
                        s.run("rollback").await;
                        let text = |e: &DbError, id: i64| {
                            format!("{:?} {:?} {e}", e.code(), e.where_()).replace(&format!("job {id}:"), "job ID:")
                        };
                        assert_eq!(text(&theirs, *id), text(&none, 123_456_789));
                        assert_eq!(theirs.code().code(), "PH003");
                    }
                }
                "enqueue" => {
                    for more in ["", ", dedupe_key => 'done'", ", delay => '1 hour'"] {
                        let sql = format!("select posthouse.enqueue('k', queue => 'q', tenant => 'bolt'{more})");
                        assert_eq!(s.error(&sql).await.code().code(), "42501", "{sql}");
                    }
                    for sql in [
                        "select posthouse.enqueue('k')",
                        "select posthouse.enqueue('posthouse.webhook', tenant => 'acme')",
                        "select posthouse.enqueue('k', tenant => '*')",
                    ] {
                        assert_eq!(s.error(sql).await.code().code(), "42501", "{sql}");
                    }
                    assert_eq!(s.error("select posthouse.enqueue('k', tenant => null)").await.code().code(), "PH001");
                }
                "enqueue_many" => {
                    for jobs in [
                        json!([{"kind": "k", "tenant": "acme"}, {"kind": "k", "tenant": "bolt"}]),
                        json!([{"kind": "k"}]),
                        json!([{"kind": "k", "tenant": "acme", "priority": 1}, {"kind": "posthouse.webhook", "tenant": "acme"}]),
                    ] {
                        assert_eq!(
                            s.error(&format!("select posthouse.enqueue_many('{jobs}')")).await.code().code(),
                            "42501",
                            "{jobs}"
                        );
                    }
                }
                "enqueue_plain" => {
                    for jobs in [
                        "'k', 'bolts own', 'bolt', 0, array['1']",
                        "'k', 'bolts own', 'bolt', 0, array['1', '2']",
                        "'k', 'q', null, 0, array['1', '2']",
                        "'posthouse.webhook', 'q', 'acme', 0, array['1']",
                    ] {
                        let error = s.error(&format!("select posthouse.enqueue_plain({jobs}::jsonb[])")).await;
                        assert_eq!(error.code().code(), "42501", "{jobs}");
                    }
                }
                "state_of" => {
                    for id in self.theirs.values() {
                        assert_eq!(s.get::<Option<String>>(&format!("select posthouse.state_of({id})")).await, None);
                    }
                }
                "sees_job" => {
                    for id in self.theirs.values() {
                        assert!(!s.get::<bool>(&format!("select posthouse.sees_job({id})")).await);
                    }
                }
                "running_jobs" => assert_eq!(s.count(&format!("posthouse.running_jobs('{worker}', 0)")).await, 0),
                "dead_letters" => {
                    for filter in [r#"{"tenant": "bolt"}"#, r#"{"queue": "bolts own"}"#] {
                        assert_eq!(s.count(&format!("posthouse.dead_letters('{filter}')")).await, 0, "{filter}");
                    }
                    let seen = s.list::<i64>("select id from posthouse.dead_letters()").await;
                    assert!(!seen.is_empty() && seen.iter().all(|id| !self.theirs.values().any(|theirs| theirs == id)));
                }
                // They look at what they are given, and at nothing else.
                "parse_filter" | "check_batch" => {}
                "unserved_kinds" => {
                    assert_eq!(s.get::<Vec<String>>("select posthouse.unserved_kinds('q', 'bolt')").await, [""; 0])
                }
                "sees_queue" => assert!(!s.get::<bool>("select posthouse.sees_queue('bolts own')").await),
                "own_lanes" => {
                    let lanes = s.get::<Vec<i64>>("select posthouse.own_lanes()").await;
                    let owners =
                        format!("select distinct tenant from posthouse.lane where id = any('{{{}}}')", join(&lanes));
                    assert_eq!(self.world.admin.list::<String>(&owners).await, ["acme"]);
                }
                "own_tenant" => assert_eq!(s.get::<String>("select posthouse.own_tenant()").await, "acme"),
                // It counts jobs of all.
                "backlog" => assert_eq!(s.error("select posthouse.backlog('q')").await.code().code(), "42501"),
                "sees_all" => assert!(!s.get::<bool>("select posthouse.sees_all()").await),
                // They look at their arguments and nothing else.
                "lease_end" | "sum_since" => {}
                "retention_of" => {
                    let sql = "select posthouse.retention_of('bolts own', 'done')::text";
                    self.world.admin.run("select posthouse.set_queue('bolts own', '9 days')").await;
                    assert_eq!(self.world.admin.get::<String>(sql).await, "9 days");
                    assert_eq!(s.get::<Option<String>>(sql).await, None);
                }
                other => panic!("a tenant may call {other}: add how it could be abused to this test"),
            }
        }
        for sql in [
            "select posthouse.bind_login(session_user, 'bolt')",
            "select posthouse.claim(gen_random_uuid(), 1, 1)",
            "select posthouse.set_queue('q', '0')",
            "select posthouse.retry(1)",
            "select posthouse.isolate()",
            "select posthouse.end_isolation()",
            "select nextval('posthouse.job_id_seq')",
            "select * from posthouse.tenant_login",
            "select * from posthouse.payload",
            "select * from posthouse.archive_0",
            "insert into posthouse.tenant_login values (session_user, 'bolt')",
            "update posthouse.job set state = 'done'",
            "delete from posthouse.tenants",
            "update posthouse.workers set host = 'x'",
            "create trigger t before insert on posthouse.job for each row execute function suppress_redundant_updates_trigger()",
            "create view posthouse.mine as select 1",
            "alter view posthouse.jobs owner to current_user",
            "select from posthouse.job for update",
            "set role posthouse_views",
            &format!("set session authorization {}", self.world.name("bolt")),
        ] {
            assert_eq!(s.error(sql).await.code().code(), "42501", "{sql}");
        }
        let jobs = "select count(*) from posthouse.job j join posthouse.lane l on l.id = j.lane_id where l.tenant = 'bolt' and not j.cancel_asked";
        assert_eq!(self.world.admin.get::<i64>(jobs).await, 3, "queued, running, retried");
    }
}

fn join(ids: &[i64]) -> String {
    ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// Objects that a tenant may make, by the names of those that the functions use.
const SHADOWS: &str = "create temp table tenant_login (login name, tenant text, every_tenant boolean);
    insert into pg_temp.tenant_login values (session_user, 'bolt', true), (session_user, null, true);
    create temp table lane as select 1::bigint as id, 'bolt' as tenant;
    create temp table pg_class as select 1 as oid, false as relrowsecurity;
    create function pg_temp.sees_all() returns boolean language sql as 'select true';
    create function pg_temp.pg_has_role(name, name, text) returns boolean language sql as 'select true';
    create function pg_temp.same(name, name) returns boolean language sql as 'select true';
    create operator pg_temp.<> (leftarg = name, rightarg = name, function = pg_temp.same);
    create operator pg_temp.= (leftarg = name, rightarg = name, function = pg_temp.same);
    set search_path = pg_temp, posthouse, pg_catalog;
    set posthouse.tenant = 'bolt'; set row_security = on";

#[tokio::test]
async fn a_tenant_reaches_nothing_of_another_whatever_he_tries() {
    for plain_owner in [true, false] {
        let world = World::new(plain_owner).await;
        let (ours, theirs) = (world.fill("acme").await, world.fill("bolt").await);
        world.session("backend").await.enqueue("kind => 'k', queue => 'bolts own', tenant => 'bolt'").await;
        world
            .admin
            .run("delete from posthouse.job j using posthouse.lane l where l.id = j.lane_id and l.queue = 'bolts own'")
            .await;
        for shadows in ["", "set role posthouse_enqueue; set role posthouse_read; reset role", SHADOWS] {
            let (tenant, heard) = hearing(&world.url("acme")).await;
            tenant.run(shadows).await;
            let siege = Siege { world: &world, tenant, heard, theirs: &theirs };
            siege.reads().await;
            siege.calls().await;
        }
        // Without row security a query that needs it fails.
        let s = world.session("acme").await;
        s.run("set row_security = off").await;
        assert_eq!(s.error("select * from posthouse.jobs").await.code().code(), "42501");
        // As a role that it is a member of, a session is whose it was.
        s.run("set row_security = on; set role posthouse_enqueue").await;
        assert_eq!(s.error("select posthouse.enqueue('k', tenant => 'bolt')").await.code().code(), "42501");
        s.enqueue("kind => 'k', tenant => 'acme'").await;
        s.run("reset role").await;
        // His own he has in full.
        let seen: BTreeSet<i64> =
            s.list("select id from posthouse.jobs where queue <> 'default'").await.into_iter().collect();
        assert_eq!(seen, ours.values().copied().collect());
        let running = s.job(ours["running"]).await;
        assert_eq!((&running["payload"], &running["progress"]), (&json!("acme-secret"), &json!("acme-secret")));
        assert_eq!(s.job(ours["tombstone"]).await["result"], "acme-secret");
        assert_eq!(s.job(ours["failed"]).await["errors"][0]["detail"], "acme-secret");
        assert_eq!(s.job(ours["retried"]).await["errors"][0]["error"], "acme-secret");
        assert_eq!(s.get::<String>(&format!("select posthouse.cancel({})", ours["queued"])).await, "cancelled");
        assert_eq!(s.get::<String>(&format!("select posthouse.cancel({})", ours["running"])).await, "running");
        assert_eq!(s.get::<String>(&format!("select state from posthouse.explain({})", ours["done"])).await, "done");
        assert_eq!(s.get::<i64>("select count(*) from posthouse.queues where retention = '0'").await, 1);
        world.end().await;
    }
}

#[tokio::test]
async fn a_login_of_nobody_sees_no_rows_and_may_do_nothing() {
    let world = World::new(true).await;
    let ids = world.fill("bolt").await;
    let s = world.session("nobody").await;
    let tables: Vec<String> = s
        .list(
            "select relname::text from pg_class where relnamespace = 'posthouse'::regnamespace and has_table_privilege(oid, 'select')
             and relname not in ('meta', 'migration')",
        )
        .await;
    assert!(tables.len() > 8, "{tables:?}");
    for table in tables {
        assert_eq!(s.count(&format!("posthouse.{table}")).await, 0, "{table}");
    }
    for call in [
        "enqueue('k')",
        "enqueue('k', tenant => '')",
        "cancel(1)",
        "cancel(123456789)",
        "explain(1)",
        "enqueue_many('[{\"kind\": \"k\"}]')",
        "enqueue_plain('k', 'q', 'acme', 0, array['1']::jsonb[])",
    ] {
        let error = s.error(&format!("select posthouse.{call}")).await;
        assert_eq!(error.code().code(), "42501", "{call}: {error}");
        assert!(error.message().contains("belongs to no tenant"), "{error}");
    }
    assert_eq!(s.get::<Option<String>>(&format!("select posthouse.state_of({})", ids["done"])).await, None);
    // Once bound it sees; unbound it is nobody again.
    let name = world.name("nobody");
    world.admin.run(&format!("select posthouse.bind_login('{name}', 'bolt')")).await;
    assert_eq!(s.count("posthouse.jobs").await, 7);
    assert!(world.admin.get::<bool>(&format!("select posthouse.unbind_login('{name}')")).await);
    assert!(!world.admin.get::<bool>(&format!("select posthouse.unbind_login('{name}')")).await);
    assert_eq!(s.count("posthouse.jobs").await, 0);
    world.end().await;
}

#[tokio::test]
async fn what_listeners_hear_tells_nothing_of_a_tenant() {
    let world = World::new(true).await;
    let (s, heard) = hearing(&world.url("acme")).await;
    s.run("listen posthouse_wake; listen posthouse_cancel; listen posthouse_alert").await;
    let ids = world.fill("bolt").await;
    let (people, workers) = (world.session("people").await, world.session("workers").await);
    assert_eq!(people.get::<String>(&format!("select posthouse.cancel({})", ids["running"])).await, "running");
    people.run("select posthouse.test_alert()").await;
    wait_until(SOON, "all three channels are heard", async || {
        s.run("select 1").await;
        // The sweep tells of the dead letter.
        workers.run("select posthouse.tidy()").await;
        let heard = heard.lock().unwrap();
        let all = ["posthouse_wake", "posthouse_cancel", "posthouse_alert"];
        all.iter().all(|channel| heard.iter().any(|text| text.starts_with(channel)))
            && heard.iter().any(|text| text.contains("dead_letter"))
    })
    .await;
    for text in heard.lock().unwrap().iter() {
        let told = text.contains("bolt") || text.contains("secret") || text.contains("\"job\"") || text.contains("q/k");
        assert!(!told, "{text}");
    }
    world.end().await;
}

#[tokio::test]
async fn explain_tells_a_tenant_nothing_of_what_others_use() {
    let world = World::new(true).await;
    let (acme, people, workers) =
        (world.session("acme").await, world.session("people").await, world.session("workers").await);
    workers.worker_of(&["q"], &["k"], 600_000).await;
    let id = acme.enqueue("kind => 'k', queue => 'q', tenant => 'acme'").await;
    people.run("select posthouse.close_gate('queue:q', reason => 'bolt floods it')").await;
    let why = format!("select reason from posthouse.explain({id})");
    assert_eq!(acme.list::<String>(&why).await, ["a gate that it shares with others holds it back"]);
    assert!(
        people
            .get::<String>(&why)
            .await
            .contains("gate queue:q is closed by a person, until somebody opens it: bolt floods it")
    );
    people
        .run("select posthouse.open_gate('queue:q'); select posthouse.close_gate('tenant:acme', reason => 'unpaid')")
        .await;
    assert!(
        acme.get::<String>(&why)
            .await
            .contains("gate tenant:acme is closed by a person, until somebody opens it: unpaid")
    );
    assert_eq!(acme.count("posthouse.gates").await, 0);
    assert_eq!(people.count("posthouse.gates").await, 2);
    world.end().await;
}

#[tokio::test]
async fn dedupe_keys_of_tenants_are_apart() {
    let world = World::new(true).await;
    let (acme, bolt) = (world.session("acme").await, world.session("bolt").await);
    let (a, _, first) = acme.enqueued("kind => 'k', tenant => 'acme', dedupe_key => 'x'").await;
    let (b, _, second) = bolt.enqueued("kind => 'k', tenant => 'bolt', dedupe_key => 'x'").await;
    assert!(a != b && !first && !second);
    assert_eq!(bolt.enqueued("kind => 'k', tenant => 'bolt', dedupe_key => 'x'").await, (b, "queued".to_owned(), true));
    let many: (i64, bool) = {
        let rows = acme.rows("select id, duplicate from posthouse.enqueue_many('[{\"kind\": \"k\", \"tenant\": \"acme\", \"dedupe_key\": \"x\"}]')").await;
        (rows[0].get(0), rows[0].get(1))
    };
    assert_eq!(many, (a, true));
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_run_with_the_roles_meant_for_them() {
    for plain_owner in [true, false] {
        let world = World::new(plain_owner).await;
        let acme = Posthouse::connect(&world.url("acme")).await.unwrap();
        let people = Posthouse::connect(&world.url("people")).await.unwrap();
        let job = |kind: &str| NewJob::new(kind, &"x").unwrap();
        let done = acme.enqueue_job(job("k")).tenant("acme").await.unwrap().id;
        let dead = acme.enqueue_job(job("dies")).tenant("acme").await.unwrap().id;
        let refused = acme.enqueue_job(job("k")).tenant("bolt").await.unwrap_err();
        assert!(
            refused.sqlstate() == Some("42501") && refused.to_string().contains("Pass tenant => 'acme'"),
            "{refused}"
        );

        let worker = worker_at(&world.url("workers"))
            .handle_kind("k", async |_, _| Outcome::done(&"fine"))
            .handle_kind("dies", async |_, _| Outcome::fail(JobError::new("test", "no good")));
        let worker = Background::start(worker);
        let every = Duration::from_millis(50);
        let fine = tokio::time::timeout(SOON, acme.wait(done, every)).await.unwrap().unwrap();
        assert_eq!(fine.result_as::<String>().unwrap(), "fine");
        assert_eq!(tokio::time::timeout(SOON, acme.wait(dead, every)).await.unwrap().unwrap().state, "failed");

        for client in [&acme, &people] {
            assert_eq!(client.jobs(&JobFilter::default(), 10).await.unwrap().len(), 2);
            assert_eq!(client.health().await.unwrap().len(), 1);
            assert_eq!(client.states(&[done, dead]).await.unwrap().len(), 2);
            assert!(!client.explain(dead).await.unwrap().is_empty());
            client.queues().await.unwrap();
        }
        assert_eq!(acme.workers().await.unwrap().len(), 0);
        assert_eq!(people.workers().await.unwrap()[0].state, "live");
        let only = Selection { ids: Some(vec![dead]), ..Selection::default() };
        assert_eq!(acme.redrive(&only).await.unwrap_err().sqlstate(), Some("42501"));
        assert_eq!(people.redrive(&only).await.unwrap(), 1);
        people.set_retention("other", Some(Duration::ZERO)).await.unwrap();
        worker.end().await;

        // It compares gates with its file, and sets none.
        people.set_gate("crm", &GateLimits { max_running: Some(3), ..GateLimits::default() }).await.unwrap();
        let workers = Posthouse::connect(&world.url("workers")).await.unwrap();
        assert_eq!(workers.gates().await.unwrap()[0].name, "crm");
        let refused = workers.set_gate("crm", &GateLimits::default()).await.unwrap_err();
        assert_eq!(refused.sqlstate(), Some("42501"));
        // What a worker is not for.
        let s = world.session("workers").await;
        for sql in [
            "select posthouse.redrive()",
            "select posthouse.set_queue('q', '0')",
            "select posthouse.enqueue('k')",
            "select * from posthouse.jobs",
            "select posthouse.bind_login('x', 'y')",
        ] {
            assert_eq!(s.error(sql).await.code().code(), "42501", "{sql}");
        }
        world.end().await;
    }
}

/// Rights, owners and policies of everything in the schema.
const RIGHTS: &str = "
    select p.oid::regprocedure::text || ' ' || p.prosecdef || ' ' || p.proowner::regrole || coalesce((select string_agg(a::text, ' ' order by a::text) from unnest(p.proacl) a), '-')
    from pg_proc p where p.pronamespace = 'posthouse'::regnamespace
    union all
    select c.oid::regclass || ' ' || c.relrowsecurity || ' ' || c.relforcerowsecurity || ' ' || c.relowner::regrole
      || coalesce((select string_agg(a::text, ' ' order by a::text) from unnest(c.relacl) a where a::text not like c.relowner::regrole || '=%'), '-')
    from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p', 'v')
    union all
    select tablename || ' ' || policyname || ' ' || roles::text || ' ' || cmd || ' ' || qual from pg_policies where schemaname = 'posthouse'
    order by 1";

#[tokio::test]
async fn a_long_reader_holds_up_isolation_and_nobody_else() {
    let world = World::open(false).await;
    let reader = session(world.database.url()).await;
    reader.run("set application_name = 'report'; begin; select count(*) from posthouse.queue").await;
    let told = Arc::new(Mutex::new(Vec::new()));
    let (database, heard) = (Database::new(world.database.url()).unwrap(), told.clone());
    let isolating = tokio::spawn(async move {
        isolate_telling(&database, false, false, SOON, |_, blockers| {
            heard.lock().unwrap().extend(blockers.iter().map(ToString::to_string));
        })
        .await
    });
    wait_until(SOON, "it is told who is in the way", async || {
        told.lock().unwrap().iter().any(|who| who.contains("report, idle in transaction"))
    })
    .await;
    // Others wait no longer than one try takes.
    world.admin.run("set lock_timeout = '2s'").await;
    for _ in 0..20 {
        world.admin.run("select count(*) from posthouse.queue; select count(*) from posthouse.lane").await;
    }
    assert!(!isolating.is_finished());
    reader.run("commit").await;
    assert!(!isolating.await.unwrap().unwrap().was_on);
    // Patience may be over.
    reader.run("begin; select count(*) from posthouse.queue").await;
    let soon = Duration::from_millis(1);
    let error =
        isolate_telling(&Database::new(world.database.url()).unwrap(), true, false, soon, |_, _| ()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("isolation: no lock within 0 s") && text.contains("Nothing was changed"), "{text}");
}

#[tokio::test]
async fn rights_survive_migrations_and_go_away_with_it() {
    let world = World::open(true).await;
    let before: Vec<String> = world.admin.list(RIGHTS).await;
    assert!(!world.isolate(false).await.was_on);
    let on: Vec<String> = world.admin.list(RIGHTS).await;
    assert_ne!(before, on);
    // Again: nothing is made or locked anew.
    let again = world.isolate(false).await;
    assert!(
        again.was_on && again.statements.iter().all(|s| s.starts_with("grant ") || s.starts_with("revoke ")),
        "{again:?}"
    );
    assert_eq!(world.admin.list::<String>(RIGHTS).await, on);
    assert!(!again.owner_is_superuser && again.owner == world.name("owner"));

    // A migration by the plain owner, who may not make roles, with a function and a view that lost their rights, a new table, a
    // new partition, and a right given by hand.
    world.login("byhand", &[], "").await;
    let byhand = world.name("byhand");
    world
        .admin
        .run(&format!(
            "set role {owner}; drop function posthouse.cancel(bigint); drop view posthouse.queue_health;
             create table posthouse.later (tenant text); reset role;
             grant execute on function posthouse.claim to {byhand};
             update posthouse.meta set value = 'older' where name = 'functions'",
            owner = world.name("owner")
        ))
        .await;
    assert_ne!(world.admin.list::<String>(RIGHTS).await, on);
    migrate(&Database::new(&world.owner_url).unwrap()).await.unwrap();
    let mut renewed: Vec<String> = world.admin.list(RIGHTS).await;
    let later: Vec<String> = renewed.extract_if(.., |line| line.contains("later")).collect();
    assert_eq!(renewed, on);
    assert!(
        later.iter().any(|l| l.contains("later true true")) && later.iter().any(|l| l.contains("own_tenant")),
        "{later:?}"
    );
    world.session("owner").await.run("select posthouse.make_partitions(1000001)").await;
    assert!(
        world
            .admin
            .get::<bool>("select relrowsecurity from pg_class where oid = 'posthouse.payload_1000000'::regclass")
            .await
    );
    world.admin.run("drop table posthouse.later; drop table posthouse.payload_1000000, posthouse.archive_1000000; delete from posthouse.id_range where lower > 0").await;

    // The way back.
    world.isolate(true).await;
    assert_eq!(world.admin.list::<String>(RIGHTS).await, before);
    assert!(world.isolate(true).await.statements.iter().all(|s| s.starts_with("revoke ")));
    let owner = session(&world.owner_url).await;
    owner.enqueue("kind => 'k'").await;
    assert_eq!(owner.count("posthouse.jobs").await, 1);
    // Dry: told and not done.
    let target = Database::new(world.database.url()).unwrap();
    let dry = isolate(&target, false, true).await.unwrap();
    assert!(dry.statements.iter().any(|s| s.contains("row level security")) && !dry.was_on);
    assert_eq!(world.admin.list::<String>(RIGHTS).await, before);
    // By the owner himself, who must not become a superuser for it: the roles are there already, but for his place in posthouse_views.
    assert!(isolate(&Database::new(&world.owner_url).unwrap(), false, false).await.is_ok());
    assert_eq!(world.admin.list::<String>(RIGHTS).await, on);
    drop(owner);
    world.end().await;
}

#[tokio::test]
async fn logins_are_bound_with_care() {
    let world = World::new(false).await;
    let s = &world.admin;
    let bind = |arguments: &str| format!("select posthouse.bind_login({arguments})");
    for (arguments, complaint) in [
        ("'nobody at all', 'acme'".to_owned(), "there is no role"),
        ("null, 'acme'".to_owned(), "there is no role"),
        (format!("'{}'", world.name("nobody")), "give one of them"),
        (format!("'{}', 'acme', true", world.name("nobody")), "give one of them"),
        (format!("'{}', ''", world.name("nobody")), "tenant: must not be empty"),
        (format!("'{}', 'acme'", world.name("workers")), "rights over every tenant"),
        (format!("'{}', 'acme'", world.name("people")), "rights over every tenant"),
        ("current_user::name, 'acme'".to_owned(), "rights over every tenant"),
    ] {
        let refused = s.refused(&bind(&arguments)).await;
        assert!(refused.code == "PH001" && refused.message.contains(complaint), "{arguments}: {refused:?}");
    }
    // A role for all that was granted by mistake does not open views to a bound login; isolate tells of it.
    s.run(&format!("grant posthouse_operate to {}", world.name("acme"))).await;
    world.fill("bolt").await;
    assert_eq!(world.session("acme").await.count("posthouse.jobs").await, 0);
    assert_eq!(world.isolate(false).await.overpowered, [world.name("acme")]);
    world.end().await;
}
