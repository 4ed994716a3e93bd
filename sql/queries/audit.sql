-- Of each part with rows that are owed the number of one of the oldest transaction: as in sweep_parts, of each transaction that
-- the mark knows to be running, and behind it. The position is read after the rows (materialized first), so that it is behind
-- the commit of each of them.
WITH first AS MATERIALIZED (
    SELECT m.part, o.seq FROM outbox_settled m
    CROSS JOIN LATERAL (
        SELECT f.seq FROM (
            SELECT x, x FROM pg_catalog.unnest(m.running) AS x
            UNION ALL
            SELECT pg_catalog.pg_snapshot_xmax(m.settled), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
        ) ids(first, last)
        CROSS JOIN LATERAL (
            SELECT r.seq, r.xid FROM outbox r
            WHERE r.part = m.part AND r.xid >= ids.first AND r.xid <= ids.last
              AND (m.pass IS NULL OR r.seq > m.cursor OR NOT pg_catalog.pg_visible_in_snapshot(r.xid, m.pass))
              AND NOT EXISTS (SELECT FROM outbox_dead d WHERE d.id = r.id AND d.row_seq = r.seq OFFSET 0)
            ORDER BY r.xid LIMIT 1
        ) f
        ORDER BY f.xid LIMIT 1
    ) o
)
SELECT pg_current_wal_insert_lsn()::text, pg_current_wal_flush_lsn()::text, f.parts, f.seqs
FROM (SELECT coalesce(pg_catalog.array_agg(part), '{}') AS parts, coalesce(pg_catalog.array_agg(seq), '{}') AS seqs FROM first) f
