-- Not waited for by a synchronous standby, as in state_adopt; and by the index of transactions, whatever was known of the table
-- where it came from. Who waits for the lock has all writers behind it.
SELECT pg_catalog.set_config('posthaste.marks', 'on', true), pg_catalog.set_config('synchronous_commit', 'local', true),
    pg_catalog.set_config('enable_seqscan', 'off', true), pg_catalog.set_config('lock_timeout', '2s', true)
