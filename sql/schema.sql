-- The whole schema, as the migrations, functions and views make it. Generated from the catalogue of a migrated database by
--     POSTHOUSE_BLESS=1 cargo test --features testing --test it core::schema::the_dump
-- and not to be edited; a test proves that it is up to date. Partitions are left out: they are made as ids grow.

create type posthouse.job_state as enum ('queued', 'running', 'waiting', 'done', 'failed', 'cancelled');

create table posthouse.alert (
  id bigint generated always as identity not null,
  kind text not null,
  subject text not null,
  text text not null,
  detail jsonb not null,
  count bigint not null,
  told bigint not null default 0,
  raised_at timestamp with time zone not null,
  last_at timestamp with time zone not null,
  told_at timestamp with time zone,
  resolved_at timestamp with time zone,
  constraint alert_pkey PRIMARY KEY (id)
) with (fillfactor=50);
CREATE UNIQUE INDEX alert_open ON posthouse.alert USING btree (kind, subject) WHERE (resolved_at IS NULL);
CREATE INDEX alert_subject ON posthouse.alert USING btree (kind, subject, id);

create table posthouse.alert_note (
  kind text not null,
  subject text not null,
  text text not null,
  detail jsonb not null,
  raised_at timestamp with time zone not null,
  resolves boolean not null
);

create table posthouse.alert_rule (
  kind text not null,
  queue text not null,
  enabled boolean not null default true,
  quiet interval,
  after interval,
  constraint alert_rule_pkey PRIMARY KEY (kind, queue)
);

create table posthouse.alert_webhook (
  single boolean not null default true,
  enabled boolean not null,
  reason text,
  changed_at timestamp with time zone not null,
  constraint alert_webhook_pkey PRIMARY KEY (single),
  constraint alert_webhook_single_check CHECK (single)
);

create table posthouse.archive (
  id bigint not null,
  lane_id bigint not null,
  created_at timestamp with time zone not null,
  started_at timestamp with time zone,
  finished_at timestamp with time zone not null,
  worker uuid,
  timeout_ms bigint,
  fence integer not null,
  attempt integer not null,
  max_attempts integer not null,
  state posthouse.job_state not null,
  flags text[],
  result jsonb,
  usage jsonb,
  errors jsonb,
  tokens integer,
  constraint archive_pkey PRIMARY KEY (id)
) partition by RANGE (id);

create table posthouse.attempt (
  job_id bigint not null,
  fence integer not null,
  attempt integer not null,
  worker uuid,
  host text,
  started_at timestamp with time zone,
  ended_at timestamp with time zone not null,
  class text not null,
  error text not null,
  detail jsonb,
  usage jsonb,
  constraint attempt_pkey PRIMARY KEY (job_id, fence)
);

create table posthouse.burial (
  buried_at timestamp with time zone not null,
  jobs integer not null,
  job_ids bigint[] not null
);
CREATE INDEX burial_time ON posthouse.burial USING btree (buried_at);

create table posthouse.claimed (
  worker uuid not null,
  seq bigint not null,
  claimed_at timestamp with time zone not null,
  job_ids bigint[] not null,
  fences integer[] not null,
  constraint claimed_pkey PRIMARY KEY (worker, seq)
);

create table posthouse.dead_letter (
  id bigint not null,
  lane_id bigint not null,
  created_at timestamp with time zone not null,
  started_at timestamp with time zone,
  failed_at timestamp with time zone not null,
  worker uuid,
  timeout_ms bigint,
  fence integer not null,
  attempt integer not null,
  max_attempts integer not null,
  class text not null,
  error text not null,
  usage jsonb,
  errors jsonb not null,
  tokens integer,
  constraint dead_letter_pkey PRIMARY KEY (id)
);
CREATE INDEX dead_letter_failed ON posthouse.dead_letter USING btree (failed_at, id);
CREATE INDEX dead_letter_group ON posthouse.dead_letter USING btree (lane_id, class, failed_at, id);

create table posthouse.dedupe (
  tenant text not null,
  scope text not null,
  key text not null,
  job_id bigint not null,
  expires_at timestamp with time zone,
  next_id bigint,
  next_at timestamp with time zone,
  body bytea,
  constraint dedupe_pkey PRIMARY KEY (tenant, scope, key)
);
CREATE INDEX dedupe_expires ON posthouse.dedupe USING btree (expires_at) WHERE (expires_at IS NOT NULL);
CREATE INDEX dedupe_job ON posthouse.dedupe USING btree (job_id);
CREATE INDEX dedupe_next ON posthouse.dedupe USING btree (job_id) WHERE (next_id IS NOT NULL);

create table posthouse.depth_count (
  scope text not null,
  name text not null,
  counted_at timestamp with time zone not null,
  jobs bigint not null,
  constraint depth_count_pkey PRIMARY KEY (scope, name, counted_at)
);

create table posthouse.depth_limit (
  scope text not null,
  name text not null,
  max_depth integer not null,
  constraint depth_limit_pkey PRIMARY KEY (scope, name),
  constraint depth_limit_scope_check CHECK ((scope = ANY (ARRAY['queue'::text, 'tenant'::text])))
);

create table posthouse.detached (
  name text not null,
  lower bigint not null,
  upper bigint not null,
  constraint detached_pkey PRIMARY KEY (name)
);

create table posthouse.gate (
  id bigint generated always as identity not null,
  name text not null,
  max_running integer,
  requests_per_minute integer,
  tokens_per_minute bigint,
  money_per_day numeric,
  money_per_month numeric,
  when_spent text not null default 'hold'::text,
  warn_at numeric,
  closed_until timestamp with time zone,
  closed_at timestamp with time zone,
  closed_by text,
  closed_reason text,
  strikes integer not null default 0,
  probe_until timestamp with time zone,
  probe_job bigint,
  opened_at timestamp with time zone,
  constraint gate_name_key UNIQUE (name),
  constraint gate_pkey PRIMARY KEY (id)
);
CREATE INDEX gate_instead ON posthouse.gate USING btree (id) WHERE (when_spent ~~ 'model:%'::text);

create table posthouse.gate_state (
  gate_id bigint not null,
  member text not null,
  seq bigint not null,
  job_ids bigint[],
  fences integer[],
  seconds bigint[],
  requests integer[],
  tokens bigint[],
  requests_at timestamp with time zone,
  tokens_at timestamp with time zone,
  month date,
  day date,
  spent_day numeric,
  spent_month numeric,
  constraint gate_state_pkey PRIMARY KEY (gate_id, member, seq)
);

create table posthouse.gauge (
  part text not null,
  counted_at timestamp with time zone not null,
  took_ms double precision not null,
  gauges jsonb not null,
  constraint gauge_pkey PRIMARY KEY (part, counted_at)
);

create table posthouse.id_range (
  lower bigint not null,
  upper bigint not null,
  sliced_to bigint not null,
  spared boolean not null default false,
  constraint id_range_pkey PRIMARY KEY (lower),
  constraint id_range_upper_key UNIQUE (upper)
);

create table posthouse.job (
  id bigint generated by default as identity not null,
  lane_id bigint not null,
  run_at timestamp with time zone not null,
  created_at timestamp with time zone not null,
  started_at timestamp with time zone,
  first_started_at timestamp with time zone,
  worker uuid,
  timeout_ms bigint,
  fence integer not null default 0,
  attempt integer not null default 0,
  max_attempts integer not null,
  errors integer not null default 0,
  state posthouse.job_state not null default 'queued'::posthouse.job_state,
  keyed boolean not null,
  cancel_asked boolean not null default false,
  reason text,
  progress jsonb,
  tokens integer,
  reserved integer,
  instead text,
  admitted bigint[],
  unsure text,
  constraint job_pkey PRIMARY KEY (id)
) with (fillfactor=80, autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_threshold=2000);
CREATE INDEX job_ready ON posthouse.job USING btree (lane_id, run_at, id) WHERE (state = 'queued'::posthouse.job_state);

create table posthouse.kind (
  name text not null,
  gates text[] not null,
  max_output_tokens integer,
  drops_payload boolean not null default false,
  constraint kind_pkey PRIMARY KEY (name)
);
CREATE INDEX kind_drops ON posthouse.kind USING btree (name) WHERE drops_payload;

create table posthouse.lane (
  id bigint generated always as identity not null,
  queue text not null,
  priority integer not null,
  tenant text not null,
  kind text not null,
  ready_at timestamp with time zone not null,
  awake_until timestamp with time zone not null,
  in_use_until timestamp with time zone not null default '-infinity'::timestamp with time zone,
  naps integer not null default 0,
  gates text[] not null default '{}'::text[],
  serial text not null default ''::text,
  blocked_by bigint,
  limited boolean not null default false,
  constraint lane_pkey PRIMARY KEY (id)
) with (fillfactor=30);
CREATE INDEX lane_blocked ON posthouse.lane USING btree (blocked_by, awake_until) WHERE (blocked_by IS NOT NULL);
CREATE INDEX lane_blocked_tenant ON posthouse.lane USING btree (COALESCE(blocked_by, (0)::bigint), tenant) WHERE (COALESCE(blocked_by, (0)::bigint) > 0);
CREATE INDEX lane_limited_queue ON posthouse.lane USING btree (queue) WHERE (limited AND ((ready_at < 'infinity'::timestamp with time zone) OR (blocked_by IS NOT NULL)));
CREATE INDEX lane_limited_tenant ON posthouse.lane USING btree (tenant) WHERE (limited AND ((ready_at < 'infinity'::timestamp with time zone) OR (blocked_by IS NOT NULL)));
CREATE INDEX lane_name ON posthouse.lane USING btree (queue, tenant, serial, kind, priority, gates);
CREATE INDEX lane_ready ON posthouse.lane USING btree (queue, priority, id) INCLUDE (kind, ready_at) WHERE (ready_at < 'infinity'::timestamp with time zone);

create table posthouse.lane_floor (
  lane_id bigint not null,
  seq bigint generated always as identity not null,
  floor_at timestamp with time zone,
  behind boolean not null,
  constraint lane_floor_pkey PRIMARY KEY (lane_id, seq)
);

create table posthouse.meta (
  name text not null,
  value text not null,
  constraint meta_pkey PRIMARY KEY (name)
);

create table posthouse.migration (
  version integer not null,
  name text not null,
  breaking boolean not null,
  applied_at timestamp with time zone not null default clock_timestamp(),
  constraint migration_pkey PRIMARY KEY (version)
);

create table posthouse.payload (
  id bigint not null,
  payload jsonb not null,
  trace jsonb,
  constraint payload_pkey PRIMARY KEY (id)
) partition by RANGE (id);

create table posthouse.queue (
  name text not null,
  retention interval,
  fair_by text not null default 'jobs'::text,
  serial_by text,
  retention_cancelled interval,
  retention_failed interval,
  constraint queue_pkey PRIMARY KEY (name)
);

create table posthouse.redriven (
  job_id bigint not null,
  number integer not null,
  redriven_at timestamp with time zone not null,
  redriven_by text not null,
  state text not null,
  attempt integer not null,
  fence integer not null,
  class text,
  error text,
  changes jsonb not null,
  payload jsonb,
  constraint redriven_pkey PRIMARY KEY (job_id, number)
);
CREATE INDEX redriven_at ON posthouse.redriven USING btree (redriven_at);

create table posthouse.revived (
  id bigint not null,
  constraint revived_pkey PRIMARY KEY (id)
);

create table posthouse.route (
  model text not null,
  endpoints text[] not null,
  constraint route_pkey PRIMARY KEY (model)
);

create table posthouse.schedule (
  name text not null,
  cron text not null,
  timezone text not null,
  job jsonb not null,
  tenant text not null,
  catch_up text not null,
  catch_up_max integer not null,
  catch_up_over interval not null,
  jitter interval not null,
  source text,
  version bigint not null default 1,
  changed_at timestamp with time zone not null,
  paused_at timestamp with time zone,
  paused_reason text,
  since timestamp with time zone not null,
  next_at timestamp with time zone,
  planned_at timestamp with time zone,
  fired bigint not null default 0,
  missed bigint not null default 0,
  last_tick timestamp with time zone,
  last_fired_at timestamp with time zone,
  last_job_id bigint,
  error text,
  error_at timestamp with time zone,
  constraint schedule_catch_up_check CHECK ((catch_up = ANY (ARRAY['skip'::text, 'one'::text, 'all'::text]))),
  constraint schedule_pkey PRIMARY KEY (name)
) with (fillfactor=50);
CREATE INDEX schedule_next ON posthouse.schedule USING btree (COALESCE(next_at, '-infinity'::timestamp with time zone)) WHERE (paused_at IS NULL);
CREATE INDEX schedule_planned ON posthouse.schedule USING btree (planned_at);

create table posthouse.schedule_run (
  schedule text not null,
  tick timestamp with time zone not null,
  job_id bigint not null,
  duplicate boolean not null,
  fired_at timestamp with time zone not null,
  constraint schedule_run_pkey PRIMARY KEY (schedule, tick)
);

create table posthouse.share (
  queue text not null,
  tenant text not null,
  share real not null,
  constraint share_pkey PRIMARY KEY (queue, tenant)
) with (fillfactor=50);

create table posthouse.slice (
  lower bigint not null,
  stale boolean not null default true,
  due_at timestamp with time zone not null default 'infinity'::timestamp with time zone,
  over_at timestamp with time zone not null default 'infinity'::timestamp with time zone,
  takers text[],
  constraint slice_pkey PRIMARY KEY (lower)
) with (fillfactor=50);
CREATE INDEX slice_due ON posthouse.slice USING btree (due_at, lower);
CREATE INDEX slice_open ON posthouse.slice USING btree (lower) WHERE (takers IS NULL);
CREATE INDEX slice_stale ON posthouse.slice USING btree (lower) WHERE stale;

create table posthouse.spare_payload (
  id bigint not null,
  payload jsonb not null,
  trace jsonb,
  constraint spare_payload_pkey PRIMARY KEY (id)
);

create table posthouse.sweep (
  name text not null,
  every interval not null,
  pause double precision not null default 50,
  ran_at timestamp with time zone not null default '-infinity'::timestamp with time zone,
  took_ms double precision not null default 0,
  more boolean not null default false,
  runs bigint not null default 0,
  failures bigint not null default 0,
  failed_at timestamp with time zone,
  error text,
  failing_since timestamp with time zone,
  floor_at timestamp with time zone not null default '-infinity'::timestamp with time zone,
  constraint sweep_pkey PRIMARY KEY (name)
) with (fillfactor=50);

create table posthouse.tally (
  lane_id bigint not null,
  state posthouse.job_state not null,
  jobs bigint not null
);

create table posthouse.tenant (
  name text not null,
  weight real not null,
  constraint tenant_pkey PRIMARY KEY (name)
);

create table posthouse.tenant_login (
  login name not null,
  tenant text,
  every_tenant boolean not null default false,
  constraint tenant_login_check CHECK ((every_tenant = (tenant IS NULL))),
  constraint tenant_login_pkey PRIMARY KEY (login)
);

create table posthouse.tombstone (
  id bigint not null,
  lane_id bigint not null,
  created_at timestamp with time zone not null,
  finished_at timestamp with time zone not null,
  worker uuid,
  timeout_ms bigint,
  fence integer not null,
  attempt smallint not null,
  max_attempts smallint not null,
  state posthouse.job_state not null,
  flags text[],
  result jsonb,
  tokens integer,
  constraint tombstone_pkey PRIMARY KEY (id)
) with (autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_threshold=2000);

create table posthouse.usage (
  lane_id bigint not null,
  day date not null,
  model text not null,
  attempts bigint not null,
  requests bigint not null,
  input_tokens bigint not null,
  output_tokens bigint not null,
  cached_tokens bigint not null,
  cost_usd numeric,
  unpriced bigint not null
) with (autovacuum_vacuum_scale_factor=0.02, autovacuum_vacuum_threshold=2000);

create table posthouse.usage_day (
  day date not null,
  tenant text not null,
  queue text not null,
  kind text not null,
  model text not null,
  attempts bigint not null,
  requests numeric not null,
  input_tokens numeric not null,
  output_tokens numeric not null,
  cached_tokens numeric not null,
  cost_usd numeric,
  unpriced bigint not null,
  constraint usage_day_pkey PRIMARY KEY (day, tenant, queue, kind, model)
) with (fillfactor=50);

create table posthouse.worker (
  id uuid not null,
  host text not null,
  pid integer not null,
  version text not null,
  queues text[] not null,
  kinds text[] not null,
  slots integer not null,
  lease_ms bigint not null,
  started_at timestamp with time zone not null,
  beat_at timestamp with time zone not null,
  expires_at timestamp with time zone not null,
  dead_at timestamp with time zone,
  oldest_seq bigint not null default 1,
  mark_seq bigint not null default 0,
  constraint worker_pkey PRIMARY KEY (id)
) with (fillfactor=50);
CREATE INDEX worker_dead ON posthouse.worker USING btree (dead_at) WHERE (dead_at IS NOT NULL);

CREATE OR REPLACE FUNCTION posthouse.admit(worker uuid, id bigint, fence bigint, gates text[], tokens bigint DEFAULT 0)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.admitted(id bigint, fence bigint, gates text[], reserved bigint, used bigint, age_ms bigint DEFAULT 0)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.adopt()
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  o record;
begin
  select x.* into o from posthouse.origin() x;
  if not o.is_copy then
    return false;
  end if;
  update posthouse.meta m set value = (o.here || jsonb_build_object('stamped', clock_timestamp()))::text where m.name = 'origin';
  return true;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.advance_floors()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  common posthouse.lane_floor;
  safe timestamptz;
  step constant interval := '100 milliseconds';
begin
  if not pg_try_advisory_xact_lock(1346912000, 2) then
    return;
  end if;
  common := posthouse.common_floor();
  safe := greatest(posthouse.oldest_writer(), clock_timestamp() - interval '30 seconds');
  with awake as (
    select l.id, false as held from posthouse.lane l where l.ready_at < 'infinity' and l.ready_at <= clock_timestamp() and l.blocked_by is null
    union all
    select l.id, true from posthouse.lane l where l.blocked_by is not null
  ), looked as materialized (
    -- No further back than it stands, for the sake of a transaction that began before and writes only now; but for a clock that was set back.
    select l.id, f.floor_at, greatest(least(coalesce(j.run_at, case when l.held then f.floor_at end, safe), safe),
      case when common.floor_at <= clock_timestamp() then coalesce(case when common.behind then f.floor_at end, common.floor_at) end) as oldest
    from awake l
    cross join lateral (
      select (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) as floor_at offset 0) f
    left join lateral (
      select j.run_at from posthouse.job j
      where j.lane_id = l.id and j.state = 'queued' and j.run_at >= coalesce(case when common.behind then f.floor_at end, common.floor_at)
        and not (l.held and f.floor_at is not null)
      order by j.lane_id, j.run_at, j.id limit 1) j on true
  ), next as materialized (
    select n.floor_at, exists (select from looked l where l.oldest < n.floor_at) as behind
    from (
      select case when coalesce(n.oldest, safe) > common.floor_at + step or common.floor_at = '-infinity' then coalesce(n.oldest, safe)
        else common.floor_at end as floor_at
      from (select min(l.oldest) filter (where l.oldest >= safe - interval '2 seconds') as oldest from looked l having count(*) > 0) n) n
  )
  insert into posthouse.lane_floor (lane_id, floor_at, behind)
  select 0, n.floor_at, n.behind from next n where (n.floor_at, n.behind) is distinct from (common.floor_at, common.behind)
  union all
  select l.id, case when l.oldest < n.floor_at then l.oldest end, false
  from looked l cross join next n
  where case when l.oldest < n.floor_at then l.floor_at is null or l.oldest > l.floor_at + step else l.floor_at is not null end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.alert_text(value text, most integer)
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case
    when octet_length(value) <= most then regexp_replace(value, '[[:cntrl:]]+', ' ', 'g')
    else regexp_replace(left(value, most / 4 - 10), '[[:cntrl:]]+', ' ', 'g') || '…' || to_hex(hashtextextended(value, 0)) end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.analyze_parents()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET default_statistics_target TO '10'
 SET lock_timeout TO '50ms'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.archive_job(j posthouse.job, state posthouse.job_state, result jsonb, usage jsonb)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  now_at timestamptz := clock_timestamp();
  of posthouse.lane;
begin
  delete from posthouse.job x where x.id = j.id;
  select l.* into of from posthouse.lane l where l.id = j.lane_id;
  if exists (select from posthouse.kind k where k.name = of.kind and k.drops_payload) then
    delete from posthouse.payload p where p.id = j.id;
  end if;
  perform posthouse.house(array[j.id]);
  if posthouse.retention_of(of.queue, archive_job.state::text) = interval '0' then
    insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, timeout_ms, fence, attempt, max_attempts, state, result,
      tokens)
    values (j.id, j.lane_id, j.created_at, now_at, j.worker, j.timeout_ms, j.fence, j.attempt, j.max_attempts,
      archive_job.state, archive_job.result, j.tokens);
    insert into posthouse.burial (buried_at, jobs, job_ids) values (now_at, 1, array[j.id]);
    delete from posthouse.attempt a where a.job_id = j.id;
  else
    insert into posthouse.archive (id, lane_id, created_at, started_at, finished_at, worker, timeout_ms, fence, attempt,
      max_attempts, state, result, usage, errors, tokens)
    values (j.id, j.lane_id, j.created_at, j.started_at, now_at, j.worker, j.timeout_ms, j.fence, j.attempt,
      j.max_attempts, archive_job.state, archive_job.result, archive_job.usage,
      case when j.errors > 0 then posthouse.gather_errors(j.id) end, j.tokens);
  end if;
  insert into posthouse.tally (lane_id, state, jobs) values (j.lane_id, archive_job.state, 1);
  if j.keyed then
    perform posthouse.free_keys(array[j.id]);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.asked_gates(kind text, payload jsonb, gates text[])
 RETURNS text[]
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  model text := case when kind = 'llm.chat' and jsonb_typeof(payload) = 'object' and jsonb_typeof(payload -> 'model') = 'string'
    then payload ->> 'model' end;
begin
  -- One that is no name is told to whoever runs it.
  if octet_length(model) between 1 and 190 and model <> '*' and model !~ '[[:cntrl:]]' then
    gates := gates || ('model:' || model);
  end if;
  return posthouse.check_gates(gates);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.attempt_job(worker uuid, id bigint, fence bigint)
 RETURNS posthouse.job
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select j from posthouse.job j
  where j.id = attempt_job.id and j.worker = attempt_job.worker and j.fence = attempt_job.fence and j.state = 'running'
  for update
$function$
;

CREATE OR REPLACE FUNCTION posthouse.backlog(queue text)
 RETURNS bigint
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  running bigint;
  due bigint;
begin
  if not (session_user = current_user or posthouse.sees_all()) then
    raise exception using errcode = '42501', message = 'backlog: it counts the jobs of all tenants, and this login sees only its own',
      hint = 'Bind the login to every tenant: select posthouse.bind_login(login, every_tenant => true).';
  end if;
  select coalesce(sum(r.jobs), 0) into running from posthouse.running_by_queue() r where r.queue = backlog.queue;
  select count(*) into due
  from (
    select 1
    from posthouse.lane l
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select from posthouse.job j
      where j.lane_id = l.id and j.state = 'queued' and j.run_at <= clock_timestamp() and j.run_at >= f.floor_at limit 10000) j
    where l.queue = backlog.queue and l.ready_at <= clock_timestamp() and l.blocked_by is null
    limit 10000) x;
  if due = 10000 then
    select greatest(due, coalesce(sum(case r.name when 'queue_due_jobs' then r.value else -r.value end), 0)::bigint) into due
    from (select g.gauges from posthouse.gauge g where g.part = 'counts' order by g.counted_at desc limit 1) n
    cross join lateral jsonb_to_recordset(n.gauges) r(name text, labels jsonb, value float8)
    where r.name in ('queue_due_jobs', 'queue_held_jobs') and r.labels ->> 'queue' = backlog.queue;
  end if;
  return running + due;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.backoff(attempt integer)
 RETURNS interval
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select make_interval(secs => greatest(0.1, random() * least(600.0, 2.0 * 2.0 ^ least(greatest(attempt, 1) - 1, 30))))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.bare_jobs(ids bigint[])
 RETURNS bigint[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
begin
  return array(
    select i.id from unnest(ids) i(id)
    cross join lateral (select j.lane_id from posthouse.job j where j.id = i.id offset 0) j
    cross join lateral (select l.kind from posthouse.lane l where l.id = j.lane_id offset 0) l
    cross join lateral (select from posthouse.kind k where k.name = l.kind and k.drops_payload offset 0) k);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.begin_probe(endpoint text, job_id bigint)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.begin_sweep(part text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if not posthouse.take_sweep(part) then
    return false;
  end if;
  update posthouse.sweep s set ran_at = clock_timestamp(), more = false where s.name = part;
  return true;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.below_at(seconds bigint[], counts bigint[], most bigint, now_s bigint)
 RETURNS timestamp with time zone
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  total bigint := 0;
begin
  for i in reverse coalesce(cardinality(seconds), 0) .. 1 loop
    exit when seconds[i] < now_s - 61;
    total := total + counts[i];
    if total >= most then
      return to_timestamp(seconds[i] + 62);
    end if;
  end loop;
  return null;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.bind_login(login name, tenant text DEFAULT NULL::text, every_tenant boolean DEFAULT false)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.block_lanes(lanes bigint[], gate_ids bigint[], members text[], untils timestamp with time zone[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  now_at timestamptz := clock_timestamp();
  look record;
  whose text[];
begin
  -- A thousand at a time; the others have their turn at the next claim.
  select array_agg(b.lane_id), array_agg(b.gate_id), array_agg(b.member) into lanes, gate_ids, whose
  from (
    select b.lane_id, b.gate_id, b.member
    from unnest(lanes, gate_ids, members, untils) b(lane_id, gate_id, member, until)
    cross join lateral (select l.awake_until, l.naps, l.serial from posthouse.lane l where l.id = b.lane_id offset 0) l
    where b.until > now_at + interval '10 seconds' or (coalesce(b.until, 'infinity') > now_at + interval '2 seconds' and l.awake_until < now_at)
      -- Of these there may be many that wait for a job that runs, and each wakes when it ends.
      or (b.until is null and l.serial <> '' and l.naps = 0)
    limit 1000) b
  where pg_try_advisory_xact_lock(1346912003, (b.gate_id % 128)::int);
  if lanes is null then
    return;
  end if;
  -- A new statement, so that it sees what made room before the lock was ours.
  select * into look from posthouse.look_at_gates(gate_ids, whose, array_fill(1, array[cardinality(lanes)]), clock_timestamp());
  -- Those of tenants, of whom there may be thousands, leave the index that claims walk when it is for longer than two minutes: the sweep
  -- wakes them in time.
  update posthouse.lane l set blocked_by = b.gate_id, awake_until = least(l.awake_until, now_at),
    ready_at = case when b.exactly or b.until <= now_at + interval '2 minutes' then coalesce(b.until, 'infinity') else 'infinity' end
  from (
    select x.id, b.gate_id, b.until, b.exactly
    from (
      select u.lane_id, u.gate_id, u.until, g.name not like 'tenant:%' as exactly
      from unnest(lanes, gate_ids, whose, look.rooms, look.untils) u(lane_id, gate_id, member, room, until)
      cross join lateral (select g.name from posthouse.gate g where g.id = u.gate_id offset 0) g
      where u.room <= 0 and strpos(u.member, chr(31)) = 0
      union all select h.lane_id, h.gate_id, h.until, true from posthouse.serial_held(lanes, clock_timestamp()) h where h.gate_id = any(gate_ids)) b
    cross join lateral (select x.id from posthouse.lane x where x.id = b.lane_id for no key update skip locked) x) b
  where l.id = b.id;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.book_gates(gates posthouse.gate[], states posthouse.gate_state[], plain boolean[], places integer[], insts integer[], ids bigint[], fences integer[], their_places integer[], weights bigint[], now_at timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_nestloop TO 'off'
 SET enable_hashjoin TO 'on'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
begin
  -- Those that count what runs, and nothing else.
  insert into posthouse.gate_state (gate_id, member, seq, job_ids, fences)
  select s.gate_id, s.member, coalesce(s.seq, 0) + 1, s.job_ids || b.ids, s.fences || b.fences
  from (
    select p.inst, array_agg(a.id) as ids, array_agg(a.fence) as fences
    from unnest(ids, fences, their_places) a(id, fence, place)
    join unnest(places, insts) p(place, inst) on p.place = a.place
    where plain[p.inst]
    group by p.inst) b
  join unnest(states) with ordinality s(gate_id, member, seq, job_ids, fences, seconds, requests, tokens, requests_at, tokens_at,
    month, day, spent_day, spent_month, inst) on s.inst = b.inst;
  if false = any(plain) then
    insert into posthouse.gate_state
    select c.*
    from (
      select p.inst, array_agg(a.id) as ids, array_agg(a.fence) as fences, count(*)::int as requests, sum(a.weight)::bigint as tokens
      from unnest(ids, fences, their_places, weights) a(id, fence, place, weight)
      join unnest(places, insts) p(place, inst) on p.place = a.place
      where not plain[p.inst]
      group by p.inst) b
    cross join lateral posthouse.counted(gates[b.inst], states[b.inst], b.ids, b.fences, b.requests, b.tokens, now_at, now_at) c;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.bring_home(job_id bigint)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  lock table posthouse.payload, posthouse.archive in row exclusive mode;
  perform posthouse.house(array[job_id]);
  with spare as (delete from posthouse.spare_payload s where s.id = job_id returning s.*)
  insert into posthouse.payload (id, payload, trace) select s.id, s.payload, s.trace from spare s on conflict do nothing;
  -- Also where it is noted from before: held until the end of this transaction, so that no survey takes it away and then sees no job yet.
  insert into posthouse.revived (id) values (job_id) on conflict (id) do update set id = excluded.id;
  return exists (select from posthouse.payload p where p.id = job_id);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.bury_job(j posthouse.job, class text, error text, detail jsonb, usage jsonb)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  perform posthouse.record_error(j, class, error, detail, usage);
  delete from posthouse.job x where x.id = j.id;
  insert into posthouse.dead_letter (id, lane_id, created_at, started_at, failed_at, worker, timeout_ms, fence, attempt,
    max_attempts, class, error, usage, errors, tokens)
  values (j.id, j.lane_id, j.created_at, j.started_at, clock_timestamp(), j.worker, j.timeout_ms, j.fence, j.attempt,
    j.max_attempts, left(bury_job.class, 100), posthouse.cap_text(bury_job.error), bury_job.usage, posthouse.gather_errors(j.id),
    j.tokens);
  if j.keyed then
    perform posthouse.free_keys(array[j.id]);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.call_seed(worker uuid, id bigint, fence bigint)
 RETURNS text
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  return (
    select j.unsure from posthouse.job j
    where j.id = call_seed.id and j.worker = call_seed.worker and j.fence = call_seed.fence and j.state = 'running');
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.cancel(job_id bigint)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  j posthouse.job;
  state text;
begin
  if session_user <> current_user then
    perform posthouse.check_job_login(job_id);
  end if;
  loop
    select x.* into j from posthouse.job x where x.id = job_id for update;
    exit when j.id is not null;
    state := posthouse.state_of(job_id);
    if state is null then
      raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
    elsif state not in ('queued', 'running', 'waiting') then
      return state;
    end if;
    -- Somebody replaced it, or put it back into line, while this waited for its row: look for the new one.
  end loop;
  if j.state = 'running' then
    update posthouse.job x set cancel_asked = true where x.id = job_id;
    perform pg_notify('posthouse_cancel', j.worker::text);
    return 'running';
  end if;
  perform posthouse.archive_job(j, 'cancelled', null, null);
  -- It may have held up others that share its value.
  perform posthouse.free_serial(j.lane_id);
  return 'cancelled';
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.cancel_many(filter jsonb, max_jobs integer DEFAULT 500, after jsonb DEFAULT NULL::jsonb, OUT changed bigint, OUT busy bigint, OUT refused jsonb, OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{queued,running,waiting}', '{queued,running,waiting}');
  picked bigint[];
  j posthouse.job;
  lanes bigint[] := '{}';
  workers uuid[] := '{}';
begin
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  changed := 0;
  refused := '[]';
  for j in select x.* from posthouse.job x where x.id = any(picked) order by x.id for update skip locked loop
    picked := array_remove(picked, j.id);
    continue when not j.state::text = any(f.states);
    if j.state = 'running' then
      continue when j.cancel_asked;
      update posthouse.job x set cancel_asked = true where x.id = j.id;
      workers := workers || j.worker;
    else
      perform posthouse.archive_job(j, 'cancelled', null, null);
      lanes := lanes || j.lane_id;
    end if;
    changed := changed + 1;
  end loop;
  select count(*) into busy from posthouse.job x where x.id = any(picked);
  perform pg_notify('posthouse_cancel', w::text) from (select distinct w from unnest(workers) w) w;
  perform posthouse.free_serial(l) from (select distinct l from unnest(lanes) l) l;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.canonical_json(value jsonb)
 RETURNS text
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  written text := value::text;
begin
  if written !~ E'\\.[0-9]*0([^0-9]|$)' then
    return written;
  end if;
  -- Strings as they are, fractions without their zeros, all else as it is.
  return (
    select string_agg(coalesce(m.part[1], trim_scale(m.part[2]::numeric)::text, m.part[3]), '' order by m.n)
    from regexp_matches(written, E'("(?:[^"\\\\]|\\\\.)*")|(-?[0-9]+\\.[0-9]+)|([^"0-9-]+|[0-9]+|-)', 'g') with ordinality m(part, n));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.cap_json(value jsonb, most integer)
 RETURNS jsonb
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case
    when value is null or pg_column_size(value) <= most then value
    else jsonb_build_object('posthouse_truncated', true, 'bytes', pg_column_size(value), 'head', left(value::text, most / 335))
  end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.cap_text(value text)
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case
    when octet_length(value) <= 16384 then value
    else left(value, 4000) || format(' … [cut: %s bytes in all]', octet_length(value))
  end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.change_payload(kind text, payload jsonb, changes jsonb, OUT changed jsonb, OUT complaint text)
 RETURNS record
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  path text[];
  parent jsonb;
  one jsonb;
begin
  changed := coalesce(changes -> 'payload', payload);
  for one in select s from jsonb_array_elements(changes -> 'set') s loop
    path := array(select jsonb_array_elements_text(one -> 'path'));
    parent := changed #> path[:cardinality(path) - 1];
    if (case jsonb_typeof(parent) when 'object' then true
          when 'array' then path[cardinality(path)] ~ '^[0-9]{1,6}$' and path[cardinality(path)]::int <= jsonb_array_length(parent)
        end) is not true then
      complaint := format('%s cannot be set: the payload has no such place', array_to_string(path, '.'));
      return;
    end if;
    changed := jsonb_set(changed, path, one -> 'value');
  end loop;
  if changes ? 'model' then
    if jsonb_typeof(changed) <> 'object' or kind <> 'llm.chat' and jsonb_typeof(changed -> 'model') is distinct from 'string' then
      complaint := format('the payload of kind %s names no model: it takes the one of its worker''s configuration', quote_ident(kind));
      return;
    end if;
    changed := changed || jsonb_build_object('model', changes -> 'model');
  end if;
  if pg_column_size(changed) > 33554432 then
    complaint := 'the payload would be larger than 32 MiB';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.changed_lane(l posthouse.lane, d posthouse.dead_letter, payload jsonb, changed jsonb, changes jsonb, due timestamp with time zone, OUT to_lane bigint, OUT differences jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  queue text := coalesce(changes ->> 'queue', l.queue);
  priority int := coalesce((changes ->> 'priority')::int, l.priority);
  gates text[] := l.gates;
  serial text := l.serial;
  serial_by text;
  was text := case when jsonb_typeof(payload) = 'object' then payload ->> 'model' end;
  now_is text := case when jsonb_typeof(changed) = 'object' then changed ->> 'model' end;
begin
  if was is distinct from now_is and (l.kind = 'llm.chat' or 'model:' || was = any(l.gates)) then
    gates := array_remove(gates, 'model:' || was);
    gates := posthouse.asked_gates(case when now_is is not null then 'llm.chat' end, changed, gates);
  end if;
  if queue <> l.queue or changed is distinct from payload then
    select q.serial_by into serial_by from posthouse.queue q where q.name = queue;
    serial := case when serial_by is null then '' else posthouse.serial_value(changed, serial_by) end;
  end if;
  to_lane := posthouse.lane_for(queue, priority, l.tenant, l.kind, gates, serial, due);
  select coalesce(jsonb_object_agg(x.field, jsonb_build_object('from', x.was, 'to', x.now_is)), '{}') into differences
  from (values ('queue', to_jsonb(l.queue), to_jsonb(queue)), ('priority', to_jsonb(l.priority), to_jsonb(priority)),
    ('max_attempts', to_jsonb(d.max_attempts), coalesce(changes -> 'max_attempts', to_jsonb(d.max_attempts))),
    ('timeout_ms', coalesce(to_jsonb(d.timeout_ms), 'null'), coalesce(changes -> 'timeout_ms', to_jsonb(d.timeout_ms), 'null')),
    ('model', coalesce(to_jsonb(was), 'null'), coalesce(to_jsonb(now_is), 'null'))) x(field, was, now_is)
  where x.was <> x.now_is;
  if changed is distinct from payload then
    differences := differences || jsonb_build_object('payload', case when changes ? 'set'
      then to_jsonb(array(select array_to_string(array(select jsonb_array_elements_text(s -> 'path')), '.') from jsonb_array_elements(changes -> 'set') s))
      when changes ? 'payload' then '"replaced"' else '["model"]' end);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_batch(max_jobs integer)
 RETURNS integer
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if (max_jobs between 1 and 10000) is not true then
    raise exception using errcode = 'PH001', message = format('max_jobs: %s is not between 1 and 10000', coalesce(max_jobs::text, 'null')),
      hint = 'Call again with what `next` answered until that is null.';
  end if;
  return max_jobs;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_changes(changes jsonb)
 RETURNS void
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  fields constant text[] := '{model,max_attempts,timeout_ms,queue,priority,payload,set}';
  field text;
  complaint text;
begin
  if changes is null or jsonb_typeof(changes) <> 'object' then
    raise exception using errcode = 'PH001', message = 'changes: must be a JSON object, such as {"max_attempts": 3}';
  end if;
  select k into field from jsonb_object_keys(changes) k where k <> all(fields) limit 1;
  complaint := case
    when field is not null then format('unknown field %s; the fields are %s', quote_ident(field), array_to_string(fields, ', '))
    when changes ? 'model' and (jsonb_typeof(changes -> 'model') <> 'string' or octet_length(changes ->> 'model') not between 1 and 190)
      then 'model: must be a name of 1 to 190 bytes'
    when changes ? 'max_attempts' and (changes ->> 'max_attempts' ~ '^[0-9]{1,4}$' and (changes ->> 'max_attempts')::int between 1 and 1000) is not true
      then format('max_attempts: %s is not between 1 and 1000', changes ->> 'max_attempts')
    when changes ? 'timeout_ms' and changes -> 'timeout_ms' <> 'null'
      and (changes ->> 'timeout_ms' ~ '^[0-9]{1,11}$' and (changes ->> 'timeout_ms')::bigint between 1 and 31557600000) is not true
      then format('timeout_ms: %s is not between 1 and a year; null takes the limit off', changes ->> 'timeout_ms')
    when changes ? 'priority' and (changes ->> 'priority' ~ '^-?[0-9]{1,9}$') is not true
      then format('priority: %s is no whole number of up to nine digits', changes ->> 'priority')
    when changes ?& '{payload,set}' then 'payload, set: give one of them, not both'
    when changes ? 'set' and (jsonb_typeof(changes -> 'set') = 'array' and not exists (
        select from jsonb_array_elements(changes -> 'set') s
        where (jsonb_typeof(s -> 'path') = 'array' and jsonb_array_length(s -> 'path') > 0 and s ? 'value') is not true)) is not true
      then 'set: must be a list of {"path": ["field", …], "value": …}'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = 'changes: ' || complaint;
  end if;
  if changes ? 'queue' then
    perform posthouse.check_name('changes: queue', changes ->> 'queue');
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_dedupe(dedupe_key text, dedupe_for interval, dedupe_policy text, dedupe_by_payload boolean)
 RETURNS void
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  by_payload boolean := coalesce(dedupe_by_payload, false);
  complaint text := case
    when dedupe_key is not null and by_payload then 'dedupe_by_payload: give it or a dedupe_key, not both'
    when dedupe_key = '' or octet_length(dedupe_key) > 512
      then format('dedupe_key: %s bytes long, 1 to 512 are allowed; pass a hash of a longer one', octet_length(dedupe_key))
    when dedupe_for is not null and dedupe_key is null and not by_payload then 'dedupe_for: needs a dedupe_key or dedupe_by_payload'
    when dedupe_for <= interval '0' then 'dedupe_for: must be more than zero; leave it out to hold the key until the job is final'
    when dedupe_for > interval '10 years' then 'dedupe_for: more than 10 years'
    when dedupe_policy not in ('keep', 'reject', 'replace', 'rerun', 'same')
      then format('dedupe_policy: %s is not keep, reject, replace, rerun or same', quote_literal(dedupe_policy))
    when dedupe_policy is not null and dedupe_key is null and not by_payload then 'dedupe_policy: needs a dedupe_key or dedupe_by_payload'
    when dedupe_policy = 'rerun' and dedupe_for is not null
      then 'dedupe_for: the policy rerun holds its key until the job is final, and for no other time'
  end;
begin
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_depth(queues text[], tenants text[], jobs integer[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  l record;
  waiting bigint;
begin
  for l in
    select d.scope, d.name, d.max_depth, n.jobs
    from (select 'queue' as scope, q as name, sum(j) as jobs from unnest(check_depth.queues, check_depth.jobs) x(q, j) group by q
          union all
          select 'tenant', t, sum(j) from unnest(check_depth.tenants, check_depth.jobs) x(t, j) group by t) n
    join posthouse.depth_limit d on d.scope = n.scope and d.name = n.name
    where n.jobs > 0
    order by d.scope, d.name
  loop
    waiting := posthouse.depth_of(l.scope, l.name, l.max_depth, l.jobs);
    if waiting + l.jobs > l.max_depth then
      raise exception using errcode = 'PH010',
        message = format('%s %s is full: %s jobs wait, %s may', l.scope, quote_literal(l.name), waiting, l.max_depth),
        detail = format('Room for %s more.', greatest(l.max_depth - waiting, 0)),
        hint = format('Enqueue again when some have run; or raise the limit with `posthouse %s set %s --max-depth N`, in SQL posthouse.set_depth(%s => %s, max_depth => …).',
          l.scope, quote_literal(l.name), l.scope, quote_literal(l.name)),
        table = l.scope, constraint = l.name;
    end if;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_enqueue(tenant text, kind text)
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_gate(field text, name text)
 RETURNS void
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  perform posthouse.check_name(field, name);
  if strpos(name, ':') > 0 and (name !~ '^(queue|tenant|model|endpoint):.' or name = 'endpoint:*') then
    raise exception using errcode = 'PH001', message = format('%s: %s is no gate''s name', field, quote_literal(name)),
      hint = 'Write queue:Q, tenant:T, model:M or endpoint:PROVIDER/MODEL, with * for each (tenant:*), or a name without a colon.';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_gates(gates text[])
 RETURNS text[]
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_isolation()
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'PH002',
      message = format('this function needs READ COMMITTED, the transaction is %s',
                       upper(current_setting('transaction_isolation'))),
      hint = 'Start the transaction with BEGIN ISOLATION LEVEL READ COMMITTED.';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_job(kind text, payload jsonb, queue text, tenant text, priority integer, delay interval, run_at timestamp with time zone, max_attempts integer, timeout interval, dedupe_key text, dedupe_for interval, trace jsonb, gates text[], tokens integer, dedupe_policy text, dedupe_by_payload boolean)
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  complaint text;
begin
  perform posthouse.check_name('kind', kind);
  perform posthouse.check_name('queue', queue);
  perform posthouse.check_name('tenant', tenant);
  complaint := case
    when payload is null then 'payload: must not be null; pass ''{}'' for an empty one'
    when pg_column_size(payload) > 33554432 then 'payload: larger than 32 MiB; store it elsewhere and enqueue a reference'
    when priority is null then 'priority: must not be null; 0 is the default, smaller runs first'
    when delay is not null and run_at is not null then 'delay, run_at: give one of them, not both'
    when delay > interval '100 years' then 'delay: more than 100 years'
    when run_at = 'infinity' then 'run_at: infinity is not a time at which a job could run'
    when run_at >= '10000-01-01 00:00+00' then 'run_at: after the year 9999, which many programs cannot read'
    when max_attempts not between 1 and 1000 then format('max_attempts: %s is not between 1 and 1000', max_attempts)
    when timeout < interval '1 millisecond' then 'timeout: must be at least a millisecond; leave it out for no limit'
    when timeout > interval '1 year' then 'timeout: more than a year; leave it out for no limit'
    when pg_column_size(trace) > 16384 then 'trace: larger than 16 KiB; it is meant for a W3C trace context'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  perform posthouse.check_gates(gates);
  if tokens is not null then
    perform posthouse.check_tokens(kind, queue, tenant, gates, tokens);
  end if;
  if num_nonnulls(dedupe_key, dedupe_for, dedupe_policy, dedupe_by_payload) > 0 then
    perform posthouse.check_dedupe(dedupe_key, dedupe_for, dedupe_policy, dedupe_by_payload);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_job_login(job_id bigint)
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if posthouse.sees_all() then
    return;
  elsif posthouse.own_tenant() is null then
    perform posthouse.refuse_stranger();
  elsif not posthouse.sees_job(job_id) then
    raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_jobs(jobs jsonb)
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  at int := 0;
  job jsonb;
  field text;
  value jsonb;
begin
  -- The usual case: everything is fine. Most jobs of an array differ in payload and key only, so those are looked at by
  -- themselves, and the rest once for all that share it.
  perform posthouse.check_job(d.kind, '{}', d.queue, d.tenant, d.priority, d.delay, d.run_at, d.max_attempts, d.timeout,
    d.dedupe_key, d.dedupe_for, null, d.gates, d.tokens, d.dedupe_policy, d.dedupe_by_payload)
  from (select p.kind, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout, p.dedupe_for,
          min(p.dedupe_key) as dedupe_key, p.gates, max(p.tokens) as tokens, p.dedupe_policy, p.dedupe_by_payload
        from posthouse.parse_jobs(jobs) p
        group by p.kind, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout, p.dedupe_for,
          p.dedupe_key is null, p.gates, p.tokens is null, p.tokens < 1, p.dedupe_policy, p.dedupe_by_payload) d;
  perform posthouse.check_job(p.kind, p.payload, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts, p.timeout,
    p.dedupe_key, p.dedupe_for, p.trace, p.gates, null, p.dedupe_policy, p.dedupe_by_payload)
  from posthouse.parse_jobs(jobs) p
  where pg_column_size(p.payload) > 33554432 or p.dedupe_key = '' or octet_length(p.dedupe_key) > 512 or pg_column_size(p.trace) > 16384;
  select k into field from jsonb_array_elements(jobs) j cross join lateral jsonb_object_keys(j) k
  where k not in ('kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
    'dedupe_key', 'dedupe_for_ms', 'dedupe_policy', 'dedupe_by_payload', 'trace', 'gates', 'tokens') limit 1;
  if field is not null then
    raise exception using errcode = 'PH001', message = format('unknown field %s', quote_ident(field));
  end if;
exception when others then
  for job in select j from jsonb_array_elements(jobs) j loop
    at := at + 1;
    begin
      if jsonb_typeof(job) <> 'object' then
        raise exception using errcode = 'PH001', message = 'must be an object';
      end if;
      -- Each field alone, since the error of a value of the wrong type does not say whose it is.
      for field, value in select f.key, f.value from jsonb_each(job) f loop
        begin
          perform p.kind from posthouse.parse_jobs(jsonb_build_array(jsonb_build_object(field, value))) p;
        exception when others then
          raise exception using errcode = 'PH001', message = format('%s: %s', field, sqlerrm);
        end;
      end loop;
      perform posthouse.check_job(p.kind, p.payload, p.queue, p.tenant, p.priority, p.delay, p.run_at, p.max_attempts,
        p.timeout, p.dedupe_key, p.dedupe_for, p.trace, p.gates, p.tokens, p.dedupe_policy, p.dedupe_by_payload)
      from posthouse.parse_jobs(jsonb_build_array(job)) p;
      select k into field from jsonb_object_keys(job) k
      where k not in ('kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
        'dedupe_key', 'dedupe_for_ms', 'dedupe_policy', 'dedupe_by_payload', 'trace', 'gates', 'tokens') limit 1;
      if found then
        raise exception using errcode = 'PH001', message = format('unknown field %s', quote_ident(field)),
          hint = 'Durations are in milliseconds: delay_ms, timeout_ms, dedupe_for_ms.';
      end if;
    exception when others then
      raise exception using errcode = 'PH001', message = format('job %s of the array: %s', at, sqlerrm);
    end;
  end loop;
  raise;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_name(field text, value text)
 RETURNS void
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if value is null or value = '' then
    raise exception using errcode = 'PH001', message = format('%s: must not be empty', field);
  elsif octet_length(value) > 200 then
    raise exception using errcode = 'PH001',
      message = format('%s: %s bytes long, at most 200 are allowed', field, octet_length(value));
  elsif value ~ '[[:cntrl:]]' then
    raise exception using errcode = 'PH001', message = format('%s: must not contain control characters', field);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_origin()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_schedule(name text, cron text, job jsonb, timezone text, catch_up text, catch_up_max integer, catch_up_over interval, jitter interval, source text)
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  complaint text;
begin
  perform posthouse.check_name('name', name);
  complaint := case
    when cron is null or octet_length(cron) > 200 then 'cron: 1 to 200 bytes are allowed'
    when cron !~ '^\s*@' and cardinality(regexp_split_to_array(btrim(cron), '\s+')) <> 5
      then format('cron: %s has not five fields (minute, hour, day of the month, month, day of the week)', quote_literal(cron))
    when cron ~ '[^-\sA-Za-z0-9*,/?#@]' then format('cron: %s has a character that no field can have', quote_literal(cron))
    when jsonb_typeof(job) is distinct from 'object' then 'job: must be an object, as posthouse.enqueue_many takes it'
    when job ?| array['run_at', 'delay_ms'] then 'job: run_at and delay_ms are for the schedule to say; see jitter'
    when pg_column_size(job) > 1048576 then 'job: larger than 1 MiB, of which each tick makes a copy; store it elsewhere and pass a reference'
    when (catch_up in ('skip', 'one', 'all')) is not true then format('catch_up: %s is not skip, one or all', coalesce(quote_literal(catch_up), 'null'))
    when (catch_up_max between 1 and 1000) is not true then format('catch_up_max: %s is not between 1 and 1000', coalesce(catch_up_max::text, 'null'))
    when (catch_up_over between '0' and interval '7 days') is not true then 'catch_up_over: must be between nothing and 7 days'
    when (jitter between '0' and interval '7 days') is not true then 'jitter: must be between nothing and 7 days'
    when octet_length(source) > 200 then 'source: longer than 200 bytes'
  end;
  if complaint is not null then
    raise exception using errcode = 'PH001', message = complaint;
  end if;
  begin
    perform now() at time zone timezone;
  exception when others then
    timezone := null;
  end;
  if timezone is null then
    raise exception using errcode = 'PH001', message = 'timezone: there is no such time zone; write a name such as UTC, Europe/Rome or America/New_York';
  end if;
  begin
    perform posthouse.check_jobs(jsonb_build_array(job));
  exception when sqlstate 'PH001' then
    raise exception using errcode = 'PH001', message = replace(sqlerrm, 'job 1 of the array: ', 'job: ');
  end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.check_tokens(kind text, queue text, tenant text, gates text[], tokens integer)
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  g record;
begin
  if (tokens between 1 and 1000000000) is not true then
    raise exception using errcode = 'PH001', message = format('tokens: %s is not between 1 and 1000000000', coalesce(tokens::text, 'null'));
  end if;
  select x.name, x.tokens_per_minute into g
  from unnest(array['queue:' || queue, 'tenant:' || tenant] || gates
    || (select k.gates from posthouse.kind k where k.name = check_tokens.kind)) n(name)
  cross join lateral posthouse.gates_named(n.name) f
  join posthouse.gate x on x.id = f.id
  where x.tokens_per_minute < tokens limit 1;
  if g.name is not null then
    raise exception using errcode = 'PH001',
      message = format('tokens: %s is more than gate %s lets through in a minute (%s)', tokens, quote_literal(g.name), g.tokens_per_minute),
      hint = 'Raise the gate''s limit, or split the job.';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.claim(worker uuid, seq bigint, max_jobs integer, after_lane bigint DEFAULT 0)
 RETURNS TABLE(id bigint, fence bigint, attempt integer, max_attempts integer, kind text, queue text, tenant text, priority integer, payload jsonb, timeout_ms bigint, lane bigint, enqueued_at timestamp with time zone, trace jsonb, model text)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.claim_level(worker uuid, queues text[], kinds text[], priority integer, max_jobs integer, after_lane bigint, due timestamp with time zone, gated boolean, wait boolean, OUT jobs posthouse.job[], OUT gave bigint[], OUT empty bigint[], OUT idle bigint[], OUT blocked bigint[], OUT blockers bigint[], OUT members text[], OUT untils timestamp with time zone[], OUT held boolean)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.claimed_jobs(worker uuid, ids bigint[], fences integer[])
 RETURNS TABLE(id bigint, fence bigint, attempt integer, max_attempts integer, kind text, queue text, tenant text, priority integer, payload jsonb, timeout_ms bigint, lane bigint, enqueued_at timestamp with time zone, trace jsonb, model text)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.clean_json(value text)
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select replace(regexp_replace(regexp_replace(regexp_replace(replace(value, E'\\\\', chr(1)),
      E'\\\\u0000', E'\\\\ufffd', 'g'),
      E'\\\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\\\u[dD][c-fC-F][0-9a-fA-F]{2})', E'\\\\ufffd', 'g'),
      E'(?<!\\\\u[dD][89abAB][0-9a-fA-F]{2})\\\\u[dD][c-fC-F][0-9a-fA-F]{2}', E'\\\\ufffd', 'g'), chr(1), E'\\\\')
$function$
;

CREATE OR REPLACE FUNCTION posthouse.close_gate(name text, until timestamp with time zone DEFAULT 'infinity'::timestamp with time zone, reason text DEFAULT NULL::text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.closures()
 RETURNS TABLE(name text, closed_for_ms bigint, reason text, closed_by text)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
begin
  return query
    select substr(g.name, 10), case when g.closed_until = 'infinity' then 9000000000000000
      else least(ceil(extract(epoch from greatest(g.closed_until - clock_timestamp(), interval '0')) * 1000), 9000000000000000)::bigint end,
      g.closed_reason, g.closed_by
    from posthouse.gate g
    where g.name >= 'endpoint:' and g.name < 'endpoint;' and g.closed_at is not null
      and (g.closed_until > clock_timestamp() or g.closed_by in ('provider', 'breaker'));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.common_floor()
 RETURNS posthouse.lane_floor
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  common posthouse.lane_floor;
begin
  select * into common from posthouse.lane_floor f where f.lane_id = 0 order by f.seq desc limit 1;
  common.floor_at := coalesce(common.floor_at, '-infinity');
  return common;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.copy_reason(stamped jsonb, here jsonb)
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case
    when stamped ? 'disowned' then format('somebody said at %s that it is a copy', stamped ->> 'disowned')
    when stamped ->> 'database' <> here ->> 'database' and stamped ->> 'table' = here ->> 'table'
      then 'it was made from another database as its template'
    when stamped ->> 'table' <> here ->> 'table' then 'it was restored from a dump'
    when stamped ->> 'database' <> here ->> 'database' then 'it is not the database that its first worker saw'
    when stamped ->> 'server' <> here ->> 'server' and stamped ->> 'major' = here ->> 'major' then 'it is on another server'
  end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.count_depths()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if not exists (select from posthouse.depth_limit) and not exists (select from posthouse.lane l where l.limited)
     and not exists (select from posthouse.depth_count) then
    return;
  end if;
  perform posthouse.mark_limited();
  perform posthouse.note_depth(d.scope, d.name, d.max_depth) from posthouse.depth_limit d where d.max_depth > 10000;
  delete from posthouse.depth_count c where not exists (
    select from posthouse.depth_limit d where d.scope = c.scope and d.name = c.name and d.max_depth > 10000);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.count_gauges(part text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  began timestamptz := clock_timestamp();
  found jsonb;
begin
  if part = 'counts' then
    select jsonb_agg(to_jsonb(g)) into found from posthouse.count_queues() g;
  else
    select jsonb_agg(to_jsonb(g)) into found
    from (select f.* from posthouse.gauge_fleet() f union all select d.* from posthouse.gauge_database() d) g;
  end if;
  delete from posthouse.gauge g where g.part = count_gauges.part and g.counted_at < began;
  insert into posthouse.gauge (part, counted_at, took_ms, gauges)
  values (count_gauges.part, began, extract(epoch from clock_timestamp() - began) * 1000, coalesce(found, '[]'));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.count_queues()
 RETURNS TABLE(name text, labels jsonb, value double precision)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
declare
  job_percent float8 := posthouse.sample_percent('posthouse.job');
  dead_percent float8 := posthouse.sample_percent('posthouse.dead_letter');
begin
  return query execute format($q$
    with lanes as materialized (
      select l.id, l.queue, l.blocked_by is not null as is_held from posthouse.lane l
    ), queued as materialized (
      select j.lane_id, round(count(*) * 100 / $2) as jobs, round(count(*) filter (where j.run_at <= $1) * 100 / $2) as due
      from posthouse.job j %s where j.state = 'queued' group by j.lane_id
    ), dead as materialized (
      select d.lane_id, round(count(*) * 100 / $3) as jobs from posthouse.dead_letter d %s group by d.lane_id
    ), ended as materialized (
      select t.lane_id, sum(t.jobs) filter (where t.state = 'done') as done, sum(t.jobs) filter (where t.state = 'cancelled') as cancelled
      from posthouse.tally t group by t.lane_id
    ), queues as materialized (
      select l.queue, coalesce(sum(q.due), 0) as due, coalesce(sum(q.due) filter (where l.is_held), 0) as held,
        coalesce(sum(q.jobs - q.due), 0) as later, coalesce(sum(d.jobs), 0) as dead, coalesce(sum(e.done), 0) as done,
        coalesce(sum(e.cancelled), 0) as cancelled
      from lanes l left join queued q on q.lane_id = l.id left join dead d on d.lane_id = l.id left join ended e on e.lane_id = l.id
      group by l.queue
    ), labelled as (
      select n.label as queue, sum(q.due) as due, sum(q.held) as held, sum(q.later) as later, sum(q.dead) as dead, sum(q.done) as done,
        sum(q.cancelled) as cancelled
      from queues q
      join posthouse.queue_labels((select array_agg(x.queue order by x.queue) from queues x),
        (select array_agg((x.due + x.later)::bigint order by x.queue) from queues x)) n on n.queue = q.queue
      group by n.label
    )
    select g.name, g.labels, g.value::float8 from labelled q cross join lateral (values
      ('queue_due_jobs', jsonb_build_object('queue', q.queue), q.due),
      ('queue_held_jobs', jsonb_build_object('queue', q.queue), q.held),
      ('queue_later_jobs', jsonb_build_object('queue', q.queue), q.later),
      ('queue_dead_letters', jsonb_build_object('queue', q.queue), q.dead),
      ('queue_ended_jobs_total', jsonb_build_object('queue', q.queue, 'state', 'done'), q.done),
      ('queue_ended_jobs_total', jsonb_build_object('queue', q.queue, 'state', 'cancelled'), q.cancelled)) g(name, labels, value)
  $q$, case when job_percent < 100 then format('tablesample system (%s)', job_percent) end,
    case when dead_percent < 100 then format('tablesample system (%s)', dead_percent) end)
  using clock_timestamp(), job_percent, dead_percent;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.count_running(counted bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.count_waiting(scope text, name text, most bigint)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  -- Lanes that sleep with nothing to hold them back have no work; from the floor, so as not to walk over dead rows.
  if scope = 'queue' then
    return (select count(*) from (
      select from posthouse.lane l
      cross join lateral (
        select from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued'
          and j.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at)
        limit most offset 0) j
      where l.queue = count_waiting.name and l.limited and (l.ready_at < 'infinity' or l.blocked_by is not null) limit most) x);
  end if;
  return (select count(*) from (
    select from posthouse.lane l
    cross join lateral (
        select from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued'
          and j.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at)
        limit most offset 0) j
    where l.tenant = count_waiting.name and l.limited and (l.ready_at < 'infinity' or l.blocked_by is not null) limit most) x);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.counted(g posthouse.gate, s posthouse.gate_state, new_ids bigint[], new_fences integer[], new_requests integer, new_tokens bigint, at timestamp with time zone, now_at timestamp with time zone)
 RETURNS posthouse.gate_state
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  first bigint := floor(extract(epoch from now_at)) - 61;
  second bigint := floor(extract(epoch from at));
  most int := least(g.requests_per_minute, case when g.opened_at > now_at - interval '10 seconds' then 600 end);
  place int;
begin
  s.gate_id := g.id;
  -- What jobs shared that ran one at a time is forgotten when none is left, and begins anew behind what was there.
  s.seq := coalesce(s.seq, case when g.name like 'serial:%' then extract(epoch from now_at) * 1000 else 0 end) + 1;
  if g.max_running is not null then
    s.job_ids := s.job_ids || new_ids;
    s.fences := s.fences || new_fences;
  else
    s.job_ids := null;
    s.fences := null;
  end if;
  if most is null and g.tokens_per_minute is null then
    s.seconds := null; s.requests := null; s.tokens := null; s.requests_at := null; s.tokens_at := null;
    return s;
  end if;
  if most is not null then
    s.requests_at := greatest(s.requests_at, now_at) + new_requests * 60.0 / most * interval '1 second';
  end if;
  if g.tokens_per_minute is not null then
    -- Ten seconds are kept: what jobs give back because they used less is there for others.
    s.tokens_at := greatest(coalesce(s.tokens_at, now_at), now_at - interval '10 seconds') + new_tokens * 60.0 / g.tokens_per_minute * interval '1 second';
  end if;
  -- What is older than a minute is forgotten.
  place := coalesce((select min(i) from generate_subscripts(s.seconds, 1) i where s.seconds[i] >= first), cardinality(s.seconds) + 1);
  if place > 1 then
    s.seconds := s.seconds[place:];
    s.requests := s.requests[place:];
    s.tokens := s.tokens[place:];
  end if;
  if second >= first then
    place := coalesce(width_bucket(second, s.seconds), 0);
    if place > 0 and s.seconds[place] = second then
      s.requests[place] := greatest(s.requests[place] + new_requests, 0);
      s.tokens[place] := greatest(s.tokens[place] + new_tokens, 0);
    else
      s.seconds := s.seconds[:place] || second || s.seconds[place + 1:];
      s.requests := s.requests[:place] || greatest(new_requests, 0) || s.requests[place + 1:];
      s.tokens := s.tokens[:place] || greatest(new_tokens, 0) || s.tokens[place + 1:];
    end if;
  end if;
  return s;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.cut_slices()
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
AS $function$
declare
  last_id bigint := (select s.last_value from posthouse.job_id_seq s);
  -- After the look at the sequence: who takes an id later gets a higher one.
  now_taking text[] := posthouse.holders(array['posthouse.job_id_seq'::regclass]);
  r posthouse.id_range;
  cut_to bigint;
begin
  update posthouse.slice s set takers = now_taking where s.takers is null and s.lower + 10000 <= last_id + 1;
  select x.* into r from posthouse.id_range x where x.sliced_to < x.upper and x.sliced_to <= last_id order by x.lower limit 1;
  if r.lower is null then
    return false;
  end if;
  cut_to := least(r.upper, (last_id / 10000 + 1) * 10000, r.sliced_to + 5000000);
  insert into posthouse.slice (lower, takers)
  select n, case when n + 10000 <= last_id + 1 then now_taking end
  from generate_series(r.sliced_to, cut_to - 1, 10000) n
  on conflict (lower) do update set stale = true;
  update posthouse.id_range x set sliced_to = cut_to where x.lower = r.lower;
  return true;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.dead_filter(ids bigint[], queue text, kind text, tenant text)
 RETURNS jsonb
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select jsonb_strip_nulls(jsonb_build_object('ids', ids, 'queue', queue, 'kind', kind, 'tenant', tenant))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.dead_letters(filter jsonb DEFAULT '{"all": true}'::jsonb, max_rows integer DEFAULT 20, before_at timestamp with time zone DEFAULT NULL::timestamp with time zone, before_id bigint DEFAULT NULL::bigint)
 RETURNS TABLE(id bigint, queue text, tenant text, kind text, priority integer, class text, error text, attempt integer, max_attempts integer, created_at timestamp with time zone, failed_at timestamp with time zone, redrives bigint)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{failed}', '{failed}');
  from_at timestamptz := coalesce(before_at, 'infinity');
  from_id bigint := coalesce(before_id, 9223372036854775807);
  by_lane boolean := num_nonnulls(f.queue, f.kind, f.tenant, f.class) > 0;
  near int := case when by_lane and num_nonnulls(f.error, f.created_since, f.created_before, f.ids) = 0 then 2000 end;
  n_seen int;
  ids bigint[];
begin
  max_rows := posthouse.check_batch(max_rows);
  with seen as (
    select d.id, d.lane_id, d.class, d.error, d.created_at, d.failed_at from posthouse.dead_letter d
    where (d.failed_at, d.id) < (from_at, from_id) and (f.ids is null or d.id = any(f.ids))
      and (f.failed_since is null or d.failed_at >= f.failed_since) and (f.failed_before is null or d.failed_at < f.failed_before)
    order by d.failed_at desc, d.id desc limit near
  )
  select array_agg(x.id) into ids from (
    select s.id from seen s
    where (not by_lane or (
        select true from posthouse.lane l where l.id = s.lane_id and (f.queue is null or l.queue = f.queue)
          and (f.kind is null or l.kind = f.kind) and (f.tenant is null or l.tenant = f.tenant)))
      and (f.class is null or s.class = f.class) and (f.error is null or strpos(lower(s.error), lower(f.error)) > 0)
      and (f.created_since is null or s.created_at >= f.created_since) and (f.created_before is null or s.created_at < f.created_before)
    order by s.failed_at desc, s.id desc limit max_rows) x;
  if near is not null and coalesce(cardinality(ids), 0) < max_rows then
    with recursive groups as (
      (select d.lane_id, d.class from posthouse.dead_letter d order by d.lane_id, d.class limit 1)
      union all
      select n.lane_id, n.class from groups g
      cross join lateral (
        select d.lane_id, d.class from posthouse.dead_letter d where (d.lane_id, d.class) > (g.lane_id, g.class)
        order by d.lane_id, d.class limit 1) n
    )
    select array_agg(x.id) into ids from (
      select d.id from groups g
      cross join lateral (
        select d.id, d.failed_at from posthouse.dead_letter d
        where d.lane_id = g.lane_id and d.class = g.class and (d.failed_at, d.id) < (from_at, from_id)
          and (f.failed_since is null or d.failed_at >= f.failed_since) and (f.failed_before is null or d.failed_at < f.failed_before)
        order by d.failed_at desc, d.id desc limit max_rows) d
      where (f.class is null or g.class = f.class) and (
        select true from posthouse.lane l where l.id = g.lane_id and (f.queue is null or l.queue = f.queue)
          and (f.kind is null or l.kind = f.kind) and (f.tenant is null or l.tenant = f.tenant))
      order by d.failed_at desc, d.id desc limit max_rows) x;
  end if;
  return query
    select d.id, l.queue, l.tenant, l.kind, l.priority, d.class, left(d.error, 500), d.attempt, d.max_attempts, d.created_at, d.failed_at,
      (select count(*) from posthouse.redrives r where r.job_id = d.id)
    from unnest(ids) with ordinality u(id, place)
    cross join lateral (select x.* from posthouse.dead_letter x where x.id = u.id offset 0) d
    cross join lateral (select x.* from posthouse.lane x where x.id = d.lane_id offset 0) l
    order by u.place;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.delete_expired(lo bigint, now_at timestamp with time zone, held bigint[], lanes bigint[], states text[], keeps interval[], max_jobs integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET "TimeZone" TO 'UTC'
 SET jit TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_nestloop TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
AS $function$
declare
  gone bigint[];
begin
  -- Looked up and deleted by one snapshot: one that comes back meanwhile and ends anew has another row. Who just brings one back is not
  -- waited for, or one open transaction would keep all others from going.
  with dead as materialized (
    select d.id
    from posthouse.dead_letter d
    join unnest(lanes, states, keeps) k(lane_id, state, keep) on k.lane_id = d.lane_id and k.state = 'failed'
    where d.id >= lo and d.id < lo + 10000 and d.failed_at + k.keep <= now_at and (d.id = any(held)) is not true
    limit max_jobs for update of d skip locked
  ), archived as materialized (
    select a.id
    from posthouse.archive a
    join unnest(lanes, states, keeps) k(lane_id, state, keep) on k.lane_id = a.lane_id and k.state = a.state::text
    where a.id >= lo and a.id < lo + 10000 and a.finished_at + k.keep <= now_at and (a.id = any(held)) is not true
      and exists (select from unnest(states) s(state) where s.state <> 'failed')
    limit max_jobs - (select count(*) from dead) for update of a skip locked
  ), dead_gone as (
    delete from posthouse.dead_letter d where d.id = any(array(select x.id from dead x)) returning d.id
  ), archived_gone as (
    delete from posthouse.archive a where a.id = any(array(select x.id from archived x)) and a.id >= lo and a.id < lo + 10000 returning a.id
  )
  select array_agg(g.id) into gone from (select id from dead_gone union all select id from archived_gone) g;
  delete from posthouse.payload p where p.id = any(gone) and p.id >= lo and p.id < lo + 10000;
  delete from posthouse.spare_payload p where p.id = any(gone);
  return coalesce(cardinality(gone), 0);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.depth_of(scope text, name text, max_depth integer, more bigint)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  counted posthouse.depth_count;
  waiting bigint;
begin
  if max_depth <= 10000 then
    waiting := posthouse.count_waiting(depth_of.scope, depth_of.name, max_depth);
    -- Near the limit those who enqueue at the same moment go one after the other, as far as that takes no longer than a tenth of a second; not
    -- a transaction that goes on for longer, which would keep them waiting until its end.
    if waiting + more <= max_depth and waiting + more + 64 > max_depth and posthouse.is_alone() then
      for i in 1 .. 50 loop
        exit when pg_try_advisory_xact_lock(1346912008, hashtext(depth_of.scope || ':' || depth_of.name));
        perform pg_sleep(0.002);
      end loop;
      waiting := posthouse.count_waiting(depth_of.scope, depth_of.name, max_depth);
    end if;
    return waiting;
  end if;
  select c.* into counted from posthouse.depth_count c where c.scope = depth_of.scope and c.name = depth_of.name
  order by c.scope desc, c.name desc, c.counted_at desc limit 1;
  -- Nobody swept lately: whoever comes first counts anew.
  if (counted.counted_at > clock_timestamp() - interval '30 seconds') is not true
     and pg_try_advisory_xact_lock(1346912008, hashtext(depth_of.scope || ':' || depth_of.name)) then
    return posthouse.note_depth(depth_of.scope, depth_of.name, max_depth);
  end if;
  return coalesce(counted.jobs, 0);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.detach_range(r posthouse.id_range)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET lock_timeout TO '20ms'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.disown()
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  insert into posthouse.meta (name, value)
  values ('origin', (posthouse.origin_now() || jsonb_build_object('disowned', clock_timestamp()))::text)
  on conflict (name) do update set value = (meta.value::jsonb || jsonb_build_object('disowned', clock_timestamp()))::text
$function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor(older interval DEFAULT '00:05:00'::interval)
 RETURNS TABLE(name text, severity text, subject text, what text, why text, fix text, detail jsonb)
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select d.* from (
    select * from posthouse.doctor_settings() union all select * from posthouse.doctor_tables() union all select * from posthouse.doctor_jobs()
    union all select * from posthouse.doctor_workers() union all select * from posthouse.doctor_horizon(doctor.older)) d
  order by array_position(array['bad', 'warning', 'note'], d.severity), d.name, d.subject
$function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_horizon(older interval DEFAULT '00:05:00'::interval, xids integer DEFAULT 100000)
 RETURNS TABLE(name text, severity text, subject text, what text, why text, fix text, detail jsonb)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_ids(ids bigint[])
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select array_to_string(ids[:5], ', ') || case when cardinality(ids) > 5 then ', …' else '' end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_jobs(max_jobs integer DEFAULT 100000)
 RETURNS TABLE(name text, severity text, subject text, what text, why text, fix text, detail jsonb)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_setting(setting text, value text)
 RETURNS text
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
$function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_settings()
 RETURNS TABLE(name text, severity text, subject text, what text, why text, fix text, detail jsonb)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_tables(dead_min bigint DEFAULT 100000)
 RETURNS TABLE(name text, severity text, subject text, what text, why text, fix text, detail jsonb)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.doctor_workers()
 RETURNS TABLE(name text, severity text, subject text, what text, why text, fix text, detail jsonb)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.done_behind_gates(gated posthouse.job[], applied bigint[], ids bigint[], fences integer[], usages jsonb[], OUT passed posthouse.job[], OUT used jsonb[], OUT called boolean[])
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  select coalesce(array_agg(jobs.j), '{}'), coalesce(array_agg(usages[width_bucket((jobs.j).id, ids)]), '{}'), coalesce(array_agg(true), '{}')
  into passed, used, called
  from (select gated[i] as j from generate_subscripts(gated, 1) i) jobs
  where (jobs.j).id = any(applied) and (jobs.j).fence = fences[width_bucket((jobs.j).id, ids)];
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.done_outcomes(outcomes jsonb, OUT ids bigint[], OUT fences integer[], OUT results jsonb[], OUT usages jsonb[], OUT flags jsonb[])
 RETURNS record
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
#variable_conflict use_column
begin
  select array_agg(d.id), array_agg(d.fence), case when count(d.result) > 0 then array_agg(d.result) end,
    case when count(d.usage) > 0 then array_agg(d.usage) end, case when count(d.flags) > 0 then array_agg(d.flags) end
  into ids, fences, results, usages, flags
  from (
    select distinct on (x.id) x.id, x.fence,
      case when pg_column_size(x.result) > 33554432 then posthouse.cap_json(x.result, 33554432) else x.result end as result,
      case when pg_column_size(x.usage) > 65536 then posthouse.cap_json(x.usage, 65536) else x.usage end as usage,
      case when pg_column_size(x.result) > 33554432 then coalesce(x.flags, '[]') || '["truncated"]' else '[]' || x.flags end as flags
    from jsonb_to_recordset(outcomes) x(id bigint, fence int, outcome text, result jsonb, usage jsonb, flags jsonb)
    where x.outcome = 'done' and x.id is not null and x.fence is not null
    order by x.id, x.fence desc) d;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.drop_detached()
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET lock_timeout TO '50ms'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.drop_payloads(ids bigint[], ended bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  gone bigint[];
  first_id bigint;
  last_id bigint;
begin
  select array_agg(i.id), min(i.id), max(i.id) into gone, first_id, last_id from unnest(ids) i(id) where i.id = any(ended);
  -- The bounds tell which partitions need not be looked into.
  delete from posthouse.payload p where p.id = any(gone) and p.id >= first_id and p.id <= last_id;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.due_in(s posthouse.sweep)
 RETURNS double precision
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return case when s.ran_at > clock_timestamp() + interval '5 seconds' then 0 else greatest(0, 1000 * (
    extract(epoch from s.ran_at + greatest(case when s.more then interval '0' else s.every end, s.took_ms * s.pause * interval '1 millisecond'))::float8
    - extract(epoch from clock_timestamp())::float8)) end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.due_schedules(most integer, at timestamp with time zone DEFAULT NULL::timestamp with time zone)
 RETURNS TABLE(name text, version bigint, cron text, timezone text, catch_up text, catch_up_max integer, next_s bigint, base_s bigint, now_s bigint)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
AS $function$
#variable_conflict use_column
declare
  now_at timestamptz := coalesce(at, clock_timestamp());
begin
  perform posthouse.check_isolation();
  -- In a copy that nobody has adopted they rest: the other database fires them.
  if (select o.is_copy from posthouse.origin() o) then
    return;
  end if;
  -- The clock was ahead, and has been set back: go on after the last tick that has been fired and is past. Those that were fired
  -- early will not be again.
  update posthouse.schedule s set next_at = null, planned_at = null
  where s.name in (select x.name from posthouse.schedule x where x.planned_at > now_at + interval '5 seconds' for update skip locked);
  return query
    select s.name, s.version, s.cron, s.timezone, s.catch_up, s.catch_up_max, extract(epoch from s.next_at)::bigint,
      case when s.next_at is null then floor(extract(epoch from least(now_at, greatest(s.since, coalesce(
        (select r.tick from posthouse.schedule_run r where r.schedule = s.name and r.tick <= now_at order by r.tick desc limit 1),
        (select now_at from posthouse.schedule_run r where r.schedule = s.name limit 1), '-infinity')))))::bigint end,
      floor(extract(epoch from now_at))::bigint
    from posthouse.schedule s
    where s.paused_at is null and coalesce(s.next_at, '-infinity') <= now_at
      and (s.error_at > now_at - interval '10 seconds' and s.error_at <= now_at) is not true
    order by coalesce(s.next_at, '-infinity') limit most;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.due_sweeps()
 RETURNS SETOF text
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select s.name from posthouse.sweep s where posthouse.is_due(s) order by s.ran_at, s.name
$function$
;

CREATE OR REPLACE FUNCTION posthouse.end_isolation(dry_run boolean DEFAULT false)
 RETURNS SETOF text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return query select posthouse.run_steps(array(select posthouse.isolation_end_steps()), dry_run);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.end_sweep(part text, took_ms double precision, more boolean DEFAULT false, error text DEFAULT NULL::text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  was record;
  now_at timestamptz := clock_timestamp();
begin
  select s.failing_since, s.failed_at into was from posthouse.sweep s where s.name = part;
  update posthouse.sweep s
  set ran_at = now_at, took_ms = end_sweep.took_ms, more = end_sweep.more and end_sweep.error is null, runs = s.runs + 1,
    failures = s.failures + (end_sweep.error is not null)::int,
    failed_at = case when end_sweep.error is null then s.failed_at else now_at end,
    error = coalesce(posthouse.cap_text(end_sweep.error), s.error),
    failing_since = case when end_sweep.error is not null then coalesce(s.failing_since, now_at) end
  where s.name = part;
  if error is not null and was.failing_since is not null then
    perform posthouse.raise_alert('sweep', part, format('the sweep of %s fails since %s: %s', part,
      to_char(was.failing_since at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"'), error), jsonb_build_object('sweep', part));
  elsif error is null and was.failed_at > was.failing_since then
    perform posthouse.resolve_alert('sweep', part);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.enqueue(kind text, payload jsonb DEFAULT '{}'::jsonb, queue text DEFAULT 'default'::text, tenant text DEFAULT 'default'::text, priority integer DEFAULT 0, delay interval DEFAULT NULL::interval, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, max_attempts integer DEFAULT NULL::integer, timeout interval DEFAULT NULL::interval, dedupe_key text DEFAULT NULL::text, dedupe_for interval DEFAULT NULL::interval, trace jsonb DEFAULT NULL::jsonb, gates text[] DEFAULT '{}'::text[], tokens integer DEFAULT NULL::integer, dedupe_policy text DEFAULT NULL::text, dedupe_by_payload boolean DEFAULT NULL::boolean)
 RETURNS TABLE(id bigint, state text, duplicate boolean, deduped text)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
declare
  new_id bigint;
  holder bigint;
  lane_id bigint;
  limited boolean;                    -- a limit of how many may wait may be for it; null: there is no lane yet
  housed boolean;                     -- whether there is a partition for it
  behind boolean;
  serial_by text;
  serial text := '';
  queued boolean := false;
  keyed boolean := false;
  due timestamptz := '-infinity';
  long_ago timestamptz := clock_timestamp() - interval '3 seconds';     -- see posthouse.notify_lanes
  longer_ago timestamptz := long_ago - interval '7 seconds';
  alone boolean := posthouse.is_alone();
  asked text[] := case when enqueue.gates = '{}' and enqueue.kind is distinct from 'llm.chat' then '{}'
    else posthouse.asked_gates(enqueue.kind, enqueue.payload, enqueue.gates) end;
begin
  if session_user <> current_user then
    -- The usual case of posthouse.check_enqueue.
    if not exists (select from posthouse.tenant_login x
                   where x.login = session_user and (x.every_tenant or x.tenant = enqueue.tenant)) or enqueue.kind like 'posthouse.%' then
      perform posthouse.check_enqueue(enqueue.tenant, enqueue.kind);
    end if;
  end if;
  new_id := nextval('posthouse.job_id_seq');
  select l.id, l.behind, l.limited, exists (select from posthouse.id_range r where r.upper > new_id and r.lower <= new_id),
    (select q.serial_by from posthouse.queue q where q.name = enqueue.queue)
  into lane_id, behind, limited, housed, serial_by
  from (select) one
  left join lateral (
    select l.id, l.limited, case when alone then (
        select true from posthouse.job j
        where j.lane_id = l.id and j.state = 'queued' and j.run_at < long_ago
          and j.run_at >= greatest(longer_ago, coalesce(
            (select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1),
            (select f.floor_at from posthouse.lane_floor f where f.lane_id = 0 order by f.seq desc limit 1)))
        order by j.lane_id desc, j.run_at desc, j.id desc limit 1) end as behind
    from posthouse.lane l
    where l.queue = enqueue.queue and l.tenant = enqueue.tenant and l.kind = enqueue.kind and l.priority = enqueue.priority
      and l.gates = asked and l.serial = ''
    order by l.ready_at, l.id limit 1) l on true;
  if serial_by is not null then
    serial := posthouse.serial_value(enqueue.payload, serial_by);
    lane_id := case when serial = '' then lane_id end;
  end if;
  -- The names of a lane were checked when it was made.
  if lane_id is null or num_nonnulls(enqueue.delay, enqueue.run_at, enqueue.max_attempts, enqueue.timeout, enqueue.dedupe_key,
       enqueue.dedupe_for, enqueue.trace, enqueue.tokens, enqueue.dedupe_policy, enqueue.dedupe_by_payload) > 0 or (pg_column_size(enqueue.payload) <= 33554432) is not true then
    perform posthouse.check_job(enqueue.kind, enqueue.payload, enqueue.queue, enqueue.tenant, enqueue.priority, enqueue.delay,
      enqueue.run_at, enqueue.max_attempts, enqueue.timeout, enqueue.dedupe_key, enqueue.dedupe_for, enqueue.trace,
      asked, enqueue.tokens, enqueue.dedupe_policy, enqueue.dedupe_by_payload);
    due := coalesce(enqueue.run_at, clock_timestamp() + greatest(enqueue.delay, interval '0'), '-infinity');
  end if;
  if not housed then
    perform posthouse.make_partitions(new_id);
  end if;
  if enqueue.dedupe_key is not null or enqueue.dedupe_by_payload then
    keyed := true;
    dedupe_key := coalesce(enqueue.dedupe_key, posthouse.payload_key(enqueue.payload));
    insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at, body)
    values (enqueue.tenant, enqueue.kind, enqueue.dedupe_key, new_id, clock_timestamp() + enqueue.dedupe_for,
      case when enqueue.dedupe_policy = 'same' then posthouse.payload_hash(enqueue.payload) end)
    on conflict do nothing;
    if not found then
      select t.holder, t.answer into holder, deduped from posthouse.take_held_key(enqueue.tenant, enqueue.kind, enqueue.dedupe_key, new_id,
        enqueue.dedupe_for, coalesce(enqueue.dedupe_policy, 'keep'), enqueue.payload, due, '{}') t;
      if deduped = 'replaced' then
        perform posthouse.replace_job(holder, posthouse.lane_for(enqueue.queue, enqueue.priority, enqueue.tenant, enqueue.kind, asked, serial,
          greatest(due, clock_timestamp())), enqueue.payload, enqueue.trace, due, enqueue.max_attempts, enqueue.timeout, enqueue.tokens);
      end if;
      if holder <> new_id then
        return query select holder, posthouse.state_of(holder), true, deduped;
        return;
      end if;
    end if;
  end if;
  if limited is not false then
    perform posthouse.check_depth(array[enqueue.queue], array[enqueue.tenant], array[1]);
  end if;
  if deduped = 'behind' then
    due := 'infinity';
  end if;
  insert into posthouse.payload (id, payload, trace) values (new_id, enqueue.payload, enqueue.trace);
  -- The usual case, a lane that is awake: look once more after it is held. The clock is read within the statement, after the
  -- table is locked: see posthouse.advance_floors.
  if lane_id is not null and current_setting('transaction_isolation') = 'read committed'
     and pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int) is not null then
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    select new_id, l.id, greatest(due, clock_timestamp()), clock_timestamp(), coalesce(enqueue.max_attempts, 5),
      extract(epoch from enqueue.timeout) * 1000, keyed, enqueue.tokens
    from posthouse.lane l where l.id = lane_id and (l.ready_at <= greatest(due, clock_timestamp()) or l.blocked_by is not null);
    queued := found;
  end if;
  if not queued then
    lane_id := posthouse.lane_for(enqueue.queue, enqueue.priority, enqueue.tenant, enqueue.kind, asked, serial, greatest(due, clock_timestamp()));
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    values (new_id, lane_id, greatest(due, clock_timestamp()), clock_timestamp(), coalesce(enqueue.max_attempts, 5),
      extract(epoch from enqueue.timeout) * 1000, keyed, enqueue.tokens);
  end if;
  if deduped = 'behind' then
    perform posthouse.mark_behind(new_id, enqueue.tenant, enqueue.kind, enqueue.dedupe_key);
  elsif behind is not true and current_setting('posthouse.notify', true) is distinct from 'off' then
    perform pg_notify('posthouse_wake', enqueue.queue);
  end if;
  id := new_id; state := 'queued'; duplicate := false;
  return next;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.enqueue_many(jobs jsonb)
 RETURNS TABLE(ordinal integer, id bigint, state text, duplicate boolean, deduped text)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
declare
  n int;
  ids bigint[];
  holders bigint[];
  answers text[];                     -- what became of each by its dedupe key; null: nothing to say of any
  seen record;
  -- In variables of their own, where an element is found at once.
  queues text[];
  tenants text[];
  kinds text[];
  lanes bigint[] := '{}';
  needed boolean[];
  serial boolean;                     -- some queue runs what jobs share one at a time
begin
  if jobs is null or jsonb_typeof(jobs) <> 'array' then
    raise exception using errcode = 'PH001', message = 'jobs: must be a JSON array of objects';
  end if;
  n := jsonb_array_length(jobs);
  if n = 0 then
    return;
  elsif n > 10000 then
    raise exception using errcode = 'PH001', message = format('jobs: %s in one call, at most 10000 are allowed', n);
  end if;
  if jobs @> '[{"kind": "llm.chat"}]' then
    -- Each passes the gate of its model.
    select jsonb_agg(case when j.job ->> 'kind' = 'llm.chat' and jsonb_typeof(coalesce(j.job -> 'gates', '[]')) = 'array'
        then j.job || jsonb_build_object('gates', posthouse.asked_gates('llm.chat', j.job -> 'payload', array(select jsonb_array_elements_text(j.job -> 'gates'))))
        else j.job end order by j.place)
    into jobs from jsonb_array_elements(jobs) with ordinality j(job, place);
  end if;
  serial := exists (select from posthouse.queue q where q.serial_by is not null);
  if serial then
    -- What jobs share goes with them as the last of their gates, with a mark that no name of a gate has.
    select jsonb_agg(case when s.gates is not null and (s.value <> '' or jsonb_array_length(s.gates) > 0) then j.job || jsonb_build_object('gates', s.gates || to_jsonb(chr(31) || s.value))
        else j.job end order by j.place)
    into jobs
    from jsonb_array_elements(jobs) with ordinality j(job, place)
    cross join lateral (
      select coalesce((select posthouse.serial_value(j.job -> 'payload', q.serial_by) from posthouse.queue q
          where q.name = coalesce(j.job ->> 'queue', 'default') and q.serial_by is not null), '') as value,
        case coalesce(jsonb_typeof(j.job -> 'gates'), 'null') when 'array' then j.job -> 'gates' when 'null' then '[]' end as gates) s;
  end if;
  select s.* into seen from posthouse.survey(jobs, n) s;
  if not serial and array_remove(seen.serials, null) <> '{}' then
    perform posthouse.check_gates(array[chr(31)]);
  end if;
  if session_user <> current_user then
    perform posthouse.check_enqueue(t, k) from unnest(seen.tenants, seen.kinds) x(t, k);
  end if;
  select array_agg(nextval('posthouse.job_id_seq')) into ids from generate_series(1, n);
  if not exists (select from posthouse.id_range r where r.upper > ids[n] and r.lower <= ids[1]) then
    perform posthouse.make_partitions(ids[n]);
  end if;
  holders := ids;
  queues := seen.queues;
  tenants := seen.tenants;
  kinds := seen.kinds;
  needed := array_fill(true, array[cardinality(kinds)]);
  if seen.keyed then
    select t.holders, t.answers into holders, answers from posthouse.take_keys(jobs, ids) t;
    needed := array(select bool_or(holders[o] = ids[o] or answers[o] = 'replaced') from generate_series(1, n) o
                    group by seen.line_of[o] order by seen.line_of[o]);
  end if;
  if seen.limited then
    perform posthouse.check_depth(queues, tenants,
      array(select count(*) filter (where holders[o] = ids[o])::int from generate_series(1, n) o group by seen.line_of[o] order by seen.line_of[o]));
  end if;
  for i in 1 .. cardinality(needed) loop
    lanes[i] := case when needed[i] then posthouse.lane_for(queues[i], seen.priorities[i], tenants[i], kinds[i],
      coalesce(seen.gates[i]::text[], '{}'), coalesce(seen.serials[i], ''), greatest(seen.dues[i], clock_timestamp())) end;
  end loop;
  insert into posthouse.payload (id, payload, trace)
  select ids[x.ordinal], coalesce(x.payload, '{}'), x.trace
  from rows from (jsonb_to_recordset(jobs) as (payload jsonb, trace jsonb)) with ordinality x(payload, trace, ordinal)
  where holders[x.ordinal] = ids[x.ordinal];
  if seen.plain then
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, keyed)
    select ids[o], lanes[seen.line_of[o]], clock_timestamp(), clock_timestamp(), 5, false from generate_series(1, n) o;
  else
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, tokens)
    select ids[p.ordinal], lanes[seen.line_of[p.ordinal]],
      case when answers[p.ordinal] = 'behind' then 'infinity' else greatest(p.due, clock_timestamp()) end, clock_timestamp(), p.max_attempts,
      extract(epoch from p.timeout) * 1000, p.dedupe_key is not null, p.tokens
    from posthouse.parse_jobs(jobs) p where holders[p.ordinal] = ids[p.ordinal];
  end if;
  if answers && array['replaced', 'behind'] then
    perform case when answers[p.ordinal] = 'replaced'
      then posthouse.replace_job(holders[p.ordinal], lanes[seen.line_of[p.ordinal]], p.payload, p.trace, p.due, p.max_attempts, p.timeout, p.tokens)
      else posthouse.mark_behind(ids[p.ordinal], p.tenant, p.kind, p.dedupe_key) end
    from posthouse.parse_jobs(jobs) p
    where answers[p.ordinal] = 'replaced' and not holders[p.ordinal] = any(ids) or answers[p.ordinal] = 'behind' and holders[p.ordinal] = ids[p.ordinal];
  end if;
  perform posthouse.notify_lanes(lanes, queues);
  return query
    select o.n::int, holders[o.n],
      case when holders[o.n] = ids[o.n] then 'queued' else posthouse.state_of(holders[o.n]) end, holders[o.n] <> ids[o.n], answers[o.n]
    from generate_series(1, n) o(n);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.enqueue_plain(kind text, queue text, tenant text, priority integer, payloads jsonb[])
 RETURNS bigint[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.estimate_tokens(payload jsonb, max_output_tokens integer)
 RETURNS bigint
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return octet_length(payload::text) / 4 + least(greatest(coalesce(
    posthouse.number_of(payload -> 'max_completion_tokens', null), posthouse.number_of(payload -> 'max_tokens', null),
    max_output_tokens, 1000), 1), 1e9)::bigint;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.expire(max_jobs integer DEFAULT 1000, budget interval DEFAULT '00:00:00.01'::interval)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
declare
  stop_at timestamptz := clock_timestamp() + budget;
  shortest interval;
  s posthouse.slice;
  n int;
  jobs int := 0;
begin
  if not pg_try_advisory_xact_lock(1346912000, 6) then
    return false;
  end if;
  shortest := posthouse.shortest_retention();
  for s in select x.* from posthouse.slice x where x.due_at <= clock_timestamp() order by x.due_at, x.lower loop
    -- Until nothing more is found in it, which is noted.
    loop
      n := posthouse.visit_slice(s, shortest, max_jobs - jobs);
      jobs := jobs + n;
      if jobs >= max_jobs or clock_timestamp() >= stop_at then
        return true;
      end if;
      exit when n = 0;
    end loop;
  end loop;
  return false;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.explain(job_id bigint)
 RETURNS TABLE(state text, reason text, until timestamp with time zone)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
#variable_conflict use_column
declare
  j posthouse.job;
  l posthouse.lane;
  w posthouse.worker;
  ahead bigint;
  is_held boolean := false;
  frank boolean := true;
begin
  if session_user <> current_user then
    perform posthouse.check_job_login(job_id);
    frank := posthouse.sees_all();
  end if;
  select * into j from posthouse.job x where x.id = job_id;
  if j.id is null then
    return query
      select 'failed', format('failed after attempt %s of %s: %s', d.attempt, d.max_attempts, d.error), null::timestamptz
      from posthouse.dead_letter d where d.id = job_id
      union all
      select a.state::text, format('%s at %s, in attempt %s', a.state, a.finished_at, a.attempt), null
      from posthouse.archive a where a.id = job_id
      union all
      select t.state::text, format('%s at %s, in attempt %s; its queue keeps no history', t.state, t.finished_at, t.attempt),
        t.finished_at + interval '10 minutes'
      from posthouse.tombstone t where t.id = job_id;
    if not found then
      raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
    end if;
    return;
  end if;
  state := j.state::text;
  select * into l from posthouse.lane x where x.id = j.lane_id;
  if j.state = 'running' then
    select * into w from posthouse.worker x where x.id = j.worker;
    until := posthouse.lease_end(w);
    reason := case
      when w.id is null or w.dead_at is not null then format('its worker %s is lost; the next sweep takes the job back', j.worker)
      when until <= clock_timestamp() then format('the lease of its worker %s pid %s is over; the next sweep takes the job back', w.host, w.pid)
      when j.cancel_asked then format('it was asked to cancel; worker %s pid %s hears of it at its next heartbeat', w.host, w.pid)
      else format('attempt %s of %s runs on worker %s pid %s since %s', j.attempt, j.max_attempts, w.host, w.pid, j.started_at) end;
    return next;
    return;
  end if;
  if j.run_at > clock_timestamp() then
    -- One that is due at infinity waits for another job: see posthouse.take_held_key.
    reason := case when j.run_at = 'infinity' then coalesce(j.reason, 'held back') else 'not due yet' || coalesce(': ' || j.reason, '') end;
    until := nullif(j.run_at, 'infinity');
    return next;
  end if;
  -- What others used of a gate that a tenant shares with them is not for him. Of gates `tenant:…` a job passes its own only.
  for reason, until in
    select case when frank or h.reason ~ '^((the budget of )?gate tenant:|job [0-9]+, which shares)' then h.reason else 'a gate that it shares with others holds it back' end, h.until
    from posthouse.held_by(j, j.run_at > clock_timestamp()) h
  loop
    is_held := true;
    return next;
  end loop;
  until := null;
  if not exists (select from posthouse.worker x where x.dead_at is null and posthouse.lease_end(x) > clock_timestamp()
                 and l.queue = any(x.queues) and l.kind = any(x.kinds)) then
    reason := format('no live worker serves kind %s on queue %s', quote_ident(l.kind), quote_ident(l.queue));
    return next;
  elsif j.run_at <= clock_timestamp() and not is_held then
    select count(*) into ahead from (
      select from posthouse.job x where x.lane_id = j.lane_id and x.state = 'queued' and (x.run_at, x.id) < (j.run_at, j.id) limit 100000) x;
    reason := format('waits for a free slot: %s jobs of its tenant and kind are before it', ahead);
    return next;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.find_jobs(filter jsonb, max_jobs integer DEFAULT 10000, after jsonb DEFAULT NULL::jsonb, OUT ids bigint[], OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  states constant text[] := '{queued,running,waiting,done,failed,cancelled}';
begin
  select p.ids, p.next into ids, next from posthouse.pick_jobs(posthouse.parse_filter(filter, states, states), posthouse.check_batch(max_jobs), after) p;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.finish_detaches()
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET lock_timeout TO '50ms'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.fire_schedule(name text, version bigint, next_s bigint, ticks bigint[], late integer, missed bigint, then_s bigint, at timestamp with time zone DEFAULT NULL::timestamp with time zone)
 RETURNS jsonb
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET lock_timeout TO '1s'
AS $function$
#variable_conflict use_column
declare
  s posthouse.schedule;
  now_at timestamptz := coalesce(at, clock_timestamp());
  due_at timestamptz;
  e record;
  runs jsonb := '[]';
begin
  perform posthouse.check_isolation();
  select * into s from posthouse.schedule x where x.name = fire_schedule.name for update skip locked;
  if not found or s.version <> fire_schedule.version or s.paused_at is not null or s.next_at is distinct from to_timestamp(fire_schedule.next_s) then
    return null;
  end if;
  begin
    for i in 1 .. cardinality(ticks) loop
      continue when exists (select from posthouse.schedule_run r where r.schedule = s.name and r.tick = to_timestamp(ticks[i]));
      due_at := posthouse.jitter_of(s, ticks[i])
        + case when i > late then to_timestamp(ticks[i]) when late > 1 then now_at + s.catch_up_over * ((i - 1) / late::float8) else now_at end;
      select x.id, x.duplicate into e
      from posthouse.enqueue_many(jsonb_build_array(s.job || case when due_at > now_at then jsonb_build_object('run_at', due_at) else '{}' end)) x;
      insert into posthouse.schedule_run (schedule, tick, job_id, duplicate, fired_at)
      values (s.name, to_timestamp(ticks[i]), e.id, e.duplicate, now_at);
      runs := runs || jsonb_build_object('tick_s', ticks[i], 'job', e.id, 'duplicate', e.duplicate);
    end loop;
  exception when others then
    -- What is over in a moment comes again at once: somebody else's lock, a deadlock, a server that goes down.
    if sqlstate ~ '^(40|53|55|57|PH007)' then
      raise;
    end if;
    perform posthouse.refuse_schedule(s.name, s.version, sqlerrm, false, now_at);
    return jsonb_build_object('error', sqlerrm);
  end;
  update posthouse.schedule x set next_at = coalesce(to_timestamp(then_s), 'infinity'), planned_at = now_at, fired = s.fired + jsonb_array_length(runs),
    missed = s.missed + fire_schedule.missed, error = null, error_at = null,
    last_tick = case when runs = '[]' then s.last_tick else to_timestamp((runs -> -1 ->> 'tick_s')::bigint) end,
    last_fired_at = case when runs = '[]' then s.last_fired_at else now_at end,
    last_job_id = coalesce((runs -> -1 ->> 'job')::bigint, s.last_job_id)
  where x.name = s.name;
  if (s.fired + jsonb_array_length(runs)) / 100 > s.fired / 100 then
    delete from posthouse.schedule_run r where r.schedule = s.name
      and r.tick < (select k.tick from posthouse.schedule_run k where k.schedule = s.name order by k.tick desc offset 999 limit 1);
  end if;
  if s.error is not null then
    perform posthouse.resolve_alert('schedule', s.name);
  end if;
  return jsonb_build_object('runs', runs);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.first_due(lane_id bigint, due timestamp with time zone)
 RETURNS TABLE(run_at timestamp with time zone, id bigint)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.floor_of(lane_id bigint)
 RETURNS timestamp with time zone
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  return coalesce(case when common.behind then (
    select f.floor_at from posthouse.lane_floor f where f.lane_id = floor_of.lane_id order by f.seq desc limit 1) end, common.floor_at);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.fold()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  held record;
begin
  with gone as (delete from posthouse.tally t returning t.lane_id, t.state, t.jobs)
  insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, g.state, sum(g.jobs) from gone g group by g.lane_id, g.state;
  delete from posthouse.lane_floor f using (
    select x.lane_id, max(x.seq) as newest from posthouse.lane_floor x group by x.lane_id) n
  where f.lane_id = n.lane_id and f.seq < n.newest;
  delete from posthouse.gate_state s using (
    select x.gate_id, x.member, max(x.seq) as newest from posthouse.gate_state x group by x.gate_id, x.member) n
  where s.gate_id = n.gate_id and s.member = n.member and s.seq < n.newest;
  -- What jobs share that run one at a time, where none of them has begun: there may be as many values as jobs.
  delete from posthouse.gate_state s using posthouse.gate g
  where g.name >= 'serial:' and g.name < 'serial;' and s.gate_id = g.id
    and not exists (select from unnest(s.job_ids, s.fences) u(id, fence) join posthouse.job j on j.id = u.id and j.fence = u.fence);
  delete from posthouse.dedupe d where (d.tenant, d.scope, d.key) in (
    select x.tenant, x.scope, x.key from posthouse.dedupe x where x.expires_at < clock_timestamp()
    order by x.tenant, x.scope, x.key limit 10000 for update skip locked);
  -- Keys whose job is no longer live. First the lock and then, in a statement of its own, the look: an enqueue may just
  -- have given the key to a new job.
  for held in
    select x.tenant, x.scope, x.key from posthouse.dedupe x
    where x.expires_at is null and x.next_id is null and not exists (select from posthouse.job j where j.id = x.job_id)
    order by x.tenant, x.scope, x.key limit 1000 for update skip locked
  loop
    delete from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key
      and d.expires_at is null and d.next_id is null and not exists (select from posthouse.job j where j.id = d.job_id);
  end loop;
  -- Claims whose worker has no row: it was dead, or somebody removed it, which comes to the same.
  insert into posthouse.worker (id, host, pid, version, queues, kinds, slots, lease_ms, started_at, beat_at, expires_at, dead_at)
  select distinct c.worker, '', 0, '', '{}'::text[], '{}'::text[], 0, 0, c.now_at, c.now_at, c.now_at, c.now_at
  from (select x.worker, clock_timestamp() as now_at from posthouse.claimed x
        where not exists (select from posthouse.worker w where w.id = x.worker)) c
  on conflict do nothing;
  delete from posthouse.worker w where w.dead_at < clock_timestamp() - interval '1 day'
    and not exists (select from posthouse.claimed c where c.worker = w.id);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.fold_alert(kind text, subject text, message text, detail jsonb, n bigint, first_at timestamp with time zone, last_at timestamp with time zone, resolves boolean)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.fold_dead_letters()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.fold_usage(max_rows integer DEFAULT 200000)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  folded bigint;
begin
  -- Rows are added in the order of their key, so that two who fold at once wait for each other and never both.
  with gone as (
    delete from posthouse.usage u where u.ctid = any(array(select x.ctid from posthouse.usage x limit max_rows)) returning u.*
  ), sums as (
    select g.lane_id, g.day, g.model, sum(g.attempts) as attempts, sum(g.requests) as requests, sum(g.input_tokens) as input_tokens,
      sum(g.output_tokens) as output_tokens, sum(g.cached_tokens) as cached_tokens, sum(g.cost_usd) as cost_usd, sum(g.unpriced) as unpriced
    from gone g group by g.lane_id, g.day, g.model
  ), added as (
    insert into posthouse.usage_day as d (day, tenant, queue, kind, model, attempts, requests, input_tokens, output_tokens,
      cached_tokens, cost_usd, unpriced)
    select s.day, l.tenant, l.queue, l.kind, s.model, sum(s.attempts), sum(s.requests), sum(s.input_tokens), sum(s.output_tokens),
      sum(s.cached_tokens), sum(s.cost_usd), sum(s.unpriced)
    from sums s
    cross join lateral (select l.tenant, l.queue, l.kind from posthouse.lane l where l.id = s.lane_id offset 0) l
    group by s.day, l.tenant, l.queue, l.kind, s.model
    order by s.day, l.tenant, l.queue, l.kind, s.model
    on conflict (day, tenant, queue, kind, model) do update set attempts = d.attempts + excluded.attempts,
      requests = d.requests + excluded.requests, input_tokens = d.input_tokens + excluded.input_tokens,
      output_tokens = d.output_tokens + excluded.output_tokens, cached_tokens = d.cached_tokens + excluded.cached_tokens,
      cost_usd = case when d.cost_usd is null then excluded.cost_usd else d.cost_usd + coalesce(excluded.cost_usd, 0) end,
      unpriced = d.unpriced + excluded.unpriced
  )
  select count(*) into folded from gone;
  return folded;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.follow_missed(max_jobs integer DEFAULT 1000)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  held posthouse.dedupe;
  n int := 0;
begin
  -- First the lock and then, in a statement of its own, the look: an enqueue may just have given the key to another job.
  for held in
    select x.* from posthouse.dedupe x
    where x.next_id is not null and not exists (select from posthouse.job j where j.id = x.job_id)
    order by x.job_id limit max_jobs for update skip locked
  loop
    select d.* into held from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    continue when held.next_id is null or exists (select from posthouse.job j where j.id = held.job_id);
    n := n + posthouse.follow_up(held)::int;
  end loop;
  return n >= max_jobs;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.follow_up(held posthouse.dedupe)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  j posthouse.job;
begin
  select x.* into j from posthouse.job x where x.id = held.next_id for update skip locked;
  if j.id is null then
    if exists (select from posthouse.job x where x.id = held.next_id) then
      return false;
    end if;
    -- Cancelled meanwhile.
    delete from posthouse.dedupe d where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    return true;
  end if;
  update posthouse.dedupe d set job_id = j.id, expires_at = null, next_id = null, next_at = null
  where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
  -- Unless somebody asked for it to run at once.
  if j.state = 'queued' and j.run_at = 'infinity' then
    perform posthouse.requeue_job(j, greatest(held.next_at, clock_timestamp()), false, false, null);
  end if;
  return true;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.forget(max_jobs integer DEFAULT 10000)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  over timestamptz := clock_timestamp() - interval '10 minutes';
  start_at timestamptz := (select s.floor_at from posthouse.sweep s where s.name = 'tombstones');
  end_at timestamptz;
  ids bigint[];
  held bigint[];
  free bigint[];
  first_id bigint;
  last_id bigint;
begin
  with due as (
    delete from posthouse.burial b where b.ctid = any(array(
      select x.place
      from (
        select x.ctid as place, sum(x.jobs) over (order by x.buried_at rows unbounded preceding) - x.jobs as before
        from (select b.ctid, b.buried_at, b.jobs from posthouse.burial b
              where b.buried_at >= start_at and b.buried_at <= over order by b.buried_at limit max_jobs) x) x
      where x.before < max_jobs))
    returning b.buried_at, b.job_ids
  )
  select max(d.buried_at), array_agg(u.id) into end_at, ids from due d cross join lateral unnest(d.job_ids) u(id);
  if ids is null then
    end_at := over;
  else
    -- By the job, one at a time, whatever the planner thinks of the table's size.
    with later as (
      select i.id as job_id, d.expires_at
      from unnest(ids) i(id)
      cross join lateral (
        select d.expires_at from posthouse.dedupe d
        where d.job_id = i.id and coalesce(d.expires_at, '-infinity') > clock_timestamp() offset 0) d
    ), again as (
      insert into posthouse.burial (buried_at, jobs, job_ids)
      select max(l.expires_at) - interval '10 minutes', count(*), array_agg(l.job_id) from later l group by date_trunc('hour', l.expires_at)
    )
    select array_agg(l.job_id) into held from later l;
    if held is not null then
      ids := array(select unnest(ids) except select unnest(held));
    end if;
    -- One that was retried since, and ended again, has a younger tombstone; one that is still live has none, and keeps its payload.
    -- Who just brings one back is not waited for: it comes again.
    free := array(select t.id from posthouse.tombstone t where t.id = any(ids) and t.finished_at <= over for update skip locked);
    insert into posthouse.burial (buried_at, jobs, job_ids)
    select clock_timestamp(), count(*), array_agg(t.id) from posthouse.tombstone t
    where t.id = any(ids) and t.finished_at <= over and not t.id = any(free) having count(*) > 0;
    with gone as (
      delete from posthouse.tombstone t where t.id = any(free) returning t.id
    )
    select array_agg(g.id), min(g.id), max(g.id) into ids, first_id, last_id from gone g;
    -- The bounds tell which partitions need not be looked into.
    delete from posthouse.payload p where p.id = any(ids) and p.id >= first_id and p.id <= last_id;
  end if;
  -- Now and then also when there was nothing to do, since an open transaction may have kept it back before.
  update posthouse.sweep s
  set floor_at = greatest(s.floor_at, least(end_at, greatest(posthouse.oldest_writer(), over - interval '1 hour')))
  where s.name = 'tombstones' and s.floor_at < end_at - case when ids is null then interval '10 seconds' else interval '0' end;
  return coalesce(cardinality(ids), 0);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.forget_redrives()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  start_at timestamptz := (select s.floor_at from posthouse.sweep s where s.name = 'redrives');
  end_at timestamptz;
begin
  select max(x.redriven_at) into end_at
  from (select r.redriven_at from posthouse.redriven r where r.redriven_at > start_at order by r.redriven_at limit 1000) x;
  delete from posthouse.redriven r
  where r.redriven_at > start_at and r.redriven_at <= end_at and posthouse.state_of(r.job_id) is null;
  update posthouse.sweep s set floor_at = coalesce(end_at, '-infinity') where s.name = 'redrives' and s.floor_at <> coalesce(end_at, '-infinity');
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.free_gates(lane_id bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  perform posthouse.wake_blocked(g.gate_id, g.member, 1)
  from posthouse.gates_of(array[lane_id]) g join posthouse.gate x on x.id = g.gate_id where x.max_running is not null;
  perform posthouse.notify_queue('*');
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.free_keys(job_ids bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  held record;
begin
  -- By the job and then by the row's place: every other way walks over the dead rows of a key that is used again and again, and
  -- planned for all jobs at once, a table that statistics call small was walked whole.
  for held in
    select x.ctid, x.next_id
    from unnest(job_ids) i(id)
    cross join lateral (
      select x.ctid, x.next_id from posthouse.dedupe x where x.job_id = i.id and x.expires_at is null for update skip locked) x
  loop
    if held.next_id is null then
      delete from posthouse.dedupe d where d.ctid = held.ctid;
    else
      perform posthouse.follow_up(d) from posthouse.dedupe d where d.ctid = held.ctid;
    end if;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.free_serial(lane_id bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  perform posthouse.wake_blocked(g.id, l.tenant || chr(31) || l.serial, 1)
  from posthouse.lane l join posthouse.gate g on g.name = 'serial:' || l.queue
  where l.id = free_serial.lane_id and l.serial <> '';
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gate_room(g posthouse.gate, s posthouse.gate_state, running integer, now_at timestamp with time zone, OUT room integer, OUT until timestamp with time zone, OUT is_probe boolean, OUT weighs boolean, OUT is_spent boolean)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  now_s bigint := floor(extract(epoch from now_at));
  most int;
  ahead float8;                       -- seconds by which what was let through is not yet earned
  again timestamptz;
begin
  room := 2147483647;
  is_probe := false;
  weighs := g.tokens_per_minute is not null;
  is_spent := false;
  if g.closed_at is not null then
    if g.closed_until > now_at then
      room := 0; until := g.closed_until;
      return;
    elsif g.closed_by in ('provider', 'breaker') then
      if posthouse.is_probed(g, now_at) then
        room := 0; until := g.probe_until;
        return;
      end if;
      room := 1; is_probe := true;
    end if;
  end if;
  if g.max_running is not null then
    room := least(room, g.max_running - running);
    if room <= 0 then
      room := 0;
      return;
    end if;
  end if;
  -- Whoever comes after a probe comes slowly at first.
  most := least(g.requests_per_minute, case when g.opened_at > now_at - interval '10 seconds' then 600 end);
  if most is not null then
    ahead := greatest(extract(epoch from s.requests_at - now_at), 0);
    if ahead > 1 then
      room := 0; until := now_at + (ahead - 1) * interval '1 second';
    else
      room := least(room, floor((1 - coalesce(ahead, 0)) * most / 60)::int + 1);
    end if;
    room := least(room, most - posthouse.sum_since(s.seconds, s.requests::bigint[], now_s - 61));
    if room <= 0 then
      room := 0;
      until := greatest(until, posthouse.below_at(s.seconds, s.requests::bigint[], most, now_s));
      return;
    end if;
  end if;
  if weighs then
    ahead := greatest(extract(epoch from s.tokens_at - now_at), 0);
    if ahead > 1 then
      room := 0; until := now_at + (ahead - 1) * interval '1 second';
    end if;
    again := posthouse.below_at(s.seconds, s.tokens, g.tokens_per_minute + 1, now_s);
    if again is not null then
      room := 0; until := greatest(until, again);
    end if;
    if room = 0 then
      return;
    end if;
  end if;
  if g.money_per_day is not null or g.money_per_month is not null then
    if s.spent_month >= g.money_per_month and s.month = date_trunc('month', now_at at time zone 'UTC')::date then
      is_spent := true;
      again := date_trunc('month', now_at at time zone 'UTC') at time zone 'UTC' + interval '1 month';
    elsif s.spent_day >= g.money_per_day and s.day = (now_at at time zone 'UTC')::date then
      is_spent := true;
      again := date_trunc('day', now_at at time zone 'UTC') at time zone 'UTC' + interval '1 day';
    end if;
    if is_spent and g.when_spent = 'hold' then
      room := 0; until := again;
    end if;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gated_jobs(worker uuid, ids bigint[])
 RETURNS posthouse.job[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
begin
  return (
    select array_agg(j) from posthouse.job j
    where j.id = any(ids) and j.worker = gated_jobs.worker and j.state = 'running' and j.reserved is not null);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gates_named(name text)
 RETURNS TABLE(id bigint, member text)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gates_of(lanes bigint[], instead text[] DEFAULT NULL::text[])
 RETURNS TABLE(place integer, gate_id bigint, member text)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gates_open_at(lane_id bigint)
 RETURNS timestamp with time zone
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  look record;
  n record;
  opens timestamptz := '-infinity';
  gate_ids bigint[];
  whose text[];
begin
  select array_agg(g.gate_id), array_agg(g.member) into gate_ids, whose from posthouse.gates_of(array[lane_id]) g;
  if gate_ids is null then
    return opens;
  end if;
  select * into look from posthouse.look_at_gates(gate_ids, whose, array_fill(1, array[cardinality(gate_ids)]), clock_timestamp());
  for i in 1 .. cardinality(look.rooms) loop
    if (look.gates[i]).name like 'serial:%' then
      n := posthouse.serial_next(lane_id, look.states[i], clock_timestamp());
      if n.job_id is null then
        opens := greatest(opens, coalesce(n.until, 'infinity'));
      end if;
    elsif look.rooms[i] <= 0 then
      opens := greatest(opens, coalesce(look.untils[i], 'infinity'));
    end if;
  end loop;
  return opens;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gather_errors(of_job bigint)
 RETURNS jsonb
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  with gone as (delete from posthouse.attempt a where a.job_id = of_job returning a.*)
  select jsonb_agg(jsonb_strip_nulls(to_jsonb(g.*) - 'job_id') order by g.fence) from gone g
$function$
;

CREATE OR REPLACE FUNCTION posthouse.gauge_database()
 RETURNS TABLE(name text, labels jsonb, value double precision)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
begin
  return query
    select g.name, '{}'::jsonb, coalesce(g.value, 0)::float8
    from (
      select max(extract(epoch from clock_timestamp() - h.since)) as seconds, max(age(h.xmin)) as transactions
      from (
        select a.xact_start as since, a.backend_xmin as xmin from pg_stat_activity a
        where a.backend_xmin is not null and a.pid <> pg_backend_pid() and a.backend_type <> 'walsender'
        union all select null, a.backend_xmin from pg_stat_replication a where a.backend_xmin is not null
        union all select x.prepared, x.transaction from pg_prepared_xacts x
        union all select null, s.xmin from pg_replication_slots s where s.xmin is not null
        union all select null, s.catalog_xmin from pg_replication_slots s where s.catalog_xmin is not null) h) x
    cross join lateral (values
      ('database_xmin_age_seconds', x.seconds), ('database_xmin_age_transactions', x.transactions)) g(name, value);
  return query
    select g.name, jsonb_build_object('table', t.name), g.value::float8
    from (
      select regexp_replace(s.relname, '^(payload|archive)_[0-9]+$', '\1') as name, sum(s.n_live_tup) as live, sum(s.n_dead_tup) as dead,
        sum(pg_total_relation_size(s.relid)) as bytes
      from pg_stat_all_tables s
      join pg_class c on c.oid = s.relid and c.relkind = 'r'
      where s.schemaname = 'posthouse'
        and regexp_replace(s.relname, '^(payload|archive)_[0-9]+$', '\1') = any(array['job', 'payload', 'archive', 'dead_letter', 'tombstone',
          'attempt', 'claimed', 'lane', 'lane_floor', 'gate_state', 'dedupe', 'usage'])
      group by 1) t
    cross join lateral (values
      ('table_live_rows', t.live), ('table_dead_rows', t.dead), ('table_bytes', t.bytes)) g(name, value);
  return query
    select 'database_connections', jsonb_build_object('owner', c.owner), count(*)::float8
    from (
      select case when a.application_name like 'posthouse/%' then 'posthouse' else 'other' end as owner
      from pg_stat_activity a where a.backend_type = 'client backend') c
    group by c.owner
    union all
    select 'database_connections_max', '{}', current_setting('max_connections')::float8;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.gauge_fleet()
 RETURNS TABLE(name text, labels jsonb, value double precision)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
begin
  return query
    with running as materialized (select r.* from posthouse.running_by_queue() r
    ), oldest as materialized (select o.* from posthouse.oldest_by_queue() o
    ), queues as materialized (
      select l.queue, coalesce(max(r.jobs), 0) as running,
        coalesce(greatest(extract(epoch from clock_timestamp() - max(o.run_at)), 0), 0)::float8 as age
      from (select distinct x.queue from posthouse.lane x) l left join running r on r.queue = l.queue left join oldest o on o.queue = l.queue
      group by l.queue
    ), labelled as (
      select n.label as queue, sum(q.running) as running, max(q.age) as age
      from queues q
      join posthouse.queue_labels((select array_agg(x.queue order by x.queue) from queues x),
        (select array_agg(x.running + ceil(x.age)::bigint order by x.queue) from queues x)) n on n.queue = q.queue
      group by n.label
    )
    select g.name, jsonb_build_object('queue', q.queue), g.value from labelled q cross join lateral (values
      ('queue_running_jobs', q.running::float8), ('queue_oldest_due_age_seconds', q.age)) g(name, value);
  return query
    select g.name, g.labels, coalesce(g.value, 0)::float8
    from (
      select count(*) filter (where posthouse.lease_end(w) > clock_timestamp()) as live,
        count(*) filter (where posthouse.lease_end(w) <= clock_timestamp()) as expired,
        sum(w.slots) filter (where posthouse.lease_end(w) > clock_timestamp()) as slots
      from posthouse.worker w where w.dead_at is null) w
    cross join lateral (values
      ('fleet_workers', '{"state": "live"}'::jsonb, w.live), ('fleet_workers', '{"state": "expired"}', w.expired),
      ('fleet_slots', '{}', w.slots)) g(name, labels, value);
  return query
    with gates as materialized (
      select case when g.name ~ '^(queue|tenant|model|endpoint):' then split_part(g.name, ':', 1) else 'named' end as scope,
        g.closed_by, g.max_running, g.running
      from posthouse.gates g where g.name < 'serial:' or g.name >= 'serial;'
    )
    select 'gates_closed', jsonb_build_object('scope', s.scope, 'closed_by', b.closed_by),
      (select count(*) from gates g where g.scope = s.scope and g.closed_by = b.closed_by)::float8
    from unnest(array['queue', 'tenant', 'model', 'endpoint', 'named']) s(scope), unnest(array['person', 'provider', 'quota', 'breaker']) b(closed_by)
    union all
    select 'gate_room_ratio', jsonb_build_object('scope', g.scope), min(greatest(1 - g.running / g.max_running::float8, 0))
    from gates g where g.max_running is not null group by g.scope;
  return query
    select 'schedule_missed_ticks_total', jsonb_build_object('schedule', s.label), sum(s.missed)::float8
    from (
      select case when row_number() over (order by x.missed desc, x.name) <= 100 then x.name else 'other' end as label, x.missed
      from posthouse.schedule x) s
    group by s.label;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.heartbeat(worker uuid, mark bigint DEFAULT 0, oldest bigint DEFAULT 1, held_count bigint DEFAULT NULL::bigint, held_id_sum numeric DEFAULT NULL::numeric, held_fence_sum numeric DEFAULT NULL::numeric, held_ids bigint[] DEFAULT NULL::bigint[], held_fences bigint[] DEFAULT NULL::bigint[])
 RETURNS TABLE(expires_in_ms bigint, mismatch boolean, cancel bigint[], lost bigint[], released integer)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
declare
  before posthouse.worker;
  now_at timestamptz;
  from_seq bigint;
  claims bigint;                      -- of those that were looked at
  jobs bigint;
  id_sum numeric;
  fence_sum numeric;
  first_seq bigint;                   -- the lowest claim that still has a job in flight
  stray record;
begin
  perform posthouse.check_isolation();
  -- Looks through the claims before it locks the worker's row, since claims wait for that. Look again if a claim up to the mark
  -- committed meanwhile: later than that, none can (its number is refused).
  select w.oldest_seq into from_seq from posthouse.worker w where w.id = heartbeat.worker;
  loop
    select count(*) into claims from posthouse.claimed c
    where c.worker = heartbeat.worker and c.seq >= from_seq and c.seq <= heartbeat.mark;
    select count(*) filter (where j.seq <= heartbeat.mark), coalesce(sum(j.id) filter (where j.seq <= heartbeat.mark), 0),
      coalesce(sum(j.fence) filter (where j.seq <= heartbeat.mark), 0), coalesce(array_agg(j.id) filter (where j.cancel_asked), '{}'),
      min(j.seq)
    into jobs, id_sum, fence_sum, cancel, first_seq
    from posthouse.running_jobs(heartbeat.worker, from_seq) j;
    exit when before.id is not null;
    select * into before from posthouse.worker w where w.id = heartbeat.worker for no key update;
    now_at := clock_timestamp();
    if not found or before.dead_at is not null or posthouse.lease_end(before) <= now_at then
      return;
    end if;
    exit when before.oldest_seq = from_seq and claims = (
      select count(*) from posthouse.claimed c
      where c.worker = heartbeat.worker and c.seq >= from_seq and c.seq <= heartbeat.mark);
    from_seq := before.oldest_seq;
  end loop;
  expires_in_ms := before.lease_ms;
  released := 0;
  lost := '{}';
  mismatch := held_ids is null and held_count is not null
    and (jobs, id_sum, fence_sum) is distinct from (held_count, held_id_sum, held_fence_sum);
  if held_ids is not null then
    lost := array(
      select h.id from unnest(held_ids, held_fences) h(id, fence)
      where not exists (
        select from posthouse.running_jobs(heartbeat.worker, before.oldest_seq) j where j.id = h.id and j.fence = h.fence));
    for stray in
      select j.id, j.fence from posthouse.running_jobs(heartbeat.worker, before.oldest_seq) j
      where j.seq <= heartbeat.mark
        and not exists (select from unnest(held_ids, held_fences) h(id, fence) where h.id = j.id and h.fence = j.fence)
    loop
      released := released + posthouse.take_back(heartbeat.worker, stray.id, stray.fence, true, true)::int;
    end loop;
    select min(j.seq) into first_seq from posthouse.running_jobs(heartbeat.worker, before.oldest_seq) j;
  end if;
  -- Claims up to the mark whose jobs are all settled are over: one that comes later than this is refused by its number.
  first_seq := greatest(before.oldest_seq, least(heartbeat.oldest, heartbeat.mark + 1, first_seq));
  -- Bounded from below, so that it does not walk over what it deleted before.
  delete from posthouse.claimed c where c.worker = heartbeat.worker and c.seq >= before.oldest_seq and c.seq < first_seq;
  update posthouse.worker w set beat_at = now_at, expires_at = now_at + make_interval(secs => w.lease_ms / 1000.0),
    oldest_seq = first_seq, mark_seq = greatest(w.mark_seq, heartbeat.mark)
  where w.id = heartbeat.worker;
  return next;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.held_by(job posthouse.job, closed_only boolean)
 RETURNS TABLE(reason text, until timestamp with time zone)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
#variable_conflict use_column
declare
  insteads text[];
  gate_ids bigint[];
  members text[];
  look record;
  g posthouse.gate;
  s posthouse.gate_state;
  now_at timestamptz := clock_timestamp();
  today date := now_at at time zone 'UTC';
  first bigint := floor(extract(epoch from now_at)) - 61;
  name text;
  before bigint;                      -- a job that runs first
begin
  if exists (select from posthouse.gate x where x.when_spent like 'model:%') then
    insteads := posthouse.models_instead(array[job.lane_id]);
  end if;
  select array_agg(x.gate_id order by x.gate_id, x.member), array_agg(x.member order by x.gate_id, x.member) into gate_ids, members
  from (select distinct o.gate_id, o.member from posthouse.gates_of(array[job.lane_id], insteads) o) x;
  if gate_ids is null then
    return;
  end if;
  select * into look from posthouse.look_at_gates(gate_ids, members, array_fill(1, array[cardinality(gate_ids)]), now_at);
  for i in 1 .. cardinality(gate_ids) loop
    g := look.gates[i];
    s := look.states[i];
    name := 'gate ' || g.name || case when members[i] <> '' then format(' (%s)', members[i]) else '' end;
    until := nullif(look.untils[i], 'infinity');
    if g.name like 'serial:%' then
      continue when closed_only;
      select coalesce(
        (select x.id from unnest(s.job_ids, s.fences) u(id, fence) join posthouse.job x on x.id = u.id and x.fence = u.fence limit 1),
        (select x.id
         from posthouse.lane l join posthouse.lane k on k.queue = l.queue and k.tenant = l.tenant and k.serial = l.serial
         join posthouse.job x on x.lane_id = k.id and x.state = 'queued' and x.run_at <= now_at
         where l.id = job.lane_id order by x.run_at, x.id limit 1)) into before;
      continue when before is null or before = job.id;
      until := null;
      reason := format('job %s, which shares its value %s, runs first', before, to_jsonb(split_part(members[i], chr(31), 2)));
      return next;
      continue;
    end if;
    reason := case
      when g.closed_until > now_at then format('%s is closed %s', name,
        case g.closed_by when 'person' then 'by a person' when 'provider' then 'by its provider' when 'breaker' then 'since it failed too often'
          when 'quota' then 'since its account is empty' else 'by ' || g.closed_by end)
        || case when g.closed_until = 'infinity' then ', until somebody opens it' else '' end || coalesce(': ' || nullif(g.closed_reason, ''), '')
      when look.rooms[i] <= 0 and g.probe_until > now_at and g.closed_by in ('provider', 'breaker')
        then format('%s was closed%s; job %s tries it first', name, coalesce(': ' || nullif(g.closed_reason, ''), ''), g.probe_job)
      when closed_only then null
      when look.rooms[i] <= 0 and cardinality(s.job_ids) >= g.max_running
        then format('%s is full: %s of %s run', name, cardinality(s.job_ids), g.max_running)
      when look.spent[i] and g.when_spent in ('hold', 'fail') then
        format('the budget of %s is spent: ', name)
        || case when s.spent_month >= g.money_per_month and s.month = date_trunc('month', today)::date
             then format('%s of %s for this month', s.spent_month, g.money_per_month)
             else format('%s of %s for today', s.spent_day, g.money_per_day) end
        || case when g.when_spent = 'fail' then '; its jobs fail when they are claimed' else '' end
      when look.rooms[i] <= 0 and num_nonnulls(g.requests_per_minute, g.tokens_per_minute) = 0
        then name || ' has just opened, and jobs follow one after the other'
      when look.rooms[i] <= 0 then name || ' is at its rate: ' || concat_ws(', ',
        posthouse.sum_since(s.seconds, s.requests::bigint[], first) || ' of ' || g.requests_per_minute || ' requests',
        posthouse.sum_since(s.seconds, s.tokens, first) || ' of ' || g.tokens_per_minute || ' tokens') || ' in the last minute'
    end;
    if reason is not null then
      return next;
    end if;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.hold_alerts(kind text, subjects text[], texts text[], details jsonb[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.hold_counts(gate_ids bigint[], members text[], wait boolean)
 RETURNS integer[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  keys int[] := array(
    select distinct (hashint8(u.gate_id) # hashtext(u.member)) & 127 from unnest(gate_ids, members) u(gate_id, member) order by 1);
  refused int[];
begin
  if wait then
    perform pg_advisory_xact_lock(1346912002, k) from unnest(keys) k;
    return '{}';
  end if;
  refused := array(select k from unnest(keys) k where not pg_try_advisory_xact_lock(1346912002, k));
  if refused = '{}' then
    return refused;
  end if;
  return array(
    select u.inst from unnest(gate_ids, members) with ordinality u(gate_id, member, inst)
    where (hashint8(u.gate_id) # hashtext(u.member)) & 127 = any(refused));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.hold_gates()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  perform posthouse.check_isolation();
  perform pg_advisory_xact_lock(1346912000, 4);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.hold_lane(lane_id bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  perform pg_advisory_xact_lock_shared(1346912001, (lane_id % 128)::int);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.holders(tables regclass[])
 RETURNS text[]
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select array(
    select distinct k.virtualtransaction from pg_locks k
    where k.locktype = 'relation' and k.database = (select d.oid from pg_database d where d.datname = current_database())
      and k.relation = any(tables::oid[]) and k.pid is distinct from pg_backend_pid())
$function$
;

CREATE OR REPLACE FUNCTION posthouse.house(ids bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_about_webhook(a posthouse.alert)
 RETURNS boolean
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select coalesce(a.detail ->> 'queue' = 'posthouse' or a.detail ->> 'kind' = 'posthouse.webhook', false)
    or a.subject in ('queue:posthouse', 'tenant:posthouse', 'kind:posthouse.webhook')
$function$
;

CREATE OR REPLACE FUNCTION posthouse.is_alone()
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return statement_timestamp() < transaction_timestamp() + interval '20 milliseconds'
    and current_setting('transaction_isolation') = 'read committed';
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_attempt(o jsonb)
 RETURNS boolean
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select coalesce(jsonb_typeof(o) = 'object' and (o ->> 'id') ~ '^[0-9]{1,18}$' and (o ->> 'fence') ~ '^[0-9]{1,9}$', false)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.is_due(s posthouse.sweep)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return posthouse.due_in(s) = 0;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_empty(worker uuid)
 RETURNS boolean
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select not exists (
    select from posthouse.worker w
    join posthouse.lane l on l.queue = any(w.queues) and l.kind = any(w.kinds)
    join posthouse.job j on j.lane_id = l.id
    where w.id = is_empty.worker and j.state in ('queued', 'running'))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.is_held_back(lane_id bigint)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return exists (
    select from posthouse.gates_of(array[lane_id]) g join posthouse.gate x on x.id = g.gate_id
    where x.closed_at is not null and (x.closed_until > clock_timestamp() or x.closed_by in ('provider', 'breaker')));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_isolated()
 RETURNS boolean
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select c.relrowsecurity from pg_class c where c.oid = 'posthouse.lane'::regclass
$function$
;

CREATE OR REPLACE FUNCTION posthouse.is_limited(queue text, tenant text)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
AS $function$
begin
  return exists (select from posthouse.depth_limit d where d.scope = 'queue' and d.name = is_limited.queue)
    or exists (select from posthouse.depth_limit d where d.scope = 'tenant' and d.name = is_limited.tenant);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_open(lo bigint, INOUT takers text[], OUT is_open boolean)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  now_taking text[];
begin
  if takers <> '{}' then
    now_taking := posthouse.holders(array['posthouse.job_id_seq'::regclass]);
    -- One that was prepared goes by another name after a start of Postgres, or at once on older ones.
    if not (takers && now_taking or exists (select from unnest(now_taking) h(name) where h.name like '-1/%')) then
      takers := '{}';
    end if;
  end if;
  -- By a later snapshot than the look at the takers, since one of them may have committed in between.
  is_open := takers is null or takers <> '{}'
    or exists (select from posthouse.job j where j.id >= lo and j.id < lo + 10000)
    or exists (select from posthouse.tombstone t where t.id >= lo and t.id < lo + 10000);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_over(r posthouse.id_range, perhaps boolean DEFAULT false)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
AS $function$
begin
  -- The youngest is asked first: where any is not over, that one is not.
  return r.sliced_to >= r.upper and (
    select s.lower from posthouse.slice s
    where s.lower >= r.lower and s.lower < r.upper
      and (case when s.stale then not perhaps else s.over_at > clock_timestamp() end or s.takers is null)
    order by s.lower desc limit 1) is null;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_probed(g posthouse.gate, now_at timestamp with time zone)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
AS $function$
begin
  return g.probe_until > now_at and exists (select from posthouse.job j where j.id = g.probe_job and j.state = 'running');
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.is_trusted()
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return not posthouse.is_isolated()
    or pg_has_role(session_user, current_user, 'member')
    or coalesce(pg_has_role(session_user, to_regrole('posthouse_operate')::oid, 'member'), false)
    or coalesce(pg_has_role(session_user, to_regrole('posthouse_worker')::oid, 'member'), false);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.isolate(dry_run boolean DEFAULT false)
 RETURNS SETOF text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return query select posthouse.run_steps(array(select posthouse.isolation_steps()), dry_run);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.isolation_end_steps()
 RETURNS SETOF text
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.isolation_steps()
 RETURNS SETOF text
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.jitter_of(s posthouse.schedule, tick_s bigint)
 RETURNS interval
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select date_trunc('milliseconds', s.jitter * ((hashtextextended(s.name || '/' || tick_s, 0) & 1048575) / 1048576.0))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.keep_awake(lanes bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  update posthouse.lane l set naps = posthouse.naps(l), in_use_until = clock_timestamp() + interval '10 seconds' * 9 ^ posthouse.naps(l)
  where l.id = any(array(
    select x.id from posthouse.lane x
    where x.id = any(lanes) and greatest(x.awake_until, x.in_use_until) < clock_timestamp() + interval '5 seconds'
    order by x.id for no key update skip locked));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.lane_for(queue text, priority integer, tenant text, kind text, gates text[], serial text, due timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  lane_id bigint;
begin
  select l.id into lane_id from posthouse.lane l
  where l.queue = lane_for.queue and l.tenant = lane_for.tenant and l.kind = lane_for.kind and l.priority = lane_for.priority
    and l.gates = lane_for.gates and l.serial = lane_for.serial
  order by l.ready_at, l.id limit 1;
  if found then
    return posthouse.wake_lane(lane_id, due);
  end if;
  insert into posthouse.lane (queue, priority, tenant, kind, gates, serial, limited, ready_at, awake_until)
  values (lane_for.queue, lane_for.priority, lane_for.tenant, lane_for.kind, lane_for.gates, lane_for.serial,
          posthouse.is_limited(lane_for.queue, lane_for.tenant), due,
          greatest(clock_timestamp(), due) + interval '10 seconds')
  returning lane.id into lane_id;
  perform posthouse.hold_lane(lane_id);
  return lane_id;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.lane_quotas(lanes bigint[], tenants text[], shares integer[], after_lane bigint, due timestamp with time zone)
 RETURNS TABLE(lane_id bigint, quota integer)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.lasting_holders()
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  parents constant regclass[] := array['posthouse.payload'::regclass, 'posthouse.archive'::regclass];
  held text[] := posthouse.holders(parents);
begin
  if held = '{}' then
    return false;
  end if;
  perform pg_sleep(0.05);
  return held && posthouse.holders(parents);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.lease_end(w posthouse.worker)
 RETURNS timestamp with time zone
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select greatest(w.expires_at, pg_postmaster_start_time() + make_interval(secs => w.lease_ms / 1000.0))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.look_at_gates(gate_ids bigint[], members text[], wanted integer[], now_at timestamp with time zone, OUT gates posthouse.gate[], OUT states posthouse.gate_state[], OUT plain boolean[], OUT rooms integer[], OUT untils timestamp with time zone[], OUT probes boolean[], OUT weighs bigint[], OUT spent boolean[])
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  n int := coalesce(cardinality(gate_ids), 0);
  known bigint[];                     -- each gate once, and of each:
  whole posthouse.gate[];
  kinds boolean[];                    -- see `plain`
  caps int[];
  heavy bigint[];
  running int[];
  r record;
begin
  -- Thousands of members may have the same gate.
  select array_agg(x.id), array_agg(x.whole), array_agg(x.max_running), array_agg(x.tokens_per_minute),
    array_agg(case when x.odd then false when x.max_running is not null then true end)
  into known, whole, caps, heavy, kinds
  from (
    select g.id, g as whole, g.max_running, g.tokens_per_minute, g.name like 'serial:%' or num_nonnulls(g.requests_per_minute,
      g.tokens_per_minute, g.money_per_day, g.money_per_month, g.closed_at, g.opened_at) > 0 as odd
    from posthouse.gate g where g.id = any(gate_ids) order by g.id) x;
  select array_agg(whole[x.at]), array_agg(x.state), array_agg(kinds[x.at]),
    array_agg(case when x.cap is null then 2147483647 else greatest(x.cap - coalesce(cardinality((x.state).job_ids), 0), 0) end),
    array_agg(coalesce(cardinality((x.state).job_ids), 0)), array_agg(heavy[x.at])
  into gates, states, plain, rooms, running, weighs
  from (
    select u.at, u.cap,
      case
        when n.gate_id is null then row(u.gate_id, u.member, null, null, null, null, null, null, null, null, null, null, null, null)::posthouse.gate_state
        when cardinality(n.job_ids) + u.wanted > u.cap or (n.seq % 16 = 0 and cardinality(n.job_ids) > 100) then (
          select row(n.gate_id, n.member, n.seq, array_agg(y.id), array_agg(y.fence), n.seconds, n.requests, n.tokens, n.requests_at, n.tokens_at,
            n.month, n.day, n.spent_day, n.spent_month)::posthouse.gate_state
          from (select unnest(n.job_ids) as id, unnest(n.fences) as fence offset 0) y
          cross join lateral (select j.state, j.fence from posthouse.job j where j.id = y.id offset 0) j
          where (j.state = 'running' or (whole[u.at]).name like 'serial:%') and j.fence = y.fence)
        else n.newest
      end as state
    from (
      select y.gate_id, y.member, y.wanted, y.at, caps[y.at] as cap
      from (select z.gate_id, z.member, z.wanted, width_bucket(z.gate_id, known) as at from unnest(gate_ids, members, wanted) z(gate_id, member, wanted)) y
      where known[y.at] = y.gate_id offset 0) u
    left join lateral (
      select z.*, z as newest from posthouse.gate_state z where z.gate_id = u.gate_id and z.member = u.member
      order by z.gate_id desc, z.member desc, z.seq desc limit 1) n on true
    offset 0) x;
  untils := array_fill(null::timestamptz, array[n]);
  probes := array_fill(false, array[n]);
  spent := probes;
  if false = any(kinds) then
    for i in 1 .. n loop
      continue when plain[i] is not false;
      r := posthouse.gate_room(gates[i], states[i], running[i], now_at);
      rooms[i] := r.room;
      untils[i] := r.until;
      probes[i] := r.is_probe;
      spent[i] := r.is_spent;
    end loop;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.lost_text(w posthouse.worker)
 RETURNS text
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case when w.id is null then 'worker lost: it has no row any more'
    else format('worker lost: %s pid %s, last heartbeat %s, lease over %s', w.host, w.pid, w.beat_at, posthouse.lease_end(w)) end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.make_partitions(last_id bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.make_range(lower bigint, upper bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.make_shares()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.mark_behind(job_id bigint, tenant text, scope text, key text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  update posthouse.job j set reason = (
    select format('waits until job %s is final, whose dedupe key it has too', d.job_id) from posthouse.dedupe d
    where d.tenant = mark_behind.tenant and d.scope = mark_behind.scope and d.key = mark_behind.key)
  where j.id = mark_behind.job_id;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.mark_limited()
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  update posthouse.lane l set limited = not l.limited
  where l.id in (
    select x.id from posthouse.lane x
    left join posthouse.depth_limit q on q.scope = 'queue' and q.name = x.queue
    left join posthouse.depth_limit t on t.scope = 'tenant' and t.name = x.tenant
    where x.limited <> (q.name is not null or t.name is not null)
    order by x.id for no key update of x skip locked)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.metrics()
 RETURNS TABLE(name text, labels jsonb, value double precision)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  return query
    select v.name, v.labels, v.value
    from unnest(array['gauges', 'counts']) p(part)
    cross join lateral (
      select g.* from posthouse.gauge g where g.part = p.part order by g.counted_at desc limit 1) n
    cross join lateral (
      select r.name, r.labels, r.value from jsonb_to_recordset(n.gauges) r(name text, labels jsonb, value float8)
      union all
      select 'gauges_counted_timestamp_seconds', jsonb_build_object('part', p.part), extract(epoch from n.counted_at)::float8
      union all
      select 'gauges_duration_seconds', jsonb_build_object('part', p.part), n.took_ms / 1000) v;
  return query
    select v.name, jsonb_build_object('part', s.name), v.value::float8
    from posthouse.sweep s cross join lateral (values
      ('sweep_ran_timestamp_seconds', case when s.ran_at = '-infinity' then 0 else extract(epoch from s.ran_at) end),
      ('sweep_duration_seconds', s.took_ms / 1000), ('sweep_runs_total', s.runs), ('sweep_failures_total', s.failures),
      ('sweep_failing', (s.failing_since is not null)::int)) v(name, value);
  return query select 'clock', '{}'::jsonb, extract(epoch from clock_timestamp())::float8;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.models_instead(lanes bigint[])
 RETURNS text[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  found text[];
  r record;
  look record;
begin
  for r in
    select g.gate_id, g.member, array_agg(g.place) as places, substr(x.when_spent, 7) as model
    from posthouse.gates_of(lanes) g join posthouse.gate x on x.id = g.gate_id
    where x.when_spent like 'model:%' and num_nonnulls(x.money_per_day, x.money_per_month) > 0
    group by g.gate_id, g.member, x.when_spent order by g.gate_id, g.member
  loop
    select * into look from posthouse.look_at_gates(array[r.gate_id], array[r.member], array[0], clock_timestamp());
    if look.spent[1] then
      for i in 1 .. cardinality(r.places) loop
        found[r.places[i]] := r.model;
      end loop;
    end if;
  end loop;
  return found;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.more_due_in()
 RETURNS integer
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select ceil(min(least(posthouse.due_in(s), 60000)))::int from posthouse.sweep s where s.more
$function$
;

CREATE OR REPLACE FUNCTION posthouse.move_dead(ids bigint[], lanes bigint[], dues timestamp with time zone[], notes jsonb[], olds jsonb[], changes jsonb, asked_by text)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_mergejoin TO 'off'
AS $function$
declare
  moved bigint;
begin
  with gone as (
    delete from posthouse.dead_letter x where x.id = any(ids) returning x.*
  ), tried as (
    insert into posthouse.attempt (job_id, fence, attempt, worker, host, started_at, ended_at, class, error, detail, usage)
    select g.id, e.fence, e.attempt, e.worker, e.host, e.started_at, e.ended_at, e.class, e.error, e.detail, e.usage
    from gone g cross join lateral jsonb_populate_recordset(null::posthouse.attempt, g.errors) e
    on conflict do nothing
  ), noted as (
    insert into posthouse.redriven (job_id, number, redriven_at, redriven_by, state, attempt, fence, class, error, changes, payload)
    select g.id, coalesce(r.newest, 0) + 1, clock_timestamp(), posthouse.who_asks(move_dead.asked_by), 'failed', g.attempt,
      g.fence, g.class, g.error, u.note, u.old
    from gone g join unnest(ids, notes, olds) u(id, note, old) on u.id = g.id
    cross join lateral (select max(r.number) as newest from posthouse.redriven r where r.job_id = g.id) r
  ), back as (
    insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, fence, errors, tokens)
    select g.id, u.lane_id, greatest(u.due, clock_timestamp()), g.created_at, coalesce((changes ->> 'max_attempts')::int, g.max_attempts),
      case when changes ? 'timeout_ms' then (changes ->> 'timeout_ms')::bigint else g.timeout_ms end, false, g.fence,
      jsonb_array_length(g.errors), g.tokens
    from gone g join unnest(ids, lanes, dues) u(id, lane_id, due) on u.id = g.id
    returning lane_id, run_at
  ), told as (
    select posthouse.notify_queue(q.queue) from (
      select distinct l.queue from (select distinct b.lane_id from back b where b.run_at <= clock_timestamp()) b
      cross join lateral (select l.queue from posthouse.lane l where l.id = b.lane_id offset 0) l) q
  )
  select count(*) into moved from gone where (select count(*) from told) >= 0;
  return moved;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.naps(l posthouse.lane)
 RETURNS integer
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case when greatest(l.awake_until, l.in_use_until) < clock_timestamp() - interval '1 hour' then 0 else least(l.naps + 1, 2) end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.next_due(worker uuid)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.next_priority(queues text[], kinds text[], above bigint, due timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
begin
  return (
    select min(l.priority)
    from unnest(queues) q(name)
    cross join lateral (
      select l.priority from posthouse.lane l
      where l.queue = q.name and l.priority > above and l.ready_at < 'infinity' and l.ready_at <= due and l.kind = any(kinds)
      order by l.queue, l.priority, l.id limit 1) l);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.note_depth(scope text, name text, max_depth integer)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  now_at timestamptz := clock_timestamp();
  n bigint := posthouse.count_waiting(note_depth.scope, note_depth.name, max_depth);
begin
  insert into posthouse.depth_count (scope, name, counted_at, jobs) values (note_depth.scope, note_depth.name, now_at, n)
  on conflict do nothing;
  delete from posthouse.depth_count c where c.scope = note_depth.scope and c.name = note_depth.name and c.counted_at < now_at;
  return n;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.note_redriven(job_id bigint, asked_by text, state text, attempt integer, fence integer, class text, error text, changes jsonb, payload jsonb)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
  insert into posthouse.redriven (job_id, number, redriven_at, redriven_by, state, attempt, fence, class, error, changes, payload)
  values (note_redriven.job_id,
    (select coalesce(max(r.number), 0) + 1 from posthouse.redriven r where r.job_id = note_redriven.job_id), clock_timestamp(),
    posthouse.who_asks(note_redriven.asked_by), note_redriven.state, note_redriven.attempt, note_redriven.fence,
    note_redriven.class, note_redriven.error, note_redriven.changes, note_redriven.payload)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.notify_lanes(lanes bigint[], queues text[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  told text[] := '{}';
  long_ago timestamptz := clock_timestamp() - interval '3 seconds';
  longer_ago timestamptz := long_ago - interval '7 seconds';
  alone boolean := posthouse.is_alone();
  behind boolean;
begin
  for i in 1 .. cardinality(lanes) loop
    continue when lanes[i] is null or queues[i] = any(told);
    behind := alone and (
      select true from posthouse.job j
      where j.lane_id = lanes[i] and j.state = 'queued' and j.run_at < long_ago
        and j.run_at >= greatest(longer_ago, coalesce(case when common.behind then (
          select f.floor_at from posthouse.lane_floor f where f.lane_id = lanes[i] order by f.seq desc limit 1) end, common.floor_at))
      order by j.lane_id desc, j.run_at desc, j.id desc limit 1);
    continue when behind;
    told := told || queues[i];
    perform posthouse.notify_queue(queues[i]);
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.notify_queue(queue text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if current_setting('posthouse.notify', true) is distinct from 'off' then
    perform pg_notify('posthouse_wake', queue);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.number_of(value jsonb, otherwise double precision)
 RETURNS double precision
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select case when jsonb_typeof(value) = 'number' and abs(value::numeric) < 1e300 then value::float8 else otherwise end
$function$
;

CREATE OR REPLACE FUNCTION posthouse.oldest_by_queue()
 RETURNS TABLE(queue text, run_at timestamp with time zone)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
begin
  return query
    with awake as materialized (
      select l.id, l.queue from posthouse.lane l
      where l.ready_at < 'infinity' and (l.ready_at <= clock_timestamp() or (l.blocked_by is not null
        and not exists (select from posthouse.gate g where g.id = l.blocked_by and g.closed_until > clock_timestamp())))
    )
    select a.queue, min(j.run_at)
    from awake a
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = a.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select j.run_at from posthouse.job j
      where j.lane_id = a.id and j.state = 'queued' and j.run_at <= clock_timestamp() and j.run_at >= f.floor_at
      order by j.lane_id, j.run_at, j.id limit 1) j
    group by a.queue;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.oldest_lane(queues text[], kinds text[], due timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.oldest_writer()
 RETURNS timestamp with time zone
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  now_at timestamptz := clock_timestamp();
begin
  return (
    select least(min(coalesce(a.xact_start, x.prepared, '-infinity')), now_at)
    from pg_locks k
    left join pg_stat_activity a on a.pid = k.pid
    left join pg_prepared_xacts x on k.pid is null and k.virtualtransaction = '-1/' || x.transaction::text
    where k.locktype = 'relation' and k.database = (select d.oid from pg_database d where d.datname = current_database())
      and k.relation = 'posthouse.job'::regclass and k.mode = 'RowExclusiveLock'
      and k.pid is distinct from pg_backend_pid());
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.open_gate(name text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.origin(OUT is_copy boolean, OUT reason text, OUT stamped jsonb, OUT here jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  here := posthouse.origin_now();
  stamped := (select m.value::jsonb from posthouse.meta m where m.name = 'origin');
  reason := posthouse.copy_reason(stamped, here);
  is_copy := reason is not null;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.origin_now()
 RETURNS jsonb
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.own_lanes()
 RETURNS bigint[]
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return array(select l.id from posthouse.lane l where l.tenant = posthouse.own_tenant());
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.own_tenant()
 RETURNS text
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return (select t.tenant from posthouse.tenant_login t where t.login = session_user);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.parse_filter(filter jsonb, possible text[], usual text[])
 RETURNS posthouse.job_filter
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.parse_jobs(jobs jsonb)
 RETURNS TABLE(ordinal integer, kind text, payload jsonb, queue text, tenant text, priority integer, delay interval, run_at timestamp with time zone, due timestamp with time zone, max_attempts integer, timeout interval, dedupe_key text, dedupe_for interval, trace jsonb, gates text[], tokens integer, dedupe_policy text, dedupe_by_payload boolean)
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select row_number() over ()::int, x.kind, coalesce(x.payload, '{}'), coalesce(x.queue, 'default'),
    coalesce(x.tenant, 'default'), coalesce(x.priority, 0), x.delay_ms * interval '1 millisecond', x.run_at,
    coalesce(x.run_at, clock_timestamp() + greatest(x.delay_ms, 0) * interval '1 millisecond', '-infinity'), coalesce(x.max_attempts, 5),
    x.timeout_ms * interval '1 millisecond', coalesce(x.dedupe_key, case when x.dedupe_by_payload then posthouse.payload_key(coalesce(x.payload, '{}')) end),
    x.dedupe_for_ms * interval '1 millisecond', x.trace,
    case when x.gates is null then '{}' else array(select g from unnest(x.gates) g where g not like chr(31) || '%') end, x.tokens, x.dedupe_policy,
    x.dedupe_key is not null and x.dedupe_by_payload
  from jsonb_to_recordset(jobs) x(kind text, payload jsonb, queue text, tenant text, priority int, delay_ms float8,
    run_at timestamptz, max_attempts int, timeout_ms float8, dedupe_key text, dedupe_for_ms float8, trace jsonb, gates text[], tokens int,
    dedupe_policy text, dedupe_by_payload boolean)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.partition_of(parent regclass, lower bigint, upper bigint)
 RETURNS regclass
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select c.oid::regclass from pg_inherits i join pg_class c on c.oid = i.inhrelid
  where i.inhparent = parent and not i.inhdetachpending
    and pg_get_expr(c.relpartbound, c.oid) = format('FOR VALUES FROM (''%s'') TO (''%s'')', lower, upper)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.partitions_ahead()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.pass_on(lanes bigint[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  r record;
  look record;
begin
  if not exists (select from posthouse.lane l where l.blocked_by is not null) then
    return;
  end if;
  for r in
    select g.gate_id, g.member, count(*)::int as lanes
    from posthouse.gates_of(lanes) g
    cross join lateral (select x.name from posthouse.gate x where x.id = g.gate_id offset 0) x
    where x.name not like 'serial:%'
      and case when x.name = 'tenant:*' then exists (
          select from posthouse.lane l where coalesce(l.blocked_by, 0) = g.gate_id and coalesce(l.blocked_by, 0) > 0 and l.tenant = g.member)
        else exists (select from posthouse.lane l where l.blocked_by = g.gate_id) end
    group by g.gate_id, g.member
  loop
    select * into look from posthouse.look_at_gates(array[r.gate_id], array[r.member], array[1], clock_timestamp());
    if look.rooms[1] > 0 then
      perform posthouse.wake_blocked(r.gate_id, r.member, least(r.lanes, look.rooms[1]));
    end if;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.pause_schedule(name text, reason text DEFAULT NULL::text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  was posthouse.schedule;
begin
  select * into was from posthouse.schedule s where s.name = pause_schedule.name for update;
  if not found then
    perform posthouse.refuse_unknown_schedule(name);
  end if;
  update posthouse.schedule s set paused_at = coalesce(s.paused_at, clock_timestamp()), paused_reason = left(reason, 500), version = s.version + 1
  where s.name = pause_schedule.name;
  return was.paused_at is null;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.payload_hash(payload jsonb)
 RETURNS bytea
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select sha256(convert_to(posthouse.canonical_json(payload), 'UTF8'))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.payload_key(payload jsonb)
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select 'sha256:' || encode(posthouse.payload_hash(payload), 'hex')
$function$
;

CREATE OR REPLACE FUNCTION posthouse.pick_jobs(f posthouse.job_filter, max_jobs integer, after jsonb, OUT ids bigint[], OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.progress(worker uuid, id bigint, fence bigint, progress jsonb)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  if pg_column_size(progress.progress) > 65536 then
    raise exception using errcode = 'PH001', message = 'progress: larger than 64 KiB';
  end if;
  update posthouse.job j set progress = progress.progress
  where j.id = progress.id and j.worker = progress.worker and j.fence = progress.fence and j.state = 'running';
  return found;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.purge(ids bigint[] DEFAULT NULL::bigint[], queue text DEFAULT NULL::text, kind text DEFAULT NULL::text, tenant text DEFAULT NULL::text, max_jobs integer DEFAULT 1000)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  n bigint := 0;
  now_changed bigint;
  next jsonb;
begin
  loop
    exit when n >= max_jobs;
    select r.changed, r.next into now_changed, next
    from posthouse.purge_many(posthouse.dead_filter(ids, queue, kind, tenant), max_jobs => least(max_jobs - n, 1000)::int, after => next) r;
    n := n + now_changed;
    exit when next is null;
  end loop;
  return n;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.purge_many(filter jsonb, max_jobs integer DEFAULT 500, after jsonb DEFAULT NULL::jsonb, OUT changed bigint, OUT busy bigint, OUT refused jsonb, OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
#variable_conflict use_column
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{failed,done,cancelled}', '{failed}');
  picked bigint[];
  gone bigint[] := '{}';
  first_id bigint;
  last_id bigint;
begin
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  select min(u), max(u) into first_id, last_id from unnest(picked) u;
  -- The bounds tell which partitions need not be looked into.
  if 'failed' = any(f.states) then
    gone := array(select x.id from posthouse.dead_letter x where x.id = any(picked) order by x.id for update skip locked);
    delete from posthouse.dead_letter x where x.id = any(gone);
  end if;
  if f.states && '{done,cancelled}' then
    with final as (
      delete from posthouse.archive x where x.id = any(array(
        select y.id from posthouse.archive y where y.id = any(picked) and y.id between first_id and last_id and y.state::text = any(f.states)
        order by y.id for update skip locked)) and x.id between first_id and last_id
      returning x.id
    ), bare as (
      delete from posthouse.tombstone x where x.id = any(array(
        select y.id from posthouse.tombstone y where y.id = any(picked) and y.state::text = any(f.states) order by y.id for update skip locked))
      returning x.id
    )
    select gone || coalesce(array_agg(u.id), '{}') into gone from (select id from final union all select id from bare) u;
  end if;
  delete from posthouse.payload x where x.id = any(gone) and x.id between first_id and last_id;
  delete from posthouse.spare_payload x where x.id = any(gone);
  delete from posthouse.redriven x where x.job_id = any(gone);
  changed := cardinality(gone);
  refused := '[]';
  select count(*) into busy from unnest(picked) u where u <> all(gone) and posthouse.state_of(u) = any(f.states);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.queue_labels(queues text[], jobs bigint[])
 RETURNS TABLE(queue text, label text)
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select q.queue, case when row_number() over (order by q.jobs desc, q.queue) <= 100 then q.queue else 'other' end
  from unnest(queues, jobs) q(queue, jobs)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.quiet_of(kind text)
 RETURNS interval
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select coalesce((select r.quiet from posthouse.alert_rule r where r.kind = quiet_of.kind and r.queue = ''), interval '5 minutes')
$function$
;

CREATE OR REPLACE FUNCTION posthouse.raise_alert(kind text, subject text, message text, detail jsonb DEFAULT '{}'::jsonb)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.record_error(j posthouse.job, class text, error text, detail jsonb, usage jsonb)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  insert into posthouse.attempt (job_id, fence, attempt, worker, host, started_at, ended_at, class, error, detail, usage)
  values (j.id, j.fence, j.attempt, j.worker, (select w.host || ' pid ' || w.pid from posthouse.worker w where w.id = j.worker),
    j.started_at, clock_timestamp(), left(class, 100), posthouse.cap_text(error),
    posthouse.cap_json(detail, 65536), record_error.usage)
  on conflict do nothing
$function$
;

CREATE OR REPLACE FUNCTION posthouse.record_usage(lane_ids bigint[], usages jsonb[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  today date := clock_timestamp() at time zone 'UTC';
begin
  insert into posthouse.usage (lane_id, day, model, attempts, requests, input_tokens, output_tokens, cached_tokens, cost_usd, unpriced)
  select lane_ids[f.place], today, coalesce(f.model, ''), count(*), coalesce(sum(f.requests), 0), coalesce(sum(f.input_tokens), 0),
    coalesce(sum(f.output_tokens), 0), coalesce(sum(f.cached_tokens), 0), sum(f.cost), count(*) filter (where f.cost is null and f.free is not true)
  from posthouse.usage_figures(usages) f
  where f.free is not true or f.requests is distinct from 0 or f.cost is not null
  group by lane_ids[f.place], f.model;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.redrive(ids bigint[] DEFAULT NULL::bigint[], queue text DEFAULT NULL::text, kind text DEFAULT NULL::text, tenant text DEFAULT NULL::text, max_jobs integer DEFAULT 1000)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  n bigint := 0;
  now_changed bigint;
  next jsonb;
begin
  loop
    exit when n >= max_jobs;
    select r.changed, r.next into now_changed, next
    from posthouse.redrive_many(posthouse.dead_filter(ids, queue, kind, tenant), max_jobs => least(max_jobs - n, 1000)::int, after => next) r;
    n := n + now_changed;
    exit when next is null;
  end loop;
  return n;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.redrive_batch(job_ids bigint[], changes jsonb, first_at timestamp with time zone, step interval, asked_by text, OUT changed bigint, OUT busy bigint, OUT refused jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_mergejoin TO 'off'
AS $function$
declare
  now_at timestamptz := clock_timestamp();
  d posthouse.dead_letter;
  l posthouse.lane;
  old jsonb;
  new jsonb;
  why text;
  lane_ids bigint[] := '{}';          -- that were woken, with the lanes to put jobs into instead
  woken bigint[] := '{}';
  at int;
  due timestamptz := coalesce(first_at, now_at);
  differences jsonb;
  ids bigint[] := '{}';               -- of those that go, and what goes with each
  lanes bigint[] := '{}';
  dues timestamptz[] := '{}';
  notes jsonb[] := '{}';
  olds jsonb[] := '{}';
begin
  refused := '[]';
  for d in select x.* from posthouse.dead_letter x where x.id = any(job_ids) order by x.failed_at, x.id for update skip locked loop
    -- Its partition may have been dropped, and its payload put aside.
    perform posthouse.bring_home(d.id);
    select p.payload into old from posthouse.payload p where p.id = d.id;
    why := case when not found then 'its payload is gone, so it cannot run again' end;
    new := old;
    differences := '{}';
    if why is null and changes <> '{}' then
      select x.* into l from posthouse.lane x where x.id = d.lane_id;
      select c.changed, c.complaint into new, why from posthouse.change_payload(l.kind, old, changes) c;
    end if;
    if why is not null then
      refused := refused || jsonb_build_object('id', d.id, 'error', why);
      continue;
    end if;
    if changes <> '{}' then
      select c.to_lane, c.differences into d.lane_id, differences from posthouse.changed_lane(l, d, old, new, changes, due) c;
      if new is distinct from old then
        update posthouse.payload p set payload = new where p.id = d.id;
      end if;
    else
      at := array_position(lane_ids, d.lane_id);
      if at is null then
        lane_ids := lane_ids || d.lane_id;
        woken := woken || posthouse.wake_lane(d.lane_id, due);
        at := cardinality(woken);
      end if;
      d.lane_id := woken[at];
    end if;
    olds := array_append(olds, case when new is distinct from old then old end);
    ids := ids || d.id;
    lanes := lanes || d.lane_id;
    dues := dues || due;
    notes := notes || differences;
    due := due + coalesce(step, interval '0');
  end loop;
  changed := posthouse.move_dead(ids, lanes, dues, notes, olds, changes, asked_by);
  select count(*) into busy from posthouse.dead_letter x
  where x.id = any(job_ids) and not exists (select from jsonb_array_elements(refused) r where (r ->> 'id')::bigint = x.id);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.redrive_many(filter jsonb, changes jsonb DEFAULT '{}'::jsonb, rate double precision DEFAULT NULL::double precision, max_jobs integer DEFAULT 500, after jsonb DEFAULT NULL::jsonb, asked_by text DEFAULT NULL::text, OUT changed bigint, OUT busy bigint, OUT refused jsonb, OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{failed}', '{failed}');
  now_at timestamptz := clock_timestamp();
  first_at timestamptz;
  step interval;
  picked bigint[];
begin
  perform posthouse.check_changes(changes);
  if changes ? 'payload' and cardinality(f.ids) is distinct from 1 then
    raise exception using errcode = 'PH001', message = 'changes: payload: can be given to one job only, named by its id',
      hint = 'Use set to change a part of many payloads.';
  elsif (rate between 0.0001 and 100000) is false then
    raise exception using errcode = 'PH001', message = format('rate: %s a second is not between 0.0001 and 100000', rate);
  end if;
  step := make_interval(secs => 1 / rate);
  first_at := greatest((after ->> 'due')::timestamptz, case when rate is not null then now_at end);
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  select r.changed, r.busy, r.refused into changed, busy, refused
  from posthouse.redrive_batch(picked, changes, first_at, step, asked_by) r;
  next := next || jsonb_strip_nulls(jsonb_build_object('due', first_at + changed * step));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.refuse_held(held posthouse.dedupe, policy text, payload jsonb)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  if policy = 'reject' then
    raise exception using errcode = 'PH008',
      message = format('dedupe_key: job %s holds it (%s)', held.job_id, posthouse.state_of(held.job_id)),
      hint = case when held.expires_at is null then 'The key is free when that job is done, failed or cancelled.'
        else format('The key is free at %s.', held.expires_at) end;
  elsif policy = 'same' and not (case when held.body is not null then held.body = posthouse.payload_hash(refuse_held.payload)
      else coalesce((select p.payload = refuse_held.payload from posthouse.payload p where p.id = held.job_id), false) end) then
    raise exception using errcode = 'PH009',
      message = format('dedupe_key: job %s holds it with another payload (%s)', held.job_id, posthouse.state_of(held.job_id)),
      hint = 'One key stands for one payload: use another key, or the payload of before.';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.refuse_schedule(name text, version bigint, error text, for_good boolean, at timestamp with time zone DEFAULT NULL::timestamp with time zone)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  update posthouse.schedule s set error = left(refuse_schedule.error, 2000), error_at = coalesce(at, clock_timestamp()),
    next_at = case when for_good then 'infinity' else s.next_at end
  where s.name = refuse_schedule.name and s.version = refuse_schedule.version;
  if found then
    perform posthouse.raise_alert('schedule', name, format('schedule %s enqueues nothing: %s', name, error), jsonb_build_object('schedule', name));
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.refuse_stranger()
 RETURNS void
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  raise exception using errcode = '42501', message = format('login %s belongs to no tenant', quote_ident(session_user)),
    hint = format('The owner of the schema says to which: select posthouse.bind_login(%L, ''TENANT'').', session_user);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.refuse_unknown_schedule(name text)
 RETURNS void
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  raise exception using errcode = 'PH003', message = format('schedule %s: there is no such schedule', name);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.register_worker(worker uuid, queues text[] DEFAULT ARRAY['default'::text], kinds text[] DEFAULT '{}'::text[], slots integer DEFAULT 1, lease_ms bigint DEFAULT 30000, info jsonb DEFAULT '{}'::jsonb)
 RETURNS timestamp with time zone
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.release(worker uuid, ids bigint[], fences bigint[])
 RETURNS TABLE(id bigint, fence bigint, verdict text, state text)
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select s.* from posthouse.settle(worker, (
    select coalesce(json_agg(json_build_object('id', r.id, 'fence', r.fence, 'outcome', 'release')), '[]')
    from unnest(ids, fences) r(id, fence))) s
$function$
;

CREATE OR REPLACE FUNCTION posthouse.remove_gate(name text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.remove_schedule(name text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  delete from posthouse.schedule s where s.name = remove_schedule.name;
  if found then
    perform posthouse.resolve_alert('schedule', name);
  end if;
  return found;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.replace_held(held posthouse.dedupe, live posthouse.job_state, new_id bigint, dedupe_for interval, policy text, due timestamp with time zone, OUT holder bigint, OUT answer text)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  -- The one behind runs last, so that what comes last is its: also while the one before it waits for another attempt.
  is_behind boolean := live <> 'queued' or exists (select from posthouse.job j where j.id = held.next_id and j.state = 'queued' and j.run_at = 'infinity');
  waits bigint := case when is_behind then held.next_id else held.job_id end;
begin
  perform from posthouse.job j where j.id = waits and j.state = 'queued' and (not is_behind or j.run_at = 'infinity') for update skip locked;
  if found then
    update posthouse.dedupe d set body = null, expires_at = coalesce(clock_timestamp() + dedupe_for, d.expires_at),
      next_at = case when is_behind then due else d.next_at end
    where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    holder := waits;
    answer := 'replaced';
  elsif exists (select from posthouse.job j where j.id = waits and j.state = 'queued' and (not is_behind or j.run_at = 'infinity')) then
    return;
  elsif live = 'queued' then
    -- It was taken just now.
    return;
  elsif policy = 'rerun' then
    update posthouse.dedupe d set next_id = new_id, next_at = due, expires_at = null, body = null
    where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
    holder := new_id;
    answer := 'behind';
  else
    holder := held.job_id;
    answer := 'kept';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.replace_job(job_id bigint, to_lane bigint, payload jsonb, trace jsonb, due timestamp with time zone, max_attempts integer, timeout interval, tokens integer)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  j posthouse.job;
  was bigint;                         -- its lane
begin
  select x.* into j from posthouse.job x where x.id = replace_job.job_id;
  update posthouse.payload p set payload = replace_job.payload, trace = replace_job.trace where p.id = replace_job.job_id;
  was := j.lane_id;
  -- A place that it kept among jobs that run one at a time goes by its fence.
  j.fence := j.fence + (was <> to_lane and j.fence > 0)::int;
  j.lane_id := to_lane;
  j.attempt := 0;
  j.max_attempts := coalesce(replace_job.max_attempts, 5);
  j.timeout_ms := extract(epoch from replace_job.timeout) * 1000;
  j.tokens := replace_job.tokens;
  if j.run_at < 'infinity' then
    j.run_at := greatest(due, clock_timestamp());
    j.reason := null;
  end if;
  -- A row of its own: a claim whose snapshot is older than this would take an updated one with the payload of before.
  delete from posthouse.job x where x.id = replace_job.job_id;
  insert into posthouse.job values (j.*);
  if was <> to_lane then
    perform posthouse.free_serial(was);
  end if;
  if j.run_at < 'infinity' then
    perform posthouse.notify_queue(l.queue) from posthouse.lane l where l.id = to_lane;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.report_endpoint(endpoint text, verdict text, wait_ms bigint DEFAULT NULL::bigint, reason text DEFAULT NULL::text, age_ms bigint DEFAULT 0)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.reprioritise_many(filter jsonb, priority integer, max_jobs integer DEFAULT 500, after jsonb DEFAULT NULL::jsonb, OUT changed bigint, OUT busy bigint, OUT refused jsonb, OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
#variable_conflict use_column
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{queued}', '{queued}');
  picked bigint[];
  moved bigint[];
  r record;
  to_lane bigint;
begin
  if priority is null then
    raise exception using errcode = 'PH001', message = 'priority: must not be null; smaller runs first';
  end if;
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  refused := '[]';
  moved := array(select x.id from posthouse.job x where x.id = any(picked) and x.state = 'queued' order by x.id for update skip locked);
  changed := 0;
  -- Held against posthouse.advance_floors, so that no job lands behind a floor that moves meanwhile.
  perform pg_advisory_xact_lock_shared(1346912000, 2);
  for r in
    select l.id, l.queue, l.tenant, l.kind, l.gates, l.serial, array_agg(x.id) as ids, min(x.run_at) as due
    from posthouse.job x join posthouse.lane l on l.id = x.lane_id
    where x.id = any(moved) and l.priority <> reprioritise_many.priority
    group by l.id order by l.id
  loop
    to_lane := posthouse.lane_for(r.queue, reprioritise_many.priority, r.tenant, r.kind, r.gates, r.serial, r.due);
    update posthouse.job x set lane_id = to_lane, run_at = greatest(x.run_at, posthouse.floor_of(to_lane)) where x.id = any(r.ids);
    perform posthouse.free_serial(r.id);
    if r.due <= clock_timestamp() then
      perform posthouse.notify_queue(r.queue);
    end if;
    changed := changed + cardinality(r.ids);
  end loop;
  select count(*) into busy from posthouse.job x join posthouse.lane l on l.id = x.lane_id
  where x.id = any(picked) and x.id <> all(moved) and x.state = 'queued' and l.priority <> reprioritise_many.priority;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.requeue_job(j posthouse.job, due timestamp with time zone, front boolean, refund boolean, reason text, unsure boolean DEFAULT NULL::boolean)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  to_lane bigint := posthouse.wake_lane(j.lane_id, due);
begin
  if front then
    -- Held against posthouse.advance_floors, so that the job cannot land behind a floor that moves meanwhile.
    perform pg_advisory_xact_lock_shared(1346912000, 2);
    due := greatest(j.run_at, posthouse.floor_of(to_lane));
  end if;
  update posthouse.job x set state = 'queued', lane_id = to_lane,
    run_at = case when front then due else greatest(due, clock_timestamp()) end,
    attempt = x.attempt - refund::int, reason = left(requeue_job.reason, 500),
    unsure = case when requeue_job.unsure is null then x.unsure when requeue_job.unsure then coalesce(x.unsure, x.worker || '/' || x.fence) end,
    errors = (select count(*) from posthouse.attempt a where a.job_id = x.id)
  where x.id = j.id;
  if due <= clock_timestamp() then
    perform posthouse.notify_queue(l.queue) from posthouse.lane l where l.id = to_lane;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.rescue(suspects jsonb, max_jobs integer DEFAULT 1000, OUT jobs integer, OUT more boolean)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
 SET jit TO 'off'
AS $function$
declare
  s record;
  w posthouse.worker;
  c record;
  taken boolean;
begin
  perform posthouse.check_isolation();
  jobs := 0;
  more := false;
  for s in select (e ->> 'worker')::uuid as id, (e ->> 'beat_at')::timestamptz as beat_at from jsonb_array_elements(suspects) e loop
    -- Lock, look again, and only then, in a later statement, touch the jobs: a late heartbeat either came first, and is
    -- seen here, or finds the worker dead.
    select * into w from posthouse.worker x where x.id = s.id for update skip locked;
    if found and w.dead_at is null and w.beat_at = s.beat_at and posthouse.lease_end(w) <= clock_timestamp() then
      update posthouse.worker x set dead_at = clock_timestamp() where x.id = s.id;
    end if;
  end loop;
  -- The jobs of the dead, whoever declared them so. A claim is locked so that two sweeps share the work instead of waiting
  -- for each other. Claims whose worker has no row get one by posthouse.fold.
  for c in
    select x.worker, x.seq
    from (select y.id, y.oldest_seq from posthouse.worker y where y.dead_at is not null order by y.dead_at) d
    cross join lateral (
      select x.worker, x.seq from posthouse.claimed x where x.worker = d.id and x.seq >= d.oldest_seq
      order by x.worker, x.seq limit 1000 for update skip locked) x
    limit 1000
  loop
    if jobs >= max_jobs then
      more := true;
      return;
    end if;
    jobs := jobs + posthouse.take_back_claim(c.worker, c.seq);
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.rescue_stragglers()
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  j posthouse.job;
  n int := 0;
begin
  for j in
    select x.* from posthouse.lane l
    cross join lateral (select coalesce(case when common.behind then (
      select f.floor_at from posthouse.lane_floor f where f.lane_id = l.id order by f.seq desc limit 1) end, common.floor_at) as floor_at offset 0) f
    cross join lateral (
      select x.* from posthouse.job x
      where x.lane_id = l.id and x.state = 'queued' and x.run_at < f.floor_at
      order by x.lane_id, x.run_at, x.id limit 1000 for update skip locked) x
    limit 10000
  loop
    perform posthouse.requeue_job(j, clock_timestamp(), true, false, j.reason);
    n := n + 1;
  end loop;
  return n;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.resolve_alert(kind text, subject text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  insert into posthouse.alert_note (kind, subject, text, detail, raised_at, resolves)
  values (posthouse.alert_text(kind, 200), posthouse.alert_text(coalesce(resolve_alert.subject, ''), 1000), '', '{}', clock_timestamp(), true);
exception when others then
  raise warning 'posthouse: that the alert % about % is over could not be noted: %', kind, subject, sqlerrm;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.rest_lane(lane_id bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.resume_schedule(name text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  was posthouse.schedule;
begin
  select * into was from posthouse.schedule s where s.name = resume_schedule.name for update;
  if not found then
    perform posthouse.refuse_unknown_schedule(name);
  end if;
  update posthouse.schedule s set paused_at = null, paused_reason = null, next_at = null, since = clock_timestamp(), version = s.version + 1
  where s.name = resume_schedule.name and s.paused_at is not null;
  return found;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.retention_of(queue text, state text)
 RETURNS interval
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  if session_user <> current_user and not posthouse.sees_all() and not posthouse.sees_queue(queue) then
    return null;
  end if;
  return (
    select case when x.keep < interval '1000 years' then x.keep end
    from (
      select case state
        when 'failed' then coalesce(q.retention_failed, d.retention_failed)
        when 'cancelled' then coalesce(q.retention_cancelled, q.retention, d.retention_cancelled, d.retention)
        else coalesce(q.retention, d.retention) end as keep
      from (select) one
      left join posthouse.queue q on q.name = retention_of.queue
      left join posthouse.queue d on d.name = '*') x);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.retire()
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.retire_worker(worker uuid)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
declare
  from_seq bigint;
  left_over bigint[];
begin
  perform posthouse.check_isolation();
  update posthouse.worker w set dead_at = clock_timestamp() where w.id = retire_worker.worker and w.dead_at is null;
  select w.oldest_seq into from_seq from posthouse.worker w where w.id = retire_worker.worker;
  perform posthouse.take_back(retire_worker.worker, j.id, j.fence, true) from posthouse.running_jobs(retire_worker.worker, from_seq) j;
  -- What a settle holds at this moment is left to the rescue.
  left_over := array(select j.seq from posthouse.running_jobs(retire_worker.worker, from_seq) j);
  delete from posthouse.claimed c where c.worker = retire_worker.worker and c.seq >= from_seq and c.seq <> all(left_over);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.retry(job_id bigint, asked_by text DEFAULT NULL::text)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  j posthouse.job;
  back record;
  state text;
begin
  select r.* into back from posthouse.redrive_batch(array[job_id], '{}', null, null, asked_by) r;
  if back.changed = 1 or posthouse.revive_cancelled(job_id, asked_by) then
    return 'queued';
  elsif back.refused <> '[]' then
    raise exception using errcode = 'PH004', message = format('job %s: %s', job_id, back.refused -> 0 ->> 'error'), hint = 'Enqueue it anew.';
  elsif back.busy > 0 then
    raise exception using errcode = 'PH004', message = format('job %s: somebody else redrives or purges it just now', job_id),
      hint = 'Look what became of it, and try again.';
  end if;
  select x.* into j from posthouse.job x where x.id = job_id and x.state = 'queued' for update;
  if j.id is not null then
    if j.run_at > clock_timestamp() then
      perform posthouse.requeue_job(j, clock_timestamp(), false, false, 'retry asked for');
      perform posthouse.free_serial(j.lane_id);
    end if;
    return 'queued';
  end if;
  state := posthouse.state_of(job_id);
  if state is null then
    raise exception using errcode = 'PH003', message = format('job %s: there is no such job', job_id);
  elsif state = 'queued' then
    -- Somebody replaced it, or put it back into line, while this waited for its row.
    return posthouse.retry(job_id, asked_by);
  end if;
  raise exception using errcode = 'PH004', message = format('job %s is %s and cannot be retried', job_id, state),
    hint = case state when 'done' then 'Enqueue it anew if you want a second answer.' else 'Cancel it first, or wait.' end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.retry_many(filter jsonb, max_jobs integer DEFAULT 500, after jsonb DEFAULT NULL::jsonb, asked_by text DEFAULT NULL::text, OUT changed bigint, OUT busy bigint, OUT refused jsonb, OUT next jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  f posthouse.job_filter := posthouse.parse_filter(filter, '{queued,failed,cancelled}', '{queued,failed}');
  picked bigint[];
  j posthouse.job;
  one bigint;
  failure text;
begin
  select p.ids, p.next into picked, next from posthouse.pick_jobs(f, posthouse.check_batch(max_jobs), after) p;
  changed := 0;
  busy := 0;
  refused := '[]';
  if 'failed' = any(f.states) then
    select r.changed, r.busy, r.refused into changed, busy, refused from posthouse.redrive_batch(picked, '{}', null, null, asked_by) r;
  end if;
  if 'cancelled' = any(f.states) then
    foreach one in array picked loop
      begin
        changed := changed + posthouse.revive_cancelled(one, asked_by)::int;
      exception when sqlstate 'PH004' then
        get stacked diagnostics failure = message_text;
        refused := refused || jsonb_build_object('id', one, 'error', failure);
      end;
    end loop;
  end if;
  if 'queued' = any(f.states) then
    for j in select x.* from posthouse.job x where x.id = any(picked) order by x.id for update skip locked loop
      picked := array_remove(picked, j.id);
      -- One that is due at infinity waits for the job that holds its dedupe key.
      continue when j.state <> 'queued' or j.run_at <= clock_timestamp() or j.run_at = 'infinity';
      perform posthouse.requeue_job(j, clock_timestamp(), false, false, 'retry asked for');
      perform posthouse.free_serial(j.lane_id);
      changed := changed + 1;
    end loop;
    select busy + count(*) into busy from posthouse.job x where x.id = any(picked) and x.state = 'queued' and x.run_at > clock_timestamp() and x.run_at < 'infinity';
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.revive_cancelled(job_id bigint, asked_by text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  a posthouse.archive;
  t posthouse.tombstone;
  to_lane bigint;
begin
  select x.* into a from posthouse.archive x where x.id = job_id and x.state = 'cancelled' for update;
  if a.id is null then
    -- While it has its tombstone it has its payload too: both go in one transaction.
    select x.* into t from posthouse.tombstone x where x.id = job_id and x.state = 'cancelled' for update;
    if t.id is null then
      return false;
    end if;
    a.id := t.id; a.lane_id := t.lane_id; a.created_at := t.created_at; a.fence := t.fence; a.max_attempts := t.max_attempts;
    a.timeout_ms := t.timeout_ms; a.tokens := t.tokens; a.attempt := t.attempt;
  end if;
  if not posthouse.bring_home(job_id) then
    raise exception using errcode = 'PH004', message = format('job %s: its payload was dropped when it ended, so it cannot run again', job_id),
      hint = 'Enqueue it anew.';
  end if;
  delete from posthouse.archive x where x.id = job_id;
  delete from posthouse.tombstone x where x.id = job_id;
  to_lane := posthouse.wake_lane(a.lane_id, clock_timestamp());
  insert into posthouse.attempt (job_id, fence, attempt, worker, host, started_at, ended_at, class, error, detail, usage)
  select a.id, e.fence, e.attempt, e.worker, e.host, e.started_at, e.ended_at, e.class, e.error, e.detail, e.usage
  from jsonb_populate_recordset(null::posthouse.attempt, coalesce(a.errors, '[]')) e
  on conflict do nothing;
  insert into posthouse.job (id, lane_id, run_at, created_at, max_attempts, timeout_ms, keyed, fence, errors, tokens)
  values (a.id, to_lane, clock_timestamp(), a.created_at, a.max_attempts, a.timeout_ms, false, a.fence,
    jsonb_array_length(coalesce(a.errors, '[]')), a.tokens);
  perform posthouse.note_redriven(a.id, asked_by, 'cancelled', a.attempt, a.fence, a.errors -> -1 ->> 'class', a.errors -> -1 ->> 'error',
    '{}', null);
  perform posthouse.notify_queue(l.queue) from posthouse.lane l where l.id = to_lane;
  return true;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.rights()
 RETURNS TABLE(name text, runs text, roles text[])
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
$function$
;

CREATE OR REPLACE FUNCTION posthouse.role_list()
 RETURNS text
 LANGUAGE sql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select 'posthouse_enqueue, posthouse_worker, posthouse_read, posthouse_operate'
$function$
;

CREATE OR REPLACE FUNCTION posthouse.row_rule(of_table regclass)
 RETURNS text
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
$function$
;

CREATE OR REPLACE FUNCTION posthouse.run_steps(steps text[], dry_run boolean)
 RETURNS SETOF text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.running_by_queue()
 RETURNS TABLE(queue text, jobs bigint)
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET jit TO 'off'
AS $function$
  select l.queue, sum(r.jobs)::bigint
  from (
    select j.lane_id, count(*) as jobs
    from posthouse.worker w
    cross join lateral (select r.id from posthouse.running_jobs(w.id, w.oldest_seq) r offset 0) r
    cross join lateral (select j.lane_id from posthouse.job j where j.id = r.id offset 0) j
    group by j.lane_id) r
  join posthouse.lane l on l.id = r.lane_id
  group by l.queue
$function$
;

CREATE OR REPLACE FUNCTION posthouse.running_jobs(worker uuid, from_seq bigint)
 RETURNS TABLE(seq bigint, id bigint, fence bigint, cancel_asked boolean)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_nestloop TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
begin
  return query
    select c.seq, j.id, j.fence::bigint, j.cancel_asked
    from posthouse.claimed c
    cross join lateral (
      select min(i) as first_id, max(i) as last_id, max(i) - min(i) < 4 * count(*) as is_dense from unnest(c.job_ids) i offset 0) ids
    cross join lateral (
      select j.id, j.fence, j.cancel_asked
      from (
        select x.id, x.fence, x.cancel_asked from posthouse.job x
        where not ids.is_dense and x.id = any(c.job_ids) and x.worker = running_jobs.worker and x.state = 'running'
        union all
        select x.id, x.fence, x.cancel_asked from posthouse.job x
        where ids.is_dense and x.id >= ids.first_id and x.id <= ids.last_id and x.worker = running_jobs.worker and x.state = 'running') j
      join unnest(c.job_ids, c.fences) u(id, fence) on u.id = j.id and u.fence = j.fence offset 0) j
    where c.worker = running_jobs.worker and c.seq >= from_seq;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.sample_percent(of_table regclass)
 RETURNS double precision
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select least(100, 100 * 1e7 / greatest(r.rows, 1))
  from (
    select pg_relation_size(c.oid) / 8192.0 * case when c.relpages > 0 and c.reltuples >= 0 then c.reltuples / c.relpages else 70 end as rows
    from pg_class c where c.oid = of_table) r
$function$
;

CREATE OR REPLACE FUNCTION posthouse.sees_all()
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return coalesce((select t.every_tenant from posthouse.tenant_login t where t.login = session_user), posthouse.is_trusted());
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.sees_job(job_id bigint)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  return exists (
    select from posthouse.lane l
    where l.tenant = posthouse.own_tenant() and l.id = coalesce(
      (select j.lane_id from posthouse.job j where j.id = job_id), (select a.lane_id from posthouse.archive a where a.id = job_id),
      (select t.lane_id from posthouse.tombstone t where t.id = job_id), (select d.lane_id from posthouse.dead_letter d where d.id = job_id)));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.sees_queue(queue text)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return exists (select from posthouse.lane l where l.queue = sees_queue.queue and l.tenant = posthouse.own_tenant());
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.serial_held(lanes bigint[], due timestamp with time zone)
 RETURNS TABLE(lane_id bigint, gate_id bigint, member text, until timestamp with time zone)
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.serial_next(lane_id bigint, s posthouse.gate_state, due timestamp with time zone, OUT job_id bigint, OUT until timestamp with time zone)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.serial_value(payload jsonb, field text)
 RETURNS text
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  value text := case when jsonb_typeof(payload) = 'object' then payload ->> field end;
begin
  return case when value is null then '' when octet_length(value) <= 200 then value else md5(value) end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.serial_waits(gate_id bigint, member text)
 RETURNS boolean
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
begin
  return exists (
    select from posthouse.gate g
    join posthouse.lane l on l.queue = substr(g.name, 8) and l.tenant = split_part(member, chr(31), 1)
      and l.serial = substr(member, strpos(member, chr(31)) + 1)
    cross join lateral posthouse.first_due(l.id, clock_timestamp())
    where g.id = serial_waits.gate_id);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_alert(kind text, enabled boolean DEFAULT NULL::boolean, quiet interval DEFAULT NULL::interval, after interval DEFAULT NULL::interval, queue text DEFAULT NULL::text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_depth(queue text DEFAULT NULL::text, tenant text DEFAULT NULL::text, max_depth integer DEFAULT NULL::integer)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  what text := case when set_depth.queue is not null then 'queue' else 'tenant' end;
begin
  if num_nonnulls(set_depth.queue, set_depth.tenant) <> 1 then
    raise exception using errcode = 'PH001', message = 'queue, tenant: name one of them';
  end if;
  perform posthouse.check_name(what, coalesce(set_depth.queue, set_depth.tenant));
  if coalesce(set_depth.queue, set_depth.tenant) = '*' and max_depth is not null then
    raise exception using errcode = 'PH001', message = format('%s: ''*'' names no %1$s, and a limit of how many may wait is for one', what),
      hint = 'Set a limit for each that is to have one.';
  end if;
  if max_depth not between 1 and 100000000 then
    raise exception using errcode = 'PH001', message = format('max_depth: %s is not between 1 and 100000000', max_depth),
      hint = 'To let no jobs run, close the gate of the queue or tenant; null takes the limit away.';
  end if;
  if max_depth is null then
    delete from posthouse.depth_limit d where d.scope = what and d.name = coalesce(set_depth.queue, set_depth.tenant);
  else
    insert into posthouse.depth_limit (scope, name, max_depth) values (what, coalesce(set_depth.queue, set_depth.tenant), set_depth.max_depth)
    on conflict on constraint depth_limit_pkey do update set max_depth = excluded.max_depth;
  end if;
  perform posthouse.mark_limited();
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_fair_by(queue text, fair_by text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  perform posthouse.check_name('queue', queue);
  if (fair_by in ('jobs', 'tokens')) is not true then
    raise exception using errcode = 'PH001', message = format('fair_by: %s is not jobs or tokens', coalesce(quote_literal(fair_by), 'null'));
  end if;
  insert into posthouse.queue (name, fair_by) values (set_fair_by.queue, set_fair_by.fair_by)
  on conflict on constraint queue_pkey do update set fair_by = excluded.fair_by;
  perform posthouse.make_shares();
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_gate(name text, max_running integer DEFAULT NULL::integer, requests_per_minute integer DEFAULT NULL::integer, tokens_per_minute bigint DEFAULT NULL::bigint, money_per_day numeric DEFAULT NULL::numeric, money_per_month numeric DEFAULT NULL::numeric, when_spent text DEFAULT 'hold'::text, warn_at numeric DEFAULT NULL::numeric)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_kind(kind text, gates text[] DEFAULT NULL::text[], max_output_tokens integer DEFAULT NULL::integer, drop_payload boolean DEFAULT NULL::boolean)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_queue(queue text, retention interval, outcome text DEFAULT 'done'::text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  keep interval := set_queue.retention;
  was text;                           -- by its text, since a month counts as 30 days where intervals are compared
begin
  -- Slices that were made since its snapshot would go by what was set before.
  perform posthouse.check_isolation();
  perform posthouse.check_name('queue', queue);
  if (outcome in ('done', 'cancelled', 'failed')) is not true then
    raise exception using errcode = 'PH001', message = format('outcome: %s is none of done, cancelled, failed', coalesce(quote_literal(outcome), 'null'));
  elsif keep < interval '1 second' and (keep <> interval '0' or outcome = 'failed') then
    raise exception using errcode = 'PH001', message = format('retention: %s is too short: a second at least%s', keep,
      case outcome when 'failed' then '' else ', or zero, which keeps no history' end);
  end if;
  -- The sweep goes by what was set before until this transaction ends, and then by this.
  perform pg_advisory_xact_lock(1346912000, 6);
  select concat_ws(',', coalesce(q.retention::text, '-'), coalesce(q.retention_cancelled::text, '-'), coalesce(q.retention_failed::text, '-'))
  into was from posthouse.queue q where q.name = set_queue.queue;
  insert into posthouse.queue (name, retention, retention_cancelled, retention_failed)
  values (set_queue.queue, case outcome when 'done' then keep end, case outcome when 'cancelled' then keep end, case outcome when 'failed' then keep end)
  on conflict (name) do update set
    retention = case outcome when 'done' then keep else posthouse.queue.retention end,
    retention_cancelled = case outcome when 'cancelled' then keep else posthouse.queue.retention_cancelled end,
    retention_failed = case outcome when 'failed' then keep else posthouse.queue.retention_failed end;
  -- All of history is looked at again only if anything is different.
  if coalesce(was, '-,-,-') is distinct from (
      select concat_ws(',', coalesce(q.retention::text, '-'), coalesce(q.retention_cancelled::text, '-'), coalesce(q.retention_failed::text, '-'))
      from posthouse.queue q where q.name = set_queue.queue) then
    update posthouse.slice s set stale = true where not s.stale;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_route(model text, endpoints text[])
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_schedule(name text, cron text, job jsonb, timezone text DEFAULT 'UTC'::text, catch_up text DEFAULT 'one'::text, catch_up_max integer DEFAULT 10, catch_up_over interval DEFAULT '00:10:00'::interval, jitter interval DEFAULT '00:00:00'::interval, source text DEFAULT NULL::text)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
#variable_conflict use_column
declare
  was posthouse.schedule;
  now_at timestamptz := clock_timestamp();
begin
  perform posthouse.check_schedule(name, cron, job, timezone, catch_up, catch_up_max, catch_up_over, jitter, source);
  if session_user <> current_user then
    perform posthouse.check_enqueue(coalesce(job ->> 'tenant', 'default'), job ->> 'kind');
  end if;
  insert into posthouse.schedule (name, cron, timezone, job, tenant, catch_up, catch_up_max, catch_up_over, jitter, source, changed_at, since)
  values (set_schedule.name, set_schedule.cron, set_schedule.timezone, set_schedule.job, coalesce(set_schedule.job ->> 'tenant', 'default'),
    set_schedule.catch_up, set_schedule.catch_up_max, set_schedule.catch_up_over, set_schedule.jitter, set_schedule.source, now_at, now_at)
  on conflict do nothing;
  if found then
    return 'new';
  end if;
  select * into was from posthouse.schedule s where s.name = set_schedule.name for update;
  if not found then
    -- Somebody removes it just now.
    return posthouse.set_schedule(name, cron, job, timezone, catch_up, catch_up_max, catch_up_over, jitter, source);
  end if;
  if (was.cron, was.timezone, was.job, was.catch_up, was.catch_up_max, was.catch_up_over, was.jitter, was.source)
     is not distinct from (set_schedule.cron, set_schedule.timezone, set_schedule.job, set_schedule.catch_up, set_schedule.catch_up_max,
       set_schedule.catch_up_over, set_schedule.jitter, set_schedule.source) then
    return 'same';
  end if;
  update posthouse.schedule s set cron = set_schedule.cron, timezone = set_schedule.timezone, job = set_schedule.job,
    tenant = coalesce(set_schedule.job ->> 'tenant', 'default'), catch_up = set_schedule.catch_up, catch_up_max = set_schedule.catch_up_max,
    catch_up_over = set_schedule.catch_up_over, jitter = set_schedule.jitter, source = set_schedule.source, version = was.version + 1,
    changed_at = now_at, error = null, error_at = null
  where s.name = set_schedule.name;
  -- A tick that is due already remains; the new rule begins after it.
  update posthouse.schedule s set next_at = null, since = now_at
  where s.name = set_schedule.name and (was.cron, was.timezone) is distinct from (set_schedule.cron, set_schedule.timezone)
    and (s.next_at <= now_at) is not true;
  if was.error is not null then
    perform posthouse.resolve_alert('schedule', name);
  end if;
  return 'changed';
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_serial_by(queue text, field text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_tenant(tenant text, weight real)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.set_webhook(enabled boolean, reason text DEFAULT NULL::text)
 RETURNS void
 LANGUAGE sql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  update posthouse.alert_webhook w set enabled = coalesce(set_webhook.enabled, w.enabled), reason = left(set_webhook.reason, 500),
    changed_at = clock_timestamp()
$function$
;

CREATE OR REPLACE FUNCTION posthouse.settle(worker uuid, outcomes json)
 RETURNS TABLE(id bigint, fence bigint, verdict text, state text)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
#variable_conflict use_column
declare
  whole jsonb;
  list jsonb[];
  o jsonb;
  d record;
  applied bigint[] := '{}';
  gated posthouse.job[];              -- that passed gates
  passed posthouse.job[] := '{}';     -- of these, those whose outcome was applied, with what they used
  used jsonb[] := '{}';
  called boolean[] := '{}';
begin
  perform posthouse.check_isolation();
  if outcomes is null or json_typeof(outcomes) <> 'array' then
    raise exception using errcode = 'PH001', message = 'outcomes: must be a JSON array of objects';
  end if;
  begin
    whole := outcomes;
    select x.* into d from posthouse.done_outcomes(whole) x;
  exception when others then
    -- Something in it cannot be stored, or is no outcome: clean it, and take what is left one by one.
    whole := null;
    list := array(select posthouse.storable(e) from json_array_elements(outcomes) e);
    select array_agg(x.id) as ids, array_agg(x.fence) as fences, array_agg(x.result) as results, array_agg(x.usage) as usages,
      array_agg(x.flags) as flags into d
    from (
      select distinct on (x.ids[1]) x.ids[1] as id, x.fences[1] as fence, x.results[1] as result, x.usages[1] as usage, x.flags[1] as flags
      from unnest(list) e
      cross join lateral posthouse.done_outcomes(case when posthouse.is_attempt(e) then jsonb_build_array(e) else '[]' end) x
      where x.ids is not null
      order by x.ids[1], x.fences[1] desc) x;
  end;
  if exists (select from posthouse.gate) then
    -- Before any job, as claims do: who changes gates counts what runs.
    perform pg_advisory_xact_lock_shared(1346912000, 4);
    gated := posthouse.gated_jobs(settle.worker, d.ids || array(
      select (e ->> 'id')::bigint from unnest(coalesce(list, array(select jsonb_array_elements(whole)))) e
      where e ->> 'outcome' is distinct from 'done' and posthouse.is_attempt(e)));
  end if;
  if coalesce(cardinality(d.ids), 0) < coalesce(jsonb_array_length(whole), cardinality(list)) then
    -- In one order, whatever that of the outcomes: two sessions that record the same ones must not lock each other out.
    perform from posthouse.job j
    where j.worker = settle.worker and j.id = any(d.ids || array(
      select (e ->> 'id')::bigint from unnest(coalesce(list, array(select jsonb_array_elements(whole)))) e where posthouse.is_attempt(e)))
    order by j.id for update;
  end if;
  if d.ids is not null then
    applied := posthouse.settle_done(settle.worker, d.ids, d.fences, d.results, d.usages, d.flags);
    if gated is not null then
      select x.passed, x.used, x.called into passed, used, called from posthouse.done_behind_gates(gated, applied, d.ids, d.fences, d.usages) x;
    end if;
  end if;
  if cardinality(applied) = coalesce(jsonb_array_length(whole), cardinality(list)) then
    if passed <> '{}' then
      perform posthouse.settle_gates(passed, used, called);
    end if;
    return query select a, d.fences[width_bucket(a, d.ids)]::bigint, 'applied', 'done' from unnest(applied) a;
    return;
  end if;
  foreach o in array coalesce(list, array(select jsonb_array_elements(whole))) loop
    if not posthouse.is_attempt(o) then
      id := null; fence := null; verdict := 'invalid'; state := null;
      return next;
      continue;
    end if;
    id := (o ->> 'id')::bigint;
    fence := (o ->> 'fence')::bigint;
    if o ->> 'outcome' = 'done' and id = any(applied) and d.fences[width_bucket(id, d.ids)] = fence then
      verdict := 'applied'; state := 'done';
    elsif o ->> 'outcome' is distinct from 'done' then
      state := posthouse.settle_other(settle.worker, o);
      verdict := 'applied';
    else
      state := null;
    end if;
    if state is null then
      select s.verdict, s.state into verdict, state from posthouse.settled_before(settle.worker, id, fence) s;
    elsif gated is not null and o ->> 'outcome' is distinct from 'done' then
      for i in 1 .. cardinality(gated) loop
        continue when (gated[i]).id <> settle.id or (gated[i]).fence <> settle.fence;
        passed := array_append(passed, gated[i]);
        used := array_append(used, nullif(o -> 'usage', 'null'));
        -- What was given back without a request costs nothing. A worker that stops in the middle of calls may not say how many it sent.
        called := array_append(called, coalesce(not (o ->> 'outcome' in ('release', 'snooze')
          and coalesce(o #> '{usage,requests}', case o ->> 'outcome' when 'snooze' then '0'::jsonb end) = '0'), true));
      end loop;
    end if;
    return next;
  end loop;
  if passed <> '{}' then
    perform posthouse.settle_gates(passed, used, called);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.settle_done(worker uuid, ids bigint[], fences integer[], results jsonb[], usages jsonb[], flags jsonb[])
 RETURNS bigint[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
#variable_conflict use_column
declare
  applied bigint[];
  keyed bigint[];
  lanes bigint[];                     -- of those that brought their usage, with `used`
  used jsonb[];
  unrecorded boolean;                 -- some queue keeps no history
  housed boolean;                     -- there is a partition for all of them
  bare bigint[];                      -- those whose payload goes with them
begin
  select exists (select from posthouse.queue q where q.retention = interval '0'),
    exists (select from posthouse.id_range r where r.upper > ids[cardinality(ids)] and r.lower <= ids[1]),
    case when exists (select from posthouse.kind k where k.drops_payload) then posthouse.bare_jobs(ids) end
  into unrecorded, housed, bare;
  if not housed then
    perform posthouse.house(ids);
  end if;
  if unrecorded then
    applied := posthouse.settle_unrecorded(settle_done.worker, ids, fences, results, usages, flags);
    if bare is not null then
      perform posthouse.drop_payloads(bare, applied);
    end if;
    return applied;
  end if;
  with gone as (
    -- The binary search finds a row's place in the arrays: a join could be planned row against row.
    delete from posthouse.job j
    where j.id = any(ids) and j.worker = settle_done.worker and j.state = 'running' and j.fence = fences[width_bucket(j.id, ids)]
    returning j.*
  ), kept as (
    insert into posthouse.archive (id, lane_id, created_at, started_at, finished_at, worker, timeout_ms, fence, attempt,
      max_attempts, state, flags, result, usage, errors)
    select g.id, g.lane_id, g.created_at, g.started_at, clock_timestamp(), g.worker, g.timeout_ms, g.fence, g.attempt,
      g.max_attempts, 'done',
      case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
      results[width_bucket(g.id, ids)], usages[width_bucket(g.id, ids)],
      case when g.errors > 0 then posthouse.gather_errors(g.id) end
    from gone g
  ), counted as (
    insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, 'done', count(*) from gone g group by g.lane_id
  )
  select array_agg(g.id), array_agg(g.id) filter (where g.keyed), array_agg(g.lane_id) filter (where usages is not null),
    array_agg(usages[width_bucket(g.id, ids)]) filter (where usages is not null)
  into applied, keyed, lanes, used from gone g;
  if used is not null then
    perform posthouse.record_usage(lanes, used);
  end if;
  if keyed is not null then
    perform posthouse.free_keys(keyed);
  end if;
  if bare is not null then
    perform posthouse.drop_payloads(bare, applied);
  end if;
  return coalesce(applied, '{}');
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.settle_gates(jobs posthouse.job[], usages jsonb[], called boolean[], wait boolean DEFAULT true)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  lanes bigint[];
  insteads text[];
  passed_places int[];                -- pairs of a lane and a gate
  passed bigint[];
  members text[];
  -- Each gate once, and of each: how many may run, whether it counts more than that, whether the end of these jobs makes room behind it
  -- (its own if no lane sleeps because of it), and whether its members are many.
  known bigint[];
  caps int[];
  counts boolean[];
  frees boolean[];
  many boolean[];
  r record;
begin
  select array_agg(x.lane_id), case when count(x.instead) > 0 then array_agg(x.instead) end into lanes, insteads
  from (select distinct j.lane_id, j.instead from unnest(jobs) j) x;
  select array_agg(g.place), array_agg(g.gate_id), array_agg(g.member) into passed_places, passed, members
  from posthouse.gates_of(lanes, insteads) g;
  select array_agg(x.id), array_agg(coalesce(x.max_running, 2147483647)), array_agg(x.counts), array_agg(x.frees), array_agg(x.many)
  into known, caps, counts, frees, many
  from (
    select g.id, g.max_running, num_nonnulls(g.requests_per_minute, g.tokens_per_minute, g.money_per_day, g.money_per_month) > 0 as counts,
      num_nonnulls(g.max_running, g.tokens_per_minute) > 0 or g.requests_per_minute is not null and false = any(called) as frees,
      g.name = 'tenant:*' or g.name like 'serial:%' as many
    from posthouse.gate g where g.id = any(passed) order by g.id) x;
  if true = any(counts) then
    select array_agg(x.gate_id order by x.gate_id, x.member) as gate_ids, array_agg(x.member order by x.gate_id, x.member) as members into r
    from (
      select distinct g.gate_id, g.member from unnest(passed, members) g(gate_id, member)
      where counts[width_bucket(g.gate_id, known)] and known[width_bucket(g.gate_id, known)] = g.gate_id) x;
    perform posthouse.true_up(jobs, usages, called, lanes, insteads, r.gate_ids, r.members, wait);
  end if;
  -- Those of other workers who found no room look again.
  if exists (
    select from (select distinct g.gate_id, g.member from unnest(passed, members) g(gate_id, member)) g
    cross join lateral (
      select cardinality(s.job_ids) as running from posthouse.gate_state s where s.gate_id = g.gate_id and s.member = g.member
      order by s.gate_id desc, s.member desc, s.seq desc limit 1) s
    where s.running >= caps[width_bucket(g.gate_id, known)]
      and (strpos(g.member, chr(31)) = 0 or posthouse.serial_waits(g.gate_id, g.member))) then
    perform posthouse.notify_queue('*');
  end if;
  -- Held before the look, as posthouse.wake_blocked does.
  perform pg_advisory_xact_lock_shared(1346912003, k.key) from (select distinct (g % 128)::int as key from unnest(known) g) k;
  frees := array(select k.frees and exists (select from posthouse.lane l where l.blocked_by = k.id offset 0) from unnest(known, frees) k(id, frees));
  if true = any(frees) then
    for r in
      select x.gate_id, x.member, count(*)::int as jobs
      from (
        select g.place, g.gate_id, g.member
        from unnest(passed_places, passed, members) g(place, gate_id, member)
        where frees[width_bucket(g.gate_id, known)]
          -- Of thousands of tenants most have none that sleeps.
          and (not many[width_bucket(g.gate_id, known)]
               or exists (select from posthouse.lane l where coalesce(l.blocked_by, 0) = g.gate_id and coalesce(l.blocked_by, 0) > 0
                            and l.tenant = split_part(g.member, chr(31), 1) offset 0)) offset 0) x
      join unnest(jobs) j on j.lane_id = lanes[x.place] and j.instead is not distinct from insteads[x.place]
      group by x.gate_id, x.member
    loop
      perform posthouse.wake_blocked(r.gate_id, r.member, r.jobs);
    end loop;
  end if;
  -- Gates that its calls passed and it did not.
  for r in
    select a.gate_id, count(*)::int as jobs
    from generate_subscripts(jobs, 1) o cross join lateral unnest((jobs[o]).admitted[3:]) a(gate_id)
    where a.gate_id <> all(coalesce(passed, '{}')) group by a.gate_id
  loop
    perform posthouse.wake_blocked(r.gate_id, null, r.jobs);
    perform posthouse.notify_queue('*');
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.settle_other(worker uuid, o jsonb)
 RETURNS text
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  j posthouse.job := posthouse.attempt_job(worker, (o ->> 'id')::bigint, (o ->> 'fence')::bigint);
  outcome text := o ->> 'outcome';
  usage jsonb := posthouse.cap_json(nullif(o -> 'usage', 'null'), 65536);
  class text := coalesce(o #>> '{error,class}', 'error');
  error text := coalesce(case jsonb_typeof(o -> 'error') when 'object' then o #>> '{error,message}' else o ->> 'error' end, 'no error given');
  detail jsonb := nullif(o #> '{error,detail}', 'null');
  delay interval;
  longest interval := interval '1 millisecond' * least(posthouse.number_of(o -> 'max_deferral_ms', 86400000), 3e11);
begin
  if j.id is null then
    return null;
  end if;
  if usage is not null then
    perform posthouse.record_usage(array[j.lane_id], array[usage]);
  end if;
  if outcome = 'release' then
    if j.cancel_asked then
      perform posthouse.archive_job(j, 'cancelled', null, usage);
      return 'cancelled';
    end if;
    perform posthouse.requeue_job(j, clock_timestamp(), true, true, 'released', true);
    return 'queued';
  elsif outcome = 'cancelled' or (j.cancel_asked and outcome in ('retry', 'snooze')) then
    if outcome = 'retry' then
      perform posthouse.record_error(j, class, error, detail, usage);
      j.errors := j.errors + 1;
    end if;
    perform posthouse.archive_job(j, 'cancelled', posthouse.cap_json(nullif(o -> 'result', 'null'), 33554432), usage);
    return 'cancelled';
  elsif outcome = 'snooze' then
    if j.first_started_at + longest < clock_timestamp() then
      perform posthouse.bury_job(j, 'deferred_too_long', format('deferred for longer than %s since it first started at %s: %s',
        longest, j.first_started_at, coalesce(o ->> 'reason', 'no reason given')), detail, usage);
      return 'failed';
    end if;
    delay := interval '1 millisecond' * least(greatest(posthouse.number_of(o -> 'delay_ms', 1000), 0), 3e11);
    -- One that a closed gate holds back keeps its place.
    perform posthouse.requeue_job(j, clock_timestamp() + delay, o ? 'gate' and posthouse.is_held_back(j.lane_id), true, o ->> 'reason', false);
    return 'queued';
  elsif outcome = 'retry' and j.attempt < j.max_attempts then
    delay := case when jsonb_typeof(o -> 'delay_ms') = 'number'
      then interval '1 millisecond' * least(greatest(posthouse.number_of(o -> 'delay_ms', 0), 0), 3e11)
      else posthouse.backoff(j.attempt) end;
    perform posthouse.record_error(j, class, error, detail, usage);
    perform posthouse.requeue_job(j, clock_timestamp() + delay, false, false, error,
      class in ('ambiguous', 'timeout') or coalesce(detail -> 'perhaps_billed' = 'true', false));
    return 'queued';
  end if;
  -- fail, retry without attempts left, or an outcome nobody knows: the attempt ran, so the job must end.
  perform posthouse.bury_job(j,
    case when outcome in ('fail', 'retry') then class else 'outcome' end,
    case when outcome in ('fail', 'retry') then error else format('the worker settled with the unknown outcome %s', coalesce(quote_literal(outcome), 'null')) end,
    detail, usage);
  return 'failed';
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.settle_plain(worker uuid, ids bigint[], fences integer[], results jsonb[], usages jsonb[])
 RETURNS bigint[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
declare
  applied bigint[];
  ascending boolean;
  gated posthouse.job[];              -- that passed gates
  settled record;                     -- of these, those that were applied
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    perform posthouse.check_isolation();
  end if;
  -- Of one alone the statement would cost as much as the check is worth.
  ascending := case when cardinality(ids) = 1 then ids[1] is not null end;
  if ascending is null then
    ascending := ids = array(select distinct i from unnest(ids) i order by i);
  end if;
  if (ascending and cardinality(fences) = cardinality(ids)
    and coalesce(cardinality(results), cardinality(ids)) = cardinality(ids)
    and coalesce(cardinality(usages), cardinality(ids)) = cardinality(ids)) is not true then
    raise exception using errcode = 'PH001', message = 'ids: must be in ascending order, with as many fences, results and usages';
  elsif pg_column_size(results) > 33554432 or pg_column_size(usages) > 65536 and exists (
    select from unnest(usages) u where pg_column_size(u) > 65536) then
    -- Some are perhaps too large to be kept whole.
    return array(
      select s.id from posthouse.settle(worker, (
        select json_agg(json_build_object('id', o.id, 'fence', o.fence, 'outcome', 'done', 'result', o.result, 'usage', o.usage))
        from unnest(ids, fences, results, usages) o(id, fence, result, usage))) s
      where s.verdict <> 'applied');
  end if;
  if exists (select from posthouse.gate) then
    -- As posthouse.settle does.
    perform pg_advisory_xact_lock_shared(1346912000, 4);
    gated := posthouse.gated_jobs(worker, ids);
  end if;
  applied := posthouse.settle_done(worker, ids, fences, results, usages, null);
  if gated is not null then
    select x.* into settled from posthouse.done_behind_gates(gated, applied, ids, fences, usages) x;
    if settled.passed <> '{}' then
      perform posthouse.settle_gates(settled.passed, settled.used, settled.called);
    end if;
  end if;
  if cardinality(applied) = cardinality(ids) then
    return '{}';
  end if;
  return array(select i from unnest(ids) i where i <> all(applied));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.settle_unrecorded(worker uuid, ids bigint[], fences integer[], results jsonb[], usages jsonb[], flags jsonb[])
 RETURNS bigint[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
#variable_conflict use_column
declare
  now_at timestamptz := clock_timestamp();
  applied bigint[];
  keyed bigint[];
  lanes bigint[];                     -- of those that brought their usage, with `used`
  used jsonb[];
  failed_before bigint[];             -- of those without history
begin
  if (select bool_and(coalesce((select q.retention from posthouse.queue q where q.name = w.queue),
        (select q.retention from posthouse.queue q where q.name = '*')) is not distinct from interval '0')
      from (select unnest(w.queues) as queue from posthouse.worker w where w.id = settle_unrecorded.worker) w) then
    with gone as (
      delete from posthouse.job j
      where j.id = any(ids) and j.worker = settle_unrecorded.worker and j.state = 'running' and j.fence = fences[width_bucket(j.id, ids)]
      returning j.id, j.lane_id, j.created_at, j.fence, j.attempt, j.max_attempts, j.errors, j.keyed
    ), laid as (
      insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, fence, attempt, max_attempts, state, flags, result)
      select g.id, g.lane_id, g.created_at, now_at, settle_unrecorded.worker, g.fence, g.attempt, g.max_attempts, 'done',
        case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
        results[width_bucket(g.id, ids)]
      from gone g
    ), noted as (
      insert into posthouse.burial (buried_at, jobs, job_ids)
      select now_at, count(*), array_agg(g.id) from gone g having count(*) > 0
    ), counted as (
      insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, 'done', count(*) from gone g group by g.lane_id
    )
    select array_agg(g.id), array_agg(g.id) filter (where g.keyed), array_agg(g.id) filter (where g.errors > 0),
      array_agg(g.lane_id) filter (where usages is not null), array_agg(usages[width_bucket(g.id, ids)]) filter (where usages is not null)
    into applied, keyed, failed_before, lanes, used from gone g;
  else
    with gone as (
      delete from posthouse.job j
      where j.id = any(ids) and j.worker = settle_unrecorded.worker and j.state = 'running' and j.fence = fences[width_bucket(j.id, ids)]
      returning j.*
    ), bare as materialized (
      select d.lane_id
      from (select distinct g.lane_id from gone g) d
      cross join lateral (select l.queue from posthouse.lane l where l.id = d.lane_id offset 0) l
      where coalesce((select q.retention from posthouse.queue q where q.name = l.queue),
        (select q.retention from posthouse.queue q where q.name = '*')) = interval '0'
    ), kept as (
      insert into posthouse.archive (id, lane_id, created_at, started_at, finished_at, worker, timeout_ms, fence, attempt,
        max_attempts, state, flags, result, usage, errors)
      select g.id, g.lane_id, g.created_at, g.started_at, now_at, g.worker, g.timeout_ms, g.fence, g.attempt,
        g.max_attempts, 'done',
        case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
        results[width_bucket(g.id, ids)], usages[width_bucket(g.id, ids)],
        case when g.errors > 0 then posthouse.gather_errors(g.id) end
      from gone g where g.lane_id not in (select b.lane_id from bare b)
    ), unkept as materialized (
      select g.* from gone g where g.lane_id in (select b.lane_id from bare b)
    ), laid as (
      insert into posthouse.tombstone (id, lane_id, created_at, finished_at, worker, fence, attempt, max_attempts, state, flags, result)
      select g.id, g.lane_id, g.created_at, now_at, g.worker, g.fence, g.attempt, g.max_attempts, 'done',
        case when flags[width_bucket(g.id, ids)] is not null then array(select jsonb_array_elements_text(flags[width_bucket(g.id, ids)])) end,
        results[width_bucket(g.id, ids)]
      from unkept g
    ), noted as (
      insert into posthouse.burial (buried_at, jobs, job_ids)
      select now_at, count(*), array_agg(g.id) from unkept g having count(*) > 0
    ), counted as (
      insert into posthouse.tally (lane_id, state, jobs) select g.lane_id, 'done', count(*) from gone g group by g.lane_id
    )
    select array_agg(g.id), array_agg(g.id) filter (where g.keyed),
      (select array_agg(u.id) from unkept u where u.errors > 0),
      array_agg(g.lane_id) filter (where usages is not null), array_agg(usages[width_bucket(g.id, ids)]) filter (where usages is not null)
    into applied, keyed, failed_before, lanes, used from gone g;
  end if;
  if failed_before is not null then
    delete from posthouse.attempt a where a.job_id = any(failed_before);
  end if;
  if used is not null then
    perform posthouse.record_usage(lanes, used);
  end if;
  if keyed is not null then
    perform posthouse.free_keys(keyed);
  end if;
  return coalesce(applied, '{}');
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.settled_before(worker uuid, id bigint, fence bigint, OUT verdict text, OUT state text)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  seen boolean;
begin
  state := posthouse.state_of(id);
  select true into seen from posthouse.archive a where a.id = settled_before.id and a.worker = settled_before.worker and a.fence = settled_before.fence;
  if seen is null then
    select true into seen from posthouse.tombstone t where t.id = settled_before.id and t.worker = settled_before.worker and t.fence = settled_before.fence;
  end if;
  if seen is null then
    select true into seen from posthouse.dead_letter d where d.id = settled_before.id and d.worker = settled_before.worker and d.fence = settled_before.fence;
  end if;
  if seen is null then
    -- Back in line by this very attempt: rescue and reconcile take the worker off the row.
    select true into seen from posthouse.job j
    where j.id = settled_before.id and j.worker = settled_before.worker and j.fence = settled_before.fence and j.state <> 'running';
  end if;
  if seen is null then
    select true into seen from posthouse.attempt a
    where a.job_id = settled_before.id and a.fence = settled_before.fence and a.worker = settled_before.worker and a.class <> 'worker_lost';
  end if;
  verdict := case when seen then 'already' else 'lost' end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.shortest_retention()
 RETURNS interval
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select min(case when x.keep = interval '0' then interval '10 minutes' else x.keep end)
  from posthouse.queue q cross join lateral unnest(array[q.retention, q.retention_cancelled, q.retention_failed]) x(keep)
  where x.keep < interval '1000 years'
$function$
;

CREATE OR REPLACE FUNCTION posthouse.spare_payloads(lower bigint, upper bigint, max_jobs integer DEFAULT 1000)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.state_of(job_id bigint)
 RETURNS text
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
  select coalesce(
    (select j.state::text from posthouse.job j where j.id = job_id),
    (select a.state::text from posthouse.archive a where a.id = job_id),
    (select t.state::text from posthouse.tombstone t where t.id = job_id),
    (select 'failed' from posthouse.dead_letter d where d.id = job_id))
$function$
;

CREATE OR REPLACE FUNCTION posthouse.storable(outcome json)
 RETURNS jsonb
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  cleaned text := outcome::text;
begin
  return outcome::jsonb;
exception when others then
  begin
    cleaned := case when octet_length(cleaned) <= 33554432 then posthouse.clean_json(cleaned)
      else replace(replace(replace(cleaned, E'\\\\', chr(1)), E'\\u0000', E'\\ufffd'), chr(1), E'\\\\') end;
    return (select jsonb_object_agg(e.key, posthouse.storable_value(e.value)) from json_each(cleaned::json) e) || '{"flags": ["cleaned"]}';
  exception when others then
    return null;
  end;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.storable_value(value json)
 RETURNS jsonb
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return value::jsonb;
exception when others then
  return to_jsonb(left(value::text, 1000000));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.sum_since(seconds bigint[], counts bigint[], first bigint)
 RETURNS bigint
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  total bigint := 0;
begin
  for i in reverse coalesce(cardinality(seconds), 0) .. 1 loop
    exit when seconds[i] < first;
    total := total + counts[i];
  end loop;
  return total;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.survey(jobs jsonb, n integer, OUT queues text[], OUT tenants text[], OUT kinds text[], OUT priorities integer[], OUT gates text[], OUT serials text[], OUT dues timestamp with time zone[], OUT line_of integer[], OUT keyed boolean, OUT plain boolean, OUT limited boolean)
 RETURNS record
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  r record;
  marked boolean;                     -- the last gate is what jobs share
  known boolean;                      -- whether a limit may be for them; null: there is no such lane yet
  doubtful boolean := pg_column_size(jobs) > 33554432;   -- else no payload is too large
begin
  line_of := array_fill(1, array[n]);
  keyed := false;
  plain := true;
  limited := false;
  begin
    for r in
      select coalesce(x.queue, 'default') as queue, coalesce(x.tenant, 'default') as tenant, x.kind,
        coalesce(x.priority, 0) as priority, x.gates, array_agg(x.ordinal::int) as ordinals,
        bool_or(num_nonnulls(x.delay_ms, x.run_at, x.max_attempts, x.timeout_ms, x.dedupe_key, x.dedupe_for_ms, x.trace, x.tokens) > 0) as extras,
        bool_or(x.dedupe_key is not null) as keyed
      from rows from (jsonb_to_recordset(jobs) as (kind text, queue text, tenant text, priority int, delay_ms float8,
             run_at timestamptz, max_attempts int, timeout_ms float8, dedupe_key text, dedupe_for_ms float8, trace jsonb, gates text[],
             tokens int))
        with ordinality x(kind, queue, tenant, priority, delay_ms, run_at, max_attempts, timeout_ms, dedupe_key,
          dedupe_for_ms, trace, gates, tokens, ordinal)
      group by coalesce(x.queue, 'default'), coalesce(x.tenant, 'default'), x.kind, coalesce(x.priority, 0), x.gates
      order by 1, 2, 3, 4, 5
    loop
      queues := queues || r.queue;
      tenants := tenants || r.tenant;
      kinds := kinds || r.kind;
      priorities := priorities || r.priority;
      marked := coalesce(r.gates[cardinality(r.gates)] like chr(31) || '%', false);
      serials := serials || case when marked then substr(r.gates[cardinality(r.gates)], 2) end;
      gates := gates || case when r.gates is not null then posthouse.check_gates(r.gates[:cardinality(r.gates) - marked::int])::text end;
      dues := dues || '-infinity'::timestamptz;
      keyed := keyed or r.keyed;
      plain := plain and not r.extras;
      known := (
        select l.limited from posthouse.lane l
        where l.queue = r.queue and l.tenant = r.tenant and l.kind = r.kind and l.priority = r.priority limit 1);
      -- The names of a lane were checked when it was made.
      doubtful := doubtful or r.extras or known is null;
      limited := limited or known is not false;
      if cardinality(kinds) > 1 then
        for i in 1 .. cardinality(r.ordinals) loop
          line_of[r.ordinals[i]] := cardinality(kinds);
        end loop;
      end if;
    end loop;
  exception when others then
    perform posthouse.check_jobs(jobs);
    raise;
  end;
  if not doubtful then
    doubtful := exists (
      select from jsonb_array_elements(jobs) j
      where j - array['kind', 'payload', 'queue', 'tenant', 'priority', 'delay_ms', 'run_at', 'max_attempts', 'timeout_ms',
        'dedupe_key', 'dedupe_for_ms', 'trace', 'gates', 'tokens'] <> '{}');
  end if;
  if doubtful then
    perform posthouse.check_jobs(jobs);
    if exists (select from jsonb_array_elements(jobs) j where (j ->> 'dedupe_by_payload')::boolean) then
      keyed := true;
      plain := false;
    end if;
  end if;
  if not plain then
    dues := array(select min(p.due) from posthouse.parse_jobs(jobs) p group by line_of[p.ordinal] order by line_of[p.ordinal]);
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.survey_slice(lo bigint, held bigint[], archived boolean, OUT due_at timestamp with time zone, OUT over_at timestamp with time zone, OUT lanes bigint[], OUT states text[], OUT keeps interval[])
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET "TimeZone" TO 'UTC'
 SET jit TO 'off'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_nestloop TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
AS $function$
begin
  -- Not `not`, which would be looked up one by one in older versions of Postgres.
  with ended as materialized (
    select a.lane_id, a.state, min(a.finished_at) filter (where (a.id = any(held)) is not true) as first_at, max(a.finished_at) as last_at
    from posthouse.archive a
    where archived and a.id >= lo and a.id < lo + 10000 group by a.lane_id, a.state
    union all
    select d.lane_id, 'failed', min(d.failed_at) filter (where (d.id = any(held)) is not true), null
    from posthouse.dead_letter d
    where d.id >= lo and d.id < lo + 10000 group by d.lane_id
  ), named as materialized (
    select e.lane_id, e.state::text, e.first_at, e.last_at, l.queue
    from ended e cross join lateral (select l.queue from posthouse.lane l where l.id = e.lane_id offset 0) l
  ), kept as materialized (
    select n.queue, n.state, posthouse.retention_of(n.queue, n.state) as keep from (select distinct n.queue, n.state from named n) n
  )
  select min(n.first_at + k.keep + least(k.keep / 16, interval '1 day')),
    coalesce(max(coalesce(n.last_at + k.keep, 'infinity')) filter (where n.state <> 'failed'), '-infinity'),
    array_agg(n.lane_id), array_agg(n.state), array_agg(k.keep)
  into due_at, over_at, lanes, states, keeps
  from named n join kept k on k.queue = n.queue and k.state = n.state;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.survey_slices(budget interval DEFAULT '00:00:00.01'::interval)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET jit TO 'off'
AS $function$
declare
  stop_at timestamptz := clock_timestamp() + budget;
  shortest interval;
  s posthouse.slice;
begin
  if not pg_try_advisory_xact_lock(1346912000, 6) then
    return false;
  end if;
  shortest := posthouse.shortest_retention();
  while shortest is not null and posthouse.cut_slices() loop
    if clock_timestamp() >= stop_at then
      return true;
    end if;
  end loop;
  with back as (
    delete from posthouse.revived v where v.id in (select x.id from posthouse.revived x order by x.id limit 1000 for update skip locked) returning v.id
  )
  update posthouse.slice x set stale = true where x.lower in (select b.id / 10000 * 10000 from back b);
  -- By one scan: who holds a snapshot keeps the index entries of those that were looked at.
  for s in select x.* from posthouse.slice x where x.stale order by x.lower loop
    perform posthouse.visit_slice(s, shortest, 0);
    if clock_timestamp() >= stop_at then
      return true;
    end if;
  end loop;
  return false;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.sweep_part(part text, OUT more boolean, OUT alerts jsonb)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET jit TO 'off'
 SET lock_timeout TO '2s'
AS $function$
begin
  more := false;
  alerts := '[]';
  case part
    when 'stragglers' then perform posthouse.rescue_stragglers();
    when 'gates' then perform posthouse.wake_missed();
    when 'shares' then perform posthouse.make_shares();
    when 'folds' then perform posthouse.fold();
    when 'usage' then perform posthouse.fold_usage();
    when 'redrives' then perform posthouse.forget_redrives();
    when 'partitions' then perform posthouse.partitions_ahead();
    when 'slices' then more := posthouse.survey_slices();
    when 'expire' then more := posthouse.expire();
    when 'analyze' then perform posthouse.analyze_parents();
    when 'tombstones' then more := posthouse.forget() >= 10000;
    when 'watch' then perform posthouse.watch();
    when 'alerts' then alerts := posthouse.tell_alerts();
    when 'dedupe' then more := posthouse.follow_missed();
    when 'depths' then perform posthouse.count_depths();
    when 'gauges', 'counts' then perform posthouse.count_gauges(part);
    when 'floors' then perform posthouse.advance_floors();
  end case;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_back(worker uuid, id bigint, fence bigint, refund boolean, unsent boolean DEFAULT false)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  j posthouse.job;
  w posthouse.worker;
begin
  select x.* into j from posthouse.job x
  where x.id = take_back.id and x.worker = take_back.worker and x.fence = take_back.fence and x.state = 'running'
  for update skip locked;
  if j.id is null then
    return false;
  end if;
  if j.reserved is not null then
    if unsent then
      perform posthouse.settle_gates(array[j], array[null]::jsonb[], array[false], false);
    end if;
    perform posthouse.free_gates(j.lane_id);
    perform posthouse.wake_blocked(a, null, 1) from unnest(j.admitted[3:]) a;
  end if;
  if j.cancel_asked then
    perform posthouse.archive_job(j, 'cancelled', null, null);
    return true;
  elsif not refund then
    select * into w from posthouse.worker x where x.id = take_back.worker;
    if j.attempt >= j.max_attempts then
      perform posthouse.bury_job(j, 'worker_lost', posthouse.lost_text(w), null, null);
      return true;
    end if;
    perform posthouse.record_error(j, 'worker_lost', posthouse.lost_text(w), null, null);
  end if;
  perform posthouse.requeue_job(j, clock_timestamp(), true, refund, case when refund then 'released' else 'worker lost' end,
    case when not unsent then true end);
  -- Nobody's attempt any more: a late settle of it must hear "lost", not "already".
  update posthouse.job x set worker = null where x.id = take_back.id;
  return true;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_back_claim(worker uuid, seq bigint)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  left_over int;
  moved int;
begin
  select coalesce(sum(posthouse.take_back(take_back_claim.worker, u.id, u.fence, false)::int), 0) into moved
  from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence)
  where c.worker = take_back_claim.worker and c.seq = take_back_claim.seq;
  select count(*) into left_over
  from posthouse.claimed c cross join lateral unnest(c.job_ids, c.fences) u(id, fence)
  cross join lateral (
    select from posthouse.job j where j.id = u.id and j.worker = c.worker and j.fence = u.fence and j.state = 'running' offset 0) j
  where c.worker = take_back_claim.worker and c.seq = take_back_claim.seq;
  if left_over = 0 then
    delete from posthouse.claimed c where c.worker = take_back_claim.worker and c.seq = take_back_claim.seq;
  end if;
  return moved;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_gated(worker uuid, lanes bigint[], quotas integer[], max_jobs integer, due timestamp with time zone, wait boolean, OUT jobs posthouse.job[], OUT blocked bigint[], OUT blockers bigint[], OUT members text[], OUT untils timestamp with time zone[], OUT held boolean)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  n int := cardinality(lanes);
  step int := greatest(16, least(max_jobs, 256));
  at int := 1;
  part record;
begin
  jobs := '{}'; blocked := '{}'; blockers := '{}'; members := '{}'; untils := '{}'; held := false;
  -- In pieces, since the first lanes may do.
  while at <= n and cardinality(jobs) < max_jobs loop
    select * into part from posthouse.take_gated_part(worker, lanes[at:at + step - 1], quotas[at:at + step - 1],
      max_jobs - cardinality(jobs), due, take_gated.wait and not held);
    held := held or part.held;
    jobs := jobs || part.jobs;
    blocked := blocked || part.blocked;
    blockers := blockers || part.blockers;
    members := members || part.members;
    untils := untils || part.untils;
    at := at + step;
    step := least(2 * step, 256);
  end loop;
  if jobs = '{}' then
    jobs := null;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_gated_part(worker uuid, lanes bigint[], quotas integer[], max_jobs integer, due timestamp with time zone, wait boolean, OUT jobs posthouse.job[], OUT blocked bigint[], OUT blockers bigint[], OUT members text[], OUT untils timestamp with time zone[], OUT held boolean)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  common posthouse.lane_floor := posthouse.common_floor();
  n int := cardinality(lanes);
  places int[];                       -- pairs of a lane and a gate, by lane
  insts int[];
  gate_ids bigint[];
  whose text[];                       -- members of those gates
  starts int[];                       -- where the pairs of a lane begin, and end
  stops int[];
  pairs int;
  shared boolean;                     -- some gate holds for several of these lanes
  wanted int[];
  busy int[];                         -- gates that other claims hold
  -- Of each gate: see posthouse.look_at_gates.
  gates posthouse.gate[];
  states posthouse.gate_state[];
  plain boolean[];
  first_rooms int[];
  rooms int[];
  until_when timestamptz[];
  probes boolean[];
  weighs bigint[];
  are_spent boolean[];
  odd boolean;                        -- some gate counts more than what runs
  locked boolean := false;
  the_one bigint[];                   -- the one job that a lane may give
  next_one record;
  held_up int[] := '{}';              -- pairs of lanes that may not give any, and the gate
  i int;
  ahead float8[];                     -- of gates that weigh tokens: see posthouse.gate_room
  sums bigint[];
  weighed boolean[];                  -- lanes
  spent int[];                        -- lanes whose jobs fail, by the gate whose budget is spent
  over boolean[];                     -- lanes that have no more to give
  gave int[];
  limits int[];
  spots tid[];
  free bigint[] := '{}';              -- lanes without a gate
  blocked_place int := 0;
  total int;
  room int;
  now_at timestamptz;
  found posthouse.job[];
  found_ids bigint[];
  found_fences int[];
  found_places int[];
  j posthouse.job;
  place int;
  weight bigint;
  heavy bigint;                       -- the least limit that a job is too large for
  accepted boolean;
  ids bigint[] := '{}';
  fences int[] := '{}';
  their_places int[] := '{}';
  weights bigint[] := '{}';
  insteads text[];                    -- models to use, of lanes with a budget that is spent
begin
  jobs := '{}'; blocked := '{}'; blockers := '{}'; members := '{}'; untils := '{}'; held := false;
  if exists (select from posthouse.gate g where g.when_spent like 'model:%') then
    insteads := posthouse.models_instead(lanes);
  end if;
  select array_agg(g.place), array_agg(g.gate_id), array_agg(g.member) into places, gate_ids, whose
  from (select x.* from posthouse.gates_of(lanes, insteads) x order by x.place, x.gate_id) g;
  if places is null and insteads is null then
    jobs := coalesce(posthouse.take_jobs(worker, lanes, quotas, max_jobs, due), '{}');
    return;
  end if;
  pairs := coalesce(cardinality(places), 0);
  shared := n > 1 and pairs > (select count(*) from (select distinct u.gate_id, u.member from unnest(gate_ids, whose) u(gate_id, member)) d);
  if shared then
    -- Each in its own order: one that is asked for may change that in which the others come.
    select array_agg(x.place order by x.place, x.inst), array_agg(x.inst order by x.place, x.inst),
      array_agg(x.gate_id order by x.inst) filter (where x.nth = 1),
      array_agg(x.member order by x.inst) filter (where x.nth = 1)
    into places, insts, gate_ids, whose
    from (
      select u.place, u.gate_id, u.member, dense_rank() over w::int as inst, row_number() over (partition by u.gate_id, u.member) as nth
      from unnest(places, gate_ids, whose) u(place, gate_id, member)
      window w as (order by u.gate_id, u.member)) x;
  else
    insts := array(select generate_series(1, pairs));
  end if;
  gate_ids := coalesce(gate_ids, '{}');
  whose := coalesce(whose, '{}');
  wanted := array_fill(0, array[cardinality(gate_ids)]);
  for p in 1 .. pairs loop
    wanted[insts[p]] := least(wanted[insts[p]] + quotas[places[p]], max_jobs);
  end loop;
  held := true;
  busy := posthouse.hold_counts(gate_ids, whose, take_gated_part.wait);
  loop
    now_at := clock_timestamp();
    select x.gates, x.states, x.plain, x.rooms, x.rooms, x.untils, x.probes, x.weighs, x.spent
    into gates, states, plain, rooms, first_rooms, until_when, probes, weighs, are_spent
    from posthouse.look_at_gates(gate_ids, whose, wanted, now_at) x;
    -- One whose time is over lets a single job try it, and others ask for that too: look again when it is held.
    exit when locked or (true = any(probes)) is not true;
    perform from posthouse.gate g
    where g.id = any(array(select g.id from unnest(gate_ids, probes) g(id, probe) where g.probe)) order by g.id for no key update;
    locked := true;
  end loop;
  -- Those that made room have ended by now: none of them seems to have run beside the one that took its place.
  now_at := clock_timestamp();
  if insteads is null and busy = '{}' and (false = any(plain)) is not true
     and not (shared and exists (
       select from unnest(rooms, wanted) with ordinality u(room, wanted, inst)
       where u.room > 0 and u.room < u.wanted and (select count(*) from unnest(insts) s where s = u.inst) > 1)) then
    -- The usual case: gates count what runs and nothing else, and none has to be shared out between lanes.
    limits := quotas;
    for p in 1 .. pairs loop
      limits[places[p]] := least(limits[places[p]], rooms[insts[p]]);
    end loop;
    if 0 < any(limits) then
      select array_agg(t.whole), array_agg(t.spot), array_agg(t.id), array_agg(t.fence + 1), array_agg(t.place)
      into found, spots, ids, fences, their_places
      from (
        select x.whole, x.spot, x.id, x.fence, v.place::int
        from unnest(lanes, limits) with ordinality v(lane_id, quota, place)
        cross join lateral (
          select x as whole, x.ctid as spot, x.id, x.fence from posthouse.job x
          where x.lane_id = v.lane_id and x.state = 'queued' and x.run_at <= due
            and x.run_at >= coalesce(case when common.behind then (
              select f.floor_at from posthouse.lane_floor f where f.lane_id = v.lane_id order by f.seq desc limit 1) end, common.floor_at)
          order by x.lane_id, x.run_at, x.id limit v.quota for update of x skip locked) x
        limit max_jobs) t;
    end if;
    for p in 1 .. pairs loop
      continue when rooms[insts[p]] > 0 or places[p] = blocked_place;
      blocked_place := places[p];
      blocked := blocked || lanes[places[p]];
      blockers := blockers || gate_ids[insts[p]];
      members := members || whose[insts[p]];
      untils := untils || until_when[insts[p]];
    end loop;
    if found is not null then
      jobs := found;
      if (select count(distinct p) from unnest(places) p) < n then
        free := array(select l from unnest(lanes) with ordinality u(l, place) where u.place <> all(places));
      end if;
      -- Locked, they stay in their places.
      update posthouse.job x set state = 'running', fence = x.fence + 1, attempt = x.attempt + 1, worker = take_gated_part.worker,
        started_at = now_at, first_started_at = coalesce(x.first_started_at, now_at), progress = null,
        reserved = case when x.lane_id = any(free) then null else 0 end, instead = null, admitted = null
      where x.ctid = any(spots);
      perform posthouse.book_gates(gates, states, plain, places, insts, ids, fences, their_places, null, now_at);
    end if;
    return;
  end if;
  odd := insteads is not null;
  starts := array_fill(1, array[n]);
  stops := array_fill(0, array[n]);
  over := array_fill(false, array[n]);
  weighed := over;
  gave := stops;
  the_one := array_fill(null::bigint, array[n]);
  spent := array_fill(null::int, array[n]);
  for p in 1 .. pairs loop
    place := places[p];
    if stops[place] = 0 then
      starts[place] := p;
    end if;
    stops[place] := p;
    i := insts[p];
    if i = any(busy) then
      over[place] := true;
    elsif plain[i] is false then
      odd := true;
      if weighs[i] is not null then
        weighed[place] := true;
        ahead[i] := greatest(coalesce(extract(epoch from (states[i]).tokens_at - now_at), 0), 0);
        sums[i] := posthouse.sum_since((states[i]).seconds, (states[i]).tokens, floor(extract(epoch from now_at))::bigint - 61);
      end if;
      if are_spent[i] and (gates[i]).when_spent = 'fail' then
        spent[place] := i;
      end if;
      if (gates[i]).name like 'serial:%' then
        next_one := posthouse.serial_next(lanes[place], states[i], due);
        the_one[place] := next_one.job_id;
        until_when[i] := next_one.until;
        if next_one.job_id is null then
          over[place] := true;
          held_up := array_append(held_up, p);
        else
          quotas[place] := 1;
          rooms[i] := 1;
          first_rooms[i] := 1;
        end if;
      end if;
    end if;
  end loop;
  loop
    -- How many each lane may give, in their order.
    limits := array_fill(0, array[n]);
    total := 0;
    for l in 1 .. n loop
      exit when cardinality(ids) + total >= max_jobs;
      continue when over[l];
      room := least(quotas[l] - gave[l], max_jobs - cardinality(ids) - total);
      for p in starts[l] .. stops[l] loop
        room := least(room, rooms[insts[p]]);
      end loop;
      continue when room <= 0;
      for p in starts[l] .. stops[l] loop
        rooms[insts[p]] := rooms[insts[p]] - room;
      end loop;
      limits[l] := room;
      total := total + room;
    end loop;
    exit when total = 0;
    select array_agg(t.whole), array_agg((t.whole).id), array_agg((t.whole).fence + 1), array_agg(t.position)
    into found, found_ids, found_fences, found_places
    from (
      select x.whole, v.position::int as position
      from unnest(lanes, limits) with ordinality v(lane_id, quota, position)
      cross join lateral (
        select x as whole from posthouse.job x
        where x.lane_id = v.lane_id and x.state = 'queued' and x.run_at <= due
          and x.run_at >= coalesce(case when common.behind then (
            select f.floor_at from posthouse.lane_floor f where f.lane_id = v.lane_id order by f.seq desc limit 1) end, common.floor_at)
          and x.id <> all(ids)        -- those of the last round are still in line
        order by x.lane_id, x.run_at, x.id limit v.quota for update of x skip locked) x
      where v.quota > 0 and the_one[v.position] is null) t;
    for f in 1 .. n loop
      if odd and limits[f] > 0 and the_one[f] is not null then
        select x.* into j from posthouse.job x
        where x.id = the_one[f] and x.lane_id = lanes[f] and x.state = 'queued' and x.run_at <= due for update skip locked;
        if j.id is not null then
          found := array_append(found, j);
          found_places := array_append(found_places, f);
        end if;
      end if;
    end loop;
    if not odd and found is not null then
      foreach place in array found_places loop
        limits[place] := limits[place] - 1;
        gave[place] := gave[place] + 1;
      end loop;
      jobs := jobs || found;
      ids := ids || found_ids;
      fences := fences || found_fences;
      their_places := their_places || found_places;
      weights := weights || array_fill(0::bigint, array[cardinality(found_ids)]);
      found := null;
    end if;
    for f in 1 .. coalesce(cardinality(found), 0) loop
      j := found[f];
      place := found_places[f];
      weight := 0;
      accepted := not over[place];
      if accepted and weighed[place] then
        weight := coalesce(j.tokens, (select posthouse.estimate_tokens(x.payload,
          (select k.max_output_tokens from posthouse.kind k join posthouse.lane l on l.kind = k.name where l.id = j.lane_id))
          from posthouse.payload x where x.id = j.id), 1000);
        heavy := null;
        for p in starts[place] .. stops[place] loop
          i := insts[p];
          if weighs[i] is not null then
            heavy := least(heavy, case when weight > weighs[i] then weighs[i] end);
            accepted := accepted and ahead[i] <= 1 and sums[i] <= weighs[i];
          end if;
        end loop;
        if heavy is not null then
          j.fence := j.fence + 1;
          perform posthouse.bury_job(j, 'too_large', format('it needs %s tokens, and a gate lets through %s a minute', weight, heavy), null, null);
          limits[place] := limits[place] - 1;
          for p in starts[place] .. stops[place] loop
            rooms[insts[p]] := rooms[insts[p]] + 1;
          end loop;
          continue;
        elsif not accepted then
          over[place] := true;
        else
          for p in starts[place] .. stops[place] loop
            i := insts[p];
            if weighs[i] is not null then
              ahead[i] := ahead[i] + weight * 60.0 / weighs[i];
              sums[i] := sums[i] + weight;
            end if;
          end loop;
        end if;
      end if;
      if accepted and spent[place] is not null then
        j.fence := j.fence + 1;
        perform posthouse.bury_job(j, 'budget', format('the budget of gate %s is spent', (gates[spent[place]]).name), null, null);
        accepted := false;
      end if;
      if accepted then
        limits[place] := limits[place] - 1;
        gave[place] := gave[place] + 1;
        j.instead := insteads[place];
        jobs := jobs || j;
        ids := ids || j.id;
        fences := fences || j.fence + 1;
        their_places := their_places || place;
        weights := weights || weight;
      end if;
    end loop;
    -- Whoever gave less than it might has no more; its room is for others.
    for l in 1 .. n loop
      continue when limits[l] <= 0;
      over[l] := true;
      for p in starts[l] .. stops[l] loop
        rooms[insts[p]] := rooms[insts[p]] + limits[l];
      end loop;
    end loop;
  end loop;
  for l in 1 .. n loop
    continue when gave[l] > 0 or over[l];
    for p in starts[l] .. stops[l] loop
      i := insts[p];
      if first_rooms[i] <= 0 then
        blocked := blocked || lanes[l];
        blockers := blockers || gate_ids[i];
        members := members || whose[i];
        untils := untils || until_when[i];
        exit;
      end if;
    end loop;
  end loop;
  for f in 1 .. cardinality(held_up) loop
    i := insts[held_up[f]];
    blocked := array_append(blocked, lanes[places[held_up[f]]]);
    blockers := array_append(blockers, gate_ids[i]);
    members := array_append(members, whose[i]);
    untils := array_append(untils, until_when[i]);
  end loop;
  if ids = '{}' then
    return;
  end if;
  update posthouse.job x set state = 'running', fence = x.fence + 1, attempt = x.attempt + 1, worker = take_gated_part.worker,
    started_at = now_at, first_started_at = coalesce(x.first_started_at, now_at), progress = null, reserved = u.reserved, instead = u.instead,
    admitted = null
  from (select a.id, insteads[a.place] as instead, case when stops[a.place] > 0 then least(a.weight, 2147483647)::int end as reserved
        from unnest(ids, weights, their_places) a(id, weight, place)) u
  where x.id = any(ids) and x.id = u.id;
  if places is null then
    return;
  end if;
  perform posthouse.book_gates(gates, states, plain, places, insts, ids, fences, their_places, weights, now_at);
  if true = any(probes) then
    for f in 1 .. cardinality(ids) loop
      for p in starts[their_places[f]] .. stops[their_places[f]] loop
        if probes[insts[p]] then
          update posthouse.gate g set probe_until = now_at + interval '1 minute', probe_job = ids[f] where g.id = gate_ids[insts[p]];
        end if;
      end loop;
    end loop;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_held_key(tenant text, scope text, key text, new_id bigint, dedupe_for interval, policy text, payload jsonb, due timestamp with time zone, batch bigint[], OUT holder bigint, OUT answer text)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  held posthouse.dedupe;
  live posthouse.job_state;
  free boolean;
  tries int := 0;
begin
  loop
    select d.* into held from posthouse.dedupe d
    where d.tenant = take_held_key.tenant and d.scope = take_held_key.scope and d.key = take_held_key.key for update;
    if not found then
      insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at, body)
      values (take_held_key.tenant, take_held_key.scope, take_held_key.key, new_id, clock_timestamp() + dedupe_for,
        case when policy = 'same' then posthouse.payload_hash(take_held_key.payload) end)
      on conflict do nothing;
      if found then
        holder := new_id;
        return;
      elsif current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'PH007',
          message = 'dedupe_key: another transaction holds or released this key after this transaction took its snapshot',
          hint = 'Run the transaction again.';
      end if;
      continue;
    end if;
    select j.state into live from posthouse.job j where j.id = held.job_id;
    -- What waits and is not written yet is left for the sweep, should the job before it have ended meanwhile.
    if held.job_id = any(batch) or (held.next_id = any(batch) and (policy in ('replace', 'rerun') or live is null)) then
      select t.holder, t.answer into holder, answer from posthouse.take_key_of_batch(held, new_id, dedupe_for, policy, due, batch) t;
      return;
    end if;
    if live is null and held.next_id is not null and tries < 50 then
      if not posthouse.follow_up(held) then
        tries := tries + 1;
        perform pg_sleep(0.002);
      end if;
      continue;
    end if;
    -- A key that stands until its job is final is free once the job is no longer live, even if its row is still here; one that
    -- stands for a window is free when that is over, or when its job was purged.
    free := held.next_id is null and case
      when held.expires_at is null or policy = 'rerun' then live is null
      else held.expires_at <= clock_timestamp() or (live is null and posthouse.state_of(held.job_id) is null)
    end;
    if free then
      update posthouse.dedupe d set job_id = new_id, expires_at = clock_timestamp() + dedupe_for, next_at = null,
        body = case when policy = 'same' then posthouse.payload_hash(take_held_key.payload) end
      where d.tenant = take_held_key.tenant and d.scope = take_held_key.scope and d.key = take_held_key.key;
      holder := new_id;
      return;
    elsif policy in ('replace', 'rerun') and live is not null then
      select t.holder, t.answer into holder, answer from posthouse.replace_held(held, live, new_id, dedupe_for, policy, due) t;
      if answer is not null then
        return;
      end if;
      -- Most often a claim is at it, and has taken it a moment later. What is held for longer counts as taken.
      tries := tries + 1;
      if tries < 50 then
        perform pg_sleep(0.002);
        continue;
      end if;
      select t.holder, t.answer into holder, answer from posthouse.replace_held(held, 'running', new_id, dedupe_for, policy, due) t;
      if answer is not null then
        return;
      end if;
      -- Somebody cancels or moves the job behind, and it depends on him whether that one can be replaced.
      perform from posthouse.job j where j.id = held.next_id for update;
      tries := 0;
      continue;
    end if;
    if policy in ('reject', 'same') then
      perform posthouse.refuse_held(held, policy, take_held_key.payload);
    end if;
    holder := held.job_id;
    answer := 'kept';
    return;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_jobs(worker uuid, lanes bigint[], quotas integer[], max_jobs integer, due timestamp with time zone)
 RETURNS posthouse.job[]
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET enable_hashjoin TO 'off'
 SET enable_mergejoin TO 'off'
 SET enable_sort TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_key_of_batch(held posthouse.dedupe, new_id bigint, dedupe_for interval, policy text, due timestamp with time zone, batch bigint[], OUT holder bigint, OUT answer text)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
begin
  if policy = 'reject' then
    raise exception using errcode = 'PH008', message = 'dedupe_key: a job before it in the array has it';
  end if;
  holder := case when held.job_id = any(batch) then held.job_id else held.next_id end;
  if policy not in ('replace', 'rerun') then
    answer := 'kept';
    return;
  end if;
  answer := 'swapped';
  update posthouse.dedupe d set job_id = case when held.job_id = any(batch) then new_id else d.job_id end,
    next_id = case when held.job_id = any(batch) then d.next_id else new_id end, next_at = case when held.job_id = any(batch) then d.next_at else due end,
    expires_at = coalesce(clock_timestamp() + dedupe_for, d.expires_at), body = null
  where d.tenant = held.tenant and d.scope = held.scope and d.key = held.key;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_keys(jobs jsonb, ids bigint[], OUT holders bigint[], OUT answers text[])
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  r record;
  t record;
  owner int;                          -- the ordinal of the last that was given a key: keys come one after the other
  instead int[];                      -- the ordinal that stands for one
begin
  holders := ids;
  answers := array_fill(null::text, array[cardinality(ids)]);
  for r in
    select p.ordinal, p.tenant, p.kind, p.dedupe_key as key, p.dedupe_for, coalesce(p.dedupe_policy, 'keep') as policy, p.due,
      case when p.dedupe_policy = 'same' then p.payload end as payload
    from posthouse.parse_jobs(jobs) p
    where p.dedupe_key is not null order by p.tenant, p.kind, p.dedupe_key, p.ordinal
  loop
    insert into posthouse.dedupe (tenant, scope, key, job_id, expires_at, body)
    values (r.tenant, r.kind, r.key, ids[r.ordinal], clock_timestamp() + r.dedupe_for,
      case when r.policy = 'same' then posthouse.payload_hash(r.payload) end)
    on conflict do nothing;
    if found then
      owner := r.ordinal;
      continue;
    end if;
    select x.* into t from posthouse.take_held_key(r.tenant, r.kind, r.key, ids[r.ordinal], r.dedupe_for, r.policy, r.payload, r.due, ids) x;
    if t.answer = 'swapped' then
      instead[owner] := r.ordinal;
      answers[r.ordinal] := answers[owner];
      answers[owner] := 'replaced';
      owner := r.ordinal;
    elsif t.holder = ids[r.ordinal] then
      answers[r.ordinal] := t.answer;
      owner := r.ordinal;
    elsif t.holder = ids[owner] then
      if r.policy = 'same' and r.payload <> coalesce(nullif(jobs -> (owner - 1) -> 'payload', 'null'), '{}') then
        raise exception using errcode = 'PH009', message = format('dedupe_key: job %s of the array has it with another payload', owner),
          hint = 'One key stands for one payload: use another key, or the same payload.';
      end if;
      instead[r.ordinal] := owner;
      answers[r.ordinal] := 'kept';
    else
      holders[r.ordinal] := t.holder;
      answers[r.ordinal] := t.answer;
    end if;
  end loop;
  if instead is null then
    return;
  end if;
  -- A job of the array in whose place a later one came is told of that one, and so are those that it stood for.
  for o in reverse cardinality(ids) .. 1 loop
    if instead[o] > o then
      instead[o] := coalesce(instead[instead[o]], instead[o]);
      holders[o] := ids[instead[o]];
    end if;
  end loop;
  for o in 1 .. cardinality(ids) loop
    if instead[o] < o then
      holders[o] := ids[coalesce(instead[instead[o]], instead[o])];
    end if;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.take_sweep(part text)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  -- Look before and after the lock: most often nothing is due.
  return exists (select from posthouse.sweep s where s.name = part and posthouse.is_due(s))
    and pg_try_advisory_xact_lock(1346912004, hashtext(part))
    and exists (select from posthouse.sweep s where s.name = part and posthouse.is_due(s));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.tell_alert(a posthouse.alert, OUT message jsonb, OUT job bigint)
 RETURNS record
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.tell_alerts()
 RETURNS jsonb
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.test_alert()
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  a posthouse.alert;
begin
  insert into posthouse.alert (kind, subject, text, detail, count, raised_at, last_at, resolved_at)
  values ('test', 'test', 'this is a test: alerts of this database arrive here', '{}', 1, clock_timestamp(), clock_timestamp(), clock_timestamp())
  returning * into a;
  return (select t.job from posthouse.tell_alert(a) t);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.tidy(part text DEFAULT NULL::text)
 RETURNS jsonb
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  -- Floors come last, since they hold off whoever gives jobs back to the front of the line until the end of this transaction.
  parts constant text[] := array['stragglers', 'dedupe', 'depths', 'gates', 'shares', 'folds', 'usage', 'redrives', 'partitions', 'analyze', 'tombstones', 'slices', 'expire', 'watch', 'alerts', 'gauges', 'counts', 'floors'];
  one text;
  began timestamptz;
  left_some boolean;
  told jsonb;
  failure text;
  alerts jsonb := '[]';
  failed jsonb := '[]';
  more boolean := false;
  wait_ms int;
begin
  perform posthouse.check_isolation();
  foreach one in array parts loop
    continue when one <> tidy.part or not posthouse.take_sweep(one);
    began := clock_timestamp();
    failure := null;
    begin
      select p.more, p.alerts into left_some, told from posthouse.sweep_part(one) p;
      alerts := alerts || told;
      more := more or left_some;
    -- A statement_timeout too: else it would come again for ever, and nobody would know.
    exception when query_canceled or others then
      failure := sqlerrm;
      left_some := false;
      failed := failed || jsonb_build_object('sweep', one, 'error', failure);
      raise warning 'posthouse: the sweep of % failed and comes again: %', one, failure;
    end;
    perform posthouse.end_sweep(one, extract(epoch from clock_timestamp() - began) * 1000, left_some, failure);
  end loop;
  select ceil(least(min(posthouse.due_in(s)), 1000)) into wait_ms from posthouse.sweep s where s.name = any(parts);
  return jsonb_build_object('alerts', alerts, 'failed', failed, 'more', more, 'wait_ms', wait_ms);
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.true_up(jobs posthouse.job[], usages jsonb[], called boolean[], lanes bigint[], insteads text[], gate_ids bigint[], members text[], wait boolean)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
declare
  now_at timestamptz;
  look record;
  g posthouse.gate;
  s posthouse.gate_state;
  d record;
  changed boolean;
begin
  -- The usual case of a gate that counts requests only: each made the one that it had reserved.
  if not exists (
    select from unnest(usages, called) u(usage, called)
    cross join lateral posthouse.usage_numbers(u.usage) n
    where not u.called or n.requests <> 1 or n.tokens is not null or n.cost > 0) then
    return;
  end if;
  -- Whoever sets gates waits for the rows of jobs, and who does not wait here holds some, and has not held gates before them.
  if (not wait and not pg_try_advisory_xact_lock_shared(1346912000, 4)) or posthouse.hold_counts(gate_ids, members, wait) <> '{}' then
    return;
  end if;
  now_at := clock_timestamp();
  select * into look from posthouse.look_at_gates(gate_ids, members, array_fill(0, array[cardinality(gate_ids)]), now_at);
  for i in 1 .. cardinality(gate_ids) loop
    g := look.gates[i];
    s := look.states[i];
    changed := false;
    for d in
      select date_trunc('second', u.started_at) as at,
        sum(case when u.called then greatest(coalesce(n.requests, 1) - u.calls, 0) - 1 else -1 end)::int as requests,
        sum(case when not u.called then -u.reserved
            when n.tokens is not null then greatest(n.tokens - u.call_tokens, 0) - u.reserved
            when n.requests = 0 then -u.reserved else 0 end)::bigint as tokens, sum(n.cost) as cost
      from (select (jobs[o]).lane_id, (jobs[o]).started_at, (jobs[o]).reserved, (jobs[o]).instead, usages[o] as usage, called[o] as called,
              -- Calls that were let through this gate one by one have been counted.
              case when g.id = any((jobs[o]).admitted[3:]) then (jobs[o]).admitted[2] else 0 end as calls,
              case when g.id = any((jobs[o]).admitted[3:]) then (jobs[o]).admitted[1] else 0 end as call_tokens
            from generate_subscripts(jobs, 1) o) u
      cross join lateral posthouse.usage_numbers(u.usage) n
      where exists (
        select from posthouse.gates_of(lanes, insteads) x
        where x.gate_id = g.id and x.member = members[i] and lanes[x.place] = u.lane_id and insteads[x.place] is not distinct from u.instead)
      group by date_trunc('second', u.started_at)
    loop
      if (g.requests_per_minute is not null and d.requests <> 0) or (g.tokens_per_minute is not null and d.tokens <> 0) then
        s := posthouse.counted(g, s, '{}', '{}', d.requests, d.tokens, d.at, now_at);
        changed := true;
        if d.tokens < 0 or d.requests < 0 then
          perform posthouse.notify_queue('*');
        end if;
      end if;
      if d.cost > 0 and (g.money_per_day is not null or g.money_per_month is not null) then
        s := posthouse.with_spent(g, s, d.cost, now_at);
        changed := true;
      end if;
    end loop;
    if changed then
      s.gate_id := g.id;
      s.member := members[i];
      s.seq := coalesce((look.states[i]).seq, 0) + 1;
      insert into posthouse.gate_state select s.*;
    end if;
  end loop;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.unbind_login(login name)
 RETURNS boolean
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  delete from posthouse.tenant_login t where t.login = unbind_login.login;
  return found;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.unserved_kinds(queue text, tenant text)
 RETURNS text[]
 LANGUAGE plpgsql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
begin
  return (
    select coalesce(array_agg(distinct l.kind), '{}') from posthouse.lane l
    where l.queue = unserved_kinds.queue and l.tenant = unserved_kinds.tenant
      and (session_user = current_user or posthouse.sees_all() or l.tenant = posthouse.own_tenant())
      and exists (select from posthouse.job j where j.lane_id = l.id and j.state = 'queued' and j.run_at <= clock_timestamp())
      and not exists (select from posthouse.worker w where w.dead_at is null and posthouse.lease_end(w) > clock_timestamp()
                      and l.queue = any(w.queues) and l.kind = any(w.kinds)));
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.usage_figures(usages jsonb[])
 RETURNS TABLE(place bigint, model text, input_tokens bigint, output_tokens bigint, cached_tokens bigint, requests integer, cost numeric, free boolean)
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
#variable_conflict use_column
begin
  return query
    select x.place,
      case when length(x.model) between 1 and 200 then x.model end,
      -- Numbers stand between the other kinds of JSON, so that this tells the kind and the size at once.
      case when x.input between '0' and '1000000000000' then x.input::bigint end,
      case when x.output between '0' and '1000000000000' then x.output::bigint end,
      case when x.cached between '0' and '1000000000000' then x.cached::bigint end,
      case when x.requests between '0' and '1000000' then x.requests::int
        when x.input between '0' and '1000000000000' or x.output between '0' and '1000000000000' then 1 end,
      -- Digits with a point at most, as is usual, are told by what is left without digits, in a fifth of the time.
      case when translate(x.cost, '0123456789', '') in ('', '.') and length(x.cost) between 1 and 50 and x.cost <> '.'
          or x.cost ~ '^(\d{1,9}\.?|\d{0,9}\.\d{1,40})[eE][+-]?\d{1,2}$' then
        case when x.cost::numeric <= 1000000000 then x.cost::numeric end
      end,
      (x.requests = '0' or x.status between '400' and '599')
        and not coalesce(x.input between '0' and '1000000000000' or x.output between '0' and '1000000000000', false)
    from (
      select u.place, u.usage ->> 'model' as model, u.usage -> 'requests' as requests, u.usage ->> 'cost_usd' as cost,
        u.usage -> 'status' as status,
        coalesce(u.usage -> 'input_tokens', u.usage -> 'prompt_tokens') as input,
        coalesce(u.usage -> 'output_tokens', u.usage -> 'completion_tokens') as output,
        u.usage -> 'cached_tokens' as cached
      from unnest(usages) with ordinality u(usage, place)
      where u.usage is not null offset 0) x;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.usage_numbers(usage jsonb, OUT tokens bigint, OUT requests integer, OUT cost numeric)
 RETURNS record
 LANGUAGE plpgsql
 IMMUTABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  input jsonb := coalesce(usage -> 'input_tokens', usage -> 'prompt_tokens');
  output jsonb := coalesce(usage -> 'output_tokens', usage -> 'completion_tokens');
  amount text := usage ->> 'cost_usd';
begin
  if usage is null then
    return;
  end if;
  if input between '0' and '1000000000000' then
    tokens := input;
  end if;
  if output between '0' and '1000000000000' then
    tokens := coalesce(tokens, 0) + output::bigint;
  end if;
  if usage -> 'requests' between '0' and '1000000' then
    requests := usage -> 'requests';
  elsif tokens is not null then
    requests := 1;
  end if;
  if translate(amount, '0123456789', '') in ('', '.') and length(amount) between 1 and 50 and amount <> '.'
    or amount ~ '^(\d{1,9}\.?|\d{0,9}\.\d{1,40})[eE][+-]?\d{1,2}$' then
    cost := case when amount::numeric <= 1000000000 then amount::numeric end;
  end if;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.visit_slice(s posthouse.slice, shortest interval, max_jobs integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_custom_plan'
AS $function$
declare
  lo bigint := s.lower;
  now_at timestamptz := clock_timestamp();
  r posthouse.id_range;
  later interval;                     -- for so long its archive is left alone
  held bigint[];                      -- jobs for which a dedupe key stands,
  held_from timestamptz;              -- until when the first of them,
  held_until timestamptz;             -- and the last
  place record;
  found record;
  jobs int := 0;
begin
  select x.* into r from posthouse.id_range x where x.lower <= lo and x.upper > lo;
  -- Its partition is dropped whole, or may be once the slices next to it are known. Dead letters lie elsewhere.
  later := case when max_jobs = 0 or r.lower is null then null when posthouse.is_over(r) then interval '1 hour'
    when posthouse.is_over(r, true) then interval '1 minute' end;
  -- Before the look at what has ended: a job may end in between.
  select * into place from posthouse.is_open(lo, s.takers);
  select coalesce(array_agg(d.job_id), '{}'), min(d.expires_at), max(d.expires_at) into held, held_from, held_until
  from posthouse.dedupe d where d.job_id >= lo and d.job_id < lo + 10000 and d.expires_at > now_at;
  select * into found from posthouse.survey_slice(lo, held, later is null);
  if max_jobs > 0 and found.due_at <= now_at then
    jobs := posthouse.delete_expired(lo, now_at, held, found.lanes, found.states, found.keeps, max_jobs);
    if jobs > 0 then
      return jobs;
    end if;
    found.due_at := now_at + interval '1 minute';
  elsif r.lower is null and found.lanes is null and not place.is_open then
    delete from posthouse.slice x where x.lower = lo;
    return 0;
  end if;
  update posthouse.slice x set
    due_at = least(found.due_at, case when held <> '{}' then greatest(held_from, now_at + interval '1 hour') end, now_at + later,
      case when place.is_open and shortest is not null then now_at + least(greatest(shortest, interval '5 minutes'), interval '1 day') end, 'infinity'),
    over_at = case when later is not null then x.over_at when place.is_open then 'infinity' else greatest(found.over_at, held_until) end,
    stale = x.stale and later is not null,
    takers = place.takers
  where x.lower = lo;
  return 0;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.wake_blocked(gate_id bigint, member text, most integer)
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.wake_endpoint(opened bigint)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.wake_gate(name text)
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  scope int := strpos(name, ':');
begin
  perform posthouse.wake_endpoint(g.id) from posthouse.gate g where g.name = wake_gate.name;
  perform posthouse.wake_blocked(g.id, substr(wake_gate.name, scope + 1), 1000000)
  from posthouse.gate g where scope > 0 and g.name = left(wake_gate.name, scope) || '*' and g.name <> wake_gate.name;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.wake_lane(lane_id bigint, due timestamp with time zone)
 RETURNS bigint
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
AS $function$
declare
  l posthouse.lane;
  woken bigint;
begin
  perform posthouse.hold_lane(lane_id);
  if current_setting('transaction_isolation') = 'read committed' then
    select * into l from posthouse.lane where lane.id = lane_id;
  else
    -- An old snapshot does not show whether the lane fell asleep since: the lock does (or fails with 40001).
    select * into l from posthouse.lane where lane.id = lane_id for share skip locked;
  end if;
  -- What a gate holds back is woken when that opens.
  if l.ready_at <= due or l.blocked_by is not null then
    return lane_id;
  end if;
  if l.id is null then
    select * into l from posthouse.lane where lane.id = lane_id;
  end if;
  -- Its twins, made by those who met this before, are as good.
  update posthouse.lane set
    ready_at = least(lane.ready_at, due),
    naps = posthouse.naps(lane),
    awake_until = greatest(clock_timestamp(), due) + interval '10 seconds' * 9 ^ posthouse.naps(lane)
  where lane.id = (
    select x.id from posthouse.lane x
    where x.queue = l.queue and x.tenant = l.tenant and x.kind = l.kind and x.priority = l.priority and x.gates = l.gates
      and x.serial = l.serial
    order by x.id <> lane_id, x.id limit 1 for no key update skip locked)
  returning lane.id into woken;
  if found then
    if woken <> lane_id then
      perform posthouse.hold_lane(woken);
    end if;
    return woken;
  end if;
  insert into posthouse.lane (queue, priority, tenant, kind, gates, serial, limited, ready_at, awake_until)
  values (l.queue, l.priority, l.tenant, l.kind, l.gates, l.serial, l.limited, due, greatest(clock_timestamp(), due) + interval '10 seconds')
  returning lane.id into lane_id;
  perform posthouse.hold_lane(lane_id);
  return lane_id;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.wake_lanes(lanes bigint[])
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.wake_missed()
 RETURNS integer
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.watch()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.watch_age()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.watch_workers()
 RETURNS void
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.webhook()
 RETURNS TABLE(enabled boolean, reason text, changed_at timestamp with time zone)
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select w.enabled, w.reason, w.changed_at from posthouse.alert_webhook w
$function$
;

CREATE OR REPLACE FUNCTION posthouse.weigh_lanes(queues text[], lanes bigint[], tenants text[], max_jobs integer)
 RETURNS TABLE(place bigint, lane_id bigint, tenant text, quota integer, later boolean)
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
 SET enable_seqscan TO 'off'
 SET enable_bitmapscan TO 'off'
 SET plan_cache_mode TO 'force_generic_plan'
AS $function$
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
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.who_asks(asked_by text)
 RETURNS text
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select left(session_user || coalesce(': ' || nullif(asked_by, ''), ''), 200)
$function$
;

CREATE OR REPLACE FUNCTION posthouse.with_spent(g posthouse.gate, s posthouse.gate_state, cost numeric, now_at timestamp with time zone)
 RETURNS posthouse.gate_state
 LANGUAGE plpgsql
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
declare
  today date := now_at at time zone 'UTC';
  this_month date := date_trunc('month', now_at at time zone 'UTC');
  before_day numeric := case when s.day = today then s.spent_day else 0 end;
  before_month numeric := case when s.month = this_month then s.spent_month else 0 end;
  share numeric;
  whose text := g.name || case when s.member <> '' then format(' (%s)', s.member) else '' end;
begin
  s.day := today;
  s.month := this_month;
  s.spent_day := before_day + cost;
  s.spent_month := before_month + cost;
  foreach share in array array[g.warn_at, 1] loop
    if before_day < share * g.money_per_day and s.spent_day >= share * g.money_per_day then
      perform posthouse.raise_alert('budget', whose, format('%s has spent %s of %s for today', whose, s.spent_day, g.money_per_day),
        jsonb_build_object('gate', g.name, 'member', s.member, 'spent', s.spent_day, 'limit', g.money_per_day, 'period', 'day'));
    end if;
    if before_month < share * g.money_per_month and s.spent_month >= share * g.money_per_month then
      perform posthouse.raise_alert('budget', whose, format('%s has spent %s of %s for this month', whose, s.spent_month, g.money_per_month),
        jsonb_build_object('gate', g.name, 'member', s.member, 'spent', s.spent_month, 'limit', g.money_per_month, 'period', 'month'));
    end if;
  end loop;
  return s;
end $function$
;

CREATE OR REPLACE FUNCTION posthouse.worker_beats()
 RETURNS TABLE(worker uuid, beat_at timestamp with time zone, lease_ms bigint, expired boolean)
 LANGUAGE sql
 STABLE
 SET search_path TO 'pg_catalog', 'pg_temp'
AS $function$
  select w.id, w.beat_at, w.lease_ms, posthouse.lease_end(w) <= clock_timestamp() from posthouse.worker w where w.dead_at is null
$function$
;

create view posthouse.alert_rules as
 SELECT r.kind,
    NULLIF(r.queue, ''::text) AS queue,
    r.enabled,
    r.quiet,
    r.after
   FROM posthouse.alert_rule r;

create view posthouse.alerts as
 SELECT a.id,
    a.kind,
    a.subject,
    a.text,
    a.detail,
    a.count,
    a.raised_at,
    a.last_at,
    a.told_at,
    a.resolved_at
   FROM posthouse.alert a;

create view posthouse.depths as
 SELECT d.scope,
    d.name,
    d.max_depth
   FROM posthouse.depth_limit d;

create view posthouse.gates as
 SELECT g.name,
    NULLIF(s.member, ''::text) AS member,
    g.max_running,
    g.requests_per_minute,
    g.tokens_per_minute,
    g.money_per_day,
    g.money_per_month,
    g.when_spent,
    g.warn_at,
        CASE
            WHEN g.closed_until > clock_timestamp() OR (g.closed_by = ANY (ARRAY['provider'::text, 'breaker'::text])) THEN g.closed_until
            ELSE NULL::timestamp with time zone
        END AS closed_until,
        CASE
            WHEN g.closed_until > clock_timestamp() OR (g.closed_by = ANY (ARRAY['provider'::text, 'breaker'::text])) THEN g.closed_by
            ELSE NULL::text
        END AS closed_by,
        CASE
            WHEN g.closed_until > clock_timestamp() OR (g.closed_by = ANY (ARRAY['provider'::text, 'breaker'::text])) THEN g.closed_reason
            ELSE NULL::text
        END AS closed_reason,
        CASE
            WHEN g.max_running IS NOT NULL THEN ( SELECT count(*) AS count
               FROM UNNEST(s.job_ids, s.fences) u(id, fence)
                 JOIN posthouse.job j ON j.id = u.id AND j.fence = u.fence AND j.state = 'running'::posthouse.job_state)
            ELSE NULL::bigint
        END AS running,
    posthouse.sum_since(s.seconds, s.requests::bigint[], floor(EXTRACT(epoch FROM clock_timestamp()))::bigint - 60) AS requests_last_minute,
    posthouse.sum_since(s.seconds, s.tokens, floor(EXTRACT(epoch FROM clock_timestamp()))::bigint - 60) AS tokens_last_minute,
        CASE
            WHEN s.day = (clock_timestamp() AT TIME ZONE 'UTC'::text)::date THEN s.spent_day
            ELSE 0::numeric
        END AS spent_today,
        CASE
            WHEN s.month = date_trunc('month'::text, (clock_timestamp() AT TIME ZONE 'UTC'::text))::date THEN s.spent_month
            ELSE 0::numeric
        END AS spent_this_month
   FROM posthouse.gate g
     LEFT JOIN ( SELECT x.gate_id,
            x.member,
            x.seq,
            x.job_ids,
            x.fences,
            x.seconds,
            x.requests,
            x.tokens,
            x.requests_at,
            x.tokens_at,
            x.month,
            x.day,
            x.spent_day,
            x.spent_month
           FROM posthouse.gate_state x
          WHERE NOT (EXISTS ( SELECT
                   FROM posthouse.gate_state y
                  WHERE y.gate_id = x.gate_id AND y.member = x.member AND y.seq > x.seq))) s ON s.gate_id = g.id;

create view posthouse.jobs as
 SELECT j.id,
    j.state::text AS state,
    l.queue,
    l.tenant,
    l.kind,
    l.priority,
    NULLIF(j.run_at, 'infinity'::timestamp with time zone) AS run_at,
    j.created_at,
    j.started_at,
    NULL::timestamp with time zone AS finished_at,
    j.attempt,
    j.max_attempts,
    j.timeout_ms,
    j.fence::bigint AS fence,
    j.worker,
    j.cancel_asked,
    j.reason,
    ( SELECT a.error
           FROM posthouse.attempt a
          WHERE a.job_id = j.id AND j.errors > 0
          ORDER BY a.fence DESC
         LIMIT 1) AS error,
    ( SELECT p.payload
           FROM posthouse.payload p
          WHERE p.id = j.id) AS payload,
    NULL::jsonb AS result,
    NULL::jsonb AS usage,
    j.progress,
        CASE
            WHEN j.errors > 0 THEN ( SELECT jsonb_agg(jsonb_strip_nulls(to_jsonb(a.*) - 'job_id'::text) ORDER BY a.fence) AS jsonb_agg
               FROM posthouse.attempt a
              WHERE a.job_id = j.id)
            ELSE NULL::jsonb
        END AS errors,
    NULL::text[] AS flags
   FROM posthouse.job j
     JOIN posthouse.lane l ON l.id = j.lane_id
UNION ALL
 SELECT a.id,
    a.state::text AS state,
    l.queue,
    l.tenant,
    l.kind,
    l.priority,
    NULL::timestamp with time zone AS run_at,
    a.created_at,
    a.started_at,
    a.finished_at,
    a.attempt,
    a.max_attempts,
    a.timeout_ms,
    a.fence::bigint AS fence,
    a.worker,
    false AS cancel_asked,
    NULL::text AS reason,
    (a.errors -> '-1'::integer) ->> 'error'::text AS error,
    ( SELECT p.payload
           FROM posthouse.payload p
          WHERE p.id = a.id) AS payload,
    a.result,
    a.usage,
    NULL::jsonb AS progress,
    a.errors,
    a.flags
   FROM posthouse.archive a
     JOIN posthouse.lane l ON l.id = a.lane_id
UNION ALL
 SELECT t.id,
    t.state::text AS state,
    l.queue,
    l.tenant,
    l.kind,
    l.priority,
    NULL::timestamp with time zone AS run_at,
    t.created_at,
    NULL::timestamp with time zone AS started_at,
    t.finished_at,
    t.attempt,
    t.max_attempts,
    t.timeout_ms,
    t.fence::bigint AS fence,
    t.worker,
    false AS cancel_asked,
    NULL::text AS reason,
    NULL::text AS error,
    ( SELECT p.payload
           FROM posthouse.payload p
          WHERE p.id = t.id) AS payload,
    t.result,
    NULL::jsonb AS usage,
    NULL::jsonb AS progress,
    NULL::jsonb AS errors,
    t.flags
   FROM posthouse.tombstone t
     JOIN posthouse.lane l ON l.id = t.lane_id
UNION ALL
 SELECT d.id,
    'failed'::text AS state,
    l.queue,
    l.tenant,
    l.kind,
    l.priority,
    NULL::timestamp with time zone AS run_at,
    d.created_at,
    d.started_at,
    d.failed_at AS finished_at,
    d.attempt,
    d.max_attempts,
    d.timeout_ms,
    d.fence::bigint AS fence,
    d.worker,
    false AS cancel_asked,
    d.class AS reason,
    d.error,
    COALESCE(( SELECT p.payload
           FROM posthouse.payload p
          WHERE p.id = d.id), ( SELECT s.payload
           FROM posthouse.spare_payload s
          WHERE s.id = d.id)) AS payload,
    NULL::jsonb AS result,
    d.usage,
    NULL::jsonb AS progress,
    d.errors,
    NULL::text[] AS flags
   FROM posthouse.dead_letter d
     JOIN posthouse.lane l ON l.id = d.lane_id;

create view posthouse.queue_health as
 SELECT n.queue,
    n.tenant,
    COALESCE(sum(n.jobs) FILTER (WHERE n.what = 'due'::text), 0::numeric)::bigint AS due,
    COALESCE(sum(n.jobs) FILTER (WHERE n.what = 'later'::text), 0::numeric)::bigint AS later,
    COALESCE(sum(n.jobs) FILTER (WHERE n.what = 'running'::text), 0::numeric)::bigint AS running,
    COALESCE(sum(n.jobs) FILTER (WHERE n.what = 'waiting'::text), 0::numeric)::bigint AS waiting,
    COALESCE(sum(n.jobs) FILTER (WHERE n.what = 'done'::text), 0::numeric)::bigint AS done,
    COALESCE(sum(n.jobs) FILTER (WHERE n.what = 'failed'::text), 0::numeric)::bigint AS failed,
    clock_timestamp() - min(n.oldest) AS oldest_due_age
   FROM ( SELECT l.queue,
            l.tenant,
            c.what,
            c.jobs,
            c.oldest
           FROM ( SELECT j.lane_id,
                        CASE
                            WHEN j.state <> 'queued'::posthouse.job_state THEN j.state::text
                            WHEN j.run_at <= clock_timestamp() THEN 'due'::text
                            ELSE 'later'::text
                        END AS what,
                    count(*) AS jobs,
                    min(j.run_at) FILTER (WHERE j.state = 'queued'::posthouse.job_state AND j.run_at <= clock_timestamp()) AS oldest
                   FROM posthouse.job j
                  GROUP BY j.lane_id, (
                        CASE
                            WHEN j.state <> 'queued'::posthouse.job_state THEN j.state::text
                            WHEN j.run_at <= clock_timestamp() THEN 'due'::text
                            ELSE 'later'::text
                        END)
                UNION ALL
                 SELECT t.lane_id,
                    t.state::text AS state,
                    sum(t.jobs) AS sum,
                    NULL::timestamp with time zone
                   FROM posthouse.tally t
                  GROUP BY t.lane_id, (t.state::text)
                UNION ALL
                 SELECT d.lane_id,
                    'failed'::text,
                    count(*) AS count,
                    NULL::timestamp with time zone
                   FROM posthouse.dead_letter d
                  GROUP BY d.lane_id, 'failed'::text) c
             JOIN posthouse.lane l ON l.id = c.lane_id) n
  GROUP BY n.queue, n.tenant;

create view posthouse.queues as
 SELECT n.name AS queue,
    posthouse.retention_of(n.name, 'done'::text) AS retention,
    posthouse.retention_of(n.name, 'cancelled'::text) AS retention_cancelled,
    posthouse.retention_of(n.name, 'failed'::text) AS retention_failed,
    COALESCE(q.fair_by, 'jobs'::text) AS fair_by,
    q.serial_by
   FROM ( SELECT l.queue AS name
           FROM posthouse.lane l
        UNION
         SELECT q_1.name
           FROM posthouse.queue q_1) n
     LEFT JOIN posthouse.queue q ON q.name = n.name;

create view posthouse.redrives as
 SELECT r.job_id,
    r.number,
    r.redriven_at,
    r.redriven_by,
    r.state,
    r.attempt,
    r.class,
    r.error,
    r.changes,
    r.payload
   FROM posthouse.redriven r;

create view posthouse.schedule_runs as
 SELECT r.schedule,
    r.tick,
    r.job_id,
    r.duplicate,
    r.fired_at
   FROM posthouse.schedule_run r;

create view posthouse.schedules as
 SELECT s.name,
    s.cron,
    s.timezone,
    s.job ->> 'kind'::text AS kind,
    COALESCE(s.job ->> 'queue'::text, 'default'::text) AS queue,
    s.tenant,
    s.job,
    s.catch_up,
    s.catch_up_max,
    s.catch_up_over,
    s.jitter,
    s.source,
    s.changed_at,
    s.paused_at,
    s.paused_reason,
        CASE
            WHEN s.paused_at IS NULL AND isfinite(s.next_at) THEN s.next_at
            ELSE NULL::timestamp with time zone
        END AS next_at,
    s.fired,
    s.missed,
    s.last_tick,
    s.last_fired_at,
    s.last_job_id,
    s.error,
    s.error_at
   FROM posthouse.schedule s;

create view posthouse.sweeps as
 SELECT s.name,
    NULLIF(s.ran_at, '-infinity'::timestamp with time zone) AS ran_at,
    round(s.took_ms::numeric, 1)::double precision AS took_ms,
    s.every,
    s.runs,
    s.failures,
    s.failing_since IS NOT NULL AS failing,
    s.failing_since,
    s.failed_at,
    s.error,
    s.ran_at < (clock_timestamp() - GREATEST(s.every, s.took_ms * s.pause * '00:00:00.001'::interval) - '00:01:00'::interval) AS late
   FROM posthouse.sweep s;

create view posthouse.tenants as
 SELECT t.name AS tenant,
    t.weight
   FROM posthouse.tenant t;

create view posthouse.usage_by_day as
 SELECT u.day,
    u.tenant,
    u.queue,
    u.kind,
    NULLIF(u.model, ''::text) AS model,
    sum(u.attempts)::bigint AS attempts,
    sum(u.requests) AS requests,
    sum(u.input_tokens) AS input_tokens,
    sum(u.output_tokens) AS output_tokens,
    sum(u.cached_tokens) AS cached_tokens,
    sum(u.cost_usd) AS cost_usd,
    sum(u.unpriced)::bigint AS unpriced
   FROM ( SELECT d.day,
            d.tenant,
            d.queue,
            d.kind,
            d.model,
            d.attempts,
            d.requests,
            d.input_tokens,
            d.output_tokens,
            d.cached_tokens,
            d.cost_usd,
            d.unpriced
           FROM posthouse.usage_day d
        UNION ALL
         SELECT n.day,
            l.tenant,
            l.queue,
            l.kind,
            n.model,
            n.attempts,
            n.requests,
            n.input_tokens,
            n.output_tokens,
            n.cached_tokens,
            n.cost_usd,
            n.unpriced
           FROM posthouse.usage n
             JOIN posthouse.lane l ON l.id = n.lane_id) u
  GROUP BY u.day, u.tenant, u.queue, u.kind, u.model;

create view posthouse.workers as
 SELECT w.id,
    w.host,
    w.pid,
    w.version,
    w.queues,
    w.kinds,
    w.slots,
        CASE
            WHEN w.dead_at IS NOT NULL THEN 'over'::text
            WHEN posthouse.lease_end(w.*) <= clock_timestamp() THEN 'expired'::text
            ELSE 'live'::text
        END AS state,
    w.started_at,
    w.beat_at,
    posthouse.lease_end(w.*) AS expires_at,
    w.lease_ms,
    w.dead_at,
    ( SELECT count(*) AS count
           FROM posthouse.running_jobs(w.id, w.oldest_seq) running_jobs(seq, id, fence, cancel_asked)) AS running
   FROM posthouse.worker w;
