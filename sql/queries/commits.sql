-- Whether commits wait for a synchronous standby, and synchronous_standby_names: a commit has waited for 2 s, or none
-- of these standbys is connected. A role that may not see the state of the standbys finds only the former.
SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'SyncRep'
        AND query_start < clock_timestamp() - interval '2 s')
    OR pg_catalog.current_setting('synchronous_standby_names') <> ''
        AND pg_catalog.current_setting('synchronous_commit') NOT IN ('local', 'off')
        AND NOT EXISTS (SELECT FROM pg_stat_replication WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum')),
    pg_catalog.current_setting('synchronous_standby_names')
