-- WAL bytes, and the seconds they took.
SELECT w.wal_bytes::bigint,
    extract(epoch FROM clock_timestamp() - greatest(w.stats_reset, pg_postmaster_start_time()))::float8
FROM pg_stat_wal w
