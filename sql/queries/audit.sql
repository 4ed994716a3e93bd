-- Of each part with unsettled rows the number of one of the oldest. Of a pass under way the first after its cursor,
-- found by its number: by transaction, all that the pass has settled already would be read. Otherwise, as in
-- sweep_parts, of each transaction that the pass, or without one the mark, has in progress, and of those after it.
WITH first AS MATERIALIZED (
    SELECT m.part, coalesce((
        SELECT r.seq FROM outbox_live r
        WHERE m.pass IS NOT NULL AND r.part >= m.part AND r.part <= m.part AND r.seq > m.cursor
          AND pg_catalog.pg_visible_in_snapshot(r.xid, m.pass)
          AND NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.settled)
        ORDER BY r.part, r.seq LIMIT 1
    ), (
        SELECT f.seq FROM (
            SELECT x, x FROM pg_catalog.pg_snapshot_xip(coalesce(m.pass, m.settled)) AS x
            UNION ALL
            SELECT pg_catalog.pg_snapshot_xmax(coalesce(m.pass, m.settled)),
                pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
        ) ids(first, last)
        CROSS JOIN LATERAL (
            SELECT r.seq, r.xid FROM outbox_live r
            WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last ORDER BY r.xid LIMIT 1
        ) f
        ORDER BY f.xid LIMIT 1
    )) AS seq FROM outbox_settled m
)
SELECT coalesce(pg_catalog.array_agg(part), '{}'), coalesce(pg_catalog.array_agg(seq), '{}')
FROM first WHERE seq IS NOT NULL
