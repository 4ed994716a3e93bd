SELECT stream FROM outbox_stream ORDER BY stream
