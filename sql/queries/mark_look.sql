-- Takes a snapshot, then reads the sequence and the end of the WAL: the row without a transaction. The other rows
-- have, by transaction below $3, the numbers of the rows that the snapshot sees and the mark ($1, $2) does not settle.
-- They are found by their transaction: those that were running for the mark, and those after it. Each range in an
-- order that only the index of transactions has, and refused where nothing can be written: see sweep_parts.
WITH now AS MATERIALIZED (
    SELECT pg_current_snapshot()::text AS seen, greatest(h.high, $2::bigint) AS hi,
        pg_current_wal_insert_lsn()::text AS lsn
    FROM outbox_high h
)
SELECT seen, hi, lsn, NULL::xid8 AS xid, NULL::bigint[] AS seqs FROM now
WHERE NOT EXISTS (SELECT FROM outbox_part WHERE false FOR UPDATE)
UNION ALL
SELECT NULL, NULL, NULL, o.xid, pg_catalog.array_agg(o.seq)
FROM pg_catalog.generate_series(0, 15) AS p(part)
CROSS JOIN (
    SELECT x, x FROM pg_catalog.pg_snapshot_xip($1::pg_snapshot) x
    UNION ALL
    SELECT pg_catalog.pg_snapshot_xmax($1::pg_snapshot), pg_catalog.pg_snapshot_xmax(pg_current_snapshot())
) ids(first, last)
CROSS JOIN LATERAL (
    SELECT r.xid, r.seq FROM outbox_rows r
    WHERE r.part = p.part::smallint AND r.xid >= ids.first AND r.xid <= ids.last AND r.xid < $3::xid8
    ORDER BY r.xid
) o
GROUP BY o.xid
