-- 0004 alerts: what people want to be told of, once and not a thousand times.
--
-- Whoever has something to tell appends a note; the sweep adds the notes up in `alert` and tells of them, each subject at most once
-- in its quiet time. So raising an alert waits for nobody, and nobody waits for it.

-- What was raised and is not added up yet. Only inserted into and emptied.
create table posthouse.alert_note (
  kind      text not null,
  subject   text not null,
  text      text not null,
  detail    jsonb not null,
  raised_at timestamptz not null,
  resolves  boolean not null          -- the opposite: it is over
);

-- One row for as long as something goes on; kept for 30 days after that.
create table posthouse.alert (
  id          bigint generated always as identity primary key,
  kind        text not null,
  subject     text not null,          -- what it is about: a gate, a queue, queue/kind/class; '*': more than can be told apart
  text        text not null,          -- of the newest time
  detail      jsonb not null,         -- of the newest time
  count       bigint not null,        -- times it was raised
  told        bigint not null default 0, -- of them, when it was told last
  raised_at   timestamptz not null,
  last_at     timestamptz not null,
  told_at     timestamptz,
  resolved_at timestamptz
) with (fillfactor = 50);
create unique index alert_open on posthouse.alert (kind, subject) where resolved_at is null;
create index alert_subject on posthouse.alert (kind, subject, id);

-- What is raised at all, how soon, and how often it is told. Configuration.
create table posthouse.alert_rule (
  kind    text not null,
  queue   text not null,              -- empty: for all that have no rule of their own
  enabled boolean not null default true,
  quiet   interval,                   -- at least so long between two messages about one subject; null: 5 minutes
  after   interval,                   -- how old a due job must be; null: as for the others
  primary key (kind, queue)
);
insert into posthouse.alert_rule (kind, queue, quiet, after) values
  ('dead_letter', '', '5 minutes', null), ('gate_quota', '', '5 minutes', null), ('budget', '', '5 minutes', null),
  ('no_worker', '', '5 minutes', '1 minute'), ('oldest_due', '', '5 minutes', '15 minutes'), ('sweep', '', '5 minutes', null),
  ('schedule', '', '5 minutes', null);

-- Whether alerts become jobs for the webhook. Where it is and its secret are known to the workers only.
create table posthouse.alert_webhook (
  single     boolean primary key default true check (single),
  enabled    boolean not null,
  reason     text,                    -- why it was turned off
  changed_at timestamptz not null
);
insert into posthouse.alert_webhook values (true, false, null, clock_timestamp());

-- Dead letters from before are no news.
insert into posthouse.sweep (name, every, floor_at) values
  ('watch', '10 seconds', '-infinity'), ('alerts', '2 seconds', clock_timestamp());
