-- 0005 isolation: which login belongs to which tenant, for tenants who log in to Postgres themselves.

-- Read by the name under which the session was opened, which nobody can change afterwards. A login without a row sees nothing.
create table posthouse.tenant_login (
  login        name primary key,
  tenant       text,
  every_tenant boolean not null default false,
  check (every_tenant = (tenant is null))
);
