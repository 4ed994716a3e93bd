-- Rows of the log, by part and number, in this order: at most $3 of them and about $4 bytes. The last column says how many of them
-- there are still.
SELECT w.n, w.id, w.aggregate_type, w.aggregate_id, w.event_type, w.payload::text, w.headers::text,
       CASE WHEN pg_catalog.isfinite(w.created_at) THEN w.created_at END,
       (SELECT prefix FROM relay_state) || w.aggregate_type || coalesce('.'::text || (w.part % nullif(coalesce(
           (SELECT l.shards FROM outbox_layout l WHERE w.seq <= l.hi AND pg_catalog.pg_visible_in_snapshot(w.xid, l.settled) ORDER BY l.id LIMIT 1),
           (SELECT shards FROM relay_state)), 1::smallint))::text, ''::text), w.kept
FROM (
    SELECT page.*, count(*) OVER () AS kept, count(*) OVER run AS place, pg_catalog.sum(page.bytes) OVER run - page.bytes AS bytes_before
    FROM (
        SELECT o.*, u.n FROM unnest($1::smallint[], $2::bigint[]) WITH ORDINALITY AS u(part, seq, n)
        CROSS JOIN LATERAL (SELECT * FROM outbox WHERE part = u.part AND seq = u.seq LIMIT 1) o
    ) page
    WINDOW run AS (ORDER BY page.n ROWS UNBOUNDED PRECEDING)
) w
WHERE w.bytes_before < $4 AND w.place <= $3
ORDER BY w.n
