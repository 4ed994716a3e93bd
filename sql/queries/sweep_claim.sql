-- Takes the part's lock and numbers the claim; NULL: somebody else has the part. The number fences: the gate refuses lower
-- ones. It is on disk here when it is used, and does not wait for a synchronous standby: a number that a failover takes back
-- is used again with another nonce, which the gate refuses, and the next one passes.
SELECT CASE WHEN pg_catalog.pg_try_advisory_lock($1::bigint) THEN pg_catalog.nextval('outbox_claim') END
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
