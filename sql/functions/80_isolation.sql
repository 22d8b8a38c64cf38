-- Isolation: roles with least rights, and tenants who log in to Postgres themselves. Off until somebody runs posthouse.isolate().
--
-- Who a session belongs to is told by session_user: the name it logged in with, which neither `set role` nor any setting changes.
-- What changes something runs as the owner, asks posthouse.check_enqueue or posthouse.check_job_login first, and only if
-- the session is not the owner's. What only reads is bound by row level security: views run as posthouse_views, who owns nothing
-- else, and the few functions that views and the library need run as their caller. So the owner's statements, the whole hot path
-- among them, have a policy that is always true, and pay nothing.

-- Whether posthouse.isolate() has been here.
create or replace function posthouse.is_isolated() returns boolean
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select c.relrowsecurity from pg_class c where c.oid = 'posthouse.lane'::regclass
$$;

-- The public side: who may call or read what. What is not in here is for the owner alone. `runs` says how: a function as its
-- owner or as its caller (then row level security binds it), a view, or a table that the library reads directly.
create or replace function posthouse.rights() returns table (name text, runs text, roles text[])
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  values
    ('enqueue', 'owner', array['enqueue', 'operate']),
    ('enqueue_many', 'owner', array['enqueue', 'operate']),
    ('enqueue_plain', 'owner', array['enqueue', 'operate']),
    ('cancel', 'owner', array['enqueue', 'operate']),

    ('register_worker', 'owner', array['worker']),
    ('claim', 'owner', array['worker']),
    ('next_due', 'owner', array['worker']),
    ('is_empty', 'owner', array['worker']),
    ('heartbeat', 'owner', array['worker']),
    ('settle', 'owner', array['worker']),
    ('settle_plain', 'owner', array['worker']),
    ('release', 'owner', array['worker']),
    ('progress', 'owner', array['worker']),
    ('retire_worker', 'owner', array['worker']),
    ('call_seed', 'owner', array['worker']),
    ('worker_beats', 'owner', array['worker']),
    ('rescue', 'owner', array['worker']),
    ('tidy', 'owner', array['worker']),
    ('retire', 'owner', array['worker']),
    ('due_sweeps', 'owner', array['worker']),
    ('more_due_in', 'owner', array['worker']),
    ('begin_sweep', 'owner', array['worker']),
    ('end_sweep', 'owner', array['worker']),
    ('due_schedules', 'owner', array['worker']),
    ('fire_schedule', 'owner', array['worker']),
    ('refuse_schedule', 'owner', array['worker']),
    ('admit', 'owner', array['worker']),
    ('admitted', 'owner', array['worker']),
    ('begin_probe', 'owner', array['worker']),
    ('report_endpoint', 'owner', array['worker']),
    ('closures', 'owner', array['worker', 'operate']),
    ('set_kind', 'owner', array['worker', 'operate']),
    ('set_route', 'owner', array['worker', 'operate']),
    ('raise_alert', 'owner', array['worker', 'operate']),
    ('resolve_alert', 'owner', array['worker', 'operate']),
    ('webhook', 'owner', array['worker', 'operate']),
    ('set_webhook', 'owner', array['worker', 'operate']),
    ('metrics', 'owner', array['worker', 'operate']),

    ('explain', 'owner', array['read', 'operate']),
    ('backlog', 'owner', array['read', 'operate']),
    ('unserved_kinds', 'owner', array['read', 'operate']),
    ('state_of', 'caller', array['read', 'operate']),
    ('running_jobs', 'caller', array['read', 'operate']),
    ('lease_end', 'caller', array['read', 'operate']),
    ('sum_since', 'caller', array['worker', 'read', 'operate']),
    ('dead_letters', 'caller', array['read', 'operate']),
    ('parse_filter', 'caller', array['read', 'operate']),
    ('check_batch', 'caller', array['read', 'operate']),
    ('redrives', 'view', array['read', 'operate']),
    ('jobs', 'view', array['read', 'operate']),
    ('queue_health', 'view', array['read', 'operate']),
    ('queues', 'view', array['read', 'operate']),
    ('retention_of', 'owner', array['read', 'operate']),
    ('usage_by_day', 'view', array['read', 'operate']),
    ('workers', 'view', array['read', 'operate']),
    ('gates', 'view', array['worker', 'read', 'operate']),
    ('sweeps', 'view', array['worker', 'read', 'operate']),
    ('schedules', 'view', array['worker', 'read', 'operate']),
    ('schedule_runs', 'view', array['read', 'operate']),
    ('tenants', 'view', array['read', 'operate']),
    ('alerts', 'view', array['read', 'operate']),
    ('alert_rules', 'view', array['read', 'operate']),
    ('lane', 'table', array['read', 'operate']),
    ('job', 'table', array['read', 'operate']),
    ('archive', 'table', array['read', 'operate']),
    ('tombstone', 'table', array['read', 'operate']),
    ('dead_letter', 'table', array['read', 'operate']),
    ('claimed', 'table', array['read', 'operate']),

    ('retry', 'owner', array['operate']),
    ('redrive', 'owner', array['operate']),
    ('purge', 'owner', array['operate']),
    ('find_jobs', 'owner', array['operate']),
    ('cancel_many', 'owner', array['operate']),
    ('retry_many', 'owner', array['operate']),
    ('reprioritise_many', 'owner', array['operate']),
    ('redrive_many', 'owner', array['operate']),
    ('purge_many', 'owner', array['operate']),
    ('set_queue', 'owner', array['operate']),
    ('set_fair_by', 'owner', array['operate']),
    ('set_serial_by', 'owner', array['operate']),
    ('set_depth', 'owner', array['operate']),
    ('origin', 'owner', array['worker', 'operate']),
    ('adopt', 'owner', array['operate']),
    ('disown', 'owner', array['operate']),
    ('depths', 'view', array['read', 'operate']),
    ('set_tenant', 'owner', array['operate']),
    ('set_gate', 'owner', array['operate']),
    ('remove_gate', 'owner', array['operate']),
    ('close_gate', 'owner', array['operate']),
    ('open_gate', 'owner', array['operate']),
    ('set_schedule', 'owner', array['operate']),
    ('pause_schedule', 'owner', array['operate']),
    ('resume_schedule', 'owner', array['operate']),
    ('remove_schedule', 'owner', array['operate']),
    ('set_alert', 'owner', array['operate']),
    ('test_alert', 'owner', array['operate']),
    ('doctor', 'owner', array['operate']),
    ('doctor_settings', 'owner', array['operate']),
    ('doctor_tables', 'owner', array['operate']),
    ('doctor_jobs', 'owner', array['operate']),
    ('doctor_workers', 'owner', array['operate']),
    ('doctor_horizon', 'owner', array['operate']),

    ('sees_all', 'owner', array['enqueue', 'worker', 'read', 'operate']),
    ('own_tenant', 'owner', array['enqueue', 'worker', 'read', 'operate']),
    ('own_lanes', 'owner', array['worker', 'read', 'operate']),
    ('sees_job', 'owner', array['worker', 'read', 'operate']),
    ('sees_queue', 'owner', array['worker', 'read', 'operate']),
    ('migration', 'table', array['enqueue', 'worker', 'read', 'operate']),
    ('meta', 'table', array['enqueue', 'worker', 'read', 'operate'])
$$;

-- Whether the session is the owner's, a worker's, or of people who operate the queue. Meant to run as the owner.
create or replace function posthouse.is_trusted() returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return not posthouse.is_isolated()
    or pg_has_role(session_user, current_user, 'member')
    or coalesce(pg_has_role(session_user, to_regrole('posthouse_operate')::oid, 'member'), false)
    or coalesce(pg_has_role(session_user, to_regrole('posthouse_worker')::oid, 'member'), false);
end $$;

-- Whether the session sees the jobs of every tenant. One that is bound to a tenant never does, whatever else was granted to it.
create or replace function posthouse.sees_all() returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return coalesce((select t.every_tenant from posthouse.tenant_login t where t.login = session_user), posthouse.is_trusted());
end $$;

-- The only tenant that the session belongs to; null: none, or every.
create or replace function posthouse.own_tenant() returns text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return (select t.tenant from posthouse.tenant_login t where t.login = session_user);
end $$;

-- The lanes of the session's tenant.
create or replace function posthouse.own_lanes() returns bigint[]
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return array(select l.id from posthouse.lane l where l.tenant = posthouse.own_tenant());
end $$;

-- Whether a job is of the session's tenant. False as well if there is none.
create or replace function posthouse.sees_job(job_id bigint) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
begin
  return exists (
    select from posthouse.lane l
    where l.tenant = posthouse.own_tenant() and l.id = coalesce(
      (select j.lane_id from posthouse.job j where j.id = job_id), (select a.lane_id from posthouse.archive a where a.id = job_id),
      (select t.lane_id from posthouse.tombstone t where t.id = job_id), (select d.lane_id from posthouse.dead_letter d where d.id = job_id)));
end $$;

-- Whether the session's tenant has had jobs in a queue.
create or replace function posthouse.sees_queue(queue text) returns boolean
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  return exists (select from posthouse.lane l where l.queue = sees_queue.queue and l.tenant = posthouse.own_tenant());
end $$;

-- Raise 42501 for a session that belongs to nobody.
create or replace function posthouse.refuse_stranger() returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  raise exception using errcode = '42501', message = format('login %s belongs to no tenant', quote_ident(session_user)),
    hint = format('The owner of the schema says to which: select posthouse.bind_login(%L, ''TENANT'').', session_user);
end $$;

-- Raise 42501 unless the session may enqueue this. Kinds that begin with `posthouse.` are those of the queue itself.
create or replace function posthouse.check_enqueue(tenant text, kind text) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
  b posthouse.tenant_login;
begin
  if not posthouse.is_isolated() then
    return;
  end if;
  select * into b from posthouse.tenant_login t where t.login = session_user;
  if b.tenant <> check_enqueue.tenant then
    raise exception using errcode = '42501', message = format('tenant: login %s may enqueue for tenant %s only', quote_ident(session_user), quote_ident(b.tenant)),
      hint = format('Pass tenant => %L.', b.tenant);
  elsif b.tenant is null and posthouse.is_trusted() then
    return;
  elsif b.login is null then
    perform posthouse.refuse_stranger();
  elsif starts_with(check_enqueue.kind, 'posthouse.') then
    raise exception using errcode = '42501', message = 'kind: those that begin with "posthouse." are for the queue itself';
  end if;
end $$;

-- Raise PH003 for a job that the session may not see, just as for one that does not exist: from here in both cases, and
-- before anything is locked.
create or replace function posthouse.check_job_login(job_id bigint) returns void
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
begin
  if posthouse.sees_all() then
    return;
  elsif posthouse.own_tenant() is null then
    perform posthouse.refuse_stranger();
  elsif not posthouse.sees_job(job_id) then
    raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
  end if;
end $$;

-- Say which tenant a login belongs to, or that it is for every tenant (your own backend, a dashboard). It takes rights besides:
-- grant it posthouse_enqueue, posthouse_read or both.
create or replace function posthouse.bind_login(login name, tenant text default null, every_tenant boolean default false) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  role oid := to_regrole(quote_ident(bind_login.login))::oid;
begin
  if role is null then
    raise exception using errcode = 'PH001', message = format('login: there is no role %s', coalesce(quote_ident(bind_login.login), 'null')),
      hint = format('Make it first: create role %I login password ''…''.', coalesce(bind_login.login, 'name'));
  elsif (bind_login.every_tenant = (bind_login.tenant is null)) is not true then
    raise exception using errcode = 'PH001', message = 'tenant, every_tenant: give one of them',
      hint = 'every_tenant => true is for logins of your own that must see all.';
  elsif bind_login.tenant is not null then
    perform posthouse.check_name('tenant', bind_login.tenant);
    if exists (select from unnest(array['posthouse_worker', 'posthouse_operate', 'posthouse_views']) r
               where pg_has_role(role, to_regrole(r)::oid, 'member')) or pg_has_role(role, current_user, 'member') then
      raise exception using errcode = 'PH001',
        message = format('login: %s has rights over every tenant, by a role it is a member of', quote_ident(bind_login.login)),
        hint = 'Revoke posthouse_worker and posthouse_operate from it, or use another login.';
    end if;
  end if;
  insert into posthouse.tenant_login (login, tenant, every_tenant) values (bind_login.login, bind_login.tenant, bind_login.every_tenant)
  on conflict on constraint tenant_login_pkey do update set tenant = excluded.tenant, every_tenant = excluded.every_tenant;
end $$;

-- From now on the login belongs to nobody. False: it did not before.
create or replace function posthouse.unbind_login(login name) returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  delete from posthouse.tenant_login t where t.login = unbind_login.login;
  return found;
end $$;

-- Which rows of a table a session sees that is not the owner's; what says nothing of a tenant is for those who see all. No rule
-- reads a table itself: those would be locked by each statement of the owner as well, though his policy makes them needless.
create or replace function posthouse.row_rule(of_table regclass) returns text
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select case
    when t.name = 'migration' then 'true'
    when t.name = 'meta' then $r$name = 'functions' or (select posthouse.sees_all())$r$
    else '(select posthouse.sees_all())' || case
      when t.name = 'tenant_login' then ''
      when t.name = 'queue' then ' or posthouse.sees_queue(name)'
      when t.name in ('payload', 'spare_payload') then ' or posthouse.sees_job(id)'
      when 'tenant' = any(t.columns) then ' or tenant = (select posthouse.own_tenant())'
      when 'lane_id' = any(t.columns) then ' or lane_id = any((select posthouse.own_lanes())::bigint[])'
      when 'job_id' = any(t.columns) then ' or posthouse.sees_job(job_id)'
      else '' end end
  from (
    select c.relname as name, array(select a.attname from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped) as columns
    from pg_class c where c.oid = of_table) t
$$;

-- The roles that logins are made members of. One more, posthouse_views, is what views run as, and for nobody.
create or replace function posthouse.role_list() returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select 'posthouse_enqueue, posthouse_worker, posthouse_read, posthouse_operate'
$$;

-- What posthouse.isolate() runs. Whatever is as it should be already is left out where doing it again would lock a table.
create or replace function posthouse.isolation_steps() returns setof text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  owner regrole := (select c.relowner from pg_class c where c.oid = 'posthouse.lane'::regclass);
  is_super boolean := (select r.rolsuper from pg_roles r where r.oid = owner);
begin
  return query select format('create role %I nologin', r.name)
    from regexp_split_to_table(posthouse.role_list() || ', posthouse_views', ', ') r(name) where to_regrole(r.name) is null;
  -- So that the owner can replace views.
  if not is_super and (to_regrole('posthouse_views') is null or not pg_has_role(owner::oid, to_regrole('posthouse_views')::oid, 'usage')) then
    return next format('grant posthouse_views to %s', owner)
      || case when current_setting('server_version_num')::int >= 160000 then ' with inherit true, set true' else '' end;
  end if;
  return next format('grant usage on schema posthouse to %s, posthouse_views', posthouse.role_list());

  -- Functions: nobody but the owner, then those of the list. What was granted by hand would be more now than it was then.
  return query select distinct format('revoke all on all functions in schema posthouse from %s', g.grantee::regrole)
    from pg_proc p cross join lateral aclexplode(p.proacl) g
    where p.pronamespace = 'posthouse'::regnamespace and g.grantee not in (0, p.proowner) and g.grantee::regrole::text <> all(string_to_array(posthouse.role_list(), ', '));
  return next format('revoke all on all functions in schema posthouse from public, %s', posthouse.role_list());
  return query select format('alter function %s security %s', p.oid::regprocedure, case when p.prosecdef then 'invoker' else 'definer' end)
    from pg_proc p left join posthouse.rights() r on r.name = p.proname and r.runs = 'owner'
    where p.pronamespace = 'posthouse'::regnamespace and p.prosecdef <> (r.name is not null) order by p.proname;
  return query select format('grant execute on function %s to %s', p.oid::regprocedure, (select string_agg('posthouse_' || x, ', ') from unnest(r.roles) x))
    from pg_proc p join posthouse.rights() r on r.name = p.proname and r.runs in ('owner', 'caller')
    where p.pronamespace = 'posthouse'::regnamespace order by p.proname;

  -- Tables and views.
  return next format('revoke all on all tables in schema posthouse from public, %s', posthouse.role_list());
  return next 'grant create on schema posthouse to posthouse_views';
  return query select format('alter view %s owner to posthouse_views', c.oid::regclass)
    from pg_class c join posthouse.rights() r on r.name = c.relname and r.runs = 'view'
    where c.relnamespace = 'posthouse'::regnamespace and c.relkind = 'v' and c.relowner::regrole::text <> 'posthouse_views' order by c.relname;
  return next 'revoke create on schema posthouse from posthouse_views';
  return next 'grant select on all tables in schema posthouse to posthouse_views';
  return next 'revoke all on posthouse.tenant_login from posthouse_views';
  return query select format('grant select on %s to %s', c.oid::regclass, (select string_agg('posthouse_' || x, ', ') from unnest(r.roles) x))
    from pg_class c join posthouse.rights() r on r.name = c.relname and r.runs = case when c.relkind = 'v' then 'view' else 'table' end
    where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p', 'v') order by c.relname;

  -- Rows. Partitions are read through their tables; they have no policy of their own.
  return query select format('alter table %s enable row level security', c.oid::regclass) || case when not c.relispartition then ', force row level security' else '' end
    from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p')
      and not (c.relrowsecurity and (c.relispartition or c.relforcerowsecurity)) order by c.relname;
  return query select format('drop policy owner on %s', o.polrelid::regclass)
    from pg_policy o join pg_class c on c.oid = o.polrelid
    where c.relnamespace = 'posthouse'::regnamespace and o.polname = 'owner' and o.polroles <> array[owner::oid] order by c.relname;
  return query select format('create policy owner on %s to %s using (true) with check (true)', c.oid::regclass, owner)
    from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
      and not exists (select from pg_policy o where o.polrelid = c.oid and o.polname = 'owner' and o.polroles = array[owner::oid]) order by c.relname;
  return query select format('create policy tenant on %s for select using (%s)', c.oid::regclass, posthouse.row_rule(c.oid))
    from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition
      and not exists (select from pg_policy o where o.polrelid = c.oid and o.polname = 'tenant') order by c.relname;
end $$;

-- What posthouse.end_isolation() runs. Roles and bound logins stay: other databases of the server may have the same roles.
create or replace function posthouse.isolation_end_steps() returns setof text
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  owner regrole := (select c.relowner from pg_class c where c.oid = 'posthouse.lane'::regclass);
begin
  return query select format('alter view %s owner to %s', c.oid::regclass, owner)
    from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind = 'v' and c.relowner <> owner order by c.relname;
  return query select format('alter function %s security invoker', p.oid::regprocedure)
    from pg_proc p where p.pronamespace = 'posthouse'::regnamespace and p.prosecdef order by p.proname;
  return query select format('revoke all on all %s in schema posthouse from %s, posthouse_views', x, posthouse.role_list())
    from unnest(array['functions', 'tables']) x where to_regrole('posthouse_views') is not null;
  if to_regrole('posthouse_views') is not null then
    return next format('revoke all on schema posthouse from %s, posthouse_views', posthouse.role_list());
  end if;
  return query select format('drop policy %I on %s', o.polname, o.polrelid::regclass)
    from pg_policy o join pg_class c on c.oid = o.polrelid
    where c.relnamespace = 'posthouse'::regnamespace and o.polname in ('owner', 'tenant') order by c.relname, o.polname;
  return query select format('alter table %s disable row level security, no force row level security', c.oid::regclass)
    from pg_class c where c.relnamespace = 'posthouse'::regnamespace and c.relkind in ('r', 'p') and (c.relrowsecurity or c.relforcerowsecurity) order by c.relname;
end $$;

-- Run statements, or only answer with them.
create or replace function posthouse.run_steps(steps text[], dry_run boolean) returns setof text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  step text;
begin
  foreach step in array steps loop
    if not dry_run then
      begin
        execute step;
      exception when duplicate_object or unique_violation then
        -- Another database of this server is being isolated, and made the role just now.
        if step not like 'create role %' then
          raise;
        end if;
      end;
    end if;
    return next step;
  end loop;
end $$;

-- Make the roles, give them their rights and nobody else any, and let tenants who log in see their own rows only. May be run again
-- and again; a migration does, where it is on. Answers with the statements; `dry_run` runs none.
create or replace function posthouse.isolate(dry_run boolean default false) returns setof text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return query select posthouse.run_steps(array(select posthouse.isolation_steps()), dry_run);
end $$;

-- The way back: everything is as before, but for the roles, which stay without rights.
create or replace function posthouse.end_isolation(dry_run boolean default false) returns setof text
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  return query select posthouse.run_steps(array(select posthouse.isolation_end_steps()), dry_run);
end $$;
