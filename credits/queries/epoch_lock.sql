-- A comparison of a server with the ledger waits for this transaction (see epoch_settle.sql), because the transaction
-- may already have read a stream.
WITH here AS MATERIALIZED (
    SELECT pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtextextended(
        'posthaste credits ' || 'credit_epoch'::pg_catalog.regclass::pg_catalog.oid::pg_catalog.text, 0)))
SELECT e.bucket, e.epoch, e.mark, e.issued, e.bumped_at FROM credit_epoch e, here
    WHERE e.bucket = ANY ($1::smallint[]) ORDER BY e.bucket FOR UPDATE OF e SKIP LOCKED
