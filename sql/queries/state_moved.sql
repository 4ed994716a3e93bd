-- Whether this is a copy on another server than where it last led; or, where none has led yet, whether it has rows of
-- transactions that are yet to come here.
SELECT CASE WHEN r.system_identifier IS NOT NULL THEN r.system_identifier <> s.system_identifier
    ELSE EXISTS (
        SELECT FROM pg_catalog.generate_series(0, 15) AS p(part)
        CROSS JOIN LATERAL (SELECT xid FROM outbox_rows WHERE part = p.part::smallint ORDER BY xid DESC LIMIT 1) o
        WHERE o.xid >= pg_catalog.pg_snapshot_xmax(pg_current_snapshot()))
    END
FROM relay_state r, pg_control_system() s
