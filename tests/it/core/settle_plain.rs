//! The short way to record that jobs are done gives what the general way gives: the same calls in two databases, each by one way,
//! compared by what they answer and by what lies in the tables.

use serde_json::{Value, json};
use uuid::Uuid;

use super::support::{Claimed, Queue, Session, Worker};

/// A database in which outcomes are recorded one way.
struct Side {
    _queue: Queue,
    s: Session,
    plain: bool,
}

/// What a job is done with: its result and its usage, null for none.
type Done<'a> = (i64, i64, &'a Value, &'a Value);

impl Side {
    async fn new(plain: bool) -> Self {
        let (queue, s) = Queue::with_session().await;
        Self { _queue: queue, s, plain }
    }

    /// The jobs that were not applied.
    async fn settle(&self, worker: Uuid, done: &[Done<'_>]) -> Vec<i64> {
        if self.plain {
            let all = |pick: fn(&Done<'_>) -> String| done.iter().map(pick).collect::<Vec<_>>().join(", ");
            let values = |pick: fn(&Done<'_>) -> Value| match done.iter().map(pick).all(|value| value.is_null()) {
                true => "null".to_owned(),
                false => {
                    let one = |value: Value| match value {
                        Value::Null => "null".to_owned(),
                        value => format!("'{value}'"),
                    };
                    format!("array[{}]::jsonb[]", done.iter().map(pick).map(one).collect::<Vec<_>>().join(", "))
                }
            };
            let call = format!(
                "select unnest(posthouse.settle_plain('{worker}', array[{}]::bigint[], array[{}]::int[], {}, {})) order by 1",
                all(|done| done.0.to_string()),
                all(|done| done.1.to_string()),
                values(|done| done.2.clone()),
                values(|done| done.3.clone()),
            );
            return self.s.list(&call).await;
        }
        let outcomes: Vec<_> = done
            .iter()
            .map(|(id, fence, result, usage)| {
                json!({"id": id, "fence": fence, "outcome": "done", "result": result, "usage": usage})
            })
            .collect();
        let verdicts = self.s.settle(worker, &json!(outcomes)).await;
        let mut missed: Vec<i64> = verdicts.into_iter().filter(|v| v.1 != "applied").filter_map(|v| v.0).collect();
        missed.sort_unstable();
        missed
    }

    /// What is there, but for times and workers.
    async fn rows(&self) -> Vec<String> {
        let mut rows = Vec::new();
        for (table, but) in [
            ("job", "'run_at', 'created_at', 'started_at', 'first_started_at', 'worker'"),
            ("archive", "'created_at', 'started_at', 'finished_at', 'worker', 'errors'"),
            ("tombstone", "'created_at', 'finished_at', 'worker'"),
            ("burial", "'buried_at'"),
            ("dedupe", "'expires_at'"),
            ("tally", "''"),
            ("usage", "''"),
            ("payload", "''"),
        ] {
            let sql =
                format!("select '{table} ' || (to_jsonb(t) - array[{but}])::text from posthouse.{table} t order by 1");
            rows.extend(self.s.list::<String>(&sql).await);
        }
        // Whatever second each claim was in.
        let sql = "select concat_ws(' ', 'gate_state', gate_id, member, seq, job_ids, fences, (select sum(r) from unnest(requests) r),
                     (select sum(t) from unnest(tokens) t)) from posthouse.gate_state order by 1";
        rows.extend(self.s.list::<String>(sql).await);
        rows
    }
}

/// What is done before the jobs come.
const SITUATIONS: [&str; 6] = [
    "",
    "select posthouse.set_gate('queue:default', max_running => 100, tokens_per_minute => 1000000)",
    "select posthouse.remove_gate('queue:default')",
    "select posthouse.set_queue('default', interval '0')",
    "select posthouse.set_queue('default', null); select posthouse.set_kind('k', drop_payload => true)",
    "select setval('posthouse.job_id_seq', (select max(upper) from posthouse.id_range) - 3)",
];

async fn jobs(s: &Session, round: usize) -> (Worker, Vec<Claimed>) {
    for n in 0..7 {
        s.enqueue(&format!(
            "kind => 'k', payload => '{n}', dedupe_key => nullif('{}', '')",
            if n == 3 { format!("key {round}") } else { String::new() }
        ))
        .await;
    }
    let worker = s.worker(&["k"]).await;
    // One of them has an error behind it.
    let first = worker.claim(s, 1).await;
    s.settle(worker.id, &json!([{"id": first[0].id, "fence": first[0].fence, "outcome": "retry", "delay_ms": 0, "error": {"class": "x", "message": "no"}}])).await;
    let mut taken = Vec::new();
    while taken.len() < 7 {
        taken.extend(worker.claim(s, 10).await);
    }
    taken.sort_by_key(|job| job.id);
    (worker, taken)
}

#[tokio::test]
async fn the_short_way_gives_what_the_general_way_gives() {
    let sides = [Side::new(false).await, Side::new(true).await];
    let (none, result) = (Value::Null, json!({"text": "yes", "n": 1.5}));
    let usage = json!({"requests": 1, "tokens_in": 10, "tokens_out": 5, "model": "m"});
    // Larger than what is kept whole.
    let large = json!({"requests": 1, "blob": (0..9_000).map(|n| format!("{n:x}")).collect::<Vec<_>>()});
    for (round, situation) in SITUATIONS.iter().enumerate() {
        let (mut answers, mut found) = (Vec::new(), Vec::new());
        for side in &sides {
            side.s.run(situation).await;
            let (worker, jobs) = jobs(&side.s, round).await;
            let stranger = side.s.worker(&["k"]).await;
            let of = |n: usize| (jobs[n].id, jobs[n].fence);
            let mut answer = Vec::new();
            // Another worker; another fence beside a right one; with and without results; again; no such job.
            for (who, done) in [
                (&stranger, vec![(0, 0, &none, &none), (1, 0, &result, &none)]),
                (&worker, vec![(0, 1, &result, &none), (1, 0, &none, &none)]),
                (&worker, vec![(0, 0, &none, &none), (2, 0, &result, &none), (3, 0, &none, &usage)]),
                (&worker, vec![(4, 0, &result, &usage), (5, 0, &none, &large)]),
                (&worker, vec![(0, 0, &result, &none), (2, 0, &none, &usage), (6, 0, &none, &none)]),
            ] {
                let done: Vec<Done<'_>> =
                    done.into_iter().map(|(n, more, result, usage)| (of(n).0, of(n).1 + more, result, usage)).collect();
                let first = jobs[0].id;
                answer.push(side.settle(who.id, &done).await.iter().map(|id| id - first).collect::<Vec<_>>());
            }
            answer.push(side.settle(worker.id, &[(987_654_321, 1, &none, &none)]).await);
            answers.push(answer);
            found.push(side.rows().await);
        }
        assert_eq!(answers[0], answers[1], "{situation}");
        assert_eq!(answers[1][0], [0, 1], "{situation}: a stranger's");
        assert_eq!(answers[1][4], [0, 2], "{situation}: done before");
        for (wanted, found) in found[0].iter().zip(&found[1]) {
            assert_eq!(wanted, found, "{situation}");
        }
        assert_eq!(found[0].len(), found[1].len(), "{situation}");
        assert!(found[0].len() > 10, "{situation}: {:?}", found[0]);
    }
}

#[tokio::test]
async fn what_does_not_go_together_is_refused() {
    let (_queue, s) = Queue::with_session().await;
    let id = s.enqueue("kind => 'k'").await;
    let worker = s.worker(&["k"]).await;
    worker.claim(&s, 1).await;
    for arguments in [
        "null, null, null, null".to_owned(),
        format!("array[{id}, {id}], array[1, 1], null, null"),
        format!("array[{}, {id}], array[1, 1], null, null", id + 1),
        format!("array[{id}], array[1, 1], null, null"),
        format!("array[{id}], array[1], array['1', '2']::jsonb[], null"),
        format!("array[{id}], array[1], null, '{{}}'"),
    ] {
        let refusal = s.refused(&format!("select posthouse.settle_plain('{}', {arguments})", worker.id)).await;
        assert_eq!(refusal.code, "PH001", "{arguments}");
        assert!(refusal.message.contains("ids: must be in ascending order"), "{}", refusal.message);
    }
    assert_eq!(s.state(id).await, "running");
}
