-- Enqueue: one job or many, in the caller's transaction.

-- Where the job with this id is now: its state, or null.
create or replace function posthouse.state_of(job_id bigint) returns text
language sql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
  select coalesce(
    (select j.state::text from posthouse.job j where j.id = job_id),
    (select a.state::text from posthouse.archive a where a.id = job_id),
    (select t.state::text from posthouse.tombstone t where t.id = job_id),
    (select 'failed' from posthouse.dead_letter d where d.id = job_id))
$$;

-- Take a dedupe key for `new_id`, or answer with the job that holds it. Holds the key's row until the end of the
-- transaction, so that enqueues with the same key go one after the other; others are not delayed.
create or replace function posthouse.take_key(tenant text, scope text, key text, new_id bigint, dedupe_for interval,
  batch bigint[] default '{}')         -- ids that are about to become jobs
returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  held posthouse.dedupe;
  free boolean;
begin
  loop
    insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at)
    values (take_key.tenant, take_key.scope, take_key.key, new_id, clock_timestamp() + dedupe_for)
    on conflict do nothing;
    if found then
      return new_id;
    end if;
    select * into held from posthouse.dedupe d
    where d.tenant = take_key.tenant and d.scope = take_key.scope and d.key = take_key.key for update;
    if found then
      -- A key that stands until its job is final is free once the job is no longer live, even if its row is still here; one
      -- that stands for a window is free when that is over, or when its job was purged.
      free := not held.job_id = any(batch) and case
        when held.expires_at is null then not exists (select from posthouse.job j where j.id = held.job_id)
        else held.expires_at <= clock_timestamp() or posthouse.state_of(held.job_id) is null
      end;
      if not free then
        return held.job_id;
      end if;
      update posthouse.dedupe d set job_id = new_id, expires_at = clock_timestamp() + dedupe_for
      where d.tenant = take_key.tenant and d.scope = take_key.scope and d.key = take_key.key;
      return new_id;
    elsif current_setting('transaction_isolation') <> 'read committed' then
      raise exception using errcode = 'PH007',
        message = 'dedupe_key: another transaction holds or released this key after this transaction took its snapshot',
        hint = 'Run the transaction again.';
    end if;
  end loop;
end $$;

-- Raise PH001 for what cannot be enqueued; the answer is nothing.
create or replace function posthouse.check_job(kind text, payload jsonb, queue text, tenant text, priority int,
  delay interval, run_at timestamptz, max_attempts int, timeout interval, dedupe_key text, dedupe_for interval, trace jsonb, gates text[],
  tokens int)
returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  complaint text;
begin
  perform posthouse.check_name('kind', kind);
  perform posthouse.check_name('queue', queue);
  perform posthouse.check_name('tenant', tenant);
  complaint := case
    when payload is null then 'payload: must not be null; pass ''{}'' for an empty one'
    when pg_column_size(payload) > 33554432 then 'payload: larger than 32 MiB; store it elsewhere and enqueue a reference'
    when priority is null then 'priority: must not be null; 0 is the default, smaller runs first'
    when delay is not null and run_at is not null then 'delay, run_at: give one of them, not both'
    when delay > interval '100 years' then 'delay: more than 100 years'
    when run_at = 'infinity' then 'run_at: infinity is not a time at which a job could run'
    when run_at >= '10000-01-01 00:00+00' then 'run_at: after the year 9999, which many programs cannot read'
    when max_attempts not between 1 and 1000 then format('max_attempts: %s is not between 1 and 1000', max_attempts)
    when timeout < interval '1 millisecond' then 'timeout: must be at least a millisecond; leave it out for no limit'
    when timeout > interval '1 year' then 'timeout: more than a year; leave it out for no limit'
    when dedupe_for is not null and dedupe_key is null then 'dedupe_for: needs a dedupe_key'
    when dedupe_for <= interval '0' then 'dedupe_for: must be more than zero; leave it out to hold the key until the job is final'
    when dedupe_for > interval '10 years' then 'dedupe_for: more than 10 years'
    when pg_column_size(trace) > 16384 then 'trace: larger than 16 KiB; it is meant for a W3C trace context'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  perform posthouse.check_gates(gates);
  if tokens is not null then
    perform posthouse.check_tokens(kind, queue, tenant, gates, tokens);
  end if;
  if dedupe_key is not null then
    if dedupe_key = '' or octet_length(dedupe_key) > 512 then
      raise exception using errcode = 'PH001',
        message = format('dedupe_key: %s bytes long, 1 to 512 are allowed; pass a hash of a longer one', octet_length(dedupe_key));
    end if;
  end if;
end $$;

-- Raise PH001 where a job needs more tokens than one of its gates lets through in a minute: it would wait for ever.
create or replace function posthouse.check_tokens(kind text, queue text, tenant text, gates text[], tokens int) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  g record;
begin
  if (tokens between 1 and 1000000000) is not true then
    raise exception using errcode = 'PH001', message = format('tokens: %s is not between 1 and 1000000000', coalesce(tokens::text, 'null'));
  end if;
  select x.name, x.tokens_per_minute into g
  from unnest(array['queue:' || queue, 'tenant:' || tenant] || gates
    || (select k.gates from posthouse.kind k where k.name = check_tokens.kind)) n(name)
  cross join lateral posthouse.gates_named(n.name) f
  join posthouse.gate x on x.id = f.id
  where x.tokens_per_minute < tokens limit 1;
  if g.name is not null then
    raise exception using errcode = 'PH001',
      message = format('tokens: %s is more than gate %s lets through in a minute (%s)', tokens, quote_literal(g.name), g.tokens_per_minute),
      hint = 'Raise the gate''s limit, or split the job.';
  end if;
end $$;

-- The gates that a job asks for: those that are named, and for a chat completion that of its model.
create or replace function posthouse.asked_gates(kind text, payload jsonb, gates text[]) returns text[]
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  model text := case when kind = 'llm.chat' and jsonb_typeof(payload) = 'object' and jsonb_typeof(payload -> 'model') = 'string'
    then payload ->> 'model' end;
begin
  -- One that is no name is told to whoever runs it.
  if octet_length(model) between 1 and 190 and model <> '*' and model !~ '[[:cntrl:]]' then
    gates := gates || ('model:' || model);
  end if;
  return posthouse.check_gates(gates);
end $$;

-- What the jobs of a queue that runs them one by one share: a field of the payload, of at most 200 bytes (else its hash).
create or replace function posthouse.serial_value(payload jsonb, field text) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  value text := case when jsonb_typeof(payload) = 'object' then payload ->> field end;
begin
  return case when value is null then '' when octet_length(value) <= 200 then value else md5(value) end;
end $$;

-- Enqueue one job. `duplicate`: the dedupe key was held, `id` is the job that stands for it, nothing was enqueued.
create or replace function posthouse.enqueue(
  kind text,
  payload jsonb default '{}',
  queue text default 'default',
  tenant text default 'default',
  priority int default 0,
  delay interval default null,        -- due this long from now; negative: now
  run_at timestamptz default null,    -- due then; a time in the past: now
  max_attempts int default null,      -- default 5
  timeout interval default null,      -- of one attempt; default none
  dedupe_key text default null,       -- within the tenant and kind
  dedupe_for interval default null,   -- how long the key stands; default: until the job is final
  trace jsonb default null,           -- W3C trace context: {"traceparent": …}
  gates text[] default '{}',          -- that it passes besides those of its queue, tenant and kind: model:NAME, or names of their own
  tokens int default null)            -- that it is expected to use; default: estimated where a gate counts them
returns table (id bigint, state text, duplicate boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  new_id bigint;
  holder bigint;
  lane_id bigint;
  housed boolean;                     -- whether there is a partition for it
  behind boolean;
  serial_by text;
  serial text := '';
  queued boolean := false;
  due timestamptz := '-infinity';
  long_ago timestamptz := clock_timestamp() - interval '3 seconds';     -- see posthouse.notify_lanes
  longer_ago timestamptz := long_ago - interval '7 seconds';
  alone boolean := posthouse.is_alone();
  asked text[] := case when enqueue.gates = '{}' and enqueue.kind is distinct from 'llm.chat' then '{}'
    else posthouse.asked_gates(enqueue.kind, enqueue.payload, enqueue.gates) end;
begin
  if session_user <> current_user then
    -- The usual case of posthouse.check_enqueue.
    if not exists (select from posthouse.tenant_login x
                   where x.login = session_user and (x.every_tenant or x.tenant = enqueue.tenant)) or enqueue.kind like 'posthouse.%' then
      perform posthouse.check_enqueue(enqueue.tenant, enqueue.kind);
    end if;
  end if;
  new_id := nextval('posthouse.job_id_seq');
  select l.id, l.behind, exists (select from posthouse.id_range r where r.upper > new_id and r.lower <= new_id),
    (select q.serial_by from posthouse.queue q where q.name = enqueue.queue)
  into lane_id, behind, housed, serial_by
  from (select) one
  left join lateral (
    select l.id, case when alone then (
        select true from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued' and j.run_at < long_ago
          and j.run_at >= greatest(longer_ago, (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id
                                                order by f.floor_at desc limit 1))
        order by j.lane_id desc, j.run_at desc, j.id desc limit 1) end as behind
    from posthouse.lane l
    where l.queue = enqueue.queue and l.tenant = enqueue.tenant and l.kind = enqueue.kind and l.priority = enqueue.priority
      and l.gates = asked and l.serial = ''
    order by l.ready_at, l.id limit 1) l on true;
  if serial_by is not null then
    serial := posthouse.serial_value(enqueue.payload, serial_by);
    lane_id := case when serial = '' then lane_id end;
  end if;
  -- The names of a lane were checked when it was made.
  if lane_id is null or num_nonnulls(enqueue.delay, enqueue.run_at, enqueue.max_attempts, enqueue.timeout, enqueue.dedupe_key,
       enqueue.dedupe_for, enqueue.trace, enqueue.tokens) > 0 or (pg_column_size(enqueue.payload) <= 33554432) is not true then
    perform posthouse.check_job(enqueue.kind, enqueue.payload, enqueue.queue, enqueue.tenant, enqueue.priority, enqueue.delay,
      enqueue.run_at, enqueue.max_attempts, enqueue.timeout, enqueue.dedupe_key, enqueue.dedupe_for, enqueue.trace,
      asked, enqueue.tokens);
    due := coalesce(enqueue.run_at, clock_timestamp() + greatest(enqueue.delay, interval '0'), '-infinity');
  end if;
  if not housed then
    perform posthouse.make_partitions(new_id);
  end if;
  if enqueue.dedupe_key is not null then
    holder := posthouse.take_key(enqueue.tenant, enqueue.kind, enqueue.dedupe_key, new_id, enqueue.dedupe_for);
    if holder <> new_id then
      return query select holder, posthouse.state_of(holder), true;
      return;
    end if;
  end if;
  insert into posthouse.payload (id, payload, trace) values (new_id, enqueue.payload, enqueue.trace);
  -- The usual case, a lane that is awake: look once more after it is held. The clock is read within the statement, after the
  -- table is locked: see posthouse.advance_floors.
  if lane_id is not null and current_setting('transaction_isolation') = 'read committed'
     and pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int) is not null then
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    select new_id, l.id, greatest(due, clock_timestamp()), clock_timestamp(), coalesce(enqueue.max_attempts, 5),
      extract(epoch from enqueue.timeout) * 1000, enqueue.dedupe_key is not null, enqueue.tokens
    from posthouse.lane l where l.id = lane_id and (l.ready_at <= greatest(due, clock_timestamp()) or l.blocked_by is not null);
    queued := found;
  end if;
  if not queued then
    lane_id := posthouse.lane_for(enqueue.queue, enqueue.priority, enqueue.tenant, enqueue.kind, asked, serial, greatest(due, clock_timestamp()));
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    values (new_id, lane_id, greatest(due, clock_timestamp()), clock_timestamp(), coalesce(enqueue.max_attempts, 5),
      extract(epoch from enqueue.timeout) * 1000, enqueue.dedupe_key is not null, enqueue.tokens);
  end if;
  if behind is not true and current_setting('posthouse.notify', true) is distinct from 'off' then
    perform pg_notify('posthouse_wake', enqueue.queue);
  end if;
  id := new_id; state := 'queued'; duplicate := false;
  return next;
end $$;

-- Enqueue many jobs at once: a JSON array of objects with the fields of `enqueue`, durations in milliseconds
-- (delay_ms, timeout_ms, dedupe_for_ms). Answers in the order of the array. One bad job refuses them all.
create or replace function posthouse.enqueue_many(jobs jsonb)
returns table (ordinal int, id bigint, state text, duplicate boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
#variable_conflict use_column
declare
  n int;
  ids bigint[];
  holders bigint[];
  seen record;
  -- In variables of their own, where an element is found at once.
  queues text[];
  tenants text[];
  kinds text[];
  lanes bigint[] := '{}';
  needed boolean[];
  serial boolean;                     -- some queue runs what jobs share one at a time
begin
  if jobs is null or jsonb_typeof(jobs) <> 'array' then
    raise exception using errcode = 'PH001', message = 'jobs: must be a JSON array of objects';
  end if;
  n := jsonb_array_length(jobs);
  if n = 0 then
    return;
  elsif n > 10000 then
    raise exception using errcode = 'PH001', message = format('jobs: %s in one call, at most 10000 are allowed', n);
  end if;
  if jobs @> '[{"kind": "llm.chat"}]' then
    -- Each passes the gate of its model.
    select jsonb_agg(case when j.job ->> 'kind' = 'llm.chat' and jsonb_typeof(coalesce(j.job -> 'gates', '[]')) = 'array'
        then j.job || jsonb_build_object('gates', posthouse.asked_gates('llm.chat', j.job -> 'payload', array(select jsonb_array_elements_text(j.job -> 'gates'))))
        else j.job end order by j.place)
    into jobs from jsonb_array_elements(jobs) with ordinality j(job, place);
  end if;
  serial := exists (select from posthouse.queue q where q.serial_by is not null);
  if serial then
    -- What jobs share goes with them as the last of their gates, with a mark that no name of a gate has.
    select jsonb_agg(case when s.gates is not null and (s.value <> '' or jsonb_array_length(s.gates) > 0) then j.job || jsonb_build_object('gates', s.gates || to_jsonb(chr(31) || s.value))
        else j.job end order by j.place)
    into jobs
    from jsonb_array_elements(jobs) with ordinality j(job, place)
    cross join lateral (
      select coalesce((select posthouse.serial_value(j.job -> 'payload', q.serial_by) from posthouse.queue q
          where q.name = coalesce(j.job ->> 'queue', 'default') and q.serial_by is not null), '') as value,
        case coalesce(jsonb_typeof(j.job -> 'gates'), 'null') when 'array' then j.job -> 'gates' when 'null' then '[]' end as gates) s;
  end if;
  select s.* into seen from posthouse.survey(jobs, n) s;
  if not serial and array_remove(seen.serials, null) <> '{}' then
    perform posthouse.check_gates(array[chr(31)]);
  end if;
  if session_user <> current_user then
    perform posthouse.check_enqueue(t, k) from unnest(seen.tenants, seen.kinds) x(t, k);
  end if;
  select array_agg(nextval('posthouse.job_id_seq')) into ids from generate_series(1, n);
  if not exists (select from posthouse.id_range r where r.upper > ids[n] and r.lower <= ids[1]) then
    perform posthouse.make_partitions(ids[n]);
  end if;
  holders := ids;
  queues := seen.queues;
  tenants := seen.tenants;
  kinds := seen.kinds;
  needed := array_fill(true, array[cardinality(kinds)]);
  if seen.keyed then
    holders := posthouse.take_keys(jobs, ids);
    needed := array(select bool_or(holders[o] = ids[o]) from generate_series(1, n) o group by seen.line_of[o] order by seen.line_of[o]);
  end if;
  for i in 1 .. cardinality(needed) loop
    lanes[i] := case when needed[i] then posthouse.lane_for(queues[i], seen.priorities[i], tenants[i], kinds[i],
      coalesce(seen.gates[i]::text[], '{}'), coalesce(seen.serials[i], ''), greatest(seen.dues[i], clock_timestamp())) end;
  end loop;
  insert into posthouse.payload (id, payload, trace)
  select ids[x.ordinal], coalesce(x.payload, '{}'), x.trace
  from rows from (jsonb_to_recordset(jobs) as (payload jsonb, trace jsonb)) with ordinality x(payload, trace, ordinal)
  where holders[x.ordinal] = ids[x.ordinal];
  if seen.plain then
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, keyed)
    select ids[o], lanes[seen.line_of[o]], clock_timestamp(), clock_timestamp(), 5, false from generate_series(1, n) o;
  else
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    select ids[p.ordinal], lanes[seen.line_of[p.ordinal]], greatest(p.due, clock_timestamp()), clock_timestamp(), p.max_attempts,
      extract(epoch from p.timeout) * 1000, p.dedupe_key is not null, p.tokens
    from posthouse.parse_jobs(jobs) p where holders[p.ordinal] = ids[p.ordinal];
  end if;
  perform posthouse.notify_lanes(lanes, queues);
  return query
    select o.n::int, holders[o.n],
      case when holders[o.n] = ids[o.n] then 'queued' else posthouse.state_of(holders[o.n]) end, holders[o.n] <> ids[o.n]
    from generate_series(1, n) o(n);
end $$;

-- What is in an array of jobs: the lanes they need, which job needs which, whether some have dedupe keys, and whether all are
-- plain (nothing set but names, priority and payload). Raises PH001 for what cannot be enqueued.
create or replace function posthouse.survey(jobs jsonb, n int, out queues text[], out tenants text[], out kinds text[],
  out priorities int[], out gates text[], out serials text[], out dues timestamptz[], out line_of int[], out keyed boolean, out plain boolean)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  r record;
  marked boolean;                     -- the last gate is what jobs share
  doubtful boolean := pg_column_size(jobs) > 33554432;   -- else no payload is too large
begin
  line_of := array_fill(1, array[n]);
  keyed := false;
  plain := true;
  begin
    for r in
      select coalesce(x.queue, 'default') as queue, coalesce(x.tenant, 'default') as tenant, x.kind,
        coalesce(x.priority, 0) as priority, x.gates, array_agg(x.ordinal::int) as ordinals,
        bool_or(num_nonnulls(x.delay_ms, x.run_at, x.max_attempts, x.timeout_ms, x.dedupe_key, x.dedupe_for_ms, x.trace, x.tokens) > 0) as extras,
        bool_or(x.dedupe_key is not null) as keyed
      from rows from (jsonb_to_recordset(jobs) as (kind text, queue text, tenant text, priority int, delay_ms float8,
             run_at timestamptz, max_attempts int, timeout_ms float8, dedupe_key text, dedupe_for_ms float8, trace jsonb, gates text[],
             tokens int))
        with ordinality x(kind, queue, tenant, priority, delay_ms, run_at, max_attempts, timeout_ms, dedupe_key,
          dedupe_for_ms, trace, gates, tokens, ordinal)
      group by coalesce(x.queue, 'default'), coalesce(x.tenant, 'default'), x.kind, coalesce(x.priority, 0), x.gates
      order by 1, 2, 3, 4, 5
    loop
      queues := queues || r.queue;
      tenants := tenants || r.tenant;
      kinds := kinds || r.kind;
      priorities := priorities || r.priority;
      marked := coalesce(r.gates[cardinality(r.gates)] like chr(31) || '%', false);
      serials := serials || case when marked then substr(r.gates[cardinality(r.gates)], 2) end;
      gates := gates || case when r.gates is not null then posthouse.check_gates(r.gates[:cardinality(r.gates) - marked::int])::text end;
      dues := dues || '-infinity'::timestamptz;
      keyed := keyed or r.keyed;
      plain := plain and not r.extras;
      -- The names of a lane were checked when it was made.
      doubtful := doubtful or r.extras or not exists (
        select from posthouse.lane l where l.queue = r.queue and l.tenant = r.tenant and l.kind = r.kind and l.priority = r.priority);
      if cardinality(kinds) > 1 then
        for i in 1 .. cardinality(r.ordinals) loop
          line_of[r.ordinals[i]] := cardinality(kinds);
        end loop;
      end if;
    end loop;
  exception when others then
    perform posthouse.check_jobs(jobs);
    raise;
  end;
  if not doubtful then
    doubtful := exists (
      select from jsonb_array_elements(jobs) j
      where j - array['kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
        'dedupe_key', 'dedupe_for_ms', 'trace', 'gates', 'tokens'] <> '{}');
  end if;
  if doubtful then
    perform posthouse.check_jobs(jobs);
  end if;
  if not plain then
    dues := array(select min(p.due) from posthouse.parse_jobs(jobs) p group by line_of[p.ordinal] order by line_of[p.ordinal]);
  end if;
end $$;

-- Take the dedupe keys of an array of jobs. The answer is the job that stands for each, in their order: its own id where it is
-- new. In sorted order, so that two batches that share keys cannot deadlock.
create or replace function posthouse.take_keys(jobs jsonb, ids bigint[]) returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  r record;
  holders bigint[] := ids;
begin
  for r in
    select p.ordinal, p.tenant, p.kind, p.dedupe_key, p.dedupe_for from posthouse.parse_jobs(jobs) p
    where p.dedupe_key is not null order by p.tenant, p.kind, p.dedupe_key, p.ordinal
  loop
    holders[r.ordinal] := posthouse.take_key(r.tenant, r.kind, r.dedupe_key, ids[r.ordinal], r.dedupe_for, ids);
  end loop;
  return holders;
end $$;

-- The jobs of an array as rows, defaults filled in.
create or replace function posthouse.parse_jobs(jobs jsonb)
returns table (ordinal int, kind text, payload jsonb, queue text, tenant text, priority int, delay interval,
  run_at timestamptz, due timestamptz, max_attempts int, timeout interval, dedupe_key text, dedupe_for interval, trace jsonb,
  gates text[], tokens int)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select row_number() over ()::int, x.kind, coalesce(x.payload, '{}'), coalesce(x.queue, 'default'),
    coalesce(x.tenant, 'default'), coalesce(x.priority, 0), x.delay_ms * interval '1 millisecond', x.run_at,
    coalesce(x.run_at, clock_timestamp() + greatest(x.delay_ms, 0) * interval '1 millisecond', '-infinity'), coalesce(x.max_attempts, 5),
    x.timeout_ms * interval '1 millisecond', x.dedupe_key, x.dedupe_for_ms * interval '1 millisecond', x.trace,
    case when x.gates is null then '{}' else array(select g from unnest(x.gates) g where g not like chr(31) || '%') end, x.tokens
  from jsonb_to_recordset(jobs) x(kind text, payload jsonb, queue text, tenant text, priority int, delay_ms float8,
    run_at timestamptz, max_attempts int, timeout_ms float8, dedupe_key text, dedupe_for_ms float8, trace jsonb, gates text[], tokens int)
$$;

-- Raise PH001 with the ordinal of the first job in an array that cannot be enqueued.
create or replace function posthouse.check_jobs(jobs jsonb) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  at int := 0;
  job jsonb;
  field text;
  value jsonb;
begin
  -- The usual case: everything is fine. Most jobs of an array differ in payload and key only, so those are looked at by
  -- themselves, and the rest once for all that share it.
  perform posthouse.check_job(d.kind, '{}', d.queue, d.tenant, d.priority, d.delay, d.run_at, d.max_attempts, d.timeout,
    d.dedupe_key, d.dedupe_for, null, d.gates, d.tokens)
  from (select p.kind, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout, p.dedupe_for,
          min(p.dedupe_key) as dedupe_key, p.gates, max(p.tokens) as tokens
        from posthouse.parse_jobs(jobs) p
        group by p.kind, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout, p.dedupe_for,
          p.dedupe_key is null, p.gates, p.tokens is null, p.tokens < 1) d;
  perform posthouse.check_job(p.kind, p.payload, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout,
    p.dedupe_key, p.dedupe_for, p.trace, p.gates, null)
  from posthouse.parse_jobs(jobs) p
  where pg_column_size(p.payload) > 33554432 or p.dedupe_key = '' or octet_length(p.dedupe_key) > 512 or pg_column_size(p.trace) > 16384;
  select k into field from jsonb_array_elements(jobs) j cross join lateral jsonb_object_keys(j) k
  where k not in ('kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
    'dedupe_key', 'dedupe_for_ms', 'trace', 'gates', 'tokens') limit 1;
  if field is not null then
    raise exception using errcode = 'PH001', message = format('unknown field %s', quote_ident(field));
  end if;
exception when others then
  for job in select j from jsonb_array_elements(jobs) j loop
    at := at + 1;
    begin
      if jsonb_typeof(job) <> 'object' then
        raise exception using errcode = 'PH001', message = 'must be an object';
      end if;
      -- Each field alone, since the error of a value of the wrong type does not say whose it is.
      for field, value in select f.key, f.value from jsonb_each(job) f loop
        begin
          perform p.kind from posthouse.parse_jobs(jsonb_build_array(jsonb_build_object(field, value))) p;
        exception when others then
          raise exception using errcode = 'PH001', message = format('%s: %s', field, sqlerrm);
        end;
      end loop;
      perform posthouse.check_job(p.kind, p.payload, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts,
        p.timeout, p.dedupe_key, p.dedupe_for, p.trace, p.gates, p.tokens) from posthouse.parse_jobs(jsonb_build_array(job)) p;
      select k into field from jsonb_object_keys(job) k
      where k not in ('kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
        'dedupe_key', 'dedupe_for_ms', 'trace', 'gates', 'tokens') limit 1;
      if found then
        raise exception using errcode = 'PH001', message = format('unknown field %s', quote_ident(field)),
          hint = 'Durations are in milliseconds: delay_ms, timeout_ms, dedupe_for_ms.';
      end if;
    exception when others then
      raise exception using errcode = 'PH001', message = format('job %s of the array: %s', at, sqlerrm);
    end;
  end loop;
  raise;
end $$;
