-- Of the rows $2 of part $1 those that are still there and not parked, in order, about $3 bytes (always at least one row). As
-- they are now: what somebody has written to them meanwhile is in them. ORDER BY and OFFSET 0 inside: see sweep_parts; with
-- equality, or sorted as a whole, the part would be gone through.
SELECT seq, id, aggregate_type, aggregate_id, event_type, payload::text, headers::text,
    CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END
FROM (
    SELECT r.*, pg_catalog.sum(r.bytes) OVER (ORDER BY r.seq ROWS UNBOUNDED PRECEDING) - r.bytes AS before
    FROM (
        SELECT o.* FROM pg_catalog.unnest($2::bigint[]) AS listed(seq)
        CROSS JOIN LATERAL (
            SELECT * FROM outbox n WHERE n.part = $1::smallint AND n.seq >= listed.seq AND n.seq <= listed.seq ORDER BY n.seq
        ) o
        WHERE NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = o.id AND d.row_seq = o.seq OFFSET 0)
        OFFSET 0
    ) r
) w WHERE before < $3
ORDER BY seq
