INSERT INTO outbox_dead AS d (id, seq, aggregate_type, aggregate_id, event_type, payload, headers, created_at, error, class, attempts)
VALUES ($1, $2, $3, $4, $5, $6::text::jsonb, $7::text::jsonb, $8, $9, $10, $11)
ON CONFLICT (id) DO UPDATE SET error = excluded.error, class = excluded.class,
    attempts = d.attempts + excluded.attempts, dead_at = excluded.dead_at, retry_seq = NULL
