//! The short way to enqueue gives what the general way gives: the same calls in two databases, each by one way, compared by what they
//! answer, by their errors, by what lies in the tables, and by who is told.

use super::enqueue::Listener;
use super::support::{Queue, Refusal, Session, refusal};

/// A database in which jobs come one way.
struct Side {
    _queue: Queue,
    s: Session,
    listener: Listener,
    /// Holds locks against the other session.
    other: Session,
    plain: bool,
}

/// Jobs, as SQL: kind, queue, tenant, priority, and how many there are with which payloads.
type Jobs<'a> = (&'a str, usize, &'a str);

impl Side {
    async fn new(plain: bool) -> Self {
        let (queue, s) = Queue::with_session().await;
        let (listener, other) = (Listener::new(&queue).await, queue.session().await);
        Self { _queue: queue, s, listener, other, plain }
    }

    /// How many jobs were enqueued, and whether their ids grow with their places; or the error.
    async fn enqueue(&self, (names, n, payloads): Jobs<'_>) -> Result<(usize, bool), Refusal> {
        let sql = match n {
            _ if self.plain => format!("select unnest(posthouse.enqueue_plain({names}, {payloads}::jsonb[]))"),
            1 => format!(
                "select e.id from (select {names}) n(kind, queue, tenant, priority), unnest({payloads}::jsonb[]) p
                 cross join lateral posthouse.enqueue(n.kind, p, n.queue, n.tenant, n.priority) e where not e.duplicate and e.state = 'queued'"
            ),
            _ => format!(
                "select e.id from posthouse.enqueue_many((
                   select coalesce(jsonb_agg(jsonb_build_object('kind', kind, 'queue', queue, 'tenant', tenant, 'priority', priority, 'payload', p)), '[]')
                   from (select {names}) n(kind, queue, tenant, priority), unnest({payloads}::jsonb[]) p)) e where not e.duplicate and e.state = 'queued'"
            ),
        };
        let rows = self.s.client.query(&sql, &[]).await.map_err(|error| refusal(&error))?;
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        Ok((ids.len(), ids.is_sorted()))
    }

    /// What is there, but for ids and times.
    async fn rows(&self) -> Vec<String> {
        self.s
            .list(
                "select concat_ws(' ', row_number() over (order by p.id), md5(p.payload::text), p.trace, to_jsonb(j) - array['id', 'lane_id', 'run_at', 'created_at'],
                   j.run_at - j.created_at between interval '-10 s' and interval '10 s',
                   to_jsonb(l) - array['id', 'ready_at', 'awake_until', 'blocked_by'], l.ready_at = 'infinity', l.blocked_by is not null,
                   (select count(*) from posthouse.lane t where t.queue = l.queue and t.tenant = l.tenant and t.kind = l.kind and t.id <= l.id))
                 from posthouse.payload p left join posthouse.job j on j.id = p.id left join posthouse.lane l on l.id = j.lane_id order by p.id",
            )
            .await
    }

    async fn told(&self) -> Vec<String> {
        let mut told = self.listener.told().await;
        told.sort();
        told
    }
}

/// What is done by the session before the jobs come, what by another one, which goes back afterwards, and what by the session in the end.
const SITUATIONS: [(&str, &str, &str); 12] = [
    ("", "", ""),
    ("", "", ""),
    // Asleep, soon after they were awake and long after; the other session wakes them at this moment.
    ("update posthouse.lane set ready_at = 'infinity', awake_until = now() - interval '1 minute'", "", ""),
    ("update posthouse.lane set ready_at = 'infinity', awake_until = now() - interval '1 day'", "", ""),
    (
        "update posthouse.lane set ready_at = 'infinity', awake_until = now() - interval '1 minute'",
        "begin; select from posthouse.lane for no key update",
        "",
    ),
    ("update posthouse.lane set ready_at = 'infinity', blocked_by = 1 where queue = 'q'", "", ""),
    // Workers are behind; and so they are while transactions go on.
    (
        "update posthouse.job set run_at = now() - interval '5 seconds' where state = 'queued' and lane_id % 2 = 0",
        "",
        "",
    ),
    ("begin; select pg_sleep(0.03)", "", "commit"),
    ("begin isolation level repeatable read; set local posthouse.notify = 'off'", "", "rollback"),
    ("select setval('posthouse.job_id_seq', (select max(upper) from posthouse.id_range) - 3)", "", ""),
    (
        "select posthouse.set_depth(queue => 'q', max_depth => 20); select posthouse.set_depth(queue => 'new 10', max_depth => 20)",
        "",
        "",
    ),
    (
        "select posthouse.set_depth(queue => 'q'); select posthouse.set_queue('q', null); select posthouse.set_serial_by('q', 'user')",
        "",
        "",
    ),
];

const JOBS: [Jobs<'static>; 18] = [
    // Subscripts that begin elsewhere.
    ("'odd', 'default', 'default', 0", 3, "'[2:4]={1,2,3}'"),
    ("'odd', 'default', 'default', 0", 3, "'[5:7]={1,null,3}'"),
    ("'k', 'default', 'default', 0", 1, "array['{\"n\": 1}']"),
    ("'k', 'default', 'default', 0", 3, "array['{\"n\": 1}', '\"text\"', '{\"n\": 1.50}']"),
    ("'k', 'default', 'default', 0", 1, "array['null']"),
    ("'k', 'default', 'default', 0", 2, "array['null', '1']"),
    ("'k', 'default', 'default', 0", 1, "array[null]"),
    ("'k', 'default', 'default', 0", 2, "array['7', null]"),
    ("'k', 'default', 'default', 0", 0, "'{}'"),
    ("'k', 'default', 'default', 0", 10_001, "array_fill('1'::jsonb, array[10001])"),
    ("'k', 'q', 't', 5", 1, "array['{\"user\": \"u\"}']"),
    ("'k', 'q', 't', 5", 12, "array_fill('{\"user\": \"u\"}'::jsonb, array[12])"),
    ("'llm.chat', 'default', 'default', 0", 1, "array['{\"model\": \"m\"}']"),
    ("'llm.chat', 'default', 'default', 0", 2, "array['{\"model\": \"m\"}', '{\"model\": 5}']"),
    ("'', 'default', 'default', 0", 1, "array['1']"),
    ("'k', repeat('q', 201), 'default', 0", 2, "array['1', '2']"),
    ("'k', 'default', 'default', null::int", 1, "array['1']"),
    ("'k', 'default', null, 0", 2, "array['1', '2']"),
];

#[tokio::test]
async fn the_short_way_gives_what_the_general_way_gives() {
    let (general, plain) = (Side::new(false).await, Side::new(true).await);
    for (n, (before, meanwhile, after)) in SITUATIONS.iter().enumerate() {
        for side in [&general, &plain] {
            // What came before is not due: it does not become what workers are behind with, however long this takes.
            side.s.run("update posthouse.job set run_at = now() + interval '1 minute'").await;
            side.s.run(before).await;
            side.other.run(meanwhile).await;
        }
        // Lanes that are not there yet, in queues where that means more or less.
        let queues = ["default", "q", &format!("new {n}")];
        let new: Vec<_> = queues.iter().map(|queue| format!("'new {n}', '{queue}', 't', 5")).collect();
        let many = [
            "array_fill('{\"user\": \"u\"}'::jsonb, array[22])",
            "array_fill('2'::jsonb, array[2])",
            "array['3', null]",
        ];
        let new = new.iter().flat_map(|names| many.iter().map(|payloads| (names.as_str(), 22, *payloads)));
        for jobs in JOBS.into_iter().chain(new) {
            let (mut answers, within) = (Vec::new(), !after.is_empty());
            for side in [&general, &plain] {
                side.s.run(if within { "savepoint before" } else { "" }).await;
                let answer = side.enqueue(jobs).await;
                side.s.run(if within && answer.is_err() { "rollback to before" } else { "" }).await;
                answers.push(answer);
            }
            assert_eq!(answers[0], answers[1], "situation {n}, {jobs:?}");
        }
        for side in [&general, &plain] {
            side.other.run("rollback").await;
            side.s.run(after).await;
        }
        assert_eq!(general.told().await, plain.told().await, "situation {n}");
        let (wanted, found) = (general.rows().await, plain.rows().await);
        for (wanted, found) in wanted.iter().zip(&found) {
            assert_eq!(wanted, found, "situation {n}");
        }
        assert_eq!(wanted.len(), found.len(), "situation {n}");
    }
}

/// Of the usual case it makes what it is for by itself.
#[tokio::test]
async fn the_general_way_is_for_what_is_not_usual() {
    let (_queue, s) = Queue::with_session().await;
    let call = |kind: &str, n: usize| {
        format!("select posthouse.enqueue_plain('{kind}', 'default', 'default', 0, array_fill('1'::jsonb, array[{n}]))")
    };
    s.run(&call("k", 1)).await;
    s.run("set track_functions = 'pl'; begin").await;
    let calls =
        "pg_stat_xact_user_functions where schemaname = 'posthouse' and funcname in ('enqueue', 'enqueue_many')";
    for n in [1, 2, 10_000] {
        s.run(&call("k", n)).await;
    }
    assert_eq!(s.count(calls).await, 0);
    s.run(&call("new", 1)).await;
    s.run(&call("newer", 2)).await;
    assert_eq!(s.count(calls).await, 2);
    s.run("rollback").await;
}

#[tokio::test]
async fn no_payloads_at_all_are_refused() {
    let (_queue, s) = Queue::with_session().await;
    let refusal = s.refused("select posthouse.enqueue_plain('k', 'default', 'default', 0, null)").await;
    assert_eq!((&*refusal.code, &*refusal.message), ("PH001", "payloads: must be an array of JSON values"));
}

#[tokio::test]
async fn ids_follow_one_another_also_where_a_lane_is_made() {
    let (_queue, s) = Queue::with_session().await;
    for (payloads, expected) in [("array['1']", "{1}"), ("array['1']", "{2}"), ("array['1', '2']", "{3,4}")] {
        let call = format!("select posthouse.enqueue_plain('k', 'default', 'default', 0, {payloads}::jsonb[])::text");
        assert_eq!(s.get::<String>(&call).await, expected);
    }
}
