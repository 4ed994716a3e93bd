-- Writes a snapshot of now for the owner in relay_state, and returns it with the highest number. The sequence is read
-- after the snapshot was taken, so no row that it sees has a higher number. The commit does not wait for a synchronous
-- standby: see state_adopt.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR SHARE OF r
), written AS (
    INSERT INTO outbox_mark (part, epoch, pass, pass_hi)
    SELECT -1, $2, pg_current_snapshot(), greatest(h.high, (SELECT pg_catalog.max(m.hi) FROM outbox_settled m))
    FROM owner, outbox_high h
    RETURNING pass, pass_hi
)
SELECT pass::text, pass_hi FROM written
