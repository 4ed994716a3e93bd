-- How many events wait, $1 at most, and how long the oldest. Where more wait, the oldest is that of those that were counted and of the
-- first of each part: the next to be swept. Rows are looked for as in sql/queries/backlog.sql.
WITH mark AS MATERIALIZED (
    SELECT * FROM outbox_settled m
    CROSS JOIN LATERAL (
        SELECT x, x FROM pg_catalog.unnest(m.running) AS x
        UNION ALL
        SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
    ) ids(first, last)
), counted AS MATERIALIZED (
    SELECT o.created_at FROM mark m
    CROSS JOIN LATERAL (SELECT * FROM outbox r WHERE r.part = m.part AND r.xid >= m.first AND r.xid <= m.last ORDER BY r.xid) o
    WHERE (m.pass IS NULL OR o.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(o.xid, m.pass))
      AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
    LIMIT $1
), first AS (
    SELECT o.created_at FROM mark m
    CROSS JOIN LATERAL (
        SELECT r.created_at FROM outbox r WHERE r.part = m.part AND r.xid >= m.first AND r.xid <= m.last
          AND (m.pass IS NULL OR r.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.pass))
          AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = r.id AND d.row_seq = r.seq OFFSET 0)
        ORDER BY r.xid LIMIT 1
    ) o
)
SELECT (SELECT count(*) FROM counted),
       coalesce(extract(epoch FROM clock_timestamp() -
           least((SELECT pg_catalog.min(created_at) FROM counted WHERE pg_catalog.isfinite(created_at)), (SELECT pg_catalog.min(created_at) FROM first WHERE pg_catalog.isfinite(created_at)))), 0)::float8
