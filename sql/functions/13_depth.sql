-- Depth: how many jobs may wait in a queue, or of a tenant, before new ones are refused. Only new ones are: what was taken in once is
-- retried, rescued and redriven whatever the limit.
--
-- Whether there may be a limit is told by the lane's row, which an enqueue reads anyway. Limits up to 10,000 are counted where they are asked
-- for; larger ones go by what the sweep has counted.

-- Set how many jobs may wait in a queue, or of a tenant, over all its queues: null, as it comes, any number. What waits already stays.
create or replace function posthouse.set_depth(queue text default null, tenant text default null, max_depth int default null) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  what text := case when set_depth.queue is not null then 'queue' else 'tenant' end;
begin
  if num_nonnulls(set_depth.queue, set_depth.tenant) <> 1 then
    raise exception using errcode = 'PH001', message = 'queue, tenant: name one of them';
  end if;
  perform posthouse.check_name(what, coalesce(set_depth.queue, set_depth.tenant));
  if coalesce(set_depth.queue, set_depth.tenant) = '*' and max_depth is not null then
    raise exception using errcode = 'PH001', message = format('%s: ''*'' names no %1$s, and a limit of how many may wait is for one', what),
      hint = 'Set a limit for each that is to have one.';
  end if;
  if max_depth not between 1 and 100000000 then
    raise exception using errcode = 'PH001', message = format('max_depth: %s is not between 1 and 100000000', max_depth),
      hint = 'To let no jobs run, close the gate of the queue or tenant; null takes the limit away.';
  end if;
  if max_depth is null then
    delete from posthouse.depth_limit d where d.scope = what and d.name = coalesce(set_depth.queue, set_depth.tenant);
  else
    insert into posthouse.depth_limit (scope, name, max_depth) values (what, coalesce(set_depth.queue, set_depth.tenant), set_depth.max_depth)
    on conflict on constraint depth_limit_pkey do update set max_depth = excluded.max_depth;
  end if;
  perform posthouse.mark_limited();
end $$;

-- Whether a limit is set for jobs of this queue and tenant.
create or replace function posthouse.is_limited(queue text, tenant text) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
  return exists (select from posthouse.depth_limit d where d.scope = 'queue' and d.name = is_limited.queue)
    or exists (select from posthouse.depth_limit d where d.scope = 'tenant' and d.name = is_limited.tenant);
end $$;

-- Let lanes tell whether a limit is for them. Those that somebody holds, or makes at this moment, are left for the sweep, which calls this again.
create or replace function posthouse.mark_limited() returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  update posthouse.lane l set limited = not l.limited
  where l.id in (
    select x.id from posthouse.lane x
    left join posthouse.depth_limit q on q.scope = 'queue' and q.name = x.queue
    left join posthouse.depth_limit t on t.scope = 'tenant' and t.name = x.tenant
    where x.limited <> (q.name is not null or t.name is not null)
    order by x.id for no key update of x skip locked)
$$;

-- How many jobs wait in a queue or of a tenant that has a limit, counted no further than `most`.
create or replace function posthouse.count_waiting(scope text, name text, most bigint) returns bigint
language plpgsql volatile
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  -- Lanes that sleep with nothing to hold them back have no work; from the floor, so as not to walk over dead rows.
  if scope = 'queue' then
    return (select count(*) from (
      select from posthouse.lane l
      cross join lateral (
        select from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued'
          and j.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at)
        limit most offset 0) j
      where l.queue = count_waiting.name and l.limited and (l.ready_at < 'infinity' or l.blocked_by is not null) limit most) x);
  end if;
  return (select count(*) from (
    select from posthouse.lane l
    cross join lateral (
        select from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued'
          and j.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at)
        limit most offset 0) j
    where l.tenant = count_waiting.name and l.limited and (l.ready_at < 'infinity' or l.blocked_by is not null) limit most) x);
end $$;

-- Count what waits where there is a limit too large to count at each enqueue, and look whether lanes tell of their limits.
create or replace function posthouse.count_depths() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select from posthouse.depth_limit) and not exists (select from posthouse.lane l where l.limited)
     and not exists (select from posthouse.depth_count) then
    return;
  end if;
  perform posthouse.mark_limited();
  perform posthouse.note_depth(d.scope, d.name, d.max_depth) from posthouse.depth_limit d where d.max_depth > 10000;
  delete from posthouse.depth_count c where not exists (
    select from posthouse.depth_limit d where d.scope = c.scope and d.name = c.name and d.max_depth > 10000);
end $$;

-- Count what waits behind a limit, write it down, and answer with it.
create or replace function posthouse.note_depth(scope text, name text, max_depth int) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  now_at timestamptz := clock_timestamp();
  n bigint := posthouse.count_waiting(note_depth.scope, note_depth.name, max_depth);
begin
  insert into posthouse.depth_count (scope, name, counted_at, jobs) values (note_depth.scope, note_depth.name, now_at, n)
  on conflict do nothing;
  delete from posthouse.depth_count c where c.scope = note_depth.scope and c.name = note_depth.name and c.counted_at < now_at;
  return n;
end $$;

-- Raise PH010 where so many new jobs of these queues and tenants are more than may wait.
create or replace function posthouse.check_depth(queues text[], tenants text[], jobs int[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  l record;
  waiting bigint;
begin
  for l in
    select d.scope, d.name, d.max_depth, n.jobs
    from (select 'queue' as scope, q as name, sum(j) as jobs from unnest(check_depth.queues, check_depth.jobs) x(q, j) group by q
          union all
          select 'tenant', t, sum(j) from unnest(check_depth.tenants, check_depth.jobs) x(t, j) group by t) n
    join posthouse.depth_limit d on d.scope = n.scope and d.name = n.name
    where n.jobs > 0
    order by d.scope, d.name
  loop
    waiting := posthouse.depth_of(l.scope, l.name, l.max_depth, l.jobs);
    if waiting + l.jobs > l.max_depth then
      raise exception using errcode = 'PH010',
        message = format('%s %s is full: %s jobs wait, %s may', l.scope, quote_literal(l.name), waiting, l.max_depth),
        detail = format('Room for %s more.', greatest(l.max_depth - waiting, 0)),
        hint = format('Enqueue again when some have run; or raise the limit with `posthouse %s set %s --max-depth N`, in SQL posthouse.set_depth(%s => %s, max_depth => …).',
          l.scope, quote_literal(l.name), l.scope, quote_literal(l.name)),
        table = l.scope, constraint = l.name;
    end if;
  end loop;
end $$;

-- How many wait behind a limit, for somebody who wants to add so many.
create or replace function posthouse.depth_of(scope text, name text, max_depth int, more bigint) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  counted posthouse.depth_count;
  waiting bigint;
begin
  if max_depth <= 10000 then
    waiting := posthouse.count_waiting(depth_of.scope, depth_of.name, max_depth);
    -- Near the limit those who enqueue at the same moment go one after the other, as far as that takes no longer than a tenth of a second; not
    -- a transaction that goes on for longer, which would keep them waiting until its end.
    if waiting + more <= max_depth and waiting + more + 64 > max_depth and posthouse.is_alone() then
      for i in 1 .. 50 loop
        exit when pg_try_advisory_xact_lock(1346912008, hashtext(depth_of.scope || ':' || depth_of.name));
        perform pg_sleep(0.002);
      end loop;
      waiting := posthouse.count_waiting(depth_of.scope, depth_of.name, max_depth);
    end if;
    return waiting;
  end if;
  select c.* into counted from posthouse.depth_count c where c.scope = depth_of.scope and c.name = depth_of.name
  order by c.scope desc, c.name desc, c.counted_at desc limit 1;
  -- Nobody swept lately: whoever comes first counts anew.
  if (counted.counted_at > clock_timestamp() - interval '30 seconds') is not true
     and pg_try_advisory_xact_lock(1346912008, hashtext(depth_of.scope || ':' || depth_of.name)) then
    return posthouse.note_depth(depth_of.scope, depth_of.name, max_depth);
  end if;
  return coalesce(counted.jobs, 0);
end $$;
