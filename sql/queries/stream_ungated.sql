SELECT stream FROM outbox_stream WHERE NOT gated ORDER BY stream
