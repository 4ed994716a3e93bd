-- Who this database is towards Redis; NULL while it is a copy on another server that no relay has given a name of its
-- own.
SELECT CASE WHEN coalesce(r.system_identifier <> s.system_identifier, false) THEN NULL ELSE r.source::text END
FROM relay_state r, pg_control_system() s
