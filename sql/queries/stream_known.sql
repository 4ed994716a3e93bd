SELECT stream FROM outbox_stream
UNION
SELECT $1::text || aggregate_type FROM outbox
ORDER BY 1
