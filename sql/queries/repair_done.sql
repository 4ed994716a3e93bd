-- For the owner that relay_state names ($1 to $3), and nobody else, nor in a database that was promoted meanwhile. What was found
-- belongs to the last of the notes.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3
      AND r.timeline = ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer FOR SHARE OF r
), done AS (
    UPDATE outbox_repair SET done_at = clock_timestamp(), expected = $5, restored = greatest(restored, CASE WHEN id = $6 THEN $7::bigint ELSE 0 END),
        recalled = CASE WHEN id = $6 THEN $8::bigint ELSE 0 END, phantoms = CASE WHEN id = $6 THEN $11::bigint ELSE 0 END,
        first_mark = $9, last_entry = $10, refused = CASE WHEN id = $6 THEN $12::bigint ELSE 0 END
    FROM owner WHERE id = ANY ($4::bigint[])
)
SELECT EXISTS (SELECT FROM owner)
