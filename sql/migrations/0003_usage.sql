-- 0003 usage: what attempts used, by day.
--
-- Each settle appends what its attempts used, and updates nothing; the sweep adds it up by day and deletes it. So a settle costs
-- the same whatever lies behind, also while somebody's open transaction keeps dead rows from being vacuumed.

-- What the attempts of one settle used: a row for each lane and model among them.
create table posthouse.usage (
  lane_id       bigint not null,          -- whose queue, tenant and kind it counts for
  day           date not null,            -- of the settle, in UTC, by the database's clock
  model         text not null,            -- as the attempt named it; empty: it named none
  attempts      bigint not null,
  requests      bigint not null,
  input_tokens  bigint not null,          -- of the attempts that told
  output_tokens bigint not null,
  cached_tokens bigint not null,          -- the part of input_tokens that came from the provider's cache
  cost_usd      numeric,                  -- of the attempts whose cost is known; null: of none
  unpriced      bigint not null           -- attempts whose cost is not known, though there may be one
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000);

-- The same added up. Only the sweep writes here, each row at most once a sweep.
create table posthouse.usage_day (
  day           date not null,
  tenant        text not null,
  queue         text not null,
  kind          text not null,
  model         text not null,
  attempts      bigint not null,
  requests      numeric not null,
  input_tokens  numeric not null,
  output_tokens numeric not null,
  cached_tokens numeric not null,
  cost_usd      numeric,
  unpriced      bigint not null,
  primary key (day, tenant, queue, kind, model)
) with (fillfactor = 50);

insert into posthouse.sweep (name, every) values ('usage', '10 seconds');
