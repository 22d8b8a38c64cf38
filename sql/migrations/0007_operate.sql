-- 0007 operate: what people do to many jobs at once, and what they did to dead letters.

-- Which jobs: every condition that is not null must hold. Made of JSON by posthouse.parse_filter.
create type posthouse.job_filter as (
  ids            bigint[],
  states         text[],
  queue          text,
  kind           text,
  tenant         text,
  class          text,          -- of the newest error
  error          text,          -- a part of the newest error, in capitals or not
  created_since  timestamptz,
  created_before timestamptz,
  failed_since   timestamptz,   -- when the newest error came
  failed_before  timestamptz
);

-- Jobs that were put back into line after they had ended: one row each time, for as long as the job is anywhere.
create table posthouse.redriven (
  job_id       bigint not null,
  number       int not null,    -- 1: the first time
  redriven_at  timestamptz not null,
  redriven_by  text not null,
  state        text not null,   -- that it had: failed or cancelled
  attempt      int not null,    -- attempts until then, which are counted anew
  fence        int not null,    -- of the last attempt until then
  class        text,            -- of its last error
  error        text,
  changes      jsonb not null,  -- what was changed: {"priority": {"from": 0, "to": 5}, …}
  payload      jsonb,           -- the one that it had, where it was changed
  primary key (job_id, number)
);
-- By which the sweep goes through it.
create index redriven_at on posthouse.redriven (redriven_at);

-- Dead letters by the time at which they failed: in all, and for each lane and class.
drop index posthouse.dead_letter_failed;
create index dead_letter_failed on posthouse.dead_letter (failed_at, id);
create index dead_letter_group on posthouse.dead_letter (lane_id, class, failed_at, id);

insert into posthouse.sweep (name, every) values ('redrives', '1 minute');

do $$
begin
  if exists (select from pg_settings where name = 'default_toast_compression' and 'lz4' = any(enumvals)) then
    alter table posthouse.redriven alter column payload set compression lz4, alter column error set compression lz4;
  end if;
end $$;
