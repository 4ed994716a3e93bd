-- The parts in which rows are owed, or a pass is under way, which is to be ended. Rows are looked for by their transaction:
-- those that the mark's snapshot has in progress, and those behind it. A plan that was made for small tables must do for large
-- ones: hence each range in an order that only the index of transactions has, and OFFSET 0, which keeps parked rows from being
-- read all at once.
SELECT m.part::integer
FROM outbox_settled m
WHERE m.pass IS NOT NULL OR EXISTS (
    SELECT FROM (
        SELECT x, x FROM pg_catalog.unnest(m.running) x
        UNION ALL
        SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
    ) ids(first, last)
    CROSS JOIN LATERAL (
        SELECT r.id, r.seq FROM outbox r
        WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last
        ORDER BY r.xid
    ) o
    WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
)
ORDER BY m.part
