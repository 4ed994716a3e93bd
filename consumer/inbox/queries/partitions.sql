SELECT c.relname, pg_catalog.to_date(substring(c.relname FROM 8), 'YYYYMMDD')
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = pg_catalog.to_regclass('inbox')::oid AND c.relname ~ '^inbox_p[0-9]{8}$'::text
ORDER BY c.relname
