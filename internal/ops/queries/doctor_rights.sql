-- What the role lacks of what a relay does: rights on tables ('' for none), making history's partitions, making the publication
-- again, and seeing the transactions of others.
SELECT coalesce((SELECT pg_catalog.string_agg(p || ' on ' || t, ', ' ORDER BY t, p)
                 FROM (VALUES ('outbox', '{SELECT,INSERT,DELETE}'::text[]), ('outbox_history', '{SELECT,INSERT,DELETE}'), ('outbox_part', '{SELECT,UPDATE}'),
                              ('outbox_stream', '{SELECT,INSERT,UPDATE}'), ('outbox_dead', '{SELECT,INSERT,UPDATE,DELETE}'), ('outbox_loss', '{SELECT,INSERT,UPDATE,DELETE}'),
                              ('relay_state', '{SELECT,INSERT,UPDATE}')) AS need(t, ps), pg_catalog.unnest(ps) AS p
                 WHERE NOT pg_catalog.has_table_privilege(t, p)), ''),
       pg_catalog.pg_has_role(h.relowner, 'USAGE') AND pg_catalog.has_schema_privilege(h.relnamespace, 'CREATE'),
       pg_catalog.pg_has_role(o.relowner, 'USAGE') AND pg_catalog.has_database_privilege(current_database(), 'CREATE'),
       pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'),
       -- Tables that hide rows from the role, '' for none.
       coalesce((SELECT pg_catalog.string_agg(t, ', ' ORDER BY t)
                 FROM pg_catalog.unnest('{outbox,outbox_history,outbox_part,outbox_stream,outbox_dead,outbox_loss,relay_state,orders,credit_accounts,credit_entries}'::text[]) AS t
                 WHERE pg_catalog.row_security_active(t)), '')
FROM pg_class o, pg_class h WHERE o.oid = 'outbox'::regclass::oid AND h.oid = 'outbox_history'::regclass::oid
