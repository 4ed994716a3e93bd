-- Roles and database for docker-compose.yml; the Postgres image runs it once, as the superuser, on an empty volume.
-- It can also be used elsewhere: POSTHASTE_DB_PASSWORD=… POSTHASTE_API_DB_PASSWORD=… psql -v ON_ERROR_STOP=1 -f scripts/roles.sql
--
-- Two roles. The relay has to own the tables: it creates and drops partitions of the history and repairs the publication,
-- which Postgres allows only to an owner. So it shares its role with migrate. Processes that write orders and events need
-- no such rights and get none.
\getenv owner_password POSTHASTE_DB_PASSWORD
\getenv api_password POSTHASTE_API_DB_PASSWORD

CREATE ROLE posthaste LOGIN REPLICATION PASSWORD :'owner_password';
CREATE ROLE posthaste_api LOGIN PASSWORD :'api_password';

CREATE DATABASE posthaste OWNER posthaste;
REVOKE ALL ON DATABASE posthaste FROM PUBLIC;
GRANT CONNECT ON DATABASE posthaste TO posthaste_api;

\connect posthaste
-- Nobody else puts functions where the relay looks for tables. Before 15 everybody may, and after an upgrade still.
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
-- Only members of this role can see what holds the WAL back (the oldest open transaction, in any database).
GRANT pg_read_all_stats TO posthaste;
-- Frees WAL immediately instead of at the next background record (from 16 on).
SELECT 'GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO posthaste'
WHERE to_regprocedure('pg_log_standby_snapshot()') IS NOT NULL \gexec

-- The migrations create the tables later; these default privileges then apply to them.
ALTER DEFAULT PRIVILEGES FOR ROLE posthaste IN SCHEMA public GRANT SELECT, INSERT ON TABLES TO posthaste_api;
