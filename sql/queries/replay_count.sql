SELECT stream, count(*), min(published_at), max(published_at)
FROM outbox_history
WHERE published_at >= $1 AND published_at <= $2
  AND ($3::uuid IS NULL OR id = $3) AND ($4::text IS NULL OR aggregate_id = $4)
  AND ($5 = '' OR event_type = $5) AND ($6 = '' OR stream = $6)
GROUP BY stream ORDER BY stream
