SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text
