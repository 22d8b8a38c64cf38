-- Dead letters: list them, put them back into line, with changes if need be, and remove them for good.

-- What was done to jobs that had ended: put back into line when, by whom, from what, and with which changes.
create or replace view posthouse.redrives as
  select r.job_id, r.number, r.redriven_at, r.redriven_by, r.state, r.attempt, r.class, r.error, r.changes, r.payload
  from posthouse.redriven r;

-- Who puts a job back into line: the login, and who that login says it is, since many people may share it.
create or replace function posthouse.who_asks(asked_by text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select left(session_user || coalesce(': ' || nullif(asked_by, ''), ''), 200)
$$;

-- Note down that a job is put back into line. `payload`: the one it had, if it gets another one.
create or replace function posthouse.note_redriven(job_id bigint, asked_by text, state text, attempt int, fence int, class text, error text,
  changes jsonb, payload jsonb) returns void
language sql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
  insert into posthouse.redriven (job_id, number, redriven_at, redriven_by, state, attempt, fence, class, error, changes, payload)
  values (note_redriven.job_id,
    (select coalesce(max(r.number), 0) + 1 from posthouse.redriven r where r.job_id = note_redriven.job_id), clock_timestamp(),
    posthouse.who_asks(note_redriven.asked_by), note_redriven.state, note_redriven.attempt, note_redriven.fence,
    note_redriven.class, note_redriven.error, note_redriven.changes, note_redriven.payload)
$$;

-- Raise PH001 for changes that cannot be made to dead letters.
create or replace function posthouse.check_changes(changes jsonb) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  fields constant text[] := '{model,max_attempts,timeout_ms,queue,priority,payload,set}';
  field text;
  complaint text;
begin
  if changes is null or jsonb_typeof(changes) <> 'object' then
    raise exception using errcode = 'PH001', message = 'changes: must be a JSON object, such as {"max_attempts": 3}';
  end if;
  select k into field from jsonb_object_keys(changes) k where k <> all(fields) limit 1;
  complaint := case
    when field is not null then format('unknown field %s; the fields are %s', quote_ident(field), array_to_string(fields, ', '))
    when changes ? 'model' and (jsonb_typeof(changes -> 'model') <> 'string' or octet_length(changes ->> 'model') not between 1 and 190)
      then 'model: must be a name of 1 to 190 bytes'
    when changes ? 'max_attempts' and (changes ->> 'max_attempts' ~ '^[0-9]{1,4}$' and (changes ->> 'max_attempts')::int between 1 and 1000) is not true
      then format('max_attempts: %s is not between 1 and 1000', changes ->> 'max_attempts')
    when changes ? 'timeout_ms' and changes -> 'timeout_ms' <> 'null'
      and (changes ->> 'timeout_ms' ~ '^[0-9]{1,11}$' and (changes ->> 'timeout_ms')::bigint between 1 and 31557600000) is not true
      then format('timeout_ms: %s is not between 1 and a year; null takes the limit off', changes ->> 'timeout_ms')
    when changes ? 'priority' and (changes ->> 'priority' ~ '^-?[0-9]{1,9}$') is not true
      then format('priority: %s is no whole number of up to nine digits', changes ->> 'priority')
    when changes ?& '{payload,set}' then 'payload, set: give one of them, not both'
    when changes ? 'set' and (jsonb_typeof(changes -> 'set') = 'array' and not exists (
        select from jsonb_array_elements(changes -> 'set') s
        where (jsonb_typeof(s -> 'path') = 'array' and jsonb_array_length(s -> 'path') > 0 and s ? 'value') is not true)) is not true
      then 'set: must be a list of {"path": ["field", …], "value": …}'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = 'changes: ' || complaint;
  end if;
  if changes ? 'queue' then
    perform posthouse.check_name('changes: queue', changes ->> 'queue');
  end if;
end $$;

-- A payload with changes made to it; or why they cannot be made to this one.
create or replace function posthouse.change_payload(kind text, payload jsonb, changes jsonb, out changed jsonb, out complaint text)
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  path text[];
  parent jsonb;
  one jsonb;
begin
  changed := coalesce(changes -> 'payload', payload);
  for one in select s from jsonb_array_elements(changes -> 'set') s loop
    path := array(select jsonb_array_elements_text(one -> 'path'));
    parent := changed #> path[:cardinality(path) - 1];
    if (case jsonb_typeof(parent) when 'object' then true
          when 'array' then path[cardinality(path)] ~ '^[0-9]{1,6}$' and path[cardinality(path)]::int <= jsonb_array_length(parent)
        end) is not true then
      complaint := format('%s cannot be set: the payload has no such place', array_to_string(path, '.'));
      return;
    end if;
    changed := jsonb_set(changed, path, one -> 'value');
  end loop;
  if changes ? 'model' then
    if jsonb_typeof(changed) <> 'object' or kind <> 'llm.chat' and jsonb_typeof(changed -> 'model') is distinct from 'string' then
      complaint := format('the payload of kind %s names no model: it takes the one of its worker''s configuration', quote_ident(kind));
      return;
    end if;
    changed := changed || jsonb_build_object('model', changes -> 'model');
  end if;
  if pg_column_size(changed) > 33554432 then
    complaint := 'the payload would be larger than 32 MiB';
  end if;
end $$;

-- The lane for a dead letter that goes back into line, changed, and what is different then.
create or replace function posthouse.changed_lane(l posthouse.lane, d posthouse.dead_letter, payload jsonb, changed jsonb, changes jsonb, due timestamptz,
  out to_lane bigint, out differences jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  queue text := coalesce(changes ->> 'queue', l.queue);
  priority int := coalesce((changes ->> 'priority')::int, l.priority);
  gates text[] := l.gates;
  serial text := l.serial;
  serial_by text;
  was text := case when jsonb_typeof(payload) = 'object' then payload ->> 'model' end;
  now_is text := case when jsonb_typeof(changed) = 'object' then changed ->> 'model' end;
begin
  if was is distinct from now_is and (l.kind = 'llm.chat' or 'model:' || was = any(l.gates)) then
    gates := array_remove(gates, 'model:' || was);
    gates := posthouse.asked_gates(case when now_is is not null then 'llm.chat' end, changed, gates);
  end if;
  if queue <> l.queue or changed is distinct from payload then
    select q.serial_by into serial_by from posthouse.queue q where q.name = queue;
    serial := case when serial_by is null then '' else posthouse.serial_value(changed, serial_by) end;
  end if;
  to_lane := posthouse.lane_for(queue, priority, l.tenant, l.kind, gates, serial, due);
  select coalesce(jsonb_object_agg(x.field, jsonb_build_object('from', x.was, 'to', x.now_is)), '{}') into differences
  from (values ('queue', to_jsonb(l.queue), to_jsonb(queue)), ('priority', to_jsonb(l.priority), to_jsonb(priority)),
    ('max_attempts', to_jsonb(d.max_attempts), coalesce(changes -> 'max_attempts', to_jsonb(d.max_attempts))),
    ('timeout_ms', coalesce(to_jsonb(d.timeout_ms), 'null'), coalesce(changes -> 'timeout_ms', to_jsonb(d.timeout_ms), 'null')),
    ('model', coalesce(to_jsonb(was), 'null'), coalesce(to_jsonb(now_is), 'null'))) x(field, was, now_is)
  where x.was <> x.now_is;
  if changed is distinct from payload then
    differences := differences || jsonb_build_object('payload', case when changes ? 'set'
      then to_jsonb(array(select array_to_string(array(select jsonb_array_elements_text(s -> 'path')), '.') from jsonb_array_elements(changes -> 'set') s))
      when changes ? 'payload' then '"replaced"' else '["model"]' end);
  end if;
end $$;

-- Put these dead letters back into line, with changes: the first due at `first_at` (null: all now), each further one `step` later. Attempts are
-- counted from 0; history and fence are kept. Those that somebody else is at are counted, those to which the changes cannot be made are
-- named with the reason.
create or replace function posthouse.redrive_batch(job_ids bigint[], changes jsonb, first_at timestamptz, step interval, asked_by text,
  out changed bigint, out busy bigint, out refused jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
as $$
declare
  now_at timestamptz := clock_timestamp();
  d posthouse.dead_letter;
  l posthouse.lane;
  old jsonb;
  new jsonb;
  why text;
  lane_ids bigint[] := '{}';          -- that were woken, with the lanes to put jobs into instead
  woken bigint[] := '{}';
  at int;
  due timestamptz := coalesce(first_at, now_at);
  differences jsonb;
  ids bigint[] := '{}';               -- of those that go, and what goes with each
  lanes bigint[] := '{}';
  dues timestamptz[] := '{}';
  notes jsonb[] := '{}';
  olds jsonb[] := '{}';
begin
  refused := '[]';
  for d in select x.* from posthouse.dead_letter x where x.id = any(job_ids) order by x.failed_at, x.id for update skip locked loop
    -- Its partition may have been dropped, and its payload put aside.
    perform posthouse.bring_home(d.id);
    select p.payload into old from posthouse.payload p where p.id = d.id;
    why := case when not found then 'its payload is gone, so it cannot run again' end;
    new := old;
    differences := '{}';
    if why is null and changes <> '{}' then
      select x.* into l from posthouse.lane x where x.id = d.lane_id;
      select c.changed, c.complaint into new, why from posthouse.change_payload(l.kind, old, changes) c;
    end if;
    if why is not null then
      refused := refused || jsonb_build_object('id', d.id, 'error', why);
      continue;
    end if;
    if changes <> '{}' then
      select c.to_lane, c.differences into d.lane_id, differences from posthouse.changed_lane(l, d, old, new, changes, due) c;
      if new is distinct from old then
        update posthouse.payload p set payload = new where p.id = d.id;
      end if;
    else
      at := array_position(lane_ids, d.lane_id);
      if at is null then
        lane_ids := lane_ids || d.lane_id;
        woken := woken || posthouse.wake_lane(d.lane_id, due);
        at := cardinality(woken);
      end if;
      d.lane_id := woken[at];
    end if;
    olds := array_append(olds, case when new is distinct from old then old end);
    ids := ids || d.id;
    lanes := lanes || d.lane_id;
    dues := dues || due;
    notes := notes || differences;
    due := due + coalesce(step, interval '0');
  end loop;
  changed := posthouse.move_dead(ids, lanes, dues, notes, olds, changes, asked_by);
  select count(*) into busy from posthouse.dead_letter x
  where x.id = any(job_ids) and not exists (select from jsonb_array_elements(refused) r where (r ->> 'id')::bigint = x.id);
end $$;

-- The rows of posthouse.redrive_batch: from dead letters to jobs. The arrays go together. Answers how many.
create or replace function posthouse.move_dead(ids bigint[], lanes bigint[], dues timestamptz[], notes jsonb[], olds jsonb[], changes jsonb,
  asked_by text) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
as $$
declare
  moved bigint;
begin
  with gone as (
    delete from posthouse.dead_letter x where x.id = any(ids) returning x.*
  ), tried as (
    insert into posthouse.attempt (job_id, fence, attempt, worker, host, started_at, ended_at, class, error, detail, usage)
    select g.id, e.fence, e.attempt, e.worker, e.host, e.started_at, e.ended_at, e.class, e.error, e.detail, e.usage
    from gone g cross join lateral jsonb_populate_recordset(null::posthouse.attempt, g.errors) e
    on conflict do nothing
  ), noted as (
    insert into posthouse.redriven (job_id, number, redriven_at, redriven_by, state, attempt, fence, class, error, changes, payload)
    select g.id, coalesce(r.newest, 0) + 1, clock_timestamp(), posthouse.who_asks(move_dead.asked_by), 'failed', g.attempt,
      g.fence, g.class, g.error, u.note, u.old
    from gone g join unnest(ids, notes, olds) u(id, note, old) on u.id = g.id
    cross join lateral (select max(r.number) as newest from posthouse.redriven r where r.job_id = g.id) r
  ), back as (
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, fence, errors, tokens)
    select g.id, u.lane_id, greatest(u.due, clock_timestamp()), g.created_at, coalesce((changes ->> 'max_attempts')::int, g.max_attempts),
      case when changes ? 'timeout_ms' then (changes ->> 'timeout_ms')::bigint else g.timeout_ms end, false, g.fence,
      jsonb_array_length(g.errors), g.tokens
    from gone g join unnest(ids, lanes, dues) u(id, lane_id, due) on u.id = g.id
    returning lane_id, run_at
  ), told as (
    select posthouse.notify_queue(q.queue) from (
      select distinct l.queue from (select distinct b.lane_id from back b where b.run_at <= clock_timestamp()) b
      cross join lateral (select l.queue from posthouse.lane l where l.id = b.lane_id offset 0) l) q
  )
  select count(*) into moved from gone where (select count(*) from told) >= 0;
  return moved;
end $$;

-- Put dead letters back into line, those that failed first before the others: attempts are counted from 0, every error so far is kept, and
-- posthouse.redrives tells of it. Those that fail once more while this goes on are left alone.
--   changes       {"model": …, "max_attempts": …, "timeout_ms": …, "queue": …, "priority": …, and "payload": … (of one job) or
--                 "set": [{"path": ["messages", "0", "content"], "value": …}]}; the payload that was is kept in posthouse.redrives
--   rate          so many become due a second, one after the other; null: all at once
-- `filter`, `after` and the answer: see posthouse.find_jobs.
create or replace function posthouse.redrive_many(filter jsonb, changes jsonb default '{}', rate float8 default null, max_jobs int default 500,
  after jsonb default null, asked_by text default null, out changed bigint, out busy bigint, out refused jsonb, out next jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{failed}', '{failed}');
  now_at timestamptz := clock_timestamp();
  first_at timestamptz;
  step interval;
  picked bigint[];
begin
  perform posthouse.check_changes(changes);
  if changes ? 'payload' and cardinality(f.ids) is distinct from 1 then
    raise exception using errcode = 'PH001', message = 'changes: payload: can be given to one job only, named by its id',
      hint = 'Use set to change a part of many payloads.';
  elsif (rate between 0.0001 and 100000) is false then
    raise exception using errcode = 'PH001', message = format('rate: %s a second is not between 0.0001 and 100000', rate);
  end if;
  step := make_interval(secs => 1 / rate);
  first_at := greatest((after ->> 'due')::timestamptz, case when rate is not null then now_at end);
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  select r.changed, r.busy, r.refused into changed, busy, refused
  from posthouse.redrive_batch(picked, changes, first_at, step, asked_by) r;
  next := next || jsonb_strip_nulls(jsonb_build_object('due', first_at + changed * step));
end $$;

-- Remove jobs that are final, and their payloads, for good: dead letters, and where the filter names their states done and cancelled
-- ones. `filter`, `after` and the answer: see posthouse.find_jobs.
create or replace function posthouse.purge_many(filter jsonb, max_jobs int default 500, after jsonb default null,
  out changed bigint, out busy bigint, out refused jsonb, out next jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{failed,done,cancelled}', '{failed}');
  picked bigint[];
  gone bigint[] := '{}';
  first_id bigint;
  last_id bigint;
begin
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  select min(u), max(u) into first_id, last_id from unnest(picked) u;
  -- The bounds tell which partitions need not be looked into.
  if 'failed' = any(f.states) then
    gone := array(select x.id from posthouse.dead_letter x where x.id = any(picked) order by x.id for update skip locked);
    delete from posthouse.dead_letter x where x.id = any(gone);
  end if;
  if f.states && '{done,cancelled}' then
    with final as (
      delete from posthouse.archive x where x.id = any(array(
        select y.id from posthouse.archive y where y.id = any(picked) and y.id between first_id and last_id and y.state::text = any(f.states)
        order by y.id for update skip locked)) and x.id between first_id and last_id
      returning x.id
    ), bare as (
      delete from posthouse.tombstone x where x.id = any(array(
        select y.id from posthouse.tombstone y where y.id = any(picked) and y.state::text = any(f.states) order by y.id for update skip locked))
      returning x.id
    )
    select gone || coalesce(array_agg(u.id), '{}') into gone from (select id from final union all select id from bare) u;
  end if;
  delete from posthouse.payload x where x.id = any(gone) and x.id between first_id and last_id;
  delete from posthouse.spare_payload x where x.id = any(gone);
  delete from posthouse.redriven x where x.job_id = any(gone);
  changed := cardinality(gone);
  refused := '[]';
  select count(*) into busy from unnest(picked) u where u <> all(gone) and posthouse.state_of(u) = any(f.states);
end $$;

-- The usual conditions of a filter as arguments.
create or replace function posthouse.dead_filter(ids bigint[], queue text, kind text, tenant text) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select jsonb_strip_nulls(jsonb_build_object('ids', ids, 'queue', queue, 'kind', kind, 'tenant', tenant))
$$;

-- Put up to `max_jobs` dead letters back into line: posthouse.redrive_many in short. Answers how many.
create or replace function posthouse.redrive(ids bigint[] default null, queue text default null, kind text default null,
  tenant text default null, max_jobs int default 1000) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  n bigint := 0;
  now_changed bigint;
  next jsonb;
begin
  loop
    exit when n >= max_jobs;
    select r.changed, r.next into now_changed, next
    from posthouse.redrive_many(posthouse.dead_filter(ids, queue, kind, tenant), max_jobs => least(max_jobs - n, 1000)::int, after => next) r;
    n := n + now_changed;
    exit when next is null;
  end loop;
  return n;
end $$;

-- Remove up to `max_jobs` dead letters and their payloads for good: posthouse.purge_many in short. Answers how many.
create or replace function posthouse.purge(ids bigint[] default null, queue text default null, kind text default null,
  tenant text default null, max_jobs int default 1000) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  n bigint := 0;
  now_changed bigint;
  next jsonb;
begin
  loop
    exit when n >= max_jobs;
    select r.changed, r.next into now_changed, next
    from posthouse.purge_many(posthouse.dead_filter(ids, queue, kind, tenant), max_jobs => least(max_jobs - n, 1000)::int, after => next) r;
    n := n + now_changed;
    exit when next is null;
  end loop;
  return n;
end $$;

-- Dead letters, the newest failures first, without their payloads. `filter`: see posthouse.find_jobs. The next page begins behind
-- `before_at` and `before_id`: the failed_at and id of the last one of this page.
--
-- Looks at the newest ones first; where too few of those are of the queue, kind, tenant and class that are asked for, at the newest ones of
-- each such lane and class. So a page costs the same however many dead letters there are, but for a search in texts.
create or replace function posthouse.dead_letters(filter jsonb default '{"all": true}', max_rows int default 20, before_at timestamptz default null,
  before_id bigint default null)
returns table (id bigint, queue text, tenant text, kind text, priority int, class text, error text, attempt int, max_attempts int,
  created_at timestamptz, failed_at timestamptz, redrives bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_custom_plan
set jit = off
as $$
#variable_conflict use_column
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{failed}', '{failed}');
  from_at timestamptz := coalesce(before_at, 'infinity');
  from_id bigint := coalesce(before_id, 9223372036854775807);
  by_lane boolean := num_nonnulls(f.queue, f.kind, f.tenant, f.class) > 0;
  near int := case when by_lane and num_nonnulls(f.error, f.created_since, f.created_before, f.ids) = 0 then 2000 end;
  n_seen int;
  ids bigint[];
begin
  max_rows := posthouse.check_batch(max_rows);
  with seen as (
    select d.id, d.lane_id, d.class, d.error, d.created_at, d.failed_at from posthouse.dead_letter d
    where (d.failed_at, d.id) < (from_at, from_id) and (f.ids is null or d.id = any(f.ids))
      and (f.failed_since is null or d.failed_at >= f.failed_since) and (f.failed_before is null or d.failed_at < f.failed_before)
    order by d.failed_at desc, d.id desc limit near
  )
  select array_agg(x.id) into ids from (
    select s.id from seen s
    where (not by_lane or (
        select true from posthouse.lane l where l.id = s.lane_id and (f.queue is null or l.queue = f.queue)
          and (f.kind is null or l.kind = f.kind) and (f.tenant is null or l.tenant = f.tenant)))
      and (f.class is null or s.class = f.class) and (f.error is null or strpos(lower(s.error), lower(f.error)) > 0)
      and (f.created_since is null or s.created_at >= f.created_since) and (f.created_before is null or s.created_at < f.created_before)
    order by s.failed_at desc, s.id desc limit max_rows) x;
  if near is not null and coalesce(cardinality(ids), 0) < max_rows then
    with recursive groups as (
      (select d.lane_id, d.class from posthouse.dead_letter d order by d.lane_id, d.class limit 1)
      union all
      select n.lane_id, n.class from groups g
      cross join lateral (
        select d.lane_id, d.class from posthouse.dead_letter d where (d.lane_id, d.class) > (g.lane_id, g.class)
        order by d.lane_id, d.class limit 1) n
    )
    select array_agg(x.id) into ids from (
      select d.id from groups g
      cross join lateral (
        select d.id, d.failed_at from posthouse.dead_letter d
        where d.lane_id = g.lane_id and d.class = g.class and (d.failed_at, d.id) < (from_at, from_id)
          and (f.failed_since is null or d.failed_at >= f.failed_since) and (f.failed_before is null or d.failed_at < f.failed_before)
        order by d.failed_at desc, d.id desc limit max_rows) d
      where (f.class is null or g.class = f.class) and (
        select true from posthouse.lane l where l.id = g.lane_id and (f.queue is null or l.queue = f.queue)
          and (f.kind is null or l.kind = f.kind) and (f.tenant is null or l.tenant = f.tenant))
      order by d.failed_at desc, d.id desc limit max_rows) x;
  end if;
  return query
    select d.id, l.queue, l.tenant, l.kind, l.priority, d.class, left(d.error, 500), d.attempt, d.max_attempts, d.created_at, d.failed_at,
      (select count(*) from posthouse.redrives r where r.job_id = d.id)
    from unnest(ids) with ordinality u(id, place)
    cross join lateral (select x.* from posthouse.dead_letter x where x.id = u.id offset 0) d
    cross join lateral (select x.* from posthouse.lane x where x.id = d.lane_id offset 0) l
    order by u.place;
end $$;

-- Forget what was noted of jobs that are nowhere any more, since their retention is over. Goes through a thousand notes a call, the oldest
-- first, and begins again at the end.
create or replace function posthouse.forget_redrives() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  start_at timestamptz := (select s.floor_at from posthouse.sweep s where s.name = 'redrives');
  end_at timestamptz;
begin
  select max(x.redriven_at) into end_at
  from (select r.redriven_at from posthouse.redriven r where r.redriven_at > start_at order by r.redriven_at limit 1000) x;
  delete from posthouse.redriven r
  where r.redriven_at > start_at and r.redriven_at <= end_at and posthouse.state_of(r.job_id) is null;
  update posthouse.sweep s set floor_at = coalesce(end_at, '-infinity') where s.name = 'redrives' and s.floor_at <> coalesce(end_at, '-infinity');
end $$;
