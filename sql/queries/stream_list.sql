SELECT stream, coalesce(base, stream) FROM outbox_stream ORDER BY stream
