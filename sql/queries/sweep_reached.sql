-- Whether no row of part $1 that the snapshot $2 sees is unsettled. It is refused as sweep_parts is. Rows are found as
-- in audit.
SELECT NOT EXISTS (
    SELECT FROM outbox_settled m
    WHERE m.part = $1::smallint AND (m.pass IS NOT NULL AND EXISTS (
        SELECT FROM (
            SELECT r.xid FROM outbox_live r
            WHERE r.part >= $1::smallint AND r.part <= $1::smallint AND r.seq > m.cursor
            ORDER BY r.part, r.seq
        ) o
        WHERE pg_catalog.pg_visible_in_snapshot(o.xid, m.pass)
          AND NOT pg_catalog.pg_visible_in_snapshot(o.xid, m.settled)
          AND pg_catalog.pg_visible_in_snapshot(o.xid, $2::pg_snapshot)
    ) OR EXISTS (
        SELECT FROM (
            SELECT x, x FROM pg_catalog.pg_snapshot_xip(coalesce(m.pass, m.settled)) x
            UNION ALL
            SELECT pg_catalog.pg_snapshot_xmax(coalesce(m.pass, m.settled)),
                pg_catalog.pg_snapshot_xmax($2::pg_snapshot)
        ) ids(first, last)
        CROSS JOIN LATERAL (
            SELECT r.xid FROM outbox_live r WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last
            ORDER BY r.xid
        ) o
        WHERE pg_catalog.pg_visible_in_snapshot(o.xid, $2::pg_snapshot)
    ))
) AND NOT EXISTS (SELECT FROM outbox_part WHERE false FOR UPDATE)
