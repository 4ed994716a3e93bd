SELECT id FROM outbox_dead WHERE retry_seq IS NULL AND dropped_at IS NULL ORDER BY seq
