-- Not waited for by a synchronous standby, as in state_adopt.
SELECT pg_catalog.set_config('posthaste.marks', 'on', true), pg_catalog.set_config('synchronous_commit', 'local', true)
