-- Transactions that may have written a mark and are not visible yet. They hold this lock from before the statement
-- that takes the time until after their commit is visible.
SELECT coalesce(pg_catalog.array_agg(DISTINCT virtualtransaction), '{}') FROM pg_locks
WHERE locktype = 'relation' AND relation = 'outbox_mark'::regclass::oid AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
