-- Gauges: what metrics say about the whole fleet. Two parts of the sweep count into posthouse.gauge, every process serves the newest
-- (posthouse.metrics). 'gauges' visits lanes, running jobs and what Postgres knows of itself; 'counts' visits every queued job and dead
-- letter, so that it comes the more seldom the more there are: the sweep gives both together less than two hundredths of a core.
-- Beyond ten million rows a sample is counted.
--
-- No label holds a job, a tenant or a worker; queues and schedules beyond the first hundred are counted together as 'other'.

-- Which name each queue is counted under: its own for the hundred with most jobs. `jobs` and `queues` go together.
create or replace function posthouse.queue_labels(queues text[], jobs bigint[]) returns table (queue text, label text)
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select q.queue, case when row_number() over (order by q.jobs desc, q.queue) <= 100 then q.queue else 'other' end
  from unnest(queues, jobs) q(queue, jobs)
$$;

-- How much of a table to look at to see ten million rows of it, in percent.
create or replace function posthouse.sample_percent(of_table regclass) returns float8
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select least(100, 100 * 1e7 / greatest(r.rows, 1))
  from (
    select pg_relation_size(c.oid) / 8192.0 * case when c.relpages > 0 and c.reltuples >= 0 then c.reltuples / c.relpages else 70 end as rows
    from pg_class c where c.oid = of_table) r
$$;

-- Count the jobs of every queue that ever had some. The statement is planned each time: statistics differ as much as queues do.
create or replace function posthouse.count_queues() returns table (name text, labels jsonb, value float8)
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  job_percent float8 := posthouse.sample_percent('posthouse.job');
  dead_percent float8 := posthouse.sample_percent('posthouse.dead_letter');
begin
  return query execute format($q$
    with lanes as materialized (
      select l.id, l.queue, l.blocked_by is not null as is_held from posthouse.lane l
    ), queued as materialized (
      select j.lane_id, round(count(*) * 100 / $2) as jobs, round(count(*) filter (where j.run_at <= $1) * 100 / $2) as due
      from posthouse.job j %s where j.state = 'queued' group by j.lane_id
    ), dead as materialized (
      select d.lane_id, round(count(*) * 100 / $3) as jobs from posthouse.dead_letter d %s group by d.lane_id
    ), ended as materialized (
      select t.lane_id, sum(t.jobs) filter (where t.state = 'done') as done, sum(t.jobs) filter (where t.state = 'cancelled') as cancelled
      from posthouse.tally t group by t.lane_id
    ), queues as materialized (
      select l.queue, coalesce(sum(q.due), 0) as due, coalesce(sum(q.due) filter (where l.is_held), 0) as held,
        coalesce(sum(q.jobs - q.due), 0) as later, coalesce(sum(d.jobs), 0) as dead, coalesce(sum(e.done), 0) as done,
        coalesce(sum(e.cancelled), 0) as cancelled
      from lanes l left join queued q on q.lane_id = l.id left join dead d on d.lane_id = l.id left join ended e on e.lane_id = l.id
      group by l.queue
    ), labelled as (
      select n.label as queue, sum(q.due) as due, sum(q.held) as held, sum(q.later) as later, sum(q.dead) as dead, sum(q.done) as done,
        sum(q.cancelled) as cancelled
      from queues q
      join posthouse.queue_labels((select array_agg(x.queue order by x.queue) from queues x),
        (select array_agg((x.due + x.later)::bigint order by x.queue) from queues x)) n on n.queue = q.queue
      group by n.label
    )
    select g.name, g.labels, g.value::float8 from labelled q cross join lateral (values
      ('queue_due_jobs', jsonb_build_object('queue', q.queue), q.due),
      ('queue_held_jobs', jsonb_build_object('queue', q.queue), q.held),
      ('queue_later_jobs', jsonb_build_object('queue', q.queue), q.later),
      ('queue_dead_letters', jsonb_build_object('queue', q.queue), q.dead),
      ('queue_ended_jobs_total', jsonb_build_object('queue', q.queue, 'state', 'done'), q.done),
      ('queue_ended_jobs_total', jsonb_build_object('queue', q.queue, 'state', 'cancelled'), q.cancelled)) g(name, labels, value)
  $q$, case when job_percent < 100 then format('tablesample system (%s)', job_percent) end,
    case when dead_percent < 100 then format('tablesample system (%s)', dead_percent) end)
  using clock_timestamp(), job_percent, dead_percent;
end $$;

-- How many jobs of each queue run.
create or replace function posthouse.running_by_queue() returns table (queue text, jobs bigint)
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
  select l.queue, sum(r.jobs)::bigint
  from (
    select j.lane_id, count(*) as jobs
    from posthouse.worker w
    cross join lateral (select r.id from posthouse.running_jobs(w.id, w.oldest_seq) r offset 0) r
    cross join lateral (select j.lane_id from posthouse.job j where j.id = r.id offset 0) j
    group by j.lane_id) r
  join posthouse.lane l on l.id = r.lane_id
  group by l.queue
$$;

-- When the oldest due job of each queue came due that waits for a slot or within a limit, not for a closed gate. Visits the lanes that
-- are awake or wait for a gate, and one job of each.
create or replace function posthouse.oldest_by_queue() returns table (queue text, run_at timestamptz)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  return query
    with awake as materialized (
      select l.id, l.queue from posthouse.lane l
      where l.ready_at < 'infinity' and (l.ready_at <= clock_timestamp() or (l.blocked_by is not null
        and not exists (select from posthouse.gate g where g.id = l.blocked_by and g.closed_until > clock_timestamp())))
    )
    select a.queue, min(j.run_at)
    from awake a
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = a.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select j.run_at from posthouse.job j
      where j.lane_id = a.id and j.state = 'queued' and j.run_at <= clock_timestamp() and j.run_at >= f.floor_at
      order by j.lane_id, j.run_at, j.id limit 1) j
    group by a.queue;
end $$;

-- What runs and waits, workers, gates, and the ticks of schedules that were missed.
create or replace function posthouse.gauge_fleet() returns table (name text, labels jsonb, value float8)
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
  return query
    with running as materialized (select r.* from posthouse.running_by_queue() r
    ), oldest as materialized (select o.* from posthouse.oldest_by_queue() o
    ), queues as materialized (
      select l.queue, coalesce(max(r.jobs), 0) as running,
        coalesce(greatest(extract(epoch from clock_timestamp() - max(o.run_at)), 0), 0)::float8 as age
      from (select distinct x.queue from posthouse.lane x) l left join running r on r.queue = l.queue left join oldest o on o.queue = l.queue
      group by l.queue
    ), labelled as (
      select n.label as queue, sum(q.running) as running, max(q.age) as age
      from queues q
      join posthouse.queue_labels((select array_agg(x.queue order by x.queue) from queues x),
        (select array_agg(x.running + ceil(x.age)::bigint order by x.queue) from queues x)) n on n.queue = q.queue
      group by n.label
    )
    select g.name, jsonb_build_object('queue', q.queue), g.value from labelled q cross join lateral (values
      ('queue_running_jobs', q.running::float8), ('queue_oldest_due_age_seconds', q.age)) g(name, value);
  return query
    select g.name, g.labels, coalesce(g.value, 0)::float8
    from (
      select count(*) filter (where posthouse.lease_end(w) > clock_timestamp()) as live,
        count(*) filter (where posthouse.lease_end(w) <= clock_timestamp()) as expired,
        sum(w.slots) filter (where posthouse.lease_end(w) > clock_timestamp()) as slots
      from posthouse.worker w where w.dead_at is null) w
    cross join lateral (values
      ('fleet_workers', '{"state": "live"}'::jsonb, w.live), ('fleet_workers', '{"state": "expired"}', w.expired),
      ('fleet_slots', '{}', w.slots)) g(name, labels, value);
  return query
    with gates as materialized (
      select case when g.name ~ '^(queue|tenant|model|endpoint):' then split_part(g.name, ':', 1) else 'named' end as scope,
        g.closed_by, g.max_running, g.running
      from posthouse.gates g where g.name < 'serial:' or g.name >= 'serial;'
    )
    select 'gates_closed', jsonb_build_object('scope', s.scope, 'closed_by', b.closed_by),
      (select count(*) from gates g where g.scope = s.scope and g.closed_by = b.closed_by)::float8
    from unnest(array['queue', 'tenant', 'model', 'endpoint', 'named']) s(scope), unnest(array['person', 'provider', 'quota', 'breaker']) b(closed_by)
    union all
    select 'gate_room_ratio', jsonb_build_object('scope', g.scope), min(greatest(1 - g.running / g.max_running::float8, 0))
    from gates g where g.max_running is not null group by g.scope;
  return query
    select 'schedule_missed_ticks_total', jsonb_build_object('schedule', s.label), sum(s.missed)::float8
    from (
      select case when row_number() over (order by x.missed desc, x.name) <= 100 then x.name else 'other' end as label, x.missed
      from posthouse.schedule x) s
    group by s.label;
end $$;

-- What Postgres knows of itself: who keeps dead rows from being vacuumed, how many there are, and connections. Of what other logins do
-- it tells only those who may read all statistics (pg_read_all_stats).
create or replace function posthouse.gauge_database() returns table (name text, labels jsonb, value float8)
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
  return query
    select g.name, '{}'::jsonb, coalesce(g.value, 0)::float8
    from (
      select max(extract(epoch from clock_timestamp() - h.since)) as seconds, max(age(h.xmin)) as transactions
      from (
        select a.xact_start as since, a.backend_xmin as xmin from pg_stat_activity a
        where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.backend_type <> 'walsender'
        union all select null, a.backend_xmin from pg_stat_replication a where a.backend_xmin is not null
        union all select x.prepared, x.transaction from pg_prepared_xacts x
        union all select null, s.xmin from pg_replication_slots s where s.xmin is not null
        union all select null, s.catalog_xmin from pg_replication_slots s where s.catalog_xmin is not null) h) x
    cross join lateral (values
      ('database_xmin_age_seconds', x.seconds), ('database_xmin_age_transactions', x.transactions)) g(name, value);
  return query
    select g.name, jsonb_build_object('table', t.name), g.value::float8
    from (
      select regexp_replace(s.relname, '^(payload|archive)_[0-9]+$', '\1') as name, sum(s.n_live_tup) as live, sum(s.n_dead_tup) as dead,
        sum(pg_total_relation_size(s.relid)) as bytes
      from pg_stat_all_tables s
      join pg_class c on c.oid = s.relid and c.relkind = 'r'
      where s.schemaname = 'posthouse'
        and regexp_replace(s.relname, '^(payload|archive)_[0-9]+$', '\1') = any(array['job', 'payload', 'archive', 'dead_letter', 'tombstone',
          'attempt', 'claimed', 'lane', 'lane_floor', 'gate_state', 'dedupe', 'usage'])
      group by 1) t
    cross join lateral (values
      ('table_live_rows', t.live), ('table_dead_rows', t.dead), ('table_bytes', t.bytes)) g(name, value);
  return query
    select 'database_connections', jsonb_build_object('owner', c.owner), count(*)::float8
    from (
      select case when a.application_name like 'posthouse/%' then 'posthouse' else 'other' end as owner
      from pg_stat_activity a where a.backend_type = 'client backend') c
    group by c.owner
    union all
    select 'database_connections_max', '{}', current_setting('max_connections')::float8;
end $$;

-- Count one part anew. What was counted before goes.
create or replace function posthouse.count_gauges(part text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  began timestamptz := clock_timestamp();
  found jsonb;
begin
  if part = 'counts' then
    select jsonb_agg(to_jsonb(g)) into found from posthouse.count_queues() g;
  else
    select jsonb_agg(to_jsonb(g)) into found
    from (select f.* from posthouse.gauge_fleet() f union all select d.* from posthouse.gauge_database() d) g;
  end if;
  delete from posthouse.gauge g where g.part = count_gauges.part and g.counted_at < began;
  insert into posthouse.gauge (part, counted_at, took_ms, gauges)
  values (count_gauges.part, began, extract(epoch from clock_timestamp() - began) * 1000, coalesce(found, '[]'));
end $$;

-- What metrics say about the whole fleet: as counted last by the sweep, and how the sweep itself is. Cheap: for every process to ask
-- every few seconds. Names are those of Prometheus without the prefix; times are seconds of the epoch.
create or replace function posthouse.metrics() returns table (name text, labels jsonb, value float8)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  return query
    select v.name, v.labels, v.value
    from unnest(array['gauges', 'counts']) p(part)
    cross join lateral (
      select g.* from posthouse.gauge g where g.part = p.part order by g.counted_at desc limit 1) n
    cross join lateral (
      select r.name, r.labels, r.value from jsonb_to_recordset(n.gauges) r(name text, labels jsonb, value float8)
      union all
      select 'gauges_counted_timestamp_seconds', jsonb_build_object('part', p.part), extract(epoch from n.counted_at)::float8
      union all
      select 'gauges_duration_seconds', jsonb_build_object('part', p.part), n.took_ms / 1000) v;
  return query
    select v.name, jsonb_build_object('part', s.name), v.value::float8
    from posthouse.sweep s cross join lateral (values
      ('sweep_ran_timestamp_seconds', case when s.ran_at = '-infinity' then 0 else extract(epoch from s.ran_at) end),
      ('sweep_duration_seconds', s.took_ms / 1000), ('sweep_runs_total', s.runs), ('sweep_failures_total', s.failures),
      ('sweep_failing', (s.failing_since is not null)::int)) v(name, value);
  return query select 'clock', '{}'::jsonb, extract(epoch from clock_timestamp())::float8;
end $$;

-- How many jobs of a queue need a slot now: those that run, and those that are due and not held back by a gate. For autoscalers: so many
-- slots would be busy. Exact up to 10,000 due jobs; beyond that as counted last by the sweep, which may be some minutes ago.
create or replace function posthouse.backlog(queue text) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  running bigint;
  due bigint;
begin
  if not (session_user = current_user or posthouse.sees_all()) then
    raise exception using errcode = '42501', message = 'backlog: it counts the jobs of all tenants, and this login sees only its own',
      hint = 'Bind the login to every tenant: select posthouse.bind_login(login, every_tenant => true).';
  end if;
  select coalesce(sum(r.jobs), 0) into running from posthouse.running_by_queue() r where r.queue = backlog.queue;
  select count(*) into due
  from (
    select 1
    from posthouse.lane l
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select from posthouse.job j
      where j.lane_id = l.id and j.state = 'queued' and j.run_at <= clock_timestamp() and j.run_at >= f.floor_at limit 10000) j
    where l.queue = backlog.queue and l.ready_at <= clock_timestamp() and l.blocked_by is null
    limit 10000) x;
  if due = 10000 then
    select greatest(due, coalesce(sum(case r.name when 'queue_due_jobs' then r.value else -r.value end), 0)::bigint) into due
    from (select g.gauges from posthouse.gauge g where g.part = 'counts' order by g.counted_at desc limit 1) n
    cross join lateral jsonb_to_recordset(n.gauges) r(name text, labels jsonb, value float8)
    where r.name in ('queue_due_jobs', 'queue_held_jobs') and r.labels ->> 'queue' = backlog.queue;
  end if;
  return running + due;
end $$;
