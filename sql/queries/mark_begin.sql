-- Writes a snapshot of now for the owner that relay_state names, and for nobody else, and returns it; then the end of the WAL,
-- which is behind the commit of all that it sees. It does not wait for a synchronous standby, as in state_adopt. The
-- sequence is read when the snapshot is there already, so that no row that it sees has a higher number; one that somebody
-- has set back takes nothing back.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3
      AND r.timeline = ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer FOR SHARE OF r
), written AS (
    INSERT INTO outbox_mark (part, epoch, pass, pass_hi)
    SELECT -1, $2, pg_current_snapshot(),
        greatest(CASE WHEN s.is_called THEN s.last_value ELSE s.last_value - 1 END, (SELECT pg_catalog.max(m.hi) FROM outbox_settled m))
    FROM owner, outbox_seq_seq s
    RETURNING pass, pass_hi
)
SELECT pass::text, pass_hi, pg_current_wal_insert_lsn()::text FROM written
