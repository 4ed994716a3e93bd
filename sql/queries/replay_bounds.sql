SELECT clock_timestamp(), (SELECT pg_catalog.min(published_at) FROM outbox_history), pg_is_in_recovery()
