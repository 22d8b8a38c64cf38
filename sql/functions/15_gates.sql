-- Gates: what is set for them, who closes and opens them, and what they count.
--
-- Claims hold advisory lock 4 (shared) while they look at what is set, so that a change waits for claims under way, and every
-- claim after it goes by the new limits. What a gate counts is written under one of 128 locks of class 1346912002.

-- Raise PH001 unless this is a gate's name: one that jobs ask for, or a scope and whom it holds for.
create or replace function posthouse.check_gate(field text, name text) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.check_name(field, name);
  if strpos(name, ':') > 0 and (name !~ '^(queue|tenant|model|endpoint):.' or name = 'endpoint:*') then
    raise exception using errcode = 'PH001', message = format('%s: %s is no gate''s name', field, quote_literal(name)),
      hint = 'Write queue:Q, tenant:T, model:M or endpoint:PROVIDER/MODEL, with * for each (tenant:*), or a name without a colon.';
  end if;
end $$;

-- Wait until no claim looks at gates, and hold others off until the end of the transaction.
create or replace function posthouse.hold_gates() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.check_isolation();
  perform pg_advisory_xact_lock(1346912000, 4);
end $$;

-- Set all limits of a gate; null: none. `when_spent` says what happens when a budget is used up: hold (wait for the next day or
-- month, UTC), fail, or model:NAME, which is used instead. `warn_at`: share of a budget, above 0 to 1, at which an alert is raised.
create or replace function posthouse.set_gate(name text, max_running int default null, requests_per_minute int default null,
  tokens_per_minute bigint default null, money_per_day numeric default null, money_per_month numeric default null,
  when_spent text default 'hold', warn_at numeric default null) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  complaint text;
  set_id bigint;
  before posthouse.gate;
begin
  perform posthouse.check_gate('name', name);
  complaint := case
    when max_running not between 1 and 100000 then format('max_running: %s is not between 1 and 100000; close the gate to stop all', max_running)
    when requests_per_minute not between 1 and 10000000
      then format('requests_per_minute: %s is not between 1 and 10000000; close the gate to stop all', requests_per_minute)
    when tokens_per_minute not between 1 and 1000000000000
      then format('tokens_per_minute: %s is not between 1 and 1000000000000; close the gate to stop all', tokens_per_minute)
    when (money_per_day > 0 and money_per_day <= 1000000000) is false
      then format('money_per_day: %s is not above 0 and up to a billion; close the gate to stop all', money_per_day)
    when (money_per_month > 0 and money_per_month <= 1000000000) is false
      then format('money_per_month: %s is not above 0 and up to a billion; close the gate to stop all', money_per_month)
    when (when_spent in ('hold', 'fail') or when_spent ~ '^model:.') is not true
      then format('when_spent: %s is not hold, fail or model:NAME', coalesce(quote_literal(when_spent), 'null'))
    when when_spent = name then 'when_spent: a model cannot stand in for itself'
    when when_spent = 'model:*' then 'when_spent: name one model'
    when (warn_at > 0 and warn_at <= 1) is false then format('warn_at: %s is not a share above 0 and up to 1', warn_at)
    when warn_at is not null and money_per_day is null and money_per_month is null then 'warn_at: needs money_per_day or money_per_month'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  if when_spent like 'model:%' then
    perform posthouse.check_name('when_spent', when_spent);
  end if;
  perform posthouse.hold_gates();
  select * into before from posthouse.gate g where g.name = set_gate.name;
  insert into posthouse.gate (name, max_running, requests_per_minute, tokens_per_minute, money_per_day, money_per_month, when_spent, warn_at)
  values (set_gate.name, set_gate.max_running, set_gate.requests_per_minute, set_gate.tokens_per_minute, set_gate.money_per_day,
    set_gate.money_per_month, set_gate.when_spent, set_gate.warn_at)
  on conflict on constraint gate_name_key do update set max_running = excluded.max_running,
    requests_per_minute = excluded.requests_per_minute, tokens_per_minute = excluded.tokens_per_minute,
    money_per_day = excluded.money_per_day, money_per_month = excluded.money_per_month, when_spent = excluded.when_spent,
    warn_at = excluded.warn_at
  returning gate.id into set_id;
  if (before.requests_per_minute, before.tokens_per_minute) is distinct from (requests_per_minute, tokens_per_minute) then
    -- The pace was reckoned by the old rates; the seconds of the last minute keep the new ones.
    insert into posthouse.gate_state (gate_id, member, seq, job_ids, fences, seconds, requests, tokens, month, day, spent_day, spent_month)
    select s.gate_id, s.member, s.seq + 1, s.job_ids, s.fences, s.seconds, s.requests, s.tokens, s.month, s.day, s.spent_day, s.spent_month
    from (select distinct on (x.member) x.* from posthouse.gate_state x where x.gate_id = set_id order by x.member, x.seq desc) s;
  end if;
  if max_running is not null then
    perform posthouse.count_running(set_id);
  end if;
  -- One without limits of its own leaves its jobs to the gate for each.
  perform posthouse.count_running(g.id) from posthouse.gate g
  where g.name = left(set_gate.name, strpos(set_gate.name, ':')) || '*' and g.id <> set_id and g.max_running is not null;
  perform posthouse.wake_gate(name);
end $$;

-- Remove a gate and what it has counted. False: there is none.
create or replace function posthouse.remove_gate(name text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  gone bigint;
begin
  perform posthouse.check_gate('name', name);
  perform posthouse.hold_gates();
  perform posthouse.wake_gate(name);
  delete from posthouse.gate g where g.name = remove_gate.name returning g.id into gone;
  delete from posthouse.gate_state s where s.gate_id = gone;
  -- Its jobs are left to the gate for each.
  perform posthouse.count_running(g.id) from posthouse.gate g
  where g.name = left(remove_gate.name, strpos(remove_gate.name, ':')) || '*' and g.max_running is not null;
  return gone is not null;
end $$;

-- Close a gate until a time, by a person: nothing passes until then. It is made if there is none.
create or replace function posthouse.close_gate(name text, until timestamptz default 'infinity', reason text default null) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
  perform posthouse.check_gate('name', name);
  if until is null or until <= clock_timestamp() then
    raise exception using errcode = 'PH001', message = format('until: %s is over', coalesce(until::text, 'null')),
      hint = 'Name a time to come; leave it out to close the gate until somebody opens it.';
  end if;
  perform posthouse.hold_gates();
  insert into posthouse.gate (name, closed_until, closed_at, closed_by, closed_reason)
  values (close_gate.name, close_gate.until, clock_timestamp(), 'person', left(close_gate.reason, 500))
  on conflict on constraint gate_name_key do update set closed_until = excluded.closed_until, closed_at = excluded.closed_at,
    closed_by = excluded.closed_by, closed_reason = excluded.closed_reason, probe_until = null, probe_job = null;
  -- Those that sleep sleep until then from now on.
  perform posthouse.wake_gate(name);
end $$;

-- Open a gate, whoever closed it. False: it was open, or there is none.
create or replace function posthouse.open_gate(name text) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  opened bigint;
begin
  perform posthouse.hold_gates();
  update posthouse.gate g set closed_until = null, closed_at = null, closed_by = null, closed_reason = null, strikes = 0,
    probe_until = null, probe_job = null
  where g.name = open_gate.name and g.closed_at is not null returning g.id into opened;
  if opened is null then
    return false;
  end if;
  perform posthouse.wake_gate(name);
  return true;
end $$;

-- Say which gates the jobs of a kind pass, besides those of queue, tenant and their own (null: as before), how long its answers can be,
-- and whether the payload of one goes when it is done or cancelled (null: as before; a dead letter keeps it).
create or replace function posthouse.set_kind(kind text, gates text[] default null, max_output_tokens int default null, drop_payload boolean default null)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  before posthouse.kind;
begin
  perform posthouse.check_name('kind', kind);
  select k.* into before from posthouse.kind k where k.name = set_kind.kind;
  if gates is null then
    gates := before.gates;
    max_output_tokens := coalesce(max_output_tokens, before.max_output_tokens);
  end if;
  gates := posthouse.check_gates(coalesce(gates, '{}'));
  drop_payload := coalesce(drop_payload, before.drops_payload, false);
  if max_output_tokens <= 0 then
    raise exception using errcode = 'PH001', message = format('max_output_tokens: %s is not above 0', max_output_tokens);
  end if;
  -- Workers say it whenever they start: what is so already is not written, and waits for nobody.
  if before.gates = set_kind.gates and before.max_output_tokens is not distinct from set_kind.max_output_tokens
     and before.drops_payload = set_kind.drop_payload then
    return;
  end if;
  perform posthouse.hold_gates();
  insert into posthouse.kind (name, gates, max_output_tokens, drops_payload)
  values (set_kind.kind, set_kind.gates, set_kind.max_output_tokens, set_kind.drop_payload)
  on conflict on constraint kind_pkey do update set gates = excluded.gates, max_output_tokens = excluded.max_output_tokens,
    drops_payload = excluded.drops_payload;
  perform posthouse.count_running(x.id)
  from (select distinct f.id from unnest(set_kind.gates) n(name) cross join lateral posthouse.gates_named(n.name) f) f
  join posthouse.gate x on x.id = f.id where x.max_running is not null;
  update posthouse.lane l set ready_at = least(l.ready_at, clock_timestamp()), blocked_by = null
  where l.id = any(array(select x.id from posthouse.lane x where x.blocked_by is not null and x.kind = set_kind.kind for no key update skip locked));
end $$;

-- Say where a model is asked, in order of preference, as PROVIDER/MODEL.
create or replace function posthouse.set_route(model text, endpoints text[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  name text;
begin
  perform posthouse.check_name('model', model);
  if coalesce(cardinality(endpoints), 0) not between 1 and 100 or array_ndims(endpoints) > 1 then
    raise exception using errcode = 'PH001', message = 'endpoints: must be a plain list of 1 to 100';
  end if;
  foreach name in array endpoints loop
    perform posthouse.check_gate('endpoints', 'endpoint:' || name);
  end loop;
  if exists (select from posthouse.route r where r.model = set_route.model and r.endpoints = set_route.endpoints) then
    return;
  end if;
  perform posthouse.hold_gates();
  insert into posthouse.route (model, endpoints) values (set_route.model, set_route.endpoints)
  on conflict on constraint route_pkey do update set endpoints = excluded.endpoints;
  perform posthouse.count_running(g.id) from posthouse.gate g
  where g.name = any(array(select 'endpoint:' || e from unnest(set_route.endpoints) e)) and g.max_running is not null;
  perform posthouse.wake_blocked(g.id, null, 1000000) from posthouse.gate g where g.name >= 'endpoint:' and g.name < 'endpoint;';
end $$;

-- Set the weight of a tenant: with 2 it gets twice the share of one with 1, which is what tenants have that are not set.
create or replace function posthouse.set_tenant(tenant text, weight real) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
begin
  perform posthouse.check_name('tenant', tenant);
  if (weight between 0.01 and 100) is not true then
    raise exception using errcode = 'PH001', message = format('weight: %s is not between 0.01 and 100', coalesce(weight::text, 'null')),
      hint = 'Close the gate tenant:NAME to stop a tenant.';
  end if;
  perform posthouse.hold_gates();
  if weight = 1 then
    delete from posthouse.tenant t where t.name = set_tenant.tenant;
  else
    insert into posthouse.tenant (name, weight) values (set_tenant.tenant, set_tenant.weight)
    on conflict on constraint tenant_pkey do update set weight = excluded.weight;
  end if;
  perform posthouse.make_shares();
end $$;

-- Say by what a queue is fair between its tenants: jobs, as it comes, or tokens: then a tenant whose jobs use twice as many gets half
-- as many of them done.
create or replace function posthouse.set_fair_by(queue text, fair_by text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.check_name('queue', queue);
  if (fair_by in ('jobs', 'tokens')) is not true then
    raise exception using errcode = 'PH001', message = format('fair_by: %s is not jobs or tokens', coalesce(quote_literal(fair_by), 'null'));
  end if;
  insert into posthouse.queue (name, fair_by) values (set_fair_by.queue, set_fair_by.fair_by)
  on conflict on constraint queue_pkey do update set fair_by = excluded.fair_by;
  perform posthouse.make_shares();
end $$;

-- Let the jobs of a queue that share a field of their payload run one at a time, in the order in which they were enqueued, across retries
-- and rescue: the next one begins when the one before is done, failed or cancelled. null: as it comes. It counts for jobs that are
-- enqueued from now on; jobs without the field are not held up.
create or replace function posthouse.set_serial_by(queue text, field text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.check_name('queue', queue);
  if field is not null then
    perform posthouse.check_name('field', field);
  end if;
  perform posthouse.hold_gates();
  insert into posthouse.queue (name, serial_by) values (set_serial_by.queue, set_serial_by.field)
  on conflict on constraint queue_pkey do update set serial_by = excluded.serial_by;
  if field is not null then
    insert into posthouse.gate (name, max_running) values ('serial:' || set_serial_by.queue, 1) on conflict do nothing;
  end if;
end $$;

-- Which job of a lane may run next where jobs run one at a time: the one that began and is not final, else the oldest due one of
-- all lanes with the same names and value. null: none of this lane, until then (null: until another one ends).
create or replace function posthouse.serial_next(lane_id bigint, s posthouse.gate_state, due timestamptz, out job_id bigint, out until timestamptz)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  j posthouse.job;
begin
  select x.* into j
  from unnest(s.job_ids, s.fences) u(id, fence)
  cross join lateral (select x.* from posthouse.job x where x.id = u.id offset 0) x
  where x.fence = u.fence
  limit 1;
  if j.id is not null then
    if j.state = 'queued' and j.run_at <= due and j.lane_id = serial_next.lane_id then
      job_id := j.id;
    elsif j.state = 'queued' then
      until := case when j.run_at > due then j.run_at else due + interval '1 second' end;
    end if;
    return;
  end if;
  select x.id, k.id into job_id, j.lane_id
  from posthouse.lane l
  join posthouse.lane k on k.queue = l.queue and k.tenant = l.tenant and k.serial = l.serial
  cross join lateral posthouse.first_due(k.id, due) x
  where l.id = serial_next.lane_id
  order by x.run_at, x.id limit 1;
  if j.lane_id <> serial_next.lane_id then
    job_id := null;
    until := due + interval '1 second';
  end if;
end $$;

-- Which of these lanes may not give a job since another one with their value comes first, with the gate, the value, and until when (null:
-- until that one ends). All at once: there may be thousands. What is open here is looked at again when it is held: see posthouse.serial_next.
create or replace function posthouse.serial_held(lanes bigint[], due timestamptz)
returns table (lane_id bigint, gate_id bigint, member text, until timestamptz)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
    select l.id, g.id, l.tenant || chr(31) || l.serial,
      case when b.state is null then due + interval '1 second' when b.state <> 'queued' then null else greatest(b.run_at, due + interval '1 second') end
    from unnest(lanes) u(id)
    cross join lateral (select l.id, l.queue, l.tenant, l.serial from posthouse.lane l where l.id = u.id and l.serial <> '' offset 0) l
    cross join lateral (select g.id from posthouse.gate g where g.name = 'serial:' || l.queue offset 0) g
    left join lateral (
      select s.job_ids, s.fences from posthouse.gate_state s where s.gate_id = g.id and s.member = l.tenant || chr(31) || l.serial
      order by s.gate_id desc, s.member desc, s.seq desc limit 1) s on true
    left join lateral (
      select j.state, j.run_at, j.lane_id from unnest(s.job_ids, s.fences) x(id, fence)
      cross join lateral (select j.state, j.run_at, j.lane_id, j.fence from posthouse.job j where j.id = x.id offset 0) j
      where j.fence = x.fence limit 1) b on true
    where case when b.state is not null then b.state <> 'queued' or b.run_at > due or b.lane_id <> l.id
      else exists (
        select from (
          select k.id from posthouse.lane k
          where k.queue = l.queue and k.tenant = l.tenant and k.serial = l.serial and k.id <> l.id offset 0) k
        cross join lateral posthouse.first_due(k.id, due) other
        cross join lateral posthouse.first_due(l.id, due) own
        where (other.run_at, other.id) < (own.run_at, own.id)) end;
end $$;

-- The job of a lane that has been due for longest.
create or replace function posthouse.first_due(lane_id bigint, due timestamptz) returns table (run_at timestamptz, id bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  return query
    select j.run_at, j.id from posthouse.job j
    where j.lane_id = first_due.lane_id and j.state = 'queued' and j.run_at <= due
      and j.run_at >= coalesce(case when common.behind then (
        select f.floor_at from posthouse.lane_floor f where f.lane_id = first_due.lane_id order by f.seq desc limit 1) end, common.floor_at)
    order by j.lane_id, j.run_at, j.id limit 1;
end $$;

-- Work out the shares of tenants that are not all alike: of their weights, and of the tokens that a job of theirs used on average
-- yesterday and today where a queue is fair by tokens.
create or replace function posthouse.make_shares() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if not exists (select from posthouse.tenant) and not exists (select from posthouse.queue q where q.fair_by = 'tokens')
     and not exists (select from posthouse.share) then
    return;
  end if;
  perform pg_advisory_xact_lock(1346912000, 5);
  with recursive queues as (
    (select l.queue from posthouse.lane l order by l.queue limit 1)
    union all
    select (select l.queue from posthouse.lane l where l.queue > q.queue order by l.queue limit 1) from queues q where q.queue is not null
  ), used as (
    select u.queue, u.tenant, greatest(sum(u.input_tokens + u.output_tokens)::float8 / greatest(sum(u.attempts), 1), 1) as tokens
    from posthouse.usage_day u join posthouse.queue q on q.name = u.queue and q.fair_by = 'tokens'
    where u.day >= (clock_timestamp() at time zone 'UTC')::date - 1
    group by u.queue, u.tenant
  ), wanted as (
    select k.queue, k.tenant,
      least(greatest(coalesce(t.weight, 1) * coalesce(avg(u.tokens) over (partition by k.queue) / u.tokens, 1), 0.001), 1000)::real as share
    from (select q.queue, t.name as tenant from queues q cross join posthouse.tenant t where q.queue is not null
          union select u.queue, u.tenant from used u) k
    left join posthouse.tenant t on t.name = k.tenant
    left join used u on u.queue = k.queue and u.tenant = k.tenant
  ), gone as (
    delete from posthouse.share s where not exists (select from wanted w where w.queue = s.queue and w.tenant = s.tenant)
  )
  insert into posthouse.share (queue, tenant, share) select w.queue, w.tenant, w.share from wanted w
  on conflict on constraint share_pkey do update set share = excluded.share
  where posthouse.share.share not between excluded.share * 0.9 and excluded.share * 1.1 or (excluded.share = 1 and posthouse.share.share <> 1);
end $$;

-- A list of gates as it is kept: sorted, each once. Raises PH001 for what are no names of gates.
create or replace function posthouse.check_gates(gates text[]) returns text[]
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  name text;
begin
  if gates is null or array_ndims(gates) > 1 or cardinality(gates) > 16 then
    raise exception using errcode = 'PH001', message = 'gates: must be a plain list of at most 16';
  end if;
  foreach name in array gates loop
    perform posthouse.check_gate('gates', name);
    if name ~ '^(queue|tenant|endpoint):' or name ~ ':[*]$' then
      raise exception using errcode = 'PH001', message = format('gates: a job cannot ask for %s', quote_literal(name)),
        hint = 'Ask for model:NAME or a name without a colon; gates of queue and tenant hold by themselves.';
    end if;
  end loop;
  return array(select distinct g collate "C" from unnest(gates) g order by 1);
end $$;

-- The gates that the jobs of these lanes pass; `place` is the lane's in the array. `instead` are models to use in place of their own,
-- in the same order. Tenants are looked up one by one, since there may be many; queues, kinds and what jobs ask for once each.
create or replace function posthouse.gates_of(lanes bigint[], instead text[] default null) returns table (place int, gate_id bigint, member text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  each_tenant bigint := (select g.id from posthouse.gate g where g.name = 'tenant:*');
begin
  return query
    with l as materialized (
      select u.place::int as place, l.queue, l.tenant, l.kind, l.gates, l.serial, instead[u.place] as model
      from unnest(lanes) with ordinality u(id, place)
      cross join lateral (select l.queue, l.tenant, l.kind, l.gates, l.serial from posthouse.lane l where l.id = u.id offset 0) l
    ), alike as materialized (
      select distinct d.queue, d.kind, d.gates, d.model, g.id, g.member
      from (select distinct l.queue, l.kind, l.gates, l.model from l) d
      cross join lateral (
        select 'queue:' || d.queue as name
        union all select 'model:' || d.model where d.model is not null
        union all select x from unnest(d.gates) x where d.model is null or x not like 'model:%'
        union all select x from posthouse.kind k cross join lateral unnest(k.gates) x
          where k.name = d.kind and not (x like 'model:%' and (d.model is not null
            or exists (select from unnest(d.gates) y where y like 'model:%')))) n
      cross join lateral posthouse.gates_named(n.name) g
    )
    select l.place, a.id, a.member
    from l join alike a on a.queue = l.queue and a.kind = l.kind and a.gates = l.gates and a.model is not distinct from l.model
    union all
    select l.place, g.id, g.member
    from l
    left join lateral (
      select g.id, num_nonnulls(g.max_running, g.requests_per_minute, g.tokens_per_minute, g.money_per_day, g.money_per_month) as limits
      from posthouse.gate g where g.name = 'tenant:' || l.tenant offset 0) own on true
    cross join lateral (
      select own.id, '' as member where own.id is not null
      union all select each_tenant, l.tenant where each_tenant is not null and coalesce(own.limits, 0) = 0) g
    union all
    select l.place, g.id, l.tenant || chr(31) || l.serial
    from l cross join lateral (select g.id from posthouse.gate g where g.name = 'serial:' || l.queue offset 0) g
    where l.serial <> '';
end $$;

-- The gates that hold for a name: its own, the one for each where its own sets no limits, and that of the endpoint by which a
-- model is asked (where it has several: of the one that opens first while all are closed).
create or replace function posthouse.gates_named(name text) returns table (id bigint, member text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_variable
declare
  scope int := strpos(name, ':');
  own record;
  found_id bigint;
begin
  select g.id, num_nonnulls(g.max_running, g.requests_per_minute, g.tokens_per_minute, g.money_per_day, g.money_per_month) as limits into own
  from posthouse.gate g where g.name = gates_named.name;
  if own.id is not null then
    id := own.id; member := '';
    return next;
  end if;
  if scope > 0 and coalesce(own.limits, 0) = 0 then
    select g.id into found_id from posthouse.gate g where g.name = left(gates_named.name, scope) || '*';
    if found then
      id := found_id; member := substr(name, scope + 1);
      return next;
    end if;
  end if;
  if left(name, 6) = 'model:' then
    select (array_agg(g.id order by g.closed_until nulls first, e.place))[1] into found_id
    from posthouse.route r
    cross join lateral unnest(r.endpoints) with ordinality e(endpoint, place)
    left join lateral (select g.* from posthouse.gate g where g.name = 'endpoint:' || e.endpoint offset 0) g on true
    where r.model = substr(gates_named.name, 7)
    having count(*) = 1 or bool_and(coalesce(g.closed_at is not null or g.opened_at > clock_timestamp() - interval '10 seconds', false));
    if found_id is not null then
      id := found_id; member := '';
      return next;
    end if;
  end if;
end $$;

-- What an endpoint answered: ok, refused (not now; wait_ms: as it said), quota (the account is empty), or broken (it failed too
-- often). `age_ms`: since the request was sent, so that a thousand that were under way when it closed count as one. The answer is
-- for how long the endpoint is closed; null: it is open.
create or replace function posthouse.report_endpoint(endpoint text, verdict text, wait_ms bigint default null, reason text default null,
  age_ms bigint default 0) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  gate_name text := 'endpoint:' || endpoint;
  -- Null where it named no time: greatest and least pass over nulls.
  wait interval := case when wait_ms is not null then least(greatest(wait_ms, 0), 86400000) * interval '1 millisecond' end;
  g posthouse.gate;
  now_at timestamptz;
  echo boolean;                       -- sent before it closed: says nothing about now
  closer text := case verdict when 'refused' then 'provider' when 'broken' then 'breaker' else verdict end;
  before int;                         -- closings in a row for the same reason
  ends timestamptz;
begin
  perform posthouse.check_isolation();
  perform posthouse.check_gate('endpoint', gate_name);
  if (verdict in ('ok', 'refused', 'quota', 'broken')) is not true then
    raise exception using errcode = 'PH001', message = format('verdict: %s is not ok, refused, quota or broken', coalesce(quote_literal(verdict), 'null'));
  end if;
  if verdict <> 'ok' then
    insert into posthouse.gate (name) values (gate_name) on conflict do nothing;
  end if;
  select * into g from posthouse.gate x where x.name = gate_name for no key update;
  now_at := clock_timestamp();
  if g.id is null or (verdict = 'ok' and g.closed_at is null) then
    return null;
  end if;
  -- Refusals say nothing of how long an endpoint stays broken, nor failures how long one that refuses will.
  before := case when g.closed_by = closer then g.strikes else 0 end;
  echo := g.closed_at is not null and now_at - greatest(age_ms, 0) * interval '1 millisecond' < g.closed_at;
  if verdict = 'ok' and not echo and g.closed_until <= now_at then
    update posthouse.gate x set closed_until = null, closed_at = null, closed_by = null, closed_reason = null, strikes = 0,
      probe_until = null, probe_job = null, opened_at = now_at
    where x.id = g.id;
    perform posthouse.wake_endpoint(g.id);
    return null;
  elsif verdict <> 'ok' and not (g.closed_at is not null and g.closed_by in ('person', 'quota') and g.closed_until > now_at) then
    ends := case
      when verdict = 'quota' then 'infinity'
      when echo then greatest(g.closed_until, now_at + wait)
      when verdict = 'refused' then now_at + coalesce(wait, least(interval '1 second' * 2 ^ least(before, 10), interval '1 minute'))
      else now_at + least(interval '10 seconds' * 2 ^ least(before, 10), interval '5 minutes')
    end;
    if not echo or ends > g.closed_until + interval '1 second' then
      update posthouse.gate x set closed_until = ends,
        closed_at = case when echo then x.closed_at else now_at end,
        closed_by = closer, closed_reason = left(reason, 500), strikes = before + (not echo)::int, probe_until = null, probe_job = null
      where x.id = g.id;
      g.closed_until := ends;
      if verdict = 'quota' then
        perform posthouse.raise_alert('gate_quota', gate_name, format('%s is closed until somebody opens it: %s', gate_name, coalesce(reason, 'its account is empty')),
          jsonb_build_object('gate', gate_name));
      end if;
    end if;
  end if;
  return case when g.closed_until = 'infinity' then 9000000000000000
    else least(ceil(extract(epoch from greatest(g.closed_until - now_at, interval '0')) * 1000), 9000000000000000) end;
end $$;

-- The gates of endpoints that are closed, and those whose time is over but that nobody has tried since (closed_for_ms 0).
create or replace function posthouse.closures() returns table (name text, closed_for_ms bigint, reason text, closed_by text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set jit = off
as $$
#variable_conflict use_column
begin
  return query
    select substr(g.name, 10), case when g.closed_until = 'infinity' then 9000000000000000
      else least(ceil(extract(epoch from greatest(g.closed_until - clock_timestamp(), interval '0')) * 1000), 9000000000000000)::bigint end,
      g.closed_reason, g.closed_by
    from posthouse.gate g
    where g.name >= 'endpoint:' and g.name < 'endpoint;' and g.closed_at is not null
      and (g.closed_until > clock_timestamp() or g.closed_by in ('provider', 'breaker'));
end $$;

-- Whether a job tries a gate whose time is over: one that does not run any more does not.
create or replace function posthouse.is_probed(g posthouse.gate, now_at timestamptz) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
  return g.probe_until > now_at and exists (select from posthouse.job j where j.id = g.probe_job and j.state = 'running');
end $$;

-- Ask to be the one that tries an endpoint whose time is over. True: go on, it is open or this job tries it.
create or replace function posthouse.begin_probe(endpoint text, job_id bigint) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  g posthouse.gate;
begin
  perform posthouse.check_isolation();
  select * into g from posthouse.gate x where x.name = 'endpoint:' || endpoint for no key update;
  if g.closed_at is null or (g.closed_until <= clock_timestamp() and g.closed_by in ('person', 'quota')) then
    return true;
  elsif g.closed_until > clock_timestamp() or (g.probe_job is distinct from begin_probe.job_id and posthouse.is_probed(g, clock_timestamp())) then
    return false;
  end if;
  update posthouse.gate x set probe_job = begin_probe.job_id, probe_until = clock_timestamp() + interval '1 minute' where x.id = g.id;
  return true;
end $$;

-- Wake lanes that a gate keeps asleep; their rows are the caller's. Answers with their number.
create or replace function posthouse.wake_lanes(lanes bigint[]) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  woken int;
begin
  update posthouse.lane l set ready_at = least(l.ready_at, clock_timestamp()), blocked_by = null, naps = posthouse.naps(l),
    awake_until = clock_timestamp() + interval '10 seconds' * 9 ^ posthouse.naps(l)
  where l.id = any(lanes);
  get diagnostics woken = row_count;
  if woken > 0 then
    perform posthouse.notify_queue('*');
  end if;
  return woken;
end $$;

-- Wake lanes that sleep because of a gate (`member` null: whoever's), those first that have slept longest.
create or replace function posthouse.wake_blocked(gate_id bigint, member text, most int) returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  sleepers bigint[];
begin
  -- Whoever puts a lane to sleep holds this lock alone, and has looked at the gate after he had it: see posthouse.block_lanes.
  perform pg_advisory_xact_lock_shared(1346912003, (gate_id % 128)::int);
  if not exists (select from posthouse.lane l where l.blocked_by = wake_blocked.gate_id) then
    return 0;
  elsif coalesce(member, '') = '' then
    sleepers := array(
      select x.id from posthouse.lane x where x.blocked_by = wake_blocked.gate_id
      order by x.blocked_by, x.awake_until limit most for no key update skip locked);
  elsif strpos(member, chr(31)) > 0 then
    -- Jobs that run one at a time: all lanes with their value, whichever has the next one. By their names, since values may be many.
    sleepers := array(
      select x.id from posthouse.gate g
      join posthouse.lane x on x.queue = substr(g.name, 8) and x.tenant = split_part(member, chr(31), 1)
        and x.serial = substr(member, strpos(member, chr(31)) + 1)
      where g.id = wake_blocked.gate_id and x.blocked_by = wake_blocked.gate_id for no key update of x skip locked);
  elsif exists (select from posthouse.gate g where g.id = wake_blocked.gate_id and g.name = 'tenant:*') then
    -- One tenant among thousands.
    sleepers := array(
      select x.id from posthouse.lane x
      where coalesce(x.blocked_by, 0) = wake_blocked.gate_id and coalesce(x.blocked_by, 0) > 0 and x.tenant = member
      limit most for no key update skip locked);
  else
    sleepers := array(
      select x.id from posthouse.lane x
      where x.blocked_by = wake_blocked.gate_id
        and (member = x.queue or 'model:' || member = any(x.gates)
             or exists (select from posthouse.kind k where k.name = x.kind and 'model:' || member = any(k.gates)))
      order by x.blocked_by, x.awake_until limit most for no key update skip locked);
  end if;
  return posthouse.wake_lanes(sleepers);
end $$;

-- Wake the lanes that wait for a gate that was changed: those behind the one for each too, whose limits may no longer hold for this one.
create or replace function posthouse.wake_gate(name text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  scope int := strpos(name, ':');
begin
  perform posthouse.wake_endpoint(g.id) from posthouse.gate g where g.name = wake_gate.name;
  perform posthouse.wake_blocked(g.id, substr(wake_gate.name, scope + 1), 1000000)
  from posthouse.gate g where scope > 0 and g.name = left(wake_gate.name, scope) || '*' and g.name <> wake_gate.name;
end $$;

-- Wake lanes that sleep although their gate has room: since its time is over, or whatever was missed. A few of each gate at a time,
-- those that have slept longest and some others. Answers how many.
create or replace function posthouse.wake_missed() returns int
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  at_gate bigint := 0;
  members int;                        -- that were looked at
  open int;                           -- of these
  look record;
  r record;
  woken int := 0;
begin
  loop
    select l.blocked_by into at_gate from posthouse.lane l where l.blocked_by > at_gate order by l.blocked_by limit 1;
    exit when at_gate is null;
    members := 0;
    open := 0;
    for r in
      select g.gate_id, g.member, array_agg(x.id) as lane_ids
      from (
        (select x.id from posthouse.lane x where x.blocked_by = at_gate order by x.blocked_by, x.awake_until limit 32)
        union
        (select x.id from posthouse.lane x
         where x.blocked_by = at_gate and x.awake_until >= (
           select clock_timestamp() - random() * (clock_timestamp() - greatest(o.awake_until, clock_timestamp() - interval '1 day')) from posthouse.lane o
           where o.blocked_by = at_gate order by o.blocked_by, o.awake_until limit 1)
         order by x.blocked_by, x.awake_until limit 32)) x
      left join lateral (select g.gate_id, g.member from posthouse.gates_of(array[x.id]) g where g.gate_id = at_gate) g on true
      group by g.gate_id, g.member
    loop
      if r.gate_id is null then
        -- They pass it no more: what changed that went around those that somebody held.
        woken := woken + posthouse.wake_lanes(array(
          select x.id from posthouse.lane x where x.id = any(r.lane_ids) and x.blocked_by = at_gate for no key update skip locked));
        continue;
      end if;
      if strpos(r.member, chr(31)) > 0 then
        -- Whose turn it is counts, not whether there is room.
        if not exists (select from posthouse.serial_held(r.lane_ids, clock_timestamp()) h having count(*) = cardinality(r.lane_ids)) then
          woken := woken + posthouse.wake_blocked(at_gate, r.member, 1);
        end if;
        continue;
      end if;
      select * into look from posthouse.look_at_gates(array[at_gate], array[r.member], array[1], clock_timestamp());
      members := members + 1;
      if look.rooms[1] > 0 then
        open := open + 1;
        woken := woken + posthouse.wake_blocked(at_gate, r.member, greatest(64, least(look.rooms[1], 1000)));
      end if;
    end loop;
    -- Its time is over, for all.
    if open > 1 and open = members then
      woken := woken + posthouse.wake_blocked(at_gate, null, 1000);
    end if;
    -- One that is gone holds nobody back.
    if not exists (select from posthouse.gate g where g.id = at_gate) then
      woken := woken + posthouse.wake_blocked(at_gate, null, 1000);
    end if;
  end loop;
  return woken;
end $$;

-- Wake the lanes that wait for an endpoint, or for another one of the same model.
create or replace function posthouse.wake_endpoint(opened bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  opened_name text := (select g.name from posthouse.gate g where g.id = opened);
begin
  perform posthouse.wake_blocked(opened, null, 1000000);
  perform posthouse.wake_blocked(g.id, null, 1000000)
  from posthouse.gate g
  where g.id <> opened and g.name in (
    select 'endpoint:' || e from posthouse.route r cross join lateral unnest(r.endpoints) e
    where opened_name = any(array(select 'endpoint:' || x from unnest(r.endpoints) x)));
  perform posthouse.notify_queue('*');
end $$;

-- Begin to count what runs behind a gate: all that runs now, and what was let in call by call. Its claims are held off meanwhile: see
-- posthouse.hold_gates.
create or replace function posthouse.count_running(counted bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  -- Jobs are looked up one by one: a join may be planned to go through all of them.
  insert into posthouse.gate_state (gate_id, member, seq, job_ids, fences, seconds, requests, tokens, requests_at, tokens_at,
    month, day, spent_day, spent_month)
  with newest as materialized (
    select distinct on (s.member) s.* from posthouse.gate_state s where s.gate_id = counted order by s.member, s.seq desc
  ), running as materialized (
    select j.*
    from posthouse.worker w
    cross join lateral posthouse.running_jobs(w.id, w.oldest_seq) r
    cross join lateral (select j.id, j.fence, j.lane_id, j.instead from posthouse.job j where j.id = r.id offset 0) j
  ), lanes as materialized (
    select array_agg(d.lane_id) as ids, array_agg(d.instead) as insteads from (select distinct r.lane_id, r.instead from running r) d
  ), passed as materialized (
    select l.ids[g.place] as lane_id, l.insteads[g.place] as instead, g.member
    from lanes l cross join lateral posthouse.gates_of(l.ids, l.insteads) g where g.gate_id = counted and l.ids is not null
  )
  select counted, r.member, coalesce(s.seq, 0) + 1, r.job_ids, r.fences, s.seconds, s.requests, s.tokens, s.requests_at, s.tokens_at,
    s.month, s.day, s.spent_day, s.spent_month
  from (
    select u.member, array_agg(u.id order by u.id) as job_ids, array_agg(u.fence order by u.id) as fences
    from (
      select p.member, r.id, r.fence from passed p join running r on r.lane_id = p.lane_id and r.instead is not distinct from p.instead
      union
      select n.member, j.id, j.fence
      from newest n
      cross join lateral unnest(n.job_ids, n.fences) u(id, fence)
      cross join lateral (select j.id, j.fence from posthouse.job j where j.id = u.id and j.fence = u.fence and j.state = 'running' offset 0) j) u
    group by u.member) r
  left join newest s on s.member = r.member;
  -- So that they count as jobs that passed gates.
  update posthouse.job j set reserved = 0
  where j.id = any(array(select unnest(s.job_ids) from posthouse.gate_state s where s.gate_id = counted)) and j.state = 'running' and j.reserved is null;
end $$;
