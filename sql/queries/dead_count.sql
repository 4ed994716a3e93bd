SELECT count(*) FROM outbox_dead WHERE dropped_at IS NULL
