SELECT stream, base FROM outbox_stream ORDER BY stream
