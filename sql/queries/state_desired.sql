-- The commit does not wait for a synchronous standby: an operator may switch because one is gone.
UPDATE relay_state SET desired_mode = $2, changed_at = clock_timestamp()
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE name = $1
