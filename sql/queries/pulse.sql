-- A watcher may run this every second: how many numbers events were given so far (rows inserted, by the statistics,
-- for a role that may not see numbers, like serve's), whether a relay leads (it holds the advisory lock keyed by $1),
-- and how many sessions hold locks.
SELECT CASE
        WHEN pg_catalog.has_sequence_privilege(pg_catalog.pg_get_serial_sequence('outbox', 'seq'), 'USAGE, SELECT')
        THEN coalesce(pg_catalog.pg_sequence_last_value(
            pg_catalog.pg_get_serial_sequence('outbox', 'seq')::regclass), 0)
        ELSE pg_catalog.pg_stat_get_tuples_inserted('outbox'::regclass) END::bigint,
    EXISTS (SELECT 1 FROM pg_locks l
        WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.mode = 'ExclusiveLock'
          AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND (l.classid::bigint << 32 | l.objid::bigint) = pg_catalog.hashtextextended(
              'posthaste ' || $1::text || ' ' || 'outbox'::regclass::oid::text, 0)),
    (SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name = 'posthaste locks')::integer
