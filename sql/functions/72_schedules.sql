-- Schedules: cron rules that enqueue. People set them; the sweep of any process of the library fires them.
--
-- A sweep asks posthouse.due_schedules() which are due, works out their ticks, and hands these to posthouse.fire_schedule(), which takes
-- them only if nobody else has moved the schedule on since. So two sweeps at once, one that believes to be alone, and one that ends in
-- the middle come to the same: one job a tick. Times of the wall clock are given and taken in whole seconds since 1970.

-- Set a schedule: make it, or change it. `job` is an object as posthouse.enqueue_many takes it, of which a new one is enqueued at each tick.
-- Answers `new`, `changed` or `same`; what has been set already may be set again at any time. Whether the rule can be read is
-- known to the library only: one that cannot is told in posthouse.schedules a second later, and in an alert.
create or replace function posthouse.set_schedule(
  name text,
  cron text,                          -- as in '30 8 * * MON-FRI', or a nickname such as @daily
  job jsonb,                          -- such as {"kind": "report", "payload": {}, "tenant": "acme"}
  timezone text default 'UTC',        -- by whose clocks: a name such as Europe/Rome
  catch_up text default 'one',        -- of ticks that nobody saw in time: `skip` them all, make up for `one`, or for `all`
  catch_up_max int default 10,        -- with `all`: for so many at most, the newest
  catch_up_over interval default '10 minutes', -- with `all`: spread over so long
  jitter interval default '0',        -- let jobs be due so much later at most, each as its tick decides
  source text default null)           -- the file that declares it
returns text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  was posthouse.schedule;
  now_at timestamptz := clock_timestamp();
begin
  perform posthouse.check_schedule(name, cron, job, timezone, catch_up, catch_up_max, catch_up_over, jitter, source);
  if session_user <> current_user then
    perform posthouse.check_enqueue(coalesce(job ->> 'tenant', 'default'), job ->> 'kind');
  end if;
  insert into posthouse.schedule (name, cron, timezone, job, tenant, catch_up, catch_up_max, catch_up_over, jitter, source, changed_at, since)
  values (set_schedule.name, set_schedule.cron, set_schedule.timezone, set_schedule.job, coalesce(set_schedule.job ->> 'tenant', 'default'),
    set_schedule.catch_up, set_schedule.catch_up_max, set_schedule.catch_up_over, set_schedule.jitter, set_schedule.source, now_at, now_at)
  on conflict do nothing;
  if found then
    return 'new';
  end if;
  select * into was from posthouse.schedule s where s.name = set_schedule.name for update;
  if not found then
    -- Somebody removes it just now.
    return posthouse.set_schedule(name, cron, job, timezone, catch_up, catch_up_max, catch_up_over, jitter, source);
  end if;
  if (was.cron, was.timezone, was.job, was.catch_up, was.catch_up_max, was.catch_up_over, was.jitter, was.source)
     is not distinct from (set_schedule.cron, set_schedule.timezone, set_schedule.job, set_schedule.catch_up, set_schedule.catch_up_max,
       set_schedule.catch_up_over, set_schedule.jitter, set_schedule.source) then
    return 'same';
  end if;
  update posthouse.schedule s set cron = set_schedule.cron, timezone = set_schedule.timezone, job = set_schedule.job,
    tenant = coalesce(set_schedule.job ->> 'tenant', 'default'), catch_up = set_schedule.catch_up, catch_up_max = set_schedule.catch_up_max,
    catch_up_over = set_schedule.catch_up_over, jitter = set_schedule.jitter, source = set_schedule.source, version = was.version + 1,
    changed_at = now_at, error = null, error_at = null
  where s.name = set_schedule.name;
  -- A tick that is due already remains; the new rule begins after it.
  update posthouse.schedule s set next_at = null, since = now_at
  where s.name = set_schedule.name and (was.cron, was.timezone) is distinct from (set_schedule.cron, set_schedule.timezone)
    and (s.next_at <= now_at) is not true;
  if was.error is not null then
    perform posthouse.resolve_alert('schedule', name);
  end if;
  return 'changed';
end $$;

-- Raise PH001 for what cannot be a schedule.
create or replace function posthouse.check_schedule(name text, cron text, job jsonb, timezone text, catch_up text, catch_up_max int,
  catch_up_over interval, jitter interval, source text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  complaint text;
begin
  perform posthouse.check_name('name', name);
  complaint := case
    when cron is null or octet_length(cron) > 200 then 'cron: 1 to 200 bytes are allowed'
    when cron !~ '^\s*@' and cardinality(regexp_split_to_array(btrim(cron), '\s+')) <> 5
      then format('cron: %s has not five fields (minute, hour, day of the month, month, day of the week)', quote_literal(cron))
    when cron ~ '[^-\sA-Za-z0-9*,/?#@]' then format('cron: %s has a character that no field can have', quote_literal(cron))
    when jsonb_typeof(job) is distinct from 'object' then 'job: must be an object, as posthouse.enqueue_many takes it'
    when job ?| array['run_at', 'delay_ms'] then 'job: run_at and delay_ms are for the schedule to say; see jitter'
    when pg_column_size(job) > 1048576 then 'job: larger than 1 MiB, of which each tick makes a copy; store it elsewhere and pass a reference'
    when (catch_up in ('skip', 'one', 'all')) is not true then format('catch_up: %s is not skip, one or all', coalesce(quote_literal(catch_up), 'null'))
    when (catch_up_max between 1 and 1000) is not true then format('catch_up_max: %s is not between 1 and 1000', coalesce(catch_up_max::text, 'null'))
    when (catch_up_over between '0' and interval '7 days') is not true then 'catch_up_over: must be between nothing and 7 days'
    when (jitter between '0' and interval '7 days') is not true then 'jitter: must be between nothing and 7 days'
    when octet_length(source) > 200 then 'source: longer than 200 bytes'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  begin
    perform now() at time zone timezone;
  exception when others then
    timezone := null;
  end;
  if timezone is null then
    raise exception using errcode = 'PH001', message = 'timezone: there is no such time zone; write a name such as UTC, Europe/Rome or America/New_York';
  end if;
  begin
    perform posthouse.check_jobs(jsonb_build_array(job));
  exception when sqlstate 'PH001' then
    raise exception using errcode = 'PH001', message = replace(sqlerrm, 'job 1 of the array: ', 'job: ');
  end;
end $$;

-- Raise PH003: nobody set it.
create or replace function posthouse.refuse_unknown_schedule(name text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception using errcode = 'PH003', message = format('schedule %s: there is no such schedule', name);
end $$;

-- Let a schedule rest. Ticks in that time are no missed ones, and are not made up. False: it rested already.
create or replace function posthouse.pause_schedule(name text, reason text default null) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  was posthouse.schedule;
begin
  select * into was from posthouse.schedule s where s.name = pause_schedule.name for update;
  if not found then
    perform posthouse.refuse_unknown_schedule(name);
  end if;
  update posthouse.schedule s set paused_at = coalesce(s.paused_at, clock_timestamp()), paused_reason = left(reason, 500), version = s.version + 1
  where s.name = pause_schedule.name;
  return was.paused_at is null;
end $$;

-- Let a schedule go on, from its next tick. False: it did not rest.
create or replace function posthouse.resume_schedule(name text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  was posthouse.schedule;
begin
  select * into was from posthouse.schedule s where s.name = resume_schedule.name for update;
  if not found then
    perform posthouse.refuse_unknown_schedule(name);
  end if;
  update posthouse.schedule s set paused_at = null, paused_reason = null, next_at = null, since = clock_timestamp(), version = s.version + 1
  where s.name = resume_schedule.name and s.paused_at is not null;
  return found;
end $$;

-- Remove a schedule. Its jobs stay. False: there is none of this name.
create or replace function posthouse.remove_schedule(name text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from posthouse.schedule s where s.name = remove_schedule.name;
  if found then
    perform posthouse.resolve_alert('schedule', name);
  end if;
  return found;
end $$;

-- Schedules that are due, or whose next tick is to be worked out: of a null `next_s` it is the first after `base_s`. Those that could not
-- enqueue come again after ten seconds. `at` is for tests: as if it was then.
create or replace function posthouse.due_schedules(most int, at timestamptz default null)
returns table (name text, version bigint, cron text, timezone text, catch_up text, catch_up_max int, next_s bigint, base_s bigint, now_s bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  now_at timestamptz := coalesce(at, clock_timestamp());
begin
  perform posthouse.check_isolation();
  -- In a copy that nobody has adopted they rest: the other database fires them.
  if (select o.is_copy from posthouse.origin() o) then
    return;
  end if;
  -- The clock was ahead, and has been set back: go on after the last tick that has been fired and is past. Those that were fired
  -- early will not be again.
  update posthouse.schedule s set next_at = null, planned_at = null
  where s.name in (select x.name from posthouse.schedule x where x.planned_at > now_at + interval '5 seconds' for update skip locked);
  return query
    select s.name, s.version, s.cron, s.timezone, s.catch_up, s.catch_up_max, extract(epoch from s.next_at)::bigint,
      case when s.next_at is null then floor(extract(epoch from least(now_at, greatest(s.since, coalesce(
        (select r.tick from posthouse.schedule_run r where r.schedule = s.name and r.tick <= now_at order by r.tick desc limit 1),
        (select now_at from posthouse.schedule_run r where r.schedule = s.name limit 1), '-infinity')))))::bigint end,
      floor(extract(epoch from now_at))::bigint
    from posthouse.schedule s
    where s.paused_at is null and coalesce(s.next_at, '-infinity') <= now_at
      and (s.error_at > now_at - interval '10 seconds' and s.error_at <= now_at) is not true
    order by coalesce(s.next_at, '-infinity') limit most;
end $$;

-- Enqueue a job for each of these ticks, and move the schedule on, if it still stands where it stood when they were worked out (else the
-- answer is null). The first `late` ticks are made up for; `missed` is how many others are not; `then_s` is the next tick, null: there is
-- none. Where the job cannot be enqueued, the answer is why, and the ticks come again.
create or replace function posthouse.fire_schedule(name text, version bigint, next_s bigint, ticks bigint[], late int, missed bigint, then_s bigint,
  at timestamptz default null)
returns jsonb                         -- {"runs": [{"tick_s", "job", "duplicate"}]}, or {"error"}
language plpgsql
set search_path = pg_catalog, pg_temp
-- Somebody may hold the dedupe key of its job for long. Others are due too.
set lock_timeout = '1s'
as $$
#variable_conflict use_column
declare
  s posthouse.schedule;
  now_at timestamptz := coalesce(at, clock_timestamp());
  due_at timestamptz;
  e record;
  runs jsonb := '[]';
begin
  perform posthouse.check_isolation();
  select * into s from posthouse.schedule x where x.name = fire_schedule.name for update skip locked;
  if not found or s.version <> fire_schedule.version or s.paused_at is not null or s.next_at is distinct from to_timestamp(fire_schedule.next_s) then
    return null;
  end if;
  begin
    for i in 1 .. cardinality(ticks) loop
      continue when exists (select from posthouse.schedule_run r where r.schedule = s.name and r.tick = to_timestamp(ticks[i]));
      due_at := posthouse.jitter_of(s, ticks[i])
        + case when i > late then to_timestamp(ticks[i]) when late > 1 then now_at + s.catch_up_over * ((i - 1) / late::float8) else now_at end;
      select x.id, x.duplicate into e
      from posthouse.enqueue_many(jsonb_build_array(s.job || case when due_at > now_at then jsonb_build_object('run_at', due_at) else '{}' end)) x;
      insert into posthouse.schedule_run (schedule, tick, job_id, duplicate, fired_at)
      values (s.name, to_timestamp(ticks[i]), e.id, e.duplicate, now_at);
      runs := runs || jsonb_build_object('tick_s', ticks[i], 'job', e.id, 'duplicate', e.duplicate);
    end loop;
  exception when others then
    -- What is over in a moment comes again at once: somebody else's lock, a deadlock, a server that goes down.
    if sqlstate ~ '^(40|53|55|57|PH007)' then
      raise;
    end if;
    perform posthouse.refuse_schedule(s.name, s.version, sqlerrm, false, now_at);
    return jsonb_build_object('error', sqlerrm);
  end;
  update posthouse.schedule x set next_at = coalesce(to_timestamp(then_s), 'infinity'), planned_at = now_at, fired = s.fired + jsonb_array_length(runs),
    missed = s.missed + fire_schedule.missed, error = null, error_at = null,
    last_tick = case when runs = '[]' then s.last_tick else to_timestamp((runs -> -1 ->> 'tick_s')::bigint) end,
    last_fired_at = case when runs = '[]' then s.last_fired_at else now_at end,
    last_job_id = coalesce((runs -> -1 ->> 'job')::bigint, s.last_job_id)
  where x.name = s.name;
  if (s.fired + jsonb_array_length(runs)) / 100 > s.fired / 100 then
    delete from posthouse.schedule_run r where r.schedule = s.name
      and r.tick < (select k.tick from posthouse.schedule_run k where k.schedule = s.name order by k.tick desc offset 999 limit 1);
  end if;
  if s.error is not null then
    perform posthouse.resolve_alert('schedule', s.name);
  end if;
  return jsonb_build_object('runs', runs);
end $$;

-- How much later than its tick a job is due: the same whoever asks.
create or replace function posthouse.jitter_of(s posthouse.schedule, tick_s bigint) returns interval
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select date_trunc('milliseconds', s.jitter * ((hashtextextended(s.name || '/' || tick_s, 0) & 1048575) / 1048576.0))
$$;

-- Note why a schedule cannot enqueue. `for_good`: not before somebody changes it, since its rule cannot be read.
create or replace function posthouse.refuse_schedule(name text, version bigint, error text, for_good boolean, at timestamptz default null) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  update posthouse.schedule s set error = left(refuse_schedule.error, 2000), error_at = coalesce(at, clock_timestamp()),
    next_at = case when for_good then 'infinity' else s.next_at end
  where s.name = refuse_schedule.name and s.version = refuse_schedule.version;
  if found then
    perform posthouse.raise_alert('schedule', name, format('schedule %s enqueues nothing: %s', name, error), jsonb_build_object('schedule', name));
  end if;
end $$;

-- Schedules, and how they stand.
create or replace view posthouse.schedules as
  select s.name, s.cron, s.timezone, s.job ->> 'kind' as kind, coalesce(s.job ->> 'queue', 'default') as queue, s.tenant, s.job, s.catch_up,
    s.catch_up_max, s.catch_up_over, s.jitter, s.source, s.changed_at, s.paused_at, s.paused_reason,
    case when s.paused_at is null and isfinite(s.next_at) then s.next_at end as next_at, s.fired, s.missed, s.last_tick, s.last_fired_at,
    s.last_job_id, s.error, s.error_at
  from posthouse.schedule s;

-- The newest ticks of schedules that were fired, and their jobs.
create or replace view posthouse.schedule_runs as
  select r.schedule, r.tick, r.job_id, r.duplicate, r.fired_at from posthouse.schedule_run r;
