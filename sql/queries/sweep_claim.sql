-- Locks the row of the first of the parts $4 that no other session has, and numbers the claim, for the owner in
-- relay_state. A session does not outlive its server, so one check is enough. Returns whether the caller is the owner,
-- the part and the number; NULL if other sessions have all parts. The lock ends with the transaction, and leaves no
-- dead row. The number fences: the gate refuses lower ones. A number that a crash or a failover takes back is used
-- again by another session, with another nonce, which the gate refuses; the next passes. No commit of a claim waits for
-- a synchronous standby, see sweep_settle.
WITH owner AS MATERIALIZED (
    SELECT FROM relay_state r, pg_catalog.set_config('synchronous_commit', 'local', true)
    WHERE r.name = $1 AND outbox_owned(r, $2, $3)
), locked AS MATERIALIZED (
    SELECT p.part FROM outbox_part p, pg_catalog.unnest($4::smallint[]) WITH ORDINALITY t(part, n)
    WHERE p.part = t.part AND EXISTS (SELECT FROM owner)
    ORDER BY t.n LIMIT 1 FOR UPDATE OF p SKIP LOCKED
)
SELECT EXISTS (SELECT FROM owner), l.part::integer,
    CASE WHEN l.part IS NOT NULL THEN pg_catalog.nextval('outbox_claim') END
FROM (SELECT) one LEFT JOIN locked l ON true
