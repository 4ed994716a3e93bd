-- Makes a row dead, for the owner in relay_state, however late this arrives: a later owner may have published the row.
-- An adoption waits for this statement, which therefore must not wait for a synchronous standby; a failover that loses
-- it brings the row back. Returns whether the caller is the owner, the snapshot, and whether the row exists.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR SHARE OF r
), row AS MATERIALIZED (
    SELECT * FROM outbox_rows
    WHERE part = outbox_part($4) AND seq = $5 AND id = $6 AND EXISTS (SELECT FROM owner)
), parked AS (
    INSERT INTO outbox_dead AS d (id, seq, row_seq, aggregate_type, aggregate_id, event_type, payload, headers,
        created_at, error, class, attempts)
    SELECT id, seq, seq, aggregate_type, aggregate_id, event_type, payload, headers,
        CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END, $7, $8, $9 FROM row
    -- Dead again after a retry: the first place in the aggregate's order stays. A repeated call changes nothing.
    ON CONFLICT (id) DO UPDATE SET error = excluded.error, class = excluded.class,
        attempts = d.attempts + excluded.attempts, dead_at = excluded.dead_at, retry_seq = NULL, dropped_at = NULL,
        row_seq = excluded.row_seq
    WHERE d.row_seq IS DISTINCT FROM excluded.row_seq
)
SELECT EXISTS (SELECT FROM owner), pg_current_snapshot()::text, EXISTS (SELECT FROM row)
