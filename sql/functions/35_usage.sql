-- Usage: what attempts say they used. It comes from programs and providers, so nothing in it is trusted: what is no sane number
-- counts as unknown (null), never as 0, and never fails a settle.

-- The figures in usages, one row each, in their order. Tokens and requests are JSON numbers, the cost is a number or decimal text
-- such as "0.00042". The names of chat completions (prompt_tokens, completion_tokens) are understood too. An attempt that tells
-- its tokens but no number of requests made one.
create or replace function posthouse.usage_figures(usages jsonb[])
returns table (place bigint, model text, input_tokens bigint, output_tokens bigint, cached_tokens bigint, requests int, cost numeric)
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
      case when x.cost ~ '^(\d{1,9}\.?|\d{0,9}\.\d{1,40})([eE][+-]?\d{1,2})?$' then
        case when x.cost::numeric <= 1000000000 then x.cost::numeric end
      end
    from (
      select u.place, u.usage ->> 'model' as model, u.usage -> 'requests' as requests, u.usage ->> 'cost_usd' as cost,
        coalesce(u.usage -> 'input_tokens', u.usage -> 'prompt_tokens') as input,
        coalesce(u.usage -> 'output_tokens', u.usage -> 'completion_tokens') as output,
        u.usage -> 'cached_tokens' as cached
      from unnest(usages) with ordinality u(usage, place) offset 0) x;
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
  if usage ->> 'cost_usd' ~ '^(\d{1,9}\.?|\d{0,9}\.\d{1,40})([eE][+-]?\d{1,2})?$' then
    cost := (usage ->> 'cost_usd')::numeric;
    if cost > 1000000000 then
      cost := null;
    end if;
  end if;
end $$;
