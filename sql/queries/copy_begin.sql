-- The commit does not wait for a synchronous standby: see state_adopt. Rows are found by the index of transactions,
-- whatever the statistics of the server that the table came from say. The wait for the lock is bounded: all writers
-- wait after it.
SELECT pg_catalog.set_config('posthaste.copy', 'on', true), pg_catalog.set_config('synchronous_commit', 'local', true),
    pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('lock_timeout', '2s', true)
