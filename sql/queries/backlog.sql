-- How many events wait, $1 at most (NULL: all are counted), and how long the oldest. Where more wait, the oldest is that of those
-- that were counted and of the first of each part: the next to be swept. They are those of outbox_backlog, asked of the table
-- itself, because row security that hides rows is to be an error. Of a pass under way what is behind its cursor is found by its
-- number, because by their transactions all that it has settled already would be gone through; else as in sweep_parts.
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
            SELECT * FROM outbox r
            WHERE r.part >= m.part AND r.part <= m.part AND r.seq > m.cursor AND r.seq <= m.pass_hi
              AND pg_catalog.pg_visible_in_snapshot(r.xid, m.pass) AND NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.settled)
            ORDER BY r.part, r.seq
        ) o
        WHERE m.pass IS NOT NULL AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
        UNION ALL
        SELECT o.created_at FROM ids i
        CROSS JOIN LATERAL (SELECT * FROM outbox r WHERE r.part = i.part AND r.xid >= i.first AND r.xid <= i.last ORDER BY r.xid) o
        WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
        LIMIT $1
    ) w
), first AS (
    SELECT o.created_at FROM mark m
    CROSS JOIN LATERAL (
        SELECT r.created_at FROM outbox r
        WHERE r.part >= m.part AND r.part <= m.part AND r.seq > m.cursor AND r.seq <= m.pass_hi
          AND pg_catalog.pg_visible_in_snapshot(r.xid, m.pass) AND NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.settled)
          AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = r.id AND d.row_seq = r.seq OFFSET 0)
        ORDER BY r.part, r.seq LIMIT 1
    ) o
    WHERE m.pass IS NOT NULL
    UNION ALL
    SELECT o.created_at FROM ids i
    CROSS JOIN LATERAL (
        SELECT r.created_at FROM outbox r WHERE r.part = i.part AND r.xid >= i.first AND r.xid <= i.last
          AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = r.id AND d.row_seq = r.seq OFFSET 0)
        ORDER BY r.xid LIMIT 1
    ) o
)
SELECT c.rows, coalesce(extract(epoch FROM clock_timestamp() -
    least(c.oldest, (SELECT pg_catalog.min(created_at) FROM first WHERE $1 IS NOT NULL AND pg_catalog.isfinite(created_at)))), 0)::float8
FROM counted c
