-- Gives a copy an identity of its own. The timeline of another server says nothing about this one.
UPDATE relay_state r SET source = gen_random_uuid(), system_identifier = s.system_identifier, database_oid = d.oid,
    timeline = NULL
FROM pg_control_system() s, pg_catalog.pg_database d
WHERE d.datname = pg_catalog.current_database()
