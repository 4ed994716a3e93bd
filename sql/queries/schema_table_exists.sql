-- Whether the search path has the table, and whether its schema is one that this role may not use.
SELECT pg_catalog.to_regclass($1::text) IS NOT NULL, EXISTS (
	SELECT FROM pg_catalog.pg_namespace n
	WHERE pg_catalog.current_setting('search_path'::text) = '"'::text || n.nspname::text || '", pg_temp'::text
		AND NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE'::text))
