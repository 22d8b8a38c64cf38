-- Leases: heartbeat with reconcile, rescue of the jobs of dead workers.

-- The jobs that a worker runs, with the claim that took them. Finds them by the claims from `from_seq` on, so that it costs
-- the same however many jobs the worker has done before. Most have ended when it looks. Where the ids of a claim lie close together, which is
-- usual, one walk from the first to the last finds those that run in a third of the time that it takes to look up each.
create or replace function posthouse.running_jobs(worker uuid, from_seq bigint)
returns table (seq bigint, id bigint, fence bigint, cancel_asked boolean)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = off             -- within a claim: its jobs that still run against its list, by hash
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
    select c.seq, j.id, j.fence::bigint, j.cancel_asked
    from posthouse.claimed c
    cross join lateral (
      select min(i) as first_id, max(i) as last_id, max(i) - min(i) < 4 * count(*) as is_dense from unnest(c.job_ids) i offset 0) ids
    cross join lateral (
      select j.id, j.fence, j.cancel_asked
      from (
        select x.id, x.fence, x.cancel_asked from posthouse.job x
        where not ids.is_dense and x.id = any(c.job_ids) and x.worker = running_jobs.worker and x.state = 'running'
        union all
        select x.id, x.fence, x.cancel_asked from posthouse.job x
        where ids.is_dense and x.id >= ids.first_id and x.id <= ids.last_id and x.worker = running_jobs.worker and x.state = 'running') j
      join unnest(c.job_ids, c.fences) u(id, fence) on u.id = j.id and u.fence = j.fence offset 0) j
    where c.worker = running_jobs.worker and c.seq >= from_seq;
end $$;

-- Renew a worker's lease. No row: this incarnation is over; abort its handlers and register anew.
--
-- Reconcile: `mark` is the highest claim seq at or below which every claim was answered or given up, `oldest` the lowest one
-- with a job still held (mark + 1 if none), and the held jobs are those of claims up to the mark, from the claim's answer
-- until the settle's. First send their number and the sums of their ids and fences; on `mismatch` send the lists: then the
-- jobs up to the mark that are not held go back uncharged, and `lost` names the held ones that are no longer this worker's.
-- `cancel` names the jobs that somebody asked to cancel.
create or replace function posthouse.heartbeat(worker uuid, mark bigint default 0, oldest bigint default 1, held_count bigint default null,
  held_id_sum numeric default null, held_fence_sum numeric default null, held_ids bigint[] default null, held_fences bigint[] default null)
returns table (expires_in_ms bigint, mismatch boolean, cancel bigint[], lost bigint[], released int)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  before posthouse.worker;
  now_at timestamptz;
  from_seq bigint;
  claims bigint;                      -- of those that were looked at
  jobs bigint;
  id_sum numeric;
  fence_sum numeric;
  first_seq bigint;                   -- the lowest claim that still has a job in flight
  stray record;
begin
  perform posthouse.check_isolation();
  -- Looks through the claims before it locks the worker's row, since claims wait for that. Look again if a claim up to the mark
  -- committed meanwhile: later than that, none can (its number is refused).
  select w.oldest_seq into from_seq from posthouse.worker w where w.id = heartbeat.worker;
  loop
    select count(*) into claims from posthouse.claimed c
    where c.worker = heartbeat.worker and c.seq >= from_seq and c.seq <= heartbeat.mark;
    select count(*) filter (where j.seq <= heartbeat.mark), coalesce(sum(j.id) filter (where j.seq <= heartbeat.mark), 0),
      coalesce(sum(j.fence) filter (where j.seq <= heartbeat.mark), 0), coalesce(array_agg(j.id) filter (where j.cancel_asked), '{}'),
      min(j.seq)
    into jobs, id_sum, fence_sum, cancel, first_seq
    from posthouse.running_jobs(heartbeat.worker, from_seq) j;
    exit when before.id is not null;
    select * into before from posthouse.worker w where w.id = heartbeat.worker for no key update;
    now_at := clock_timestamp();
    if not found or before.dead_at is not null or posthouse.lease_end(before) <= now_at then
      return;
    end if;
    exit when before.oldest_seq = from_seq and claims = (
      select count(*) from posthouse.claimed c
      where c.worker = heartbeat.worker and c.seq >= from_seq and c.seq <= heartbeat.mark);
    from_seq := before.oldest_seq;
  end loop;
  expires_in_ms := before.lease_ms;
  released := 0;
  lost := '{}';
  mismatch := held_ids is null and held_count is not null
    and (jobs, id_sum, fence_sum) is distinct from (held_count, held_id_sum, held_fence_sum);
  if held_ids is not null then
    lost := array(
      select h.id from unnest(held_ids, held_fences) h(id, fence)
      where not exists (
        select from posthouse.running_jobs(heartbeat.worker, before.oldest_seq) j where j.id = h.id and j.fence = h.fence));
    for stray in
      select j.id, j.fence from posthouse.running_jobs(heartbeat.worker, before.oldest_seq) j
      where j.seq <= heartbeat.mark
        and not exists (select from unnest(held_ids, held_fences) h(id, fence) where h.id = j.id and h.fence = j.fence)
    loop
      released := released + posthouse.take_back(heartbeat.worker, stray.id, stray.fence, true, true)::int;
    end loop;
    select min(j.seq) into first_seq from posthouse.running_jobs(heartbeat.worker, before.oldest_seq) j;
  end if;
  -- Claims up to the mark whose jobs are all settled are over: one that comes later than this is refused by its number.
  first_seq := greatest(before.oldest_seq, least(heartbeat.oldest, heartbeat.mark + 1, first_seq));
  -- Bounded from below, so that it does not walk over what it deleted before.
  delete from posthouse.claimed c where c.worker = heartbeat.worker and c.seq >= before.oldest_seq and c.seq < first_seq;
  update posthouse.worker w set beat_at = now_at, expires_at = now_at + make_interval(secs => w.lease_ms / 1000.0),
    oldest_seq = first_seq, mark_seq = greatest(w.mark_seq, heartbeat.mark)
  where w.id = heartbeat.worker;
  return next;
end $$;

-- Take a running job back from a worker: to the front of its line. Refunded where the attempt cannot have begun; else it
-- counts, with the error "worker lost", and the last one makes the job a dead letter. `unsent`: it was never started, so that what it
-- reserved behind gates is given back. False: somebody else was faster.
create or replace function posthouse.take_back(worker uuid, id bigint, fence bigint, refund boolean, unsent boolean default false)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  j posthouse.job;
  w posthouse.worker;
begin
  select x.* into j from posthouse.job x
  where x.id = take_back.id and x.worker = take_back.worker and x.fence = take_back.fence and x.state = 'running'
  for update skip locked;
  if j.id is null then
    return false;
  end if;
  if j.reserved is not null then
    if unsent then
      perform posthouse.settle_gates(array[j], array[null]::jsonb[], array[false], false);
    end if;
    perform posthouse.free_gates(j.lane_id);
    perform posthouse.wake_blocked(a, null, 1) from unnest(j.admitted[3:]) a;
  end if;
  if j.cancel_asked then
    perform posthouse.archive_job(j, 'cancelled', null, null);
    return true;
  elsif not refund then
    select * into w from posthouse.worker x where x.id = take_back.worker;
    if j.attempt >= j.max_attempts then
      perform posthouse.bury_job(j, 'worker_lost', posthouse.lost_text(w), null, null);
      return true;
    end if;
    perform posthouse.record_error(j, 'worker_lost', posthouse.lost_text(w), null, null);
  end if;
  perform posthouse.requeue_job(j, clock_timestamp(), true, refund, case when refund then 'released' else 'worker lost' end,
    case when not unsent then true end);
  -- Nobody's attempt any more: a late settle of it must hear "lost", not "already".
  update posthouse.job x set worker = null where x.id = take_back.id;
  return true;
end $$;

-- The error of an attempt whose worker went away.
create or replace function posthouse.lost_text(w posthouse.worker) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case when w.id is null then 'worker lost: it has no row any more'
    else format('worker lost: %s pid %s, last heartbeat %s, lease over %s', w.host, w.pid, w.beat_at, posthouse.lease_end(w)) end
$$;

-- Declare workers dead whose lease is over, and take back the jobs of the dead: at most `max_jobs` in one call. `suspects` are
-- those whose beat the caller saw stand still for a whole lease on its own clock, as [{"worker", "beat_at"}]: the database's
-- clock alone may have jumped. Answers how many jobs moved and whether there are more.
create or replace function posthouse.rescue(suspects jsonb, max_jobs int default 1000, out jobs int, out more boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  s record;
  w posthouse.worker;
  c record;
  taken boolean;
begin
  perform posthouse.check_isolation();
  jobs := 0;
  more := false;
  for s in select (e ->> 'worker')::uuid as id, (e ->> 'beat_at')::timestamptz as beat_at from jsonb_array_elements(suspects) e loop
    -- Lock, look again, and only then, in a later statement, touch the jobs: a late heartbeat either came first, and is
    -- seen here, or finds the worker dead.
    select * into w from posthouse.worker x where x.id = s.id for update skip locked;
    if found and w.dead_at is null and w.beat_at = s.beat_at and posthouse.lease_end(w) <= clock_timestamp() then
      update posthouse.worker x set dead_at = clock_timestamp() where x.id = s.id;
    end if;
  end loop;
  -- The jobs of the dead, whoever declared them so. A claim is locked so that two sweeps share the work instead of waiting
  -- for each other. Claims whose worker has no row get one by posthouse.fold.
  for c in
    select x.worker, x.seq
    from (select y.id, y.oldest_seq from posthouse.worker y where y.dead_at is not null order by y.dead_at) d
    cross join lateral (
      select x.worker, x.seq from posthouse.claimed x where x.worker = d.id and x.seq >= d.oldest_seq
      order by x.worker, x.seq limit 1000 for update skip locked) x
    limit 1000
  loop
    if jobs >= max_jobs then
      more := true;
      return;
    end if;
    jobs := jobs + posthouse.take_back_claim(c.worker, c.seq);
  end loop;
end $$;

-- Take back all jobs of a dead worker's claim, and forget the claim.
create or replace function posthouse.take_back_claim(worker uuid, seq bigint) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  left_over int;
  moved int;
begin
  select coalesce(sum(posthouse.take_back(take_back_claim.worker, u.id, u.fence, false)::int), 0) into moved
  from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence)
  where c.worker = take_back_claim.worker and c.seq = take_back_claim.seq;
  select count(*) into left_over
  from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence)
  cross join lateral (
    select from posthouse.job j where j.id = u.id and j.worker = c.worker and j.fence = u.fence and j.state = 'running' offset 0) j
  where c.worker = take_back_claim.worker and c.seq = take_back_claim.seq;
  if left_over = 0 then
    delete from posthouse.claimed c where c.worker = take_back_claim.worker and c.seq = take_back_claim.seq;
  end if;
  return moved;
end $$;

-- The workers that are not dead, with the beat to watch.
create or replace function posthouse.worker_beats() returns table (worker uuid, beat_at timestamptz, lease_ms bigint, expired boolean)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select w.id, w.beat_at, w.lease_ms, posthouse.lease_end(w) <= clock_timestamp() from posthouse.worker w where w.dead_at is null
$$;

-- End a worker's life in good order: what it still holds goes back uncharged.
create or replace function posthouse.retire_worker(worker uuid) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  from_seq bigint;
  left_over bigint[];
begin
  perform posthouse.check_isolation();
  update posthouse.worker w set dead_at = clock_timestamp() where w.id = retire_worker.worker and w.dead_at is null;
  select w.oldest_seq into from_seq from posthouse.worker w where w.id = retire_worker.worker;
  perform posthouse.take_back(retire_worker.worker, j.id, j.fence, true) from posthouse.running_jobs(retire_worker.worker, from_seq) j;
  -- What a settle holds at this moment is left to the rescue.
  left_over := array(select j.seq from posthouse.running_jobs(retire_worker.worker, from_seq) j);
  delete from posthouse.claimed c where c.worker = retire_worker.worker and c.seq >= from_seq and c.seq <> all(left_over);
end $$;
