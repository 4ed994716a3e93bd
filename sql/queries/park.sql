-- Parks a row for the owner that relay_state names, and for nobody else, however late this arrives: whoever has adopted since
-- may have published the row. An adoption waits for a park under way. So the park must not wait for a synchronous standby,
-- which may be gone; a failover that forgets it brings the row back.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true) WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3 FOR SHARE OF r
), gone AS (
    DELETE FROM outbox
    WHERE part = (pg_catalog.hashtextextended($4::text, 0) & 15::bigint)::smallint AND seq = $5 AND id = $6 AND EXISTS (SELECT FROM owner)
    RETURNING seq, id, aggregate_type, aggregate_id, event_type, payload, headers,
        CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END AS created_at
), parked AS (
    INSERT INTO outbox_dead AS d (id, seq, aggregate_type, aggregate_id, event_type, payload, headers, created_at, error, class, attempts)
    SELECT id, seq, aggregate_type, aggregate_id, event_type, payload, headers, created_at, $7, $8, $9 FROM gone
    -- Parked again after a retry: the first place in the aggregate's order stays.
    ON CONFLICT (id) DO UPDATE SET error = excluded.error, class = excluded.class,
        attempts = d.attempts + excluded.attempts, dead_at = excluded.dead_at, retry_seq = NULL
)
SELECT pg_current_snapshot()::text, (SELECT count(*) FROM owner), (SELECT count(*) FROM gone)
