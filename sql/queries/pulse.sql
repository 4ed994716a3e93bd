-- What a watcher may ask every second: numbers given out to events so far, whether a relay leads (it holds the advisory lock keyed by $1), how many hold a lock session.
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'seq')::regclass), 0)::bigint,
       EXISTS (SELECT 1 FROM pg_locks l WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.mode = 'ExclusiveLock'
                 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
                 AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended('posthaste ' || $1::text || ' ' || 'outbox'::regclass::oid, 0)),
       (SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'posthaste locks')::integer
