-- What the end of attempts means for the gates that let them through: reservations become what was used, and whoever waits for
-- their place is woken.

-- Settle jobs that passed gates, as they were while they ran; usages and `called` go with them: whether an attempt can have sent a
-- request. Comes last in a settle, and once, since it takes the locks of gates in one order; whoever cannot keep to that does not
-- wait, and leaves reservations as they are where others look at a gate.
create or replace function posthouse.settle_gates(jobs posthouse.job[], usages jsonb[], called boolean[], wait boolean default true) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  lanes bigint[];
  insteads text[];
  passed_places int[];                -- pairs of a lane and a gate
  passed bigint[];
  members text[];
  -- Each gate once, and of each: how many may run, whether it counts more than that, whether the end of these jobs makes room behind it
  -- (its own if no lane sleeps because of it), and whether its members are many.
  known bigint[];
  caps int[];
  counts boolean[];
  frees boolean[];
  many boolean[];
  r record;
begin
  select array_agg(x.lane_id), case when count(x.instead) > 0 then array_agg(x.instead) end into lanes, insteads
  from (select distinct j.lane_id, j.instead from unnest(jobs) j) x;
  select array_agg(g.place), array_agg(g.gate_id), array_agg(g.member) into passed_places, passed, members
  from posthouse.gates_of(lanes, insteads) g;
  select array_agg(x.id), array_agg(coalesce(x.max_running, 2147483647)), array_agg(x.counts), array_agg(x.frees), array_agg(x.many)
  into known, caps, counts, frees, many
  from (
    select g.id, g.max_running, num_nonnulls(g.requests_per_minute, g.tokens_per_minute, g.money_per_day, g.money_per_month) > 0 as counts,
      num_nonnulls(g.max_running, g.tokens_per_minute) > 0 or g.requests_per_minute is not null and false = any(called) as frees,
      g.name = 'tenant:*' or g.name like 'serial:%' as many
    from posthouse.gate g where g.id = any(passed) order by g.id) x;
  if true = any(counts) then
    select array_agg(x.gate_id order by x.gate_id, x.member) as gate_ids, array_agg(x.member order by x.gate_id, x.member) as members into r
    from (
      select distinct g.gate_id, g.member from unnest(passed, members) g(gate_id, member)
      where counts[width_bucket(g.gate_id, known)] and known[width_bucket(g.gate_id, known)] = g.gate_id) x;
    perform posthouse.true_up(jobs, usages, called, lanes, insteads, r.gate_ids, r.members, wait);
  end if;
  -- Those of other workers who found no room look again.
  if exists (
    select from (select distinct g.gate_id, g.member from unnest(passed, members) g(gate_id, member)) g
    cross join lateral (
      select cardinality(s.job_ids) as running from posthouse.gate_state s where s.gate_id = g.gate_id and s.member = g.member
      order by s.gate_id desc, s.member desc, s.seq desc limit 1) s
    where s.running >= caps[width_bucket(g.gate_id, known)]
      and (strpos(g.member, chr(31)) = 0 or posthouse.serial_waits(g.gate_id, g.member))) then
    perform posthouse.notify_queue('*');
  end if;
  -- Held before the look, as posthouse.wake_blocked does.
  perform pg_advisory_xact_lock_shared(1346912003, k.key) from (select distinct (g % 128)::int as key from unnest(known) g) k;
  frees := array(select k.frees and exists (select from posthouse.lane l where l.blocked_by = k.id offset 0) from unnest(known, frees) k(id, frees));
  if true = any(frees) then
    for r in
      select x.gate_id, x.member, count(*)::int as jobs
      from (
        select g.place, g.gate_id, g.member
        from unnest(passed_places, passed, members) g(place, gate_id, member)
        where frees[width_bucket(g.gate_id, known)]
          -- Of thousands of tenants most have none that sleeps.
          and (not many[width_bucket(g.gate_id, known)]
               or exists (select from posthouse.lane l where coalesce(l.blocked_by, 0) = g.gate_id and coalesce(l.blocked_by, 0) > 0
                            and l.tenant = split_part(g.member, chr(31), 1) offset 0)) offset 0) x
      join unnest(jobs) j on j.lane_id = lanes[x.place] and j.instead is not distinct from insteads[x.place]
      group by x.gate_id, x.member
    loop
      perform posthouse.wake_blocked(r.gate_id, r.member, r.jobs);
    end loop;
  end if;
  -- Gates that its calls passed and it did not.
  for r in
    select a.gate_id, count(*)::int as jobs
    from generate_subscripts(jobs, 1) o cross join lateral unnest((jobs[o]).admitted[3:]) a(gate_id)
    where a.gate_id <> all(coalesce(passed, '{}')) group by a.gate_id
  loop
    perform posthouse.wake_blocked(r.gate_id, null, r.jobs);
    perform posthouse.notify_queue('*');
  end loop;
end $$;

-- Make of what was reserved what was used, each in the second in which it was let through, and add up what was spent. Unknown usage
-- stays as it was reserved.
create or replace function posthouse.true_up(jobs posthouse.job[], usages jsonb[], called boolean[], lanes bigint[], insteads text[],
  gate_ids bigint[], members text[], wait boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  now_at timestamptz;
  look record;
  g posthouse.gate;
  s posthouse.gate_state;
  d record;
  changed boolean;
begin
  -- The usual case of a gate that counts requests only: each made the one that it had reserved.
  if not exists (
    select from unnest(usages, called) u(usage, called)
    cross join lateral posthouse.usage_numbers(u.usage) n
    where not u.called or n.requests <> 1 or n.tokens is not null or n.cost > 0) then
    return;
  end if;
  -- Whoever sets gates waits for the rows of jobs, and who does not wait here holds some, and has not held gates before them.
  if (not wait and not pg_try_advisory_xact_lock_shared(1346912000, 4)) or posthouse.hold_counts(gate_ids, members, wait) <> '{}' then
    return;
  end if;
  now_at := clock_timestamp();
  select * into look from posthouse.look_at_gates(gate_ids, members, array_fill(0, array[cardinality(gate_ids)]), now_at);
  for i in 1 .. cardinality(gate_ids) loop
    g := look.gates[i];
    s := look.states[i];
    changed := false;
    for d in
      select date_trunc('second', u.started_at) as at,
        sum(case when u.called then greatest(coalesce(n.requests, 1) - u.calls, 0) - 1 else -1 end)::int as requests,
        sum(case when not u.called then -u.reserved
            when n.tokens is not null then greatest(n.tokens - u.call_tokens, 0) - u.reserved
            when n.requests = 0 then -u.reserved else 0 end)::bigint as tokens, sum(n.cost) as cost
      from (select (jobs[o]).lane_id, (jobs[o]).started_at, (jobs[o]).reserved, (jobs[o]).instead, usages[o] as usage, called[o] as called,
              -- Calls that were let through this gate one by one have been counted.
              case when g.id = any((jobs[o]).admitted[3:]) then (jobs[o]).admitted[2] else 0 end as calls,
              case when g.id = any((jobs[o]).admitted[3:]) then (jobs[o]).admitted[1] else 0 end as call_tokens
            from generate_subscripts(jobs, 1) o) u
      cross join lateral posthouse.usage_numbers(u.usage) n
      where exists (
        select from posthouse.gates_of(lanes, insteads) x
        where x.gate_id = g.id and x.member = members[i] and lanes[x.place] = u.lane_id and insteads[x.place] is not distinct from u.instead)
      group by date_trunc('second', u.started_at)
    loop
      if (g.requests_per_minute is not null and d.requests <> 0) or (g.tokens_per_minute is not null and d.tokens <> 0) then
        s := posthouse.counted(g, s, '{}', '{}', d.requests, d.tokens, d.at, now_at);
        changed := true;
        if d.tokens < 0 or d.requests < 0 then
          perform posthouse.notify_queue('*');
        end if;
      end if;
      if d.cost > 0 and (g.money_per_day is not null or g.money_per_month is not null) then
        s := posthouse.with_spent(g, s, d.cost, now_at);
        changed := true;
      end if;
    end loop;
    if changed then
      s.gate_id := g.id;
      s.member := members[i];
      s.seq := coalesce((look.states[i]).seq, 0) + 1;
      insert into posthouse.gate_state select s.*;
    end if;
  end loop;
end $$;

-- The state of a gate after so much more was spent, by day and month in UTC. Raises an alert when its share is passed.
create or replace function posthouse.with_spent(g posthouse.gate, s posthouse.gate_state, cost numeric, now_at timestamptz)
returns posthouse.gate_state
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  today date := now_at at time zone 'UTC';
  this_month date := date_trunc('month', now_at at time zone 'UTC');
  before_day numeric := case when s.day = today then s.spent_day else 0 end;
  before_month numeric := case when s.month = this_month then s.spent_month else 0 end;
  share numeric;
  whose text := g.name || case when s.member <> '' then format(' (%s)', s.member) else '' end;
begin
  s.day := today;
  s.month := this_month;
  s.spent_day := before_day + cost;
  s.spent_month := before_month + cost;
  foreach share in array array[g.warn_at, 1] loop
    if before_day < share * g.money_per_day and s.spent_day >= share * g.money_per_day then
      perform posthouse.raise_alert('budget', whose, format('%s has spent %s of %s for today', whose, s.spent_day, g.money_per_day),
        jsonb_build_object('gate', g.name, 'member', s.member, 'spent', s.spent_day, 'limit', g.money_per_day, 'period', 'day'));
    end if;
    if before_month < share * g.money_per_month and s.spent_month >= share * g.money_per_month then
      perform posthouse.raise_alert('budget', whose, format('%s has spent %s of %s for this month', whose, s.spent_month, g.money_per_month),
        jsonb_build_object('gate', g.name, 'member', s.member, 'spent', s.spent_month, 'limit', g.money_per_month, 'period', 'month'));
    end if;
  end loop;
  return s;
end $$;

-- Wake whoever waits for the place of jobs that no longer run: taken back from a worker.
create or replace function posthouse.free_gates(lane_id bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.wake_blocked(g.gate_id, g.member, 1)
  from posthouse.gates_of(array[lane_id]) g join posthouse.gate x on x.id = g.gate_id where x.max_running is not null;
  perform posthouse.notify_queue('*');
end $$;

-- Whether a closed gate keeps the jobs of a lane from being claimed.
create or replace function posthouse.is_held_back(lane_id bigint) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (
    select from posthouse.gates_of(array[lane_id]) g join posthouse.gate x on x.id = g.gate_id
    where x.closed_at is not null and (x.closed_until > clock_timestamp() or x.closed_by in ('provider', 'breaker')));
end $$;

-- Wake the lanes of jobs that run one at a time with this lane's, after one of them was moved or is no longer in line.
create or replace function posthouse.free_serial(lane_id bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.wake_blocked(g.id, l.tenant || chr(31) || l.serial, 1)
  from posthouse.lane l join posthouse.gate g on g.name = 'serial:' || l.queue
  where l.id = free_serial.lane_id and l.serial <> '';
end $$;

-- Whether a due job waits for others that share its value.
create or replace function posthouse.serial_waits(gate_id bigint, member text) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
  return exists (
    select from posthouse.gate g
    join posthouse.lane l on l.queue = substr(g.name, 8) and l.tenant = split_part(member, chr(31), 1)
      and l.serial = substr(member, strpos(member, chr(31)) + 1)
    cross join lateral posthouse.first_due(l.id, clock_timestamp())
    where g.id = serial_waits.gate_id);
end $$;
