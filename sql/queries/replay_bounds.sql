SELECT clock_timestamp(), (SELECT min(published_at) FROM outbox_history), pg_is_in_recovery()
