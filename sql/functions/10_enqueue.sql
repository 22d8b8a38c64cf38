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

-- JSON text that is the same for values that are: sorted keys, each once, no spaces (all of which jsonb sees to), and no zeros at the
-- end of a fraction.
create or replace function posthouse.canonical_json(value jsonb) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  written text := value::text;
begin
  if written !~ E'\\.[0-9]*0([^0-9]|$)' then
    return written;
  end if;
  -- Strings as they are, fractions without their zeros, all else as it is.
  return (
    select string_agg(coalesce(m.part[1], trim_scale(m.part[2]::numeric)::text, m.part[3]), '' order by m.n)
    from regexp_matches(written, E'("(?:[^"\\\\]|\\\\.)*")|(-?[0-9]+\\.[0-9]+)|([^"0-9-]+|[0-9]+|-)', 'g') with ordinality m(part, n));
end $$;

create or replace function posthouse.payload_hash(payload jsonb) returns bytea
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select sha256(convert_to(posthouse.canonical_json(payload), 'UTF8'))
$$;

-- The key of a job that is told from others by its payload.
create or replace function posthouse.payload_key(payload jsonb) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select 'sha256:' || encode(posthouse.payload_hash(payload), 'hex')
$$;

-- Raise PH001 for what cannot be enqueued; the answer is nothing.
create or replace function posthouse.check_job(kind text, payload jsonb, queue text, tenant text, priority int,
  delay interval, run_at timestamptz, max_attempts int, timeout interval, dedupe_key text, dedupe_for interval, trace jsonb, gates text[],
  tokens int, dedupe_policy text, dedupe_by_payload boolean)
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
    when pg_column_size(trace) > 16384 then 'trace: larger than 16 KiB; it is meant for a W3C trace context'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  perform posthouse.check_gates(gates);
  if tokens is not null then
    perform posthouse.check_tokens(kind, queue, tenant, gates, tokens);
  end if;
  if num_nonnulls(dedupe_key, dedupe_for, dedupe_policy, dedupe_by_payload) > 0 then
    perform posthouse.check_dedupe(dedupe_key, dedupe_for, dedupe_policy, dedupe_by_payload);
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

-- Enqueue one job. `duplicate`: the dedupe key was held, `id` is the job that stands for it, nothing was enqueued. `deduped` says what became
-- of it: null, a new job; `kept`, nothing was changed; `replaced`, the job that waits has what this one brought; `behind`, a new job that
-- waits until the one that runs is final.
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
  tokens int default null,            -- that it is expected to use; default: estimated where a gate counts them
  dedupe_policy text default null,    -- when the key is held: keep (the default), reject, replace, rerun or same; see docs/dedupe.md
  dedupe_by_payload boolean default null) -- the key is a hash of the payload
returns table (id bigint, state text, duplicate boolean, deduped text)
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
  limited boolean;                    -- a limit of how many may wait may be for it; null: there is no lane yet
  housed boolean;                     -- whether there is a partition for it
  behind boolean;
  serial_by text;
  serial text := '';
  queued boolean := false;
  keyed boolean := false;
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
  select l.id, l.behind, l.limited, exists (select from posthouse.id_range r where r.upper > new_id and r.lower <= new_id),
    (select q.serial_by from posthouse.queue q where q.name = enqueue.queue)
  into lane_id, behind, limited, housed, serial_by
  from (select) one
  left join lateral (
    select l.id, l.limited, case when alone then (
        select true from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued' and j.run_at < long_ago
          and j.run_at >= greatest(longer_ago, coalesce(
            (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1),
            (select f.floor_at from posthouse.lane_floor f where f.lane_id = 0 order by f.seq desc limit 1)))
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
       enqueue.dedupe_for, enqueue.trace, enqueue.tokens, enqueue.dedupe_policy, enqueue.dedupe_by_payload) > 0 or (pg_column_size(enqueue.payload) <= 33554432) is not true then
    perform posthouse.check_job(enqueue.kind, enqueue.payload, enqueue.queue, enqueue.tenant, enqueue.priority, enqueue.delay,
      enqueue.run_at, enqueue.max_attempts, enqueue.timeout, enqueue.dedupe_key, enqueue.dedupe_for, enqueue.trace,
      asked, enqueue.tokens, enqueue.dedupe_policy, enqueue.dedupe_by_payload);
    due := coalesce(enqueue.run_at, clock_timestamp() + greatest(enqueue.delay, interval '0'), '-infinity');
  end if;
  if not housed then
    perform posthouse.make_partitions(new_id);
  end if;
  if enqueue.dedupe_key is not null or enqueue.dedupe_by_payload then
    keyed := true;
    dedupe_key := coalesce(enqueue.dedupe_key, posthouse.payload_key(enqueue.payload));
    insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at, body)
    values (enqueue.tenant, enqueue.kind, enqueue.dedupe_key, new_id, clock_timestamp() + enqueue.dedupe_for,
      case when enqueue.dedupe_policy = 'same' then posthouse.payload_hash(enqueue.payload) end)
    on conflict do nothing;
    if not found then
      select t.holder, t.answer into holder, deduped from posthouse.take_held_key(enqueue.tenant, enqueue.kind, enqueue.dedupe_key, new_id,
        enqueue.dedupe_for, coalesce(enqueue.dedupe_policy, 'keep'), enqueue.payload, due, '{}') t;
      if deduped = 'replaced' then
        perform posthouse.replace_job(holder, posthouse.lane_for(enqueue.queue, enqueue.priority, enqueue.tenant, enqueue.kind, asked, serial,
          greatest(due, clock_timestamp())), enqueue.payload, enqueue.trace, due, enqueue.max_attempts, enqueue.timeout, enqueue.tokens);
      end if;
      if holder <> new_id then
        return query select holder, posthouse.state_of(holder), true, deduped;
        return;
      end if;
    end if;
  end if;
  if limited is not false then
    perform posthouse.check_depth(array[enqueue.queue], array[enqueue.tenant], array[1]);
  end if;
  if deduped = 'behind' then
    due := 'infinity';
  end if;
  insert into posthouse.payload (id, payload, trace) values (new_id, enqueue.payload, enqueue.trace);
  -- The usual case, a lane that is awake: look once more after it is held. The clock is read within the statement, after the
  -- table is locked: see posthouse.advance_floors.
  if lane_id is not null and current_setting('transaction_isolation') = 'read committed'
     and pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int) is not null then
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    select new_id, l.id, greatest(due, clock_timestamp()), clock_timestamp(), coalesce(enqueue.max_attempts, 5),
      extract(epoch from enqueue.timeout) * 1000, keyed, enqueue.tokens
    from posthouse.lane l where l.id = lane_id and (l.ready_at <= greatest(due, clock_timestamp()) or l.blocked_by is not null);
    queued := found;
  end if;
  if not queued then
    lane_id := posthouse.lane_for(enqueue.queue, enqueue.priority, enqueue.tenant, enqueue.kind, asked, serial, greatest(due, clock_timestamp()));
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    values (new_id, lane_id, greatest(due, clock_timestamp()), clock_timestamp(), coalesce(enqueue.max_attempts, 5),
      extract(epoch from enqueue.timeout) * 1000, keyed, enqueue.tokens);
  end if;
  if deduped = 'behind' then
    perform posthouse.mark_behind(new_id, enqueue.tenant, enqueue.kind, enqueue.dedupe_key);
  elsif behind is not true and current_setting('posthouse.notify', true) is distinct from 'off' then
    perform pg_notify('posthouse_wake', enqueue.queue);
  end if;
  id := new_id; state := 'queued'; duplicate := false;
  return next;
end $$;

-- Enqueue many jobs at once: a JSON array of objects with the fields of `enqueue`, durations in milliseconds
-- (delay_ms, timeout_ms, dedupe_for_ms). Answers in the order of the array. One bad job refuses them all.
create or replace function posthouse.enqueue_many(jobs jsonb)
returns table (ordinal int, id bigint, state text, duplicate boolean, deduped text)
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
  answers text[];                     -- what became of each by its dedupe key; null: nothing to say of any
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
    select t.holders, t.answers into holders, answers from posthouse.take_keys(jobs, ids) t;
    needed := array(select bool_or(holders[o] = ids[o] or answers[o] = 'replaced') from generate_series(1, n) o
                    group by seen.line_of[o] order by seen.line_of[o]);
  end if;
  if seen.limited then
    perform posthouse.check_depth(queues, tenants,
      array(select count(*) filter (where holders[o] = ids[o])::int from generate_series(1, n) o group by seen.line_of[o] order by seen.line_of[o]));
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
    select ids[p.ordinal], lanes[seen.line_of[p.ordinal]],
      case when answers[p.ordinal] = 'behind' then 'infinity' else greatest(p.due, clock_timestamp()) end, clock_timestamp(), p.max_attempts,
      extract(epoch from p.timeout) * 1000, p.dedupe_key is not null, p.tokens
    from posthouse.parse_jobs(jobs) p where holders[p.ordinal] = ids[p.ordinal];
  end if;
  if answers && array['replaced', 'behind'] then
    perform case when answers[p.ordinal] = 'replaced'
      then posthouse.replace_job(holders[p.ordinal], lanes[seen.line_of[p.ordinal]], p.payload, p.trace, p.due, p.max_attempts, p.timeout, p.tokens)
      else posthouse.mark_behind(ids[p.ordinal], p.tenant, p.kind, p.dedupe_key) end
    from posthouse.parse_jobs(jobs) p
    where answers[p.ordinal] = 'replaced' and not holders[p.ordinal] = any(ids) or answers[p.ordinal] = 'behind' and holders[p.ordinal] = ids[p.ordinal];
  end if;
  perform posthouse.notify_lanes(lanes, queues);
  return query
    select o.n::int, holders[o.n],
      case when holders[o.n] = ids[o.n] then 'queued' else posthouse.state_of(holders[o.n]) end, holders[o.n] <> ids[o.n], answers[o.n]
    from generate_series(1, n) o(n);
end $$;

-- What is in an array of jobs: the lanes they need, which job needs which, whether some have dedupe keys, and whether all are
-- plain (nothing set but names, priority and payload); and whether a limit of how many may wait may be for some. Raises PH001 for what cannot be enqueued.
create or replace function posthouse.survey(jobs jsonb, n int, out queues text[], out tenants text[], out kinds text[],
  out priorities int[], out gates text[], out serials text[], out dues timestamptz[], out line_of int[], out keyed boolean, out plain boolean, out limited boolean)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  r record;
  marked boolean;                     -- the last gate is what jobs share
  known boolean;                      -- whether a limit may be for them; null: there is no such lane yet
  doubtful boolean := pg_column_size(jobs) > 33554432;   -- else no payload is too large
begin
  line_of := array_fill(1, array[n]);
  keyed := false;
  plain := true;
  limited := false;
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
      known := (
        select l.limited from posthouse.lane l
        where l.queue = r.queue and l.tenant = r.tenant and l.kind = r.kind and l.priority = r.priority limit 1);
      -- The names of a lane were checked when it was made.
      doubtful := doubtful or r.extras or known is null;
      limited := limited or known is not false;
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
    if exists (select from jsonb_array_elements(jobs) j where (j ->> 'dedupe_by_payload')::boolean) then
      keyed := true;
      plain := false;
    end if;
  end if;
  if not plain then
    dues := array(select min(p.due) from posthouse.parse_jobs(jobs) p group by line_of[p.ordinal] order by line_of[p.ordinal]);
  end if;
end $$;

-- The jobs of an array as rows, defaults filled in: `dedupe_key` that of the payload where it is asked for, `dedupe_by_payload` whether it
-- was asked for though there is another.
create or replace function posthouse.parse_jobs(jobs jsonb)
returns table (ordinal int, kind text, payload jsonb, queue text, tenant text, priority int, delay interval,
  run_at timestamptz, due timestamptz, max_attempts int, timeout interval, dedupe_key text, dedupe_for interval, trace jsonb,
  gates text[], tokens int, dedupe_policy text, dedupe_by_payload boolean)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select row_number() over ()::int, x.kind, coalesce(x.payload, '{}'), coalesce(x.queue, 'default'),
    coalesce(x.tenant, 'default'), coalesce(x.priority, 0), x.delay_ms * interval '1 millisecond', x.run_at,
    coalesce(x.run_at, clock_timestamp() + greatest(x.delay_ms, 0) * interval '1 millisecond', '-infinity'), coalesce(x.max_attempts, 5),
    x.timeout_ms * interval '1 millisecond', coalesce(x.dedupe_key, case when x.dedupe_by_payload then posthouse.payload_key(coalesce(x.payload, '{}')) end),
    x.dedupe_for_ms * interval '1 millisecond', x.trace,
    case when x.gates is null then '{}' else array(select g from unnest(x.gates) g where g not like chr(31) || '%') end, x.tokens, x.dedupe_policy,
    x.dedupe_key is not null and x.dedupe_by_payload
  from jsonb_to_recordset(jobs) x(kind text, payload jsonb, queue text, tenant text, priority int, delay_ms float8,
    run_at timestamptz, max_attempts int, timeout_ms float8, dedupe_key text, dedupe_for_ms float8, trace jsonb, gates text[], tokens int,
    dedupe_policy text, dedupe_by_payload boolean)
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
    d.dedupe_key, d.dedupe_for, null, d.gates, d.tokens, d.dedupe_policy, d.dedupe_by_payload)
  from (select p.kind, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout, p.dedupe_for,
          min(p.dedupe_key) as dedupe_key, p.gates, max(p.tokens) as tokens, p.dedupe_policy, p.dedupe_by_payload
        from posthouse.parse_jobs(jobs) p
        group by p.kind, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout, p.dedupe_for,
          p.dedupe_key is null, p.gates, p.tokens is null, p.tokens < 1, p.dedupe_policy, p.dedupe_by_payload) d;
  perform posthouse.check_job(p.kind, p.payload, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout,
    p.dedupe_key, p.dedupe_for, p.trace, p.gates, null, p.dedupe_policy, p.dedupe_by_payload)
  from posthouse.parse_jobs(jobs) p
  where pg_column_size(p.payload) > 33554432 or p.dedupe_key = '' or octet_length(p.dedupe_key) > 512 or pg_column_size(p.trace) > 16384;
  select k into field from jsonb_array_elements(jobs) j cross join lateral jsonb_object_keys(j) k
  where k not in ('kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
    'dedupe_key', 'dedupe_for_ms', 'dedupe_policy', 'dedupe_by_payload', 'trace', 'gates', 'tokens') limit 1;
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
        p.timeout, p.dedupe_key, p.dedupe_for, p.trace, p.gates, p.tokens, p.dedupe_policy, p.dedupe_by_payload)
      from posthouse.parse_jobs(jsonb_build_array(job)) p;
      select k into field from jsonb_object_keys(job) k
      where k not in ('kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
        'dedupe_key', 'dedupe_for_ms', 'dedupe_policy', 'dedupe_by_payload', 'trace', 'gates', 'tokens') limit 1;
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
