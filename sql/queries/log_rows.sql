-- Rows of the log, by part and number ($1, $2), and the marks that settled them ($3), in this order: at most $4 of
-- them and about $5 bytes. The last column is how many of them still exist.
SELECT w.n, w.id, w.aggregate_type, w.aggregate_id, w.event_type, w.payload::text, w.headers::text,
    CASE WHEN pg_catalog.isfinite(w.created_at) THEN w.created_at END,
    coalesce(outbox_stream_name(w.prefix, w.aggregate_type, w.part, w.shards), ''), w.kept
FROM (
    SELECT page.*, count(*) OVER () AS kept, count(*) OVER run AS place,
        pg_catalog.sum(page.bytes) OVER run - page.bytes AS bytes_before
    FROM (
        SELECT o.*, u.n, m.prefix, m.shards
        FROM unnest($1::smallint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY AS u(part, seq, mark, n)
        CROSS JOIN LATERAL (SELECT * FROM outbox_rows WHERE part = u.part AND seq = u.seq LIMIT 1) o
        LEFT JOIN LATERAL (SELECT prefix, shards FROM outbox_mark WHERE id = u.mark LIMIT 1) m ON true
    ) page
    WINDOW run AS (ORDER BY page.n ROWS UNBOUNDED PRECEDING)
) w
WHERE w.bytes_before < $5 AND w.place <= $4
ORDER BY w.n
