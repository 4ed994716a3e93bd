-- Roles and database for docker-compose.yml; the Postgres image runs it once, as the superuser, on an empty volume. It
-- can also be used elsewhere: POSTHASTE_DB_PASSWORD=… POSTHASTE_API_DB_PASSWORD=… psql -v ON_ERROR_STOP=1 -f
-- scripts/roles.sql
--
-- posthaste         migrate and relay. The relay has to own the tables: it repairs the publication, which Postgres
-- allows only to an owner.
-- posthaste_api     serve. posthaste_emit    services that only emit events: GRANT posthaste_emit TO your_service.
-- posthaste_operator  people and their commands: GRANT posthaste_operator TO somebody. posthaste migrate gives the
-- last three their rights, column by column, whenever it runs.
\getenv owner_password POSTHASTE_DB_PASSWORD
\getenv api_password POSTHASTE_API_DB_PASSWORD

CREATE ROLE posthaste LOGIN REPLICATION PASSWORD :'owner_password';
CREATE ROLE posthaste_api LOGIN PASSWORD :'api_password';
CREATE ROLE posthaste_emit;
CREATE ROLE posthaste_operator;

CREATE DATABASE posthaste OWNER posthaste;
REVOKE ALL ON DATABASE posthaste FROM PUBLIC;
GRANT CONNECT ON DATABASE posthaste TO posthaste_api, posthaste_emit, posthaste_operator;

\connect posthaste
-- Nobody else puts functions where the relay looks for tables. Before 15 everybody may, and after an upgrade still.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
-- From 15 on it is the database's owner's.
GRANT CREATE ON SCHEMA public TO posthaste;
-- Only members of this role can see what holds the WAL back (the oldest open transaction, in any database).
GRANT pg_read_all_stats TO posthaste, posthaste_operator;
-- Frees WAL immediately instead of at the next background record (from 16 on).
SELECT 'GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO posthaste'
WHERE to_regprocedure('pg_log_standby_snapshot()') IS NOT NULL \gexec
