-- Locks the part ($4) and numbers the claim, for the owner in relay_state. A session does not outlive its server, so
-- one check is enough. Returns whether the caller is the owner, and the number; NULL if another session has the part.
-- The number fences: the gate refuses lower ones. It is on disk here when it is used, and does not wait for a
-- synchronous standby: a number that a failover takes back is used again with another nonce, which the gate refuses;
-- the next passes.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3)
)
SELECT EXISTS (SELECT FROM owner), (
    SELECT CASE WHEN pg_catalog.pg_try_advisory_lock($4::bigint) THEN pg_catalog.nextval('outbox_claim') END FROM owner)
