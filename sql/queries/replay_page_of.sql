-- replay_page for the events with an id or of an aggregate. They are looked up first, whatever the planner thinks of them:
-- there are few, and the index on the time would lead through all of history.
WITH few AS MATERIALIZED (
    SELECT * FROM outbox_history WHERE ($9::uuid IS NULL OR id = $9) AND ($10::text IS NULL OR aggregate_id = $10)
)
SELECT w.published_at, w.seq, w.id, w.aggregate_type, w.aggregate_id, w.event_type,
       CASE WHEN w.wanted THEN w.payload::text END, CASE WHEN w.wanted THEN w.headers::text END,
       coalesce(w.event_time, w.created_at), w.created_at, w.stream, w.wanted
FROM (
    SELECT page.*, sum(page.bytes) OVER run - page.bytes AS bytes_before,
           count(*) FILTER (WHERE page.wanted) OVER run - page.wanted::integer AS events_before
    FROM (
        SELECT h.*, CASE WHEN h.wanted THEN octet_length(h.payload::text) ELSE 0 END AS bytes
        FROM (
            SELECT *, ($4 = '' OR event_type = $4) AND ($5 = '' OR stream = $5) AS wanted
            FROM few
            WHERE (published_at, seq) > ($1, $2::bigint) AND published_at <= $3
            ORDER BY published_at, seq LIMIT $6
        ) h
    ) page
    WINDOW run AS (ORDER BY page.published_at, page.seq ROWS UNBOUNDED PRECEDING)
) w
WHERE w.bytes_before < $8 AND w.events_before < $7
ORDER BY w.published_at, w.seq
