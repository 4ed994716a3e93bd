SELECT payload IS NULL, retry_seq IS NOT NULL FROM outbox_dead WHERE id = $1 AND dropped_at IS NULL FOR UPDATE
