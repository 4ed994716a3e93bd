-- Gives a copy an identity of its own. The timeline of another server says nothing about this one. The streams may have
-- events that the original has published since: the adoption compares them.
WITH compared AS (
    INSERT INTO outbox_reconcile (stream, recall, back, told) SELECT s.stream, true, true, true FROM outbox_stream s
)
UPDATE relay_state r SET source = gen_random_uuid(), system_identifier = s.system_identifier, database_oid = d.oid,
    timeline = NULL
FROM pg_control_system() s, pg_catalog.pg_database d
WHERE d.datname = pg_catalog.current_database()
