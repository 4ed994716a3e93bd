-- How many events wait, $1 at most (NULL: all are counted), and how long the oldest has waited. Where more wait, the
-- oldest is that of those that were counted and of the first of each part: the next to be swept. Rows of a pass under
-- way after its cursor are found by their number: by transaction, all that it has settled already would be read. The
-- others are found as in sweep_parts.
WITH mark AS MATERIALIZED (
    SELECT *, coalesce(pass, settled) AS known FROM outbox_settled
), ids AS MATERIALIZED (
    SELECT m.part, i.first, i.last FROM mark m
    CROSS JOIN LATERAL (
        SELECT x, x FROM pg_catalog.pg_snapshot_xip(m.known) AS x
        UNION ALL
        SELECT pg_catalog.pg_snapshot_xmax(m.known), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
    ) i(first, last)
), counted AS MATERIALIZED (
    SELECT count(*) AS rows, pg_catalog.min(w.created_at) FILTER (WHERE pg_catalog.isfinite(w.created_at)) AS oldest
    FROM (
        SELECT o.created_at FROM mark m
        CROSS JOIN LATERAL (
            SELECT r.created_at FROM outbox_live r
            WHERE r.part >= m.part AND r.part <= m.part AND r.seq > m.cursor AND r.seq <= m.pass_hi
              AND pg_catalog.pg_visible_in_snapshot(r.xid, m.pass)
              AND NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.settled)
            ORDER BY r.part, r.seq
        ) o
        WHERE m.pass IS NOT NULL
        UNION ALL
        SELECT o.created_at FROM ids i
        CROSS JOIN LATERAL (
            SELECT r.created_at FROM outbox_live r WHERE r.part = i.part AND r.xid >= i.first AND r.xid <= i.last
            ORDER BY r.xid
        ) o
        LIMIT $1
    ) w
), first AS (
    SELECT o.created_at FROM mark m
    CROSS JOIN LATERAL (
        SELECT r.created_at FROM outbox_live r
        WHERE r.part >= m.part AND r.part <= m.part AND r.seq > m.cursor AND r.seq <= m.pass_hi
          AND pg_catalog.pg_visible_in_snapshot(r.xid, m.pass)
          AND NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.settled)
        ORDER BY r.part, r.seq LIMIT 1
    ) o
    WHERE m.pass IS NOT NULL
    UNION ALL
    SELECT o.created_at FROM ids i
    CROSS JOIN LATERAL (
        SELECT r.created_at FROM outbox_live r WHERE r.part = i.part AND r.xid >= i.first AND r.xid <= i.last
        ORDER BY r.xid LIMIT 1
    ) o
)
SELECT c.rows, coalesce(extract(epoch FROM clock_timestamp() - least(c.oldest,
    (SELECT pg_catalog.min(created_at) FROM first WHERE $1 IS NOT NULL AND pg_catalog.isfinite(created_at)))),
        0)::float8
FROM counted c
