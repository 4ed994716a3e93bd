-- Gives a copy an identity of its own.
UPDATE relay_state r SET source = gen_random_uuid(), system_identifier = s.system_identifier
FROM pg_control_system() s
