-- Claim: take due jobs under the worker's lease.

-- Begin a worker's life. The id is made by the worker and never used again.
create or replace function posthouse.register_worker(
  worker uuid,
  queues text[] default array['default'],
  kinds text[] default '{}',
  slots int default 1,
  lease_ms bigint default 30000,      -- 500 ms to 1 hour
  info jsonb default '{}')            -- host, pid, version: for people
returns timestamptz                   -- when the lease ends
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  ends timestamptz;
  name text;
  complaint text;
begin
  complaint := case
    when register_worker.worker is null then 'worker: must not be null; make a new random UUID'
    when (register_worker.lease_ms between 500 and 3600000) is not true then format('lease_ms: %s is not between 500 and 3600000', lease_ms)
    when coalesce(cardinality(register_worker.queues), 0) = 0 then 'queues: name at least one'
    when register_worker.kinds is null then 'kinds: must not be null'
    when array_ndims(register_worker.queues) > 1 then 'queues: must be a plain list, not a list of lists'
    when array_ndims(register_worker.kinds) > 1 then 'kinds: must be a plain list, not a list of lists'
    when register_worker.slots is null then 'slots: must not be null'
    when coalesce(info ->> 'pid', '0') !~ '^[0-9]{1,9}$' then 'info: pid is not a number'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  perform posthouse.check_origin();
  foreach name in array register_worker.queues loop
    perform posthouse.check_name('queues', name);
  end loop;
  foreach name in array register_worker.kinds loop
    perform posthouse.check_name('kinds', name);
  end loop;
  insert into posthouse.worker (id, host, pid, version, queues, kinds, slots, lease_ms, started_at, beat_at, expires_at)
  values (register_worker.worker, left(coalesce(info ->> 'host', ''), 200), coalesce((info ->> 'pid')::int, 0),
    left(coalesce(info ->> 'version', ''), 100), register_worker.queues, register_worker.kinds, register_worker.slots,
    register_worker.lease_ms, clock_timestamp(), clock_timestamp(),
    clock_timestamp() + make_interval(secs => register_worker.lease_ms / 1000.0))
  on conflict do nothing
  returning expires_at into ends;
  if ends is null then
    raise exception using errcode = 'PH001', message = format('worker: the id %s was used before', worker),
      hint = 'Every incarnation of a worker needs a new random UUID.';
  end if;
  return ends;
end $$;

-- How many jobs each of these lanes may give when its tenant gets so many (`shares`, a tenant's the same for all its lanes), in visiting order: tenants take turns
-- whatever the number of their lanes, first the one behind the tenant of the cursor. Within a tenant the oldest due jobs go
-- first, whatever their kinds.
create or replace function posthouse.lane_quotas(lanes bigint[], tenants text[], shares int[], after_lane bigint, due timestamptz)
returns table (lane_id bigint, quota int)
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
    with v as materialized (
      select u.lane_id, u.tenant, u.share, min(u.lane_id) over (partition by u.tenant) as first_lane
      from unnest(lanes, tenants, shares) u(lane_id, tenant, share)
    ), at as materialized (
      select coalesce((select v.first_lane from v where v.tenant = (select l.tenant from posthouse.lane l where l.id = after_lane) limit 1),
                      after_lane) as first_lane
    )
    select c.lane_id, count(*)::int
    from (
      select v.lane_id, v.first_lane, v.share, row_number() over (partition by v.tenant order by j.run_at, j.id) as place
      from v
      cross join lateral (
        select j.run_at, j.id from posthouse.job j
        where j.lane_id = v.lane_id and j.state = 'queued' and j.run_at <= due
          and j.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = v.lane_id order by f.seq desc limit 1) end, common.floor_at)
        order by j.lane_id, j.run_at, j.id limit v.share) j) c
    cross join at
    where c.place <= c.share
    group by c.lane_id, c.first_lane, at.first_lane
    order by c.first_lane <= at.first_lane, c.first_lane, c.lane_id;
end $$;

-- Lock up to so many due jobs of each lane, `max_jobs` in all, going around those that others hold, and make them running. The
-- answer is the jobs as they were before; null: none.
--
-- To find out by trying that a row is locked costs more than to lock it, and claims of a lane that go on at the same moment meet
-- each other's rows by the hundred. So rows on which a running transaction has set its mark (xmax) are passed over at once.
create or replace function posthouse.take_jobs(worker uuid, lanes bigint[], quotas int[], max_jobs int, due timestamptz)
returns posthouse.job[]
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set enable_sort = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  jobs posthouse.job[];
  places tid[];
begin
  select array_agg(t.j), array_agg(t.place) into jobs, places
  from (
    select j.j, j.place
    from unnest(lanes, quotas) v(lane_id, quota)
    cross join lateral (
      select j, j.ctid as place from posthouse.job j
      where j.lane_id = v.lane_id and j.state = 'queued' and j.run_at <= due
        and j.run_at >= coalesce(case when common.behind then (
          select f.floor_at from posthouse.lane_floor f where f.lane_id = v.lane_id order by f.seq desc limit 1) end, common.floor_at)
        and j.xmax <> all(array(select x::xid from pg_snapshot_xip(pg_current_snapshot()) x))
      order by j.lane_id, j.run_at, j.id limit v.quota for update of j skip locked) j
    limit max_jobs) t;
  if places is not null then
    -- Locked, they stay in their places.
    update posthouse.job j set state = 'running', fence = j.fence + 1, attempt = j.attempt + 1, worker = take_jobs.worker,
      started_at = clock_timestamp(), first_started_at = coalesce(j.first_started_at, clock_timestamp()), progress = null,
      reserved = null, instead = null, admitted = null
    where j.ctid = any(places);
  end if;
  return jobs;
end $$;

-- What a worker is told of the jobs of a claim, when it asks for them again.
create or replace function posthouse.claimed_jobs(worker uuid, ids bigint[], fences int[])
returns table (id bigint, fence bigint, attempt int, max_attempts int, kind text, queue text, tenant text, priority int,
  payload jsonb, timeout_ms bigint, lane bigint, enqueued_at timestamptz, trace jsonb, model text)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return query
    select j.id, j.fence::bigint, j.attempt, j.max_attempts, l.kind, l.queue, l.tenant, l.priority, p.payload, j.timeout_ms, j.lane_id,
      j.created_at, p.trace, j.instead
    from unnest(ids, fences) with ordinality c(id, fence, ord)
    cross join lateral (select j.* from posthouse.job j where j.id = c.id offset 0) j
    cross join lateral (select l.* from posthouse.lane l where l.id = j.lane_id offset 0) l
    cross join lateral (select p.payload, p.trace from posthouse.payload p where p.id = j.id offset 0) p
    where j.fence = c.fence and j.worker = claimed_jobs.worker and j.state = 'running'
    order by c.ord;
end $$;

-- Claim up to `max_jobs` due jobs of the worker's queues and kinds. `seq` numbers the worker's claims from 1: the same seq
-- again answers with the same jobs, for when an answer got lost, until the mark of a heartbeat passes it (PH001).
-- `after_lane` is the lane of the last job claimed before, so that tenants take turns. Jobs of a smaller priority number go
-- first; every tenth claim serves the lane with the oldest due job first, whatever its priority, so that nothing starves. `model`: the
-- one to use in place of the job's own, whose budget is spent; null: its own.
create or replace function posthouse.claim(worker uuid, seq bigint, max_jobs int, after_lane bigint default 0)
returns table (id bigint, fence bigint, attempt int, max_attempts int, kind text, queue text, tenant text, priority int,
  payload jsonb, timeout_ms bigint, lane bigint, enqueued_at timestamptz, trace jsonb, model text)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off                         -- a cost estimate gone wrong must not compile for 200 ms
as $$
#variable_conflict use_column
declare
  w posthouse.worker;
  due timestamptz := clock_timestamp();
  took record;
  jobs posthouse.job[] := '{}';
  empty bigint[] := '{}';
  idle bigint[] := '{}';              -- of these, those whose time awake is over
  part int;
  level bigint := -3000000000;  -- below every int
  oldest bigint;
  gated boolean;                      -- there are gates at all
  waits text;
  wait boolean := true;               -- for gates that other claims hold: once, since they do so in one order
  blocked bigint[] := '{}';           -- lanes that a gate holds back, and which, of whom, until when
  blockers bigint[] := '{}';
  members text[] := '{}';
  untils timestamptz[] := '{}';
  gave bigint[] := '{}';              -- lanes that the jobs are of, each as often as it was asked
  sole bigint[];                      -- the lane, where there is but one that may have work,
  awake_until timestamptz;            -- and until when it is awake
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    perform posthouse.check_isolation();
  end if;
  if (claim.max_jobs between 1 and 10000) is not true then
    raise exception using errcode = 'PH001', message = format('max_jobs: %s is not between 1 and 10000', max_jobs);
  elsif (claim.seq > 0) is not true then
    raise exception using errcode = 'PH001', message = format('seq: %s is not a number from 1', seq);
  end if;
  -- A caller who goes to sleep with the jobs locked would hold everybody up. (To assign something is cheaper than a statement.)
  waits := set_config('idle_in_transaction_session_timeout', '10s', true);
  select * into w from posthouse.worker x where x.id = claim.worker for share;
  if not found or w.dead_at is not null or (w.expires_at <= clock_timestamp() and posthouse.lease_end(w) <= clock_timestamp()) then
    raise exception using errcode = 'PH005', message = format('worker %s is over: %s', claim.worker,
      case when w.id is null then 'it was never registered' when w.dead_at is not null then 'it was declared dead' else 'its lease has run out' end),
      hint = 'Abort its handlers and register anew with a new id.';
  end if;
  if claim.seq <= w.mark_seq then
    raise exception using errcode = 'PH001', message = format('seq: a heartbeat said that claim %s was answered or given up', seq),
      hint = 'Go on with the next number.';
  end if;
  if exists (select from posthouse.claimed c where c.worker = claim.worker and c.seq = claim.seq) then
    return query select j.* from posthouse.claimed c
      cross join lateral posthouse.claimed_jobs(c.worker, c.job_ids, c.fences) j
      where c.worker = claim.worker and c.seq = claim.seq;
    return;
  end if;
  -- Who changes gates waits for this claim, and this one for him.
  gated := pg_advisory_xact_lock_shared(1346912000, 4) is not null;
  gated := exists (select from posthouse.gate);
  if not gated then
    -- Most often there is one lane, which is not about to go to sleep: then there is nothing to choose from.
    with r as materialized (
      select l.id
      from unnest(w.queues) q(name)
      cross join lateral (
        select l.id from posthouse.lane l
        where l.queue = q.name and l.ready_at < 'infinity' and l.ready_at <= due and l.kind = any(w.kinds)
        order by l.queue, l.priority, l.id limit 2) l
      limit 2
    )
    select array_agg(r.id), min((select greatest(l.awake_until, l.in_use_until) from posthouse.lane l where l.id = r.id))
    into sole, awake_until from r;
    if sole is null then
      return;
    elsif cardinality(sole) > 1 or awake_until <= due + interval '5 seconds' then
      sole := null;
    end if;
  end if;
  if sole is not null then
    jobs := coalesce(posthouse.take_jobs(claim.worker, sole, array[max_jobs], max_jobs, due), '{}');
    gave := case when cardinality(jobs) > 0 then sole else '{}' end;
  elsif claim.seq % 10 = 0 then
    oldest := posthouse.oldest_lane(w.queues, w.kinds, due);
    if oldest is not null and gated then
      select * into took from posthouse.take_gated(claim.worker, array[oldest], array[greatest(1, max_jobs / 10)], max_jobs, due, wait);
      jobs := jobs || took.jobs;
      wait := not took.held;
    elsif oldest is not null then
      jobs := jobs || posthouse.take_jobs(claim.worker, array[oldest], array[greatest(1, max_jobs / 10)], max_jobs, due);
    end if;
    if cardinality(jobs) > 0 then
      gave := array[oldest];
    end if;
  end if;
  while sole is null and cardinality(jobs) < max_jobs loop
    level := posthouse.next_priority(w.queues, w.kinds, level, due);
    exit when level is null;
    select * into took from posthouse.claim_level(claim.worker, w.queues, w.kinds, level::int, max_jobs - cardinality(jobs), after_lane, due, gated, wait);
    jobs := jobs || took.jobs;
    gave := gave || took.gave;
    empty := empty || took.empty;
    idle := idle || took.idle;
    if gated then
      wait := wait and not took.held;
      blocked := blocked || took.blocked;
      blockers := blockers || took.blockers;
      members := members || took.members;
      untils := untils || took.untils;
    end if;
  end loop;
  if cardinality(jobs) > 0 then
    insert into posthouse.claimed (worker, seq, claimed_at, job_ids, fences)
    select claim.worker, claim.seq, clock_timestamp(), array_agg(j.id), array_agg(j.fence + 1) from unnest(jobs) j
    on conflict do nothing;
    if not found then
      raise exception using errcode = '40001', message = format('seq: claim %s was under way in another session', seq),
        hint = 'Ask again: the answer is what that session claimed.';
    end if;
  end if;
  if gated and empty <> '{}' then
    perform posthouse.pass_on(empty[:64]);
  end if;
  if blocked <> '{}' then
    perform posthouse.block_lanes(blocked, blockers, members, untils);
  end if;
  if idle <> '{}' then
    -- Others at every claim where there are more.
    part := ((claim.seq % cardinality(idle)) * 64) % cardinality(idle);
    perform posthouse.rest_lane(l) from unnest(idle[part + 1:part + 64]) l;
  end if;
  if gave = '{}' then
    return;
  elsif gave[1] = all(gave) then
    -- Looked up once: to do so for each job is a tenth of a large claim.
    return query
      with home as materialized (select l.* from posthouse.lane l where l.id = gave[1])
      select j.id, j.fence + 1::bigint, j.attempt + 1, j.max_attempts, home.kind, home.queue, home.tenant, home.priority, p.payload, j.timeout_ms,
        j.lane_id, j.created_at, p.trace, j.instead
      from home
      cross join unnest(jobs) j
      cross join lateral (select p.payload, p.trace from posthouse.payload p where p.id = j.id offset 0) p;
    return;
  end if;
  return query
    select j.id, j.fence + 1::bigint, j.attempt + 1, j.max_attempts, l.kind, l.queue, l.tenant, l.priority, p.payload, j.timeout_ms,
      j.lane_id, j.created_at, p.trace, j.instead
    from unnest(jobs) j
    cross join lateral (select l.* from posthouse.lane l where l.id = j.lane_id offset 0) l
    cross join lateral (select p.payload, p.trace from posthouse.payload p where p.id = j.id offset 0) p;
end $$;

-- The next larger priority with a lane that may have work.
create or replace function posthouse.next_priority(queues text[], kinds text[], above bigint, due timestamptz) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
begin
  return (
    select min(l.priority)
    from unnest(queues) q(name)
    cross join lateral (
      select l.priority from posthouse.lane l
      where l.queue = q.name and l.priority > above and l.ready_at < 'infinity' and l.ready_at <= due and l.kind = any(kinds)
      order by l.queue, l.priority, l.id limit 1) l);
end $$;

-- The lane whose oldest due job has waited longest, among 256 ready lanes of each queue: others at every call where there
-- are more, so that each has its turn however many there are.
create or replace function posthouse.oldest_lane(queues text[], kinds text[], due timestamptz) returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  common posthouse.lane_floor := posthouse.common_floor();
  serial boolean := exists (select from posthouse.gate g where g.name >= 'serial:' and g.name < 'serial;');
begin
  return (
    with r as materialized (
      select l.id, j.run_at
      from unnest(queues) q(name)
      cross join lateral (
        select l.id from posthouse.lane l
        where l.queue = q.name and l.ready_at < 'infinity' and l.ready_at <= due and l.kind = any(kinds)
        order by hashint8extended(l.id, (extract(epoch from due) * 1000)::bigint) limit 256) l
      cross join lateral (
        select j.run_at from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued' and j.run_at <= due
          and j.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at)
        order by j.lane_id, j.run_at, j.id limit 1) j
    )
    -- One whose jobs wait for another of their own has waited for long, and says nothing.
    select r.id from r
    where not serial or not exists (select from posthouse.serial_held(array(select x.id from r x), due) h where h.lane_id = r.id)
    order by r.run_at limit 1);
end $$;

-- Its answer has grown, and Postgres replaces no function by one that answers otherwise.
drop function if exists posthouse.claim_level(uuid, text[], text[], int, int, bigint, timestamptz, boolean, boolean);

-- Claim from one priority: tenants take turns, each with the same share or the one that is set; what some leave goes to the others.
create or replace function posthouse.claim_level(worker uuid, queues text[], kinds text[], priority int, max_jobs int,
  after_lane bigint, due timestamptz, gated boolean, wait boolean, out jobs posthouse.job[], out gave bigint[], out empty bigint[], out idle bigint[], out blocked bigint[],
  out blockers bigint[], out members text[], out untils timestamptz[], out held boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  lanes bigint[];
  tenants text[];
  quotas int[];
  share int;
  heads int;                          -- different tenants
  turn int;
  behind bigint := after_lane;        -- tenants take turns from behind that of this lane
  edge bigint;                        -- the last lane of the window
  ready int;                          -- lanes of the window
  serial boolean := false;            -- some queue runs what jobs share one at a time
  waiting record;                     -- lanes whose turn it is not
  weighted boolean := exists (select from posthouse.share s where s.queue = any(queues));
  shares int[];
  later boolean[];                    -- lanes that are served after the others; null: none
  given bigint[];                     -- those of the window that gave
  narrowed boolean;                   -- some lanes wait, since older ones had the share of their tenant
  took posthouse.job[];
  passed record;
  held_back boolean := false;         -- a gate held some lane back
  wide boolean;                       -- all lanes of a tenant are offered, whichever is the oldest
  visited bigint[];
  visitors text[];                    -- their tenants
  over bigint[];                      -- those of them whose time awake is over,
  ending bigint[];                    -- or ends about now
  found_empty bigint[];
  after_lanes bigint[] := array[after_lane, 0];
  upto_lanes bigint[] := array[9223372036854775807, after_lane];
  part bigint;
begin
  jobs := '{}';
  gave := '{}';
  empty := '{}';
  idle := '{}';
  held := false;
  blocked := '{}'; blockers := '{}'; members := '{}'; untils := '{}';
  if gated then
    serial := exists (select from posthouse.gate g where g.name >= 'serial:' and g.name < 'serial;');
  end if;
  loop
    -- A window of at most 256 ready lanes: those behind the cursor, then those from the start up to the cursor.
    select array_agg(r.id), array_agg(r.tenant), max(r.part), array_agg(r.id) filter (where r.awake_until < due),
      array_agg(r.id) filter (where r.awake_until between due - interval '5 seconds' and due + interval '5 seconds')
    into lanes, tenants, part, over, ending
    from (
      select l.id, l.tenant, b.part, l.awake_until
      from unnest(queues) q(name)
      cross join unnest(after_lanes, upto_lanes) with ordinality b(after_lane, upto_lane, part)
      cross join lateral (
        select l.id, l.tenant, greatest(l.awake_until, l.in_use_until) as awake_until from posthouse.lane l
        where l.queue = q.name and l.priority = claim_level.priority and l.id > b.after_lane and l.id <= b.upto_lane
          and l.ready_at < 'infinity' and l.ready_at <= due and l.kind = any(kinds)
        order by l.queue, l.priority, l.id limit 256) l
      order by b.part, l.id limit 256) r;
    exit when lanes is null;
    edge := lanes[256];
    ready := cardinality(lanes);
    if serial then
      -- Those whose turn it is not are left out, all at once.
      select coalesce(array_agg(h.lane_id), '{}') as lanes, array_agg(h.gate_id) as gates, array_agg(h.member) as members, array_agg(h.until) as untils
      into waiting from posthouse.serial_held(lanes, due) h;
      if waiting.lanes <> '{}' then
        blocked := blocked || waiting.lanes;
        blockers := blockers || waiting.gates;
        members := members || waiting.members;
        untils := untils || waiting.untils;
        select array_agg(v.lane_id order by v.place), array_agg(v.tenant order by v.place) into lanes, tenants
        from unnest(lanes, tenants) with ordinality v(lane_id, tenant, place)
        where not exists (select from unnest(waiting.lanes) w where w = v.lane_id);
      end if;
    end if;
    visited := lanes;
    visitors := tenants;
    given := '{}';
    wide := false;
    loop
      exit when lanes is null;
      share := max_jobs - cardinality(jobs);
      narrowed := false;
      if cardinality(lanes) = 1 then
        quotas := array[share];
      else
        heads := (select count(distinct t collate "C") from unnest(tenants) t);
        if weighted then
          select array_agg(x.lane_id order by x.later, x.place), array_agg(x.tenant order by x.later, x.place),
            array_agg(x.quota order by x.later, x.place), array_agg(x.later order by x.later, x.place), min(x.quota)
          into lanes, tenants, shares, later, share
          from posthouse.weigh_lanes(queues, lanes, tenants, share) x;
        else
          if share > heads and share % heads > 0 then
            -- What is over after a round goes to those that come first: not to the same ones each time.
            turn := floor(random() * cardinality(lanes));
            lanes := lanes[turn + 1:] || lanes[:turn];
            tenants := tenants[turn + 1:] || tenants[:turn];
            behind := lanes[cardinality(lanes)];
          end if;
          share := ceil(share::numeric / heads);
          shares := array_fill(share, array[cardinality(lanes)]);
          later := null;
        end if;
        quotas := shares;
        if cardinality(lanes) > heads and not wide then
          if later is null then
            select array_agg(q.lane_id), array_agg(q.quota) into lanes, quotas from posthouse.lane_quotas(lanes, tenants, shares, behind, due) q;
          else
            select array_agg(q.lane_id order by l.later, q.place), array_agg(q.quota order by l.later, q.place) into lanes, quotas
            from posthouse.lane_quotas(lanes, tenants, shares, behind, due) with ordinality q(lane_id, quota, place)
            join unnest(lanes, later) l(lane_id, later) on l.lane_id = q.lane_id;
          end if;
          narrowed := true;
        end if;
      end if;
      exit when lanes is null;
      if gated then
        select * into passed from posthouse.take_gated(worker, lanes, quotas, max_jobs - cardinality(jobs), due, wait and not held);
        took := passed.jobs;
        held_back := passed.blocked <> '{}';
        held := held or passed.held;
        blocked := blocked || passed.blocked;
        blockers := blockers || passed.blockers;
        members := members || passed.members;
        untils := untils || passed.untils;
      else
        took := posthouse.take_jobs(worker, lanes, quotas, max_jobs - cardinality(jobs), due);
      end if;
      exit when took is null and not (narrowed and held_back);
      -- The oldest ones are held back: with a few more at a time it would take as many rounds as there are lanes.
      wide := took is null;
      if took is not null then
        jobs := jobs || took;
        given := given || case when cardinality(lanes) = 1 then lanes else array(select distinct j.lane_id from unnest(took) j order by 1) end;
      end if;
      exit when cardinality(jobs) >= max_jobs or (cardinality(took) < share and not held_back);
      -- Those that gave their whole share may have more, or the lanes that waited behind them, or behind one that a gate holds back.
      if narrowed then
        select array_agg(v.lane_id order by v.place), array_agg(v.tenant order by v.place) into lanes, tenants
        from unnest(visited, visitors) with ordinality v(lane_id, tenant, place)
        where not exists (select from unnest(blocked) b where b = v.lane_id);
        continue;
      end if;
      select array_agg(g.lane_id order by v.ord), array_agg(l.tenant order by v.ord) into lanes, tenants
      from (select j.lane_id, count(*) as jobs from unnest(took) j group by j.lane_id) g
      join unnest(lanes, quotas) with ordinality v(lane_id, quota, ord) on v.lane_id = g.lane_id and v.quota = g.jobs
      join posthouse.lane l on l.id = g.lane_id;
    end loop;
    found_empty := '{}';
    if given = '{}' and blocked = '{}' then
      found_empty := visited;
    elsif given = '{}' or (cardinality(visited) > 1 and not (cardinality(jobs) >= max_jobs and given = visited[:cardinality(given)])) then
      -- Nobody looked into those behind the last one that gave, where it filled the claim; often that is all.
      found_empty := array(
        select v.lane_id
        from (select u.lane_id, u.place, g.lane_id is not null as gave, max(u.place) filter (where g.lane_id is not null) over () as last
              from unnest(visited) with ordinality u(lane_id, place)
              left join (select distinct x from unnest(given || blocked) x) g(lane_id) on g.lane_id = u.lane_id) v
        where not v.gave and (cardinality(jobs) < max_jobs or v.place < v.last));
    end if;
    gave := gave || given;
    empty := empty || found_empty;
    if over is not null and found_empty <> '{}' then
      idle := idle || array(select o from unnest(over) o where o = any(found_empty));
    end if;
    if ending is not null and given && ending then
      perform posthouse.keep_awake(array(select e from unnest(ending) e where e = any(given)));
    end if;
    exit when cardinality(jobs) >= max_jobs or ready < 256;
    if part = 1 then
      after_lanes[1] := edge;
    else
      after_lanes := array[edge];
      upto_lanes := array[after_lane];
    end if;
  end loop;
end $$;

-- How many jobs each of these lanes may give where tenants' shares differ. Shares are seldom whole numbers: tenants stand on a line as
-- long as the batch, each as long as its share of it, and get as many as there are marks on it, which are one job apart from a random
-- point on. So it is right in the mean, also for batches of one. Who gets none is served `later`, if others leave something.
create or replace function posthouse.weigh_lanes(queues text[], lanes bigint[], tenants text[], max_jobs int)
returns table (place bigint, lane_id bigint, tenant text, quota int, later boolean)
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
  first_mark float8 := random();
begin
  return query
    with v as materialized (
      select u.place, u.lane_id, u.tenant, s.share
      from unnest(lanes, tenants) with ordinality u(lane_id, tenant, place)
      cross join lateral (
        select coalesce(max(s.share), 1)::float8 as share from posthouse.share s where s.queue = any(queues) and s.tenant = u.tenant) s
    ), t as materialized (
      select d.tenant, (floor(sum(d.share) over w / sum(d.share) over () * max_jobs + first_mark)
        - floor((sum(d.share) over w - d.share) / sum(d.share) over () * max_jobs + first_mark))::int as marks
      from (select v.tenant, v.share, min(v.place) as place from v group by v.tenant, v.share) d
      window w as (order by d.place)
    )
    select v.place, v.lane_id, v.tenant, greatest(t.marks, 1), t.marks = 0
    from v join t on t.tenant = v.tenant;
end $$;

-- Let lanes stay awake that are in use although their time awake ends about now. The column is in no index, so that no dead index
-- entry is left.
create or replace function posthouse.keep_awake(lanes bigint[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  update posthouse.lane l set naps = posthouse.naps(l), in_use_until = clock_timestamp() + interval '10 seconds' * 9 ^ posthouse.naps(l)
  where l.id = any(array(
    select x.id from posthouse.lane x
    where x.id = any(lanes) and greatest(x.awake_until, x.in_use_until) < clock_timestamp() + interval '5 seconds'
    order by x.id for no key update skip locked));
end $$;

-- Put a lane to sleep if it has been empty for a while: until its next job is due, or for good. Never while an enqueue into
-- it is under way.
create or replace function posthouse.rest_lane(lane_id bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  common posthouse.lane_floor;
  next_at timestamptz;
begin
  if not exists (select from posthouse.lane l where l.id = lane_id and greatest(l.awake_until, l.in_use_until) < clock_timestamp())
     or not pg_try_advisory_xact_lock(1346912001, (lane_id % 128)::int) then
    return;
  end if;
  -- New statements, so that they see what was enqueued before the lock was ours.
  common := posthouse.common_floor();
  select j.run_at into next_at from posthouse.job j
  where j.lane_id = rest_lane.lane_id and j.state = 'queued'
    and j.run_at >= coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = rest_lane.lane_id order by f.seq desc limit 1) end, common.floor_at)
  order by j.lane_id, j.run_at, j.id limit 1;
  if next_at is null or next_at > clock_timestamp() then
    update posthouse.lane l set ready_at = coalesce(next_at, 'infinity'), blocked_by = null
    where l.id = (select x.id from posthouse.lane x where x.id = lane_id for no key update skip locked);
  end if;
end $$;

-- In how many milliseconds a claim of this worker may find something: 0 at once, -1 when a job ends that holds a gate, null if
-- nothing is known.
create or replace function posthouse.next_due(worker uuid) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  gated boolean := exists (select from posthouse.gate);
  first_at timestamptz;
  held boolean;
begin
  -- Gates of the first 64 lanes with due jobs are looked at; what is behind them may find something at once.
  with d as materialized (
    select l.id as lane_id, greatest(l.ready_at, j.run_at) as due_at
    from posthouse.worker w
    cross join lateral unnest(w.queues) q(name)
    cross join lateral (
      select l.id, l.ready_at from posthouse.lane l
      where l.queue = q.name and l.ready_at < 'infinity' and l.kind = any(w.kinds)
      order by l.queue, l.priority, l.id limit 1000) l
    cross join lateral (
      select j.run_at from posthouse.job j
      where j.lane_id = l.id and j.state = 'queued'
        and j.run_at >= coalesce(case when common.behind then (
          select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at)
      order by j.lane_id, j.run_at, j.id limit 1) j
    where w.id = next_due.worker
  ), h as materialized (
    select h.lane_id, coalesce(h.until, 'infinity') as until
    from posthouse.serial_held(case when gated then array(select d.lane_id from d where d.due_at <= clock_timestamp()) else '{}' end, clock_timestamp()) h
  ), x as materialized (
    select d.lane_id, greatest(d.due_at, h.until) as due_at, row_number() over (order by h.lane_id is not null, d.due_at) as place
    from d left join h on h.lane_id = d.lane_id
  )
  select min(x.due_at) filter (where x.due_at < 'infinity'), coalesce(bool_or(x.due_at = 'infinity'), false) into first_at, held
  from (
    select case when gated and x.due_at <= clock_timestamp() and x.place <= 64 then greatest(x.due_at, posthouse.gates_open_at(x.lane_id))
      else x.due_at end as due_at
    from x) x;
  -- Not greatest(): that would make 0 of null.
  return case
    when first_at <= clock_timestamp() then 0
    when held and coalesce(first_at, 'infinity') > clock_timestamp() + interval '1 second' then -1
    else ceil(extract(epoch from first_at - clock_timestamp()) * 1000) end;
end $$;

-- Whether nothing is due, later or running in the worker's queues and kinds.
create or replace function posthouse.is_empty(worker uuid) returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select not exists (
    select from posthouse.worker w
    join posthouse.lane l on l.queue = any(w.queues) and l.kind = any(w.kinds)
    join posthouse.job j on j.lane_id = l.id
    where w.id = is_empty.worker and j.state in ('queued', 'running'))
$$;
