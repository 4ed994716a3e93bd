-- The counter fences: whoever claims later has the higher number, and the gate refuses lower ones. SKIP LOCKED: a claim
-- of the same part that is under way is not waited for.
UPDATE outbox_part SET claim = claim + 1
WHERE part = (SELECT part FROM outbox_part WHERE part = $1 FOR UPDATE SKIP LOCKED)
RETURNING claim
