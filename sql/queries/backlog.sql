-- The rows of outbox_backlog; asked of the table itself, because row security that hides rows is to be an error. As in
-- sweep_parts.
SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - pg_catalog.min(o.created_at) FILTER (WHERE pg_catalog.isfinite(o.created_at))), 0)::float8
FROM outbox_settled m
CROSS JOIN LATERAL (
    SELECT x, x FROM pg_catalog.unnest(m.running) AS x
    UNION ALL
    SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
) ids(first, last)
CROSS JOIN LATERAL (
    SELECT r.id, r.seq, r.xid, r.created_at FROM outbox r
    WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last
    ORDER BY r.xid
) o
WHERE (m.pass IS NULL OR o.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(o.xid, m.pass))
  AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
