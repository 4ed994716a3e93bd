SELECT stream, count(*), min(published_at), max(published_at)
FROM outbox_history
WHERE published_at >= $1 AND published_at <= $2 AND ($3 = '' OR event_type = $3) AND ($4 = '' OR stream = $4)
GROUP BY stream ORDER BY stream
