-- Names streams with prefix $4, for the owner in relay_state, if nothing was ever published. Returns whether the
-- caller is the owner, and whether it was done.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR UPDATE OF r
), renamed AS (
    INSERT INTO outbox_mark (part, epoch, settled, hi, pass, pass_hi, cursor, mode, prefix, shards)
    SELECT m.part, m.epoch, m.settled, m.hi, m.pass, m.pass_hi, m.cursor, m.mode, $4, m.shards
    FROM owner, outbox_mark m
    WHERE m.id IN (SELECT s.mark FROM outbox_settled s) AND NOT EXISTS (SELECT FROM outbox_stream)
    ORDER BY m.id
    RETURNING id
)
SELECT EXISTS (SELECT FROM owner), EXISTS (SELECT FROM renamed)
