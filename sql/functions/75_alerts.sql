-- Alerts: raised by anybody, added up and told by the sweep. Told means: a notification on channel posthouse_alert, a job of kind
-- posthouse.webhook where that is on, and the answer of posthouse.tidy(), which workers write into their logs.
--
-- What is about the webhook's own jobs is never told by the webhook, or a broken one would tell of itself for ever.

-- A text of one line that fits into a notification.
create or replace function posthouse.alert_text(value text, most int) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select case
    when octet_length(value) <= most then regexp_replace(value, '[[:cntrl:]]+', ' ', 'g')
    else regexp_replace(left(value, most / 4 - 10), '[[:cntrl:]]+', ' ', 'g') || '…' || to_hex(hashtextextended(value, 0)) end
$$;

-- Raise an alert about a subject, such as the name of a gate. The message is for people and must hold neither payloads nor secrets,
-- and so must the detail. It is told within some seconds, unless the subject's quiet time is not over. Never fails, never waits, and
-- is undone if the caller's transaction is. False: alerts of this kind are turned off, or it could not be noted (a warning says why).
create or replace function posthouse.raise_alert(kind text, subject text, message text, detail jsonb default '{}') returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (select from posthouse.alert_rule r where r.kind = raise_alert.kind and r.queue = '' and not r.enabled) then
    return false;
  end if;
  insert into posthouse.alert_note (kind, subject, text, detail, raised_at, resolves)
  values (posthouse.alert_text(coalesce(nullif(raise_alert.kind, ''), 'other'), 200),
    posthouse.alert_text(coalesce(raise_alert.subject, ''), 1000), posthouse.alert_text(coalesce(message, ''), 1600),
    case when octet_length(raise_alert.detail::text) > 2000 then '{"truncated": true}' else coalesce(raise_alert.detail, '{}') end,
    clock_timestamp(), false);
  return true;
exception when others then
  raise warning 'posthouse: the alert % about % could not be noted: %', kind, subject, sqlerrm;
  return false;
end $$;

-- Say that what an alert was about is over. Never fails, never waits.
create or replace function posthouse.resolve_alert(kind text, subject text) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  insert into posthouse.alert_note (kind, subject, text, detail, raised_at, resolves)
  values (posthouse.alert_text(kind, 200), posthouse.alert_text(coalesce(resolve_alert.subject, ''), 1000), '', '{}', clock_timestamp(), true);
exception when others then
  raise warning 'posthouse: that the alert % about % is over could not be noted: %', kind, subject, sqlerrm;
end $$;

-- Add notes up: `n` times since the last sweep, or the end of it. What was over not long ago, and told within its quiet time, goes on.
-- Beyond a hundred open alerts of a kind, further subjects are counted together as '*'.
create or replace function posthouse.fold_alert(kind text, subject text, message text, detail jsonb, n bigint,
  first_at timestamptz, last_at timestamptz, resolves boolean) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  a posthouse.alert;
begin
  select x.* into a from posthouse.alert x where x.kind = fold_alert.kind and x.subject = fold_alert.subject order by x.id desc limit 1;
  if n > 0 then
    if a.id is not null and (a.resolved_at is null or a.told_at > clock_timestamp() - posthouse.quiet_of(kind)) then
      update posthouse.alert x set text = fold_alert.message, detail = fold_alert.detail, count = x.count + n,
        last_at = fold_alert.last_at, resolved_at = null where x.id = a.id;
    elsif subject <> '*' and (select count(*) from posthouse.alert x where x.kind = fold_alert.kind and x.resolved_at is null) >= 100 then
      perform posthouse.fold_alert(kind, '*', message, detail, n, first_at, last_at, false);
      return;
    else
      insert into posthouse.alert (kind, subject, text, detail, count, raised_at, last_at)
      values (fold_alert.kind, fold_alert.subject, fold_alert.message, fold_alert.detail, n, first_at, fold_alert.last_at);
    end if;
  end if;
  if resolves then
    update posthouse.alert x set resolved_at = clock_timestamp()
    where x.kind = fold_alert.kind and x.subject = fold_alert.subject and x.resolved_at is null;
  end if;
end $$;

-- The quiet time of a kind of alerts.
create or replace function posthouse.quiet_of(kind text) returns interval
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select coalesce((select r.quiet from posthouse.alert_rule r where r.kind = quiet_of.kind and r.queue = ''), interval '5 minutes')
$$;

-- Whether a message would go to the webhook about the webhook.
create or replace function posthouse.is_about_webhook(a posthouse.alert) returns boolean
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
  select coalesce(a.detail ->> 'queue' = 'posthouse' or a.detail ->> 'kind' = 'posthouse.webhook', false)
    or a.subject in ('queue:posthouse', 'tenant:posthouse', 'kind:posthouse.webhook')
$$;

-- Tell of an alert: the message is the notification, the body of the webhook, and what is logged.
create or replace function posthouse.tell_alert(a posthouse.alert, out message jsonb, out job bigint)
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  form text := 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"';
begin
  message := jsonb_build_object('type', a.kind, 'timestamp', to_char(clock_timestamp() at time zone 'UTC', form),
    'data', jsonb_build_object('alert', a.id, 'subject', a.subject, 'text', a.text, 'detail', a.detail, 'count', a.count,
      'new', a.count - a.told, 'raised_at', to_char(a.raised_at at time zone 'UTC', form),
      'last_at', to_char(a.last_at at time zone 'UTC', form)));
  update posthouse.alert x set told = a.count, told_at = clock_timestamp() where x.id = a.id;
  -- Everybody who can connect can listen: where tenants log in, they are not told whose jobs it is about.
  perform pg_notify('posthouse_alert', case when posthouse.is_isolated()
    then jsonb_set(message, '{data}', jsonb_build_object('alert', a.id)) else message end::text);
  if not posthouse.is_about_webhook(a) and (select w.enabled from posthouse.alert_webhook w) then
    -- The webhook's id is that of the message, whatever attempt delivers it.
    select e.id into job from posthouse.enqueue(kind => 'posthouse.webhook', queue => 'posthouse', tenant => 'posthouse',
      priority => -100, payload => jsonb_build_object('webhook_id', 'alert_' || gen_random_uuid(), 'body', message), max_attempts => 10) e;
  end if;
end $$;

-- Add up the dead letters since the last sweep, by queue, kind and class: about ten thousand of them at most. As with the floors of
-- lanes, the end stops at the oldest open transaction that may still commit some, at most half a minute back. The clock is read before
-- those are looked for: one that begins after that writes later times.
create or replace function posthouse.fold_dead_letters() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  begin_at timestamptz := (select s.floor_at from posthouse.sweep s where s.name = 'alerts');
  end_at timestamptz := clock_timestamp();
  full_at timestamptz;
  d record;
begin
  end_at := greatest(least(end_at, posthouse.oldest_writer()), end_at - interval '30 seconds');
  select x.failed_at into full_at from posthouse.dead_letter x
  where x.failed_at > begin_at and x.failed_at <= end_at order by x.failed_at offset 9999 limit 1;
  end_at := coalesce(full_at, end_at);
  if end_at > begin_at then
    for d in
      select l.queue, l.kind, x.class, sum(x.n)::bigint as n, min(x.first_at) as first_at, max(x.last_at) as last_at, max(x.job) as job
      from (
        select f.lane_id, f.class, count(*) as n, min(f.failed_at) as first_at, max(f.failed_at) as last_at, max(f.id) as job
        from posthouse.dead_letter f where f.failed_at > begin_at and f.failed_at <= end_at
        group by f.lane_id, f.class offset 0) x
      cross join lateral (select l.queue, l.kind from posthouse.lane l where l.id = x.lane_id offset 0) l
      where coalesce((select r.enabled from posthouse.alert_rule r where r.kind = 'dead_letter' and r.queue = ''), true)
      group by l.queue, l.kind, x.class
    loop
      perform posthouse.fold_alert('dead_letter', posthouse.alert_text(format('%s/%s/%s', d.queue, d.kind, d.class), 1000),
        posthouse.alert_text(format('jobs of kind %s on queue %s failed for good, with errors of class %s; one is job %s',
          d.kind, d.queue, d.class, d.job), 1600),
        jsonb_build_object('queue', d.queue, 'kind', d.kind, 'class', d.class, 'job', d.job), d.n, d.first_at, d.last_at, false);
    end loop;
    update posthouse.sweep s set floor_at = end_at where s.name = 'alerts';
  end if;
end $$;

-- Add up what was raised, and tell of what is due. Answers with the messages.
create or replace function posthouse.tell_alerts() returns jsonb
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  n record;
  a posthouse.alert;
  messages jsonb := '[]';
begin
  perform posthouse.fold_dead_letters();
  for n in
    with gone as (
      delete from posthouse.alert_note x where x.ctid = any(array(select y.ctid from posthouse.alert_note y limit 10000)) returning x.*
    )
    select g.kind, g.subject, count(*) filter (where not g.resolves) as n, min(g.raised_at) as first_at, max(g.raised_at) as last_at,
      (array_agg(g.text order by g.raised_at desc) filter (where not g.resolves))[1] as text,
      (array_agg(g.detail order by g.raised_at desc) filter (where not g.resolves))[1] as detail,
      (array_agg(g.resolves order by g.raised_at desc))[1] as resolves
    from gone g group by g.kind, g.subject order by 4
  loop
    perform posthouse.fold_alert(n.kind, n.subject, n.text, n.detail, n.n, n.first_at, n.last_at, n.resolves);
  end loop;
  for a in
    select x.* from posthouse.alert x
    where x.resolved_at is null and x.count > x.told
      and (x.told_at is null or x.told_at <= clock_timestamp() - posthouse.quiet_of(x.kind))
    order by x.id limit 100
  loop
    begin
      messages := messages || (select t.message from posthouse.tell_alert(a) t);
    exception when others then
      raise warning 'posthouse: the alert % about % could not be told and comes again: %', a.kind, a.subject, sqlerrm;
    end;
  end loop;
  return messages;
end $$;

-- These subjects, and no others, are in the state that a kind of alerts is about. A hundred are told apart. One that stays so is
-- raised again when its quiet time is over.
create or replace function posthouse.hold_alerts(kind text, subjects text[], texts text[], details jsonb[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  others int := cardinality(subjects) - 100;
  quiet interval := posthouse.quiet_of(kind);
begin
  subjects := array(select posthouse.alert_text(s.subject, 1000) from unnest(subjects[1:100]) with ordinality s(subject, place) order by s.place);
  if others > 0 then
    subjects[101] := '*';
    texts[101] := format('the same of %s others', others);
    details[101] := jsonb_build_object('others', others);
  end if;
  perform posthouse.raise_alert(kind, s.subject, s.message, s.detail)
  from unnest(subjects, texts[1:101], details[1:101]) s(subject, message, detail)
  where not exists (
    select from posthouse.alert a
    where a.kind = hold_alerts.kind and a.subject = s.subject and a.resolved_at is null and a.last_at > clock_timestamp() - quiet);
  update posthouse.alert a set resolved_at = clock_timestamp()
  where a.kind = hold_alerts.kind and a.resolved_at is null and a.subject <> all(subjects);
end $$;

-- Find kinds with due jobs that no live worker serves. Visits awake lanes, and jobs of lanes without a worker only.
create or replace function posthouse.watch_workers() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  old_at timestamptz := clock_timestamp() - coalesce(
    (select r.after from posthouse.alert_rule r where r.kind = 'no_worker' and r.queue = '' and r.enabled), interval '1 minute');
  found record;
begin
  with live as materialized (
    select distinct w.queues, w.kinds from posthouse.worker w where w.dead_at is null and posthouse.lease_end(w) > clock_timestamp()
  ), awake as materialized (
    select l.id, l.queue, l.kind from posthouse.lane l where l.ready_at < 'infinity' and l.ready_at <= clock_timestamp()
  ), unserved as materialized (
    select p.queue, p.kind from (select distinct a.queue, a.kind from awake a) p
    where not exists (select from live v where p.queue = any(v.queues) and p.kind = any(v.kinds))
  ), oldest as materialized (
    select distinct on (a.queue, a.kind) a.queue, a.kind, j.id, j.run_at
    from unserved u
    join awake a on a.queue = u.queue and a.kind = u.kind
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = a.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select j.id, j.run_at from posthouse.job j
      where j.lane_id = a.id and j.state = 'queued' and j.run_at <= old_at and j.run_at >= f.floor_at
      order by j.lane_id, j.run_at, j.id limit 1) j
    order by a.queue, a.kind, j.run_at
  )
  select array_agg(o.queue || '/' || o.kind order by o.queue, o.kind) as subjects,
    array_agg(format('no live worker serves kind %s on queue %s; job %s has waited since %s',
      o.kind, o.queue, o.id, date_trunc('second', o.run_at)) order by o.queue, o.kind) as texts,
    array_agg(jsonb_build_object('queue', o.queue, 'kind', o.kind, 'job', o.id, 'due_at', o.run_at) order by o.queue, o.kind) as details
  into found from oldest o;
  perform posthouse.hold_alerts('no_worker', coalesce(found.subjects, '{}'), found.texts, found.details);
end $$;

-- Find queues whose oldest due job has waited for too long: for a free slot or within a limit, not for a closed gate. Visits lanes that
-- are awake or wait for a gate, and one job of each whose floor lies as far back.
create or replace function posthouse.watch_age() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  rule posthouse.alert_rule;
  found record;
begin
  select r.* into rule from posthouse.alert_rule r where r.kind = 'oldest_due' and r.queue = '';
  with awake as materialized (
    select l.id, l.queue from posthouse.lane l
    where l.ready_at < 'infinity' and (l.ready_at <= clock_timestamp() or (l.blocked_by is not null
      and not exists (select from posthouse.gate g where g.id = l.blocked_by and g.closed_until > clock_timestamp())))
  ), bound as materialized (
    select q.queue, clock_timestamp() - coalesce(r.after, rule.after, interval '15 minutes') as old_at
    from (select distinct a.queue from awake a) q
    left join posthouse.alert_rule r on r.kind = 'oldest_due' and r.queue = q.queue
    where coalesce(r.enabled, true)
  ), oldest as materialized (
    select distinct on (a.queue) a.queue, j.id, j.run_at
    from awake a join bound b on b.queue = a.queue
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = a.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select j.id, j.run_at from posthouse.job j
      where j.lane_id = a.id and j.state = 'queued' and j.run_at <= b.old_at and j.run_at >= f.floor_at
      order by j.lane_id, j.run_at, j.id limit 1) j
    order by a.queue, j.run_at
  )
  select array_agg(o.queue order by o.queue) as subjects,
    array_agg(format('the oldest due job of queue %s, job %s, has waited since %s', o.queue, o.id, date_trunc('second', o.run_at))
      order by o.queue) as texts,
    array_agg(jsonb_build_object('queue', o.queue, 'job', o.id, 'due_at', o.run_at) order by o.queue) as details
  into found from oldest o;
  perform posthouse.hold_alerts('oldest_due', coalesce(found.subjects, '{}'), found.texts, found.details);
end $$;

-- Look for what is worth an alert and raises none by itself, and close alerts: of gates that are open again, of other kinds after an
-- hour without news. They are kept for 30 days.
create or replace function posthouse.watch() returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  perform posthouse.watch_workers(), posthouse.watch_age();
  update posthouse.alert a set resolved_at = clock_timestamp()
  where a.resolved_at is null and a.kind <> all(array['no_worker', 'oldest_due', 'gate_quota'])
    and a.last_at < clock_timestamp() - interval '1 hour' and a.told = a.count;
  update posthouse.alert a set resolved_at = clock_timestamp()
  where a.resolved_at is null and a.kind = 'gate_quota' and a.told = a.count
    and not exists (select from posthouse.gate g where g.name = a.subject and g.closed_by = 'quota' and g.closed_until > clock_timestamp());
  delete from posthouse.alert a where a.id in (
    select x.id from posthouse.alert x where x.resolved_at < clock_timestamp() - interval '30 days' limit 1000);
end $$;

-- Set how a kind of alerts is raised and told; what is null stays as it is. `quiet` is the least time between two messages about one
-- subject; `after` is how old a due job must be, for no_worker and oldest_due. With a queue, for oldest_due only: what holds for that
-- one, `after` zero being what holds for all.
create or replace function posthouse.set_alert(kind text, enabled boolean default null, quiet interval default null,
  after interval default null, queue text default null) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  complaint text;
begin
  perform posthouse.check_name('kind', kind);
  if set_alert.queue is not null then
    perform posthouse.check_name('queue', set_alert.queue);
  end if;
  complaint := case
    when set_alert.queue is not null and kind <> 'oldest_due' then 'queue: only alerts of kind oldest_due can be set for one queue'
    when set_alert.queue is not null and quiet is not null then 'quiet: is one for all queues'
    when after is not null and kind not in ('no_worker', 'oldest_due') then 'after: is for alerts of kind no_worker and oldest_due'
    when quiet not between interval '0' and interval '30 days' then format('quiet: %s is not between 0 and 30 days', quiet)
    when after = interval '0' and set_alert.queue is not null then null
    when after not between interval '1 second' and interval '365 days' then format('after: %s is not between 1 second and 365 days', after)
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  insert into posthouse.alert_rule as r (kind, queue, enabled, quiet, after)
  values (set_alert.kind, coalesce(set_alert.queue, ''), coalesce(set_alert.enabled, true), set_alert.quiet, nullif(set_alert.after, '0'))
  on conflict on constraint alert_rule_pkey do update set enabled = coalesce(set_alert.enabled, r.enabled),
    quiet = coalesce(set_alert.quiet, r.quiet),
    after = case when set_alert.after = '0' then null else coalesce(set_alert.after, r.after) end;
  delete from posthouse.alert_rule r where r.kind = set_alert.kind and r.queue <> '' and r.enabled and r.after is null;
end $$;

-- Turn the webhook on or off: whether alerts become jobs of kind posthouse.webhook on queue posthouse. Workers that are told of a
-- webhook in posthouse.toml turn it on when they start; one that answers 410 Gone is turned off.
create or replace function posthouse.set_webhook(enabled boolean, reason text default null) returns void
language sql
set search_path = pg_catalog, pg_temp
as $$
  update posthouse.alert_webhook w set enabled = coalesce(set_webhook.enabled, w.enabled), reason = left(set_webhook.reason, 500),
    changed_at = clock_timestamp()
$$;

-- Whether the webhook is on, and if not, why.
create or replace function posthouse.webhook() returns table (enabled boolean, reason text, changed_at timestamptz)
language sql stable
set search_path = pg_catalog, pg_temp
as $$
  select w.enabled, w.reason, w.changed_at from posthouse.alert_webhook w
$$;

-- Tell an alert of kind `test` at once. Answers with the webhook's job; null where the webhook is off.
create or replace function posthouse.test_alert() returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
declare
  a posthouse.alert;
begin
  insert into posthouse.alert (kind, subject, text, detail, count, raised_at, last_at, resolved_at)
  values ('test', 'test', 'this is a test: alerts of this database arrive here', '{}', 1, clock_timestamp(), clock_timestamp(), clock_timestamp())
  returning * into a;
  return (select t.job from posthouse.tell_alert(a) t);
end $$;

-- Alerts of the last 30 days; open ones have no resolved_at.
create or replace view posthouse.alerts as
  select a.id, a.kind, a.subject, a.text, a.detail, a.count, a.raised_at, a.last_at, a.told_at, a.resolved_at from posthouse.alert a;

-- What is set for alerts.
create or replace view posthouse.alert_rules as
  select r.kind, nullif(r.queue, '') as queue, r.enabled, r.quiet, r.after from posthouse.alert_rule r;
