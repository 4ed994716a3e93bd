SELECT clock_timestamp(), (SELECT min(published_at) FROM outbox_history)
