-- One batch of a part, at most $2 rows and about $3 bytes (always at least one row). ctid = ANY (ARRAY(...)), because an
-- IN (... LIMIT) may be evaluated again and delete beyond the limit. No SKIP LOCKED on the rows: skipping one would reorder its aggregate.
WITH pick AS MATERIALIZED (
    SELECT w.ctid FROM (
        SELECT o.ctid, sum(o.bytes) OVER (ORDER BY o.seq ROWS UNBOUNDED PRECEDING) - o.bytes AS before
        FROM outbox o WHERE o.part = $1 ORDER BY o.seq LIMIT $2
    ) w WHERE w.before < $3
)
DELETE FROM outbox WHERE ctid = ANY (ARRAY(SELECT ctid FROM pick))
RETURNING seq, id, aggregate_type, aggregate_id, event_type, payload::text, headers::text,
    CASE WHEN isfinite(created_at) THEN created_at ELSE clock_timestamp() END
