-- The source that identifies this database in Redis; NULL if this is a copy for which no relay has set a new source.
SELECT CASE WHEN coalesce(r.system_identifier <> s.system_identifier, false)
    OR coalesce(r.database_oid <> d.oid, false) THEN NULL ELSE r.source::text END
FROM relay_state r, pg_control_system() s, pg_catalog.pg_database d
WHERE d.datname = pg_catalog.current_database()
