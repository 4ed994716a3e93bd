-- A page of history (replay_all or replay_few) behind ($3, $4): of the next $8 events those of a type and a stream, at most $9 of them and about $10
-- bytes. The others come without their bodies: how far the page reaches is to be known. What is wanted is no condition of
-- the inner query, or a page with little of it could read all of history. The first condition is what partitions are pruned by.
SELECT w.published_at, w.seq, w.id, w.aggregate_type, w.aggregate_id, w.event_type,
       CASE WHEN w.wanted THEN w.payload::text END, CASE WHEN w.wanted THEN w.headers::text END,
       coalesce(w.event_time, w.created_at), w.stream, w.wanted
FROM (
    SELECT page.*, pg_catalog.sum(page.bytes) OVER run - page.bytes AS bytes_before,
           count(*) FILTER (WHERE page.wanted) OVER run - page.wanted::integer AS events_before
    FROM (
        SELECT h.*, CASE WHEN h.wanted THEN pg_catalog.octet_length(h.payload::text) ELSE 0 END AS bytes
        FROM (
            SELECT *, ($6::text = '' OR event_type::text = $6) AND ($7::text = '' OR stream = $7) AS wanted
            FROM history
            WHERE published_at >= $3 AND (published_at, seq) > ($3, $4::bigint) AND published_at <= $5
            ORDER BY published_at, seq LIMIT $8
        ) h
    ) page
    WINDOW run AS (ORDER BY page.published_at, page.seq ROWS UNBOUNDED PRECEDING)
) w
WHERE w.bytes_before < $10 AND w.events_before < $9
ORDER BY w.published_at, w.seq
