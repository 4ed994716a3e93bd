-- $4: $3 was taken after what an unknown barrier stands for, and replaces it. The commit does not wait for a
-- synchronous standby, see state_adopt: one that is gone must not keep the WAL budget from acting.
UPDATE relay_state
SET slot_barrier = CASE WHEN $4::boolean AND slot_barrier = 9223372036854775807 THEN $3::bigint
    ELSE greatest(slot_barrier, $3::bigint) END
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE name = $1 AND epoch = $2
