-- The parts that have unsettled rows, or a pass under way, which must be ended. It is refused where nothing can be
-- written: the session may be one of an old primary, which gets no more rows. Rows are found by their transaction:
-- those that the mark's snapshot has in progress, and those after it. A plan that was made for small tables must do
-- for large ones: hence each range in an order that only the index of transactions has.
SELECT m.part::integer
FROM outbox_settled m
WHERE (m.pass IS NOT NULL OR EXISTS (
    SELECT FROM (
        SELECT x, x FROM pg_catalog.unnest(m.running) x
        UNION ALL
        SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
    ) ids(first, last)
    CROSS JOIN LATERAL (
        SELECT FROM outbox_live r WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last ORDER BY r.xid
    ) o
)) AND NOT EXISTS (SELECT FROM outbox_part WHERE false FOR UPDATE)
ORDER BY m.part
