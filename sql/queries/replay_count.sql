SELECT stream, count(*), min(published_at), max(published_at)
FROM history
WHERE published_at >= $3 AND published_at <= $4 AND ($5 = '' OR event_type = $5) AND ($6 = '' OR stream = $6)
GROUP BY stream ORDER BY stream
