-- Of the rows $2 of part $1 those that exist and are not dead, in order, about $3 bytes, and always at least one row:
-- as they are now, with what was written to them since. Each row in an order that only the index of numbers has: see
-- sweep_parts; with equality, or sorted as a whole, the whole part would be read.
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload::text, headers::text,
    CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END
FROM (
    SELECT r.*, pg_catalog.sum(r.bytes) OVER (ORDER BY r.seq ROWS UNBOUNDED PRECEDING) - r.bytes AS before
    FROM (
        SELECT o.* FROM pg_catalog.unnest($2::bigint[]) AS listed(seq)
        CROSS JOIN LATERAL (
            SELECT * FROM outbox_live n WHERE n.part = $1::smallint AND n.seq >= listed.seq AND n.seq <= listed.seq
            ORDER BY n.seq
        ) o
        OFFSET 0
    ) r
) w WHERE before < $3
ORDER BY seq
