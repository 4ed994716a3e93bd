-- Rows of part $1 that exist and are not dead, in order, about $2 bytes, and always at least one row: as they are now,
-- with what was written to them since. They are those between the numbers $3 and $4, of several ranges, that the
-- snapshot $5 sees and $6 does not; all of them, if $5 is NULL. Each range in an order that only the index of numbers
-- has: see sweep_parts; with equality, or sorted as a whole, the whole part would be read.
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload::text, headers::text,
    CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END
FROM (
    SELECT r.*, pg_catalog.sum(r.bytes) OVER (ORDER BY r.seq ROWS UNBOUNDED PRECEDING) - r.bytes AS before
    FROM (
        SELECT o.* FROM unnest($3::bigint[], $4::bigint[]) AS ranges(first, last)
        CROSS JOIN LATERAL (
            SELECT * FROM outbox_live n
            WHERE n.part = $1::smallint AND n.seq >= ranges.first AND n.seq <= ranges.last
              AND ($5::pg_snapshot IS NULL OR pg_catalog.pg_visible_in_snapshot(n.xid, $5::pg_snapshot)
                  AND NOT pg_catalog.pg_visible_in_snapshot(n.xid, $6::pg_snapshot))
            ORDER BY n.seq
        ) o
        OFFSET 0
    ) r
) w WHERE before < $2
ORDER BY seq
