-- Poll mode has another name in the table where a type has several streams: see there.
UPDATE relay_state
SET active_mode = CASE WHEN $3::text = 'poll' AND shards > 1 THEN 'poll.n' ELSE $3::text END,
    handover_lsn = coalesce(nullif($4::text, '0/0')::pg_lsn, handover_lsn), degraded = nullif($5::text, ''),
    changed_at = CASE WHEN pg_catalog.split_part(active_mode, '.', 1) = $3::text THEN changed_at ELSE clock_timestamp() END
FROM pg_catalog.set_config('synchronous_commit', 'local', true) -- as in state_adopt
WHERE name = $1 AND epoch = $2
