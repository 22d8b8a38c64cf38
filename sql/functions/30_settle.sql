-- Settle: record what attempts decided. Fenced by (job, worker, fence) and the state running; nothing a handler returns can
-- keep its outcome from being recorded.

-- A JSON value as jsonb whatever it holds: cleaned of what jsonb cannot hold, or, where that does not help (a number that no
-- numeric holds, a string of 300 MB), its text.
create or replace function posthouse.storable_value(value json) returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return value::jsonb;
exception when others then
  return to_jsonb(left(value::text, 1000000));
end $$;

-- An outcome as jsonb whatever it holds, with a flag that says it was cleaned; null for what is no outcome at all.
create or replace function posthouse.storable(outcome json) returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  cleaned text := outcome::text;
begin
  return outcome::jsonb;
exception when others then
  begin
    cleaned := case when octet_length(cleaned) <= 33554432 then posthouse.clean_json(cleaned)
      else replace(replace(replace(cleaned, E'\\\\', chr(1)), E'\\u0000', E'\\ufffd'), chr(1), E'\\\\') end;
    return (select jsonb_object_agg(e.key, posthouse.storable_value(e.value)) from json_each(cleaned::json) e) || '{"flags": ["cleaned"]}';
  exception when others then
    return null;
  end;
end $$;

-- What is stored of a value: itself up to `most` bytes, else its size and its beginning.
create or replace function posthouse.cap_json(value jsonb, most int) returns jsonb
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select case
    when value is null or pg_column_size(value) <= most then value
    else jsonb_build_object('posthouse_truncated', true, 'bytes', pg_column_size(value), 'head', left(value::text, most / 335))
  end
$$;

-- The errors of a job's attempts so far, oldest first, and removed from `attempt`.
create or replace function posthouse.gather_errors(of_job bigint) returns jsonb
language sql
set search_path = pg_catalog, pg_temp
as $$
  with gone as (delete from posthouse.attempt a where a.job_id = of_job returning a.*)
  select jsonb_agg(jsonb_strip_nulls(to_jsonb(g.*) - 'job_id') order by g.fence) from gone g
$$;

-- Jobs that are done, the usual case, all at once. The arrays go together and are sorted by id; one that would hold nothing
-- but nulls may be null itself.
create or replace function posthouse.settle_done(worker uuid, ids bigint[], fences int[], results jsonb[], usages jsonb[], flags jsonb[])
returns bigint[]                      -- the ids that were applied
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  applied bigint[];
  keyed bigint[];
  lanes bigint[];                     -- of those that brought their usage, with `used`
  used jsonb[];
  unrecorded boolean;                 -- some queue keeps no history
  housed boolean;                     -- there is a partition for all of them
  bare bigint[];                      -- those whose payload goes with them
begin
  select exists (select from posthouse.queue q where q.retention = interval '0'),
    exists (select from posthouse.id_range r where r.upper > ids[cardinality(ids)] and r.lower <= ids[1]),
    case when exists (select from posthouse.kind k where k.drops_payload) then posthouse.bare_jobs(ids) end
  into unrecorded, housed, bare;
  if not housed then
    perform posthouse.house(ids);
  end if;
  if unrecorded then
    applied := posthouse.settle_unrecorded(settle_done.worker, ids, fences, results, usages, flags);
    if bare is not null then
      perform posthouse.drop_payloads(bare, applied);
    end if;
    return applied;
  end if;
  with gone as (
    -- The binary search finds a row's place in the arrays: a join could be planned row against row.
    delete from posthouse.job j
    where j.id = any(ids) and j.worker = settle_done.worker and j.state = 'running' and j.fence = fences[width_bucket(j.id, ids)]
    returning j.*
  ), kept as (
    insert into posthouse.archive (id, lane_id, created_at, started_at, finished_at, worker, timeout_ms, fence, attempt,
      max_attempts, state, flags, result, usage, errors)
    select g.id, g.lane_id, g.created_at, g.started_at, clock_timestamp(), g.worker, g.timeout_ms, g.fence, g.attempt,
      g.max_attempts, 'done',
      case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
      results[width_bucket(g.id, ids)], usages[width_bucket(g.id, ids)],
      case when g.errors > 0 then posthouse.gather_errors(g.id) end
    from gone g
  ), counted as (
    insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, 'done', count(*) from gone g group by g.lane_id
  )
  select array_agg(g.id), array_agg(g.id) filter (where g.keyed), array_agg(g.lane_id) filter (where usages is not null),
    array_agg(usages[width_bucket(g.id, ids)]) filter (where usages is not null)
  into applied, keyed, lanes, used from gone g;
  if used is not null then
    perform posthouse.record_usage(lanes, used);
  end if;
  if keyed is not null then
    perform posthouse.free_keys(keyed);
  end if;
  if bare is not null then
    perform posthouse.drop_payloads(bare, applied);
  end if;
  return coalesce(applied, '{}');
end $$;

-- Those among these live jobs whose kind drops payloads at the end.
create or replace function posthouse.bare_jobs(ids bigint[]) returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return array(
    select i.id from unnest(ids) i(id)
    cross join lateral (select j.lane_id from posthouse.job j where j.id = i.id offset 0) j
    cross join lateral (select l.kind from posthouse.lane l where l.id = j.lane_id offset 0) l
    cross join lateral (select from posthouse.kind k where k.name = l.kind and k.drops_payload offset 0) k);
end $$;

-- Drop the payloads of those among these jobs that have ended.
create or replace function posthouse.drop_payloads(ids bigint[], ended bigint[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  gone bigint[];
  first_id bigint;
  last_id bigint;
begin
  select array_agg(i.id), min(i.id), max(i.id) into gone, first_id, last_id from unnest(ids) i(id) where i.id = any(ended);
  -- The bounds tell which partitions need not be looked into.
  delete from posthouse.payload p where p.id = any(gone) and p.id >= first_id and p.id <= last_id;
end $$;

-- The job of an attempt, locked, if the attempt is still the right one; else null.
create or replace function posthouse.attempt_job(worker uuid, id bigint, fence bigint) returns posthouse.job
language sql
set search_path = pg_catalog, pg_temp
as $$
  select j from posthouse.job j
  where j.id = attempt_job.id and j.worker = attempt_job.worker and j.fence = attempt_job.fence and j.state = 'running'
  for update
$$;

-- End a live job for good: archive it as done or cancelled, or leave its tombstone where its queue keeps no history.
create or replace function posthouse.archive_job(j posthouse.job, state posthouse.job_state, result jsonb, usage jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  now_at timestamptz := clock_timestamp();
  of posthouse.lane;
begin
  delete from posthouse.job x where x.id = j.id;
  select l.* into of from posthouse.lane l where l.id = j.lane_id;
  if exists (select from posthouse.kind k where k.name = of.kind and k.drops_payload) then
    delete from posthouse.payload p where p.id = j.id;
  end if;
  perform posthouse.house(array[j.id]);
  if posthouse.retention_of(of.queue, archive_job.state::text) = interval '0' then
    insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, timeout_ms, fence, attempt, max_attempts, state, result,
      tokens)
    values (j.id, j.lane_id, j.created_at, now_at, j.worker, j.timeout_ms, j.fence, j.attempt, j.max_attempts,
      archive_job.state, archive_job.result, j.tokens);
    insert into posthouse.burial (buried_at, jobs, job_ids) values (now_at, 1, array[j.id]);
    delete from posthouse.attempt a where a.job_id = j.id;
  else
    insert into posthouse.archive (id, lane_id, created_at, started_at, finished_at, worker, timeout_ms, fence, attempt,
      max_attempts, state, result, usage, errors, tokens)
    values (j.id, j.lane_id, j.created_at, j.started_at, now_at, j.worker, j.timeout_ms, j.fence, j.attempt,
      j.max_attempts, archive_job.state, archive_job.result, archive_job.usage,
      case when j.errors > 0 then posthouse.gather_errors(j.id) end, j.tokens);
  end if;
  insert into posthouse.tally (lane_id, state, jobs) values (j.lane_id, archive_job.state, 1);
  if j.keyed then
    perform posthouse.free_keys(array[j.id]);
  end if;
end $$;

-- Note down an attempt that did not end well.
create or replace function posthouse.record_error(j posthouse.job, class text, error text, detail jsonb, usage jsonb)
returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  insert into posthouse.attempt (job_id, fence, attempt, worker, host, started_at, ended_at, class, error, detail, usage)
  values (j.id, j.fence, j.attempt, j.worker, (select w.host || ' pid ' || w.pid from posthouse.worker w where w.id = j.worker),
    j.started_at, clock_timestamp(), left(class, 100), posthouse.cap_text(error),
    posthouse.cap_json(detail, 65536), record_error.usage)
  on conflict do nothing
$$;

-- A job fails for good: it becomes a dead letter, with all its errors.
create or replace function posthouse.bury_job(j posthouse.job, class text, error text, detail jsonb, usage jsonb)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  perform posthouse.record_error(j, class, error, detail, usage);
  delete from posthouse.job x where x.id = j.id;
  insert into posthouse.dead_letter (id, lane_id, created_at, started_at, failed_at, worker, timeout_ms, fence, attempt,
    max_attempts, class, error, usage, errors, tokens)
  values (j.id, j.lane_id, j.created_at, j.started_at, clock_timestamp(), j.worker, j.timeout_ms, j.fence, j.attempt,
    j.max_attempts, left(bury_job.class, 100), posthouse.cap_text(bury_job.error), bury_job.usage, posthouse.gather_errors(j.id),
    j.tokens);
  if j.keyed then
    perform posthouse.free_keys(array[j.id]);
  end if;
end $$;

-- A live job goes back into line, due at `due`. With `front` it keeps its place: it is due as early as claims still look.
create or replace function posthouse.requeue_job(j posthouse.job, due timestamptz, front boolean, refund boolean, reason text,
  unsure boolean default null)         -- the attempt that ends may have had an effect outside; null: nothing is known anew
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  to_lane bigint := posthouse.wake_lane(j.lane_id, due);
begin
  if front then
    -- Held against posthouse.advance_floors, so that the job cannot land behind a floor that moves meanwhile.
    perform pg_advisory_xact_lock_shared(1346912000, 2);
    due := greatest(j.run_at, posthouse.floor_of(to_lane));
  end if;
  update posthouse.job x set state = 'queued', lane_id = to_lane,
    run_at = case when front then due else greatest(due, clock_timestamp()) end,
    attempt = x.attempt - refund::int, reason = left(requeue_job.reason, 500),
    unsure = case when requeue_job.unsure is null then x.unsure when requeue_job.unsure then coalesce(x.unsure, x.worker || '/' || x.fence) end,
    errors = (select count(*) from posthouse.attempt a where a.job_id = x.id)
  where x.id = j.id;
  if due <= clock_timestamp() then
    perform posthouse.notify_queue(l.queue) from posthouse.lane l where l.id = to_lane;
  end if;
end $$;

-- What names the outside call of an earlier attempt of a running job that may have had an effect: null, there is none.
create or replace function posthouse.call_seed(worker uuid, id bigint, fence bigint) returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  return (
    select j.unsure from posthouse.job j
    where j.id = call_seed.id and j.worker = call_seed.worker and j.fence = call_seed.fence and j.state = 'running');
end $$;

-- Record one outcome that is not `done`. The answer is the job's new state; null if the attempt is no longer the right one.
create or replace function posthouse.settle_other(worker uuid, o jsonb) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  j posthouse.job := posthouse.attempt_job(worker, (o ->> 'id')::bigint, (o ->> 'fence')::bigint);
  outcome text := o ->> 'outcome';
  usage jsonb := posthouse.cap_json(nullif(o -> 'usage', 'null'), 65536);
  class text := coalesce(o #>> '{error,class}', 'error');
  error text := coalesce(case jsonb_typeof(o -> 'error') when 'object' then o #>> '{error,message}' else o ->> 'error' end, 'no error given');
  detail jsonb := nullif(o #> '{error,detail}', 'null');
  delay interval;
  longest interval := interval '1 millisecond' * least(posthouse.number_of(o -> 'max_deferral_ms', 86400000), 3e11);
begin
  if j.id is null then
    return null;
  end if;
  if usage is not null then
    perform posthouse.record_usage(array[j.lane_id], array[usage]);
  end if;
  if outcome = 'release' then
    if j.cancel_asked then
      perform posthouse.archive_job(j, 'cancelled', null, usage);
      return 'cancelled';
    end if;
    perform posthouse.requeue_job(j, clock_timestamp(), true, true, 'released', true);
    return 'queued';
  elsif outcome = 'cancelled' or (j.cancel_asked and outcome in ('retry', 'snooze')) then
    if outcome = 'retry' then
      perform posthouse.record_error(j, class, error, detail, usage);
      j.errors := j.errors + 1;
    end if;
    perform posthouse.archive_job(j, 'cancelled', posthouse.cap_json(nullif(o -> 'result', 'null'), 33554432), usage);
    return 'cancelled';
  elsif outcome = 'snooze' then
    if j.first_started_at + longest < clock_timestamp() then
      perform posthouse.bury_job(j, 'deferred_too_long', format('deferred for longer than %s since it first started at %s: %s',
        longest, j.first_started_at, coalesce(o ->> 'reason', 'no reason given')), detail, usage);
      return 'failed';
    end if;
    delay := interval '1 millisecond' * least(greatest(posthouse.number_of(o -> 'delay_ms', 1000), 0), 3e11);
    -- One that a closed gate holds back keeps its place.
    perform posthouse.requeue_job(j, clock_timestamp() + delay, o ? 'gate' and posthouse.is_held_back(j.lane_id), true, o ->> 'reason', false);
    return 'queued';
  elsif outcome = 'retry' and j.attempt < j.max_attempts then
    delay := case when jsonb_typeof(o -> 'delay_ms') = 'number'
      then interval '1 millisecond' * least(greatest(posthouse.number_of(o -> 'delay_ms', 0), 0), 3e11)
      else posthouse.backoff(j.attempt) end;
    perform posthouse.record_error(j, class, error, detail, usage);
    perform posthouse.requeue_job(j, clock_timestamp() + delay, false, false, error,
      class in ('ambiguous', 'timeout') or coalesce(detail -> 'perhaps_billed' = 'true', false));
    return 'queued';
  end if;
  -- fail, retry without attempts left, or an outcome nobody knows: the attempt ran, so the job must end.
  perform posthouse.bury_job(j,
    case when outcome in ('fail', 'retry') then class else 'outcome' end,
    case when outcome in ('fail', 'retry') then error else format('the worker settled with the unknown outcome %s', coalesce(quote_literal(outcome), 'null')) end,
    detail, usage);
  return 'failed';
end $$;

-- A JSON number, or a default for anything else.
create or replace function posthouse.number_of(value jsonb, otherwise float8) returns float8
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select case when jsonb_typeof(value) = 'number' and abs(value::numeric) < 1e300 then value::float8 else otherwise end
$$;

-- What to answer about an outcome that was not applied: already (this worker wrote it before) or lost.
create or replace function posthouse.settled_before(worker uuid, id bigint, fence bigint, out verdict text, out state text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  seen boolean;
begin
  state := posthouse.state_of(id);
  select true into seen from posthouse.archive a where a.id = settled_before.id and a.worker = settled_before.worker and a.fence = settled_before.fence;
  if seen is null then
    select true into seen from posthouse.tombstone t where t.id = settled_before.id and t.worker = settled_before.worker and t.fence = settled_before.fence;
  end if;
  if seen is null then
    select true into seen from posthouse.dead_letter d where d.id = settled_before.id and d.worker = settled_before.worker and d.fence = settled_before.fence;
  end if;
  if seen is null then
    -- Back in line by this very attempt: rescue and reconcile take the worker off the row.
    select true into seen from posthouse.job j
    where j.id = settled_before.id and j.worker = settled_before.worker and j.fence = settled_before.fence and j.state <> 'running';
  end if;
  if seen is null then
    select true into seen from posthouse.attempt a
    where a.job_id = settled_before.id and a.fence = settled_before.fence and a.worker = settled_before.worker and a.class <> 'worker_lost';
  end if;
  verdict := case when seen then 'already' else 'lost' end;
end $$;

-- The outcomes `done` of an array, sorted by id, one a job. Null for an array that would hold nothing but nulls: then nobody
-- looks for a job's place in it.
create or replace function posthouse.done_outcomes(outcomes jsonb, out ids bigint[], out fences int[], out results jsonb[],
  out usages jsonb[], out flags jsonb[])
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  select array_agg(d.id), array_agg(d.fence), case when count(d.result) > 0 then array_agg(d.result) end,
    case when count(d.usage) > 0 then array_agg(d.usage) end, case when count(d.flags) > 0 then array_agg(d.flags) end
  into ids, fences, results, usages, flags
  from (
    select distinct on (x.id) x.id, x.fence,
      case when pg_column_size(x.result) > 33554432 then posthouse.cap_json(x.result, 33554432) else x.result end as result,
      case when pg_column_size(x.usage) > 65536 then posthouse.cap_json(x.usage, 65536) else x.usage end as usage,
      case when pg_column_size(x.result) > 33554432 then coalesce(x.flags, '[]') || '["truncated"]' else '[]' || x.flags end as flags
    from jsonb_to_recordset(outcomes) x(id bigint, fence int, outcome text, result jsonb, usage jsonb, flags jsonb)
    where x.outcome = 'done' and x.id is not null and x.fence is not null
    order by x.id, x.fence desc) d;
end $$;

-- Record outcomes: a JSON array of {"id", "fence", "outcome": done|retry|snooze|fail|cancelled|release, "result", "usage",
-- "error": {"class", "message", "detail"}, "delay_ms", "reason", "max_deferral_ms"}. Answers per outcome: applied, already (it
-- was recorded before, the answer got lost), lost (the attempt is no longer the right one: write nothing else), or invalid.
create or replace function posthouse.settle(worker uuid, outcomes json)
returns table (id bigint, fence bigint, verdict text, state text)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  whole jsonb;
  list jsonb[];
  o jsonb;
  d record;
  applied bigint[] := '{}';
  gated posthouse.job[];              -- that passed gates
  passed posthouse.job[] := '{}';     -- of these, those whose outcome was applied, with what they used
  used jsonb[] := '{}';
  called boolean[] := '{}';
begin
  perform posthouse.check_isolation();
  if outcomes is null or json_typeof(outcomes) <> 'array' then
    raise exception using errcode = 'PH001', message = 'outcomes: must be a JSON array of objects';
  end if;
  begin
    whole := outcomes;
    select x.* into d from posthouse.done_outcomes(whole) x;
  exception when others then
    -- Something in it cannot be stored, or is no outcome: clean it, and take what is left one by one.
    whole := null;
    list := array(select posthouse.storable(e) from json_array_elements(outcomes) e);
    select array_agg(x.id) as ids, array_agg(x.fence) as fences, array_agg(x.result) as results, array_agg(x.usage) as usages,
      array_agg(x.flags) as flags into d
    from (
      select distinct on (x.ids[1]) x.ids[1] as id, x.fences[1] as fence, x.results[1] as result, x.usages[1] as usage, x.flags[1] as flags
      from unnest(list) e
      cross join lateral posthouse.done_outcomes(case when posthouse.is_attempt(e) then jsonb_build_array(e) else '[]' end) x
      where x.ids is not null
      order by x.ids[1], x.fences[1] desc) x;
  end;
  if exists (select from posthouse.gate) then
    -- Before any job, as claims do: who changes gates counts what runs.
    perform pg_advisory_xact_lock_shared(1346912000, 4);
    gated := posthouse.gated_jobs(settle.worker, d.ids || array(
      select (e ->> 'id')::bigint from unnest(coalesce(list, array(select jsonb_array_elements(whole)))) e
      where e ->> 'outcome' is distinct from 'done' and posthouse.is_attempt(e)));
  end if;
  if coalesce(cardinality(d.ids), 0) < coalesce(jsonb_array_length(whole), cardinality(list)) then
    -- In one order, whatever that of the outcomes: two sessions that record the same ones must not lock each other out.
    perform from posthouse.job j
    where j.worker = settle.worker and j.id = any(d.ids || array(
      select (e ->> 'id')::bigint from unnest(coalesce(list, array(select jsonb_array_elements(whole)))) e where posthouse.is_attempt(e)))
    order by j.id for update;
  end if;
  if d.ids is not null then
    applied := posthouse.settle_done(settle.worker, d.ids, d.fences, d.results, d.usages, d.flags);
    if gated is not null then
      select x.passed, x.used, x.called into passed, used, called from posthouse.done_behind_gates(gated, applied, d.ids, d.fences, d.usages) x;
    end if;
  end if;
  if cardinality(applied) = coalesce(jsonb_array_length(whole), cardinality(list)) then
    if passed <> '{}' then
      perform posthouse.settle_gates(passed, used, called);
    end if;
    return query select a, d.fences[width_bucket(a, d.ids)]::bigint, 'applied', 'done' from unnest(applied) a;
    return;
  end if;
  foreach o in array coalesce(list, array(select jsonb_array_elements(whole))) loop
    if not posthouse.is_attempt(o) then
      id := null; fence := null; verdict := 'invalid'; state := null;
      return next;
      continue;
    end if;
    id := (o ->> 'id')::bigint;
    fence := (o ->> 'fence')::bigint;
    if o ->> 'outcome' = 'done' and id = any(applied) and d.fences[width_bucket(id, d.ids)] = fence then
      verdict := 'applied'; state := 'done';
    elsif o ->> 'outcome' is distinct from 'done' then
      state := posthouse.settle_other(settle.worker, o);
      verdict := 'applied';
    else
      state := null;
    end if;
    if state is null then
      select s.verdict, s.state into verdict, state from posthouse.settled_before(settle.worker, id, fence) s;
    elsif gated is not null and o ->> 'outcome' is distinct from 'done' then
      for i in 1 .. cardinality(gated) loop
        continue when (gated[i]).id <> settle.id or (gated[i]).fence <> settle.fence;
        passed := array_append(passed, gated[i]);
        used := array_append(used, nullif(o -> 'usage', 'null'));
        -- What was given back without a request costs nothing. A worker that stops in the middle of calls may not say how many it sent.
        called := array_append(called, coalesce(not (o ->> 'outcome' in ('release', 'snooze')
          and coalesce(o #> '{usage,requests}', case o ->> 'outcome' when 'snooze' then '0'::jsonb end) = '0'), true));
      end loop;
    end if;
    return next;
  end loop;
  if passed <> '{}' then
    perform posthouse.settle_gates(passed, used, called);
  end if;
end $$;

-- Record that jobs are done, in short: what the client library does most, for which nothing is parsed and hardly anything answered.
-- The arrays go together, sorted by id, one a job; `results` and `usages` may be null where all of them are. The answer is the ids of
-- those that were not applied: ask posthouse.settle what became of them.
create or replace function posthouse.settle_plain(worker uuid, ids bigint[], fences int[], results jsonb[], usages jsonb[]) returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  applied bigint[];
  ascending boolean;
  gated posthouse.job[];              -- that passed gates
  settled record;                     -- of these, those that were applied
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    perform posthouse.check_isolation();
  end if;
  -- Of one alone the statement would cost as much as the check is worth.
  ascending := case when cardinality(ids) = 1 then ids[1] is not null end;
  if ascending is null then
    ascending := ids = array(select distinct i from unnest(ids) i order by i);
  end if;
  if (ascending and cardinality(fences) = cardinality(ids)
    and coalesce(cardinality(results), cardinality(ids)) = cardinality(ids)
    and coalesce(cardinality(usages), cardinality(ids)) = cardinality(ids)) is not true then
    raise exception using errcode = 'PH001', message = 'ids: must be in ascending order, with as many fences, results and usages';
  elsif pg_column_size(results) > 33554432 or pg_column_size(usages) > 65536 and exists (
    select from unnest(usages) u where pg_column_size(u) > 65536) then
    -- Some are perhaps too large to be kept whole.
    return array(
      select s.id from posthouse.settle(worker, (
        select json_agg(json_build_object('id', o.id, 'fence', o.fence, 'outcome', 'done', 'result', o.result, 'usage', o.usage))
        from unnest(ids, fences, results, usages) o(id, fence, result, usage))) s
      where s.verdict <> 'applied');
  end if;
  if exists (select from posthouse.gate) then
    -- As posthouse.settle does.
    perform pg_advisory_xact_lock_shared(1346912000, 4);
    gated := posthouse.gated_jobs(worker, ids);
  end if;
  applied := posthouse.settle_done(worker, ids, fences, results, usages, null);
  if gated is not null then
    select x.* into settled from posthouse.done_behind_gates(gated, applied, ids, fences, usages) x;
    if settled.passed <> '{}' then
      perform posthouse.settle_gates(settled.passed, settled.used, settled.called);
    end if;
  end if;
  if cardinality(applied) = cardinality(ids) then
    return '{}';
  end if;
  return array(select i from unnest(ids) i where i <> all(applied));
end $$;

-- The jobs among these behind gates whose outcome `done` was applied, and what they used. `ids` and what goes with them are sorted.
create or replace function posthouse.done_behind_gates(gated posthouse.job[], applied bigint[], ids bigint[], fences int[], usages jsonb[],
  out passed posthouse.job[], out used jsonb[], out called boolean[])
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  select coalesce(array_agg(jobs.j), '{}'), coalesce(array_agg(usages[width_bucket((jobs.j).id, ids)]), '{}'), coalesce(array_agg(true), '{}')
  into passed, used, called
  from (select gated[i] as j from generate_subscripts(gated, 1) i) jobs
  where (jobs.j).id = any(applied) and (jobs.j).fence = fences[width_bucket((jobs.j).id, ids)];
end $$;

-- The jobs among these that this worker runs and that passed gates; null: none.
create or replace function posthouse.gated_jobs(worker uuid, ids bigint[]) returns posthouse.job[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return (
    select array_agg(j) from posthouse.job j
    where j.id = any(ids) and j.worker = gated_jobs.worker and j.state = 'running' and j.reserved is not null);
end $$;

-- Whether an outcome says whose it is.
create or replace function posthouse.is_attempt(o jsonb) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select coalesce(jsonb_typeof(o) = 'object' and (o ->> 'id') ~ '^[0-9]{1,18}$' and (o ->> 'fence') ~ '^[0-9]{1,9}$', false)
$$;

-- Give jobs back unfinished and uncharged, to the front of their lines: a worker that shuts down.
create or replace function posthouse.release(worker uuid, ids bigint[], fences bigint[])
returns table (id bigint, fence bigint, verdict text, state text)
language sql
set search_path = pg_catalog, pg_temp
as $$
  select s.* from posthouse.settle(worker, (
    select coalesce(json_agg(json_build_object('id', r.id, 'fence', r.fence, 'outcome', 'release')), '[]')
    from unnest(ids, fences) r(id, fence))) s
$$;

-- Store how far an attempt has come. False: the attempt is no longer the right one.
create or replace function posthouse.progress(worker uuid, id bigint, fence bigint, progress jsonb) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  if pg_column_size(progress.progress) > 65536 then
    raise exception using errcode = 'PH001', message = 'progress: larger than 64 KiB';
  end if;
  update posthouse.job j set progress = progress.progress
  where j.id = progress.id and j.worker = progress.worker and j.fence = progress.fence and j.state = 'running';
  return found;
end $$;
