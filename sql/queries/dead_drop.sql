UPDATE outbox_dead SET dropped_at = clock_timestamp() WHERE id = $1 AND dropped_at IS NULL
