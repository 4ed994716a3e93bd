-- Everything older than $3 has ended, and was swept. An unknown barrier is older than that.
UPDATE relay_state SET slot_barrier = NULL
FROM pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE name = $1 AND epoch = $2 AND (slot_barrier <= $3 OR slot_barrier = 9223372036854775807)
