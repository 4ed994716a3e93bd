-- The counter fences: whoever claims later has the higher number, and the gate refuses lower ones. SKIP LOCKED: a claim
-- of the same part that is under way is not waited for. Nor is a synchronous standby: a number that a failover takes back
-- is used again with another nonce, which the gate refuses, and the next one passes.
UPDATE outbox_part SET claim = claim + 1
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE part = (SELECT part FROM outbox_part WHERE part = $1 FOR UPDATE SKIP LOCKED)
RETURNING claim
