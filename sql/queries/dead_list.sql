SELECT id, seq, aggregate_type, aggregate_id, event_type, error, class, attempts, outbox_time(created_at), dead_at,
    retry_seq IS NOT NULL
FROM outbox_dead WHERE dropped_at IS NULL ORDER BY seq LIMIT $1
