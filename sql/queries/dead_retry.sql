-- Inserts a new row, which is unsettled. The old row stays dead until the new one is published, or dead.
WITH back AS (
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
    SELECT id, aggregate_type, aggregate_id, event_type, payload, headers, created_at
    FROM outbox_dead WHERE id = $1 AND retry_seq IS NULL AND dropped_at IS NULL AND payload IS NOT NULL
    RETURNING id, seq
)
UPDATE outbox_dead d SET retry_seq = back.seq FROM back WHERE d.id = back.id
