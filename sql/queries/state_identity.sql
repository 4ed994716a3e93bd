-- Gives a copy an identity of its own. The timeline of another server says nothing about this one. The streams may have
-- events that the original has published since: the adoption compares them.
WITH compared AS (
    INSERT INTO outbox_reconcile (stream, recall, back, told) SELECT s.stream, true, true, true FROM outbox_stream s
)
UPDATE relay_state r SET source = gen_random_uuid(), system_identifier = p.system_identifier,
    database_oid = p.database_oid, first_migration = p.first_migration, timeline = NULL
FROM outbox_place p
