-- The parts in which rows are owed, or a pass is under way, which is to be ended. Rows are looked for by their transaction:
-- those that the mark's snapshot has in progress, and those behind it. A plan that was made for small tables must do for large
-- ones: hence each range in an order that only the index of transactions has, and OFFSET 0, which keeps parked rows from being
-- read all at once.
SELECT p.part
FROM pg_catalog.generate_series(0, 15) AS p(part)
CROSS JOIN LATERAL (
    SELECT n.settled, n.pass FROM (
        (SELECT * FROM outbox_mark WHERE part = p.part::smallint AND settled IS NOT NULL ORDER BY id DESC LIMIT 1)
        UNION ALL
        (SELECT * FROM outbox_mark WHERE part = -1 AND settled IS NOT NULL ORDER BY id DESC LIMIT 1)
    ) n ORDER BY n.id DESC LIMIT 1
) m
WHERE m.pass IS NOT NULL OR EXISTS (
    SELECT FROM (
        SELECT x, x FROM pg_catalog.pg_snapshot_xip(m.settled) x
        UNION ALL
        SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
    ) ids(first, last)
    CROSS JOIN LATERAL (
        SELECT r.id, r.seq FROM outbox r
        WHERE r.part = p.part::smallint AND r.xid >= ids.first AND r.xid <= ids.last
        ORDER BY r.xid
    ) o
    WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
)
ORDER BY p.part
