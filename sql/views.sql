-- The public views. Lists do not fetch payloads and results unless asked for: those are read only where a query names them.

-- Every job, wherever it lives.
create or replace view posthouse.jobs as
  select j.id, j.state::text as state, l.queue, l.tenant, l.kind, l.priority, nullif(j.run_at, 'infinity') as run_at, j.created_at, j.started_at,
    null::timestamptz as finished_at, j.attempt, j.max_attempts, j.timeout_ms, j.fence::bigint as fence, j.worker, j.cancel_asked,
    j.reason,
    (select a.error from posthouse.attempt a where a.job_id = j.id and j.errors > 0 order by a.fence desc limit 1) as error,
    (select p.payload from posthouse.payload p where p.id = j.id) as payload,
    null::jsonb as result, null::jsonb as usage, j.progress,
    case when j.errors > 0 then (select jsonb_agg(jsonb_strip_nulls(to_jsonb(a.*) - 'job_id') order by a.fence)
      from posthouse.attempt a where a.job_id = j.id) end as errors,
    null::text[] as flags
  from posthouse.job j join posthouse.lane l on l.id = j.lane_id
  union all
  select a.id, a.state::text, l.queue, l.tenant, l.kind, l.priority, null, a.created_at, a.started_at, a.finished_at, a.attempt,
    a.max_attempts, a.timeout_ms, a.fence::bigint, a.worker, false, null, a.errors -> -1 ->> 'error',
    (select p.payload from posthouse.payload p where p.id = a.id), a.result, a.usage, null, a.errors, a.flags
  from posthouse.archive a join posthouse.lane l on l.id = a.lane_id
  union all
  select t.id, t.state::text, l.queue, l.tenant, l.kind, l.priority, null, t.created_at, null, t.finished_at, t.attempt,
    t.max_attempts, t.timeout_ms, t.fence::bigint, t.worker, false, null, null,
    (select p.payload from posthouse.payload p where p.id = t.id), t.result, null, null, null, t.flags
  from posthouse.tombstone t join posthouse.lane l on l.id = t.lane_id
  union all
  select d.id, 'failed', l.queue, l.tenant, l.kind, l.priority, null, d.created_at, d.started_at, d.failed_at, d.attempt,
    d.max_attempts, d.timeout_ms, d.fence::bigint, d.worker, false, d.class, d.error,
    coalesce((select p.payload from posthouse.payload p where p.id = d.id), (select s.payload from posthouse.spare_payload s where s.id = d.id)), null, d.usage, null, d.errors, null
  from posthouse.dead_letter d join posthouse.lane l on l.id = d.lane_id;

-- Every queue that has had jobs or settings, with its settings. The queue '*' stands for all that have no retention of their own.
create or replace view posthouse.queues as
  select n.name as queue, posthouse.retention_of(n.name, 'done') as retention,
    posthouse.retention_of(n.name, 'cancelled') as retention_cancelled, posthouse.retention_of(n.name, 'failed') as retention_failed,
    coalesce(q.fair_by, 'jobs') as fair_by, q.serial_by
  from (select l.queue as name from posthouse.lane l union select q.name from posthouse.queue q) n
  left join posthouse.queue q on q.name = n.name;

-- How each queue and tenant is doing. `done` counts all that were ever done, `failed` the dead letters there are now.
create or replace view posthouse.queue_health as
  select n.queue, n.tenant,
    coalesce(sum(n.jobs) filter (where n.what = 'due'), 0)::bigint as due,
    coalesce(sum(n.jobs) filter (where n.what = 'later'), 0)::bigint as later,
    coalesce(sum(n.jobs) filter (where n.what = 'running'), 0)::bigint as running,
    coalesce(sum(n.jobs) filter (where n.what = 'waiting'), 0)::bigint as waiting,
    coalesce(sum(n.jobs) filter (where n.what = 'done'), 0)::bigint as done,
    coalesce(sum(n.jobs) filter (where n.what = 'failed'), 0)::bigint as failed,
    clock_timestamp() - min(n.oldest) as oldest_due_age
  from (
    select l.queue, l.tenant, c.what, c.jobs, c.oldest
    from (
      select j.lane_id, case when j.state <> 'queued' then j.state::text when j.run_at <= clock_timestamp() then 'due' else 'later' end as what,
        count(*) as jobs, min(j.run_at) filter (where j.state = 'queued' and j.run_at <= clock_timestamp()) as oldest
      from posthouse.job j group by 1, 2
      union all
      select t.lane_id, t.state::text, sum(t.jobs), null from posthouse.tally t group by 1, 2
      union all
      select d.lane_id, 'failed', count(*), null from posthouse.dead_letter d group by 1, 2) c
    join posthouse.lane l on l.id = c.lane_id) n
  group by n.queue, n.tenant;

-- The workers of the last day.
create or replace view posthouse.workers as
  select w.id, w.host, w.pid, w.version, w.queues, w.kinds, w.slots,
    case when w.dead_at is not null then 'over' when posthouse.lease_end(w) <= clock_timestamp() then 'expired' else 'live' end as state,
    w.started_at, w.beat_at, posthouse.lease_end(w) as expires_at, w.lease_ms, w.dead_at,
    (select count(*) from posthouse.running_jobs(w.id, w.oldest_seq)) as running
  from posthouse.worker w;

-- Every gate, and for one that holds for each tenant, queue or model each that passed it lately: what is set, whether it is closed, and
-- how much has passed. `running` counts jobs under live attempts; null where the gate does not count it.
create or replace view posthouse.gates as
  select g.name, nullif(s.member, '') as member, g.max_running, g.requests_per_minute, g.tokens_per_minute, g.money_per_day,
    g.money_per_month, g.when_spent, g.warn_at,
    case when g.closed_until > clock_timestamp() or g.closed_by in ('provider', 'breaker') then g.closed_until end as closed_until,
    case when g.closed_until > clock_timestamp() or g.closed_by in ('provider', 'breaker') then g.closed_by end as closed_by,
    case when g.closed_until > clock_timestamp() or g.closed_by in ('provider', 'breaker') then g.closed_reason end as closed_reason,
    case when g.max_running is not null then (
      select count(*) from unnest(s.job_ids, s.fences) u(id, fence) join posthouse.job j on j.id = u.id and j.fence = u.fence and j.state = 'running')
    end as running,
    posthouse.sum_since(s.seconds, s.requests::bigint[], floor(extract(epoch from clock_timestamp()))::bigint - 60) as requests_last_minute,
    posthouse.sum_since(s.seconds, s.tokens, floor(extract(epoch from clock_timestamp()))::bigint - 60) as tokens_last_minute,
    case when s.day = (clock_timestamp() at time zone 'UTC')::date then s.spent_day else 0 end as spent_today,
    case when s.month = date_trunc('month', clock_timestamp() at time zone 'UTC')::date then s.spent_month else 0 end as spent_this_month
  from posthouse.gate g
  left join (
    select x.* from posthouse.gate_state x
    where not exists (
      select from posthouse.gate_state y where y.gate_id = x.gate_id and y.member = x.member and y.seq > x.seq)) s on s.gate_id = g.id;

-- How many jobs may wait in a queue or of a tenant, where that is limited.
create or replace view posthouse.depths as
  select d.scope, d.name, d.max_depth from posthouse.depth_limit d;

-- Tenants whose weight was set.
create or replace view posthouse.tenants as
  select t.name as tenant, t.weight from posthouse.tenant t;

-- The parts of the sweep, for the whole fleet: when each ran last and how long that took, how often it is to run, how often it did and how often
-- it failed. `error` is that of the last failure, also when it is over; `failing`: the last run failed. `late`: it should have
-- run long ago, so nobody sweeps, or it does not get its turn.
create or replace view posthouse.sweeps as
  select s.name, nullif(s.ran_at, '-infinity') as ran_at, round(s.took_ms::numeric, 1)::float8 as took_ms, s.every, s.runs, s.failures, s.failing_since is not null as failing,
    s.failing_since, s.failed_at, s.error,
    s.ran_at < clock_timestamp() - greatest(s.every, s.took_ms * s.pause * interval '1 millisecond') - interval '1 minute' as late
  from posthouse.sweep s;
