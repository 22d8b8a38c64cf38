-- Retention: for how long a queue keeps jobs that are done, cancelled or failed. For ever, as it comes; for a time; or, done and
-- cancelled ones, not at all: then a job that ends leaves a tombstone for ten minutes, in which waits, dedupe answers and repeated
-- settles find it, with its result and its payload. How what has expired goes is in 73_expiry and 71_partitions.

-- For how long a queue keeps its jobs in a final state; null: for ever, or a tenant asks who has no jobs in it.
create or replace function posthouse.retention_of(queue text, state text) returns interval
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if session_user <> current_user and not posthouse.sees_all() and not posthouse.sees_queue(queue) then
    return null;
  end if;
  return (
    select case when x.keep < interval '1000 years' then x.keep end
    from (
      select case state
        when 'failed' then coalesce(q.retention_failed, d.retention_failed)
        when 'cancelled' then coalesce(q.retention_cancelled, q.retention, d.retention_cancelled, d.retention)
        else coalesce(q.retention, d.retention) end as keep
      from (select) one
      left join posthouse.queue q on q.name = retention_of.queue
      left join posthouse.queue d on d.name = '*') x);
end $$;

-- Set for how long a queue keeps its jobs that are `done`, `cancelled` or `failed`: zero not at all (done and cancelled ones: but for
-- ten minutes in which waits, dedupe answers and repeated settles find them), 1,000 years or more for ever, null as the queue
-- named '*' says, which stands for all that have no time of their own; for ever if that has none. Cancelled jobs go with done
-- ones unless they have a time of their own. It counts for those that have ended, too.
create or replace function posthouse.set_queue(queue text, retention interval, outcome text default 'done') returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  keep interval := set_queue.retention;
  was text;                           -- by its text, since a month counts as 30 days where intervals are compared
begin
  -- Slices that were made since its snapshot would go by what was set before.
  perform posthouse.check_isolation();
  perform posthouse.check_name('queue', queue);
  if (outcome in ('done', 'cancelled', 'failed')) is not true then
    raise exception using errcode = 'PH001', message = format('outcome: %s is none of done, cancelled, failed', coalesce(quote_literal(outcome), 'null'));
  elsif keep < interval '1 second' and (keep <> interval '0' or outcome = 'failed') then
    raise exception using errcode = 'PH001', message = format('retention: %s is too short: a second at least%s', keep,
      case outcome when 'failed' then '' else ', or zero, which keeps no history' end);
  end if;
  -- The sweep goes by what was set before until this transaction ends, and then by this.
  perform pg_advisory_xact_lock(1346912000, 6);
  select concat_ws(',', coalesce(q.retention::text, '-'), coalesce(q.retention_cancelled::text, '-'), coalesce(q.retention_failed::text, '-'))
  into was from posthouse.queue q where q.name = set_queue.queue;
  insert into posthouse.queue (name, retention, retention_cancelled, retention_failed)
  values (set_queue.queue, case outcome when 'done' then keep end, case outcome when 'cancelled' then keep end, case outcome when 'failed' then keep end)
  on conflict (name) do update set
    retention = case outcome when 'done' then keep else posthouse.queue.retention end,
    retention_cancelled = case outcome when 'cancelled' then keep else posthouse.queue.retention_cancelled end,
    retention_failed = case outcome when 'failed' then keep else posthouse.queue.retention_failed end;
  -- All of history is looked at again only if anything is different.
  if coalesce(was, '-,-,-') is distinct from (
      select concat_ws(',', coalesce(q.retention::text, '-'), coalesce(q.retention_cancelled::text, '-'), coalesce(q.retention_failed::text, '-'))
      from posthouse.queue q where q.name = set_queue.queue) then
    update posthouse.slice s set stale = true where not s.stale;
  end if;
end $$;

-- posthouse.settle_done, which calls this, where some queue keeps no history: what is done there leaves a tombstone. Each lane is
-- looked up, unless all of the worker's queues are such. Plans are made as the caller has set.
create or replace function posthouse.settle_unrecorded(worker uuid, ids bigint[], fences int[], results jsonb[], usages jsonb[], flags jsonb[])
returns bigint[]                      -- the ids that were applied
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  now_at timestamptz := clock_timestamp();
  applied bigint[];
  keyed bigint[];
  lanes bigint[];                     -- of those that brought their usage, with `used`
  used jsonb[];
  failed_before bigint[];             -- of those without history
begin
  if (select bool_and(coalesce((select q.retention from posthouse.queue q where q.name = w.queue),
        (select q.retention from posthouse.queue q where q.name = '*')) is not distinct from interval '0')
      from (select unnest(w.queues) as queue from posthouse.worker w where w.id = settle_unrecorded.worker) w) then
    with gone as (
      delete from posthouse.job j
      where j.id = any(ids) and j.worker = settle_unrecorded.worker and j.state = 'running' and j.fence = fences[width_bucket(j.id, ids)]
      returning j.id, j.lane_id, j.created_at, j.fence, j.attempt, j.max_attempts, j.errors, j.keyed
    ), laid as (
      insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, fence, attempt, max_attempts, state, flags, result)
      select g.id, g.lane_id, g.created_at, now_at, settle_unrecorded.worker, g.fence, g.attempt, g.max_attempts, 'done',
        case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
        results[width_bucket(g.id, ids)]
      from gone g
    ), noted as (
      insert into posthouse.burial (buried_at, jobs, job_ids)
      select now_at, count(*), array_agg(g.id) from gone g having count(*) > 0
    ), counted as (
      insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, 'done', count(*) from gone g group by g.lane_id
    )
    select array_agg(g.id), array_agg(g.id) filter (where g.keyed), array_agg(g.id) filter (where g.errors > 0),
      array_agg(g.lane_id) filter (where usages is not null), array_agg(usages[width_bucket(g.id, ids)]) filter (where usages is not null)
    into applied, keyed, failed_before, lanes, used from gone g;
  else
    with gone as (
      delete from posthouse.job j
      where j.id = any(ids) and j.worker = settle_unrecorded.worker and j.state = 'running' and j.fence = fences[width_bucket(j.id, ids)]
      returning j.*
    ), bare as materialized (
      select d.lane_id
      from (select distinct g.lane_id from gone g) d
      cross join lateral (select l.queue from posthouse.lane l where l.id = d.lane_id offset 0) l
      where coalesce((select q.retention from posthouse.queue q where q.name = l.queue),
        (select q.retention from posthouse.queue q where q.name = '*')) = interval '0'
    ), kept as (
      insert into posthouse.archive (id, lane_id, created_at, started_at, finished_at, worker, timeout_ms, fence, attempt,
        max_attempts, state, flags, result, usage, errors)
      select g.id, g.lane_id, g.created_at, g.started_at, now_at, g.worker, g.timeout_ms, g.fence, g.attempt,
        g.max_attempts, 'done',
        case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
        results[width_bucket(g.id, ids)], usages[width_bucket(g.id, ids)],
        case when g.errors > 0 then posthouse.gather_errors(g.id) end
      from gone g where g.lane_id not in (select b.lane_id from bare b)
    ), unkept as materialized (
      select g.* from gone g where g.lane_id in (select b.lane_id from bare b)
    ), laid as (
      insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, fence, attempt, max_attempts, state, flags, result)
      select g.id, g.lane_id, g.created_at, now_at, g.worker, g.fence, g.attempt, g.max_attempts, 'done',
        case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
        results[width_bucket(g.id, ids)]
      from unkept g
    ), noted as (
      insert into posthouse.burial (buried_at, jobs, job_ids)
      select now_at, count(*), array_agg(g.id) from unkept g having count(*) > 0
    ), counted as (
      insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, 'done', count(*) from gone g group by g.lane_id
    )
    select array_agg(g.id), array_agg(g.id) filter (where g.keyed),
      (select array_agg(u.id) from unkept u where u.errors > 0),
      array_agg(g.lane_id) filter (where usages is not null), array_agg(usages[width_bucket(g.id, ids)]) filter (where usages is not null)
    into applied, keyed, failed_before, lanes, used from gone g;
  end if;
  if failed_before is not null then
    delete from posthouse.attempt a where a.job_id = any(failed_before);
  end if;
  if used is not null then
    perform posthouse.record_usage(lanes, used);
  end if;
  if keyed is not null then
    perform posthouse.free_keys(keyed);
  end if;
  return coalesce(applied, '{}');
end $$;

-- Forget the jobs of queues without history whose ten minutes are over: tombstones and payloads, `max_jobs` or a settle more,
-- oldest first. One whose dedupe key stands for a window is kept until that is over, since the key stands for it.
--
-- Starts where the last call ended, so that it does not walk over what it deleted before. A settle counts as old as it was
-- when it wrote, though it may commit later: so the floor stops at the oldest open transaction, at most an hour back.
create or replace function posthouse.forget(max_jobs int default 10000) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
  over timestamptz := clock_timestamp() - interval '10 minutes';
  start_at timestamptz := (select s.floor_at from posthouse.sweep s where s.name = 'tombstones');
  end_at timestamptz;
  ids bigint[];
  held bigint[];
  free bigint[];
  first_id bigint;
  last_id bigint;
begin
  with due as (
    delete from posthouse.burial b where b.ctid = any(array(
      select x.place
      from (
        select x.ctid as place, sum(x.jobs) over (order by x.buried_at rows unbounded preceding) - x.jobs as before
        from (select b.ctid, b.buried_at, b.jobs from posthouse.burial b
              where b.buried_at >= start_at and b.buried_at <= over order by b.buried_at limit max_jobs) x) x
      where x.before < max_jobs))
    returning b.buried_at, b.job_ids
  )
  select max(d.buried_at), array_agg(u.id) into end_at, ids from due d cross join lateral unnest(d.job_ids) u(id);
  if ids is null then
    end_at := over;
  else
    -- By the job, one at a time, whatever the planner thinks of the table's size.
    with later as (
      select i.id as job_id, d.expires_at
      from unnest(ids) i(id)
      cross join lateral (
        select d.expires_at from posthouse.dedupe d
        where d.job_id = i.id and coalesce(d.expires_at, '-infinity') > clock_timestamp() offset 0) d
    ), again as (
      insert into posthouse.burial (buried_at, jobs, job_ids)
      select max(l.expires_at) - interval '10 minutes', count(*), array_agg(l.job_id) from later l group by date_trunc('hour', l.expires_at)
    )
    select array_agg(l.job_id) into held from later l;
    if held is not null then
      ids := array(select unnest(ids) except select unnest(held));
    end if;
    -- One that was retried since, and ended again, has a younger tombstone; one that is still live has none, and keeps its payload.
    -- Who just brings one back is not waited for: it comes again.
    free := array(select t.id from posthouse.tombstone t where t.id = any(ids) and t.finished_at <= over for update skip locked);
    insert into posthouse.burial (buried_at, jobs, job_ids)
    select clock_timestamp(), count(*), array_agg(t.id) from posthouse.tombstone t
    where t.id = any(ids) and t.finished_at <= over and not t.id = any(free) having count(*) > 0;
    with gone as (
      delete from posthouse.tombstone t where t.id = any(free) returning t.id
    )
    select array_agg(g.id), min(g.id), max(g.id) into ids, first_id, last_id from gone g;
    -- The bounds tell which partitions need not be looked into.
    delete from posthouse.payload p where p.id = any(ids) and p.id >= first_id and p.id <= last_id;
  end if;
  -- Now and then also when there was nothing to do, since an open transaction may have kept it back before.
  update posthouse.sweep s
  set floor_at = greatest(s.floor_at, least(end_at, greatest(posthouse.oldest_writer(), over - interval '1 hour')))
  where s.name = 'tombstones' and s.floor_at < end_at - case when ids is null then interval '10 seconds' else interval '0' end;
  return coalesce(cardinality(ids), 0);
end $$;

-- The shortest time for which any queue keeps anything, with the ten minutes of those that keep no history; null: all is kept for ever.
create or replace function posthouse.shortest_retention() returns interval
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select min(case when x.keep = interval '0' then interval '10 minutes' else x.keep end)
  from posthouse.queue q cross join lateral unnest(array[q.retention, q.retention_cancelled, q.retention_failed]) x(keep)
  where x.keep < interval '1000 years'
$$;
