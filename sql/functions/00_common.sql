-- What the other functions share: checks of names, cleaning of what cannot be stored, lanes.
--
-- Functions that read big tables forbid sequential and bitmap scans: a plan made on an empty table is kept by its session, and
-- must be one that will do when the table is full.
--
-- A backslash stands in E'' strings only: in others it depends on the caller's standard_conforming_strings.

-- Raise PH001 unless a name is 1 to 200 bytes without control characters.
create or replace function posthouse.check_name(field text, value text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  if value is null or value = '' then
    raise exception using errcode = 'PH001', message = format('%s: must not be empty', field);
  elsif octet_length(value) > 200 then
    raise exception using errcode = 'PH001',
      message = format('%s: %s bytes long, at most 200 are allowed', field, octet_length(value));
  elsif value ~ '[[:cntrl:]]' then
    raise exception using errcode = 'PH001', message = format('%s: must not contain control characters', field);
  end if;
end $$;

-- Raise PH002 unless the transaction is READ COMMITTED: claims and settles look again after they have locked.
create or replace function posthouse.check_isolation() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'PH002',
      message = format('this function needs READ COMMITTED, the transaction is %s',
                       upper(current_setting('transaction_isolation'))),
      hint = 'Start the transaction with BEGIN ISOLATION LEVEL READ COMMITTED.';
  end if;
end $$;

-- Text of at most 16 KiB: the head and a mark that says how much was cut.
create or replace function posthouse.cap_text(value text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select case
    when octet_length(value) <= 16384 then value
    else left(value, 4000) || format(' … [cut: %s bytes in all]', octet_length(value))
  end
$$;

-- JSON text without what jsonb cannot hold: NUL characters and lone surrogates become U+FFFD. Escaped backslashes are put
-- aside meanwhile, as a control character that JSON text cannot contain, so that every \u that is left is an escape.
create or replace function posthouse.clean_json(value text) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select replace(regexp_replace(regexp_replace(regexp_replace(replace(value, E'\\\\', chr(1)),
      E'\\\\u0000', E'\\\\ufffd', 'g'),
      E'\\\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\\\u[dD][c-fC-F][0-9a-fA-F]{2})', E'\\\\ufffd', 'g'),
      E'(?<!\\\\u[dD][89abAB][0-9a-fA-F]{2})\\\\u[dD][c-fC-F][0-9a-fA-F]{2}', E'\\\\ufffd', 'g'), chr(1), E'\\\\')
$$;

-- The wait after failed attempt n where the worker named none: exponential from 2 s, full jitter, at most 10 minutes.
create or replace function posthouse.backoff(attempt int) returns interval
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select make_interval(secs => greatest(0.1, random() * least(600.0, 2.0 * 2.0 ^ least(greatest(attempt, 1) - 1, 30))))
$$;

-- When a worker's lease ends. For one lease after a start of Postgres nobody's lease is over: while it was down,
-- nobody could beat and nobody could take.
create or replace function posthouse.lease_end(w posthouse.worker) returns timestamptz
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select greatest(w.expires_at, pg_postmaster_start_time() + make_interval(secs => w.lease_ms / 1000.0))
$$;

-- Hold off the sleep of a lane until the end of this transaction. Shared among enqueuers; only the one who wants to put
-- the lane to sleep tries for it alone, and never waits. Lanes share 128 locks: Postgres has room for about twice 64 (the
-- usual max_locks_per_transaction) a connection, and a transaction may enqueue for thousands of tenants.
create or replace function posthouse.hold_lane(lane_id bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int);
end $$;

-- How long a lane stays awake that is woken now, or whose time awake ends while it is in use: it does so for 10 seconds at first, then
-- 90, then 810, until it has slept for an hour. Few naps, since each leaves dead index entries that claims walk over for as long as
-- somebody holds a snapshot.
create or replace function posthouse.naps(l posthouse.lane) returns int
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select case when greatest(l.awake_until, l.in_use_until) < clock_timestamp() - interval '1 hour' then 0 else least(l.naps + 1, 2) end
$$;

-- Make sure that a lane is awake for a job due at `due`; the answer is the lane to put the job into: this one, or a
-- twin of it where somebody else's open transaction holds it.
create or replace function posthouse.wake_lane(lane_id bigint, due timestamptz) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  l posthouse.lane;
  woken bigint;
begin
  perform posthouse.hold_lane(lane_id);
  if current_setting('transaction_isolation') = 'read committed' then
    select * into l from posthouse.lane where lane.id = lane_id;
  else
    -- An old snapshot does not show whether the lane fell asleep since: the lock does (or fails with 40001).
    select * into l from posthouse.lane where lane.id = lane_id for share skip locked;
  end if;
  -- What a gate holds back is woken when that opens.
  if l.ready_at <= due or l.blocked_by is not null then
    return lane_id;
  end if;
  if l.id is null then
    select * into l from posthouse.lane where lane.id = lane_id;
  end if;
  -- Its twins, made by those who met this before, are as good.
  update posthouse.lane set
    ready_at = least(lane.ready_at, due),
    naps = posthouse.naps(lane),
    awake_until = greatest(clock_timestamp(), due) + interval '10 seconds' * 9 ^ posthouse.naps(lane)
  where lane.id = (
    select x.id from posthouse.lane x
    where x.queue = l.queue and x.tenant = l.tenant and x.kind = l.kind and x.priority = l.priority and x.gates = l.gates
      and x.serial = l.serial
    order by x.id <> lane_id, x.id limit 1 for no key update skip locked)
  returning lane.id into woken;
  if found then
    if woken <> lane_id then
      perform posthouse.hold_lane(woken);
    end if;
    return woken;
  end if;
  insert into posthouse.lane (queue, priority, tenant, kind, gates, serial, limited, ready_at, awake_until)
  values (l.queue, l.priority, l.tenant, l.kind, l.gates, l.serial, l.limited, due, greatest(clock_timestamp(), due) + interval '10 seconds')
  returning lane.id into lane_id;
  perform posthouse.hold_lane(lane_id);
  return lane_id;
end $$;

-- The lane for a job with these names that is due at `due`, awake.
create or replace function posthouse.lane_for(queue text, priority int, tenant text, kind text, gates text[], serial text, due timestamptz) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  lane_id bigint;
begin
  select l.id into lane_id from posthouse.lane l
  where l.queue = lane_for.queue and l.tenant = lane_for.tenant and l.kind = lane_for.kind and l.priority = lane_for.priority
    and l.gates = lane_for.gates and l.serial = lane_for.serial
  order by l.ready_at, l.id limit 1;
  if found then
    return posthouse.wake_lane(lane_id, due);
  end if;
  insert into posthouse.lane (queue, priority, tenant, kind, gates, serial, limited, ready_at, awake_until)
  values (lane_for.queue, lane_for.priority, lane_for.tenant, lane_for.kind, lane_for.gates, lane_for.serial,
          posthouse.is_limited(lane_for.queue, lane_for.tenant), due,
          greatest(clock_timestamp(), due) + interval '10 seconds')
  returning lane.id into lane_id;
  perform posthouse.hold_lane(lane_id);
  return lane_id;
end $$;

-- The floor that is common to all lanes, and whether some are behind it and have one of their own: see posthouse.advance_floors. One
-- that was read a moment ago is good for all jobs that were there then.
create or replace function posthouse.common_floor() returns posthouse.lane_floor
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  common posthouse.lane_floor;
begin
  select * into common from posthouse.lane_floor f where f.lane_id = 0 order by f.seq desc limit 1;
  common.floor_at := coalesce(common.floor_at, '-infinity');
  return common;
end $$;

-- The floor of a lane.
create or replace function posthouse.floor_of(lane_id bigint) returns timestamptz
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  return coalesce(case when common.behind then (
    select f.floor_at from posthouse.lane_floor f where f.lane_id = floor_of.lane_id order by f.seq desc limit 1) end, common.floor_at);
end $$;

-- Tell listening workers that a queue has work. A hint: whoever misses it finds the work at the next poll.
create or replace function posthouse.notify_queue(queue text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if current_setting('posthouse.notify', true) is distinct from 'off' then
    perform pg_notify('posthouse_wake', queue);
  end if;
end $$;

-- Whether this statement is a transaction of its own, as far as can be told, under READ COMMITTED: what it sees is what is so when
-- it commits.
create or replace function posthouse.is_alone() returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return statement_timestamp() < transaction_timestamp() + interval '20 milliseconds'
    and current_setting('transaction_isolation') = 'read committed';
end $$;

-- Tell listening workers of new jobs in these lanes, once a queue. Not of lanes where a job has been due for three seconds: no
-- worker sleeps that could have taken that one, since all poll. Looks from the newest end, where the jobs are that nobody has
-- taken yet, back to the floor and no further than ten seconds; where workers keep up, floors move up every second, and there
-- is nothing in between. A transaction that goes on for longer always tells: they may have caught up when it commits.
create or replace function posthouse.notify_lanes(lanes bigint[], queues text[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  told text[] := '{}';
  long_ago timestamptz := clock_timestamp() - interval '3 seconds';
  longer_ago timestamptz := long_ago - interval '7 seconds';
  alone boolean := posthouse.is_alone();
  behind boolean;
begin
  for i in 1 .. cardinality(lanes) loop
    continue when lanes[i] is null or queues[i] = any(told);
    behind := alone and (
      select true from posthouse.job j
      where j.lane_id = lanes[i] and j.state = 'queued' and j.run_at < long_ago
        and j.run_at >= greatest(longer_ago, coalesce(case when common.behind then (
          select f.floor_at from posthouse.lane_floor f where f.lane_id = lanes[i] order by f.seq desc limit 1) end, common.floor_at))
      order by j.lane_id desc, j.run_at desc, j.id desc limit 1);
    continue when behind;
    told := told || queues[i];
    perform posthouse.notify_queue(queues[i]);
  end loop;
end $$;
