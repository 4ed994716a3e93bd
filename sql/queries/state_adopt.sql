-- Committed without waiting for a synchronous standby: a standby that is gone must not keep a relay from taking over. A
-- failover may take the number back; the gates know the higher one and are overtaken.
UPDATE relay_state r
SET epoch = $3, nonce = $4, owner = $5, changed_at = clock_timestamp(), degraded = NULL,
    system_identifier = s.system_identifier, timeline = c.timeline_id
FROM pg_control_system() s, pg_control_checkpoint() c, set_config('synchronous_commit', 'local', true)
WHERE r.name = $1 AND r.epoch = $2
