-- 0010 gauges: what metrics say about the whole fleet, counted once and not by every process.

-- What a part of the sweep counted: the newest row of each counts. Appended, and read from the newest end: a row updated every few
-- seconds under somebody's snapshot would get slower with each update.
create table posthouse.gauge (
  part       text not null,
  counted_at timestamptz not null,
  took_ms    double precision not null,
  gauges     jsonb not null,           -- [{"name", "labels", "value"}, …]
  primary key (part, counted_at)
);

-- Less than two hundredths of a core, both together.
insert into posthouse.sweep (name, every, pause) values ('gauges', '5 seconds', 200), ('counts', '10 seconds', 70);
