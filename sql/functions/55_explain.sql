-- Why a job is where it is, and what would move it.

-- Which gates hold a job back, and until when (null: until somebody opens it, or a job of it ends): one row a gate. With
-- `closed_only` those that are closed, not those that are full.
create or replace function posthouse.held_by(job posthouse.job, closed_only boolean) returns table (reason text, until timestamptz)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  insteads text[];
  gate_ids bigint[];
  members text[];
  look record;
  g posthouse.gate;
  s posthouse.gate_state;
  now_at timestamptz := clock_timestamp();
  today date := now_at at time zone 'UTC';
  first bigint := floor(extract(epoch from now_at)) - 61;
  name text;
  before bigint;                      -- a job that runs first
begin
  if exists (select from posthouse.gate x where x.when_spent like 'model:%') then
    insteads := posthouse.models_instead(array[job.lane_id]);
  end if;
  select array_agg(x.gate_id order by x.gate_id, x.member), array_agg(x.member order by x.gate_id, x.member) into gate_ids, members
  from (select distinct o.gate_id, o.member from posthouse.gates_of(array[job.lane_id], insteads) o) x;
  if gate_ids is null then
    return;
  end if;
  select * into look from posthouse.look_at_gates(gate_ids, members, array_fill(1, array[cardinality(gate_ids)]), now_at);
  for i in 1 .. cardinality(gate_ids) loop
    g := look.gates[i];
    s := look.states[i];
    name := 'gate ' || g.name || case when members[i] <> '' then format(' (%s)', members[i]) else '' end;
    until := nullif(look.untils[i], 'infinity');
    if g.name like 'serial:%' then
      continue when closed_only;
      select coalesce(
        (select x.id from unnest(s.job_ids, s.fences) u(id, fence) join posthouse.job x on x.id = u.id and x.fence = u.fence limit 1),
        (select x.id
         from posthouse.lane l join posthouse.lane k on k.queue = l.queue and k.tenant = l.tenant and k.serial = l.serial
         join posthouse.job x on x.lane_id = k.id and x.state = 'queued' and x.run_at <= now_at
         where l.id = job.lane_id order by x.run_at, x.id limit 1)) into before;
      continue when before is null or before = job.id;
      until := null;
      reason := format('job %s, which shares its value %s, runs first', before, to_jsonb(split_part(members[i], chr(31), 2)));
      return next;
      continue;
    end if;
    reason := case
      when g.closed_until > now_at then format('%s is closed %s', name,
        case g.closed_by when 'person' then 'by a person' when 'provider' then 'by its provider' when 'breaker' then 'since it failed too often'
          when 'quota' then 'since its account is empty' else 'by ' || g.closed_by end)
        || case when g.closed_until = 'infinity' then ', until somebody opens it' else '' end || coalesce(': ' || nullif(g.closed_reason, ''), '')
      when look.rooms[i] <= 0 and g.probe_until > now_at and g.closed_by in ('provider', 'breaker')
        then format('%s was closed%s; job %s tries it first', name, coalesce(': ' || nullif(g.closed_reason, ''), ''), g.probe_job)
      when closed_only then null
      when look.rooms[i] <= 0 and cardinality(s.job_ids) >= g.max_running
        then format('%s is full: %s of %s run', name, cardinality(s.job_ids), g.max_running)
      when look.spent[i] and g.when_spent in ('hold', 'fail') then
        format('the budget of %s is spent: ', name)
        || case when s.spent_month >= g.money_per_month and s.month = date_trunc('month', today)::date
             then format('%s of %s for this month', s.spent_month, g.money_per_month)
             else format('%s of %s for today', s.spent_day, g.money_per_day) end
        || case when g.when_spent = 'fail' then '; its jobs fail when they are claimed' else '' end
      when look.rooms[i] <= 0 and num_nonnulls(g.requests_per_minute, g.tokens_per_minute) = 0
        then name || ' has just opened, and jobs follow one after the other'
      when look.rooms[i] <= 0 then name || ' is at its rate: ' || concat_ws(', ',
        posthouse.sum_since(s.seconds, s.requests::bigint[], first) || ' of ' || g.requests_per_minute || ' requests',
        posthouse.sum_since(s.seconds, s.tokens, first) || ' of ' || g.tokens_per_minute || ' tokens') || ' in the last minute'
    end;
    if reason is not null then
      return next;
    end if;
  end loop;
end $$;

-- Why a job is where it is, and what would move it: one row a reason.
create or replace function posthouse.explain(job_id bigint)
returns table (state text, reason text, until timestamptz)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  j posthouse.job;
  l posthouse.lane;
  w posthouse.worker;
  ahead bigint;
  is_held boolean := false;
  frank boolean := true;
begin
  if session_user <> current_user then
    perform posthouse.check_job_login(job_id);
    frank := posthouse.sees_all();
  end if;
  select * into j from posthouse.job x where x.id = job_id;
  if j.id is null then
    return query
      select 'failed', format('failed after attempt %s of %s: %s', d.attempt, d.max_attempts, d.error), null::timestamptz
      from posthouse.dead_letter d where d.id = job_id
      union all
      select a.state::text, format('%s at %s, in attempt %s', a.state, a.finished_at, a.attempt), null
      from posthouse.archive a where a.id = job_id
      union all
      select t.state::text, format('%s at %s, in attempt %s; its queue keeps no history', t.state, t.finished_at, t.attempt),
        t.finished_at + interval '10 minutes'
      from posthouse.tombstone t where t.id = job_id;
    if not found then
      raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
    end if;
    return;
  end if;
  state := j.state::text;
  select * into l from posthouse.lane x where x.id = j.lane_id;
  if j.state = 'running' then
    select * into w from posthouse.worker x where x.id = j.worker;
    until := posthouse.lease_end(w);
    reason := case
      when w.id is null or w.dead_at is not null then format('its worker %s is lost; the next sweep takes the job back', j.worker)
      when until <= clock_timestamp() then format('the lease of its worker %s pid %s is over; the next sweep takes the job back', w.host, w.pid)
      when j.cancel_asked then format('it was asked to cancel; worker %s pid %s hears of it at its next heartbeat', w.host, w.pid)
      else format('attempt %s of %s runs on worker %s pid %s since %s', j.attempt, j.max_attempts, w.host, w.pid, j.started_at) end;
    return next;
    return;
  end if;
  if j.run_at > clock_timestamp() then
    -- One that is due at infinity waits for another job: see posthouse.take_held_key.
    reason := case when j.run_at = 'infinity' then coalesce(j.reason, 'held back') else 'not due yet' || coalesce(': ' || j.reason, '') end;
    until := nullif(j.run_at, 'infinity');
    return next;
  end if;
  -- What others used of a gate that a tenant shares with them is not for him. Of gates `tenant:…` a job passes its own only.
  for reason, until in
    select case when frank or h.reason ~ '^((the budget of )?gate tenant:|job [0-9]+, which shares)' then h.reason else 'a gate that it shares with others holds it back' end, h.until
    from posthouse.held_by(j, j.run_at > clock_timestamp()) h
  loop
    is_held := true;
    return next;
  end loop;
  until := null;
  if not exists (select from posthouse.worker x where x.dead_at is null and posthouse.lease_end(x) > clock_timestamp()
                 and l.queue = any(x.queues) and l.kind = any(x.kinds)) then
    reason := format('no live worker serves kind %s on queue %s', quote_ident(l.kind), quote_ident(l.queue));
    return next;
  elsif j.run_at <= clock_timestamp() and not is_held then
    select count(*) into ahead from (
      select from posthouse.job x where x.lane_id = j.lane_id and x.state = 'queued' and (x.run_at, x.id) < (j.run_at, j.id) limit 100000) x;
    reason := format('waits for a free slot: %s jobs of its tenant and kind are before it', ahead);
    return next;
  end if;
end $$;

-- The kinds with due jobs of a queue and tenant that no live worker serves.
create or replace function posthouse.unserved_kinds(queue text, tenant text) returns text[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return (
    select coalesce(array_agg(distinct l.kind), '{}') from posthouse.lane l
    where l.queue = unserved_kinds.queue and l.tenant = unserved_kinds.tenant
      and (session_user = current_user or posthouse.sees_all() or l.tenant = posthouse.own_tenant())
      and exists (select from posthouse.job j where j.lane_id = l.id and j.state = 'queued' and j.run_at <= clock_timestamp())
      and not exists (select from posthouse.worker w where w.dead_at is null and posthouse.lease_end(w) > clock_timestamp()
                      and l.queue = any(w.queues) and l.kind = any(w.kinds)));
end $$;
