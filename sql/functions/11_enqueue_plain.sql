-- Enqueue in short: what the client library does most, for which less is parsed, planned and looked at.

-- Enqueue up to 10,000 jobs that differ by their payloads and ask for nothing more; the answer is their ids, in order. They become what
-- posthouse.enqueue makes of one and posthouse.enqueue_many of several, which are called for all but the usual case, and for the first job
-- of a lane.
create or replace function posthouse.enqueue_plain(kind text, queue text, tenant text, priority int, payloads jsonb[]) returns bigint[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
#variable_conflict use_column
declare
  n int := cardinality(payloads);
  ids bigint[];
  lane_id bigint;
  first boolean;                      -- only the first job goes the general way
  housed boolean;
  behind boolean;
  long_ago timestamptz := clock_timestamp() - interval '3 seconds';     -- see posthouse.notify_lanes
  longer_ago timestamptz := long_ago - interval '7 seconds';
  alone boolean := statement_timestamp() < transaction_timestamp() + interval '20 milliseconds';
  -- `null` is another payload to `enqueue` than to `enqueue_many`; the jobs of `llm.chat` pass gates that their payloads name.
  usual boolean := n between 1 and 10000 and ('null' = any(payloads)) is false and pg_column_size(payloads) <= 33554432
    and kind <> 'llm.chat' and current_setting('transaction_isolation') = 'read committed';
begin
  if payloads is null then
    raise exception using errcode = 'PH001', message = 'payloads: must be an array of JSON values';
  end if;
  if session_user <> current_user then
    usual := usual and kind not like 'posthouse.%' and exists (select from posthouse.tenant_login x
      where x.login = session_user and (x.every_tenant or x.tenant = enqueue_plain.tenant));
  end if;
  if usual then
    -- The names of a lane were checked when it was made. Ids are taken if there is one.
    select l.id, i.ids, exists (select from posthouse.id_range r where r.upper > i.ids[n] and r.lower <= i.ids[1]),
      case when alone then (
        select true from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued' and j.run_at < long_ago
          and j.run_at >= greatest(longer_ago, coalesce(
            (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1),
            (select f.floor_at from posthouse.lane_floor f where f.lane_id = 0 order by f.seq desc limit 1)))
        order by j.lane_id desc, j.run_at desc, j.id desc limit 1) end
    into lane_id, ids, housed, behind
    from (
      select l.id
      from (
        select l.id, l.limited from posthouse.lane l
        where l.queue = enqueue_plain.queue and l.tenant = enqueue_plain.tenant and l.kind = enqueue_plain.kind and l.priority = enqueue_plain.priority
          and l.gates = '{}' and l.serial = ''
        order by l.ready_at, l.id limit 1) l
      where not l.limited and not exists (select from posthouse.queue q where q.name = enqueue_plain.queue and q.serial_by is not null)
      offset 0) l
    cross join lateral (
      select case when n = 1 then array[nextval('posthouse.job_id_seq')]
        else array(select nextval('posthouse.job_id_seq') from generate_series(1, n)) end as ids offset 0) i;
  end if;
  if lane_id is null then
    if n = 1 then
      return array(select e.id from unnest(payloads) p cross join lateral posthouse.enqueue(kind, p, queue, tenant, priority) e);
    end if;
    -- Where there is no lane at all, the first job makes it, and the others find it; but how many may wait is counted for all at once.
    first := usual and array_lower(payloads, 1) = 1 and num_nulls(kind, queue, tenant, priority) = 0 and not posthouse.is_limited(queue, tenant)
      and not exists (select from posthouse.lane l where l.queue = enqueue_plain.queue and l.tenant = enqueue_plain.tenant
        and l.kind = enqueue_plain.kind and l.priority = enqueue_plain.priority);
    ids := array(select e.id from posthouse.enqueue_many((
      select coalesce(jsonb_agg(jsonb_build_object('kind', kind, 'payload', p.payload, 'queue', queue, 'tenant', tenant, 'priority', priority)
        order by p.place), '[]')
      from unnest(case when first then payloads[:1] else payloads end) with ordinality p(payload, place))) e order by e.ordinal);
    return case when first then ids || posthouse.enqueue_plain(kind, queue, tenant, priority, payloads[2:]) else ids end;
  end if;
  if not housed then
    perform posthouse.make_partitions(ids[n]);
  end if;
  insert into posthouse.payload (id, payload) select unnest(ids), unnest(payloads);
  -- An expression of its own is cheaper than a statement. As in posthouse.enqueue: a lane that is held and awake stays so.
  while pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int) is not null loop
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, keyed)
    -- One time for all; read in the statement, so after its lock on the table, which floors go by.
    select unnest(ids), lane_id, t.now_at, t.now_at, 5, false
    from (select clock_timestamp() as now_at offset 0) t
    where exists (select from posthouse.lane l where l.id = lane_id and (l.ready_at <= clock_timestamp() or l.blocked_by is not null));
    exit when found;
    lane_id := posthouse.lane_for(queue, priority, tenant, kind, '{}', '', clock_timestamp());
    behind := false;
  end loop;
  if behind is not true and current_setting('posthouse.notify', true) is distinct from 'off' then
    perform pg_notify('posthouse_wake', queue);
  end if;
  return ids;
end $$;
