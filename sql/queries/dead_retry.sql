-- The row that was parked makes place for a new one, which is owed.
WITH gone AS (
    DELETE FROM outbox o USING outbox_dead d
    WHERE d.id = $1 AND d.retry_seq IS NULL AND d.payload IS NOT NULL
      AND o.part = (pg_catalog.hashtextextended(d.aggregate_id, 0) & 15::bigint)::smallint AND o.seq = d.row_seq AND o.id = d.id
), back AS (
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
    SELECT id, aggregate_type, aggregate_id, event_type, payload, headers, created_at
    FROM outbox_dead WHERE id = $1 AND retry_seq IS NULL AND payload IS NOT NULL
    RETURNING id, seq
)
UPDATE outbox_dead d SET retry_seq = back.seq FROM back WHERE d.id = back.id
