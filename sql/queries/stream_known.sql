SELECT stream FROM outbox_stream
UNION
SELECT stream FROM outbox_backlog
ORDER BY 1
