-- Committed without waiting for a synchronous standby: a standby that is gone must not keep a relay from taking over. A
-- failover may take the number back; the gates know the higher one and are overtaken. It may take transaction ids back, too:
-- a barrier of another timeline is an unknown one.
UPDATE relay_state r
SET epoch = $3, nonce = $4, owner = $5, changed_at = clock_timestamp(), degraded = NULL,
    slot_barrier = CASE WHEN slot_barrier IS NOT NULL AND timeline IS DISTINCT FROM t.timeline_id THEN 9223372036854775807 ELSE slot_barrier END,
    system_identifier = s.system_identifier, timeline = t.timeline_id
FROM pg_control_system() s,
    -- The timeline that is written now: the control file still names the old one for a while after a promotion.
    (SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::integer AS timeline_id) t,
    set_config('synchronous_commit', 'local', true)
WHERE r.name = $1 AND r.epoch = $2
