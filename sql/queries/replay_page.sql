-- A page of history behind ($1, $2): at most $8 events and about $9 bytes, at least one event. The first condition is what
-- partitions are pruned by.
SELECT w.published_at, w.seq, w.id, w.aggregate_type, w.aggregate_id, w.event_type, w.payload::text, w.headers::text,
       coalesce(w.event_time, w.created_at), w.created_at, w.stream
FROM (
    SELECT page.*, sum(page.bytes) OVER (ORDER BY page.published_at, page.seq ROWS UNBOUNDED PRECEDING) - page.bytes AS before
    FROM (
        SELECT h.*, octet_length(h.payload::text) AS bytes
        FROM outbox_history h
        WHERE h.published_at >= $1 AND (h.published_at, h.seq) > ($1, $2::bigint) AND h.published_at <= $3
          AND ($4::uuid IS NULL OR h.id = $4) AND ($5::text IS NULL OR h.aggregate_id = $5)
          AND ($6 = '' OR h.event_type = $6) AND ($7 = '' OR h.stream = $7)
        ORDER BY h.published_at, h.seq LIMIT $8
    ) page
) w
WHERE w.before < $9
ORDER BY w.published_at, w.seq
