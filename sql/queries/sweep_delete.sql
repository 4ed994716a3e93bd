-- One batch of a part, at most $2 rows and about $3 bytes (always at least one row): everything up to the last of them. Not
-- by place (ctid): a row that somebody updates while this waits for it has moved, would be passed over, and the next one of
-- its aggregate would overtake it. No SKIP LOCKED on the rows for the same reason. Both parts see one snapshot, so that
-- nothing else is up to there.
WITH pick AS MATERIALIZED (
    SELECT w.seq FROM (
        SELECT o.seq, pg_catalog.sum(o.bytes) OVER (ORDER BY o.seq ROWS UNBOUNDED PRECEDING) - o.bytes AS before
        FROM outbox o WHERE o.part = $1 ORDER BY o.seq LIMIT $2
    ) w WHERE w.before < $3
)
DELETE FROM outbox WHERE part = $1 AND seq <= (SELECT pg_catalog.max(seq) FROM pick)
RETURNING seq, id, aggregate_type, aggregate_id, event_type, payload::text, headers::text,
    CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END
