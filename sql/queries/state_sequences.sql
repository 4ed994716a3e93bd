-- Sequences are not replicated with their tables, and a dump may lack them. Raises each to the highest number in its
-- table, if the role has the right.
SELECT pg_catalog.setval(t.numbers, t.newest) FROM (
    SELECT 'outbox_mark_id_seq'::regclass AS numbers, pg_catalog.max(id) AS newest FROM outbox_mark
    UNION ALL SELECT 'outbox_reconcile_id_seq'::regclass, pg_catalog.max(id) FROM outbox_reconcile
) t WHERE CASE WHEN pg_catalog.has_sequence_privilege(t.numbers::oid, 'UPDATE'::text)
    AND pg_catalog.has_sequence_privilege(t.numbers::oid, 'SELECT'::text)
    THEN t.newest > coalesce(pg_catalog.pg_sequence_last_value(t.numbers), 0::bigint) END
