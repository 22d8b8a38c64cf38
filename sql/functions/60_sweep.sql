-- The sweep: housekeeping that any worker process may run at any time, in bounded pieces. Each piece runs at most once an
-- interval in the whole fleet.

-- Whether a piece of the sweep is due; if so it is this caller's. The interval grows to `pause` times what the piece took last
-- time, so that it stays below a fiftieth of one core, unless a piece is given more.
create or replace function posthouse.sweep_due(name text, every interval, pause float8 default 50) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  update posthouse.sweep s set ran_at = clock_timestamp()
  where s.name = (select x.name from posthouse.sweep x
    where x.name = sweep_due.name and x.ran_at <= clock_timestamp() - greatest(every, x.took_ms * pause * interval '1 millisecond')
    for update skip locked);
  return found;
end $$;

-- When the oldest transaction began that writes to `job` and is still open (-infinity: not known); else now.
create or replace function posthouse.oldest_writer() returns timestamptz
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select least(min(coalesce(a.xact_start, x.prepared, '-infinity')), clock_timestamp())
  from pg_locks k
  left join pg_stat_activity a on a.pid = k.pid
  left join pg_prepared_xacts x on k.pid is null and k.virtualtransaction = '-1/' || x.transaction::text
  where k.locktype = 'relation' and k.database = (select d.oid from pg_database d where d.datname = current_database())
    and k.relation = 'posthouse.job'::regclass and k.mode = 'RowExclusiveLock'
    and k.pid is distinct from pg_backend_pid()
$$;

-- Let claims start behind the dead rows: move each awake lane's floor up to its oldest queued job.
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
  safe timestamptz;
begin
  if not pg_try_advisory_xact_lock(1346912000, 2) then
    return;
  end if;
  safe := greatest(posthouse.oldest_writer(), clock_timestamp() - interval '30 seconds');
  insert into posthouse.lane_floor (lane_id, floor_at)
  select l.id, least(coalesce(j.run_at, safe), safe)
  from posthouse.lane l
  cross join lateral (select coalesce((select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id
                                       order by f.floor_at desc limit 1), '-infinity') as floor_at) f
  left join lateral (
    select j.run_at from posthouse.job j
    where j.lane_id = l.id and j.state = 'queued' and j.run_at >= f.floor_at
    order by j.lane_id, j.run_at, j.id limit 1) j on true
  where l.ready_at < 'infinity' and l.ready_at <= clock_timestamp()
    and least(coalesce(j.run_at, safe), safe) > case when f.floor_at = '-infinity' then f.floor_at else f.floor_at + interval '100 milliseconds' end
  on conflict do nothing;
end $$;

-- Find jobs that committed behind their lane's floor, and move them in front of it.
create or replace function posthouse.rescue_stragglers() returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  j posthouse.job;
  n int := 0;
begin
  for j in
    select x.* from posthouse.lane l
    cross join lateral (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.floor_at desc limit 1) f
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
    select x.lane_id, max(x.floor_at) as newest from posthouse.lane_floor x group by x.lane_id) n
  where f.lane_id = n.lane_id and f.floor_at < n.newest;
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
    where x.expires_at is null and not exists (select from posthouse.job j where j.id = x.job_id)
    order by x.tenant, x.scope, x.key limit 1000 for update skip locked
  loop
    delete from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key
      and d.expires_at is null and not exists (select from posthouse.job j where j.id = d.job_id);
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

-- Make the partitions of the next million ids, well ahead of need, so that no enqueue has to; not waiting for an open enqueue
-- that makes one all the same.
create or replace function posthouse.partitions_ahead() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if pg_try_advisory_xact_lock(1346912000, 1) then
    perform posthouse.make_partitions(s.last_value), posthouse.make_partitions(s.last_value + 1000000) from posthouse.job_id_seq s;
  end if;
end $$;

-- Do whatever part of the sweep is due. Called by every worker process every second or so; cheap when there is nothing to do.
-- A part that fails is told in a warning and comes again; the others go on. Answers with the alerts that it told, for the log.
create or replace function posthouse.tidy() returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  part text;
  began timestamptz;
  alerts jsonb;
begin
  perform posthouse.check_isolation();
  -- Floors come last, since they hold off whoever gives jobs back to the front of the line until the end of this transaction.
  foreach part in array array['stragglers', 'gates', 'shares', 'folds', 'usage', 'partitions', 'tombstones', 'watch', 'alerts', 'floors'] loop
    began := clock_timestamp();
    continue when not case part
      when 'floors' then posthouse.sweep_due(part, interval '1 second')
      when 'stragglers' then posthouse.sweep_due(part, interval '15 seconds')
      -- Work for each job, not housekeeping: it must keep up with the workers.
      when 'tombstones' then posthouse.sweep_due(part, interval '1 second', 4)
      when 'alerts' then posthouse.sweep_due(part, interval '2 seconds')
      when 'gates' then posthouse.sweep_due(part, interval '2 seconds', 20)
      else posthouse.sweep_due(part, interval '10 seconds') end;
    begin
      case part
        when 'stragglers' then perform posthouse.rescue_stragglers();
        when 'gates' then perform posthouse.wake_missed();
        when 'shares' then perform posthouse.make_shares();
        when 'folds' then perform posthouse.fold();
        when 'usage' then perform posthouse.fold_usage();
        when 'partitions' then perform posthouse.partitions_ahead();
        when 'tombstones' then perform posthouse.forget();
        when 'watch' then perform posthouse.watch();
        when 'alerts' then alerts := posthouse.tell_alerts();
        when 'floors' then perform posthouse.advance_floors();
      end case;
    exception when others then
      raise warning 'posthouse: the sweep of % failed and comes again: %', part, sqlerrm;
    end;
    update posthouse.sweep s set took_ms = extract(epoch from clock_timestamp() - began) * 1000 where s.name = part;
  end loop;
  return coalesce(alerts, '[]');
end $$;
