-- Growth: WAL bytes and the seconds they took, the size of the log with its history, and the time of the oldest mark
-- after the first, which the migration writes (NULL: none).
SELECT w.wal_bytes::bigint,
    extract(epoch FROM clock_timestamp() - greatest(w.stats_reset, pg_postmaster_start_time()))::float8,
    pg_catalog.pg_total_relation_size('outbox') + pg_catalog.pg_total_relation_size('outbox_mark'),
    (SELECT m.at FROM outbox_mark m WHERE m.settled IS NOT NULL AND m.epoch > 0 ORDER BY m.id LIMIT 1)
FROM pg_stat_wal w
