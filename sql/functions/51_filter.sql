-- Which jobs something is done to: a filter as JSON, and the batches of jobs that it names.

-- A filter read and checked. `possible` are the states that jobs may be in for what is to be done, `usual` those that are meant where
-- the filter names none. Raises PH001 for a filter without a condition that does not say {"all": true}: nobody means that by chance.
create or replace function posthouse.parse_filter(filter jsonb, possible text[], usual text[]) returns posthouse.job_filter
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  f posthouse.job_filter;
  field text;
  value jsonb;
  fields constant text[] := '{ids,state,queue,kind,tenant,class,error,created_since,created_before,failed_since,failed_before,all}';
begin
  if filter is null or jsonb_typeof(filter) <> 'object' then
    raise exception using errcode = 'PH001', message = 'filter: must be a JSON object, such as {"queue": "mail", "class": "timeout"}';
  end if;
  for field, value in select e.key, e.value from jsonb_each(filter) e where e.value <> 'null' loop
    if field <> all(fields) then
      raise exception using errcode = 'PH001', message = format('filter: unknown field %s', quote_ident(field)),
        hint = format('The fields are: %s.', array_to_string(fields, ', '));
    end if;
    begin
      if jsonb_typeof(value) <> all(case field when 'ids' then '{array}' when 'state' then '{array,string}' when 'all' then '{boolean}'
                                    else '{string}' end::text[]) then
        raise exception using errcode = 'PH001', message = format('must not be a JSON %s', jsonb_typeof(value));
      end if;
      case field
        when 'ids' then f.ids := array(select distinct e::bigint from jsonb_array_elements_text(value) e order by 1);
        when 'state' then f.states := case jsonb_typeof(value) when 'array' then array(select jsonb_array_elements_text(value)) else array[value #>> '{}'] end;
        when 'all' then null;
        else f := jsonb_populate_record(f, jsonb_build_object(field, value));
      end case;
    exception when others then
      raise exception using errcode = 'PH001', message = format('filter: %s: %s', field, sqlerrm);
    end;
  end loop;
  if num_nulls(variadic array[f.ids::text, f.states::text, f.queue, f.kind, f.tenant, f.class, f.error, f.created_since::text,
       f.created_before::text, f.failed_since::text, f.failed_before::text]) = 11 and filter -> 'all' is distinct from 'true' then
    raise exception using errcode = 'PH001', message = 'filter: names no condition, so it would mean every job there is',
      hint = 'Name some (ids, queue, kind, tenant, class, …), or say {"all": true}.';
  elsif cardinality(f.ids) > 10000 then
    raise exception using errcode = 'PH001', message = format('filter: ids: %s of them, at most 10000 are allowed', cardinality(f.ids));
  elsif not f.states <@ possible then
    raise exception using errcode = 'PH001', message = format('filter: state: %s is not possible here',
        array_to_string(array(select s from unnest(f.states) s where s <> all(possible)), ', ')),
      hint = format('Possible is: %s.', array_to_string(possible, ', '));
  end if;
  f.states := coalesce(f.states, usual);
  return f;
end $$;

-- The size of a batch, or PH001.
create or replace function posthouse.check_batch(max_jobs int) returns int
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
  if (max_jobs between 1 and 10000) is not true then
    raise exception using errcode = 'PH001', message = format('max_jobs: %s is not between 1 and 10000', coalesce(max_jobs::text, 'null')),
      hint = 'Call again with what `next` answered until that is null.';
  end if;
  return max_jobs;
end $$;

-- The next jobs that a filter names, at most `max_jobs`, and where to go on: null: that was all. Live jobs come first, by id, then dead
-- letters, those that failed first before the others, then done and cancelled ones by id. A call looks at a bounded number of jobs,
-- so it may answer with few, or none, though there are more.
--
-- Planned with the values of the call: conditions that are not asked for, and homes whose turn it is not, are no part of the plan.
create or replace function posthouse.pick_jobs(f posthouse.job_filter, max_jobs int, after jsonb, out ids bigint[], out next jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_custom_plan
set jit = off
as $$
declare
  -- Where jobs in the states that are asked for may be.
  homes text[] := case when f.states && '{queued,running,waiting}' then '{job}'::text[] else '{}' end
    || case when 'failed' = any(f.states) then '{dead_letter}'::text[] else '{}' end
    || case when f.states && '{done,cancelled}' then '{archive,tombstone}'::text[] else '{}' end;
  home text := coalesce(after ->> 'home', homes[1]);
  from_id bigint := coalesce((after ->> 'id')::bigint, 0);
  from_at timestamptz := coalesce((after ->> 'at')::timestamptz, '-infinity');
  -- Jobs that are enqueued, or fail, while somebody goes from batch to batch are not meant.
  up_to bigint := coalesce((after ->> 'up_to')::bigint, pg_sequence_last_value('posthouse.job_id_seq'), 0);
  until timestamptz := coalesce((after ->> 'until')::timestamptz, clock_timestamp());
  by_error boolean := num_nonnulls(f.class, f.error, f.failed_since, f.failed_before) > 0;
  by_lane boolean := num_nonnulls(f.queue, f.kind, f.tenant) > 0;
  max_seen int := 2 * max_jobs + 1000;
  n_seen int;
  last_at timestamptz;
  last_id bigint;
begin
  if home <> all(homes) then
    raise exception using errcode = 'PH001', message = 'after: is not what `next` of the call before answered';
  end if;
  loop
    with seen as materialized (
      (select null::timestamptz as at, j.id, j.state::text as state, j.lane_id, j.created_at, e.class, e.error, e.ended_at as failed_at
       from posthouse.job j
       left join lateral (
         select a.class, a.error, a.ended_at from posthouse.attempt a
         where by_error and j.errors > 0 and a.job_id = j.id order by a.fence desc limit 1) e on true
       where home = 'job' and j.id > from_id and j.id <= up_to and (f.ids is null or j.id = any(f.ids)) order by j.id limit max_seen)
      union all
      (select d.failed_at, d.id, 'failed', d.lane_id, d.created_at, d.class, d.error, d.failed_at
       from posthouse.dead_letter d
       where home = 'dead_letter' and (d.failed_at, d.id) > (from_at, from_id) and d.failed_at <= until and (f.ids is null or d.id = any(f.ids))
         and (f.failed_since is null or d.failed_at >= f.failed_since) and (f.failed_before is null or d.failed_at < f.failed_before)
       order by d.failed_at, d.id limit max_seen)
      union all
      (select null, a.id, a.state::text, a.lane_id, a.created_at, a.errors -> -1 ->> 'class', a.errors -> -1 ->> 'error',
         (a.errors -> -1 ->> 'ended_at')::timestamptz
       from posthouse.archive a where home = 'archive' and a.id > from_id and a.id <= up_to and (f.ids is null or a.id = any(f.ids)) order by a.id limit max_seen)
      union all
      (select null, t.id, t.state::text, t.lane_id, t.created_at, null, null, null
       from posthouse.tombstone t where home = 'tombstone' and t.id > from_id and t.id <= up_to and (f.ids is null or t.id = any(f.ids)) order by t.id limit max_seen)
    ), fit as (
      select s.at, s.id, row_number() over (order by s.at, s.id) as place from seen s
      where s.state = any(f.states)
        and (not by_lane or (
          select true from posthouse.lane l where l.id = s.lane_id and (f.queue is null or l.queue = f.queue)
            and (f.kind is null or l.kind = f.kind) and (f.tenant is null or l.tenant = f.tenant)))
        and (f.created_since is null or s.created_at >= f.created_since) and (f.created_before is null or s.created_at < f.created_before)
        and (f.class is null or s.class = f.class) and (f.error is null or strpos(lower(s.error), lower(f.error)) > 0)
        and (f.failed_since is null or s.failed_at >= f.failed_since) and (f.failed_before is null or s.failed_at < f.failed_before)
    )
    select (select count(*) from seen), (select array_agg(x.id order by x.place) from fit x where x.place <= max_jobs), l.at, l.id
    into n_seen, ids, last_at, last_id
    from (
      -- Where to go on: behind the last that is taken, or, if all that fit are, behind the last that was looked at.
      (select 1 as rank, x.at, x.id from fit x where x.place = max_jobs)
      union all
      (select 2, s.at, s.id from seen s order by s.at desc, s.id desc limit 1)) l
    order by l.rank limit 1;
    if cardinality(ids) = max_jobs or n_seen = max_seen then
      next := jsonb_strip_nulls(jsonb_build_object('home', home, 'id', last_id, 'at', last_at, 'up_to', up_to, 'until', until));
      exit;
    end if;
    home := homes[array_position(homes, home) + 1];
    from_id := 0;
    exit when home is null;
    if ids is not null then
      next := jsonb_build_object('home', home, 'up_to', up_to, 'until', until);
      exit;
    end if;
  end loop;
  ids := coalesce(ids, '{}');
end $$;

-- The next jobs that a filter names: ids, at most `max_jobs`, and where to go on with `after` (null: that was all). A filter is a JSON
-- object; all of its conditions must hold:
--   ids                            [42, 43, …], at most 10,000
--   state                          one, or a list
--   queue, kind, tenant
--   class, error                   of the newest error: its class; a part of its text, in capitals or not
--   failed_since, failed_before    when the newest error came
--   created_since, created_before  when the job was enqueued
--   all                            true: the filter may be without conditions
-- What works on many jobs answers with how many it changed, how many somebody else was busy with (call again for those), up to as many
-- as the batch that it refused, as [{"id", "error"}], and `next`, to be passed as `after`.
create or replace function posthouse.find_jobs(filter jsonb, max_jobs int default 10000, after jsonb default null, out ids bigint[], out next jsonb)
language plpgsql stable
set search_path = pg_catalog, pg_temp
as $$
declare
  states constant text[] := '{queued,running,waiting,done,failed,cancelled}';
begin
  select p.ids, p.next into ids, next from posthouse.pick_jobs(posthouse.parse_filter(filter, states, states), posthouse.check_batch(max_jobs), after) p;
end $$;
