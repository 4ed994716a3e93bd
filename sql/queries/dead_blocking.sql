SELECT id, seq, aggregate_type, aggregate_id, coalesce(retry_seq, 0) FROM outbox_dead
WHERE dropped_at IS NULL ORDER BY seq LIMIT 100000
