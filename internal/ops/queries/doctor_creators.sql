-- The roles that may create in the schema of the tables although they are neither superusers nor may act as the
-- tables' owner; otherwise ''. PUBLIC is every role. pg_database_owner is the owner of the database.
SELECT coalesce(pg_catalog.string_agg(DISTINCT coalesce(r.rolname::text, 'PUBLIC'), ', '), '')
FROM pg_class o JOIN pg_namespace n ON n.oid = o.relnamespace JOIN pg_database d ON d.datname = current_database()
    CROSS JOIN LATERAL (SELECT a.grantee FROM pg_catalog.aclexplode(n.nspacl) a
        WHERE a.privilege_type = 'CREATE' UNION SELECT n.nspowner) c
    LEFT JOIN pg_roles r ON r.oid =
        CASE WHEN pg_catalog.pg_get_userbyid(c.grantee) = 'pg_database_owner' THEN d.datdba ELSE c.grantee END
WHERE o.oid = 'outbox'::regclass::oid
  AND CASE WHEN r.oid IS NULL THEN true ELSE NOT r.rolsuper AND NOT pg_catalog.pg_has_role(r.oid, o.relowner,
      'MEMBER') END
