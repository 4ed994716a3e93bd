-- At most $2 rows: the default partition may hold everything, where partitions cannot be made.
DELETE FROM outbox_history_default
WHERE ctid = ANY (ARRAY(SELECT ctid FROM outbox_history_default WHERE published_at < $1 ORDER BY published_at LIMIT $2))
