UPDATE relay_state SET desired_mode = $2, changed_at = clock_timestamp()
FROM pg_catalog.set_config('synchronous_commit', 'local', true) -- as in state_adopt: to fall back is what one wants just then
WHERE name = $1
