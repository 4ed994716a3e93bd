WITH gone AS (
    DELETE FROM outbox
    WHERE part = (hashtextextended($1::text, 0) & 15)::smallint AND seq = $2
    RETURNING seq, id, aggregate_type, aggregate_id, event_type, payload, headers,
        CASE WHEN isfinite(created_at) THEN created_at ELSE clock_timestamp() END AS created_at
), parked AS (
    INSERT INTO outbox_dead AS d (id, seq, aggregate_type, aggregate_id, event_type, payload, headers, created_at, error, class, attempts)
    SELECT id, seq, aggregate_type, aggregate_id, event_type, payload, headers, created_at, $3, $4, $5 FROM gone
    -- Parked again after a retry: the first place in the aggregate's order stays.
    ON CONFLICT (id) DO UPDATE SET error = excluded.error, class = excluded.class,
        attempts = d.attempts + excluded.attempts, dead_at = excluded.dead_at, retry_seq = NULL
)
SELECT pg_current_snapshot()::text, coalesce(array_agg(seq), '{}') FROM gone
