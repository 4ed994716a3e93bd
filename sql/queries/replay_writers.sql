-- Transactions that may have written a mark, or history as an older version does, and not be visible yet. They hold this lock from
-- before the statement that takes the time until after their commit is visible.
SELECT coalesce(pg_catalog.array_agg(DISTINCT virtualtransaction), '{}') FROM pg_locks
WHERE locktype = 'relation' AND relation IN ('outbox_mark'::regclass, 'outbox_history_old'::regclass) AND mode = 'RowExclusiveLock' AND granted
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
