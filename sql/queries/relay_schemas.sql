-- The other schemas that have an outbox of a role whose rights this one has; see version_table.sql.
SELECT n.nspname::text
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_roles owner ON owner.oid = c.relowner JOIN pg_roles me ON me.rolname = current_user
WHERE c.relname = 'relay_state' AND c.relkind = 'r' AND n.nspname IS DISTINCT FROM pg_catalog.current_schema()
  AND CASE WHEN me.rolsuper THEN owner.rolsuper ELSE pg_catalog.pg_has_role(owner.oid, 'USAGE') END
  AND EXISTS (SELECT FROM pg_class v WHERE v.relname = 'posthaste_migrations' AND v.relnamespace = n.oid)
