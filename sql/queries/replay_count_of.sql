WITH few AS MATERIALIZED ( -- as in replay_page_of
    SELECT stream, event_type, published_at FROM outbox_history
    WHERE ($5::uuid IS NULL OR id = $5) AND ($6::text IS NULL OR aggregate_id = $6)
)
SELECT stream, count(*), min(published_at), max(published_at)
FROM few
WHERE published_at >= $1 AND published_at <= $2 AND ($3 = '' OR event_type = $3) AND ($4 = '' OR stream = $4)
GROUP BY stream ORDER BY stream
