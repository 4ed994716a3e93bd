-- Whether no row of part $1 that the snapshot $2 sees is owed. As in sweep_parts.
SELECT NOT EXISTS (
    SELECT FROM outbox_settled m
    CROSS JOIN LATERAL (
        SELECT x, x FROM pg_catalog.unnest(m.running) x
        UNION ALL
        SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax($2::pg_snapshot)
    ) ids(first, last)
    CROSS JOIN LATERAL (
        SELECT r.id, r.seq, r.xid FROM outbox r
        WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last
        ORDER BY r.xid
    ) o
    WHERE m.part = $1::smallint AND pg_catalog.pg_visible_in_snapshot(o.xid, $2::pg_snapshot)
      AND (m.pass IS NULL OR o.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(o.xid, m.pass))
      AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
)
