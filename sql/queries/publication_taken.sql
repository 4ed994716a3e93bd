-- The owner and the tables of publication $1.
SELECT pg_catalog.pg_get_userbyid(p.pubowner)::text, coalesce((
    SELECT 'table '::text || pg_catalog.string_agg(r.prrelid::pg_catalog.regclass::text, ', '::text)
    FROM pg_publication_rel r WHERE r.prpubid = p.oid), 'no table'::text)
FROM pg_publication p WHERE p.pubname = $1::name
