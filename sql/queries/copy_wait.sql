-- Before the first adoption: waits for the transactions that bring rows of another database, and keeps others from
-- beginning until this one ends. See outbox_copying.
SELECT pg_catalog.pg_advisory_xact_lock(outbox_copy_key()) FROM relay_state r WHERE outbox_copied(r) IS NOT FALSE
