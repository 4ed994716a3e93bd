SELECT coalesce(plugin, ''), database, coalesce(wal_status, ''),
    coalesce(pg_catalog.pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn), 0)::bigint
FROM pg_replication_slots WHERE slot_name = $1
