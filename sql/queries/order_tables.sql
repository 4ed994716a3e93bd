-- The tables that an order is written to and that this role cannot use; to_regclass is NULL for one that does not
-- exist.
SELECT coalesce(pg_catalog.string_agg(DISTINCT name, ', '), '')
FROM (VALUES ('orders', 'SELECT'), ('orders', 'INSERT'), ('outbox', 'INSERT')) AS t(name, privilege)
WHERE NOT coalesce(pg_catalog.has_any_column_privilege(pg_catalog.to_regclass(name), privilege), false)
