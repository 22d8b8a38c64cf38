-- The doctor: what is wrong with a database, or soon will be, and what mends it. Looks only, and changes nothing.
--
-- Each function answers with what it found: `severity` is bad (jobs stand still, get lost or soon will), warning (it gets worse if
-- nobody does anything) or note (worth to know). Nothing found: no row. `fix` is a statement or command that can be run as it is.

-- The statement that gives a setting a value where it was set: for the role, the database, or the server.
create or replace function posthouse.doctor_setting(setting text, value text) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select coalesce((
    select case
        when s.setrole <> 0 then format('alter role %I', s.setrole::regrole::text) || case when s.setdatabase <> 0 then format(' in database %I', current_database()) else '' end
        else format('alter database %I', current_database()) end
      || format(' set %s = %L', setting, value)
    from pg_db_role_setting s
    where s.setdatabase in (0, (select d.oid from pg_database d where d.datname = current_database()))
      and s.setrole in (0, (select r.oid from pg_roles r where r.rolname = session_user))
      and exists (select from unnest(s.setconfig) c where starts_with(c, setting || '='))
    order by s.setrole <> 0 desc, s.setdatabase <> 0 desc limit 1),
    format('alter system set %s = %L; select pg_reload_conf()', setting, value))
$$;

-- Settings of the server, the database and the role. Those of this very session do not count.
create or replace function posthouse.doctor_settings()
returns table (name text, severity text, subject text, what text, why text, fix text, detail jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  room bigint;
  used bigint;
begin
  return query
    select w.name, w.severity, s.name, format('%s is %s', s.name, case when s.unit is null then s.reset_val else s.reset_val || ' ' || s.unit end),
      w.why, posthouse.doctor_setting(s.name, w.value), jsonb_build_object('value', s.reset_val)
    from (values
      ('autovacuum', 'autovacuum', 'bad', array['off'], 'on', 'nothing removes dead rows: tables grow without end, and in the end Postgres stops to write'),
      ('autovacuum', 'track_counts', 'bad', array['off'], 'on', 'autovacuum does not know what to do without it'),
      ('durability', 'fsync', 'bad', array['off'], 'on', 'a crash of the machine may destroy the database'),
      ('durability', 'full_page_writes', 'bad', array['off'], 'on', 'a crash of the machine may destroy pages that were being written'),
      ('durability', 'synchronous_commit', 'warning', array['off'], 'on', 'a crash of the server loses what was committed in the last moments: jobs, and results that were paid for'),
      ('isolation_level', 'default_transaction_isolation', 'note', array['serializable', 'repeatable read', 'read uncommitted'], 'read committed',
        'the library and this binary set what they need, at the price of a larger flight a call; whoever calls claim, settle or heartbeat himself gets PH002 unless he begins READ COMMITTED, and his enqueues may fail with 40001'),
      ('read_only', 'default_transaction_read_only', 'bad', array['on'], 'off',
        'nothing can be enqueued, claimed or settled: workers wait until it is off, and keep what they have finished. Some hosts set it when a disk is full: make room first')
    ) w(name, setting, severity, wrong, value, why)
    join pg_settings s on s.name = w.setting and s.reset_val = any(w.wrong);
  return query
    select 'timeouts', 'note', s.name, format('%s is %s ms', s.name, s.reset_val),
      'the library and this binary set what they need where it is shorter than their calls may take; whoever calls the functions himself may be cut off by it, with 57014 or 55P03: nothing is done then, and it can be tried again',
      posthouse.doctor_setting(s.name, '0'), jsonb_build_object('value', s.reset_val)
    from pg_settings s where s.name in ('statement_timeout', 'lock_timeout', 'transaction_timeout') and s.reset_val <> '0';
  return query
    select 'timeouts', 'note', s.name, 'idle_in_transaction_session_timeout is off',
      'nothing ends a transaction that somebody forgot, and for as long as it is open no dead row younger than it is removed anywhere in the database',
      posthouse.doctor_setting(s.name, '10min'), jsonb_build_object('value', s.reset_val)
    from pg_settings s where s.name = 'idle_in_transaction_session_timeout' and s.reset_val = '0';
  return query
    select 'autovacuum', 'bad', c.oid::regclass::text, format('autovacuum is turned off for %s', c.oid::regclass),
      'nothing removes its dead rows: it grows without end, and what reads it gets slower',
      format('alter table %s reset (autovacuum_enabled, toast.autovacuum_enabled)', c.oid::regclass), null::jsonb
    from pg_class c left join pg_class t on t.oid = c.reltoastrelid
    where c.relnamespace = 'posthouse'::regnamespace and c.relkind = 'r'
      and exists (select from unnest(c.reloptions || t.reloptions) o where o ~ '^autovacuum_enabled=(f|n|0|of)')
    order by c.relname;
  -- Whichever limit is the tightest: of the server, the database, the role.
  select least(current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
      - coalesce(current_setting('reserved_connections', true)::bigint, 0) - all_used.n, of_database.n, of_role.n), all_used.n
  into room, used
  from (select sum(d.numbackends)::bigint as n from pg_stat_database d where d.datid <> 0) all_used,
    (select case when d.datconnlimit >= 0 then d.datconnlimit - s.numbackends end::bigint as n
     from pg_database d join pg_stat_database s on s.datid = d.oid where d.datname = current_database()) of_database,
    (select case when r.rolconnlimit >= 0 then r.rolconnlimit - (select count(*) from pg_stat_activity a where a.usename = r.rolname) end as n
     from pg_roles r where r.rolname = session_user) of_role;
  if room < 10 then
    return query values ('connections', case when room < 3 then 'bad' else 'warning' end, null,
      format('%s more connections are allowed (of the server, the database or the role; %s are open)', greatest(room, 0), used),
      'a worker takes 4 to 6, and each program that enqueues 1 to 6; who gets none waits or fails',
      format('alter system set max_connections = %s -- and restart; or a pooler; or raise the `connection limit` of the database or the role',
        current_setting('max_connections')::int + 100),
      jsonb_build_object('room', room, 'used', used));
  end if;
  if not exists (select from pg_extension e where e.extname = 'pg_stat_statements') then
    return query values ('extensions', 'note', 'pg_stat_statements', 'the extension pg_stat_statements is not there',
      'nice to have: it tells which statements take the time of the server', 'create extension pg_stat_statements -- shared_preload_libraries must name it first, which takes a restart',
      null::jsonb);
  end if;
end $$;

-- Tables, partitions and indexes. Dead rows are told of from `dead_min` on.
create or replace function posthouse.doctor_tables(dead_min bigint default 100000)
returns table (name text, severity text, subject text, what text, why text, fix text, detail jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  last_id bigint;
begin
  return query
    select 'indexes', 'bad', i.indexrelid::regclass::text, format('index %s of %s is not valid', i.indexrelid::regclass, i.indrelid::regclass),
      'it was being made and that did not end well: it costs each write and helps no look-up; without a valid one, calls read whole tables',
      case when i.indexrelid::regclass::text ~ '_cc(new|old)[0-9]*"?$' then format('drop index concurrently %s', i.indexrelid::regclass)
        when p.relkind = 'p' then format('alter index %s attach partition … -- the index of each partition that has none attached', i.indexrelid::regclass)
        else format('reindex index concurrently %s', i.indexrelid::regclass) end, null::jsonb
    from pg_index i join pg_class c on c.oid = i.indexrelid join pg_class p on p.oid = i.indrelid
    where c.relnamespace = 'posthouse'::regnamespace and not (i.indisvalid and i.indisready)
      and not exists (select from pg_stat_progress_create_index x where x.index_relid = i.indexrelid)
    order by c.relname;
  select case when s.is_called then s.last_value else 0 end into last_id from posthouse.job_id_seq s;
  if not exists (select from posthouse.id_range r where r.lower <= last_id + 1 and r.upper > last_id + 1) then
    return query values ('partitions', 'warning', null, format('there is no partition for the next job, %s', last_id + 1),
      'the sweep makes them a million ids ahead; now an enqueue has to, and others wait for it', 'select posthouse.partitions_ahead()',
      jsonb_build_object('next_id', last_id + 1));
  end if;
  return query
    select 'partitions', 'warning', i.inhrelid::regclass::text, format('the detaching of partition %s from %s was begun and not finished', i.inhrelid::regclass, i.inhparent::regclass),
      'until it is, no other partition can be detached', format('alter table %s detach partition %s finalize', i.inhparent::regclass, i.inhrelid::regclass), null::jsonb
    from pg_inherits i join pg_class c on c.oid = i.inhparent
    where c.relnamespace = 'posthouse'::regnamespace and i.inhdetachpending;
  return query
    select 'partitions', 'warning', i.inhparent::regclass::text, format('%s has %s partitions', i.inhparent::regclass, count(*)),
      'each look-up that does not name the id looks into all of them', 'posthouse queue list -- shows what is kept for how long; partitions whose jobs have all expired are dropped by the sweep',
      jsonb_build_object('partitions', count(*))
    from pg_inherits i join pg_class c on c.oid = i.inhparent
    where c.relnamespace = 'posthouse'::regnamespace and c.relkind = 'p' group by i.inhparent having count(*) > 200;
  return query
    select 'statistics', 'warning', p.oid::regclass::text, format('%s has never been analysed as a whole, and has about %s rows', p.oid::regclass, c.n::bigint),
      'autovacuum analyses its partitions only, and the planner guesses', format('analyze %s', p.oid::regclass), null::jsonb
    from pg_class p cross join lateral (
      select sum(greatest(c.reltuples, 0)) as n from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = p.oid) c
    where p.relnamespace = 'posthouse'::regnamespace and p.relkind = 'p' and p.reltuples < 0 and c.n >= 1000000
    order by p.relname;
  return query
    select 'dead_rows', 'warning', t.relid::regclass::text,
      format('%s has %s dead rows and %s live ones, %s; last vacuumed %s', t.relid::regclass, t.n_dead_tup, t.n_live_tup, pg_size_pretty(pg_total_relation_size(t.relid)),
        coalesce(to_char(greatest(t.last_autovacuum, t.last_vacuum) at time zone 'UTC', 'YYYY-MM-DD HH24:MI "UTC"'), 'never')),
      'autovacuum does not keep up, or something holds on to them: see what the check horizon found',
      format('vacuum (analyze) %s', t.relid::regclass),
      jsonb_build_object('dead', t.n_dead_tup, 'live', t.n_live_tup, 'bytes', pg_total_relation_size(t.relid))
    from pg_stat_all_tables t
    where t.schemaname = 'posthouse' and t.n_dead_tup >= dead_min and t.n_dead_tup > t.n_live_tup
    order by t.n_dead_tup desc;
end $$;

-- Jobs that are not whole. Looks at `max_jobs` of each sort, the oldest first, and says so if there are more.
create or replace function posthouse.doctor_jobs(max_jobs int default 100000)
returns table (name text, severity text, subject text, what text, why text, fix text, detail jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  found_ids bigint[];
  n bigint;
  last_id bigint;
  max_id bigint;
begin
  select array_agg(j.id), count(*) into found_ids, n
  from (select x.id from posthouse.job x order by x.id limit max_jobs) j
  where not exists (select from posthouse.payload p where p.id = j.id);
  if n > 0 then
    return query values ('payloads', 'bad', null, format('%s live jobs have no payload: %s', n, posthouse.doctor_ids(found_ids)),
      'somebody deleted it, or a restore was not whole; a handler would get nothing to work on',
      format('select posthouse.cancel(id) from unnest(%L::bigint[]) id -- or bring their rows of posthouse.payload back from a backup', found_ids[:1000]),
      jsonb_build_object('jobs', n, 'ids', found_ids[:1000]));
  end if;
  -- Nobody would rescue them: a dead worker's jobs are found by its claims.
  select array_agg(j.id), count(*) into found_ids, n
  from (select x.id, x.worker, x.fence from posthouse.job x where x.state = 'running' order by x.id limit max_jobs) j
  where not exists (
    select from (select c.worker, u.id, u.fence from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence) offset 0) c
    where c.worker = j.worker and c.id = j.id and c.fence = j.fence);
  if n > 0 then
    return query values ('claims', 'bad', null, format('%s jobs are running and no claim names them: %s', n, posthouse.doctor_ids(found_ids)),
      'if their worker dies, or is dead, nobody takes them back',
      format('select posthouse.requeue_job(j, clock_timestamp(), true, true, ''claim lost'') from posthouse.job j where j.id = any(%L) and j.state = ''running'' -- when the worker is dead; they run again', found_ids[:1000]),
      jsonb_build_object('jobs', n, 'ids', found_ids[:1000]));
  end if;
  select array_agg(j.id), count(*) into found_ids, n
  from (select x.id from posthouse.job x order by x.id limit max_jobs) j
  where exists (select from posthouse.archive a where a.id = j.id) or exists (select from posthouse.dead_letter d where d.id = j.id)
    or exists (select from posthouse.tombstone t where t.id = j.id);
  if n > 0 then
    return query values ('homes', 'bad', null, format('%s jobs have ended and are live all the same: %s', n, posthouse.doctor_ids(found_ids)),
      'an id was given twice or a row was put back by hand; they would run again, and could not be recorded',
      format('delete from posthouse.job where id = any(%L) -- the record of their end is kept', found_ids[:1000]),
      jsonb_build_object('jobs', n, 'ids', found_ids[:1000]));
  end if;
  select array_agg(d.id), count(*) into found_ids, n
  from (select x.id from posthouse.dead_letter x order by x.id limit max_jobs) d
  where exists (select from posthouse.archive a where a.id = d.id) or exists (select from posthouse.tombstone t where t.id = d.id);
  if n > 0 then
    return query values ('homes', 'bad', null, format('%s dead letters have ended another way as well: %s', n, posthouse.doctor_ids(found_ids)),
      'an id was given twice or a row was put back by hand; a redrive would fail',
      format('delete from posthouse.dead_letter where id = any(%L) -- or their rows of posthouse.archive, whichever is wrong', found_ids[:1000]),
      jsonb_build_object('jobs', n, 'ids', found_ids[:1000]));
  end if;
  select case when s.is_called then s.last_value else 0 end into last_id from posthouse.job_id_seq s;
  max_id := greatest((select max(j.id) from posthouse.job j), (select max(p.id) from posthouse.payload p), (select max(a.id) from posthouse.archive a),
    (select max(d.id) from posthouse.dead_letter d), (select max(t.id) from posthouse.tombstone t));
  if max_id > last_id then
    return query values ('ids', 'bad', null, format('there is a job %s, and the next one will be %s', max_id, last_id + 1),
      'the sequence was not restored with the tables, or lost its newest numbers in a failover: enqueues fail or give ids a second time',
      format('select setval(''posthouse.job_id_seq'', %s)', max_id), jsonb_build_object('max_id', max_id, 'last_value', last_id));
  end if;
  select count(*) into n from (select from posthouse.job x limit max_jobs + 1) x;
  if n > max_jobs then
    return query values ('payloads', 'note', null, format('only the %s oldest live jobs were looked at', max_jobs), 'looking at all of them may take long',
      'posthouse db doctor --max-jobs 1000000000', jsonb_build_object('looked_at', max_jobs));
  end if;
end $$;

-- The first ids, for people.
create or replace function posthouse.doctor_ids(ids bigint[]) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select array_to_string(ids[:5], ', ') || case when cardinality(ids) > 5 then ', …' else '' end
$$;

-- Sweeps and workers.
create or replace function posthouse.doctor_workers()
returns table (name text, severity text, subject text, what text, why text, fix text, detail jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  live bigint;
  lost bigint;
  late text;
  versions text;
begin
  select count(*) filter (where posthouse.lease_end(w) > clock_timestamp()), count(*) filter (where posthouse.lease_end(w) < clock_timestamp() - interval '2 minutes'),
    string_agg(distinct coalesce(nullif(w.version, ''), 'unknown'), ', ') filter (where posthouse.lease_end(w) > clock_timestamp())
  into live, lost, versions
  from posthouse.worker w where w.dead_at is null;
  return query
    select 'sweeps', 'bad', s.name, format('the sweep %s has been failing since %s: %s', s.name, to_char(s.failing_since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), s.error),
      'what it looks after is left undone; it is tried again by itself', format('select posthouse.tidy(%L) -- as soon as what it says is mended', s.name),
      jsonb_build_object('failures', s.failures, 'error', s.error)
    from posthouse.sweeps s where s.failing order by s.name;
  select case when bool_and(s.late) then 'everything' else string_agg(s.name, ', ' order by s.name) filter (where s.late) end into late from posthouse.sweeps s
  having bool_or(s.late);
  if late is not null then
    return query values ('sweeps', case when live > 0 then 'bad' else 'warning' end, null,
      format('%s: not swept lately', late) || case when live > 0 then ', though workers are there' else ', since no worker is there' end,
      'jobs of dead workers are not taken back, and partitions not made ahead, while nobody sweeps; dead rows and old records pile up',
      'posthouse work --sweep-only', jsonb_build_object('live_workers', live));
  end if;
  if live = 0 and exists (select from posthouse.job j where j.state = 'queued' and j.run_at <= clock_timestamp()) then
    return query values ('workers', 'warning', null, 'jobs are due and there is no live worker', 'nobody runs them', 'posthouse work', null::jsonb);
  end if;
  if lost > 0 then
    return query values ('workers', 'warning', null, format('%s workers have been silent for two minutes longer than their leases, and nobody has taken their jobs back', lost),
      'whoever sweeps does so; nobody does', 'posthouse work --sweep-only', jsonb_build_object('lost', lost));
  end if;
  if versions like '%, %' then
    return query values ('workers', 'note', null, format('workers of several versions are at work: %s', versions),
      'fine while a new version is being rolled out', 'select host, pid, version, started_at from posthouse.workers where state = ''live'' order by version',
      null::jsonb);
  end if;
end $$;

-- What keeps vacuum from removing dead rows: open transactions longer than `older`, prepared transactions, replication slots and standbys
-- that hold back more than `xids` transactions; and sessions that this role cannot look into.
create or replace function posthouse.doctor_horizon(older interval default '5 minutes', xids int default 100000)
returns table (name text, severity text, subject text, what text, why text, fix text, detail jsonb)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  now_at timestamptz := clock_timestamp();
  cost text;
  cost_detail jsonb;
  hidden bigint;
begin
  select format('vacuum cannot remove what was deleted since; the tables of the queue have %s dead rows and %s on disk%s', coalesce(sum(t.n_dead_tup), 0),
      pg_size_pretty(coalesce(sum(pg_total_relation_size(t.relid)), 0)),
      coalesce('; most in ' || (array_agg(t.relname::text order by t.n_dead_tup desc) filter (where t.n_dead_tup > 0))[1], '')),
    jsonb_build_object('dead_rows', coalesce(sum(t.n_dead_tup), 0), 'bytes', coalesce(sum(pg_total_relation_size(t.relid)), 0))
  into cost, cost_detail
  from pg_stat_all_tables t where t.schemaname = 'posthouse';
  -- A transaction that has no snapshot and wrote nothing holds back nothing.
  return query
    select 'horizon', case when now_at - a.xact_start > older * 12 then 'bad' else 'warning' end, 'pid ' || a.pid,
      format('pid %s of %s (%s) has had a transaction open for %s, %s: %s', a.pid, a.usename, coalesce(nullif(a.application_name, ''), 'no application name'),
        date_trunc('second', now_at - a.xact_start), a.state, left(regexp_replace(a.query, '[[:space:]]+', ' ', 'g'), 200)),
      cost,
      format('select pg_terminate_backend(%s); alter role %I set %s', a.pid, a.usename,
        case when a.state like 'idle%' then 'idle_in_transaction_session_timeout = ''5min''' else 'statement_timeout = ''1h''' end),
      cost_detail || jsonb_build_object('pid', a.pid, 'user', a.usename, 'application', a.application_name, 'state', a.state,
        'seconds', floor(extract(epoch from now_at - a.xact_start)), 'query', left(a.query, 1000), 'xids', age(coalesce(a.backend_xmin, a.backend_xid)))
    from pg_stat_activity a
    where a.datname = current_database() and a.pid <> pg_backend_pid() and a.backend_type <> 'autovacuum worker'
      and coalesce(a.backend_xmin, a.backend_xid) is not null and now_at - a.xact_start > older
    order by a.xact_start limit 20;
  return query
    select 'horizon', case when now_at - p.prepared > older * 12 then 'bad' else 'warning' end, 'prepared ' || p.gid,
      format('the prepared transaction %s of %s waits for its end since %s', quote_literal(p.gid), p.owner, date_trunc('second', now_at - p.prepared)),
      cost || '; it holds its locks too, and survives restarts', format('rollback prepared %L -- or commit prepared: ask who prepared it', p.gid),
      cost_detail || jsonb_build_object('gid', p.gid, 'user', p.owner, 'seconds', floor(extract(epoch from now_at - p.prepared)), 'xids', age(p.transaction))
    from pg_prepared_xacts p where p.database = current_database() and now_at - p.prepared > older order by p.prepared limit 20;
  return query
    select 'slots', case when s.active then 'warning' else 'bad' end, 'slot ' || s.slot_name,
      format('replication slot %s (%s, %s) ', s.slot_name, s.slot_type, case when s.active then 'in use by pid ' || s.active_pid else 'used by nobody' end)
        || concat_ws(' and ',
          case when age(s.xmin) >= xids then format('holds back the rows of the last %s transactions', age(s.xmin)) end,
          case when age(s.catalog_xmin) >= xids then format('holds back the catalogues of the last %s transactions', age(s.catalog_xmin)) end,
          case when s.restart_lsn is not null then format('keeps %s of WAL', pg_size_pretty(w.bytes)) end),
      case when age(s.xmin) >= xids then cost || '; and ' else '' end || 'the WAL it keeps may fill the disk',
      case when s.active then 'select * from pg_stat_replication -- its reader does not keep up: see there'
        else format('select pg_drop_replication_slot(%L) -- if nobody comes back for it; and alter system set max_slot_wal_keep_size = ''10GB''', s.slot_name) end,
      case when age(s.xmin) >= xids then cost_detail else '{}' end
        || jsonb_build_object('slot', s.slot_name, 'active', s.active, 'xids', age(s.xmin), 'catalog_xids', age(s.catalog_xmin), 'wal_bytes', w.bytes)
    from pg_replication_slots s
    cross join lateral (select case when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn) end as bytes) w
    where coalesce(s.wal_status, '') <> 'lost' and (not s.active and not s.temporary and s.restart_lsn is not null
      or age(s.xmin) >= xids or age(s.catalog_xmin) >= xids)
    order by s.slot_name;
  return query
    select 'standbys', 'warning', 'standby ' || coalesce(nullif(r.application_name, ''), r.pid::text),
      format('standby %s (pid %s, %s, %s) holds back the rows of the last %s transactions by its feedback', coalesce(nullif(r.application_name, ''), '?'),
        r.pid, r.usename, coalesce(host(r.client_addr), 'local'), age(r.backend_xmin)),
      cost, 'alter system set max_standby_streaming_delay = ''30s''; alter system set hot_standby_feedback = off; select pg_reload_conf() -- on the standby; or end the long query there',
      cost_detail || jsonb_build_object('pid', r.pid, 'application', r.application_name, 'xids', age(r.backend_xmin))
    from pg_stat_replication r where r.backend_xmin is not null and age(r.backend_xmin) >= xids;
  select count(*) into hidden from pg_stat_activity a where a.query = '<insufficient privilege>' and a.datname = current_database();
  if hidden > 0 then
    return query values ('rights', 'note', current_user::text,
      format('%s may not look into %s sessions of other roles: whether they hold back dead rows, since when and by which statement, was not seen', current_user, hidden),
      'a transaction that somebody forgot may be among them; and claims step over dead rows less well without this right',
      format('grant pg_read_all_stats to %I', current_user), jsonb_build_object('sessions', hidden));
  end if;
end $$;

-- All of it, the worst first.
create or replace function posthouse.doctor(older interval default '5 minutes')
returns table (name text, severity text, subject text, what text, why text, fix text, detail jsonb)
language sql volatile
set search_path = pg_catalog, pg_temp
as $$
  select d.* from (
    select * from posthouse.doctor_settings() union all select * from posthouse.doctor_tables() union all select * from posthouse.doctor_jobs()
    union all select * from posthouse.doctor_workers() union all select * from posthouse.doctor_horizon(doctor.older)) d
  order by array_position(array['bad', 'warning', 'note'], d.severity), d.name, d.subject
$$;
