-- Whether this is a copy: another database than the one that last led, on this server or on another, or one with marks
-- of another server, which see transactions that are yet to come here; or one with rows of such transactions: a clone
-- has no such mark if the original has settled nothing since the clone began to follow it.
SELECT coalesce(outbox_copied(r), false) OR EXISTS (
        -- The newest of the marks that count: those before one of all parts do not.
        SELECT FROM (SELECT id, settled, pass FROM outbox_mark ORDER BY id DESC LIMIT 100) m
        WHERE m.id >= coalesce((SELECT pg_catalog.max(id) FROM outbox_mark
                WHERE part = (-1)::smallint AND settled IS NOT NULL), 0::bigint)
            AND greatest(pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(m.pass))
                > pg_catalog.pg_snapshot_xmax(pg_current_snapshot()))
    OR EXISTS (
        SELECT FROM pg_catalog.generate_series(0, 15) AS p(part)
        CROSS JOIN LATERAL (SELECT xid FROM outbox_rows WHERE part = p.part::smallint ORDER BY xid DESC LIMIT 1) o
        WHERE o.xid >= pg_catalog.pg_snapshot_xmax(pg_current_snapshot()))
FROM relay_state r
