-- This transaction writes unsettled rows again, in their order.
WITH owed AS (
    DELETE FROM outbox WHERE xid::xid8 <> '3' RETURNING *
), again AS (
    INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
    SELECT id, aggregate_type, aggregate_id, event_type, payload, headers, created_at FROM owed ORDER BY seq
    RETURNING id, seq
)
UPDATE outbox_dead d SET retry_seq = again.seq
FROM again WHERE again.id = d.id AND EXISTS (SELECT FROM owed WHERE owed.id = d.id AND owed.seq = d.retry_seq)
