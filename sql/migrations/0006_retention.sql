-- 0006 retention: for how long jobs are kept, by queue and outcome, and what the sweep needs to know to let them go.
--
-- What has expired is found by slices of 10,000 ids, not by an index entry a job: a slice knows when its earliest row expires and when
-- its last one does. A partition is dropped whole when all of its slices are over.

-- Null: as the queue named '*' says, and for ever if that says nothing; 1,000 years and more: for ever. Cancelled jobs go with
-- done ones unless they have a time of their own.
alter table posthouse.queue add column retention_cancelled interval, add column retention_failed interval;

-- The payload of a job of this kind goes when the job is done or cancelled. By an index, since each settle asks whether any is so.
alter table posthouse.kind add column drops_payload boolean not null default false;
create index kind_drops on posthouse.kind (name) where drops_payload;

create table posthouse.slice (
  lower   bigint primary key,             -- ids from here, 10,000 of them
  stale   boolean not null default true,  -- what the next two say is not known, or may no longer hold
  due_at  timestamptz not null default 'infinity', -- when something in it is to be deleted, or may be
  over_at timestamptz not null default 'infinity', -- when everything done or cancelled in it has expired; infinity: not yet known, or never
  takers  text[]                          -- transactions that were open when its last id was handed out, and may hold some of them; null: it was not yet
) with (fillfactor = 50);
create index slice_due on posthouse.slice (due_at, lower);
create index slice_stale on posthouse.slice (lower) where stale;
create index slice_open on posthouse.slice (lower) where takers is null;

-- Slices of a range are made as its ids are handed out. `spared`: the payloads of its dead letters have been put aside.
alter table posthouse.id_range add column sliced_to bigint, add column spared boolean not null default false;
update posthouse.id_range set sliced_to = lower;
alter table posthouse.id_range alter column sliced_to set not null;

-- The payloads of dead letters whose partition was dropped, or is about to be.
create table posthouse.spare_payload (
  id      bigint primary key,
  payload jsonb not null,
  trace   jsonb
);

-- Jobs that came back into line: what was known of their slices no longer holds. Inserted by whoever retries, deleted by the sweep.
create table posthouse.revived (
  id bigint primary key
);

-- Partitions that are detached and not dropped yet.
create table posthouse.detached (
  name  text primary key,
  lower bigint not null,
  upper bigint not null
);

-- Nobody searches in these, and a sample of them is expensive.
alter table posthouse.payload alter column payload set statistics 0, alter column trace set statistics 0;
alter table posthouse.archive alter column result set statistics 0, alter column usage set statistics 0, alter column errors set statistics 0;

do $$
begin
  if exists (select from pg_settings where name = 'default_toast_compression' and 'lz4' = any(enumvals)) then
    alter table posthouse.spare_payload alter column payload set compression lz4;
  end if;
end $$;

insert into posthouse.sweep (name, every, pause) values
  -- Each rests so many times as long as it worked: nobody is in a hurry.
  ('slices', '1 second', 50), ('expire', '1 second', 20), ('retire', '2 seconds', 100), ('analyze', '1 minute', 50);
