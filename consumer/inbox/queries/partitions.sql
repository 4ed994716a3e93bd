SELECT c.relname, to_date(substring(c.relname FROM 8), 'YYYYMMDD')
FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = to_regclass('inbox') AND c.relname ~ '^inbox_p[0-9]{8}$'
ORDER BY c.relname
