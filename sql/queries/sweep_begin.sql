-- Begins or resumes a pass over part $1: its newest mark, the pass's snapshot, and the first $4 numbers of unsettled
-- rows that the snapshot sees after the cursor. The snapshot is that of the pass under way; or $2 (with the number
-- $3), if it lies between the mark and now, so that a mark never moves back and everything that the snapshot sees can
-- be read here; or this statement's own. Rows are found as in sweep_parts. Those of a pass under way are found by
-- their number: there are few others after its cursor, and to read all unsettled rows for each listing would take
-- longer the more there are.
WITH mark AS MATERIALIZED (
    SELECT * FROM outbox_settled WHERE part = $1::smallint
), choice AS MATERIALIZED (
    SELECT m.*,
        $2::pg_snapshot IS NOT NULL
        AND pg_catalog.pg_snapshot_xmax(m.settled) <= pg_catalog.pg_snapshot_xmax($2::pg_snapshot)
        AND pg_catalog.pg_snapshot_xmax($2::pg_snapshot) <= pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip($2::pg_snapshot) x
                        WHERE pg_catalog.pg_visible_in_snapshot(x, m.settled))
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip(pg_current_snapshot()) x
                        WHERE pg_catalog.pg_visible_in_snapshot(x, $2::pg_snapshot)) AS given
    FROM mark m
), begun AS MATERIALIZED (
    SELECT c.mark, c.settled, c.hi, c.running, c.pass IS NOT NULL AS resumed, c.cursor,
        CASE WHEN c.pass IS NOT NULL THEN c.pass WHEN c.given THEN $2::pg_snapshot
            ELSE pg_current_snapshot() END AS pass,
        -- A sequence that was set back takes nothing back.
        CASE WHEN c.pass IS NOT NULL THEN c.pass_hi WHEN c.given THEN greatest(c.hi, $3::bigint)
             ELSE greatest(c.hi, (SELECT h.high FROM outbox_high h)) END AS high
    FROM choice c
)
SELECT b.mark, b.settled::text, b.hi, b.resumed, b.pass::text, b.high,
    CASE WHEN b.resumed THEN ARRAY(
        SELECT r.seq FROM outbox_rows r
        WHERE r.part = $1::smallint AND r.seq > b.cursor AND r.seq <= b.high
          AND pg_catalog.pg_visible_in_snapshot(r.xid, b.pass)
          AND NOT pg_catalog.pg_visible_in_snapshot(r.xid, b.settled)
        ORDER BY r.part, r.seq LIMIT $4)
    ELSE ARRAY(
        SELECT o.seq FROM (
            SELECT x, x FROM pg_catalog.unnest(b.running) x
            UNION ALL
            SELECT pg_catalog.pg_snapshot_xmax(b.settled), pg_catalog.pg_snapshot_xmax(b.pass)
        ) ids(first, last)
        CROSS JOIN LATERAL (
            SELECT r.seq, r.xid FROM outbox_rows r
            WHERE r.part = $1::smallint AND r.xid >= ids.first AND r.xid <= ids.last
            ORDER BY r.xid
        ) o
        WHERE pg_catalog.pg_visible_in_snapshot(o.xid, b.pass) ORDER BY o.seq LIMIT $4) END
FROM begun b
