-- Gives a copy an identity of its own. Committed without waiting for a synchronous standby, as in state_adopt.
UPDATE relay_state r SET source = gen_random_uuid(), system_identifier = s.system_identifier
FROM pg_control_system() s, pg_catalog.set_config('synchronous_commit', 'local', true)
WHERE r.system_identifier <> s.system_identifier
