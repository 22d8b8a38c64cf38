-- Usage: what attempts say they used, added up by day. It comes from programs and providers, so nothing in it is trusted: what is
-- no sane number counts as unknown, and never fails a settle.

-- The figures in usages, a row for each that is not null; `place` is where it stands. Tokens and requests are JSON numbers, the cost is a number or decimal text
-- such as "0.00042". The names of chat completions (prompt_tokens, completion_tokens) are understood too. An attempt that tells
-- its tokens but no number of requests made one. `free`: it tells no tokens, and that it asked nobody or was refused (its HTTP
-- status is an error), so that nothing was to be paid.
create or replace function posthouse.usage_figures(usages jsonb[])
returns table (place bigint, model text, input_tokens bigint, output_tokens bigint, cached_tokens bigint, requests int, cost numeric, free boolean)
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
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
end $$;

-- What one attempt used: tokens (input and output together), requests, cost in US dollars; null: not known. For one usage at a
-- time, by the rules of posthouse.usage_figures.
create or replace function posthouse.usage_numbers(usage jsonb, out tokens bigint, out requests int, out cost numeric)
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
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
end $$;

-- Note down what applied attempts used; each lane belongs to the usage at its place. Called in the settling transaction. Attempts
-- that asked nobody, such as those turned away at a closed gate, are not noted.
create or replace function posthouse.record_usage(lane_ids bigint[], usages jsonb[]) returns void
language plpgsql
set search_path = pg_catalog, pg_temp
set plan_cache_mode = force_generic_plan
as $$
declare
  today date := clock_timestamp() at time zone 'UTC';
begin
  insert into posthouse.usage (lane_id, day, model, attempts, requests, input_tokens, output_tokens, cached_tokens, cost_usd, unpriced)
  select lane_ids[f.place], today, coalesce(f.model, ''), count(*), coalesce(sum(f.requests), 0), coalesce(sum(f.input_tokens), 0),
    coalesce(sum(f.output_tokens), 0), coalesce(sum(f.cached_tokens), 0), sum(f.cost), count(*) filter (where f.cost is null and f.free is not true)
  from posthouse.usage_figures(usages) f
  where f.free is not true or f.requests is distinct from 0 or f.cost is not null
  group by lane_ids[f.place], f.model;
end $$;

-- Add up what settles noted, `max_rows` of it, by day. Answers how many rows it was.
create or replace function posthouse.fold_usage(max_rows int default 200000) returns bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set enable_hashjoin = off
set enable_mergejoin = off
set plan_cache_mode = force_generic_plan
as $$
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
end $$;

-- What was used by day (in UTC, of the settle), tenant, queue, kind and model: every attempt that told, whatever became of it.
-- cost_usd adds up the attempts whose cost is known; null: of none is. `unpriced` counts the others, but for refused ones.
create or replace view posthouse.usage_by_day as
  select u.day, u.tenant, u.queue, u.kind, nullif(u.model, '') as model, sum(u.attempts)::bigint as attempts, sum(u.requests) as requests,
    sum(u.input_tokens) as input_tokens, sum(u.output_tokens) as output_tokens, sum(u.cached_tokens) as cached_tokens,
    sum(u.cost_usd) as cost_usd, sum(u.unpriced)::bigint as unpriced
  from (
    select d.* from posthouse.usage_day d
    union all
    select n.day, l.tenant, l.queue, l.kind, n.model, n.attempts, n.requests, n.input_tokens, n.output_tokens, n.cached_tokens,
      n.cost_usd, n.unpriced
    from posthouse.usage n join posthouse.lane l on l.id = n.lane_id) u
  group by u.day, u.tenant, u.queue, u.kind, u.model;
