-- Whether this is a copy on another server than where it last led.
SELECT coalesce(r.system_identifier <> s.system_identifier, false) FROM relay_state r, pg_control_system() s
