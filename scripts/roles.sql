-- Roles and database for docker-compose.yml; the Postgres image runs it once, as the superuser, on an empty volume.
-- Usable elsewhere too: POSTHASTE_DB_PASSWORD=… POSTHASTE_API_DB_PASSWORD=… psql -v ON_ERROR_STOP=1 -f scripts/roles.sql
--
-- Two roles. The relay has to own the tables: it makes and drops the history's partitions and mends the publication,
-- which Postgres allows to an owner only. So it shares its role with migrate. Whoever writes orders and events needs
-- none of that and gets none.
\getenv owner_password POSTHASTE_DB_PASSWORD
\getenv api_password POSTHASTE_API_DB_PASSWORD

CREATE ROLE posthaste LOGIN REPLICATION PASSWORD :'owner_password';
CREATE ROLE posthaste_api LOGIN PASSWORD :'api_password';

CREATE DATABASE posthaste OWNER posthaste;
REVOKE ALL ON DATABASE posthaste FROM PUBLIC;
GRANT CONNECT ON DATABASE posthaste TO posthaste_api;

\connect posthaste
-- Who holds the WAL back (the oldest open transaction, in any database) is visible to members of this role only.
GRANT pg_read_all_stats TO posthaste;
-- Frees WAL at once instead of at the next background record (from 16 on).
SELECT 'GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO posthaste'
WHERE to_regprocedure('pg_log_standby_snapshot()') IS NOT NULL \gexec

-- The tables come later, made by posthaste in migrations; the rights on them wait here.
ALTER DEFAULT PRIVILEGES FOR ROLE posthaste IN SCHEMA public GRANT SELECT, INSERT ON TABLES TO posthaste_api;
