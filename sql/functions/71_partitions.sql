-- Partitions of payload and archive: made ahead of need or on the spot, and dropped when everything in them has expired.
--
-- Dropping is two transactions: detach, which needs both parents for a moment alone, and drop. Nobody ever waits behind the
-- detach for longer than 50 ms: it looks first whether somebody holds the parents for longer than that, and if so does not even
-- queue up.

-- The partition of a table for exactly these ids; null: there is none.
create or replace function posthouse.partition_of(parent regclass, lower bigint, upper bigint) returns regclass
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select c.oid::regclass from pg_inherits i join pg_class c on c.oid = i.inhrelid
  where i.inhparent = parent and not i.inhdetachpending
    and pg_get_expr(c.relpartbound, c.oid) = format('FOR VALUES FROM (''%s'') TO (''%s'')', lower, upper)
$$;

-- Make those partitions of a range that are missing.
create or replace function posthouse.make_range(lower bigint, upper bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  parent text;
  part text;
  field text;
  n int;
begin
  foreach parent in array array['payload', 'archive'] loop
    continue when posthouse.partition_of(('posthouse.' || parent)::regclass, lower, upper) is not null;
    part := parent || '_' || lower;
    n := 1;
    -- Somebody may have detached one by hand, and keeps it.
    while to_regclass('posthouse.' || part) is not null loop
      n := n + 1;
      part := parent || '_' || lower || '_' || n;
    end loop;
    execute format('create table posthouse.%I (like posthouse.%I including all)', part, parent);
    for field in select a.attname from pg_attribute a
      where a.attrelid = ('posthouse.' || parent)::regclass and a.attnum > 0 and a.attstattarget = 0
    loop
      execute format('alter table posthouse.%I alter column %I set statistics 0', part, field);
    end loop;
    -- Attaching locks the parent far less than making a partition of it would.
    execute format('alter table posthouse.%I add constraint id_range check (id >= %s and id < %s)', part, lower, upper);
    execute format('alter table posthouse.%I attach partition posthouse.%I for values from (%s) to (%s)', parent, part, lower, upper);
    execute format('alter table posthouse.%I drop constraint id_range', part);
    if posthouse.is_isolated() then
      execute format('alter table posthouse.%I enable row level security', part);
    end if;
  end loop;
end $$;

-- Make partitions of payload and archive until there is one for `last_id`, and for all ids between it and the newest one.
--
-- Their number stays small, whatever the ids: a range is a million ids wide, or an eighth of all that there are ranges for. An
-- old id whose range is gone gets one by itself, a 64th of all ids wide.
create or replace function posthouse.make_partitions(last_id bigint) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  top bigint;                         -- the end of the newest range
  width bigint;
  lo bigint;
  hi bigint;
begin
  perform pg_advisory_xact_lock(1346912000, 1);
  loop
    exit when exists (select from posthouse.id_range r where r.lower <= last_id and r.upper > last_id);
    select coalesce(max(r.upper), 0), greatest(1000000, (coalesce(sum(r.upper - r.lower), 0) / 8)::bigint / 1000000 * 1000000)
    into top, width from posthouse.id_range r;
    if last_id >= top then
      lo := top;
      -- Somebody may have set the sequence far ahead: do not fill the gap with partitions.
      if last_id - lo > 64 * width then
        lo := (last_id / 1000000 - 1) * 1000000;
      end if;
      hi := lo + greatest(width, case when lo > top then 2000000 else 0 end);
    else
      width := greatest(1000000, (top / 64 + 999999) / 1000000 * 1000000);
      select greatest(last_id / width * width, max(r.upper)) into lo from posthouse.id_range r where r.upper <= last_id;
      select least(last_id / width * width + width, min(r.lower)) into hi from posthouse.id_range r where r.lower > last_id;
    end if;
    begin
      perform posthouse.make_range(lo, hi);
    exception when duplicate_table or invalid_object_definition then
      -- The snapshot of this transaction is older than the partitions that others have made: they are there all the same.
      return;
    end;
    insert into posthouse.id_range (lower, upper, sliced_to) values (lo, hi, lo);
  end loop;
end $$;

-- Make what partitions these ids lack.
create or replace function posthouse.house(ids bigint[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  first_id bigint;
  last_id bigint;
  homeless bigint;
begin
  -- The usual case of several: all lie between ranges that follow one another.
  select min(u.id), max(u.id) into first_id, last_id from unnest(ids) u(id);
  if (select min(r.lower) <= first_id and max(r.upper) > last_id and sum(r.upper - r.lower) = max(r.upper) - min(r.lower)
      from posthouse.id_range r where r.upper > first_id and r.lower <= last_id) then
    return;
  end if;
  for homeless in
    select u.id from unnest(ids) u(id) where not exists (select from posthouse.id_range r where r.upper > u.id and r.lower <= u.id)
  loop
    perform posthouse.make_partitions(homeless);
  end loop;
end $$;

-- Ready the place of a job that comes back into line: its partition and its payload. Whoever calls this puts the job into line in
-- the same transaction, which holds off a drop of the partition; later the job itself does. False: its payload is gone.
create or replace function posthouse.bring_home(job_id bigint) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  lock table posthouse.payload, posthouse.archive in row exclusive mode;
  perform posthouse.house(array[job_id]);
  with spare as (delete from posthouse.spare_payload s where s.id = job_id returning s.*)
  insert into posthouse.payload (id, payload, trace) select s.id, s.payload, s.trace from spare s on conflict do nothing;
  -- Also where it is noted from before: held until the end of this transaction, so that no survey takes it away and then sees no job yet.
  insert into posthouse.revived (id) values (job_id) on conflict (id) do update set id = excluded.id;
  return exists (select from posthouse.payload p where p.id = job_id);
end $$;

-- Make the partitions of the next million ids, well ahead of need, so that no enqueue has to, and those that somebody took away
-- by hand; not waiting for an open enqueue that makes one all the same.
create or replace function posthouse.partitions_ahead() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  last_id bigint;
begin
  if pg_try_advisory_xact_lock(1346912000, 1) then
    select s.last_value into last_id from posthouse.job_id_seq s;
    perform posthouse.make_partitions(last_id), posthouse.make_partitions(last_id + 1000000);
    perform posthouse.make_range(r.lower, r.upper) from posthouse.id_range r
    where posthouse.partition_of('posthouse.payload', r.lower, r.upper) is null
      or posthouse.partition_of('posthouse.archive', r.lower, r.upper) is null;
  end if;
end $$;

-- Whether all in a range of ids has expired, as far as its slices know. `perhaps`: or may have, since nothing is known of some of them.
create or replace function posthouse.is_over(r posthouse.id_range, perhaps boolean default false) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
  -- The youngest is asked first: where any is not over, that one is not.
  return r.sliced_to >= r.upper and (
    select s.lower from posthouse.slice s
    where s.lower >= r.lower and s.lower < r.upper
      and (case when s.stale then not perhaps else s.over_at > clock_timestamp() end or s.takers is null)
    order by s.lower desc limit 1) is null;
end $$;

-- Who holds a lock on one of these tables, by virtual transactions: everybody may see those, whoever they are.
create or replace function posthouse.holders(tables regclass[]) returns text[]
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select array(
    select distinct k.virtualtransaction from pg_locks k
    where k.locktype = 'relation' and k.database = (select d.oid from pg_database d where d.datname = current_database())
      and k.relation = any(tables::oid[]) and k.pid is distinct from pg_backend_pid())
$$;

-- Put aside the payloads of dead letters in a range whose partitions are to be dropped, some at a time. False: none was left.
create or replace function posthouse.spare_payloads(lower bigint, upper bigint, max_jobs int default 1000) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_custom_plan
as $$
begin
  with spared as (
    -- Locked, so that nobody redrives one meanwhile and ends it with another payload.
    insert into posthouse.spare_payload (id, payload, trace)
    select p.id, p.payload, p.trace
    from posthouse.dead_letter d
    cross join lateral (
      select x.* from posthouse.payload x
      where x.id = d.id and x.id >= spare_payloads.lower and x.id < spare_payloads.upper offset 0) p
    where d.id >= spare_payloads.lower and d.id < spare_payloads.upper
      and not exists (select from posthouse.spare_payload s where s.id = d.id)
    order by d.id limit max_jobs for update of d skip locked
    on conflict do nothing
    returning id
  )
  -- Touched, so that whoever redrives one by an older snapshot hears 40001: he would not see what was put aside, and it would come
  -- back in place of a payload that he changes.
  update posthouse.dead_letter d set attempt = d.attempt where d.id = any(array(select s.id from spared s));
  return found;
end $$;

-- Detach the partitions of a range where all has expired, if nobody has held their parents for a moment. False: somebody holds the
-- partitions, or something in it came back to life.
create or replace function posthouse.detach_range(r posthouse.id_range) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
-- For each parent, and nobody else is held up for longer than both together and the work of a few milliseconds.
set lock_timeout = '20ms'
as $$
declare
  payloads regclass := posthouse.partition_of('posthouse.payload', r.lower, r.upper);
  archived regclass := posthouse.partition_of('posthouse.archive', r.lower, r.upper);
begin
  -- Nobody changes what is kept, or what is known of slices, until this ends.
  if payloads is null or archived is null or not pg_try_advisory_xact_lock(1346912000, 6)
     or not exists (select from posthouse.id_range x where x.lower = r.lower and posthouse.is_over(x)) then
    return false;
  end if;
  -- What may take long comes before the locks. Later than this a job can only come back by posthouse.bring_home, which notes it.
  if exists (select from posthouse.job j where j.id >= r.lower and j.id < r.upper)
     or exists (select from posthouse.tombstone t where t.id >= r.lower and t.id < r.upper) then
    return false;
  elsif exists (select from posthouse.dead_letter d
                where d.id >= r.lower and d.id < r.upper and not exists (select from posthouse.spare_payload s where s.id = d.id)
                  and exists (select from posthouse.payload p where p.id = d.id and p.id >= r.lower and p.id < r.upper)) then
    -- It failed since.
    update posthouse.id_range x set spared = false where x.lower = r.lower;
    return false;
  end if;
  if not pg_try_advisory_xact_lock(1346912000, 1) then
    return false;
  end if;
  begin
    lock table only posthouse.payload in access exclusive mode;
    lock table only posthouse.archive in access exclusive mode;
    execute format('lock table only %s, %s in access exclusive mode nowait', payloads, archived);
    if exists (select from posthouse.revived v where v.id >= r.lower and v.id < r.upper) then
      raise exception using errcode = 'lock_not_available';
    end if;
    execute format('alter table posthouse.payload detach partition %s', payloads);
    execute format('alter table posthouse.archive detach partition %s', archived);
    insert into posthouse.detached (name, lower, upper)
    select c.relname, r.lower, r.upper from pg_class c where c.oid in (payloads, archived);
    delete from posthouse.id_range x where x.lower = r.lower;
    return true;
  exception when lock_not_available then
    return false;
  end;
end $$;

-- Drop the partitions of one range that are detached, going around those that somebody still reads. False: nothing could be dropped.
create or replace function posthouse.drop_detached() returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set lock_timeout = '50ms'
as $$
declare
  d posthouse.detached;
  of_range bigint;                    -- that was dropped
begin
  if not pg_try_advisory_xact_lock(1346912000, 6) then
    return false;
  end if;
  for d in select x.* from posthouse.detached x order by x.lower, x.name loop
    exit when d.lower <> of_range;
    -- One that somebody attached again is his.
    if to_regclass(format('posthouse.%I', d.name)) is not null
       and not exists (select from pg_inherits i where i.inhrelid = to_regclass(format('posthouse.%I', d.name))) then
      begin
        execute format('drop table posthouse.%I', d.name);
      exception when lock_not_available then
        continue;
      end;
    end if;
    of_range := d.lower;
    delete from posthouse.detached x where x.name = d.name;
    -- Slices without dead letters have nothing left, unless ids of theirs have a partition again.
    delete from posthouse.slice s
    where s.lower >= d.lower and s.lower < d.upper
      and not exists (select from posthouse.dead_letter x where x.id >= s.lower and x.id < s.lower + 10000)
      and not exists (select from posthouse.id_range r where r.lower <= s.lower and r.upper > s.lower);
  end loop;
  return of_range is not null;
end $$;

-- Finish what somebody began by DETACH CONCURRENTLY and did not end: until then nothing can be put into such a partition. It is his
-- then, and not dropped. False: somebody holds it.
create or replace function posthouse.finish_detaches() returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '50ms'
as $$
declare
  pending record;
begin
  for pending in
    select i.inhparent::regclass as parent, i.inhrelid::regclass as part from pg_inherits i
    where i.inhparent in ('posthouse.payload'::regclass, 'posthouse.archive'::regclass) and i.inhdetachpending
  loop
    begin
      execute format('alter table %s detach partition %s finalize', pending.parent, pending.part);
    exception when lock_not_available then
      return false;
    end;
  end loop;
  return true;
end $$;

-- Who has held the parents for longer than a moment. A look, and one more if there was anybody: nothing is locked.
create or replace function posthouse.lasting_holders() returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  parents constant regclass[] := array['posthouse.payload'::regclass, 'posthouse.archive'::regclass];
  held text[] := posthouse.holders(parents);
begin
  if held = '{}' then
    return false;
  end if;
  perform pg_sleep(0.05);
  return held && posthouse.holders(parents);
end $$;

-- One step of dropping partitions: `idle` (there is nothing to drop), `busy` (somebody holds what is to be dropped: look again
-- soon), or what it did: `spared` (payloads of dead letters put aside), `detached` (to be dropped by the next step), `dropped`. After these
-- there may be more.
create or replace function posthouse.retire() returns text
language plpgsql
set search_path = pg_catalog, pg_temp
set jit = off
as $$
declare
  r posthouse.id_range;
  busy boolean;
begin
  -- What came back to life is looked for again once the locks are held.
  perform posthouse.check_isolation();
  if not pg_try_advisory_xact_lock(1346912000, 7) then
    return 'idle';
  elsif exists (select from posthouse.detached) and posthouse.drop_detached() then
    return 'dropped';
  end if;
  busy := not posthouse.finish_detaches() or exists (select from posthouse.detached);
  -- Any of them, since one may be held for long.
  for r in
    select x.* from posthouse.id_range x
    where x.upper <= (select s.last_value + 1 from posthouse.job_id_seq s) and posthouse.is_over(x) order by random()
  loop
    if not r.spared then
      if posthouse.spare_payloads(r.lower, r.upper) then
        return 'spared';
      end if;
      update posthouse.id_range x set spared = true where x.lower = r.lower;
    end if;
    -- All that is done while somebody reads.
    if posthouse.holders(array[posthouse.partition_of('posthouse.payload', r.lower, r.upper),
         posthouse.partition_of('posthouse.archive', r.lower, r.upper)]) = '{}' then
      return case when not posthouse.lasting_holders() and posthouse.detach_range(r) then 'detached' else 'busy' end;
    end if;
    busy := true;
  end loop;
  return case when busy then 'busy' else 'idle' end;
end $$;

-- Statistics of the parents, which autovacuum never makes: where their number of rows has changed by a tenth. A small sample
-- will do, since this holds off new partitions meanwhile.
create or replace function posthouse.analyze_parents() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set default_statistics_target = 10
set lock_timeout = '50ms'
as $$
declare
  parent text;
begin
  foreach parent in array array['payload', 'archive'] loop
    if (select abs(sum(pg_stat_get_live_tuples(i.inhrelid)) - min(p.reltuples)) > 1000 + 0.1 * min(p.reltuples)
        from pg_inherits i join pg_class p on p.oid = i.inhparent where i.inhparent = ('posthouse.' || parent)::regclass) then
      begin
        execute format('analyze posthouse.%I', parent);
      exception when lock_not_available then
        -- A vacuum, or partitions that are made just now: it comes again, and nothing has failed.
        null;
      end;
    end if;
  end loop;
end $$;
