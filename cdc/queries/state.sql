SELECT
    pg_catalog.current_setting('wal_level')                                             AS wal_level,
    pg_catalog.current_setting('server_version_num')::int                               AS version,
    pg_catalog.pg_size_bytes(pg_catalog.current_setting('max_slot_wal_keep_size'))      AS max_keep,
    s.slot_name IS NOT NULL                                                             AS present,
    coalesce(s.plugin = 'pgoutput' AND s.database = current_database() AND NOT s.temporary, false) AS ours,
    coalesce(s.active, false)                                                           AS active,
    coalesce(s.active_pid, 0)                                                           AS active_pid,
    coalesce(s.wal_status, '')                                                          AS wal_status,
    -- Postgres 17 and later; by way of JSON because older ones have no such column.
    coalesce(pg_catalog.to_jsonb(s) ->> 'invalidation_reason'::text, '')                      AS invalidation,
    coalesce(pg_catalog.pg_wal_lsn_diff(s.confirmed_flush_lsn, '0/0')::bigint, 0)       AS confirmed,
    coalesce(pg_catalog.pg_wal_lsn_diff(s.restart_lsn, '0/0')::bigint, 0)               AS restart
FROM (SELECT) AS one
LEFT JOIN pg_replication_slots s ON s.slot_name = $1
