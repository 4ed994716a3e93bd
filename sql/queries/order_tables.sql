-- The tables that an order is written to and that this role cannot use; to_regclass is NULL for one that is not there.
SELECT coalesce(string_agg(DISTINCT name, ', '), '') FROM (VALUES ('orders', 'SELECT'), ('orders', 'INSERT'), ('outbox', 'INSERT')) AS t(name, privilege)
WHERE NOT coalesce(has_any_column_privilege(to_regclass(name), privilege), false)
