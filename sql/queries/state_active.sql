UPDATE relay_state
SET active_mode = $3::text, handover_lsn = coalesce(nullif($4::text, '0/0')::pg_lsn, handover_lsn),
    degraded = nullif($5::text, ''),
    changed_at = CASE WHEN active_mode = $3::text THEN changed_at ELSE clock_timestamp() END
FROM pg_catalog.set_config('synchronous_commit', 'local', true) -- see state_adopt
WHERE name = $1 AND epoch = $2
