-- The bridges of this schema: their objects' name, the text of the function, its comment, the table that the trigger is
-- on ('' if there is no trigger), whether it fires for writers, and how many rows it has copied (-1: not readable).
SELECT p.proname::text AS name, p.prosrc AS body,
    coalesce(pg_catalog.obj_description(p.oid, 'pg_proc'), '{}') AS config,
    coalesce(n.nspname::text, '') AS in_schema, coalesce(c.relname::text, '') AS table,
    coalesce(t.tgenabled IN ('O', 'A'), false) AS enabled,
    CASE WHEN s.oid IS NULL OR NOT pg_catalog.has_sequence_privilege(s.oid, 'SELECT') THEN (-1)::bigint
        ELSE coalesce(pg_catalog.pg_sequence_last_value(s.oid::regclass), 0) END AS copied
FROM pg_proc p
LEFT JOIN pg_class s ON s.relname = p.proname AND s.relnamespace = p.pronamespace AND s.relkind = 'S'
LEFT JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgparentid = 0::oid
LEFT JOIN pg_class c ON c.oid = t.tgrelid
LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = pg_catalog.current_schema())
    AND p.proname::text ~ '^outbox_bridge_[0-9a-f]{8}$' AND p.prorettype = 'pg_catalog.trigger'::regtype::oid
ORDER BY n.nspname, c.relname, p.proname
