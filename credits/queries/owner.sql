-- Who this database is towards Redis; NULL while it is a copy that no relay has given a name of its own.
SELECT CASE WHEN coalesce(r.system_identifier <> s.system_identifier, false)
    OR coalesce(r.database_oid <> d.oid, false) THEN NULL ELSE r.source::text END
FROM relay_state r, pg_control_system() s, pg_catalog.pg_database d
WHERE d.datname = pg_catalog.current_database()
