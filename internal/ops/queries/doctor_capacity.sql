-- The size of the log with its history, and the time of the oldest mark after the first, which the migration writes
-- (NULL: none).
SELECT pg_catalog.pg_total_relation_size('outbox') + pg_catalog.pg_total_relation_size('outbox_mark'),
    (SELECT m.at FROM outbox_mark m WHERE m.settled IS NOT NULL AND m.epoch > 0 ORDER BY m.id LIMIT 1)
