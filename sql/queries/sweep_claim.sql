-- Takes the part's lock ($4) and numbers the claim, for the owner that relay_state names, and for nobody else, nor where the
-- database has been promoted since it was adopted: then rows are owed again that are published, and only an adoption finds out
-- which. A session does not outlive its server, so asking once is enough. Returns whether the owner is that one, and the
-- number; NULL: somebody else has the part. The number fences: the gate refuses lower ones. It is on disk here when it is used,
-- and does not wait for a synchronous standby: a number that a failover takes back is used again with another nonce, which the
-- gate refuses, and the next one passes.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND r.epoch = $2 AND r.nonce = $3
      AND r.timeline = ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer
)
SELECT EXISTS (SELECT FROM owner),
    (SELECT CASE WHEN pg_catalog.pg_try_advisory_lock($4::bigint) THEN pg_catalog.nextval('outbox_claim') END FROM owner)
