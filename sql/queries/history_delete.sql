-- Of the $4 rows of part $1 after number $3, deletes those that mark $2 settles, and the newest mark too, which it
-- does unless numbers or transactions have started over. Returns how many rows these were, the last of them, and the
-- last number up to which no visible row is left.
WITH page AS MATERIALIZED (
    SELECT o.seq, pg_catalog.pg_visible_in_snapshot(o.xid, m.settled) AND o.seq <= n.hi
        AND pg_catalog.pg_visible_in_snapshot(o.xid, n.settled) AS held
    FROM outbox_mark m
    JOIN outbox_settled n ON n.part = $1::smallint
    CROSS JOIN LATERAL (
        SELECT seq, xid FROM outbox_rows WHERE part = $1::smallint AND seq > $3 AND seq <= m.hi ORDER BY seq LIMIT $4) o
    WHERE m.id = $2
), gone AS (
    DELETE FROM outbox
    WHERE outbox_part(aggregate_id) = $1::smallint AND seq = ANY (ARRAY(SELECT seq FROM page WHERE held))
)
SELECT count(*), coalesce(pg_catalog.max(seq), $3),
    coalesce(pg_catalog.min(seq) FILTER (WHERE NOT held) - 1, CASE WHEN count(*) = $4 THEN pg_catalog.max(seq) END,
        greatest($3, (SELECT hi FROM outbox_mark WHERE id = $2)), $3)
FROM page
