-- Writes a mark of part $4 for the owner that relay_state names, and for nobody else. An adoption waits for a mark under way,
-- so that must not wait for a synchronous standby. Nor is it written where another mark than $5 is the part's newest: marks
-- move only forward. Returns whether the owner is that one, the mark's number if it was written, and whether there is a
-- standby to wait for: see mark_replicated.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3
      AND r.timeline = ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer FOR SHARE OF r
), moved AS (
    INSERT INTO outbox_mark (part, epoch, settled, hi, pass, pass_hi, cursor, mode, entries)
    SELECT $4::smallint, $2, $6::pg_snapshot, $7, $8::pg_snapshot, $9, $10, 'poll', $11::jsonb
    FROM owner
    WHERE $5 >= greatest(
        (SELECT n.id FROM outbox_mark n WHERE n.part >= $4::smallint AND n.part <= $4::smallint AND n.settled IS NOT NULL ORDER BY n.part DESC, n.id DESC LIMIT 1),
        (SELECT n.id FROM outbox_mark n WHERE n.part >= -1 AND n.part <= -1 AND n.settled IS NOT NULL ORDER BY n.part DESC, n.id DESC LIMIT 1)
    )
    RETURNING id
)
SELECT EXISTS (SELECT FROM owner), (SELECT id FROM moved), pg_catalog.current_setting('synchronous_standby_names') <> ''
