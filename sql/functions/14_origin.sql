-- Origin: a database that is a copy of another does not start work that costs money until somebody says that it shall.
--
-- The first worker that registers stamps the database with what a copy does not share. pg_dump and restore make tables with other object
-- ids, `create database … template` a database with another one. An upgrade by pg_upgrade keeps both (and changes the system
-- identifier, together with the major version); a standby that takes over keeps all. So does every other copy of the files, such as
-- a base backup or a snapshot of a disk, which nobody can tell from a failover: who makes one on purpose says so with
-- posthouse.disown().

-- What a copy of this database would have otherwise.
create or replace function posthouse.origin_now() returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
declare
  server bigint;
begin
  begin
    select c.system_identifier into server from pg_control_system() c;
  exception when insufficient_privilege or undefined_function or feature_not_supported then
    -- Some hosts do not let it be read. The rest tells most copies.
    server := null;
  end;
  return jsonb_build_object('server', server::text, 'database', (select d.oid from pg_database d where d.datname = current_database())::text,
    'table', 'posthouse.meta'::regclass::oid::text, 'major', current_setting('server_version_num')::int / 10000);
end $$;

-- Why a database with this stamp is a copy; null: it is none, as far as can be told.
create or replace function posthouse.copy_reason(stamped jsonb, here jsonb) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select case
    when stamped ? 'disowned' then format('somebody said at %s that it is a copy', stamped ->> 'disowned')
    when stamped ->> 'database' <> here ->> 'database' and stamped ->> 'table' = here ->> 'table'
      then 'it was made from another database as its template'
    when stamped ->> 'table' <> here ->> 'table' then 'it was restored from a dump'
    when stamped ->> 'database' <> here ->> 'database' then 'it is not the database that its first worker saw'
    when stamped ->> 'server' <> here ->> 'server' and stamped ->> 'major' = here ->> 'major' then 'it is on another server'
  end
$$;

-- Whether this database is a copy of another, and why; what it was stamped with (null: no worker has been there yet), and what it would be stamped with now.
create or replace function posthouse.origin(out is_copy boolean, out reason text, out stamped jsonb, out here jsonb)
language plpgsql volatile
set search_path = pg_catalog, pg_temp
as $$
begin
  here := posthouse.origin_now();
  stamped := (select m.value::jsonb from posthouse.meta m where m.name = 'origin');
  reason := posthouse.copy_reason(stamped, here);
  is_copy := reason is not null;
end $$;

-- Stamp a database that has no stamp yet. Raise PH011 where it is a copy.
create or replace function posthouse.check_origin() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  o record;
begin
  select x.* into o from posthouse.origin() x;
  if o.stamped is null then
    insert into posthouse.meta (name, value) values ('origin', (o.here || jsonb_build_object('stamped', clock_timestamp()))::text)
    on conflict do nothing;
  elsif o.is_copy then
    raise exception using errcode = 'PH011',
      message = format('this database is a copy of another (%s), so no worker may run its jobs yet: the other one may run them too', o.reason),
      hint = 'See what is queued, and confirm that it shall run here, with: posthouse db adopt (or select posthouse.adopt())';
  end if;
end $$;

-- Say that the jobs of this database shall run here, though it is a copy. False: it was none.
create or replace function posthouse.adopt() returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  o record;
begin
  select x.* into o from posthouse.origin() x;
  if not o.is_copy then
    return false;
  end if;
  update posthouse.meta m set value = (o.here || jsonb_build_object('stamped', clock_timestamp()))::text where m.name = 'origin';
  return true;
end $$;

-- Say that this database is a copy, made in a way that cannot be seen: no worker registers until posthouse.adopt(). Those that are registered
-- go on.
create or replace function posthouse.disown() returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  insert into posthouse.meta (name, value)
  values ('origin', (posthouse.origin_now() || jsonb_build_object('disowned', clock_timestamp()))::text)
  on conflict (name) do update set value = (meta.value::jsonb || jsonb_build_object('disowned', clock_timestamp()))::text
$$;
