-- What is a view now was a table in earlier versions.
SELECT EXISTS (SELECT FROM pg_class WHERE oid = pg_catalog.to_regclass($1)::oid AND relkind = 'v')
