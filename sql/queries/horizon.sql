-- Run in a transaction of its own, after the LSN was read: every transaction that had its commit record by then has a
-- lower id than this one.
SELECT pg_current_xact_id()::text
