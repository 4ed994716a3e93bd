-- Gives a type $4 streams, for the owner that relay_state names, and for nobody else. What is settled now was published to as many as
-- before: so all parts have to have the same mark, of this owner, and no pass under way. No mode is active then. Not waited for by a synchronous standby, as
-- in state_adopt. Returns whether the owner is that one, whether it was done, and whether there is a standby to wait for: see
-- mark_replicated.
WITH owner AS MATERIALIZED (
    SELECT r.name, r.shards FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3
      AND r.timeline = ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer FOR UPDATE OF r
), ended AS (
    INSERT INTO outbox_layout (shards, epoch, settled, hi)
    SELECT o.shards, $2, m.settled, m.hi
    FROM owner o, outbox_mark m
    WHERE m.part = (-1)::smallint AND m.epoch = $2 AND m.id = (SELECT pg_catalog.max(s.mark) FROM outbox_settled s)
      AND NOT EXISTS (SELECT FROM outbox_settled s WHERE s.mark <> m.id OR s.pass IS NOT NULL)
    RETURNING id
), changed AS (
    UPDATE relay_state r SET shards = $4::smallint, shards_epoch = $2, active_mode = 'standby' FROM ended WHERE r.name = $1
    RETURNING r.name
)
SELECT EXISTS (SELECT FROM owner), EXISTS (SELECT FROM changed), pg_catalog.current_setting('synchronous_standby_names') <> ''
