SELECT count(*) FILTER (WHERE dropped_at IS NULL),
    count(*) FILTER (WHERE dropped_at IS NOT NULL OR retry_seq IS NOT NULL) > 0
FROM outbox_dead
