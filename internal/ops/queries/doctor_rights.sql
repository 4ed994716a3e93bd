-- The relay's rights that the role lacks: on tables and sequences ('' for none), to create the publication, and to
-- see the transactions of others.
SELECT coalesce((
        SELECT pg_catalog.string_agg(p || ' on ' || t, ', ' ORDER BY t, p)
        FROM (VALUES ('outbox', '{SELECT,INSERT,DELETE}'::text[]), ('outbox_mark', '{SELECT,INSERT,DELETE}'),
            ('outbox_history', '{SELECT}'), ('outbox_backlog', '{SELECT}'), ('outbox_settled', '{SELECT}'),
            ('outbox_live', '{SELECT}'), ('outbox_rows', '{SELECT}'), ('outbox_high', '{SELECT}'),
            ('outbox_layout', '{SELECT}'), ('outbox_leader', '{SELECT}'),
            ('outbox_place', '{SELECT}'), ('outbox_claim', '{USAGE}'), ('outbox_part', '{SELECT,UPDATE}'),
            ('outbox_stream', '{SELECT,INSERT,UPDATE}'), ('outbox_dead', '{SELECT,INSERT,UPDATE,DELETE}'),
            ('outbox_reconcile', '{SELECT,INSERT,UPDATE,DELETE}'), ('outbox_phantom', '{SELECT,INSERT,DELETE}'),
            ('relay_state', '{SELECT,INSERT,UPDATE}'), ('posthaste_audit', '{SELECT,INSERT}')) AS need(t, ps),
            pg_catalog.unnest(ps) AS p
        WHERE NOT CASE (SELECT relkind FROM pg_class WHERE oid = t::regclass::oid)
            WHEN 'S'::"char" THEN pg_catalog.has_sequence_privilege(t, p)
            ELSE pg_catalog.has_table_privilege(t, p) END), ''),
    pg_catalog.pg_has_role(o.relowner, 'USAGE')
        AND pg_catalog.has_database_privilege(current_database(), 'CREATE'),
    pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'),
    -- Tables that hide rows from the role, '' for none.
    coalesce((
        SELECT pg_catalog.string_agg(t, ', ' ORDER BY t)
        FROM pg_catalog.unnest('{outbox,outbox_mark,outbox_stream,outbox_dead,outbox_reconcile,outbox_phantom,
            relay_state,orders,credit_accounts,credit_entries}'::text[]) AS t
        WHERE pg_catalog.row_security_active(pg_catalog.to_regclass(t)::oid)), '')
FROM pg_class o WHERE o.oid = 'outbox'::regclass::oid
