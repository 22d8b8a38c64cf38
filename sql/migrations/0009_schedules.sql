-- 0009 schedules: cron rules that enqueue.
--
-- All that a schedule knows is here, when it is due next as well, so that it matters to nobody which process fires it, how often that is
-- restarted, or what its clock says. What a rule means is worked out by the library; Postgres has no cron.

-- One row a schedule. `next_at` moves on in the transaction that enqueues.
create table posthouse.schedule (
  name          text primary key,
  cron          text not null,            -- minute, hour, day of the month, month, day of the week: by the wall clock
  timezone      text not null,            -- of this zone
  job           jsonb not null,           -- as posthouse.enqueue_many takes one
  tenant        text not null,            -- whose job that is
  catch_up      text not null check (catch_up in ('skip', 'one', 'all')), -- what becomes of ticks that nobody saw in time
  catch_up_max  int not null,             -- with all: so many at most, the newest,
  catch_up_over interval not null,        -- spread over so long
  jitter        interval not null,        -- jobs are due so much later at most, each as its tick decides
  source        text,                     -- the file that declares it; null: set by hand
  version       bigint not null default 1, -- grows with each change: a tick worked out before it is not fired
  changed_at    timestamptz not null,
  paused_at     timestamptz,
  paused_reason text,
  since         timestamptz not null,     -- earlier ticks are none of its: when its rule was set, or when it was resumed
  next_at       timestamptz,              -- null: not worked out yet; infinity: never again
  planned_at    timestamptz,              -- what the clock said when that was worked out; later than now: it has been set back
  fired         bigint not null default 0,
  missed        bigint not null default 0, -- ticks that nobody saw in time, and that were not made up
  last_tick     timestamptz,
  last_fired_at timestamptz,
  last_job_id   bigint,
  error         text,                     -- why it could not enqueue last time, or why its rule cannot be read
  error_at      timestamptz
) with (fillfactor = 50);
create index schedule_next on posthouse.schedule (coalesce(next_at, '-infinity')) where paused_at is null;
create index schedule_planned on posthouse.schedule (planned_at);

-- The ticks that were fired, and their jobs: at most one each, whoever fires. The newest thousand of a schedule are kept, also when it
-- is removed and set again.
create table posthouse.schedule_run (
  schedule  text not null,
  tick      timestamptz not null,
  job_id    bigint not null,
  duplicate boolean not null,             -- that job held the dedupe key already
  fired_at  timestamptz not null,
  primary key (schedule, tick)
);

-- Work for each job, not housekeeping: it is due every second, whatever it took.
insert into posthouse.sweep (name, every, pause) values ('schedules', '1 second', 0);
