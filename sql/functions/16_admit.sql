-- Admission: how many jobs a gate lets through now, and what it has let through.
--
-- Requests and tokens are counted twice. Seconds of the last minute, 62 of them so that a whole minute and the second that a request
-- takes to arrive are among them, keep any rolling minute within the limit (tokens: and one request). A pace, one second ahead at
-- most, keeps arrivals even and the average at the limit: a request is let through when what went before it has been earned,
-- whatever its size, so that large ones are not starved by small ones.

-- What went through in the seconds from `first` on.
create or replace function posthouse.sum_since(seconds bigint[], counts bigint[], first bigint) returns bigint
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  total bigint := 0;
begin
  for i in reverse coalesce(cardinality(seconds), 0) .. 1 loop
    exit when seconds[i] < first;
    total := total + counts[i];
  end loop;
  return total;
end $$;

-- When what went through in a minute falls below `most`.
create or replace function posthouse.below_at(seconds bigint[], counts bigint[], most bigint, now_s bigint) returns timestamptz
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  total bigint := 0;
begin
  for i in reverse coalesce(cardinality(seconds), 0) .. 1 loop
    exit when seconds[i] < now_s - 61;
    total := total + counts[i];
    if total >= most then
      return to_timestamp(seconds[i] + 62);
    end if;
  end loop;
  return null;
end $$;

-- How many jobs a gate lets through now (`running`: how many are), whether it weighs their tokens, whether its budget is spent, and,
-- if none, when it may be asked again (null: when one of its jobs ends).
create or replace function posthouse.gate_room(g posthouse.gate, s posthouse.gate_state, running int, now_at timestamptz,
  out room int, out until timestamptz, out is_probe boolean, out weighs boolean, out is_spent boolean)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  now_s bigint := floor(extract(epoch from now_at));
  most int;
  ahead float8;                       -- seconds by which what was let through is not yet earned
  again timestamptz;
begin
  room := 2147483647;
  is_probe := false;
  weighs := g.tokens_per_minute is not null;
  is_spent := false;
  if g.closed_at is not null then
    if g.closed_until > now_at then
      room := 0; until := g.closed_until;
      return;
    elsif g.closed_by in ('provider', 'breaker') then
      if posthouse.is_probed(g, now_at) then
        room := 0; until := g.probe_until;
        return;
      end if;
      room := 1; is_probe := true;
    end if;
  end if;
  if g.max_running is not null then
    room := least(room, g.max_running - running);
    if room <= 0 then
      room := 0;
      return;
    end if;
  end if;
  -- Whoever comes after a probe comes slowly at first.
  most := least(g.requests_per_minute, case when g.opened_at > now_at - interval '10 seconds' then 600 end);
  if most is not null then
    ahead := greatest(extract(epoch from s.requests_at - now_at), 0);
    if ahead > 1 then
      room := 0; until := now_at + (ahead - 1) * interval '1 second';
    else
      room := least(room, floor((1 - coalesce(ahead, 0)) * most / 60)::int + 1);
    end if;
    room := least(room, most - posthouse.sum_since(s.seconds, s.requests::bigint[], now_s - 61));
    if room <= 0 then
      room := 0;
      until := greatest(until, posthouse.below_at(s.seconds, s.requests::bigint[], most, now_s));
      return;
    end if;
  end if;
  if weighs then
    ahead := greatest(extract(epoch from s.tokens_at - now_at), 0);
    if ahead > 1 then
      room := 0; until := now_at + (ahead - 1) * interval '1 second';
    end if;
    again := posthouse.below_at(s.seconds, s.tokens, g.tokens_per_minute + 1, now_s);
    if again is not null then
      room := 0; until := greatest(until, again);
    end if;
    if room = 0 then
      return;
    end if;
  end if;
  if g.money_per_day is not null or g.money_per_month is not null then
    if s.spent_month >= g.money_per_month and s.month = date_trunc('month', now_at at time zone 'UTC')::date then
      is_spent := true;
      again := date_trunc('month', now_at at time zone 'UTC') at time zone 'UTC' + interval '1 month';
    elsif s.spent_day >= g.money_per_day and s.day = (now_at at time zone 'UTC')::date then
      is_spent := true;
      again := date_trunc('day', now_at at time zone 'UTC') at time zone 'UTC' + interval '1 day';
    end if;
    if is_spent and g.when_spent = 'hold' then
      room := 0; until := again;
    end if;
  end if;
end $$;

-- The state of a gate after it has let through so many requests and tokens, and these jobs, at a time; or has got some back.
create or replace function posthouse.counted(g posthouse.gate, s posthouse.gate_state, new_ids bigint[], new_fences int[],
  new_requests int, new_tokens bigint, at timestamptz, now_at timestamptz) returns posthouse.gate_state
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  first bigint := floor(extract(epoch from now_at)) - 61;
  second bigint := floor(extract(epoch from at));
  most int := least(g.requests_per_minute, case when g.opened_at > now_at - interval '10 seconds' then 600 end);
  place int;
begin
  s.gate_id := g.id;
  -- What jobs shared that ran one at a time is forgotten when none is left, and begins anew behind what was there.
  s.seq := coalesce(s.seq, case when g.name like 'serial:%' then extract(epoch from now_at) * 1000 else 0 end) + 1;
  if g.max_running is not null then
    s.job_ids := s.job_ids || new_ids;
    s.fences := s.fences || new_fences;
  else
    s.job_ids := null;
    s.fences := null;
  end if;
  if most is null and g.tokens_per_minute is null then
    s.seconds := null; s.requests := null; s.tokens := null; s.requests_at := null; s.tokens_at := null;
    return s;
  end if;
  if most is not null then
    s.requests_at := greatest(s.requests_at, now_at) + new_requests * 60.0 / most * interval '1 second';
  end if;
  if g.tokens_per_minute is not null then
    -- Ten seconds are kept: what jobs give back because they used less is there for others.
    s.tokens_at := greatest(coalesce(s.tokens_at, now_at), now_at - interval '10 seconds') + new_tokens * 60.0 / g.tokens_per_minute * interval '1 second';
  end if;
  -- What is older than a minute is forgotten.
  place := coalesce((select min(i) from generate_subscripts(s.seconds, 1) i where s.seconds[i] >= first), cardinality(s.seconds) + 1);
  if place > 1 then
    s.seconds := s.seconds[place:];
    s.requests := s.requests[place:];
    s.tokens := s.tokens[place:];
  end if;
  if second >= first then
    place := coalesce(width_bucket(second, s.seconds), 0);
    if place > 0 and s.seconds[place] = second then
      s.requests[place] := greatest(s.requests[place] + new_requests, 0);
      s.tokens[place] := greatest(s.tokens[place] + new_tokens, 0);
    else
      s.seconds := s.seconds[:place] || second || s.seconds[place + 1:];
      s.requests := s.requests[:place] || greatest(new_requests, 0) || s.requests[place + 1:];
      s.tokens := s.tokens[:place] || greatest(new_tokens, 0) || s.tokens[place + 1:];
    end if;
  end if;
  return s;
end $$;

-- How many tokens a job is taken to need where it was not said: a quarter of its payload's bytes, and the longest answer that it or
-- its kind allows (else 1000).
create or replace function posthouse.estimate_tokens(payload jsonb, max_output_tokens int) returns bigint
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  return octet_length(payload::text) / 4 + least(greatest(coalesce(
    posthouse.number_of(payload -> 'max_completion_tokens', null), posthouse.number_of(payload -> 'max_tokens', null),
    max_output_tokens, 1000), 1), 1e9)::bigint;
end $$;

-- What is known of gates: their limits, their newest states (without the jobs that are over, where a gate is asked for more than it
-- would let through if they were not, and now and then, since who writes them down writes all of them), how much room there is, and until
-- when there is none. `wanted`: jobs that are asked for, of each.
-- `plain`: nobody closed it, and it counts what runs and nothing else; null: it counts nothing at all. `weighs`: tokens a minute, where
-- it counts them.
create or replace function posthouse.look_at_gates(gate_ids bigint[], members text[], wanted int[], now_at timestamptz,
  out gates posthouse.gate[], out states posthouse.gate_state[], out plain boolean[], out rooms int[], out untils timestamptz[],
  out probes boolean[], out weighs bigint[], out spent boolean[])
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
  n int := coalesce(cardinality(gate_ids), 0);
  known bigint[];                     -- each gate once, and of each:
  whole posthouse.gate[];
  kinds boolean[];                    -- see `plain`
  caps int[];
  heavy bigint[];
  running int[];
  r record;
begin
  -- Thousands of members may have the same gate.
  select array_agg(x.id), array_agg(x.whole), array_agg(x.max_running), array_agg(x.tokens_per_minute),
    array_agg(case when x.odd then false when x.max_running is not null then true end)
  into known, whole, caps, heavy, kinds
  from (
    select g.id, g as whole, g.max_running, g.tokens_per_minute, g.name like 'serial:%' or num_nonnulls(g.requests_per_minute,
      g.tokens_per_minute, g.money_per_day, g.money_per_month, g.closed_at, g.opened_at) > 0 as odd
    from posthouse.gate g where g.id = any(gate_ids) order by g.id) x;
  select array_agg(whole[x.at]), array_agg(x.state), array_agg(kinds[x.at]),
    array_agg(case when x.cap is null then 2147483647 else greatest(x.cap - coalesce(cardinality((x.state).job_ids), 0), 0) end),
    array_agg(coalesce(cardinality((x.state).job_ids), 0)), array_agg(heavy[x.at])
  into gates, states, plain, rooms, running, weighs
  from (
    select u.at, u.cap,
      case
        when n.gate_id is null then row(u.gate_id, u.member, null, null, null, null, null, null, null, null, null, null, null, null)::posthouse.gate_state
        when cardinality(n.job_ids) + u.wanted > u.cap or (n.seq % 16 = 0 and cardinality(n.job_ids) > 100) then (
          select row(n.gate_id, n.member, n.seq, array_agg(y.id), array_agg(y.fence), n.seconds, n.requests, n.tokens, n.requests_at, n.tokens_at,
            n.month, n.day, n.spent_day, n.spent_month)::posthouse.gate_state
          from (select unnest(n.job_ids) as id, unnest(n.fences) as fence offset 0) y
          cross join lateral (select j.state, j.fence from posthouse.job j where j.id = y.id offset 0) j
          where (j.state = 'running' or (whole[u.at]).name like 'serial:%') and j.fence = y.fence)
        else n.newest
      end as state
    from (
      select y.gate_id, y.member, y.wanted, y.at, caps[y.at] as cap
      from (select z.gate_id, z.member, z.wanted, width_bucket(z.gate_id, known) as at from unnest(gate_ids, members, wanted) z(gate_id, member, wanted)) y
      where known[y.at] = y.gate_id offset 0) u
    left join lateral (
      select z.*, z as newest from posthouse.gate_state z where z.gate_id = u.gate_id and z.member = u.member
      order by z.gate_id desc, z.member desc, z.seq desc limit 1) n on true
    offset 0) x;
  untils := array_fill(null::timestamptz, array[n]);
  probes := array_fill(false, array[n]);
  spent := probes;
  if false = any(kinds) then
    for i in 1 .. n loop
      continue when plain[i] is not false;
      r := posthouse.gate_room(gates[i], states[i], running[i], now_at);
      rooms[i] := r.room;
      untils[i] := r.until;
      probes[i] := r.is_probe;
      spent[i] := r.is_spent;
    end loop;
  end if;
end $$;

-- Hold what these gates count until the end of the transaction, in one order. With `wait` false nobody is waited for: the answer is
-- those that others hold.
create or replace function posthouse.hold_counts(gate_ids bigint[], members text[], wait boolean) returns int[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  keys int[] := array(
    select distinct (hashint8(u.gate_id) # hashtext(u.member)) & 127 from unnest(gate_ids, members) u(gate_id, member) order by 1);
  refused int[];
begin
  if wait then
    perform pg_advisory_xact_lock(1346912002, k) from unnest(keys) k;
    return '{}';
  end if;
  refused := array(select k from unnest(keys) k where not pg_try_advisory_xact_lock(1346912002, k));
  if refused = '{}' then
    return refused;
  end if;
  return array(
    select u.inst from unnest(gate_ids, members) with ordinality u(gate_id, member, inst)
    where (hashint8(u.gate_id) # hashtext(u.member)) & 127 = any(refused));
end $$;

-- posthouse.take_jobs for lanes whose jobs may have to pass gates: takes what all gates of a lane let through, all or nothing for each
-- job. Lanes come in the order in which they are to be served. `wait`: wait for other claims that hold a gate; else their lanes are left
-- alone. `blocked` are lanes that gave nothing because of a gate, with that gate and until when; `held` says that gates were looked at.
create or replace function posthouse.take_gated(worker uuid, lanes bigint[], quotas int[], max_jobs int, due timestamptz, wait boolean,
  out jobs posthouse.job[], out blocked bigint[], out blockers bigint[], out members text[], out untils timestamptz[], out held boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  n int := cardinality(lanes);
  step int := greatest(16, least(max_jobs, 256));
  at int := 1;
  part record;
begin
  jobs := '{}'; blocked := '{}'; blockers := '{}'; members := '{}'; untils := '{}'; held := false;
  -- In pieces, since the first lanes may do.
  while at <= n and cardinality(jobs) < max_jobs loop
    select * into part from posthouse.take_gated_part(worker, lanes[at:at + step - 1], quotas[at:at + step - 1],
      max_jobs - cardinality(jobs), due, take_gated.wait and not held);
    held := held or part.held;
    jobs := jobs || part.jobs;
    blocked := blocked || part.blocked;
    blockers := blockers || part.blockers;
    members := members || part.members;
    untils := untils || part.untils;
    at := at + step;
    step := least(2 * step, 256);
  end loop;
  if jobs = '{}' then
    jobs := null;
  end if;
end $$;

-- The models that the jobs of these lanes are to use in place of their own, since a budget is spent; null: their own.
create or replace function posthouse.models_instead(lanes bigint[]) returns text[]
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  found text[];
  r record;
  look record;
begin
  for r in
    select g.gate_id, g.member, array_agg(g.place) as places, substr(x.when_spent, 7) as model
    from posthouse.gates_of(lanes) g join posthouse.gate x on x.id = g.gate_id
    where x.when_spent like 'model:%' and num_nonnulls(x.money_per_day, x.money_per_month) > 0
    group by g.gate_id, g.member, x.when_spent order by g.gate_id, g.member
  loop
    select * into look from posthouse.look_at_gates(array[r.gate_id], array[r.member], array[0], clock_timestamp());
    if look.spent[1] then
      for i in 1 .. cardinality(r.places) loop
        found[r.places[i]] := r.model;
      end loop;
    end if;
  end loop;
  return found;
end $$;

-- A piece of posthouse.take_gated.
create or replace function posthouse.take_gated_part(worker uuid, lanes bigint[], quotas int[], max_jobs int, due timestamptz, wait boolean,
  out jobs posthouse.job[], out blocked bigint[], out blockers bigint[], out members text[], out untils timestamptz[], out held boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  n int := cardinality(lanes);
  places int[];                       -- pairs of a lane and a gate, by lane
  insts int[];
  gate_ids bigint[];
  whose text[];                       -- members of those gates
  starts int[];                       -- where the pairs of a lane begin, and end
  stops int[];
  pairs int;
  shared boolean;                     -- some gate holds for several of these lanes
  wanted int[];
  busy int[];                         -- gates that other claims hold
  -- Of each gate: see posthouse.look_at_gates.
  gates posthouse.gate[];
  states posthouse.gate_state[];
  plain boolean[];
  first_rooms int[];
  rooms int[];
  until_when timestamptz[];
  probes boolean[];
  weighs bigint[];
  are_spent boolean[];
  odd boolean;                        -- some gate counts more than what runs
  locked boolean := false;
  the_one bigint[];                   -- the one job that a lane may give
  next_one record;
  held_up int[] := '{}';              -- pairs of lanes that may not give any, and the gate
  i int;
  ahead float8[];                     -- of gates that weigh tokens: see posthouse.gate_room
  sums bigint[];
  weighed boolean[];                  -- lanes
  spent int[];                        -- lanes whose jobs fail, by the gate whose budget is spent
  over boolean[];                     -- lanes that have no more to give
  gave int[];
  limits int[];
  spots tid[];
  free bigint[] := '{}';              -- lanes without a gate
  blocked_place int := 0;
  total int;
  room int;
  now_at timestamptz;
  found posthouse.job[];
  found_ids bigint[];
  found_fences int[];
  found_places int[];
  j posthouse.job;
  place int;
  weight bigint;
  heavy bigint;                       -- the least limit that a job is too large for
  accepted boolean;
  ids bigint[] := '{}';
  fences int[] := '{}';
  their_places int[] := '{}';
  weights bigint[] := '{}';
  insteads text[];                    -- models to use, of lanes with a budget that is spent
begin
  jobs := '{}'; blocked := '{}'; blockers := '{}'; members := '{}'; untils := '{}'; held := false;
  if exists (select from posthouse.gate g where g.when_spent like 'model:%') then
    insteads := posthouse.models_instead(lanes);
  end if;
  select array_agg(g.place), array_agg(g.gate_id), array_agg(g.member) into places, gate_ids, whose
  from (select x.* from posthouse.gates_of(lanes, insteads) x order by x.place, x.gate_id) g;
  if places is null and insteads is null then
    jobs := coalesce(posthouse.take_jobs(worker, lanes, quotas, max_jobs, due), '{}');
    return;
  end if;
  pairs := coalesce(cardinality(places), 0);
  shared := n > 1 and pairs > (select count(*) from (select distinct u.gate_id, u.member from unnest(gate_ids, whose) u(gate_id, member)) d);
  if shared then
    -- Each in its own order: one that is asked for may change that in which the others come.
    select array_agg(x.place order by x.place, x.inst), array_agg(x.inst order by x.place, x.inst),
      array_agg(x.gate_id order by x.inst) filter (where x.nth = 1),
      array_agg(x.member order by x.inst) filter (where x.nth = 1)
    into places, insts, gate_ids, whose
    from (
      select u.place, u.gate_id, u.member, dense_rank() over w::int as inst, row_number() over (partition by u.gate_id, u.member) as nth
      from unnest(places, gate_ids, whose) u(place, gate_id, member)
      window w as (order by u.gate_id, u.member)) x;
  else
    insts := array(select generate_series(1, pairs));
  end if;
  gate_ids := coalesce(gate_ids, '{}');
  whose := coalesce(whose, '{}');
  wanted := array_fill(0, array[cardinality(gate_ids)]);
  for p in 1 .. pairs loop
    wanted[insts[p]] := least(wanted[insts[p]] + quotas[places[p]], max_jobs);
  end loop;
  held := true;
  busy := posthouse.hold_counts(gate_ids, whose, take_gated_part.wait);
  loop
    now_at := clock_timestamp();
    select x.gates, x.states, x.plain, x.rooms, x.rooms, x.untils, x.probes, x.weighs, x.spent
    into gates, states, plain, rooms, first_rooms, until_when, probes, weighs, are_spent
    from posthouse.look_at_gates(gate_ids, whose, wanted, now_at) x;
    -- One whose time is over lets a single job try it, and others ask for that too: look again when it is held.
    exit when locked or (true = any(probes)) is not true;
    perform from posthouse.gate g
    where g.id = any(array(select g.id from unnest(gate_ids, probes) g(id, probe) where g.probe)) order by g.id for no key update;
    locked := true;
  end loop;
  -- Those that made room have ended by now: none of them seems to have run beside the one that took its place.
  now_at := clock_timestamp();
  if insteads is null and busy = '{}' and (false = any(plain)) is not true
     and not (shared and exists (
       select from unnest(rooms, wanted) with ordinality u(room, wanted, inst)
       where u.room > 0 and u.room < u.wanted and (select count(*) from unnest(insts) s where s = u.inst) > 1)) then
    -- The usual case: gates count what runs and nothing else, and none has to be shared out between lanes.
    limits := quotas;
    for p in 1 .. pairs loop
      limits[places[p]] := least(limits[places[p]], rooms[insts[p]]);
    end loop;
    if 0 < any(limits) then
      select array_agg(t.whole), array_agg(t.spot), array_agg(t.id), array_agg(t.fence + 1), array_agg(t.place)
      into found, spots, ids, fences, their_places
      from (
        select x.whole, x.spot, x.id, x.fence, v.place::int
        from unnest(lanes, limits) with ordinality v(lane_id, quota, place)
        cross join lateral (
          select x as whole, x.ctid as spot, x.id, x.fence from posthouse.job x
          where x.lane_id = v.lane_id and x.state = 'queued' and x.run_at <= due
            and x.run_at >= coalesce(case when common.behind then (
              select f.floor_at from posthouse.lane_floor f where f.lane_id = v.lane_id order by f.seq desc limit 1) end, common.floor_at)
          order by x.lane_id, x.run_at, x.id limit v.quota for update of x skip locked) x
        limit max_jobs) t;
    end if;
    for p in 1 .. pairs loop
      continue when rooms[insts[p]] > 0 or places[p] = blocked_place;
      blocked_place := places[p];
      blocked := blocked || lanes[places[p]];
      blockers := blockers || gate_ids[insts[p]];
      members := members || whose[insts[p]];
      untils := untils || until_when[insts[p]];
    end loop;
    if found is not null then
      jobs := found;
      if (select count(distinct p) from unnest(places) p) < n then
        free := array(select l from unnest(lanes) with ordinality u(l, place) where u.place <> all(places));
      end if;
      -- Locked, they stay in their places.
      update posthouse.job x set state = 'running', fence = x.fence + 1, attempt = x.attempt + 1, worker = take_gated_part.worker,
        started_at = now_at, first_started_at = coalesce(x.first_started_at, now_at), progress = null,
        reserved = case when x.lane_id = any(free) then null else 0 end, instead = null, admitted = null
      where x.ctid = any(spots);
      perform posthouse.book_gates(gates, states, plain, places, insts, ids, fences, their_places, null, now_at);
    end if;
    return;
  end if;
  odd := insteads is not null;
  starts := array_fill(1, array[n]);
  stops := array_fill(0, array[n]);
  over := array_fill(false, array[n]);
  weighed := over;
  gave := stops;
  the_one := array_fill(null::bigint, array[n]);
  spent := array_fill(null::int, array[n]);
  for p in 1 .. pairs loop
    place := places[p];
    if stops[place] = 0 then
      starts[place] := p;
    end if;
    stops[place] := p;
    i := insts[p];
    if i = any(busy) then
      over[place] := true;
    elsif plain[i] is false then
      odd := true;
      if weighs[i] is not null then
        weighed[place] := true;
        ahead[i] := greatest(coalesce(extract(epoch from (states[i]).tokens_at - now_at), 0), 0);
        sums[i] := posthouse.sum_since((states[i]).seconds, (states[i]).tokens, floor(extract(epoch from now_at))::bigint - 61);
      end if;
      if are_spent[i] and (gates[i]).when_spent = 'fail' then
        spent[place] := i;
      end if;
      if (gates[i]).name like 'serial:%' then
        next_one := posthouse.serial_next(lanes[place], states[i], due);
        the_one[place] := next_one.job_id;
        until_when[i] := next_one.until;
        if next_one.job_id is null then
          over[place] := true;
          held_up := array_append(held_up, p);
        else
          quotas[place] := 1;
          rooms[i] := 1;
          first_rooms[i] := 1;
        end if;
      end if;
    end if;
  end loop;
  loop
    -- How many each lane may give, in their order.
    limits := array_fill(0, array[n]);
    total := 0;
    for l in 1 .. n loop
      exit when cardinality(ids) + total >= max_jobs;
      continue when over[l];
      room := least(quotas[l] - gave[l], max_jobs - cardinality(ids) - total);
      for p in starts[l] .. stops[l] loop
        room := least(room, rooms[insts[p]]);
      end loop;
      continue when room <= 0;
      for p in starts[l] .. stops[l] loop
        rooms[insts[p]] := rooms[insts[p]] - room;
      end loop;
      limits[l] := room;
      total := total + room;
    end loop;
    exit when total = 0;
    select array_agg(t.whole), array_agg((t.whole).id), array_agg((t.whole).fence + 1), array_agg(t.position)
    into found, found_ids, found_fences, found_places
    from (
      select x.whole, v.position::int as position
      from unnest(lanes, limits) with ordinality v(lane_id, quota, position)
      cross join lateral (
        select x as whole from posthouse.job x
        where x.lane_id = v.lane_id and x.state = 'queued' and x.run_at <= due
          and x.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = v.lane_id order by f.seq desc limit 1) end, common.floor_at)
          and x.id <> all(ids)        -- those of the last round are still in line
        order by x.lane_id, x.run_at, x.id limit v.quota for update of x skip locked) x
      where v.quota > 0 and the_one[v.position] is null) t;
    for f in 1 .. n loop
      if odd and limits[f] > 0 and the_one[f] is not null then
        select x.* into j from posthouse.job x
        where x.id = the_one[f] and x.lane_id = lanes[f] and x.state = 'queued' and x.run_at <= due for update skip locked;
        if j.id is not null then
          found := array_append(found, j);
          found_places := array_append(found_places, f);
        end if;
      end if;
    end loop;
    if not odd and found is not null then
      foreach place in array found_places loop
        limits[place] := limits[place] - 1;
        gave[place] := gave[place] + 1;
      end loop;
      jobs := jobs || found;
      ids := ids || found_ids;
      fences := fences || found_fences;
      their_places := their_places || found_places;
      weights := weights || array_fill(0::bigint, array[cardinality(found_ids)]);
      found := null;
    end if;
    for f in 1 .. coalesce(cardinality(found), 0) loop
      j := found[f];
      place := found_places[f];
      weight := 0;
      accepted := not over[place];
      if accepted and weighed[place] then
        weight := coalesce(j.tokens, (select posthouse.estimate_tokens(x.payload,
          (select k.max_output_tokens from posthouse.kind k join posthouse.lane l on l.kind = k.name where l.id = j.lane_id))
          from posthouse.payload x where x.id = j.id), 1000);
        heavy := null;
        for p in starts[place] .. stops[place] loop
          i := insts[p];
          if weighs[i] is not null then
            heavy := least(heavy, case when weight > weighs[i] then weighs[i] end);
            accepted := accepted and ahead[i] <= 1 and sums[i] <= weighs[i];
          end if;
        end loop;
        if heavy is not null then
          j.fence := j.fence + 1;
          perform posthouse.bury_job(j, 'too_large', format('it needs %s tokens, and a gate lets through %s a minute', weight, heavy), null, null);
          limits[place] := limits[place] - 1;
          for p in starts[place] .. stops[place] loop
            rooms[insts[p]] := rooms[insts[p]] + 1;
          end loop;
          continue;
        elsif not accepted then
          over[place] := true;
        else
          for p in starts[place] .. stops[place] loop
            i := insts[p];
            if weighs[i] is not null then
              ahead[i] := ahead[i] + weight * 60.0 / weighs[i];
              sums[i] := sums[i] + weight;
            end if;
          end loop;
        end if;
      end if;
      if accepted and spent[place] is not null then
        j.fence := j.fence + 1;
        perform posthouse.bury_job(j, 'budget', format('the budget of gate %s is spent', (gates[spent[place]]).name), null, null);
        accepted := false;
      end if;
      if accepted then
        limits[place] := limits[place] - 1;
        gave[place] := gave[place] + 1;
        j.instead := insteads[place];
        jobs := jobs || j;
        ids := ids || j.id;
        fences := fences || j.fence + 1;
        their_places := their_places || place;
        weights := weights || weight;
      end if;
    end loop;
    -- Whoever gave less than it might has no more; its room is for others.
    for l in 1 .. n loop
      continue when limits[l] <= 0;
      over[l] := true;
      for p in starts[l] .. stops[l] loop
        rooms[insts[p]] := rooms[insts[p]] + limits[l];
      end loop;
    end loop;
  end loop;
  for l in 1 .. n loop
    continue when gave[l] > 0 or over[l];
    for p in starts[l] .. stops[l] loop
      i := insts[p];
      if first_rooms[i] <= 0 then
        blocked := blocked || lanes[l];
        blockers := blockers || gate_ids[i];
        members := members || whose[i];
        untils := untils || until_when[i];
        exit;
      end if;
    end loop;
  end loop;
  for f in 1 .. cardinality(held_up) loop
    i := insts[held_up[f]];
    blocked := array_append(blocked, lanes[places[held_up[f]]]);
    blockers := array_append(blockers, gate_ids[i]);
    members := array_append(members, whose[i]);
    untils := array_append(untils, until_when[i]);
  end loop;
  if ids = '{}' then
    return;
  end if;
  update posthouse.job x set state = 'running', fence = x.fence + 1, attempt = x.attempt + 1, worker = take_gated_part.worker,
    started_at = now_at, first_started_at = coalesce(x.first_started_at, now_at), progress = null, reserved = u.reserved, instead = u.instead,
    admitted = null
  from (select a.id, insteads[a.place] as instead, case when stops[a.place] > 0 then least(a.weight, 2147483647)::int end as reserved
        from unnest(ids, weights, their_places) a(id, weight, place)) u
  where x.id = any(ids) and x.id = u.id;
  if places is null then
    return;
  end if;
  perform posthouse.book_gates(gates, states, plain, places, insts, ids, fences, their_places, weights, now_at);
  if true = any(probes) then
    for f in 1 .. cardinality(ids) loop
      for p in starts[their_places[f]] .. stops[their_places[f]] loop
        if probes[insts[p]] then
          update posthouse.gate g set probe_until = now_at + interval '1 minute', probe_job = ids[f] where g.id = gate_ids[insts[p]];
        end if;
      end loop;
    end loop;
  end if;
end $$;

-- Write down what gates have let through: the arrays of jobs go together, those of pairs of a lane and a gate, and those of gates.
create or replace function posthouse.book_gates(gates posthouse.gate[], states posthouse.gate_state[], plain boolean[], places int[],
  insts int[], ids bigint[], fences int[], their_places int[], weights bigint[], now_at timestamptz) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_nestloop = off             -- the arrays are as long as each other
set enable_hashjoin = on
set plan_cache_mode = force_generic_plan
as $$
begin
  -- Those that count what runs, and nothing else.
  insert into posthouse.gate_state (gate_id, member, seq, job_ids, fences)
  select s.gate_id, s.member, coalesce(s.seq, 0) + 1, s.job_ids || b.ids, s.fences || b.fences
  from (
    select p.inst, array_agg(a.id) as ids, array_agg(a.fence) as fences
    from unnest(ids, fences, their_places) a(id, fence, place)
    join unnest(places, insts) p(place, inst) on p.place = a.place
    where plain[p.inst]
    group by p.inst) b
  join unnest(states) with ordinality s(gate_id, member, seq, job_ids, fences, seconds, requests, tokens, requests_at, tokens_at,
    month, day, spent_day, spent_month, inst) on s.inst = b.inst;
  if false = any(plain) then
    insert into posthouse.gate_state
    select c.*
    from (
      select p.inst, array_agg(a.id) as ids, array_agg(a.fence) as fences, count(*)::int as requests, sum(a.weight)::bigint as tokens
      from unnest(ids, fences, their_places, weights) a(id, fence, place, weight)
      join unnest(places, insts) p(place, inst) on p.place = a.place
      where not plain[p.inst]
      group by p.inst) b
    cross join lateral posthouse.counted(gates[b.inst], states[b.inst], b.ids, b.fences, b.requests, b.tokens, now_at, now_at) c;
  end if;
end $$;

-- Lanes that have nothing left may have been woken for a place behind a gate: others that sleep because of it get that. Comes before
-- posthouse.block_lanes, for whose locks it waits.
create or replace function posthouse.pass_on(lanes bigint[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  r record;
  look record;
begin
  if not exists (select from posthouse.lane l where l.blocked_by is not null) then
    return;
  end if;
  for r in
    select g.gate_id, g.member, count(*)::int as lanes
    from posthouse.gates_of(lanes) g
    cross join lateral (select x.name from posthouse.gate x where x.id = g.gate_id offset 0) x
    where x.name not like 'serial:%'
      and case when x.name = 'tenant:*' then exists (
          select from posthouse.lane l where coalesce(l.blocked_by, 0) = g.gate_id and coalesce(l.blocked_by, 0) > 0 and l.tenant = g.member)
        else exists (select from posthouse.lane l where l.blocked_by = g.gate_id) end
    group by g.gate_id, g.member
  loop
    select * into look from posthouse.look_at_gates(array[r.gate_id], array[r.member], array[1], clock_timestamp());
    if look.rooms[1] > 0 then
      perform posthouse.wake_blocked(r.gate_id, r.member, least(r.lanes, look.rooms[1]));
    end if;
  end loop;
end $$;

-- Put lanes to sleep that a gate holds back, until it opens or somebody wakes them, which is whoever makes room: see
-- posthouse.wake_blocked. Not where that is a moment away, and not at once where it is not known when.
create or replace function posthouse.block_lanes(lanes bigint[], gate_ids bigint[], members text[], untils timestamptz[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
declare
  now_at timestamptz := clock_timestamp();
  look record;
  whose text[];
begin
  -- A thousand at a time; the others have their turn at the next claim.
  select array_agg(b.lane_id), array_agg(b.gate_id), array_agg(b.member) into lanes, gate_ids, whose
  from (
    select b.lane_id, b.gate_id, b.member
    from unnest(lanes, gate_ids, members, untils) b(lane_id, gate_id, member, until)
    cross join lateral (select l.awake_until, l.naps, l.serial from posthouse.lane l where l.id = b.lane_id offset 0) l
    where b.until > now_at + interval '10 seconds' or (coalesce(b.until, 'infinity') > now_at + interval '2 seconds' and l.awake_until < now_at)
      -- Of these there may be many that wait for a job that runs, and each wakes when it ends.
      or (b.until is null and l.serial <> '' and l.naps = 0)
    limit 1000) b
  where pg_try_advisory_xact_lock(1346912003, (b.gate_id % 128)::int);
  if lanes is null then
    return;
  end if;
  -- A new statement, so that it sees what made room before the lock was ours.
  select * into look from posthouse.look_at_gates(gate_ids, whose, array_fill(1, array[cardinality(lanes)]), clock_timestamp());
  -- Those of tenants, of whom there may be thousands, leave the index that claims walk when it is for longer than two minutes: the sweep
  -- wakes them in time.
  update posthouse.lane l set blocked_by = b.gate_id, awake_until = least(l.awake_until, now_at),
    ready_at = case when b.exactly or b.until <= now_at + interval '2 minutes' then coalesce(b.until, 'infinity') else 'infinity' end
  from (
    select x.id, b.gate_id, b.until, b.exactly
    from (
      select u.lane_id, u.gate_id, u.until, g.name not like 'tenant:%' as exactly
      from unnest(lanes, gate_ids, whose, look.rooms, look.untils) u(lane_id, gate_id, member, room, until)
      cross join lateral (select g.name from posthouse.gate g where g.id = u.gate_id offset 0) g
      where u.room <= 0 and strpos(u.member, chr(31)) = 0
      union all select h.lane_id, h.gate_id, h.until, true from posthouse.serial_held(lanes, clock_timestamp()) h where h.gate_id = any(gate_ids)) b
    cross join lateral (select x.id from posthouse.lane x where x.id = b.lane_id for no key update skip locked) x) b
  where l.id = b.id;
end $$;

-- When the gates of a lane let something through, as far as is known: now or before, at a time, or when a job of them ends (infinity).
create or replace function posthouse.gates_open_at(lane_id bigint) returns timestamptz
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  look record;
  n record;
  opens timestamptz := '-infinity';
  gate_ids bigint[];
  whose text[];
begin
  select array_agg(g.gate_id), array_agg(g.member) into gate_ids, whose from posthouse.gates_of(array[lane_id]) g;
  if gate_ids is null then
    return opens;
  end if;
  select * into look from posthouse.look_at_gates(gate_ids, whose, array_fill(1, array[cardinality(gate_ids)]), clock_timestamp());
  for i in 1 .. cardinality(look.rooms) loop
    if (look.gates[i]).name like 'serial:%' then
      n := posthouse.serial_next(lane_id, look.states[i], clock_timestamp());
      if n.job_id is null then
        opens := greatest(opens, coalesce(n.until, 'infinity'));
      end if;
    elsif look.rooms[i] <= 0 then
      opens := greatest(opens, coalesce(look.untils[i], 'infinity'));
    end if;
  end loop;
  return opens;
end $$;
