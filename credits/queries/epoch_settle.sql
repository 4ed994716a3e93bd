-- Waits until the transactions that already hold bucket rows have ended. The wait is short, because such a transaction
-- may be waiting for this process in turn.
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('posthaste credits '
    || 'credit_epoch'::pg_catalog.regclass::pg_catalog.oid::pg_catalog.text, 0))
FROM pg_catalog.set_config('lock_timeout', '1s', true)
