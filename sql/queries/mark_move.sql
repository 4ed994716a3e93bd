-- Makes $4 with the number $5 the mark of every part, after mark_lock in one transaction, for the owner in
-- relay_state: an adoption waits for this statement, or turns it into nothing. A statement may arrive late: it writes
-- nothing if a part has no mark, or one that settles something that the new one would not. Returns whether the caller
-- is the owner, whether the mark was written, and whether there is a standby to wait for: see mark_replicated.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR SHARE OF r
), moved AS (
    INSERT INTO outbox_mark (part, epoch, settled, hi, mode, entries, prefix, shards)
    SELECT -1, $2, $4::pg_snapshot, $5::bigint, $6, $7::jsonb, l.prefix, l.shards
    FROM owner, outbox_layout l
    WHERE 16 = (SELECT count(*) FROM outbox_settled m WHERE NOT EXISTS (
        SELECT FROM (VALUES (m.settled), (m.pass)) AS had(seen)
        WHERE pg_catalog.pg_snapshot_xmax(had.seen) > pg_catalog.pg_snapshot_xmax($4::pg_snapshot)
           OR EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip($4::pg_snapshot) x
                      WHERE pg_catalog.pg_visible_in_snapshot(x, had.seen))))
    RETURNING id
)
SELECT EXISTS (SELECT FROM owner), EXISTS (SELECT FROM moved),
    pg_catalog.current_setting('synchronous_standby_names') <> ''
