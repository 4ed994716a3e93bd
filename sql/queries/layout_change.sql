-- Names streams with prefix $4 and gives each type $5 of them, for the owner in relay_state. Events that are settled
-- now were published under the previous layout: all parts must have the same mark, of this owner, and no pass under
-- way. No mode is active then. The commit does not wait for a synchronous standby: see state_adopt. Returns whether the
-- caller is the owner, whether it was done, and whether there is a standby to wait for: see mark_replicated.
WITH owner AS MATERIALIZED (
    SELECT r.name FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR UPDATE OF r
), changed AS (
    INSERT INTO outbox_mark (part, epoch, settled, hi, prefix, shards)
    SELECT -1, $2, m.settled, m.hi, $4, $5::smallint
    FROM owner, outbox_mark m
    WHERE m.part = (-1)::smallint AND m.epoch = $2 AND m.id = (SELECT pg_catalog.max(s.mark) FROM outbox_settled s)
      AND NOT EXISTS (SELECT FROM outbox_settled s WHERE s.mark <> m.id OR s.pass IS NOT NULL)
    RETURNING id
), paused AS (
    UPDATE relay_state r SET active_mode = 'standby' FROM changed WHERE r.name = $1
)
SELECT EXISTS (SELECT FROM owner), EXISTS (SELECT FROM changed),
    pg_catalog.current_setting('synchronous_standby_names') <> ''
