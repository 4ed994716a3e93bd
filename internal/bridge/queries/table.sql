-- A table, view or partition by name; the rights that a bridge of it needs and this role lacks; the schema of the
-- bridge that it has; and its columns, with what a bridge does with their types.
SELECT c.relkind::text AS kind, c.oid IS NOT DISTINCT FROM pg_catalog.to_regclass('outbox')::oid AS own,
    coalesce((SELECT i.inhparent::regclass::text FROM pg_inherits i
        WHERE i.inhrelid = c.oid AND c.relispartition), '') AS parent,
    EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid AND c.relkind = 'r') AS inherited,
    ARRAY(SELECT need FROM (VALUES
            (pg_catalog.has_schema_privilege(n.oid, 'USAGE'), 'USAGE ON SCHEMA ' || pg_catalog.quote_ident(n.nspname)),
            (pg_catalog.has_table_privilege(c.oid, 'TRIGGER'), 'TRIGGER ON ' || c.oid::regclass::text),
            (pg_catalog.has_table_privilege(c.oid, 'SELECT'), 'SELECT ON ' || c.oid::regclass::text),
            (pg_catalog.has_schema_privilege(pg_catalog.current_schema(), 'CREATE'),
                'CREATE ON SCHEMA ' || pg_catalog.quote_ident(pg_catalog.current_schema())),
            (pg_catalog.has_table_privilege('outbox', 'SELECT'), 'SELECT ON outbox'),
            (pg_catalog.has_table_privilege('outbox', 'INSERT'), 'INSERT ON outbox')) AS r(has, need)
        WHERE NOT has) AS lacks,
    coalesce((SELECT p.pronamespace::regnamespace::text FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
        WHERE t.tgrelid = c.oid AND t.tgname = 'posthaste_bridge'), '') AS bridged,
    pg_catalog.current_schema()::text AS schema, current_user::text AS role, a.columns, a.types
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN LATERAL (
    SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum) AS columns, pg_catalog.array_agg(
        CASE WHEN t.typname IN ('uuid', 'jsonb', 'json', 'bpchar') AND t.typnamespace = 'pg_catalog'::regnamespace::oid
                THEN t.typname::text
            WHEN t.typcategory = 'S' THEN 'text'
            ELSE pg_catalog.format_type(t.oid, NULL) END
        || CASE WHEN t.oid = a.atttypid THEN '' ELSE ' domain' END ORDER BY a.attnum) AS types
    FROM pg_attribute a JOIN pg_type d ON d.oid = a.atttypid
    JOIN pg_type t ON t.oid = CASE WHEN d.typtype = 'd' THEN d.typbasetype ELSE d.oid END
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
) a
WHERE n.nspname = $1 AND c.relname = $2 AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
