-- Cheap enough to run every second: how many numbers events were given so far (inserted rows, by the statistics, for a
-- role that may not read the sequence, like serve's), whether a relay leads, how many sessions hold locks, and whether
-- a commit has waited for a synchronous standby for 2 s.
SELECT CASE
        WHEN pg_catalog.has_sequence_privilege(pg_catalog.pg_get_serial_sequence('outbox', 'seq'), 'USAGE, SELECT')
        THEN coalesce(pg_catalog.pg_sequence_last_value(
            pg_catalog.pg_get_serial_sequence('outbox', 'seq')::regclass), 0)
        ELSE pg_catalog.pg_stat_get_tuples_inserted('outbox'::regclass) END::bigint,
    EXISTS (SELECT FROM outbox_leader),
    (SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name LIKE 'posthaste locks%')::integer,
    EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'SyncRep'
        AND query_start < clock_timestamp() - interval '2 s')
