-- 0008 guards: what dedupe policies remember, how deep a queue or a tenant's line may get, and calls that may have been billed.

-- A job that waits until the one that holds the key is final, and then takes the key over: queued, due at infinity.
alter table posthouse.dedupe
  add column next_id bigint,
  add column next_at timestamptz,             -- when it is due then; null: at once
  add column body bytea;                      -- hash of the payload, where somebody asked for the same answer to the same payload
create index dedupe_next on posthouse.dedupe (job_id) where next_id is not null;

-- How many jobs may wait in a queue, or of a tenant. Configuration: read by enqueues that a limit is for, written by people.
create table posthouse.depth_limit (
  scope     text not null check (scope in ('queue', 'tenant')),
  name      text not null,
  max_depth int not null,
  primary key (scope, name)
);

-- How many waited when the sweep, or an enqueue while there was none, counted them: for limits too large to count at each enqueue.
-- Appended, and read from the newest end.
create table posthouse.depth_count (
  scope      text not null,
  name       text not null,
  counted_at timestamptz not null,
  jobs       bigint not null,
  primary key (scope, name, counted_at)
);

-- Whether a limit may be for a lane's jobs: told by the row that each enqueue reads anyway, so that it costs nothing where none is set.
alter table posthouse.lane add column limited boolean not null default false;
create index lane_limited_queue on posthouse.lane (queue) where limited and (ready_at < 'infinity' or blocked_by is not null);
create index lane_limited_tenant on posthouse.lane (tenant) where limited and (ready_at < 'infinity' or blocked_by is not null);

-- Names the first attempt whose call to the outside may have had an effect though nobody knows (WORKER/FENCE); null: there is no doubt.
alter table posthouse.job add column unsure text;

insert into posthouse.sweep (name, every, pause) values ('dedupe', '1 second', 50), ('depths', '2 seconds', 50);
