-- Dedupe: which job stands for a key, and what becomes of an enqueue that finds its key held.
--
-- A key's row is locked until the end of the transaction that looked at it, so that enqueues with the same key go one after the
-- other. What runs is never waited for: a settle skips a row that somebody holds, and nobody locks a job that runs. Only a job
-- that waits in line is locked, while it is replaced, and then claims go around it.

-- Raise PH001 for what cannot be said about a key.
create or replace function posthouse.check_dedupe(dedupe_key text, dedupe_for interval, dedupe_policy text, dedupe_by_payload boolean) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  by_payload boolean := coalesce(dedupe_by_payload, false);
  complaint text := case
    when dedupe_key is not null and by_payload then 'dedupe_by_payload: give it or a dedupe_key, not both'
    when dedupe_key = '' or octet_length(dedupe_key) > 512
      then format('dedupe_key: %s bytes long, 1 to 512 are allowed; pass a hash of a longer one', octet_length(dedupe_key))
    when dedupe_for is not null and dedupe_key is null and not by_payload then 'dedupe_for: needs a dedupe_key or dedupe_by_payload'
    when dedupe_for <= interval '0' then 'dedupe_for: must be more than zero; leave it out to hold the key until the job is final'
    when dedupe_for > interval '10 years' then 'dedupe_for: more than 10 years'
    when dedupe_policy not in ('keep', 'reject', 'replace', 'rerun', 'same')
      then format('dedupe_policy: %s is not keep, reject, replace, rerun or same', quote_literal(dedupe_policy))
    when dedupe_policy is not null and dedupe_key is null and not by_payload then 'dedupe_policy: needs a dedupe_key or dedupe_by_payload'
    when dedupe_policy = 'rerun' and dedupe_for is not null
      then 'dedupe_for: the policy rerun holds its key until the job is final, and for no other time'
  end;
begin
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
end $$;

-- The job behind a key's job takes the key over, and is due. The key's row must be the caller's, and its job no longer live. False: somebody
-- holds the waiting job at this moment, so that it is left for the sweep.
create or replace function posthouse.follow_up(held posthouse.dedupe) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  j posthouse.job;
begin
  select x.* into j from posthouse.job x where x.id = held.next_id for update skip locked;
  if j.id is null then
    if exists (select from posthouse.job x where x.id = held.next_id) then
      return false;
    end if;
    -- Cancelled meanwhile.
    delete from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    return true;
  end if;
  update posthouse.dedupe d set job_id = j.id, expires_at = null, next_id = null, next_at = null
  where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
  -- Unless somebody asked for it to run at once.
  if j.state = 'queued' and j.run_at = 'infinity' then
    perform posthouse.requeue_job(j, greatest(held.next_at, clock_timestamp()), false, false, null);
  end if;
  return true;
end $$;

-- Give up the dedupe keys that stood until these jobs were final, or hand them on to the jobs behind. A key that an enqueue just looks
-- at is left for later: it is free anyway, since its job is no longer live.
create or replace function posthouse.free_keys(job_ids bigint[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  held record;
begin
  -- By the job and then by the row's place: every other way walks over the dead rows of a key that is used again and again, and
  -- planned for all jobs at once, a table that statistics call small was walked whole.
  for held in
    select x.ctid, x.next_id
    from unnest(job_ids) i(id)
    cross join lateral (
      select x.ctid, x.next_id from posthouse.dedupe x where x.job_id = i.id and x.expires_at is null for update skip locked) x
  loop
    if held.next_id is null then
      delete from posthouse.dedupe d where d.ctid = held.ctid;
    else
      perform posthouse.follow_up(d) from posthouse.dedupe d where d.ctid = held.ctid;
    end if;
  end loop;
end $$;

-- Let the jobs run that wait behind one that is no longer live, where nobody did so when it ended: an enqueue held the key, or the waiting job
-- was held. Answers whether there may be more.
create or replace function posthouse.follow_missed(max_jobs int default 1000) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  held posthouse.dedupe;
  n int := 0;
begin
  -- First the lock and then, in a statement of its own, the look: an enqueue may just have given the key to another job.
  for held in
    select x.* from posthouse.dedupe x
    where x.next_id is not null and not exists (select from posthouse.job j where j.id = x.job_id)
    order by x.job_id limit max_jobs for update skip locked
  loop
    select d.* into held from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    continue when held.next_id is null or exists (select from posthouse.job j where j.id = held.job_id);
    n := n + posthouse.follow_up(held)::int;
  end loop;
  return n >= max_jobs;
end $$;

-- What an enqueue comes to whose key had a row when it came. `holder` is the job that stands for it, and `answer` says how: null, the new one,
-- which has the key now; `behind`, the new one, once the holder of the key is final; `kept`, the one there was; `replaced`, the one
-- there was, which waits in line and is now locked, so that it can be given what the new one brought; `swapped`, a job of the same
-- array, `holder`, in whose place the new one comes. Plans are made as the caller has set.
create or replace function posthouse.take_held_key(tenant text, scope text, key text, new_id bigint, dedupe_for interval, policy text,
  payload jsonb, due timestamptz, batch bigint[],         -- ids that are about to become jobs
  out holder bigint, out answer text)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  held posthouse.dedupe;
  live posthouse.job_state;
  free boolean;
  tries int := 0;
begin
  loop
    select d.* into held from posthouse.dedupe d
    where d.tenant = take_held_key.tenant and d.scope = take_held_key.scope and d.key = take_held_key.key for update;
    if not found then
      insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at, body)
      values (take_held_key.tenant, take_held_key.scope, take_held_key.key, new_id, clock_timestamp() + dedupe_for,
        case when policy = 'same' then posthouse.payload_hash(take_held_key.payload) end)
      on conflict do nothing;
      if found then
        holder := new_id;
        return;
      elsif current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'PH007',
          message = 'dedupe_key: another transaction holds or released this key after this transaction took its snapshot',
          hint = 'Run the transaction again.';
      end if;
      continue;
    end if;
    select j.state into live from posthouse.job j where j.id = held.job_id;
    -- What waits and is not written yet is left for the sweep, should the job before it have ended meanwhile.
    if held.job_id = any(batch) or (held.next_id = any(batch) and (policy in ('replace', 'rerun') or live is null)) then
      select t.holder, t.answer into holder, answer from posthouse.take_key_of_batch(held, new_id, dedupe_for, policy, due, batch) t;
      return;
    end if;
    if live is null and held.next_id is not null and tries < 50 then
      if not posthouse.follow_up(held) then
        tries := tries + 1;
        perform pg_sleep(0.002);
      end if;
      continue;
    end if;
    -- A key that stands until its job is final is free once the job is no longer live, even if its row is still here; one that
    -- stands for a window is free when that is over, or when its job was purged.
    free := held.next_id is null and case
      when held.expires_at is null or policy = 'rerun' then live is null
      else held.expires_at <= clock_timestamp() or (live is null and posthouse.state_of(held.job_id) is null)
    end;
    if free then
      update posthouse.dedupe d set job_id = new_id, expires_at = clock_timestamp() + dedupe_for, next_at = null,
        body = case when policy = 'same' then posthouse.payload_hash(take_held_key.payload) end
      where d.tenant = take_held_key.tenant and d.scope = take_held_key.scope and d.key = take_held_key.key;
      holder := new_id;
      return;
    elsif policy in ('replace', 'rerun') and live is not null then
      select t.holder, t.answer into holder, answer from posthouse.replace_held(held, live, new_id, dedupe_for, policy, due) t;
      if answer is not null then
        return;
      end if;
      -- Most often a claim is at it, and has taken it a moment later. What is held for longer counts as taken.
      tries := tries + 1;
      if tries < 50 then
        perform pg_sleep(0.002);
        continue;
      end if;
      select t.holder, t.answer into holder, answer from posthouse.replace_held(held, 'running', new_id, dedupe_for, policy, due) t;
      if answer is not null then
        return;
      end if;
      -- Somebody cancels or moves the job behind, and it depends on him whether that one can be replaced.
      perform from posthouse.job j where j.id = held.next_id for update;
      tries := 0;
      continue;
    end if;
    if policy in ('reject', 'same') then
      perform posthouse.refuse_held(held, policy, take_held_key.payload);
    end if;
    holder := held.job_id;
    answer := 'kept';
    return;
  end loop;
end $$;

-- posthouse.take_held_key, where the key's job, or the one behind it, is of the same array and not written yet.
create or replace function posthouse.take_key_of_batch(held posthouse.dedupe, new_id bigint, dedupe_for interval, policy text, due timestamptz,
  batch bigint[], out holder bigint, out answer text)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  if policy = 'reject' then
    raise exception using errcode = 'PH008', message = 'dedupe_key: a job before it in the array has it';
  end if;
  holder := case when held.job_id = any(batch) then held.job_id else held.next_id end;
  if policy not in ('replace', 'rerun') then
    answer := 'kept';
    return;
  end if;
  answer := 'swapped';
  update posthouse.dedupe d set job_id = case when held.job_id = any(batch) then new_id else d.job_id end,
    next_id = case when held.job_id = any(batch) then d.next_id else new_id end, next_at = case when held.job_id = any(batch) then d.next_at else due end,
    expires_at = coalesce(clock_timestamp() + dedupe_for, d.expires_at), body = null
  where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
end $$;

-- posthouse.take_held_key for the policies replace and rerun, where the key's job is live. No answer: the job that waits is held by somebody.
create or replace function posthouse.replace_held(held posthouse.dedupe, live posthouse.job_state, new_id bigint, dedupe_for interval, policy text,
  due timestamptz, out holder bigint, out answer text)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  -- The one behind runs last, so that what comes last is its: also while the one before it waits for another attempt.
  is_behind boolean := live <> 'queued' or exists (select from posthouse.job j where j.id = held.next_id and j.state = 'queued' and j.run_at = 'infinity');
  waits bigint := case when is_behind then held.next_id else held.job_id end;
begin
  perform from posthouse.job j where j.id = waits and j.state = 'queued' and (not is_behind or j.run_at = 'infinity') for update skip locked;
  if found then
    update posthouse.dedupe d set body = null, expires_at = coalesce(clock_timestamp() + dedupe_for, d.expires_at),
      next_at = case when is_behind then due else d.next_at end
    where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    holder := waits;
    answer := 'replaced';
  elsif exists (select from posthouse.job j where j.id = waits and j.state = 'queued' and (not is_behind or j.run_at = 'infinity')) then
    return;
  elsif live = 'queued' then
    -- It was taken just now.
    return;
  elsif policy = 'rerun' then
    update posthouse.dedupe d set next_id = new_id, next_at = due, expires_at = null, body = null
    where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    holder := new_id;
    answer := 'behind';
  else
    holder := held.job_id;
    answer := 'kept';
  end if;
end $$;

-- Raise PH008 where a held key is a refusal, PH009 where it is held with another payload and that is one.
create or replace function posthouse.refuse_held(held posthouse.dedupe, policy text, payload jsonb) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  if policy = 'reject' then
    raise exception using errcode = 'PH008',
      message = format('dedupe_key: job %s holds it (%s)', held.job_id, posthouse.state_of(held.job_id)),
      hint = case when held.expires_at is null then 'The key is free when that job is done, failed or cancelled.'
        else format('The key is free at %s.', held.expires_at) end;
  elsif policy = 'same' and not (case when held.body is not null then held.body = posthouse.payload_hash(refuse_held.payload)
      else coalesce((select p.payload = refuse_held.payload from posthouse.payload p where p.id = held.job_id), false) end) then
    raise exception using errcode = 'PH009',
      message = format('dedupe_key: job %s holds it with another payload (%s)', held.job_id, posthouse.state_of(held.job_id)),
      hint = 'One key stands for one payload: use another key, or the payload of before.';
  end if;
end $$;

-- Give a job that waits in line, and is locked, what another enqueue brought: it counts its attempts from 0 and keeps its id and its errors.
-- One that waits for another to end goes on waiting.
create or replace function posthouse.replace_job(job_id bigint, to_lane bigint, payload jsonb, trace jsonb, due timestamptz, max_attempts int,
  timeout interval, tokens int) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  j posthouse.job;
  was bigint;                         -- its lane
begin
  select x.* into j from posthouse.job x where x.id = replace_job.job_id;
  update posthouse.payload p set payload = replace_job.payload, trace = replace_job.trace where p.id = replace_job.job_id;
  was := j.lane_id;
  -- A place that it kept among jobs that run one at a time goes by its fence.
  j.fence := j.fence + (was <> to_lane and j.fence > 0)::int;
  j.lane_id := to_lane;
  j.attempt := 0;
  j.max_attempts := coalesce(replace_job.max_attempts, 5);
  j.timeout_ms := extract(epoch from replace_job.timeout) * 1000;
  j.tokens := replace_job.tokens;
  if j.run_at < 'infinity' then
    j.run_at := greatest(due, clock_timestamp());
    j.reason := null;
  end if;
  -- A row of its own: a claim whose snapshot is older than this would take an updated one with the payload of before.
  delete from posthouse.job x where x.id = replace_job.job_id;
  insert into posthouse.job values (j.*);
  if was <> to_lane then
    perform posthouse.free_serial(was);
  end if;
  if j.run_at < 'infinity' then
    perform posthouse.notify_queue(l.queue) from posthouse.lane l where l.id = to_lane;
  end if;
end $$;

-- Say for which job one waits that was enqueued behind it.
create or replace function posthouse.mark_behind(job_id bigint, tenant text, scope text, key text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  update posthouse.job j set reason = (
    select format('waits until job %s is final, whose dedupe key it has too', d.job_id) from posthouse.dedupe d
    where d.tenant = mark_behind.tenant and d.scope = mark_behind.scope and d.key = mark_behind.key)
  where j.id = mark_behind.job_id;
end $$;

-- Take the dedupe keys of an array of jobs. `holders` are the jobs that stand for each, in their order: its own id where it is new;
-- `answers` as posthouse.take_held_key gives them. In sorted order, so that two batches that share keys cannot deadlock.
create or replace function posthouse.take_keys(jobs jsonb, ids bigint[], out holders bigint[], out answers text[])
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  r record;
  t record;
  owner int;                          -- the ordinal of the last that was given a key: keys come one after the other
  instead int[];                      -- the ordinal that stands for one
begin
  holders := ids;
  answers := array_fill(null::text, array[cardinality(ids)]);
  for r in
    select p.ordinal, p.tenant, p.kind, p.dedupe_key as key, p.dedupe_for, coalesce(p.dedupe_policy, 'keep') as policy, p.due,
      case when p.dedupe_policy = 'same' then p.payload end as payload
    from posthouse.parse_jobs(jobs) p
    where p.dedupe_key is not null order by p.tenant, p.kind, p.dedupe_key, p.ordinal
  loop
    insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at, body)
    values (r.tenant, r.kind, r.key, ids[r.ordinal], clock_timestamp() + r.dedupe_for,
      case when r.policy = 'same' then posthouse.payload_hash(r.payload) end)
    on conflict do nothing;
    if found then
      owner := r.ordinal;
      continue;
    end if;
    select x.* into t from posthouse.take_held_key(r.tenant, r.kind, r.key, ids[r.ordinal], r.dedupe_for, r.policy, r.payload, r.due, ids) x;
    if t.answer = 'swapped' then
      instead[owner] := r.ordinal;
      answers[r.ordinal] := answers[owner];
      answers[owner] := 'replaced';
      owner := r.ordinal;
    elsif t.holder = ids[r.ordinal] then
      answers[r.ordinal] := t.answer;
      owner := r.ordinal;
    elsif t.holder = ids[owner] then
      if r.policy = 'same' and r.payload <> coalesce(nullif(jobs -> (owner - 1) -> 'payload', 'null'), '{}') then
        raise exception using errcode = 'PH009', message = format('dedupe_key: job %s of the array has it with another payload', owner),
          hint = 'One key stands for one payload: use another key, or the same payload.';
      end if;
      instead[r.ordinal] := owner;
      answers[r.ordinal] := 'kept';
    else
      holders[r.ordinal] := t.holder;
      answers[r.ordinal] := t.answer;
    end if;
  end loop;
  if instead is null then
    return;
  end if;
  -- A job of the array in whose place a later one came is told of that one, and so are those that it stood for.
  for o in reverse cardinality(ids) .. 1 loop
    if instead[o] > o then
      instead[o] := coalesce(instead[instead[o]], instead[o]);
      holders[o] := ids[instead[o]];
    end if;
  end loop;
  for o in 1 .. cardinality(ids) loop
    if instead[o] < o then
      holders[o] := ids[coalesce(instead[instead[o]], instead[o])];
    end if;
  end loop;
end $$;
