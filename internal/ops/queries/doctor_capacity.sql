-- What grows, from the catalog: no table is read. WAL bytes and the seconds they took, the outbox, the history, the oldest of its days that holds anything.
SELECT w.wal_bytes::bigint, extract(epoch FROM clock_timestamp() - greatest(w.stats_reset, pg_postmaster_start_time()))::float8,
       pg_catalog.pg_total_relation_size('outbox'),
       (SELECT coalesce(pg_catalog.sum(pg_catalog.pg_total_relation_size(inhrelid)), 0)::bigint FROM pg_inherits WHERE inhparent = 'outbox_history'::regclass::oid),
       (SELECT coalesce(pg_catalog.min(substring(c.relname FROM 'outbox_history_(\d{8})$')), '')
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'outbox_history'::regclass::oid AND pg_catalog.pg_relation_size(c.oid) > 0)
FROM pg_stat_wal w
