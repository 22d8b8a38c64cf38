-- 0002 gates: limits that jobs pass before they run, and what they are counted by.
--
-- Gates, kinds, routes and tenants are configuration: read and locked by claims, written by people, by workers when they start,
-- and by what a provider answers. What is counted is appended to `gate_state` and read from the newest end.

-- A limit, or a barrier that somebody closed. 'queue:Q', 'tenant:T', 'model:M' hold for those, 'tenant:*' (and so on) for each that
-- has no limits of its own, 'endpoint:PROVIDER/MODEL' for a place where a model is asked, any other name for jobs that ask for it.
create table posthouse.gate (
  id                  bigint generated always as identity primary key,
  name                text collate "C" not null unique,
  max_running         int,
  requests_per_minute int,
  tokens_per_minute   bigint,
  money_per_day       numeric,
  money_per_month     numeric,
  when_spent          text not null default 'hold', -- hold, fail, or model:NAME: use that one instead
  warn_at             numeric,                      -- share of a budget at which an alert is raised
  closed_until        timestamptz,                  -- null: open
  closed_at           timestamptz,
  closed_by           text,                         -- person, provider, quota, breaker
  closed_reason       text,
  strikes             int not null default 0,       -- closings in a row for the same reason
  probe_until         timestamptz,                  -- its time is over and one job tries it, until then at most
  probe_job           bigint,
  opened_at           timestamptz                   -- by a probe: others follow slowly at first
);

create index gate_instead on posthouse.gate (id) where when_spent like 'model:%';

-- What a gate has let through, a row a claim or settle; the newest of each gate and member counts.
create table posthouse.gate_state (
  gate_id      bigint not null,
  member       text not null,         -- the tenant, queue or model of a gate that holds for each; else empty
  seq          bigint not null,
  job_ids      bigint[],              -- all that may be running, with the fences of their attempts: some may be over
  fences       int[],
  seconds      bigint[],              -- of the epoch, ascending: the last minute
  requests     int[],                 -- let through in each of them
  tokens       bigint[],
  requests_at  timestamptz,           -- when as many requests as were let through will have been earned
  tokens_at    timestamptz,
  month        date,                  -- of what was spent
  day          date,
  spent_day    numeric,
  spent_month  numeric,
  primary key (gate_id, member, seq)
);

-- What is known of a kind of jobs: told by the workers that run it.
create table posthouse.kind (
  name              text primary key,
  gates             text[] not null,
  max_output_tokens int
);

-- The endpoints of a model, in order: told by the workers.
create table posthouse.route (
  model     text primary key,
  endpoints text[] not null
);

-- Tenants with a weight of their own.
create table posthouse.tenant (
  name   text primary key,
  weight real not null
);

-- Shares of tenants in claims that are not all alike, by queue: made by the sweep of the tenants' weights and, where a queue is fair
-- by tokens, of what their jobs used lately.
create table posthouse.share (
  queue  text not null,
  tenant text not null,
  share  real not null,
  primary key (queue, tenant)
) with (fillfactor = 50);
alter table posthouse.queue add column fair_by text not null default 'jobs', -- or tokens
  add column serial_by text;            -- jobs that share this field of their payload run one at a time
insert into posthouse.sweep (name, every, pause) values ('gates', '2 seconds', 20), ('shares', '10 seconds', 50);
