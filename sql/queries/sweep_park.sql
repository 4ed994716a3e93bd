-- Makes row $5 of part $4 dead, for the owner in relay_state: a later owner may have published it. An adoption waits
-- for this statement, which therefore must not wait for a synchronous standby. The row stays, and the dead event is as
-- the row is now; without its payload and headers ($9 false) if the server cannot copy them, and without its payload if
-- the client cannot read what identifies it: a retry would insert other text. Returns whether the caller is the
-- owner, and what identifies the row, if it exists.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR SHARE OF r
), row AS MATERIALIZED (
    -- By the index of numbers, which has this order: see sweep_parts.
    SELECT *, outbox_readable(aggregate_id) AS aggregate, outbox_readable(event_type::text) AS type FROM outbox_rows
    WHERE part = $4::smallint AND seq >= $5 AND seq <= $5 AND EXISTS (SELECT FROM owner) ORDER BY seq
), parked AS (
    INSERT INTO outbox_dead AS d (id, seq, row_seq, aggregate_type, aggregate_id, event_type, payload, headers,
        created_at, error, class, attempts)
    SELECT id, seq, seq, aggregate_type, aggregate, type,
        CASE WHEN $9::boolean AND aggregate_id = aggregate AND event_type::text = type THEN payload END,
        CASE WHEN $9::boolean THEN headers END,
        CASE WHEN pg_catalog.isfinite(created_at) THEN created_at ELSE clock_timestamp() END, $6, $7, $8
    FROM row
    -- Dead again after a retry: the first place in the aggregate's order stays.
    ON CONFLICT (id) DO UPDATE SET error = excluded.error, class = excluded.class,
        attempts = d.attempts + excluded.attempts, dead_at = excluded.dead_at, retry_seq = NULL, dropped_at = NULL,
        row_seq = excluded.row_seq
    RETURNING d.id, d.aggregate_type, d.aggregate_id
)
SELECT EXISTS (SELECT FROM owner), p.id, p.aggregate_type, p.aggregate_id
FROM (SELECT) one LEFT JOIN parked p ON true
