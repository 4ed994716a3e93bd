SELECT stream, count(*), pg_catalog.min(published_at), pg_catalog.max(published_at)
FROM history
WHERE published_at >= $3 AND published_at <= $4 AND ($5::text = '' OR event_type::text = $5) AND ($6::text = '' OR stream = $6)
GROUP BY stream ORDER BY stream
