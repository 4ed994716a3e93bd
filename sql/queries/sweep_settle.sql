-- Writes a mark of part $4 for the owner in relay_state. An adoption waits for this statement, which therefore must
-- not wait for a synchronous standby. It writes nothing if the part's newest mark is not $5: marks only move forward.
-- Returns whether the caller is the owner, the mark's id if it was written, and whether there is a standby to wait
-- for: see mark_replicated.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3) FOR SHARE OF r
), moved AS (
    INSERT INTO outbox_mark (part, epoch, settled, hi, pass, pass_hi, cursor, entries, prefix, shards)
    SELECT $4::smallint, $2, $6::pg_snapshot, $7, $8::pg_snapshot, $9, $10, $11::jsonb, n.prefix, n.shards
    FROM owner, outbox_mark_until($4::smallint, 9223372036854775807) n
    WHERE $5 >= n.id
    RETURNING id
)
SELECT EXISTS (SELECT FROM owner), (SELECT id FROM moved),
    pg_catalog.current_setting('synchronous_standby_names') <> ''
