-- The functions of Postgres that this role may not call.
SELECT DISTINCT proname::text FROM pg_proc
WHERE pronamespace = 'pg_catalog'::regnamespace::oid AND NOT pg_catalog.has_function_privilege(oid, 'EXECUTE')
