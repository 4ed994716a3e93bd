-- The server process, and what else identifies a database: processes of two servers may have started at one time.
SELECT pg_catalog.pg_postmaster_start_time(), pg_catalog.concat('outbox'::pg_catalog.regclass::pg_catalog.oid, ' ',
    current_database(), ' ', (SELECT r.source FROM relay_state r))
