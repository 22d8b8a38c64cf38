-- Admission of single calls: for handlers that make several, or calls to models that their kind does not name.

-- Let a call of a running attempt through these gates, all or none. The answer is for how many milliseconds to wait before asking
-- again: 0: go on; null: the attempt is no longer the right one. The job that asks counts as running behind them until it ends.
create or replace function posthouse.admit(worker uuid, id bigint, fence bigint, gates text[], tokens bigint default 0) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  gate_ids bigint[];
  whose text[];
  look record;
  asked posthouse.gate;
  now_at timestamptz;
  room record;
  name text;
  inside boolean;
  probed bigint[] := '{}';            -- half-open gates: this call is the one that tries them
  begun int;
  opens timestamptz := '-infinity';
begin
  perform posthouse.check_isolation();
  gates := posthouse.check_gates(gates);
  if (tokens between 0 and 1000000000) is not true then
    raise exception using errcode = 'PH001', message = format('tokens: %s is not between 0 and 1000000000', coalesce(tokens::text, 'null'));
  end if;
  -- A model's name where a gate's is meant would count nothing.
  select n.n into name from unnest(gates) n
  where strpos(n.n, ':') = 0 and not exists (select from posthouse.gate g where g.name = n.n)
    and (exists (select from posthouse.gate g where g.name = 'model:' || n.n) or exists (select from posthouse.route r where r.model = n.n))
  limit 1;
  if found then
    raise exception using errcode = 'PH001', message = format('gates: there is no gate %s, but a model of that name', quote_literal(name)),
      hint = format('Write %s.', quote_literal('model:' || name));
  end if;
  perform pg_advisory_xact_lock_shared(1346912000, 4);
  -- The job before the gates, as settles do, so that none waits for the other.
  perform from posthouse.job j
  where j.id = admit.id and j.worker = admit.worker and j.fence = admit.fence and j.state = 'running' for no key update;
  if not found then
    return null;
  end if;
  select array_agg(x.id order by x.id, x.member), array_agg(x.member order by x.id, x.member) into gate_ids, whose
  from (select distinct g.id, g.member from unnest(gates) n(name) cross join lateral posthouse.gates_named(n.name) g) x;
  if gate_ids is null then
    return 0;
  end if;
  perform posthouse.hold_counts(gate_ids, whose, true);
  now_at := clock_timestamp();
  select * into look from posthouse.look_at_gates(gate_ids, whose, array_fill(1, array[cardinality(gate_ids)]), now_at);
  for i in 1 .. cardinality(gate_ids) loop
    asked := look.gates[i];
    if tokens > asked.tokens_per_minute then
      raise exception using errcode = 'PH001', message = format('tokens: %s is more than gate %s lets through in a minute (%s)',
        tokens, quote_literal(asked.name), asked.tokens_per_minute);
    end if;
    if asked.probe_job = admit.id then
      asked.probe_until := null;
    end if;
    -- An earlier attempt of the same job is another one, which is over.
    inside := exists (select from unnest((look.states[i]).job_ids, (look.states[i]).fences) u(id, fence) where u.id = admit.id and u.fence = admit.fence);
    room := posthouse.gate_room(asked, look.states[i], coalesce(cardinality((look.states[i]).job_ids), 0) - inside::int, now_at);
    if room.is_spent and asked.when_spent = 'fail' then
      raise exception using errcode = 'PH001', message = format('budget: that of gate %s is spent', quote_literal(asked.name));
    end if;
    if room.room <= 0 or (room.is_spent and asked.when_spent <> 'hold') then
      opens := greatest(opens, coalesce(room.until, now_at + case when room.is_spent then interval '1 hour' else interval '250 milliseconds' end));
    elsif room.is_probe then
      probed := probed || asked.id;
    end if;
  end loop;
  if opens > now_at then
    return case when opens = 'infinity' then 86400000 else least(ceil(extract(epoch from opens - now_at) * 1000), 86400000) end;
  end if;
  if probed <> '{}' then
    -- Not where somebody else began to meanwhile: who asks for the endpoint itself holds no count.
    update posthouse.gate x set probe_job = admit.id, probe_until = now_at + interval '1 minute'
    where x.id = any(probed) and (coalesce(x.probe_until, now_at) <= now_at or x.probe_job = admit.id);
    get diagnostics begun = row_count;
    if begun < cardinality(probed) then
      return 1000;
    end if;
  end if;
  insert into posthouse.gate_state
  select c.*
  from generate_subscripts(gate_ids, 1) i
  cross join lateral (
    select exists (select from unnest((look.states[i]).job_ids, (look.states[i]).fences) u(id, fence)
                   where u.id = admit.id and u.fence = admit.fence) as inside) x
  cross join lateral posthouse.counted(look.gates[i], look.states[i], case when x.inside then '{}' else array[admit.id] end,
    case when x.inside then '{}' else array[admit.fence::int] end, 1, tokens, now_at, now_at) c;
  -- So that its end wakes whoever waits for its place, and what it used is not counted twice.
  update posthouse.job j set reserved = coalesce(j.reserved, 0),
    admitted = array[coalesce(j.admitted[1], 0) + admit.tokens, coalesce(j.admitted[2], 0) + 1]
      || array(select distinct u from unnest(j.admitted[3:] || gate_ids) u)
  where j.id = admit.id;
  return 0;
end $$;

-- Say what an admitted call of an attempt used, and how long ago it was admitted: tokens, in place of those that were reserved;
-- null: unknown.
create or replace function posthouse.admitted(id bigint, fence bigint, gates text[], reserved bigint, used bigint, age_ms bigint default 0)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  gate_ids bigint[];
  whose text[];
  look record;
  now_at timestamptz;
  admitted_at timestamptz;
begin
  perform posthouse.check_isolation();
  if (used between 0 and 1000000000000) is not true or used = reserved then
    return;
  end if;
  gates := posthouse.check_gates(gates);
  perform pg_advisory_xact_lock_shared(1346912000, 4);
  update posthouse.job j set admitted[1] = greatest(j.admitted[1] + admitted.used - admitted.reserved, 0)
  where j.id = admitted.id and j.fence = admitted.fence and j.state = 'running' and j.admitted is not null;
  select array_agg(x.id order by x.id, x.member), array_agg(x.member order by x.id, x.member) into gate_ids, whose
  from (select distinct g.id, g.member
        from unnest(gates) n(name) cross join lateral posthouse.gates_named(n.name) g
        join posthouse.gate y on y.id = g.id where y.tokens_per_minute is not null) x;
  if gate_ids is null then
    return;
  end if;
  perform posthouse.hold_counts(gate_ids, whose, true);
  now_at := clock_timestamp();
  select * into look from posthouse.look_at_gates(gate_ids, whose, array_fill(0, array[cardinality(gate_ids)]), now_at);
  admitted_at := now_at - greatest(age_ms, 0) * interval '1 millisecond';
  -- In the second in which it was counted, which is known but for what messages take: one before does no harm.
  insert into posthouse.gate_state
  select c.*
  from generate_subscripts(gate_ids, 1) i
  cross join lateral (
    select to_timestamp(min(u.second)) as at from unnest((look.states[i]).seconds, (look.states[i]).tokens) u(second, tokens)
    where u.second >= floor(extract(epoch from admitted_at)) - 1 and u.tokens >= reserved) u
  cross join lateral posthouse.counted(look.gates[i], look.states[i], '{}', '{}', 0, used - reserved, coalesce(u.at, admitted_at), now_at) c;
  if used < reserved then
    perform posthouse.notify_queue('*');
  end if;
end $$;
