-- Expired jobs go by slices of 10,000 ids, each of which knows when it is due. A slice is due when its earliest row has been
-- expired for a sixteenth of its time, at most a day, so that many go at once, and so that a partition that is over by then is dropped whole.
--
-- Two parts of the sweep do it. `slices` looks at those of which nothing is known, or no longer (`stale`), and deletes nothing: it may have
-- all of history to read, and takes its time. `expire` deletes by rows what is due and does not go with its partition. Neither
-- waits for the other, but for one thing: a partition may turn out to be over while slices of it are still stale.

-- Make the slices of ids that have been handed out since, some at a time. True: there are more.
create or replace function posthouse.cut_slices() returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_custom_plan
as $$
declare
  last_id bigint := (select s.last_value from posthouse.job_id_seq s);
  -- After the look at the sequence: who takes an id later gets a higher one.
  now_taking text[] := posthouse.holders(array['posthouse.job_id_seq'::regclass]);
  r posthouse.id_range;
  cut_to bigint;
begin
  update posthouse.slice s set takers = now_taking where s.takers is null and s.lower + 10000 <= last_id + 1;
  select x.* into r from posthouse.id_range x where x.sliced_to < x.upper and x.sliced_to <= last_id order by x.lower limit 1;
  if r.lower is null then
    return false;
  end if;
  cut_to := least(r.upper, (last_id / 10000 + 1) * 10000, r.sliced_to + 5000000);
  insert into posthouse.slice (lower, takers)
  select n, case when n + 10000 <= last_id + 1 then now_taking end
  from generate_series(r.sliced_to, cut_to - 1, 10000) n
  on conflict (lower) do update set stale = true;
  update posthouse.id_range x set sliced_to = cut_to where x.lower = r.lower;
  return true;
end $$;

-- What ended in a slice, but for some jobs that are held back: when it is due (null: never), when all that is done or cancelled in it has
-- expired, and for how long what is kept. Without the archive: of its dead letters only. A day is 24 hours here, wherever the caller is.
create or replace function posthouse.survey_slice(lo bigint, held bigint[], archived boolean, out due_at timestamptz, out over_at timestamptz,
  out lanes bigint[], out states text[], out keeps interval[])
language plpgsql
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = off
set plan_cache_mode = force_custom_plan
as $$
begin
  -- Not `not`, which would be looked up one by one in older versions of Postgres.
  with ended as materialized (
    select a.lane_id, a.state, min(a.finished_at) filter (where (a.id = any(held)) is not true) as first_at, max(a.finished_at) as last_at
    from posthouse.archive a
    where archived and a.id >= lo and a.id < lo + 10000 group by a.lane_id, a.state
    union all
    select d.lane_id, 'failed', min(d.failed_at) filter (where (d.id = any(held)) is not true), null
    from posthouse.dead_letter d
    where d.id >= lo and d.id < lo + 10000 group by d.lane_id
  ), named as materialized (
    select e.lane_id, e.state::text, e.first_at, e.last_at, l.queue
    from ended e cross join lateral (select l.queue from posthouse.lane l where l.id = e.lane_id offset 0) l
  ), kept as materialized (
    select n.queue, n.state, posthouse.retention_of(n.queue, n.state) as keep from (select distinct n.queue, n.state from named n) n
  )
  select min(n.first_at + k.keep + least(k.keep / 16, interval '1 day')),
    coalesce(max(coalesce(n.last_at + k.keep, 'infinity')) filter (where n.state <> 'failed'), '-infinity'),
    array_agg(n.lane_id), array_agg(n.state), array_agg(k.keep)
  into due_at, over_at, lanes, states, keeps
  from named n join kept k on k.queue = n.queue and k.state = n.state;
end $$;

-- Delete what has expired in a slice, so many jobs at most, but for some that are held back. Answers with their number.
create or replace function posthouse.delete_expired(lo bigint, now_at timestamptz, held bigint[], lanes bigint[], states text[], keeps interval[],
  max_jobs int)
returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set timezone = 'UTC'
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_nestloop = off
set plan_cache_mode = force_custom_plan
as $$
declare
  gone bigint[];
begin
  -- Looked up and deleted by one snapshot: one that comes back meanwhile and ends anew has another row. Who just brings one back is not
  -- waited for, or one open transaction would keep all others from going.
  with dead as materialized (
    select d.id
    from posthouse.dead_letter d
    join unnest(lanes, states, keeps) k(lane_id, state, keep) on k.lane_id = d.lane_id and k.state = 'failed'
    where d.id >= lo and d.id < lo + 10000 and d.failed_at + k.keep <= now_at and (d.id = any(held)) is not true
    limit max_jobs for update of d skip locked
  ), archived as materialized (
    select a.id
    from posthouse.archive a
    join unnest(lanes, states, keeps) k(lane_id, state, keep) on k.lane_id = a.lane_id and k.state = a.state::text
    where a.id >= lo and a.id < lo + 10000 and a.finished_at + k.keep <= now_at and (a.id = any(held)) is not true
      and exists (select from unnest(states) s(state) where s.state <> 'failed')
    limit max_jobs - (select count(*) from dead) for update of a skip locked
  ), dead_gone as (
    delete from posthouse.dead_letter d where d.id = any(array(select x.id from dead x)) returning d.id
  ), archived_gone as (
    delete from posthouse.archive a where a.id = any(array(select x.id from archived x)) and a.id >= lo and a.id < lo + 10000 returning a.id
  )
  select array_agg(g.id) into gone from (select id from dead_gone union all select id from archived_gone) g;
  delete from posthouse.payload p where p.id = any(gone) and p.id >= lo and p.id < lo + 10000;
  delete from posthouse.spare_payload p where p.id = any(gone);
  return coalesce(cardinality(gone), 0);
end $$;

-- Whether jobs may still end in a slice. `takers`: transactions that may hold ids of it; those that do not any more are left out.
create or replace function posthouse.is_open(lo bigint, inout takers text[], out is_open boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  now_taking text[];
begin
  if takers <> '{}' then
    now_taking := posthouse.holders(array['posthouse.job_id_seq'::regclass]);
    -- One that was prepared goes by another name after a start of Postgres, or at once on older ones.
    if not (takers && now_taking or exists (select from unnest(now_taking) h(name) where h.name like '-1/%')) then
      takers := '{}';
    end if;
  end if;
  -- By a later snapshot than the look at the takers, since one of them may have committed in between.
  is_open := takers is null or takers <> '{}'
    or exists (select from posthouse.job j where j.id >= lo and j.id < lo + 10000)
    or exists (select from posthouse.tombstone t where t.id >= lo and t.id < lo + 10000);
end $$;

-- Look after a slice: delete what has expired in it, so many jobs at most, and if there was nothing to delete, note when it is due again.
-- Answers with how many were deleted. `max_jobs` zero: it is only looked at.
create or replace function posthouse.visit_slice(s posthouse.slice, shortest interval, max_jobs int) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_custom_plan
as $$
declare
  lo bigint := s.lower;
  now_at timestamptz := clock_timestamp();
  r posthouse.id_range;
  later interval;                     -- for so long its archive is left alone
  held bigint[];                      -- jobs for which a dedupe key stands,
  held_from timestamptz;              -- until when the first of them,
  held_until timestamptz;             -- and the last
  place record;
  found record;
  jobs int := 0;
begin
  select x.* into r from posthouse.id_range x where x.lower <= lo and x.upper > lo;
  -- Its partition is dropped whole, or may be once the slices next to it are known. Dead letters lie elsewhere.
  later := case when max_jobs = 0 or r.lower is null then null when posthouse.is_over(r) then interval '1 hour'
    when posthouse.is_over(r, true) then interval '1 minute' end;
  -- Before the look at what has ended: a job may end in between.
  select * into place from posthouse.is_open(lo, s.takers);
  select coalesce(array_agg(d.job_id), '{}'), min(d.expires_at), max(d.expires_at) into held, held_from, held_until
  from posthouse.dedupe d where d.job_id >= lo and d.job_id < lo + 10000 and d.expires_at > now_at;
  select * into found from posthouse.survey_slice(lo, held, later is null);
  if max_jobs > 0 and found.due_at <= now_at then
    jobs := posthouse.delete_expired(lo, now_at, held, found.lanes, found.states, found.keeps, max_jobs);
    if jobs > 0 then
      return jobs;
    end if;
    found.due_at := now_at + interval '1 minute';
  elsif r.lower is null and found.lanes is null and not place.is_open then
    delete from posthouse.slice x where x.lower = lo;
    return 0;
  end if;
  update posthouse.slice x set
    due_at = least(found.due_at, case when held <> '{}' then greatest(held_from, now_at + interval '1 hour') end, now_at + later,
      case when place.is_open and shortest is not null then now_at + least(greatest(shortest, interval '5 minutes'), interval '1 day') end, 'infinity'),
    over_at = case when later is not null then x.over_at when place.is_open then 'infinity' else greatest(found.over_at, held_until) end,
    stale = x.stale and later is not null,
    takers = place.takers
  where x.lower = lo;
  return 0;
end $$;

-- Look at slices of which nothing is known, for some time. True: there are more.
create or replace function posthouse.survey_slices(budget interval default '10 milliseconds') returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  stop_at timestamptz := clock_timestamp() + budget;
  shortest interval;
  s posthouse.slice;
begin
  if not pg_try_advisory_xact_lock(1346912000, 6) then
    return false;
  end if;
  shortest := posthouse.shortest_retention();
  while shortest is not null and posthouse.cut_slices() loop
    if clock_timestamp() >= stop_at then
      return true;
    end if;
  end loop;
  with back as (
    delete from posthouse.revived v where v.id in (select x.id from posthouse.revived x order by x.id limit 1000 for update skip locked) returning v.id
  )
  update posthouse.slice x set stale = true where x.lower in (select b.id / 10000 * 10000 from back b);
  -- By one scan: who holds a snapshot keeps the index entries of those that were looked at.
  for s in select x.* from posthouse.slice x where x.stale order by x.lower loop
    perform posthouse.visit_slice(s, shortest, 0);
    if clock_timestamp() >= stop_at then
      return true;
    end if;
  end loop;
  return false;
end $$;

-- Delete jobs that have expired, so many at most, for some time. True: there are more.
create or replace function posthouse.expire(max_jobs int default 1000, budget interval default '10 milliseconds') returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  stop_at timestamptz := clock_timestamp() + budget;
  shortest interval;
  s posthouse.slice;
  n int;
  jobs int := 0;
begin
  if not pg_try_advisory_xact_lock(1346912000, 6) then
    return false;
  end if;
  shortest := posthouse.shortest_retention();
  for s in select x.* from posthouse.slice x where x.due_at <= clock_timestamp() order by x.due_at, x.lower loop
    -- Until nothing more is found in it, which is noted.
    loop
      n := posthouse.visit_slice(s, shortest, max_jobs - jobs);
      jobs := jobs + n;
      if jobs >= max_jobs or clock_timestamp() >= stop_at then
        return true;
      end if;
      exit when n = 0;
    end loop;
  end loop;
  return false;
end $$;
