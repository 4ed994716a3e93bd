-- The first row of the part cannot be read: park it without sending its payload to the client, and without the payload
-- at all ($3 false) if even the server cannot copy it.
WITH gone AS (
    DELETE FROM outbox WHERE ctid = ANY (ARRAY(SELECT ctid FROM outbox WHERE part = $1 ORDER BY seq LIMIT 1))
    RETURNING seq, id, aggregate_type, aggregate_id, event_type, payload, headers,
        CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END AS created_at
)
INSERT INTO outbox_dead AS d (id, seq, aggregate_type, aggregate_id, event_type, payload, headers, created_at, error, class, attempts)
SELECT id, seq, aggregate_type, aggregate_id, event_type, CASE WHEN $3::boolean THEN payload END, CASE WHEN $3::boolean THEN headers END,
    created_at, $2, 'unreadable', 1
FROM gone
ON CONFLICT (id) DO UPDATE SET error = excluded.error, class = excluded.class,
    attempts = d.attempts + 1, dead_at = excluded.dead_at, retry_seq = NULL
RETURNING id, seq, aggregate_type, aggregate_id
