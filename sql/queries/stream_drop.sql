UPDATE outbox_stream SET dropped_at = clock_timestamp() WHERE stream = $1
