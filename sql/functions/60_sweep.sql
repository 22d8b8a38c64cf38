-- The sweep: housekeeping that any worker process may run at any time, in bounded pieces. Each part runs at most once an
-- interval in the whole fleet, in a transaction of its own where a worker of the library runs it; a part that fails is counted, comes
-- again, and keeps no other from running.
--
-- A part is a row of posthouse.sweep. What one transaction can do is also named in posthouse.tidy() and posthouse.sweep_part();
-- what takes several transactions, or code that Postgres has not, is run by the library between posthouse.begin_sweep() and
-- posthouse.end_sweep().

-- In how many milliseconds a part is due, from 0 on. The interval grows to `pause` times what the part took last time, so that it stays
-- below a fiftieth of one core, unless a part is given more. One that ran at a time still to come is due now: the clock has been set back.
create or replace function posthouse.due_in(s posthouse.sweep) returns float8
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  return case when s.ran_at > clock_timestamp() + interval '5 seconds' then 0 else greatest(0, 1000 * (
    extract(epoch from s.ran_at + greatest(case when s.more then interval '0' else s.every end, s.took_ms * s.pause * interval '1 millisecond'))::float8
    - extract(epoch from clock_timestamp())::float8)) end;
end $$;

-- Whether a part is due.
create or replace function posthouse.is_due(s posthouse.sweep) returns boolean
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  return posthouse.due_in(s) = 0;
end $$;

-- In how many milliseconds the first part is due that left some to do; null: none did. For whoever goes on with it.
create or replace function posthouse.more_due_in() returns int
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select ceil(min(least(posthouse.due_in(s), 60000)))::int from posthouse.sweep s where s.more
$$;

-- The parts that are due, those that waited longest first. Also those that this schema leaves to the library.
create or replace function posthouse.due_sweeps() returns setof text
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select s.name from posthouse.sweep s where posthouse.is_due(s) order by s.ran_at, s.name
$$;

-- Whether a part is due and nobody else is at it. If so it is this caller's until the end of the transaction: no session is needed, and
-- poolers may stand between.
create or replace function posthouse.take_sweep(part text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Look before and after the lock: most often nothing is due.
  return exists (select from posthouse.sweep s where s.name = part and posthouse.is_due(s))
    and pg_try_advisory_xact_lock(1346912004, hashtext(part))
    and exists (select from posthouse.sweep s where s.name = part and posthouse.is_due(s));
end $$;

-- Take a part that is run in several transactions: it counts as run from now on, so that nobody else begins it before its interval is over.
-- Its pieces must be fit to be run by two at once all the same. False: it is not due.
create or replace function posthouse.begin_sweep(part text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if not posthouse.take_sweep(part) then
    return false;
  end if;
  update posthouse.sweep s set ran_at = clock_timestamp(), more = false where s.name = part;
  return true;
end $$;

-- Write down how a run of a part went. `error` says why it failed (null: it did not), `more` that it left some to do. Who looks after the
-- queue is told when a part fails twice in a row, and when that is over.
create or replace function posthouse.end_sweep(part text, took_ms float8, more boolean default false, error text default null) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  was record;
  now_at timestamptz := clock_timestamp();
begin
  select s.failing_since, s.failed_at into was from posthouse.sweep s where s.name = part;
  update posthouse.sweep s
  set ran_at = now_at, took_ms = end_sweep.took_ms, more = end_sweep.more and end_sweep.error is null, runs = s.runs + 1,
    failures = s.failures + (end_sweep.error is not null)::int,
    failed_at = case when end_sweep.error is null then s.failed_at else now_at end,
    error = coalesce(posthouse.cap_text(end_sweep.error), s.error),
    failing_since = case when end_sweep.error is not null then coalesce(s.failing_since, now_at) end
  where s.name = part;
  if error is not null and was.failing_since is not null then
    perform posthouse.raise_alert('sweep', part, format('the sweep of %s fails since %s: %s', part,
      to_char(was.failing_since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), error), jsonb_build_object('sweep', part));
  elsif error is null and was.failed_at > was.failing_since then
    perform posthouse.resolve_alert('sweep', part);
  end if;
end $$;

-- When the oldest transaction began that writes to `job` and is still open (-infinity: not known); else now. The clock is read first:
-- whoever comes to write after the look reads it later.
create or replace function posthouse.oldest_writer() returns timestamptz
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  now_at timestamptz := clock_timestamp();
begin
  return (
    select least(min(coalesce(a.xact_start, x.prepared, '-infinity')), now_at)
    from pg_locks k
    left join pg_stat_activity a on a.pid = k.pid
    left join pg_prepared_xacts x on k.pid is null and k.virtualtransaction = '-1/' || x.transaction::text
    where k.locktype = 'relation' and k.database = (select d.oid from pg_database d where d.datname = current_database())
      and k.relation = 'posthouse.job'::regclass and k.mode = 'RowExclusiveLock'
      and k.pid is distinct from pg_backend_pid());
end $$;

-- Let claims start behind the dead rows: move the floors up to the oldest queued jobs.
--
-- One floor is common to all lanes, so that a row a second is written however many lanes there are. A lane whose oldest job is due
-- before it is behind, and has a floor of its own, as long as that is so; then a row without one says that it has the common floor
-- again. A lane whose oldest job was due within the last two seconds keeps the common floor back; one that is further behind does not.
-- Lanes that sleep have nothing that is due before they wake, but for those that wait for a gate: their floors stand still until it opens.
--
-- A floor must not pass a job that is not committed yet. Whoever enqueues, retries or snoozes holds a lock on the table until
-- the end of its transaction, and its jobs are due no earlier than that began; so the floor stops at the oldest such
-- transaction, though never further back than half a minute. What commits later than that is found by
-- posthouse.rescue_stragglers. Jobs that go back to the front of the line hold advisory lock 2.
create or replace function posthouse.advance_floors() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  common posthouse.lane_floor;
  safe timestamptz;
  step constant interval := '100 milliseconds';
begin
  if not pg_try_advisory_xact_lock(1346912000, 2) then
    return;
  end if;
  common := posthouse.common_floor();
  safe := greatest(posthouse.oldest_writer(), clock_timestamp() - interval '30 seconds');
  with awake as (
    select l.id, false as held from posthouse.lane l where l.ready_at < 'infinity' and l.ready_at <= clock_timestamp() and l.blocked_by is null
    union all
    select l.id, true from posthouse.lane l where l.blocked_by is not null
  ), looked as materialized (
    -- No further back than it stands, for the sake of a transaction that began before and writes only now; but for a clock that was set back.
    select l.id, f.floor_at, greatest(least(coalesce(j.run_at, case when l.held then f.floor_at end, safe), safe),
      case when common.floor_at <= clock_timestamp() then coalesce(case when common.behind then f.floor_at end, common.floor_at) end) as oldest
    from awake l
    cross join lateral (
      select (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) as floor_at offset 0) f
    left join lateral (
      select j.run_at from posthouse.job j
      where j.lane_id = l.id and j.state = 'queued' and j.run_at >= coalesce(case when common.behind then f.floor_at end, common.floor_at)
        and not (l.held and f.floor_at is not null)
      order by j.lane_id, j.run_at, j.id limit 1) j on true
  ), next as materialized (
    select n.floor_at, exists (select from looked l where l.oldest < n.floor_at) as behind
    from (
      select case when coalesce(n.oldest, safe) > common.floor_at + step or common.floor_at = '-infinity' then coalesce(n.oldest, safe)
        else common.floor_at end as floor_at
      from (select min(l.oldest) filter (where l.oldest >= safe - interval '2 seconds') as oldest from looked l having count(*) > 0) n) n
  )
  insert into posthouse.lane_floor (lane_id, floor_at, behind)
  select 0, n.floor_at, n.behind from next n where (n.floor_at, n.behind) is distinct from (common.floor_at, common.behind)
  union all
  select l.id, case when l.oldest < n.floor_at then l.oldest end, false
  from looked l cross join next n
  where case when l.oldest < n.floor_at then l.floor_at is null or l.oldest > l.floor_at + step else l.floor_at is not null end;
end $$;

-- Find jobs that committed behind their lane's floor, and move them in front of it.
create or replace function posthouse.rescue_stragglers() returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  j posthouse.job;
  n int := 0;
begin
  for j in
    select x.* from posthouse.lane l
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select x.* from posthouse.job x
      where x.lane_id = l.id and x.state = 'queued' and x.run_at < f.floor_at
      order by x.lane_id, x.run_at, x.id limit 1000 for update skip locked) x
    limit 10000
  loop
    perform posthouse.requeue_job(j, clock_timestamp(), true, false, j.reason);
    n := n + 1;
  end loop;
  return n;
end $$;

-- Add up the tally, forget passed floors and keys whose window is over, and the workers that died a day ago.
create or replace function posthouse.fold() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  held record;
begin
  with gone as (delete from posthouse.tally t returning t.lane_id, t.state, t.jobs)
  insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, g.state, sum(g.jobs) from gone g group by g.lane_id, g.state;
  delete from posthouse.lane_floor f using (
    select x.lane_id, max(x.seq) as newest from posthouse.lane_floor x group by x.lane_id) n
  where f.lane_id = n.lane_id and f.seq < n.newest;
  delete from posthouse.gate_state s using (
    select x.gate_id, x.member, max(x.seq) as newest from posthouse.gate_state x group by x.gate_id, x.member) n
  where s.gate_id = n.gate_id and s.member = n.member and s.seq < n.newest;
  -- What jobs share that run one at a time, where none of them has begun: there may be as many values as jobs.
  delete from posthouse.gate_state s using posthouse.gate g
  where g.name >= 'serial:' and g.name < 'serial;' and s.gate_id = g.id
    and not exists (select from unnest(s.job_ids, s.fences) u(id, fence) join posthouse.job j on j.id = u.id and j.fence = u.fence);
  delete from posthouse.dedupe d where (d.tenant, d.scope, d.key) in (
    select x.tenant, x.scope, x.key from posthouse.dedupe x where x.expires_at < clock_timestamp()
    order by x.tenant, x.scope, x.key limit 10000 for update skip locked);
  -- Keys whose job is no longer live. First the lock and then, in a statement of its own, the look: an enqueue may just
  -- have given the key to a new job.
  for held in
    select x.tenant, x.scope, x.key from posthouse.dedupe x
    where x.expires_at is null and x.next_id is null and not exists (select from posthouse.job j where j.id = x.job_id)
    order by x.tenant, x.scope, x.key limit 1000 for update skip locked
  loop
    delete from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key
      and d.expires_at is null and d.next_id is null and not exists (select from posthouse.job j where j.id = d.job_id);
  end loop;
  -- Claims whose worker has no row: it was dead, or somebody removed it, which comes to the same.
  insert into posthouse.worker (id, host, pid, version, queues, kinds, slots, lease_ms, started_at, beat_at, expires_at, dead_at)
  select distinct c.worker, '', 0, '', '{}'::text[], '{}'::text[], 0, 0, c.now_at, c.now_at, c.now_at, c.now_at
  from (select x.worker, clock_timestamp() as now_at from posthouse.claimed x
        where not exists (select from posthouse.worker w where w.id = x.worker)) c
  on conflict do nothing;
  delete from posthouse.worker w where w.dead_at < clock_timestamp() - interval '1 day'
    and not exists (select from posthouse.claimed c where c.worker = w.id);
end $$;

-- Run one of the parts that one transaction can do. `more`: it left some to do. `alerts`: what it told.
create or replace function posthouse.sweep_part(part text, out more boolean, out alerts jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
-- Nothing here is worth to wait for somebody for long; it comes again.
set lock_timeout = '2s'
as $$
begin
  more := false;
  alerts := '[]';
  case part
    when 'stragglers' then perform posthouse.rescue_stragglers();
    when 'gates' then perform posthouse.wake_missed();
    when 'shares' then perform posthouse.make_shares();
    when 'folds' then perform posthouse.fold();
    when 'usage' then perform posthouse.fold_usage();
    when 'redrives' then perform posthouse.forget_redrives();
    when 'partitions' then perform posthouse.partitions_ahead();
    when 'slices' then more := posthouse.survey_slices();
    when 'expire' then more := posthouse.expire();
    when 'analyze' then perform posthouse.analyze_parents();
    when 'tombstones' then more := posthouse.forget() >= 10000;
    when 'watch' then perform posthouse.watch();
    when 'alerts' then alerts := posthouse.tell_alerts();
    when 'dedupe' then more := posthouse.follow_missed();
    when 'depths' then perform posthouse.count_depths();
    when 'gauges', 'counts' then perform posthouse.count_gauges(part);
    when 'floors' then perform posthouse.advance_floors();
  end case;
end $$;

-- Do whatever part of the sweep is due, or only `part`, if it is. For workers that speak SQL: to be called every second or so; cheap when
-- there is nothing to do. Those of the library call it for one part at a time.
--
-- A part that fails is told in a warning and comes again; the others go on. Answers with the alerts that were told now, with what failed,
-- whether something is left to do, and in how many milliseconds a part is due again: a second at most.
create or replace function posthouse.tidy(part text default null) returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  -- Floors come last, since they hold off whoever gives jobs back to the front of the line until the end of this transaction.
  parts constant text[] := array['stragglers', 'dedupe', 'depths', 'gates', 'shares', 'folds', 'usage', 'redrives', 'partitions', 'analyze', 'tombstones', 'slices', 'expire', 'watch', 'alerts', 'gauges', 'counts', 'floors'];
  one text;
  began timestamptz;
  left_some boolean;
  told jsonb;
  failure text;
  alerts jsonb := '[]';
  failed jsonb := '[]';
  more boolean := false;
  wait_ms int;
begin
  perform posthouse.check_isolation();
  foreach one in array parts loop
    continue when one <> tidy.part or not posthouse.take_sweep(one);
    began := clock_timestamp();
    failure := null;
    begin
      select p.more, p.alerts into left_some, told from posthouse.sweep_part(one) p;
      alerts := alerts || told;
      more := more or left_some;
    -- A statement_timeout too: else it would come again for ever, and nobody would know.
    exception when query_canceled or others then
      failure := sqlerrm;
      left_some := false;
      failed := failed || jsonb_build_object('sweep', one, 'error', failure);
      raise warning 'posthouse: the sweep of % failed and comes again: %', one, failure;
    end;
    perform posthouse.end_sweep(one, extract(epoch from clock_timestamp() - began) * 1000, left_some, failure);
  end loop;
  select ceil(least(min(posthouse.due_in(s)), 1000)) into wait_ms from posthouse.sweep s where s.name = any(parts);
  return jsonb_build_object('alerts', alerts, 'failed', failed, 'more', more, 'wait_ms', wait_ms);
end $$;
