-- Makes $4 with the number $5 to the mark of every part, behind mark_lock in one transaction, for the owner that relay_state
-- names and for nobody else: an adoption waits for this, or makes it come to nothing. Nor is it written if the mark of a part
-- has something that it has not: a statement may arrive late. Returns whether the owner is that one, whether it was
-- written, and whether there is a standby to wait for: see mark_replicated.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3
      AND r.timeline = ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer FOR SHARE OF r
), moved AS (
    INSERT INTO outbox_mark (part, epoch, settled, hi, mode, entries)
    SELECT -1, $2, $4::pg_snapshot, $5::bigint, $6, $7::jsonb
    FROM owner
    WHERE NOT EXISTS (
        SELECT FROM outbox_settled m CROSS JOIN LATERAL (VALUES (m.settled), (m.pass)) AS had(seen)
        WHERE pg_catalog.pg_snapshot_xmax(had.seen) > pg_catalog.pg_snapshot_xmax($4::pg_snapshot)
           OR EXISTS (SELECT FROM pg_catalog.pg_snapshot_xip($4::pg_snapshot) x WHERE pg_catalog.pg_visible_in_snapshot(x, had.seen)))
    RETURNING id
)
SELECT EXISTS (SELECT FROM owner), EXISTS (SELECT FROM moved), pg_catalog.current_setting('synchronous_standby_names') <> ''
