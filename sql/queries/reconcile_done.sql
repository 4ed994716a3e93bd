-- For the owner in relay_state. The last of the notes gets the counts.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR SHARE OF r
), done AS (
    UPDATE outbox_reconcile SET done_at = clock_timestamp(), expected = $5,
        restored = CASE WHEN id = $6 THEN greatest(restored, $7::bigint) ELSE 0 END,
        recalled = CASE WHEN id = $6 THEN $8::bigint ELSE 0 END, first_mark = $9, last_entry = $10,
        phantoms = CASE WHEN id = $6 THEN $11::bigint ELSE 0 END,
        refused = CASE WHEN id = $6 THEN $12::bigint ELSE 0 END
    FROM owner WHERE id = ANY ($4::bigint[])
)
SELECT EXISTS (SELECT FROM owner)
