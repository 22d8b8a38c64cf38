-- What people do to jobs: cancel them, retry them, give them another priority; one, or all that a filter names.
--
-- What works on many does so in batches: a call is one transaction, looks at a bounded number of jobs, and answers where to go on.

-- Cancel a job: one in line at once, a running one by telling its worker. Answers with its state now: `cancelled`, `running`
-- (its worker has been told), or the final state it had reached before.
create or replace function posthouse.cancel(job_id bigint) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  j posthouse.job;
  state text;
begin
  if session_user <> current_user then
    perform posthouse.check_job_login(job_id);
  end if;
  loop
    select x.* into j from posthouse.job x where x.id = job_id for update;
    exit when j.id is not null;
    state := posthouse.state_of(job_id);
    if state is null then
      raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
    elsif state not in ('queued', 'running', 'waiting') then
      return state;
    end if;
    -- Somebody replaced it, or put it back into line, while this waited for its row: look for the new one.
  end loop;
  if j.state = 'running' then
    update posthouse.job x set cancel_asked = true where x.id = job_id;
    perform pg_notify('posthouse_cancel', j.worker::text);
    return 'running';
  end if;
  perform posthouse.archive_job(j, 'cancelled', null, null);
  -- It may have held up others that share its value.
  perform posthouse.free_serial(j.lane_id);
  return 'cancelled';
end $$;

-- Put a cancelled job back into line, due now, its attempts counted from 0, its history and fence kept. False: it is none.
create or replace function posthouse.revive_cancelled(job_id bigint, asked_by text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  a posthouse.archive;
  t posthouse.tombstone;
  to_lane bigint;
begin
  select x.* into a from posthouse.archive x where x.id = job_id and x.state = 'cancelled' for update;
  if a.id is null then
    -- While it has its tombstone it has its payload too: both go in one transaction.
    select x.* into t from posthouse.tombstone x where x.id = job_id and x.state = 'cancelled' for update;
    if t.id is null then
      return false;
    end if;
    a.id := t.id; a.lane_id := t.lane_id; a.created_at := t.created_at; a.fence := t.fence; a.max_attempts := t.max_attempts;
    a.timeout_ms := t.timeout_ms; a.tokens := t.tokens; a.attempt := t.attempt;
  end if;
  if not posthouse.bring_home(job_id) then
    raise exception using errcode = 'PH004', message = format('job %s: its payload was dropped when it ended, so it cannot run again', job_id),
      hint = 'Enqueue it anew.';
  end if;
  delete from posthouse.archive x where x.id = job_id;
  delete from posthouse.tombstone x where x.id = job_id;
  to_lane := posthouse.wake_lane(a.lane_id, clock_timestamp());
  insert into posthouse.attempt (job_id, fence, attempt, worker, host, started_at, ended_at, class, error, detail, usage)
  select a.id, e.fence, e.attempt, e.worker, e.host, e.started_at, e.ended_at, e.class, e.error, e.detail, e.usage
  from jsonb_populate_recordset(null::posthouse.attempt, coalesce(a.errors, '[]')) e
  on conflict do nothing;
  insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, fence, errors, tokens)
  values (a.id, to_lane, clock_timestamp(), a.created_at, a.max_attempts, a.timeout_ms, false, a.fence,
    jsonb_array_length(coalesce(a.errors, '[]')), a.tokens);
  perform posthouse.note_redriven(a.id, asked_by, 'cancelled', a.attempt, a.fence, a.errors -> -1 ->> 'class', a.errors -> -1 ->> 'error',
    '{}', null);
  perform posthouse.notify_queue(l.queue) from posthouse.lane l where l.id = to_lane;
  return true;
end $$;

-- Run a job again, or sooner: one that waits for its time is due now, one that failed or was cancelled goes back into line.
-- A running or done one is refused (PH004).
create or replace function posthouse.retry(job_id bigint, asked_by text default null) returns text
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  j posthouse.job;
  back record;
  state text;
begin
  select r.* into back from posthouse.redrive_batch(array[job_id], '{}', null, null, asked_by) r;
  if back.changed = 1 or posthouse.revive_cancelled(job_id, asked_by) then
    return 'queued';
  elsif back.refused <> '[]' then
    raise exception using errcode = 'PH004', message = format('job %s: %s', job_id, back.refused -> 0 ->> 'error'), hint = 'Enqueue it anew.';
  elsif back.busy > 0 then
    raise exception using errcode = 'PH004', message = format('job %s: somebody else redrives or purges it just now', job_id),
      hint = 'Look what became of it, and try again.';
  end if;
  select x.* into j from posthouse.job x where x.id = job_id and x.state = 'queued' for update;
  if j.id is not null then
    if j.run_at > clock_timestamp() then
      perform posthouse.requeue_job(j, clock_timestamp(), false, false, 'retry asked for');
      perform posthouse.free_serial(j.lane_id);
    end if;
    return 'queued';
  end if;
  state := posthouse.state_of(job_id);
  if state is null then
    raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
  elsif state = 'queued' then
    -- Somebody replaced it, or put it back into line, while this waited for its row.
    return posthouse.retry(job_id, asked_by);
  end if;
  raise exception using errcode = 'PH004', message = format('job %s is %s and cannot be retried', job_id, state),
    hint = case state when 'done' then 'Enqueue it anew if you want a second answer.' else 'Cancel it first, or wait.' end;
end $$;

-- Cancel jobs that are queued, running or waiting: see posthouse.cancel. `filter` and the answer: see posthouse.find_jobs.
create or replace function posthouse.cancel_many(filter jsonb, max_jobs int default 500, after jsonb default null,
  out changed bigint, out busy bigint, out refused jsonb, out next jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{queued,running,waiting}', '{queued,running,waiting}');
  picked bigint[];
  j posthouse.job;
  lanes bigint[] := '{}';
  workers uuid[] := '{}';
begin
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  changed := 0;
  refused := '[]';
  for j in select x.* from posthouse.job x where x.id = any(picked) order by x.id for update skip locked loop
    picked := array_remove(picked, j.id);
    continue when not j.state::text = any(f.states);
    if j.state = 'running' then
      continue when j.cancel_asked;
      update posthouse.job x set cancel_asked = true where x.id = j.id;
      workers := workers || j.worker;
    else
      perform posthouse.archive_job(j, 'cancelled', null, null);
      lanes := lanes || j.lane_id;
    end if;
    changed := changed + 1;
  end loop;
  select count(*) into busy from posthouse.job x where x.id = any(picked);
  perform pg_notify('posthouse_cancel', w::text) from (select distinct w from unnest(workers) w) w;
  perform posthouse.free_serial(l) from (select distinct l from unnest(lanes) l) l;
end $$;

-- Run jobs again, or sooner: see posthouse.retry. Those that wait for their time and those that failed, and, if the filter names
-- that state, cancelled ones.
create or replace function posthouse.retry_many(filter jsonb, max_jobs int default 500, after jsonb default null,
  asked_by text default null, out changed bigint, out busy bigint, out refused jsonb, out next jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{queued,failed,cancelled}', '{queued,failed}');
  picked bigint[];
  j posthouse.job;
  one bigint;
  failure text;
begin
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  changed := 0;
  busy := 0;
  refused := '[]';
  if 'failed' = any(f.states) then
    select r.changed, r.busy, r.refused into changed, busy, refused from posthouse.redrive_batch(picked, '{}', null, null, asked_by) r;
  end if;
  if 'cancelled' = any(f.states) then
    foreach one in array picked loop
      begin
        changed := changed + posthouse.revive_cancelled(one, asked_by)::int;
      exception when sqlstate 'PH004' then
        get stacked diagnostics failure = message_text;
        refused := refused || jsonb_build_object('id', one, 'error', failure);
      end;
    end loop;
  end if;
  if 'queued' = any(f.states) then
    for j in select x.* from posthouse.job x where x.id = any(picked) order by x.id for update skip locked loop
      picked := array_remove(picked, j.id);
      -- One that is due at infinity waits for the job that holds its dedupe key.
      continue when j.state <> 'queued' or j.run_at <= clock_timestamp() or j.run_at = 'infinity';
      perform posthouse.requeue_job(j, clock_timestamp(), false, false, 'retry asked for');
      perform posthouse.free_serial(j.lane_id);
      changed := changed + 1;
    end loop;
    select busy + count(*) into busy from posthouse.job x where x.id = any(picked) and x.state = 'queued' and x.run_at > clock_timestamp() and x.run_at < 'infinity';
  end if;
end $$;

-- Give queued jobs another priority: they stand in line as if they had been enqueued with it, at their place by run_at.
create or replace function posthouse.reprioritise_many(filter jsonb, priority int, max_jobs int default 500, after jsonb default null,
  out changed bigint, out busy bigint, out refused jsonb, out next jsonb)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{queued}', '{queued}');
  picked bigint[];
  moved bigint[];
  r record;
  to_lane bigint;
begin
  if priority is null then
    raise exception using errcode = 'PH001', message = 'priority: must not be null; smaller runs first';
  end if;
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  refused := '[]';
  moved := array(select x.id from posthouse.job x where x.id = any(picked) and x.state = 'queued' order by x.id for update skip locked);
  changed := 0;
  -- Held against posthouse.advance_floors, so that no job lands behind a floor that moves meanwhile.
  perform pg_advisory_xact_lock_shared(1346912000, 2);
  for r in
    select l.id, l.queue, l.tenant, l.kind, l.gates, l.serial, array_agg(x.id) as ids, min(x.run_at) as due
    from posthouse.job x join posthouse.lane l on l.id = x.lane_id
    where x.id = any(moved) and l.priority <> reprioritise_many.priority
    group by l.id order by l.id
  loop
    to_lane := posthouse.lane_for(r.queue, reprioritise_many.priority, r.tenant, r.kind, r.gates, r.serial, r.due);
    update posthouse.job x set lane_id = to_lane, run_at = greatest(x.run_at, posthouse.floor_of(to_lane)) where x.id = any(r.ids);
    perform posthouse.free_serial(r.id);
    if r.due <= clock_timestamp() then
      perform posthouse.notify_queue(r.queue);
    end if;
    changed := changed + cardinality(r.ids);
  end loop;
  select count(*) into busy from posthouse.job x join posthouse.lane l on l.id = x.lane_id
  where x.id = any(picked) and x.id <> all(moved) and x.state = 'queued' and l.priority <> reprioritise_many.priority;
end $$;
